"""Which tables share rows: a small sketch of each, kept in memory alone. NOT private."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Marks = NDArray[np.uint64]
"""A number for each row that its entries determine, whatever its place."""

_SIZE = 128
_COLUMNS = 12
"""How many columns of a wide table are looked at, at most."""

_FACTORS = np.random.default_rng(5).integers(1, 2**63, size=2, dtype=np.uint64) | np.uint64(1)


def marks_of(arrays: Iterable[NDArray[Any]]) -> Marks | None:
    """Marks of the rows of some arrays side by side; None without columns."""
    total: Marks | None = None
    for array in arrays:
        dim = array.shape[1]
        bits = array.view(f"u{array.itemsize}")
        for j in np.unique(np.linspace(0, dim - 1, min(dim, _COLUMNS)).astype(int)).tolist():
            column = bits[:, j].astype(np.uint64)
            total = _mixed(column if total is None else column + total * _FACTORS[0])
    return total


def sketch_of(marks: Marks | None) -> Marks | None:
    """The smallest of the different marks; None where many rows are alike."""
    if marks is None:
        return None
    different = np.unique(marks)
    return different[:_SIZE] if 2 * different.size > marks.size else None


def shared(one: Marks | None, other: Marks | None) -> float:
    """About which part of the rows of two tables together are in both of them."""
    if one is None or other is None:
        return 0.0
    both = np.intersect1d(one, other)
    union = np.union1d(one, other)[: max(min(one.size, other.size), 1)]
    return float(np.isin(union, both).mean())


def _mixed(words: Marks) -> Marks:
    """Words whose low and high bits all depend on all bits of the given ones."""
    for shift in (33, 29, 32):
        words = (words ^ (words >> np.uint64(shift))) * _FACTORS[1]
    return words ^ (words >> np.uint64(31))
