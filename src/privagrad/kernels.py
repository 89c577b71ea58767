"""Fused kernels: sums of bounded gradients of generalized linear models, dense and CSR.

The gradient of one example is ℓ'(⟨a, x⟩) a, so its norm in the ellipsoid and its bounded copy
follow from the row `a` alone. Rows are taken a few at a time: measured, weighed, and added while
they are in the first cache, so that each is read from memory once and no gradient is ever stored.
Contributions are rounded to whole units of the mechanism's grid, so that sums are exact: the same
for any order of the rows and any number of threads.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from privagrad._numba import kernel, prefetch
from privagrad.geometry import secular_root
from privagrad.losses import slope

RADIAL, EUCLIDEAN, UNBOUNDED = 0, 1, 2

_ROWS = 8
_INFINITY = math.inf


@kernel(reorder=True)
def add_dense(
    array: Any, batch: Any, total: Any, targets: Any, x: Any, code: Any, parameter: Any,
    mode: Any, whitening: Any, stretch: Any, units: Any, limit: Any,
) -> Any:  # fmt: skip
    """total += the batch's gradients; how many were shrunk, how many left out as not finite."""
    dim = x.size
    flat = array.reshape(-1)
    line = 64 // array.itemsize
    margins, norms, shrinks = np.empty(_ROWS), np.empty(_ROWS), np.empty(_ROWS)
    clipped = nonfinite = 0
    for first in range(0, batch.size, _ROWS):
        count = min(_ROWS, batch.size - first)
        for i in range(count):
            if first + i + _ROWS < batch.size:
                ahead = batch[first + i + _ROWS]
                prefetch(targets, ahead)
                for j in range(ahead * dim, (ahead + 1) * dim, line):
                    prefetch(flat, j)
            row = batch[first + i]
            margin = squares = 0.0
            for j in range(dim):
                value = np.float64(array[row, j])
                whitened = value * whitening[j]
                margin += value * x[j]
                squares += whitened * whitened
            margins[i] = margin
            norms[i] = math.sqrt(squares)
            if squares == _INFINITY:
                norms[i] = _large_norm(array[row], whitening)
        for i in range(count):
            target = targets[batch[first + i]]
            margins[i], shrinks[i] = _weigh(
                code, parameter, mode, margins[i], norms[i], target, limit
            )
        for i in range(count):
            row, factor, shrink = batch[first + i], margins[i], shrinks[i]
            clipped += shrink < 1.0
            if math.isnan(shrink):
                nonfinite += 1
            elif mode == UNBOUNDED:
                for j in range(dim):
                    total[j] += factor * np.float64(array[row, j])
            elif mode == EUCLIDEAN and shrink < 1.0:
                moved = _onto_ellipsoid(array[row], factor, whitening, stretch, limit)
                for j in range(dim):
                    total[j] += np.rint(moved[j] * units)
            else:
                factor *= shrink * units
                for j in range(dim):
                    total[j] += np.rint(np.float64(array[row, j]) * whitening[j] * factor)
    return clipped, nonfinite


@kernel(reorder=True)
def add_sparse(
    data: Any, indices: Any, indptr: Any, batch: Any, total: Any, targets: Any, x: Any, code: Any,
    parameter: Any, mode: Any, whitening: Any, stretch: Any, units: Any, limit: Any,
) -> Any:  # fmt: skip
    """`add_dense` for the rows of a canonical CSR matrix."""
    line = 64 // data.itemsize
    clipped = nonfinite = 0
    for i in range(batch.size):
        if i + 1 < batch.size:
            for k in range(indptr[batch[i + 1]], indptr[batch[i + 1] + 1], line):
                prefetch(data, k)
                prefetch(indices, k)
        entries = slice(indptr[batch[i]], indptr[batch[i] + 1])
        margin = squares = 0.0
        for k in range(entries.start, entries.stop):
            value = np.float64(data[k])
            whitened = value * whitening[indices[k]]
            margin += value * x[indices[k]]
            squares += whitened * whitened
        norm = math.sqrt(squares)
        if squares == _INFINITY:
            norm = _large_norm(data[entries], whitening[indices[entries]])
        factor, shrink = _weigh(code, parameter, mode, margin, norm, targets[batch[i]], limit)
        clipped += shrink < 1.0
        if math.isnan(shrink):
            nonfinite += 1
        elif mode == UNBOUNDED:
            for k in range(entries.start, entries.stop):
                total[indices[k]] += factor * np.float64(data[k])
        elif mode == EUCLIDEAN and shrink < 1.0:
            columns = indices[entries]
            moved = _onto_ellipsoid(
                data[entries], factor, whitening[columns], stretch[columns], limit
            )
            for j in range(columns.size):
                total[columns[j]] += np.rint(moved[j] * units)
        else:
            factor *= shrink * units
            for k in range(entries.start, entries.stop):
                whitened = np.float64(data[k]) * whitening[indices[k]]
                total[indices[k]] += np.rint(whitened * factor)
    return clipped, nonfinite


@kernel()
def slopes(code: Any, parameter: Any, margins: Any, targets: Any) -> Any:
    """ℓ' elementwise."""
    result = np.empty(margins.size)
    for i in range(margins.size):
        result[i] = slope(code, parameter, margins[i], targets[i])
    return result


@kernel(inline=True)
def _weigh(
    code: Any, parameter: Any, mode: Any, margin: Any, norm: Any, target: Any, limit: Any
) -> Any:
    """ℓ' and what brings ℓ' times a row of this norm within `limit`; NaN: not finite, leave out."""
    factor = slope(code, parameter, margin, target)
    shrink = 1.0
    if mode == UNBOUNDED:
        if not (math.isfinite(margin) and math.isfinite(factor)):
            shrink = math.nan
    elif not abs(factor) * norm <= limit:
        shrink = limit / (abs(factor) * norm) if math.isfinite(factor * norm) else math.nan
    return factor, shrink


@kernel()
def _large_norm(values: Any, whitening: Any) -> Any:
    """‖A^{1/2} a‖ where its square overflows; not finite only if an entry is not."""
    largest = 0.0
    for j in range(values.size):
        largest = max(largest, abs(np.float64(values[j]) * whitening[j]))
    if not math.isfinite(largest):
        return math.inf
    squares = 0.0
    for j in range(values.size):
        squares += (np.float64(values[j]) * whitening[j] / largest) ** 2
    return largest * math.sqrt(squares)


@kernel()
def _onto_ellipsoid(values: Any, factor: Any, whitening: Any, stretch: Any, limit: Any) -> Any:
    """π_A of one gradient in whitened coordinates, of norm ≤ limit to the last ulp."""
    moved = np.empty(values.size)
    for j in range(values.size):
        moved[j] = factor * np.float64(values[j]) * whitening[j]
    root = secular_root(moved, stretch, limit)
    squares = 0.0
    for j in range(moved.size):
        moved[j] /= 1.0 + root * stretch[j]
        squares += moved[j] * moved[j]
    shrink = min(1.0, limit / math.sqrt(squares))
    for j in range(moved.size):
        moved[j] *= shrink
    return moved
