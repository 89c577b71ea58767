"""Kernels that centre, scale and combine columns of tables, row by row, without copies between."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from privagrad._internal.jit import kernel
from privagrad._internal.validate import Floats, Integers, Vector


@kernel()
def centre_dense(array: Any, columns: Integers, centre: Vector, moved: Any) -> None:
    """moved = the columns of `array` minus their centres."""
    for i in range(array.shape[0]):
        for k in range(columns.size):
            moved[i, k] = np.float64(array[i, columns[k]]) - centre[k]


@kernel()
def standardize_dense(array: Any, centre: Vector, unit: Any, table: Any) -> None:
    """table = (array - centre) / unit, both rounded to the table's type; 1 in a further column.

    NaN, a missing entry, becomes 0, the centre.
    """
    dim = centre.size
    for i in range(array.shape[0]):
        for j in range(dim):
            value = np.float64(array[i, j])
            table[i, j] = 0.0 if math.isnan(value) else value - centre[j]
        for j in range(dim):
            table[i, j] /= unit[j]
        for j in range(dim, table.shape[1]):
            table[i, j] = 1.0


@kernel()
def combine_dense(table: Any, columns: Integers, matrix: Any) -> None:
    """table[i, columns[j]] ← Σ_k table[i, columns[k]] matrix[k, j], added in this order.

    Sums are of doubles and rounded to the table's type.
    """
    combined = np.empty(columns.size)
    for i in range(table.shape[0]):
        combined[:] = 0.0
        for k in range(columns.size):
            value = np.float64(table[i, columns[k]])
            for j in range(columns.size):
                combined[j] += value * matrix[k, j]
        for j in range(columns.size):
            table[i, columns[j]] = combined[j]


def standardize_csr(
    data: Floats, indices: Integers, indptr: Integers, centre: Vector, unit: Vector, constant: bool
) -> tuple[Floats, Integers, Integers]:
    """(a_j - centre_j)/unit_j of a canonical CSR matrix, and optionally a last column of ones.

    Centred columns store all their entries that are not 0 then; the others keep their zeros. NaN, a
    missing entry, becomes 0, the centre.
    """
    filled = np.flatnonzero(centre)
    dtype: Any = np.float64 if filled.size or constant else data.dtype
    columns: Any = filled, centre, unit, 1.0 / unit, constant
    counts = np.empty(indptr.size, dtype=np.int64)
    counts[0] = 0
    nothing = np.empty(0, dtype), np.empty(0, indices.dtype)
    _standardize_csr(data, indices, indptr, columns, counts, *nothing)
    starts = np.cumsum(counts)
    entries = np.empty(starts[-1], dtype), np.empty(starts[-1], indices.dtype)
    _standardize_csr(data, indices, indptr, columns, starts, *entries)
    return *entries, offsets_like(indptr, starts)


def offsets_like(indptr: Integers, starts: Integers) -> Integers:
    """Where rows start, in the type of `indptr` if that holds such numbers."""
    return starts.astype(indptr.dtype) if starts[-1] <= np.iinfo(indptr.dtype).max else starts


@kernel()
def _standardize_csr(
    data: Any, indices: Any, indptr: Any, columns: Any, starts: NDArray[np.int64], values: Any,
    places: Any,
) -> None:  # fmt: skip
    """The entries of all rows; with no room for entries, how many each row has, in `starts`."""
    filled, centre, unit, inverse, constant = columns
    counting = values.size == 0
    rounded = np.empty(1, data.dtype)
    for i in range(indptr.size - 1):
        at = 0 if counting else starts[i]
        k, f = indptr[i], 0
        while k < indptr[i + 1] or f < filled.size:
            column = centre.size if k == indptr[i + 1] else np.int64(indices[k])
            centred = f < filled.size and filled[f] <= column
            if centred:
                stored = filled[f] == column
                column = filled[f]
                entry = np.float64(data[k]) if stored else 0.0
                value = (entry - centre[column]) / unit[column]
                f += 1
                k += stored
            else:
                rounded[0] = np.float64(data[k]) * inverse[column]
                value = np.float64(rounded[0])
                k += 1
            if value != 0.0 and not math.isnan(value):
                if not counting:
                    values[at], places[at] = value, column
                at += 1
        if constant:
            if not counting:
                values[at], places[at] = 1.0, centre.size
            at += 1
        if counting:
            starts[i + 1] = at
