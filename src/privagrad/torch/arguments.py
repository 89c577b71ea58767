"""Checks of what `make_private` is given."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from privagrad.privacy.noise import Noise, RandomSource, RandomState, random_source
from privagrad.torch.loaders import original_loader
from privagrad.torch.module import PrivateModule
from privagrad.torch.optimizer import PrivateOptimizer
from privagrad.torch.parallel import refuse_spread_optimizers
from privagrad.torch.per_example_loss import PerExampleLoss
from privagrad.torch.processes import Processes
from privagrad.torch.samplers import Sampling
from privagrad.torch.users import Grouping

_MODES = ("hooks", "functorch", "ew", "ghost")
"""Of Opacus, which computes the same gradients in these ways."""


def criterion_of(
    grad_sample_mode: str,
    criterion: Callable[[Any, Any], Tensor] | None,
    loss_reduction: str,
    batch_first: bool,
) -> PerExampleLoss | None:
    """The criterion that is returned, example by example; None: the mode returns none."""
    if grad_sample_mode not in _MODES:
        raise ValueError(
            f"Expected grad_sample_mode to be one of {', '.join(_MODES)}, found "
            f"{grad_sample_mode!r}: sharded parameters and per-example gradients computed "
            "elsewhere are not supported. Leave grad_sample_mode out: all modes give the same "
            "gradients."
        )
    if grad_sample_mode != "ghost":
        return None
    if criterion is None:
        raise ValueError(
            "Expected a criterion with grad_sample_mode='ghost', found none: it is evaluated "
            "example by example."
        )
    own = getattr(criterion, "reduction", loss_reduction)
    if own in ("mean", "sum") and own != loss_reduction:
        raise ValueError(
            f"Expected a criterion that takes the {loss_reduction}, as loss_reduction says, found "
            f"reduction={own!r}: give both the same. For the {loss_reduction} over examples of "
            "each one's own sum or mean make a PerExampleLoss of the criterion yourself."
        )
    return PerExampleLoss(criterion, loss_reduction, batch_first)


def uncompiled(module: nn.Module) -> nn.Module:
    """The module that `torch.compile` was given."""
    inner = getattr(module, "_orig_mod", None)
    if not isinstance(inner, nn.Module):
        return module
    warnings.warn(
        "Private training runs the layers of a compiled module by the engine's own code: it is as "
        "exact as without torch.compile, and as fast.",
        UserWarning,
        stacklevel=3,
    )
    return inner


def sampling_of(
    loader: DataLoader[Any],
    processes: Processes,
    poisson: bool,
    grouping: Grouping | None = None,
    bands: int = 1,
) -> Sampling:
    """How batches are drawn: from a private loader, as from the one that it was made from."""
    sampling = Sampling.of(original_loader(loader), processes, poisson, grouping)
    return replace(sampling, bands=bands)


def noise_source(
    random_state: RandomState, generator: torch.Generator | None, noise: Noise, processes: Processes
) -> RandomSource:
    """The streams of this process: with the same seed, each process has others."""
    if generator is not None:
        random_state = int(torch.randint(2**62, (), generator=generator))
    return random_source(random_state, noise, processes.rank if processes.count > 1 else None)


def trainable(module: nn.Module, optimizer: Optimizer) -> dict[str, nn.Parameter]:
    """The module's trainable parameters by name; the optimizer must have the same."""
    if isinstance(optimizer, PrivateOptimizer) or isinstance(module, PrivateModule):
        raise ValueError(
            "Expected a module and an optimizer that are not private yet, found private ones."
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError(
            "Expected an optimizer that takes one gradient a step, found LBFGS: every evaluation "
            "of its closure would be a release of its own."
        )
    refuse_spread_optimizers(optimizer)
    parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
    if not parameters:
        raise ValueError("Expected a module with trainable parameters, found none.")
    own = {id(p) for p in module.parameters()}
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if not stepped <= own:
        raise ValueError(
            f"Expected the optimizer to have the module's parameters, found {len(stepped - own)} "
            "others: make the optimizer from module.parameters() (after ModuleValidator.fix)."
        )
    left = [name for name, p in parameters.items() if id(p) not in stepped]
    if left:
        raise ValueError(
            "Expected every trainable parameter in the optimizer, found none for "
            f"{', '.join(left)}. Give them to the optimizer, or freeze them with "
            "requires_grad_(False)."
        )
    return parameters
