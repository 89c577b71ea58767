"""Module, optimizer, ellipsoid, schedules and everything released so far, in one file."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from privagrad._internal.atomic import atomic_write
from privagrad.torch.accountant import Accountant
from privagrad.torch.optimizer import PrivateOptimizer
from privagrad.torch.scales import Scale

FORMAT = 1

Options = Mapping[str, Any] | None


class Stateful(Protocol):
    """A schedule, privagrad's or another."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


class Parts(NamedTuple):
    """What a checkpoint is of, besides the account; `schedules` by name, None: not given."""

    module: nn.Module
    optimizer: Optimizer | None
    schedules: Mapping[str, Stateful | None]


def path_of(path: Any) -> Path:
    """Where the file is, whatever folder is entered later and whatever links lead to it.

    What is no path is refused, because releases are noted beside the file.
    """
    if not isinstance(path, str | os.PathLike):
        raise TypeError(
            f"Expected the path of a file for a checkpoint, found {type(path).__name__}: what is "
            "released after it is noted in a file beside it, so that no run that continues from it "
            "goes uncharged. Save to a path; copy that file and the one that ends in .resumed."
        )
    return Path(os.path.realpath(path))


def save(
    path: Path,
    state: dict[str, Any],
    parts: Parts,
    accountant: Accountant,
    module_options: Options = None,
    options: Options = None,
) -> None:
    """Write the file completely or not at all; of several processes only the first one writes.

    `state` is what the file holds besides. An optimizer is saved if it is private. From now on the
    accountant notes its releases beside the file too.
    """
    optimizer = parts.optimizer
    state["module_state_dict"] = parts.module.state_dict(**(module_options or {}))
    state["privacy_accountant_state_dict"] = accountant.state_dict()
    for name, schedule in parts.schedules.items():
        if schedule is not None:
            state[f"{name}_state_dict"] = schedule.state_dict()
    if isinstance(optimizer, PrivateOptimizer):
        state["optimizer_state_dict"] = optimizer.state_dict()
        state["ellipsoid"] = {
            name: (s.rows, s.columns, s.entries) for name, s in optimizer.scales.items()
        }
        if optimizer.learned_ellipsoid is not None:
            state["ellipsoid_rule"] = optimizer.learned_ellipsoid.state_dict()
        if optimizer.clipping.counts:
            state["max_grad_norm"] = optimizer.max_grad_norm
        if not optimizer.writes:
            return
    with atomic_write(path) as file:
        torch.save(state, file, **(options or {}))
    accountant.follow(path)


def read(path: Path, parts: Parts, options: Options = None) -> dict[str, Any]:
    """All entries of a file that has everything that the parts need."""
    if not path.exists():
        raise FileNotFoundError(f"Expected a checkpoint, found nothing at {path}.")
    state = _loaded(path, dict(options or {}))
    flags = state.get("privagrad")
    if not isinstance(flags, dict) or flags.get("format") != FORMAT or "seeded" not in flags:
        raise ValueError(
            f"Expected a checkpoint of save_checkpoint in format {FORMAT}, found another in "
            f"{path.name}."
        )
    if missing := {"module_state_dict", "privacy_accountant_state_dict"} - state.keys():
        raise ValueError(f"Expected {', '.join(sorted(missing))} in {path.name}, found none.")
    if isinstance(parts.optimizer, PrivateOptimizer) and "optimizer_state_dict" not in state:
        raise ValueError(f"Expected an optimizer in {path.name}, found none saved.")
    for name, schedule in parts.schedules.items():
        if schedule is not None and f"{name}_state_dict" not in state:
            raise ValueError(
                f"Expected a {name} in {path.name}, found none saved: give save_checkpoint the "
                f"{name} too, or leave it out."
            )
    return state


def _loaded(path: Path, options: dict[str, Any]) -> dict[str, Any]:
    """The entries of a file that may be a stranger's: no code in it runs, it needs no more memory
    than it has bytes."""
    if not options.pop("weights_only", True) or "pickle_module" in options:
        raise ValueError(
            "Expected a checkpoint to be read with weights_only=True, found another value or a "
            "pickle_module in torch_load_kwargs: reading could then run code that somebody put "
            "into the file. save_checkpoint writes nothing that needs it; keep other objects of "
            "checkpoint_dict in a file of your own."
        )
    try:
        with zipfile.ZipFile(path) as archive:
            size = sum(entry.file_size for entry in archive.infolist())
        if size > path.stat().st_size:
            raise ValueError("entries that are larger than the file")
        state = torch.load(path, **{**options, "weights_only": True})
    except (OSError, MemoryError):
        raise
    except Exception as error:  # PyTorch has no error of its own for damaged files
        what = str(error).strip().splitlines() or [type(error).__name__]
        raise ValueError(
            f"Expected a checkpoint of save_checkpoint in {path.name}, found: {what[0]}."
        ) from error
    if not isinstance(state, dict):
        raise ValueError(
            f"Expected a checkpoint of save_checkpoint in {path.name}, found no entries."
        )
    return state


def restore(state: dict[str, Any], parts: Parts, module_options: Options = None) -> None:
    """Give the parts what a file holds of them."""
    try:
        _restore(state, parts, module_options)
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise ValueError(
            f"Expected a checkpoint with the state of these parts, found a damaged one: {error!r}."
        ) from error


def _restore(state: dict[str, Any], parts: Parts, module_options: Options) -> None:
    optimizer = parts.optimizer
    parts.module.load_state_dict(state["module_state_dict"], **(module_options or {}))
    if isinstance(optimizer, PrivateOptimizer):
        optimizer.load_state_dict(state["optimizer_state_dict"])
        optimizer.scales = {name: Scale(*own) for name, own in state["ellipsoid"].items()}
        if optimizer.learned_ellipsoid is not None:
            optimizer.learned_ellipsoid.load_state_dict(state.get("ellipsoid_rule", {}))
        if optimizer.clipping.counts and "max_grad_norm" in state:
            optimizer.max_grad_norm = state["max_grad_norm"]
    for name, schedule in parts.schedules.items():
        if schedule is not None:
            schedule.load_state_dict(state[f"{name}_state_dict"])
