"""Whether a batch holds each row by itself: rows that are collated alone must be the same."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from privagrad.torch.guards.determinism import (
    ReachableGenerators,
    every_draw_at,
    random_state_kept,
    seed,
)
from privagrad.torch.guards.structure import tensors_of
from privagrad.torch.per_example.layout import ROUNDING, Layout, magnitudes, row_layouts, same

_LOOKED_AT = 16
_ROWS = 2
_MIDDLE = 0.5
_LEVELS = (_MIDDLE, 0.01, 0.99)
"""What uniform random numbers are: a branch on one of them is taken at some level."""

UnpaddedRows = dict[int, list[Tensor]]
"""The tensors of some rows collated alone, by the row's place in the batch."""


def refuse_mixing(collate: Callable[[list[Any]], Any], rows: list[Any]) -> UnpaddedRows:
    """Refuse a collate function that makes something of several rows, such as mixup.

    Rows may be padded at their end to the longest; what is padded is not compared. Returns the
    shortest of the rows that are padded and another, collated alone. Rows of which the length is
    random are not among them.
    """
    collated = _Collation(collate)
    with random_state_kept(), collated.own.kept():
        batch = collated(rows)
        alone = {place: collated([rows[place]]) for place in _looked_at(rows)}
        if collated.random:
            places = _shortest_and_another(alone)
            alone = {p: alone[p] for p in places if _refuse_random_mixing(collated, rows, p)}
        else:
            for place, own in alone.items():
                if _differing(batch, own, place, len(rows)):
                    raise _mixing()
    padded = {p: own for p, own in alone.items() if _is_padded(batch, own, len(rows))}
    return {place: padded[place] for place in _shortest_and_another(padded)}


def cut_from(batch: Any, alone: UnpaddedRows, count: int) -> UnpaddedRows:
    """The same rows with the values that they have in `batch`, whose random numbers are others."""
    tensors = tensors_of(batch)
    return {
        place: [_cut(several, one, place, count) for several, one in zip(tensors, own, strict=True)]
        for place, own in alone.items()
        if len(own) == len(tensors)
    }


class _Collation:
    """Runs of one collate function, all with the same random numbers, and whether it needs any."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self._collate, self._tail = collate, random.SystemRandom().getrandbits(32)
        self.own = ReachableGenerators(collate)
        self.random = False

    def __call__(self, rows: list[Any], level: float = _MIDDLE) -> list[Tensor]:
        self.own.start()
        with every_draw_at(level, self._tail) as effects:
            tensors = tensors_of(self._collate(list(rows)))
        self.random = self.random or effects.random or self.own.have_drawn()
        return tensors

    def has_fixed_shapes(self, row: Any) -> bool:
        """Whether the shapes of a row alone are the same for all of several random numbers."""
        seed()
        runs = (tensors_of(self._collate([row])) for _ in range(_LOOKED_AT))
        return len({tuple(tensor.shape for tensor in run) for run in runs}) == 1


def _refuse_random_mixing(collated: _Collation, rows: list[Any], place: int) -> bool:
    """Refuse mixing at every level of randomness; whether the row's shapes are not random.

    The row comes first: the first random numbers of a batch are those of a row alone.
    """
    row, others = rows[place], rows[:place] + rows[place + 1 :]
    alone = {level: collated([row], level) for level in _LEVELS}
    for level, own in alone.items():
        batch = collated([row, *others], level)
        differing = _differing(batch, own, 0, len(rows))
        if differing and all(_is_random(k, alone) for k in differing):
            # Where numbers are drawn for all rows and then for all once more, those of a row are
            # the same only in a batch of as many rows.
            copies = collated([row] * len(rows), level)
            changed = _differing(batch, copies, 0, len(rows), len(rows))
            differing = [k for k in differing if k in changed]
        if differing:
            raise _mixing()
    return collated.has_fixed_shapes(row)


def _is_random(number: int, alone: dict[float, list[Tensor]]) -> bool:
    first, *others = [own[number] if number < len(own) else None for own in alone.values()]
    return not all(
        first is not None and other is not None and torch.equal(first, other) for other in others
    )


def _mixing() -> ValueError:
    return ValueError(
        "Expected a collate_fn that keeps each row by itself, found one that makes something else "
        "of a row when others are beside it (mixup, counts over the batch, padding on the left). "
        "Change rows one by one, in the data set, and pad them on the right, or there to one "
        "public length."
    )


def _looked_at(rows: list[Any]) -> list[int]:
    """Places of some random rows, and of one that holds least, which is padded if any is."""
    sizes = list(map(size_of, rows))
    places = random.SystemRandom().sample(range(len(rows)), min(_LOOKED_AT, len(rows)))
    return list(dict.fromkeys([sizes.index(min(sizes)), *places]))


def size_of(row: Any) -> int:
    """How much a row holds, as far as that can be seen before it is collated."""
    if isinstance(row, Tensor):
        return row.numel()
    if isinstance(row, np.ndarray):
        return row.size
    if isinstance(row, str | bytes):
        return len(row)
    if isinstance(row, Mapping):
        return sum(map(size_of, row.values()))
    if isinstance(row, list | tuple):
        return len(row) if row and isinstance(row[0], int | float) else sum(map(size_of, row))
    return sum(tensor.numel() for tensor in tensors_of(row)) or 1


def _shortest_and_another(alone: UnpaddedRows) -> list[int]:
    """The place of the row with the fewest numbers, and a random other one."""
    if len(alone) <= _ROWS:
        return list(alone)
    shortest = min(alone, key=lambda place: sum(t.numel() for t in alone[place]))
    return [shortest, random.SystemRandom().choice([place for place in alone if place != shortest])]


def _differing(
    batch: list[Tensor], alone: list[Tensor], place: int, count: int, others: int = 1
) -> list[int]:
    """Which tensors have another row at `place` than first in `alone`, a batch of `others`."""
    if len(batch) != len(alone):
        raise _mixing()
    return [
        number
        for number, (several, one) in enumerate(zip(batch, alone, strict=True))
        if not _holds(several, one, place, count, others)
    ]


def _layouts(several: Tensor, one: Tensor, count: int, others: int = 1) -> Iterator[Layout]:
    """Where the rows may be in a tensor of `count` rows and in the same of `others` rows."""
    for layout in row_layouts(several.shape, count):
        axis = layout.axis
        if several.dim() == one.dim() and several.shape[axis] * others == one.shape[axis] * count:
            yield layout


def _holds(several: Tensor, one: Tensor, place: int, count: int, others: int) -> bool:
    """Whether the row at `place` is that of the row alone, up to padding.

    Each coordinate is compared in its own units: those of the largest number that any row has
    there.
    """
    for layout in _layouts(several, one, count, others):
        parts, own = layout.split(several, count), layout.split(one, others)[0]
        row = parts[place]
        common = tuple(slice(0, min(a, b)) for a, b in zip(row.shape, own.shape, strict=True))
        # An empty tensor has no largest number.
        scale = magnitudes(parts).amax(0) if parts.numel() else row
        if same(row[common], own[common], ROUNDING, scale[common]):
            return True
    return several.shape == one.shape and same(several, one, ROUNDING, magnitudes(several))


def _is_padded(batch: list[Tensor], alone: list[Tensor], count: int) -> bool:
    """Whether a row has another shape in the batch than alone."""
    for several, one in zip(batch, alone, strict=True):
        layout = next(_layouts(several, one, count), None)
        if layout and layout.split(several, count).shape[1:] != layout.split(one, 1).shape[1:]:
            return True
    return False


def _cut(several: Tensor, one: Tensor, place: int, count: int) -> Tensor:
    """The row at `place` without its padding: in the shape of the row alone, `one`."""
    layout = next(_layouts(several, one, count), None)
    if layout is None:
        return one
    row, shape = layout.split(several, count)[place], layout.split(one, 1).shape[1:]
    cut = row[tuple(slice(0, size) for size in shape)]
    return layout.join(cut[None]).clone() if cut.shape == shape else one
