"""What all processes of a training must have alike, and how they find out."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from privagrad.privacy.noise import RandomSource
from privagrad.torch.processes import Processes
from privagrad.torch.release import ReleaseTerms
from privagrad.torch.scales import Scale
from privagrad.torch.wrapped import WrappedOptimizer

_SHOWN = 80
"""Characters before and after a difference that an error shows."""


def refuse_differences(processes: Processes, facts: Mapping[str, object]) -> None:
    """Refuse processes with other facts than the first one, before anything is spent."""
    if processes.count == 1:
        return
    first, *others = processes.gathered_objects({name: repr(own) for name, own in facts.items()})
    for rank, found in enumerate(others, 1):
        for name, own in found.items():
            if own != first[name]:
                one, other = _around_difference(first[name], own)
                raise ValueError(
                    f"Expected {name} to be the same in all processes, found {one} in process 0 "
                    f"and {other} in process {rank}: each of them adds the noise of its share of "
                    "the parameters. Give make_private the same in all processes."
                )


def _around_difference(one: str, other: str) -> tuple[str, str]:
    """Both texts from shortly before their first difference on."""
    pairs = zip(one, other, strict=False)
    same = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
    start = max(0, same - _SHOWN)
    dots = "..." if start else ""
    return f"{dots}{one[start : same + _SHOWN]}", f"{dots}{other[start : same + _SHOWN]}"


def refuse_shared_streams(processes: Processes, source: RandomSource) -> None:
    """Refuse processes that would draw the same noise: their first random words are compared."""
    if processes.count == 1:
        return
    own = [tuple(stream.words(2).tolist()) for stream in source.streams]
    words = [pair for found in processes.gathered_objects(own) for pair in found]
    if len(set(words)) < len(words):
        raise ValueError(
            "Expected random numbers of its own in every process, found the same in two: the noise "
            "of one share would be that of another. Leave out random_state, or give all processes "
            "the same whole number, which makes different streams of it."
        )


def agreed_run(processes: Processes, run: str) -> str:
    """The first process's name of the run: what all of them note of a release counts once."""
    return run if processes.count == 1 else str(processes.gathered_objects(run)[0])


def agreed_seed(processes: Processes, source: RandomSource) -> bool:
    """Whether any process has seeded noise."""
    return any(flag for (flag,) in processes.gathered([source.seeded]))


def agreed_terms(
    processes: Processes, own: ReleaseTerms, facts: Mapping[str, float], needs_whole: bool
) -> tuple[ReleaseTerms, bool]:
    """The first process's terms for the next release, and whether any process needs it whole.

    A release of processes whose `facts` differ is refused in all of them.
    """
    rows = processes.gathered([*own, needs_whole, *facts.values()])
    kept = len(own) + 1
    _refuse_other_facts(facts, [row[kept:] for row in rows])
    return ReleaseTerms(*rows[0][: len(own)]), any(row[len(own)] for row in rows)


def refuse_other_payments(processes: Processes, by_batch: bool) -> None:
    """Refuse a release that is cheaper in one process than in another: it has one price."""
    if processes.count > 1:
        name = "charge (1: for the batch that its data loader drew, 0: for all rows)"
        _refuse_other_facts([name], processes.gathered([by_batch]))


def _refuse_other_facts(names: Iterable[str], rows: Sequence[Sequence[float]]) -> None:
    for rank, row in enumerate(rows):
        for name, first, found in zip(names, rows[0], row, strict=True):
            if found != first:
                raise RuntimeError(
                    f"Expected all processes to have the same {name} at a step, found {first:.0f} "
                    f"in process 0 and {found:.0f} in process {rank}: nothing was released. Run "
                    "the same loop in all processes, one step for each batch of the data loader."
                )


def description(optimizer: Optimizer, names: Mapping[int, str]) -> object:
    """Kinds, options and parameters of an optimizer; `names` are those of parameters, by id."""
    kinds, inner = [type(optimizer).__name__], optimizer
    while isinstance(inner, WrappedOptimizer):
        inner = inner.original_optimizer
        kinds.append(type(inner).__name__)
    parameters = [[names.get(id(p)) for p in group["params"]] for group in inner.param_groups]
    return kinds, _options(inner), parameters


def options_hash(optimizer: Optimizer) -> float:
    """A number that changes with the options of the optimizer's groups, such as learning rates."""
    return float(zlib.crc32(repr(_options(optimizer)).encode()))


def _options(optimizer: Optimizer) -> list[list[tuple[str, object]]]:
    return [
        [(name, _plain(value)) for name, value in sorted(group.items()) if name != "params"]
        for group in optimizer.param_groups
    ]


def _plain(value: Any) -> object:
    """A number, text or a tuple of them; of anything else its type."""
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, (tuple, list)):
        return tuple(map(_plain, value))
    return value if isinstance(value, (int, float, str, type(None))) else type(value).__name__


def scales_hash(scales: Iterable[Scale]) -> float:
    """A number that changes with the values of the scales."""
    found = 0
    for scale in scales:
        for tensor in (scale.rows, scale.columns, scale.entries):
            if tensor is not None:
                found = zlib.crc32(tensor.cpu().numpy().tobytes(), found)
    return float(found)
