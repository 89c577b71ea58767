"""Fused kernels: sums of bounded gradients of generalized linear models, dense and CSR.

The gradient of one example is ℓ'(⟨a, x⟩) a, so its norm in the ellipsoid and its bounded copy
follow from the row `a` alone. Rows are taken a few at a time: measured, weighed, and added while
they are in the first cache, so that each is read from memory once and no gradient is ever stored.
Contributions are rounded to whole units of the mechanism's grid, so that sums are exact: the same
for any order of the rows and any number of threads.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from privagrad._internal.jit import kernel, prefetch
from privagrad._internal.lanes import LANES, add_product, add_rounded, add_squares
from privagrad._internal.validate import Floats, Integers, Vector
from privagrad.geometry.ellipsoid import euclidean_norm, secular_root
from privagrad.glm.losses import class_slopes, lipschitz, slope

BY_GRADIENT, BY_ROWS, UNBOUNDED = 0, 1, 2

_ROWS = 8
_INFINITY = math.inf


class FlatRows(NamedTuple):
    """Rows of a table, one after the other, as the kernels read them.

    `data` are the entries, `indices` their columns (of a dense table, those of one row), `starts`
    where rows start.
    """

    data: Floats
    indices: Integers
    starts: Integers
    dense: bool


@kernel(reorder=True)
def add_dense(
    total: Vector, per_unit: float, limit: float, array: Floats, batch: Integers, targets: Vector,
    x: Vector, code: int, parameter: float, mode: int, whitening: Vector, scale: Vector | None,
) -> tuple[int, int]:  # fmt: skip
    """total += the batch's gradients; how many were shrunk, how many left out as not finite.

    Gradients beyond the limit are shrunk, or projected onto the ellipsoid of this scale if one is
    given. Without it the projection is not compiled, which takes as long as all the rest.
    """
    dim = x.size
    flat = array.reshape(-1)
    line = 64 // array.itemsize
    margins, norms = np.empty(_ROWS), np.empty(_ROWS)
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
            row = batch[first + i]
            # Not in a loop of its own, whose steps a compiler may put side by side in a vector:
            # exponentials of vectors and single ones round differently.
            factor, shrink = _slope_and_shrink(
                code, parameter, mode, margins[i], norms[i], targets[row], limit
            )
            if math.isnan(shrink):
                nonfinite += 1
                continue
            if mode == UNBOUNDED:
                for j in range(dim):
                    total[j] += factor * np.float64(array[row, j])
            elif scale is not None and shrink < 1.0:
                moved, finite = _onto_ellipsoid(array[row], factor, whitening, scale, limit)
                if not finite:
                    nonfinite += 1
                    continue
                for j in range(dim):
                    total[j] += np.rint(moved[j] * per_unit)
            else:
                factor *= shrink * per_unit
                for j in range(dim):
                    total[j] += np.rint(np.float64(array[row, j]) * whitening[j] * factor)
            clipped += shrink < 1.0
    return clipped, nonfinite


@kernel(reorder=True)
def add_sparse(
    total: Vector, per_unit: float, limit: float, data: Floats, indices: Integers,
    indptr: Integers, batch: Integers, targets: Vector, x: Vector, code: int, parameter: float,
    mode: int, whitening: Vector, scale: Vector | None,
) -> tuple[int, int]:  # fmt: skip
    """`add_dense` for the rows of a canonical CSR matrix."""
    line = 64 // data.itemsize
    clipped = nonfinite = 0
    for i in range(batch.size):
        # First where a row starts, then its entries, when that is known.
        if i + 2 * _ROWS < batch.size:
            prefetch(indptr, batch[i + 2 * _ROWS])
            prefetch(targets, batch[i + 2 * _ROWS])
        if i + _ROWS < batch.size:
            ahead = batch[i + _ROWS]
            for k in range(indptr[ahead], indptr[ahead + 1], line):
                prefetch(data, k)
                prefetch(indices, k)
            prefetch(data, indptr[ahead + 1] - 1)
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
        factor, shrink = _slope_and_shrink(
            code, parameter, mode, margin, norm, targets[batch[i]], limit
        )
        if math.isnan(shrink):
            nonfinite += 1
            continue
        if mode == UNBOUNDED:
            for k in range(entries.start, entries.stop):
                total[indices[k]] += factor * np.float64(data[k])
        elif scale is not None and shrink < 1.0:
            columns = indices[entries]
            moved, finite = _onto_ellipsoid(
                data[entries], factor, whitening[columns], scale[columns], limit
            )
            if not finite:
                nonfinite += 1
                continue
            for j in range(columns.size):
                total[columns[j]] += np.rint(moved[j] * per_unit)
        else:
            factor *= shrink * per_unit
            for k in range(entries.start, entries.stop):
                whitened = np.float64(data[k]) * whitening[indices[k]]
                total[indices[k]] += np.rint(whitened * factor)
        clipped += shrink < 1.0
    return clipped, nonfinite


@kernel(reorder=True)
def add_classes(
    total: Vector, per_unit: float, limit: float, table: FlatRows, batch: Integers,
    targets: Vector, x: Vector, code: int, parameter: float, mode: int, whitening: Vector,
    scale: Vector | None, classes: int, used: Integers,
) -> tuple[int, int]:  # fmt: skip
    """`add_dense` for k classes and rows dense or CSR: the gradient is δ ⊗ a, δ = dℓ/dm.

    Its squared norm is Σ_c δ_c² Σ_j (A^{1/2})_cj² a_j²: no matrix per example. Column j of the
    table is column `used[j]` of x. What is stored class by class is turned to column by column, so
    that the classes of a column lie side by side.
    """
    data, indices, starts, dense = table
    dim = used.size
    lanes = -(-classes // LANES) * LANES
    points = _by_column(x, used, classes, lanes)
    widths = _by_column(whitening, used, classes, lanes)
    axes = widths if scale is None else _by_column(scale, used, classes, lanes)
    sums = np.zeros(dim * lanes)
    margins, powers = np.zeros(lanes), np.zeros(lanes)
    slopes, squares = margins[:classes], powers[:classes]
    clipped = nonfinite = 0
    for i in range(batch.size):
        row = batch[i]
        start, stop = starts[row], starts[row + 1]
        values = data[start:stop]
        columns = indices[:dim] if dense else indices[start:stop]
        _class_margins(values, columns, points, widths, margins, powers)
        class_slopes(code, slopes, np.int64(targets[row]))
        norm = 0.0
        for c in range(classes):
            norm += squares[c] * slopes[c] * slopes[c] if slopes[c] != 0.0 else 0.0
        norm = math.sqrt(norm)
        if mode == BY_ROWS:
            norm = lipschitz(code, parameter) * math.sqrt(squares.max())
        shrink = 1.0
        if not math.isfinite(slopes.sum()):
            shrink = math.nan
        elif mode != UNBOUNDED and not norm <= limit:
            if not math.isfinite(norm):  # squares beyond the largest double, or times 0
                sizes = slopes
                if mode == BY_ROWS:
                    sizes = np.full(classes, lipschitz(code, parameter))
                norm = _large_norm(*_outer(values, columns, sizes, widths))
            shrink = limit / norm if math.isfinite(norm) else math.nan
        if math.isnan(shrink):
            nonfinite += 1
            continue
        if mode == UNBOUNDED:
            for k in range(values.size):
                for c in range(classes):
                    sums[columns[k] * lanes + c] += slopes[c] * np.float64(values[k])
        elif scale is not None and shrink < 1.0:
            flat, weights = _outer(values, columns, slopes, widths)
            _, scales = _outer(values, columns, slopes, axes)
            moved, finite = _onto_ellipsoid(flat, 1.0, weights, scales, limit)
            if not finite:
                nonfinite += 1
                continue
            for c in range(classes):
                for k in range(values.size):
                    unit = moved[c * values.size + k] * per_unit
                    sums[columns[k] * lanes + c] += np.rint(unit)
        else:
            for c in range(lanes):
                margins[c] = slopes[c] * shrink * per_unit if c < classes else 0.0
            _add_to_classes(values, columns, margins, widths, sums)
        clipped += shrink < 1.0
    wide = x.size // classes
    for c in range(classes):
        for j in range(dim):
            total[c * wide + used[j]] += sums[j * lanes + c]
    return clipped, nonfinite


@kernel()
def _by_column(x: Vector, used: Integers, classes: int, lanes: int) -> Vector:
    """What is stored class by class, by the columns used: `lanes` numbers each, the last ones 0."""
    wide = x.size // classes
    turned = np.zeros(used.size * lanes)
    for c in range(classes):
        for j in range(used.size):
            turned[j * lanes + c] = x[c * wide + used[j]]
    return turned


@kernel(reorder=True, inline=True)
def _class_margins(
    values: Floats, columns: Integers, points: Vector, widths: Vector, margins: Vector,
    squares: Vector,
) -> None:  # fmt: skip
    """⟨a, x_c⟩ and ‖A_c^{1/2} a‖² for all classes c."""
    lanes = margins.size
    margins[:] = 0.0
    squares[:] = 0.0
    for k in range(values.size):
        value, at = np.float64(values[k]), columns[k] * lanes
        for c in range(0, lanes, LANES):
            add_product(margins, c, value, points, at + c)
            add_squares(squares, c, value, widths, at + c)


@kernel(reorder=True, inline=True)
def _add_to_classes(
    values: Floats, columns: Integers, factors: Vector, widths: Vector, sums: Vector
) -> None:
    """sums += round(factor_c A_c^{1/2} a) for all classes c, column by column."""
    lanes = factors.size
    for k in range(values.size):
        value, at = np.float64(values[k]), columns[k] * lanes
        for c in range(0, lanes, LANES):
            add_rounded(sums, at + c, value, widths, factors, c)


@kernel()
def _outer(
    values: Floats, columns: Integers, slopes: Vector, by_column: Vector
) -> tuple[Vector, Vector]:
    """δ ⊗ a over the entries of one row, flat, and the weights of the same coordinates."""
    size, lanes = values.size, -(-slopes.size // LANES) * LANES
    flat, chosen = np.empty(slopes.size * size), np.empty(slopes.size * size)
    for c in range(slopes.size):
        for k in range(size):
            flat[c * size + k] = np.float64(values[k]) * slopes[c]
            chosen[c * size + k] = by_column[columns[k] * lanes + c]
    return flat, chosen


@kernel(reorder=True, inline=True)
def product(values: Floats, columns: Integers, dense: bool, x: Vector, at: int) -> float:
    """⟨a, x⟩ for one class, whose coordinates start at `at`."""
    product = 0.0
    if dense:
        for j in range(values.size):
            product += np.float64(values[j]) * x[at + j]
    else:
        for k in range(values.size):
            product += np.float64(values[k]) * x[at + columns[k]]
    return product


@kernel(reorder=True)
def all_margins(table: FlatRows, x: Vector, classes: int) -> Vector:
    """⟨a_i, x_c⟩ of every row i and class c: a row's depend on the row and x alone."""
    data, indices, starts, dense = table
    dim = x.size // classes
    margins = np.empty((starts.size - 1, classes))
    for i in range(starts.size - 1):
        values = data[starts[i] : starts[i + 1]]
        columns = indices[:dim] if dense else indices[starts[i] : starts[i + 1]]
        for c in range(classes):
            margins[i, c] = product(values, columns, dense, x, c * dim)
    return margins


@kernel()
def all_norms(table: FlatRows, whitening: Vector) -> Vector:
    """‖A^{1/2} a_i‖ of every row, for the first class."""
    data, indices, starts, dense = table
    norms = np.empty(starts.size - 1)
    for i in range(starts.size - 1):
        first = starts[i] if dense else 0
        squares = 0.0
        for k in range(starts[i], starts[i + 1]):
            squares += (np.float64(data[k]) * whitening[indices[k - first]]) ** 2
        norms[i] = math.sqrt(squares)
    return norms


@kernel(reorder=True)
def fill_gradients(
    table: FlatRows, batch: Integers, targets: Vector, x: Vector, code: int, parameter: float,
    classes: int, multiclass: bool, gradients: Vector, finite: NDArray[np.bool_],
) -> None:  # fmt: skip
    """Each of the batch's gradients as a row of `gradients`, and whether it is finite.

    BLAS would be no help: its rounding depends on a row's place in the batch.
    """
    data, indices, starts, dense = table
    dim = x.size // classes
    slopes = np.empty(classes)
    for i in range(batch.size):
        row = batch[i]
        values = data[starts[row] : starts[row + 1]]
        columns = indices[:dim] if dense else indices[starts[row] : starts[row + 1]]
        for c in range(classes):
            slopes[c] = product(values, columns, dense, x, c * dim)
        if multiclass:
            class_slopes(code, slopes, np.int64(targets[row]))
        else:
            slopes[0] = slope(code, parameter, slopes[0], targets[row])
        strange = 0.0
        for c in range(classes):
            if dense:
                for j in range(dim):
                    entry = np.float64(values[j]) * slopes[c]
                    gradients[i, c * dim + j] = entry
                    strange += 0.0 * entry  # NaN from then on if one is not finite
            else:
                for k in range(values.size):
                    entry = np.float64(values[k]) * slopes[c]
                    gradients[i, c * dim + columns[k]] = entry
                    strange += 0.0 * entry
        finite[i] = strange == 0.0


@kernel(inline=True)
def _slope_and_shrink(
    code: int, parameter: float, mode: int, margin: float, norm: float, target: float, limit: float
) -> tuple[float, float]:
    """ℓ' and what brings ℓ' times a row of this norm within `limit`; NaN: not finite, leave out."""
    factor = slope(code, parameter, margin, target)
    shrink = 1.0
    if mode == UNBOUNDED:
        if not (math.isfinite(margin) and math.isfinite(factor)):
            shrink = math.nan
    else:
        size = (lipschitz(code, parameter) if mode == BY_ROWS else abs(factor)) * norm
        if math.isnan(factor):
            shrink = math.nan
        elif not size <= limit:
            shrink = limit / size if math.isfinite(size) else math.nan
    return factor, shrink


@kernel()
def _large_norm(values: Floats, whitening: Vector) -> float:
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
def _onto_ellipsoid(
    values: Floats, factor: float, whitening: Vector, scale: Vector, limit: float
) -> tuple[Vector, bool]:
    """π_A of one gradient in whitened coordinates, of norm ≤ limit, and whether it is finite."""
    moved = np.empty(values.size)
    for j in range(values.size):
        # The whitened row is finite; a slope times an entry of it might not be.
        moved[j] = np.float64(values[j]) * whitening[j] * factor
    root, top = secular_root(moved, scale, limit)
    if root > 0.0:
        for j in range(moved.size):
            moved[j] /= 1.0 + root * (scale[j] / top)
    norm = euclidean_norm(moved)
    if norm > limit:
        for j in range(moved.size):
            moved[j] *= limit / norm
    return moved, math.isfinite(norm)
