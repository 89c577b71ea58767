"""Whether a batch holds each row by itself: rows that are collated alone must be the same."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from torch import Tensor

from privagrad.torch.guards.determinism import Deterministic, random_state_kept
from privagrad.torch.guards.structure import tensors_of
from privagrad.torch.guards.trace import row_layouts
from privagrad.torch.layout import same

_ROWS = 2


def refuse_mixing(collate: Callable[[list[Any]], Any], rows: list[Any]) -> None:
    """Refuse a collate function that makes something of several rows, such as mixup.

    Rows may be padded to the longest; what is padded is not compared.
    """
    with Deterministic(), random_state_kept():
        batch = tensors_of(collate(rows))
        for place in random.Random().sample(range(len(rows)), min(_ROWS, len(rows))):
            alone = tensors_of(collate([rows[place]]))
            if len(alone) != len(batch) or not all(
                _holds(several, one, place, len(rows))
                for several, one in zip(batch, alone, strict=True)
            ):
                raise ValueError(
                    "Expected a collate_fn that keeps each row by itself, found one that makes "
                    "something else of a row when others are beside it (mixup, counts over the "
                    "batch). Change rows one by one, in the data set."
                )


def _holds(several: Tensor, one: Tensor, place: int, count: int) -> bool:
    """Whether the row at `place` is that of the row alone, up to padding."""
    for layout in row_layouts(several.shape, count):
        if several.dim() != one.dim():
            continue
        row, own = layout.split(several, count)[place], layout.split(one, 1)[0]
        common = tuple(slice(0, min(a, b)) for a, b in zip(row.shape, own.shape, strict=True))
        if same(row[common], own[common]):
            return True
    return several.shape == one.shape and same(several, one)
