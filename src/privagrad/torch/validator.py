"""Modules that no engine can make private, and what to put in their place."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils import parametrize


class UnsupportedModuleError(ValueError):
    """A module with parts that cannot be private; the message lists all of them."""


class ModuleValidator:
    """Finds, and where possible replaces, modules that mix examples or keep unprotected state."""

    @classmethod
    def validate(cls, module: nn.Module, *, strict: bool = False) -> list[UnsupportedModuleError]:
        """Every problem of the module; raised at once if `strict`."""
        found = [f"{path or 'the module itself'}: {reason}" for path, reason in problems(module)]
        if found and strict:
            raise UnsupportedModuleError(
                f"Expected layers that treat every example by itself, found {len(found)} that do "
                "not:\n  " + "\n  ".join(found) + "\nModuleValidator.fix(module) replaces what can "
                "be replaced; make the optimizer afterwards, from the parameters of its result."
            )
        return [UnsupportedModuleError(line) for line in found]

    @classmethod
    def is_valid(cls, module: nn.Module) -> bool:
        return not any(True for _ in problems(module))

    @classmethod
    def fix(cls, module: nn.Module, **_: Any) -> nn.Module:
        """A copy of the module with GroupNorm for BatchNorm, and unprotected state left out."""
        fixed = copy.deepcopy(module)
        if (other := _replacement(fixed)) is not None:
            return other
        for path, child in list(fixed.named_modules()):
            if path and (other := _replacement(child)) is not None:
                parent, _dot, name = path.rpartition(".")
                setattr(fixed.get_submodule(parent), name, other)
        return fixed


def problems(module: nn.Module) -> Iterator[tuple[str, str]]:
    """The path of each module that cannot be private, with the reason and what to do."""
    for path, child in module.named_modules():
        if (reason := _problem(child)) is not None:
            yield path, reason


def _problem(module: nn.Module) -> str | None:
    name = type(module).__name__
    if isinstance(module, LazyModuleMixin) and module.has_uninitialized_params():
        return f"{name} has no parameters yet: run one batch through the module first."
    if isinstance(module, _BatchNorm):
        if module.training or module.track_running_stats or module.affine:
            groups = _groups(module.num_features)
            return (
                f"{name} normalises with statistics of the whole batch: use "
                f"GroupNorm({groups}, {module.num_features}) instead."
            )
        return None
    if isinstance(module, _InstanceNorm) and module.track_running_stats:
        return f"{name} keeps running statistics of examples: set track_running_stats=False."
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        if module.max_norm is not None:
            return f"{name} renormalises the rows that a batch uses: set max_norm=None."
        if module.scale_grad_by_freq:
            return f"{name} divides gradients by counts in the batch: set scale_grad_by_freq=False."
    if parametrize.is_parametrized(module):
        return (
            f"{name} computes its weights from other parameters: remove the parametrization with "
            "torch.nn.utils.parametrize.remove_parametrizations."
        )
    return None


def _replacement(module: nn.Module) -> nn.Module | None:
    if isinstance(module, _BatchNorm) and module.num_features:
        reference = module.weight
        options: dict[str, Any] = {}
        if reference is not None:
            options = {"device": reference.device, "dtype": reference.dtype}
        groups = _groups(module.num_features)
        return nn.GroupNorm(groups, module.num_features, module.eps, module.affine, **options)
    if isinstance(module, _InstanceNorm) and module.track_running_stats:
        module.track_running_stats = False
        module.running_mean = module.running_var = module.num_batches_tracked = None
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        module.max_norm, module.scale_grad_by_freq = None, False
    return None


def _groups(features: int) -> int:
    """The largest divisor of `features` up to 32."""
    return max(group for group in range(1, 33) if features % group == 0)
