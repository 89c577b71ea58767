"""Module, optimizer, ellipsoid and everything released so far, in one file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from privagrad._internal.atomic import atomic_write
from privagrad.torch.accountant import Accountant
from privagrad.torch.optimizer import PrivateOptimizer
from privagrad.torch.scales import Scale

FORMAT = 1


def save(
    path: Path,
    state: dict[str, Any],
    module: nn.Module,
    optimizer: Optimizer | None,
    accountant: Accountant,
) -> None:
    """Write the file completely or not at all; of several processes only the first one writes.

    `state` is what the file holds besides. An optimizer is saved if it is private. From now on the
    accountant notes its releases beside the file too.
    """
    state["module_state_dict"] = module.state_dict()
    state["privacy_accountant_state_dict"] = accountant.state_dict()
    if isinstance(optimizer, PrivateOptimizer):
        state["optimizer_state_dict"] = optimizer.state_dict()
        state["ellipsoid"] = {
            name: (s.rows, s.columns, s.entries) for name, s in optimizer.scales.items()
        }
        if not optimizer.writes:
            return
    with atomic_write(path) as file:
        torch.save(state, file)
    accountant.follow(path)


def load(
    path: Path, module: nn.Module, optimizer: Optimizer | None, accountant: Accountant
) -> dict[str, Any]:
    """Restore everything from a file, and return all its entries.

    Releases made since by runs from this file are counted.
    """
    if not path.exists():
        raise FileNotFoundError(f"Expected a checkpoint, found nothing at {path}.")
    state: dict[str, Any] = torch.load(path, weights_only=True)
    if state.get("privagrad", {}).get("format") != FORMAT:
        raise ValueError(
            f"Expected a checkpoint of save_checkpoint in format {FORMAT}, found another in "
            f"{path.name}."
        )
    module.load_state_dict(state["module_state_dict"])
    if isinstance(optimizer, PrivateOptimizer):
        if "optimizer_state_dict" not in state:
            raise ValueError(f"Expected an optimizer in {path.name}, found none saved.")
        optimizer.load_state_dict(state["optimizer_state_dict"])
        optimizer.scales = {name: Scale(*parts) for name, parts in state["ellipsoid"].items()}
    accountant.resume(state["privacy_accountant_state_dict"], path)
    return state
