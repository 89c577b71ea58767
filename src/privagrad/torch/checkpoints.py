"""Model, optimizer, ellipsoid and account of a training in one file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from privagrad._internal.atomic import atomic_write
from privagrad.torch.optimizer import PrivateOptimizer
from privagrad.torch.scales import Scale

if TYPE_CHECKING:
    from privagrad.torch.engine import PrivacyEngine

FORMAT = 1


def save(
    path: Path,
    engine: PrivacyEngine,
    module: nn.Module,
    optimizer: Optimizer | None,
    extra: dict[str, Any],
) -> None:
    """Write the file, whole or not at all; of several processes the first one does."""
    state = {
        **extra,
        "privagrad": {
            "format": FORMAT,
            "seeded": engine.seeded,
            "verified": engine.verified,
        },
        "module_state_dict": module.state_dict(),
        "privacy_accountant_state_dict": engine.accountant.state_dict(),
    }
    if isinstance(optimizer, PrivateOptimizer):
        state["optimizer_state_dict"] = optimizer.state_dict()
        state["ellipsoid"] = {
            name: (s.rows, s.columns, s.entries) for name, s in optimizer.scales.items()
        }
        if not optimizer.writes:
            return
    with atomic_write(path) as file:
        torch.save(state, file)
    engine.accountant.follow(path)


def load(
    path: Path, engine: PrivacyEngine, module: nn.Module, optimizer: Optimizer | None
) -> dict[str, Any]:
    """Put everything back; what was released from this file since is counted."""
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
    engine.seeded |= bool(state["privagrad"]["seeded"])
    engine.verified &= bool(state["privagrad"].get("verified", True))
    engine.accountant.resume(state["privacy_accountant_state_dict"], path)
    return state
