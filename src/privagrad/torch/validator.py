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

from privagrad._internal import validate


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
    def fix(
        cls, module: nn.Module, *, replace_bn_with_in: bool = False, num_groups: int | None = None
    ) -> nn.Module:
        """A copy of the module with GroupNorm for BatchNorm, and unprotected state left out.

        BatchNorm in eval mode with frozen parameters stays. What is put in keeps the weights and
        biases of what it replaces, frozen or trained, and its mode.

        Parameters
        ----------
        replace_bn_with_in : bool
            InstanceNorm in place of GroupNorm.
        num_groups : int, optional
            Of each GroupNorm; it must divide the number of features. None: the largest divisor
            up to 32.
        """
        if num_groups is not None:
            validate.integer("num_groups", num_groups)
            if replace_bn_with_in:
                raise ValueError(
                    "Expected num_groups or replace_bn_with_in=True, found both: InstanceNorm has "
                    "no groups."
                )
        fixed = copy.deepcopy(module)
        replaced: dict[int, nn.Module | None] = {}
        for path, child in list(fixed.named_modules(remove_duplicate=False)):
            if id(child) not in replaced:
                replaced[id(child)] = _replacement(path, child, replace_bn_with_in, num_groups)
            if (other := replaced[id(child)]) is None:
                continue
            if not path:
                return other
            parent, _dot, name = path.rpartition(".")
            setattr(fixed.get_submodule(parent), name, other)
        return fixed

    @classmethod
    def fix_and_validate(cls, module: nn.Module, **options: Any) -> nn.Module:
        """`fix`, and an error if problems are left."""
        fixed = cls.fix(module, **options)
        cls.validate(fixed, strict=True)
        return fixed


def problems(module: nn.Module) -> Iterator[tuple[str, str]]:
    """The path of each module that cannot be private, with the reason and what to do."""
    for path, child in module.named_modules():
        if (reason := _problem(child)) is not None:
            yield path, reason


def is_frozen_norm(module: nn.Module) -> bool:
    """Whether this is a BatchNorm that does the same to every example, and learns nothing.

    It is in eval mode, has running statistics, which must be of public data, and no trainable
    parameters.
    """
    return (
        isinstance(module, _BatchNorm)
        and not module.training
        and module.running_mean is not None
        and module.running_var is not None
        and not any(parameter.requires_grad for parameter in module.parameters())
    )


def _problem(module: nn.Module) -> str | None:
    name = type(module).__name__
    if isinstance(module, LazyModuleMixin) and module.has_uninitialized_params():
        return f"{name} has no parameters yet: run one batch through the module first."
    if isinstance(module, _BatchNorm) and not is_frozen_norm(module):
        groups = _groups(module.num_features)
        return (
            f"{name} normalises with statistics of the whole batch: use "
            f"GroupNorm({groups}, {module.num_features}) instead. One with statistics from public "
            "data may stay as it is: set eval() and requires_grad_(False) on it."
        )
    if isinstance(module, _InstanceNorm) and module.track_running_stats:
        return f"{name} keeps running statistics of examples: set track_running_stats=False."
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        if module.max_norm is not None:
            return f"{name} renormalises the rows that a batch uses: set max_norm=None."
        if module.scale_grad_by_freq:
            return f"{name} divides gradients by counts in the batch: set scale_grad_by_freq=False."
    if hasattr(module, "_orig_mod") or module._compiled_call_impl is not None:
        return (
            f"{name} is compiled: the engine runs layers by its own code. Give it the module from "
            "before torch.compile."
        )
    if any(p.is_complex() for p in module.parameters(recurse=False)):
        return (
            f"{name} has complex parameters, for which norms and noise are not defined here: keep "
            "real and imaginary parts as two real parameters."
        )
    if parametrize.is_parametrized(module):
        return (
            f"{name} computes its weights from other parameters: remove the parametrization with "
            "torch.nn.utils.parametrize.remove_parametrizations."
        )
    return None


_INSTANCE_NORMS = {
    nn.BatchNorm1d: nn.InstanceNorm1d,
    nn.BatchNorm2d: nn.InstanceNorm2d,
    nn.BatchNorm3d: nn.InstanceNorm3d,
}


def _replacement(
    path: str, module: nn.Module, instance: bool, num_groups: int | None
) -> nn.Module | None:
    """What to put in the module's place; None: the module itself, without unprotected state."""
    if isinstance(module, _BatchNorm) and module.num_features and not is_frozen_norm(module):
        return _without_batch(path or "the module itself", module, instance, num_groups)
    if isinstance(module, _InstanceNorm) and module.track_running_stats:
        module.track_running_stats = False
        module.running_mean = module.running_var = module.num_batches_tracked = None
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        module.max_norm, module.scale_grad_by_freq = None, False
    return None


def _without_batch(
    path: str, module: _BatchNorm, instance: bool, num_groups: int | None
) -> nn.Module:
    """A norm of each example by itself, with the parameters of a BatchNorm."""
    features = module.num_features
    other: nn.Module
    if instance:
        kind = next((n for b, n in _INSTANCE_NORMS.items() if isinstance(module, b)), None)
        if kind is None:
            raise UnsupportedModuleError(
                f"Expected BatchNorm1d, 2d or 3d with replace_bn_with_in=True, found "
                f"{type(module).__name__} at {path}: leave the option out, for GroupNorm."
            )
        other = kind(features, module.eps, affine=module.affine)
    else:
        groups = num_groups or _groups(features)
        if features % groups:
            raise ValueError(
                f"Expected num_groups to divide the features of every BatchNorm, found "
                f"num_groups={groups} and {features} features at {path}."
            )
        other = nn.GroupNorm(groups, features, module.eps, module.affine)
    if module.affine:
        other.weight, other.bias = module.weight, module.bias
    return other.train(module.training)


def _groups(features: int) -> int:
    """The largest divisor of `features` up to 32."""
    return max(group for group in range(1, 33) if features % group == 0)
