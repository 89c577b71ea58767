"""Any torch optimizer on private gradients: bound, sum, noise, step."""

from __future__ import annotations

import numbers
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from privagrad._internal import validate
from privagrad.privacy.noise import RandomSource
from privagrad.torch.agreement import agreed_terms, refuse_other_payments, scales_hash
from privagrad.torch.clipping import AdaptiveClipping, Clipping
from privagrad.torch.ellipsoids import TrainingEllipsoid
from privagrad.torch.opacus_names import hint_for_optimizer
from privagrad.torch.per_example.gradients import PerExampleGradient
from privagrad.torch.per_example.tape import Tape
from privagrad.torch.release import Count, Released, ReleaseTerms, SumRelease
from privagrad.torch.scales import Scale, accurate, matrix_shape
from privagrad.torch.shares import Shares
from privagrad.torch.steps import step_of
from privagrad.torch.wrapped import NoiseAware, WrappedOptimizer

Observer = Callable[[int, dict[str, list[PerExampleGradient]], float], None]
"""Is shown the number of examples, their gradients, and the factor that these still need."""


class PrivateOptimizer(WrappedOptimizer):
    """`step()` turns what the backward pass left on the tape into private gradients.

    g_i are the examples' gradients, C the scales, B = max_grad_norm:

        p.grad = (Σ_i g_i min(1, B/‖g_i‖_C) + N(0, z² B² C⁻¹)) / expected_batch_size

    for mean losses; not divided for sums; other `clipping` has other factors in place of the
    minimum. Examples whose gradients are not finite count as 0.
    `noise_multiplier`, `max_grad_norm` and `expected_batch_size` may be assigned: they count from
    the next batch on.

    Parameters
    ----------
    optimizer : Optimizer
        Takes the step on the private gradients.
    tape : Tape
    ellipsoid : TrainingEllipsoid
    terms : ReleaseTerms
    clipping : Clipping
    source : RandomSource
        Of this process alone.
    shares : Shares
        Of the tape's parameters: of several processes each releases its own, and steps its own
        where `optimizer` treats every coordinate by itself.
    charge : callable
        Called with the noise multiplier of every release before it is made; returns whether a
        batch of the data loader pays for it.
    most_rows : int, optional
        Given where users are protected: how many rows of one count at most. g_i is then the
        average of a user's bounded gradients, of all of the user's rows in the data set.
    bands : int
        Over how many releases in a row the noise is correlated.

    Guarantees
    ----------
    A Gaussian mechanism of noise multiplier z for replacing one example's gradient by zero, up
    to the rounding of float32, for which the sensitivity is taken 2⁻¹⁰ larger. Rounding errors
    of sums that cancel to many digits within one example are not covered.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        tape: Tape,
        ellipsoid: TrainingEllipsoid,
        terms: ReleaseTerms,
        clipping: Clipping,
        *,
        source: RandomSource,
        shares: Shares,
        charge: Callable[[float], bool],
        most_rows: int | None = None,
        bands: int = 1,
    ) -> None:
        super().__init__(optimizer)
        self.clipping = clipping
        self.tape, self.loss_reduction = tape, tape.loss_reduction
        self.noise_multiplier, self.max_grad_norm = terms.noise_multiplier, terms.max_grad_norm
        self.expected_batch_size = terms.expected_batch_size
        self.learned_ellipsoid = ellipsoid.learned
        self._step = step_of(optimizer, tape.parameters, shares)
        self._last = self._waits = True
        self.observe: Observer | None = None
        self.order_of_rows = 0.0
        self.non_finite = self.releases = self._batches = 0
        self.step_done: Callable[[], None] = lambda: None
        self._processes, self._charge = shares.processes, charge
        self._of_users = most_rows is not None
        self._release_sums = SumRelease(
            source, shares, terms.expected_batch_size, most_rows or 1, bands
        )
        self._number: int | None = None
        self.shares: Tensor | None = None
        self._step_hooks: list[Callable[[PrivateOptimizer], None]] = []
        self._drop_batch()
        self.scales = ellipsoid.scales

    @property
    def noise_multiplier(self) -> float:
        """z, of the next release; what it is charged for. 0: without noise."""
        return self._noise_multiplier

    @noise_multiplier.setter
    def noise_multiplier(self, value: float) -> None:
        noise = noise_of(value)
        self.clipping.check(noise)
        self._noise_multiplier = noise

    @property
    def max_grad_norm(self) -> float:
        """B, of the next batch."""
        return self._max_grad_norm

    @max_grad_norm.setter
    def max_grad_norm(self, value: float) -> None:
        self._max_grad_norm = validate.positive("max_grad_norm", value)

    @property
    def expected_batch_size(self) -> float:
        """What the next noisy sum is divided by, where losses are means."""
        return self._divisor

    @expected_batch_size.setter
    def expected_batch_size(self, value: float) -> None:
        self._divisor = validate.positive("expected_batch_size", value)

    @property
    def scales(self) -> dict[str, Scale]:
        """C; a sum that was begun in another ellipsoid is dropped."""
        return self._scales

    @scales.setter
    def scales(self, scales: dict[str, Scale]) -> None:
        self._drop_batch()
        self._scales = scales
        self._release_sums.restart()
        if self._processes.count > 1:
            self._scales_hash = scales_hash(scales.values())

    @property
    def last_chunk(self) -> bool:
        """Whether the next `step()` completes a batch; only the data loader can tell."""
        return self._last

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One private step; or, for all but the last part of a large batch, its part of the sum."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            try:
                number = self._number
                self._add_batch()
                if not self.last_chunk:
                    return loss
                self._release(number)
            except BaseException:
                # A second try must not add the same rows once more.
                self._drop_batch()
                raise
        self._drop_batch()
        for hook in self._step_hooks:
            hook(self)
        self._step.step()
        self.step_done()
        return loss

    def begin_part(
        self,
        first: bool,
        last: bool,
        shares: Tensor | None = None,
        number: int | None = None,
    ) -> None:
        """A batch, or a part of one, comes next; what was left of a batch broken off is dropped.

        `shares` is with how much each of its rows counts, where users are protected; `number` the
        batch's, where noise is correlated.
        """
        if first:
            self._drop_batch()
            self._batches += 1
        self._last, self._waits, self.shares, self._number = last, True, shares, number

    def _drop_batch(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._count = 0.0
        self._agreed: ReleaseTerms | None = None

    def _terms(self) -> ReleaseTerms:
        """What the current batch is bounded and released with; fixed by its first part."""
        if self._agreed is None:
            own = ReleaseTerms(self.noise_multiplier, self.max_grad_norm, self.expected_batch_size)
            needs_whole = bool(self._step_hooks) or self.learned_ellipsoid is not None
            needs_whole |= self._step.needs_whole
            if self._processes.count > 1:
                alike = {
                    "number of batches drawn": self._batches,
                    "number of releases": self.releases,
                    "order of the data loader's rows (a hash of it)": self.order_of_rows,
                    "ellipsoid (a hash of it)": self._scales_hash,
                    "optimizer's options (a hash of them)": self._step.options_hash,
                }
                own, needs_whole = agreed_terms(self._processes, own, alike, needs_whole)
            self._agreed, self._whole = own, needs_whole
        return self._agreed

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.tape.forget()
        self._step.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's state, of whole parameters; of several processes, call it in each."""
        return self._step.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take a state of whole parameters, made by any number of processes."""
        self._step.load_state_dict(state_dict)

    def _add_batch(self) -> None:
        """Bound the gradients that the last backward pass left and add them to the sums."""
        # First, so that processes that differ refuse together.
        radius = self._terms().max_grad_norm
        count, gradients = self.tape.collect()
        if not (self.last_chunk or self._waits):
            raise RuntimeError(
                "Expected one step() for each part of a batch, found a second one: its examples "
                "would count twice."
            )
        self._waits = False
        shares = self._take_shares(count)
        if not gradients:
            return
        factor = float(count) if self.loss_reduction == "mean" else 1.0
        if self.observe is not None:
            self.observe(count, gradients, factor)
        all_parts = [(name, part) for name, parts in gradients.items() for part in parts]
        bounded = self.clipping.bounded(all_parts, self.scales, radius, factor, shares)
        self.non_finite += len(bounded.finite) - int(bounded.finite.sum())
        if self.clipping.counts:
            within = bounded.weights == factor
            self._count += float(torch.where(bounded.finite, within.double() - 0.5, 0.0).sum())
        for name, part, total in bounded.totals:
            if name not in self._sums:
                shape = matrix_shape(self.tape.parameters[name])
                if total.shape == shape:
                    self._sums[name] = total
                    continue
                self._sums[name] = torch.zeros(shape, dtype=total.dtype, device=total.device)
            self._sums[name][part] += total

    def _take_shares(self, count: int) -> Tensor | None:
        """With how much each row of this step counts, for this step alone."""
        shares, self.shares = self.shares, None
        if self._of_users and (shares is None or len(shares) != count):
            raise RuntimeError(
                "Expected one step() on each batch of the private data loader with groups=, found "
                "a step on other rows, or a second one: whose rows these are is not known, and a "
                "user with many of them would move the sum beyond the bound. Call the module on "
                "the batch alone, and on other rows in eval mode."
            )
        return shares

    def _release(self, number: int | None) -> None:
        terms = self._terms()
        adaptive = self.clipping if isinstance(self.clipping, AdaptiveClipping) else None
        count = None
        if adaptive is not None:
            count = Count(self._count, adaptive.count_share(terms.noise_multiplier))
        self._release_sums.check(terms)
        refuse_other_payments(self._processes, self._charge(terms.noise_multiplier))
        self.releases += 1
        totals = {name: self._sum_of(name, p) for name, p in self.tape.parameters.items()}
        released = self._release_sums(totals, self.scales, terms, count, number)
        factor = released.factor
        if self.loss_reduction == "mean":
            factor /= terms.expected_batch_size
        self._step.set_gradients(totals, factor, self._whole)
        self._show_noise(released, terms)
        if adaptive is not None:
            unclipped = 0.5 + released.counted / self._release_sums.batch_size
            self.max_grad_norm = adaptive.next_radius(terms.max_grad_norm, unclipped)

    def _show_noise(self, released: Released, terms: ReleaseTerms) -> None:
        """Tell those who use it how noisy the released gradients are.

        The ellipsoid may be learned from them; a new one is taken at once.
        """
        mean, batch_size = self.loss_reduction == "mean", terms.expected_batch_size
        noise_std = released.noise_std / (batch_size if mean else 1.0)
        if isinstance(self.original_optimizer, NoiseAware):
            variances = {
                name: (noise_std**2 / self.scales[name].full).view(parameter.shape)
                for name, parameter in self.tape.parameters.items()
            }
            self._step.set_noise_variances(variances)
        if self.learned_ellipsoid is not None and terms.noise_multiplier > 0:
            learned = self.learned_ellipsoid.learn(
                self.tape.parameters,
                self.scales,
                noise_std=noise_std,
                examples=batch_size if mean else 1 / batch_size,
            )
            if learned is not None:
                TrainingEllipsoid(learned).agree(self._processes)
                self.scales = learned

    def _sum_of(self, name: str, parameter: Tensor) -> Tensor:
        """The bounded sum of all parts of the batch, flat, on the processor that adds the noise."""
        total = self._sums.pop(name, None)
        if total is None:
            kind = accurate(parameter.detach()).dtype
            return torch.zeros(parameter.numel(), dtype=kind)
        return total.reshape(-1).cpu().contiguous()

    @property
    def writes(self) -> bool:
        """Whether this process writes files for all."""
        return self._processes.first

    @property
    def params(self) -> list[nn.Parameter]:
        return list(self.tape.parameters.values())

    def attach_step_hook(self, hook: Callable[[PrivateOptimizer], None]) -> None:
        """Call `hook(optimizer)` in every step, once the gradients are private.

        As in Opacus; not for the parts of a batch that release nothing. It costs no privacy.
        """
        self._step_hooks.append(hook)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """What GradScaler asks for before it steps."""
        raise RuntimeError(
            "Expected optimizer.step(), found GradScaler.step(optimizer): a scaled loss makes "
            "every example's gradient longer than its bound. Leave the scaler out, or construct "
            "it with enabled=False: norms and sums are taken in float32 anyway."
        )

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(hint_for_optimizer(name), name=name, obj=self)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        raise RuntimeError(
            "Expected the parameter groups as they were when make_private was called, found a new "
            "one: its gradients would be neither bounded nor noisy. Add it before make_private."
        )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "Expected one PrivateOptimizer for one private training, found a copy or a pickle of "
            "it: a copy would release without being charged. Keep its state with state_dict() or "
            "engine.save_checkpoint(), or call make_private for another training."
        )

    def __setstate__(self, state: Any) -> None:
        """Not torch's, which would change `step` of the whole class."""
        self.__reduce_ex__(0)

    def __repr__(self) -> str:
        return f"Private{self.original_optimizer!r}"


def noise_of(value: Any) -> float:
    """`value` as a noise multiplier: 0, which is no noise, or positive and finite."""
    zero = isinstance(value, numbers.Real) and not isinstance(value, bool) and value == 0
    return 0.0 if zero else validate.positive("noise_multiplier", value)
