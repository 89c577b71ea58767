"""Modules and optimizers that other libraries have spread over processes: refused."""

from __future__ import annotations

from torch import nn
from torch.optim import Optimizer

_SPREAD = (
    "torch.distributed.fsdp", "torch.distributed._composable", "torch.distributed.tensor",
    "torch.distributed._tensor", "torch.distributed.pipelining", "torch.distributed.optim",
    "torch.nn.parallel.data_parallel", "deepspeed", "fairscale",
)  # fmt: skip
"""Where FSDP, DTensor, pipelines, ZeRO, DataParallel and DeepSpeed are defined."""


def refuse_spread_modules(module: nn.Module) -> None:
    """Refuse modules with parts or parameters that are not whole in this process.

    The norm of an example's gradient is that of all parameters together, and it must be known
    before any of them is added to a sum.
    """
    parts = [(path, part) for path, part in module.named_modules() if _is_spread(part)]
    parameters = [(name, p) for name, p in module.named_parameters() if _is_spread(p)]
    if found := [*parts, *parameters]:
        path, first = found[0]
        raise ValueError(
            "Expected a module that is whole in every process, found a "
            f"{type(first).__name__} at {path or 'the module itself'}: fully_shard (FSDP), tensor "
            "parallelism, pipelines, DataParallel and DeepSpeed spread modules over processes or "
            "devices, and the gradient of an example, whose norm is bounded, would be whole in "
            "none. Wrap the plain module in DistributedDataParallel: noise, released sums and the "
            "optimizer's state are then spread over the processes."
        )


def refuse_spread_optimizers(optimizer: Optimizer) -> None:
    """Refuse optimizers that exchange parameters themselves."""
    if _is_spread(optimizer):
        raise ValueError(
            "Expected a plain optimizer of the module's parameters, found "
            f"{type(optimizer).__name__}, which exchanges parameters itself. Give make_private the "
            "optimizer inside of it: with DistributedDataParallel its state is spread over the "
            "processes anyway."
        )


def _is_spread(value: object) -> bool:
    return any(
        base.__module__ == place or base.__module__.startswith(f"{place}.")
        for base in type(value).__mro__
        for place in _SPREAD
    )
