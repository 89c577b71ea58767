"""PrivacyEngine: private training behind the verbs of Opacus."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from privagrad._internal import validate
from privagrad.privacy.accounting import PrivacyPlan, PrivacyReport
from privagrad.privacy.bands import Correlation, choose_bands, with_bands
from privagrad.privacy.events import training_event
from privagrad.privacy.noise import Noise, RandomState, noise_kind
from privagrad.privacy.sampling import Batches
from privagrad.privacy.users import MOST_ROWS
from privagrad.torch import checkpoints
from privagrad.torch.accountant import Accountant
from privagrad.torch.agreement import (
    agreed_run,
    agreed_seed,
    description,
    refuse_differences,
    refuse_shared_streams,
)
from privagrad.torch.arguments import (
    criterion_of,
    noise_source,
    sampling_of,
    trainable,
    uncompiled,
)
from privagrad.torch.calibration import ACCOUNTANTS
from privagrad.torch.charging import BatchCharges
from privagrad.torch.checkpoints import Stateful
from privagrad.torch.clipping import Norms, choose_clipping
from privagrad.torch.ellipsoids import EllipsoidChoice, choose_ellipsoid
from privagrad.torch.loaders import PrivateLoader, original_loader, refuse_random_rows
from privagrad.torch.module import PrivateModule
from privagrad.torch.moments import Per, second_moments
from privagrad.torch.optimizer import PrivateOptimizer, noise_of
from privagrad.torch.per_example.tape import Tape
from privagrad.torch.processes import Processes
from privagrad.torch.release import ReleaseTerms
from privagrad.torch.shares import Shares
from privagrad.torch.turns import (
    MOST_IN_MEMORY,
    bands_of,
    refuse_learned,
    refuse_with_correlation,
)
from privagrad.torch.unwrapped import PrivateHooks
from privagrad.torch.users import Grouping, refuse_with_users
from privagrad.torch.validator import ModuleValidator
from privagrad.torch.wrapped import is_elementwise

PrivateTraining = Any
"""(module, optimizer, data loader); in ghost mode (module, optimizer, criterion, data loader)."""


class PrivacyEngine:
    """Makes a module, an optimizer and a data loader private, and counts every release.

    The training loop stays as it is: ``loss.backward(); optimizer.step()``.

    Parameters
    ----------
    accountant : str
        Accepted so that scripts written for Opacus run: privacy loss distributions are always
        used, which are as tight as its "prv" and tighter than its "rdp".
    secure_mode : bool
        Likewise: noise and samples always come from a secure source, unless a seed is given.
    """

    def __init__(self, *, accountant: str = "pld", secure_mode: bool = True) -> None:
        validate.choice("accountant", accountant, ACCOUNTANTS)
        self.secure_mode = secure_mode
        self.accountant = Accountant()
        self.seeded = False
        self.verified = True
        self._noises: set[Noise] = set()

    def make_private(
        self,
        *,
        module: nn.Module,
        optimizer: Optimizer,
        data_loader: DataLoader[Any],
        noise_multiplier: float,
        max_grad_norm: Norms,
        ellipsoid: EllipsoidChoice = None,
        public_loader: Iterable[Any] | None = None,
        criterion: Callable[[Any, Any], Tensor] | None = None,
        per: Per = "coordinate",
        floor: float = 0.1,
        batch_first: bool = True,
        loss_reduction: str = "mean",
        poisson_sampling: bool = True,
        max_physical_batch_size: int | None = None,
        clipping: str = "flat",
        noise_generator: torch.Generator | None = None,
        random_state: RandomState = None,
        grad_sample_mode: str = "hooks",
        wrap_model: bool = True,
        rand_on_empty: bool = False,
        verify: bool = True,
        noise: Noise = "gaussian",
        groups: Any = None,
        max_rows_per_user: int = MOST_ROWS,
        correlation: int | None = None,
        **clipping_options: Any,
    ) -> PrivateTraining:
        """The private module, optimizer and data loader.

        Parameters
        ----------
        module : Module
        optimizer : Optimizer
            Of the module's parameters.
        data_loader : DataLoader
        noise_multiplier : float
            Noise over the bound on one example's gradient; 0: no noise, and epsilon is infinite.
            `optimizer.noise_multiplier` may be changed later, by a schedule or by hand: every
            release is charged for the noise that it is made with.
        max_grad_norm : float
            The radius B of the ellipsoid {g : Σ C_j g_j² ≤ B²} that gradients are bounded to. A
            list, or a dict by name, with clipping="per_layer".
        ellipsoid : {"pagan", "pasan", "scale-then-privatize"}, sequence or mapping, optional
            C. None: a ball, which is DP-SGD. Positive tensors: in the order of the module's
            trainable parameters, or by name. "pagan" and "pasan": powers of the gradients' second
            moments, from `public_loader`, or without it from the private gradients during
            training; scaled so that max_grad_norm means what it means for a ball.
            "scale-then-privatize": 1/v in every step, v being Adam's running mean of the squares
            of the private gradients so far, as much noise in total as in a ball.
        public_loader : iterable, optional
            Batches (inputs, targets) of PUBLIC data.
        criterion : callable, optional
            The loss on public data: see `second_moments`. Training never needs it.
        per : {"coordinate", "row", "tensor"}
            Whether public moments are kept for each coordinate, row or tensor.
        floor : float
            What is added to public moments: see `SecondMoments`.
        batch_first : bool
            Whether the examples are in the first dimension of the module's inputs; False: in the
            second.
        loss_reduction : {"mean", "sum"}
            How the loss puts the losses of examples together.
        poisson_sampling : bool
            True: batches hold each row that the data loader's sampler chooses from independently
            with the same probability; samplers of which these rows are not known are refused.
            False: the data loader's own order, under the replace-one relation: a pass over the
            rows costs one release without amplification.
        max_physical_batch_size : int, optional
            Batches come in parts of at most this size; call `step()` after each.
        noise_generator : torch.Generator, optional
            Where a seed for tests is drawn from: such a run is NOT private, and the report says so.
        random_state : int or Generator, optional
            Likewise, the seed itself.
        clipping : {"flat", "per_layer", "automatic", "adaptive"}
            How an example's gradient g is bounded to B; all with any ellipsoid. "flat": shrunk to
            norm B. "per_layer": each tensor to its own bound B_p, with B² = Σ B_p². "automatic":
            g B/(‖g‖ + γ), with `gamma=`. "adaptive": "flat" with a B that follows a quantile of
            the norms: see `AdaptiveClipping` for its options.
        grad_sample_mode : str
            As in Opacus; all modes give the same gradients. "ghost" hands over the criterion, which
            is then returned as a `PerExampleLoss`, before the data loader.
        wrap_model : bool
            False: the module itself becomes private and keeps its class; in its place a
            `PrivateHooks` is returned, whose `cleanup()` ends that.
        rand_on_empty : bool
            As in Opacus, where True puts random numbers into batches without rows; refused.
        verify : bool
            Whether modules, losses and batches are checked to keep examples apart, and steps to use
            batches of the data loader. False: you vouch for it, and the report says so.
        noise : {"gaussian", "discrete"}
            Gaussian noise rounded to a grid, or an exact discrete Gaussian: much slower, at the
            same cost, without any rounding in the noise.
        groups : sequence, optional
            The user of each row of the data set: any values that can be told apart. All rows of a
            user together are protected then. Training minimises the mean over users of the mean
            over each user's rows. Batches are drawn of users, with all of their rows: the
            `batch_size` of the data loader is the expected number of users.
        max_rows_per_user : int
            With `groups`, how many rows of a user count, at most; of more, a random choice of
            them. It must be public. The noise grows a little with it.
        correlation : int, optional
            Over how many steps the noise is correlated, so that a part of it cancels in the sum of
            the steps: see `privagrad.minimize`. Rows then take turns, noise and bound stay as they
            are, and every step is one on a batch of the data loader. `make_private_with_epsilon`
            also takes "auto".
        **clipping_options : Any
            Of `AutomaticClipping` or `AdaptiveClipping`.
        """
        self.accountant.check_process()
        refuse_random_rows(rand_on_empty)
        multiplier = noise_of(noise_multiplier)
        validate.choice("loss_reduction", loss_reduction, ("mean", "sum"))
        loss = criterion_of(grad_sample_mode, criterion, loss_reduction, batch_first)
        processes = Processes.of(module)
        if isinstance(module, DistributedDataParallel):
            if not wrap_model:
                raise ValueError(
                    "Expected wrap_model=True with DistributedDataParallel, found False: its own "
                    "forward pass waits for gradients that a private module does not have."
                )
            module = module.module
        if wrap_model:
            module = uncompiled(module)
        parameters = trainable(module, optimizer)
        ModuleValidator.validate(module, strict=True)
        grouping = Grouping.of(groups, max_rows_per_user)
        if grouping is not None:
            refuse_with_users(poisson_sampling, clipping, verify)
        bands = bands_of(correlation)
        if bands > 1:
            refuse_with_correlation(
                processes=processes, poisson=poisson_sampling, grouped=grouping is not None,
                clipping=clipping, noise_multiplier=multiplier,
            )  # fmt: skip
        sampling = sampling_of(data_loader, processes, poisson_sampling, grouping, bands)
        stepped = [p for group in optimizer.param_groups for p in group["params"]]
        bounds, radius = choose_clipping(
            clipping, max_grad_norm, parameters, stepped, sampling.batch_size, clipping_options
        )
        bounds.check(multiplier)
        moments_of = partial(
            second_moments, module, criterion=criterion, loss_reduction=loss_reduction,
            batch_first=batch_first, floor=floor, per=per,
        )  # fmt: skip
        chosen = choose_ellipsoid(ellipsoid, parameters, public_loader, moments_of)
        refuse_learned(bands, chosen.learned is not None)
        source = noise_source(random_state, noise_generator, noise, processes)
        names = {id(p): name for name, p in module.named_parameters()}
        refuse_differences(
            processes,
            {
                "the trainable parameters": [(n, p.shape, p.dtype) for n, p in parameters.items()],
                "the optimizer": description(optimizer, names),
                "whether the optimizer is elementwise": is_elementwise(optimizer),
                "the sampling": (sampling.event, sampling.batch_size, sampling.most),
                "the rows of the data loader and their order (a hash)": sampling.numbering,
                "the shape of the ellipsoid": chosen.shapes,
                "clipping=, loss_reduction=, noise= and verify=": (
                    bounds.name, loss_reduction, source.noise, verify,
                ),
            },
        )  # fmt: skip
        refuse_shared_streams(processes, source)
        chosen.agree(processes)
        bounds.agree(processes)
        self.seeded |= agreed_seed(processes, source)
        self.accountant.run = agreed_run(processes, self.accountant.run)
        self._noises.add(source.noise)
        # Refuses samplings that cannot be composed, before anything is released.
        PrivacyPlan((*self.accountant.events, sampling.event))
        self.accountant.protect(sampling.event.unit)

        tape = Tape(parameters, batch_first, loss_reduction)
        private = PrivateModule(module, tape, verify)
        charges = BatchCharges(self.accountant, sampling.event, sampling.takes_each_row_once)
        terms = ReleaseTerms(multiplier, radius, sampling.batch_size)
        private_optimizer = PrivateOptimizer(
            optimizer, tape, chosen, terms, bounds,
            source=source, shares=Shares(processes, parameters), charge=charges.release,
            most_rows=None if grouping is None else grouping.most, bands=bands,
        )  # fmt: skip
        charges.connect(private_optimizer, private.loss_guard)
        self.verified &= verify
        batches, original = sampling.batches(source), original_loader(data_loader)
        loader = PrivateLoader(original, batches, charges, max_physical_batch_size, verify)
        returned = private if wrap_model else PrivateHooks(private)
        if loss is not None:
            return returned, private_optimizer, loss, loader
        return returned, private_optimizer, loader

    def make_private_with_epsilon(
        self,
        *,
        module: nn.Module,
        optimizer: Optimizer,
        data_loader: DataLoader[Any],
        target_epsilon: float,
        target_delta: float,
        epochs: int,
        max_grad_norm: Norms,
        poisson_sampling: bool = True,
        groups: Any = None,
        max_rows_per_user: int = MOST_ROWS,
        correlation: Correlation | None = None,
        **options: Any,
    ) -> PrivateTraining:
        """`make_private` with the least constant noise that keeps `epochs` passes in the target.

        What this engine has released before is part of the target. If a schedule changes the
        noise later, the target may not be met; the report states what was composed.
        correlation="auto" takes the number of bands, up to 5, with the least predicted error in the
        sum of the steps; 1 is independent noise, as it always is for other optimizers than SGD and
        for ellipsoids that are learned. It follows from public numbers alone.
        """
        validate.integer("epochs", epochs)
        if self.accountant.unprotected:
            raise ValueError(
                "Expected a budget to go on with, found releases without noise: epsilon is "
                "infinite already. Use a new engine, for other data."
            )
        grouping = Grouping.of(groups, max_rows_per_user)
        if grouping is not None:
            refuse_with_users(
                poisson_sampling, options.get("clipping", "flat"), options.get("verify", True)
            )
        sampling = sampling_of(data_loader, Processes.of(module), poisson_sampling, grouping)
        releases = epochs * (1 if sampling.takes_each_row_once else sampling.steps)
        delta, others = validate.delta_of(target_delta, sampling.n_examples), self.accountant.events
        planned = replace(sampling.event, count=releases)
        bands = 1
        if correlation not in (None, 1):
            refuse_with_correlation(
                processes=sampling.processes, poisson=poisson_sampling,
                grouped=grouping is not None, clipping=options.get("clipping", "flat"),
                noise_multiplier=1.0,
            )  # fmt: skip
            batches = Batches(sampling.n_examples, sampling.batch_size, releases)
            budget = target_epsilon, delta
            shape, public = options.get("ellipsoid"), options.get("public_loader")
            learned = isinstance(shape, str) and public is None
            if correlation != "auto" or (type(optimizer) is torch.optim.SGD and not learned):
                bands = choose_bands(correlation, batches, *budget, None, others, MOST_IN_MEMORY)
            planned = training_event(with_bands(batches, bands))
        plan = PrivacyPlan.calibrate_event(planned, target_epsilon, delta, others)
        return self.make_private(
            module=module,
            optimizer=optimizer,
            data_loader=data_loader,
            noise_multiplier=plan.noise_multiplier,
            max_grad_norm=max_grad_norm,
            poisson_sampling=poisson_sampling,
            groups=groups,
            max_rows_per_user=max_rows_per_user,
            correlation=bands,
            **options,
        )

    def get_epsilon(self, delta: float, **options: Any) -> float:
        """The epsilon of everything released so far, at `delta`.

        Options of Opacus's accountants, such as `alphas`, are accepted: nothing depends on them.
        """
        return self.accountant.get_epsilon(delta, **options)

    def report(self, delta: float) -> PrivacyReport:
        """The privacy card of everything released so far."""
        return self.accountant.plan.report(
            delta, seeded=self.seeded, verified=self.verified, noise=self._noise
        )

    @property
    def _noise(self) -> Noise:
        """Discrete only where all trainings have discrete noise."""
        return "discrete" if self._noises == {"discrete"} else "gaussian"

    def is_compatible(self, *, module: nn.Module, **_: Any) -> bool:
        return ModuleValidator.is_valid(module)

    def validate(self, *, module: nn.Module, **_: Any) -> None:
        """Refuse a module with parts that cannot be private; the error lists all of them."""
        ModuleValidator.validate(module, strict=True)

    @staticmethod
    def get_compatible_module(module: nn.Module, **options: Any) -> nn.Module:
        return ModuleValidator.fix_and_validate(module, **options)

    def save_checkpoint(
        self,
        *,
        path: str | os.PathLike[str],
        module: nn.Module | PrivateHooks,
        optimizer: Optimizer | None = None,
        noise_scheduler: Stateful | None = None,
        grad_clip_scheduler: Stateful | None = None,
        checkpoint_dict: dict[str, Any] | None = None,
        module_state_dict_kwargs: dict[str, Any] | None = None,
        torch_save_kwargs: dict[str, Any] | None = None,
    ) -> None:
        """Save module, optimizer, ellipsoid, schedules and everything released so far in one file.

        The file is written completely or not at all. Under several processes call it on each; the
        first one writes.
        """
        place = checkpoints.path_of(path)
        flags = {
            "format": checkpoints.FORMAT, "seeded": self.seeded, "verified": self.verified,
            "noise": self._noise,
        }  # fmt: skip
        state = {**(checkpoint_dict or {}), "privagrad": flags}
        parts = _parts(module, optimizer, noise_scheduler, grad_clip_scheduler)
        checkpoints.save(
            place, state, parts, self.accountant, module_state_dict_kwargs, torch_save_kwargs
        )

    def load_checkpoint(
        self,
        *,
        path: str | os.PathLike[str],
        module: nn.Module | PrivateHooks,
        optimizer: Optimizer | None = None,
        noise_scheduler: Stateful | None = None,
        grad_clip_scheduler: Stateful | None = None,
        module_load_dict_kwargs: dict[str, Any] | None = None,
        torch_load_kwargs: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Continue from a checkpoint; what was released before it is counted.

        What other runs from the same file have released since is counted too: it is kept beside
        it, in a file whose name ends in ".resumed".
        """
        place = checkpoints.path_of(path)
        parts = _parts(module, optimizer, noise_scheduler, grad_clip_scheduler)
        state = checkpoints.read(place, parts, torch_load_kwargs)
        self.accountant.resume(state["privacy_accountant_state_dict"], place)
        flags = state["privagrad"]
        self.seeded |= bool(flags["seeded"])
        self.verified &= bool(flags.get("verified", True))
        self._noises.add(noise_kind(flags.get("noise", "gaussian")))
        checkpoints.restore(state, parts, module_load_dict_kwargs)
        return state


def _parts(
    module: nn.Module | PrivateHooks,
    optimizer: Optimizer | None,
    noise_scheduler: Stateful | None,
    grad_clip_scheduler: Stateful | None,
) -> checkpoints.Parts:
    plain = module.module if isinstance(module, PrivateHooks) else module
    schedules = {"noise_scheduler": noise_scheduler, "grad_clip_scheduler": grad_clip_scheduler}
    return checkpoints.Parts(plain, optimizer, schedules)
