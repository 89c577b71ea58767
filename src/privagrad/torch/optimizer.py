"""Any torch optimizer on private gradients: bound, sum, noise, step."""

from __future__ import annotations

import numbers
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from privagrad._internal import validate
from privagrad.privacy.bounded import Part, Share
from privagrad.privacy.mechanism import GaussianSum
from privagrad.privacy.noise import RandomSource
from privagrad.torch.ellipsoids import TrainingEllipsoid
from privagrad.torch.per_example.chunked import Bound, bounded_sums
from privagrad.torch.per_example.gradients import PerExampleGradient
from privagrad.torch.per_example.tape import Tape
from privagrad.torch.processes import Processes
from privagrad.torch.scales import Scale, accurate, matrix_shape

FLOAT32 = 2.0**-10
"""What norms and sums in float32 may be off, counted as sensitivity."""

Observer = Callable[[int, dict[str, list[PerExampleGradient]], float], None]
"""Is shown the number of examples, their gradients, and the factor that these still need."""


class ReleaseTerms(NamedTuple):
    """How one batch is bounded and released: the same for all its parts and in all processes."""

    noise_multiplier: float
    max_grad_norm: float
    expected_batch_size: float


def _of_original(name: str) -> Any:
    """An attribute of `original_optimizer`, read and written there."""

    def read(self: PrivateOptimizer) -> Any:
        return getattr(self.original_optimizer, name)

    def write(self: PrivateOptimizer, value: Any) -> None:
        setattr(self.original_optimizer, name, value)

    return property(read, write)


class PrivateOptimizer(Optimizer):
    """`step()` turns what the backward pass left on the tape into private gradients.

    g_i are the examples' gradients, C the scales, B = max_grad_norm:

        p.grad = (Σ_i g_i min(1, B/‖g_i‖_C) + N(0, z² B² C⁻¹)) / expected_batch_size

    for mean losses; not divided for sums. Examples whose gradients are not finite count as 0.
    `noise_multiplier`, `max_grad_norm` and `expected_batch_size` may be assigned: they count from
    the next batch on.

    Parameters
    ----------
    optimizer : Optimizer
        Takes the step on the private gradients.
    tape : Tape
    ellipsoid : TrainingEllipsoid
    terms : ReleaseTerms
    source : RandomSource
    processes : Processes
    charge : callable
        Called with the noise multiplier of every release before it is made.

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
        *,
        source: RandomSource,
        processes: Processes,
        charge: Callable[[float], None],
    ) -> None:
        self.original_optimizer = optimizer
        self.tape, self.loss_reduction = tape, tape.loss_reduction
        self.noise_multiplier, self.max_grad_norm = terms.noise_multiplier, terms.max_grad_norm
        self.expected_batch_size = self._batch_size = terms.expected_batch_size
        self.learned_ellipsoid = ellipsoid.learned
        self._last = self._waits = True
        self.observe: Observer | None = None
        self.non_finite = self.releases = 0
        self.step_done: Callable[[], None] = lambda: None
        self._source, self._processes, self._charge = source, processes, charge
        self._pool: ThreadPoolExecutor | None = None
        self._dim = sum(parameter.numel() for parameter in tape.parameters.values())
        self._drop_batch()
        self.scales = ellipsoid.scales

    @property
    def noise_multiplier(self) -> float:
        """z, of the next release; what it is charged for. 0: without noise."""
        return self._noise_multiplier

    @noise_multiplier.setter
    def noise_multiplier(self, value: float) -> None:
        self._noise_multiplier = noise_of(value)

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
                self._add_batch()
                if not self.last_chunk:
                    return loss
                self._release()
            except BaseException:
                # A second try must not add the same rows once more.
                self._drop_batch()
                raise
        self._drop_batch()
        self.original_optimizer.step()
        self.step_done()
        return loss

    def begin_part(self, first: bool, last: bool) -> None:
        """A batch, or a part of one, comes next; what was left of a batch broken off is dropped."""
        if first:
            self._drop_batch()
        self._last, self._waits = last, True

    def _drop_batch(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._agreed: ReleaseTerms | None = None

    def _terms(self) -> ReleaseTerms:
        """What the current batch is bounded and released with; fixed by its first part."""
        if self._agreed is None:
            own = ReleaseTerms(self.noise_multiplier, self.max_grad_norm, self.expected_batch_size)
            if self._processes.count > 1:
                values = torch.tensor(own, dtype=torch.float64)
                self._processes.agree(values)
                own = ReleaseTerms(*values.tolist())
            self._agreed = own
        return self._agreed

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.tape.forget()
        self.original_optimizer.zero_grad(set_to_none)

    def _add_batch(self) -> None:
        """Bound the gradients that the last backward pass left and add them to the sums."""
        count, gradients = self.tape.collect()
        if not (self.last_chunk or self._waits):
            raise RuntimeError(
                "Expected one step() for each part of a batch, found a second one: its examples "
                "would count twice."
            )
        self._waits = False
        radius = self._terms().max_grad_norm
        if not gradients:
            return
        factor = float(count) if self.loss_reduction == "mean" else 1.0
        if self.observe is not None:
            self.observe(count, gradients, factor)
        all_parts = [(name, part) for name, parts in gradients.items() for part in parts]
        totals, non_finite = bounded_sums(all_parts, self.scales, Bound(radius, factor))
        self.non_finite += non_finite
        for name, part, total in totals:
            if name not in self._sums:
                shape = matrix_shape(self.tape.parameters[name])
                if total.shape == shape:
                    self._sums[name] = total
                    continue
                self._sums[name] = torch.zeros(shape, dtype=total.dtype, device=total.device)
            self._sums[name][part] += total

    def _release(self) -> None:
        noise, radius, divisor = self._terms()
        self._charge(noise)
        self.releases += 1
        totals = {name: self._sum_of(name, p) for name, p in self.tape.parameters.items()}
        if noise > 0:
            mechanism = GaussianSum(
                self._dim,
                noise,
                self._batch_size,
                slack=FLOAT32 * (1 + self._batch_size * 2.0**-10),
            )
            parts = [
                Part(total.numpy(), self.scales[name].root, total.numpy())
                for name, total in totals.items()
            ]
            share = None
            if self._processes.count > 1:
                share = Share(self._processes.first, self._processes.sum_array)
            bounded = mechanism.sum_of_parts(parts, radius, share)
            mechanism.release(bounded, self._source, self._threads())
            factor = self._batch_size
        else:
            for total in totals.values():
                self._processes.sum(total)
            factor = 1.0
        if self.loss_reduction == "mean":
            factor /= divisor
        for name, parameter in self.tape.parameters.items():
            gradient = totals[name].view(parameter.shape)
            if factor != 1:
                gradient.mul_(factor)
            parameter.grad = gradient.to(parameter.device, parameter.dtype)
        if self.learned_ellipsoid is not None and noise > 0:
            self._learn_ellipsoid(self._terms())

    def _learn_ellipsoid(self, terms: ReleaseTerms) -> None:
        """Show the released gradients to what learns the ellipsoid; takes the new one, if any."""
        assert self.learned_ellipsoid is not None
        mean, batch_size = self.loss_reduction == "mean", terms.expected_batch_size
        radius = terms.max_grad_norm / (batch_size if mean else 1.0)
        learned = self.learned_ellipsoid.learn(
            self.tape.parameters,
            self.scales,
            noise_std=terms.noise_multiplier * radius,
            examples=batch_size if mean else 1 / batch_size,
        )
        if learned is not None:
            self.scales = learned

    def _sum_of(self, name: str, parameter: Tensor) -> Tensor:
        """The bounded sum of all parts of the batch, flat, on the processor that adds the noise."""
        total = self._sums.pop(name, None)
        if total is None:
            kind = accurate(parameter.detach()).dtype
            return torch.zeros(parameter.numel(), dtype=kind)
        return total.reshape(-1).cpu().contiguous()

    def _threads(self) -> ThreadPoolExecutor | None:
        if self._pool is None and (os.cpu_count() or 1) > 1:
            self._pool = ThreadPoolExecutor(min(4, os.cpu_count() or 1))
        return self._pool

    @property
    def writes(self) -> bool:
        """Whether this process writes files for all."""
        return self._processes.first

    @property
    def params(self) -> list[nn.Parameter]:
        return list(self.tape.parameters.values())

    param_groups: list[dict[str, Any]] = _of_original("param_groups")
    state: Any = _of_original("state")
    defaults: dict[str, Any] = _of_original("defaults")

    def state_dict(self) -> dict[str, Any]:
        return self.original_optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.original_optimizer.load_state_dict(state_dict)

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
