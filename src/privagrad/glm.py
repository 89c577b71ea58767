"""Fused kernels: sums of bounded gradients of generalized linear models, dense and CSR.

The gradient of one example is ℓ'(⟨a, x⟩) a, so its norm in the ellipsoid and its bounded copy
follow from the row `a` alone: each row is read once, while it is in cache, and no gradient is
ever stored. Contributions are rounded to whole units of the mechanism's grid, so that sums are
exact: the same for any order of the rows and any number of threads.
"""

from __future__ import annotations

import math
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from privagrad._threads import prefetch
from privagrad._validate import Vector
from privagrad.geometry import Ellipsoid, Projection, secular_root
from privagrad.losses import Loss, slope
from privagrad.sampling import Rows

# Sums may be re-ordered and fused, but infinities and NaN keep their meaning.
_REORDER = {"reassoc", "contract", "nsz", "arcp"}
_AHEAD = 6
_SPLIT_FROM = 1_000_000
_ULP = 2.0**-52
_INF = math.inf

_RADIAL, _EUCLIDEAN, _UNBOUNDED = 0, 1, 2
_MODES = {"radial": _RADIAL, "euclidean": _EUCLIDEAN}


@dataclass(frozen=True)
class DenseRows:
    """Rows of a C-ordered float32 or float64 array of shape (n, d)."""

    array: NDArray[Any]

    @property
    def shape(self) -> tuple[int, int]:
        return self.array.shape[0], self.array.shape[1]

    @property
    def entries_per_row(self) -> float:
        return self.array.shape[1]

    def margins(self, x: Vector) -> Vector:
        return np.asarray(self.array @ x, dtype=np.float64)

    def add_gradients(self, *arguments: Any) -> tuple[int, int]:
        return _add_dense(self.array, *arguments)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class SparseRows:
    """Rows of a canonical CSR matrix: in each row, column numbers strictly increase."""

    data: NDArray[Any]
    indices: NDArray[Any]
    indptr: NDArray[Any]
    dim: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.indptr.size - 1, self.dim

    @property
    def entries_per_row(self) -> float:
        return self.data.size / max(self.indptr.size - 1, 1)

    def margins(self, x: Vector) -> Vector:
        from scipy.sparse import csr_array

        matrix = csr_array((self.data, self.indices, self.indptr), shape=self.shape)
        return np.asarray(matrix @ x, dtype=np.float64)

    def add_gradients(self, *arguments: Any) -> tuple[int, int]:
        return _add_sparse(  # type: ignore[no-any-return]
            self.data, self.indices, self.indptr, *arguments
        )


@dataclass(frozen=True)
class GlmGradients:
    """Gradients of a GLM loss over the rows of a table, bounded and summed batch by batch."""

    loss: Loss
    rows: DenseRows | SparseRows
    targets: Vector

    def objective(self, x: Vector) -> float:
        """The mean loss over all rows. Not private."""
        return float(self.loss.value(self.rows.margins(x), self.targets).mean())

    def add_bounded(
        self,
        units: Vector,
        x: Vector,
        batch: Rows,
        ellipsoid: Ellipsoid,
        grid: float,
        projection: Projection = "radial",
        pool: Executor | None = None,
    ) -> tuple[int, int]:
        """units += Σ_i round(A^{1/2} bound(∇F(x; z_i)) / grid) over the rows of the batch.

        Returns how many examples were shrunk and how many were left out because their gradient
        is not finite: both are facts about the data, not private.

        Guarantees
        ----------
        Before rounding, every example's vector has Euclidean norm ≤ 1 in real numbers: the bound
        is shrunk by more ulps than the norm's rounding errors can amount to. Rounding adds at
        most sqrt(d)/2 units, within the sensitivity that `mechanism.GaussianSum` declares.
        """
        limit = 1.0 - (x.size + 8) * _ULP
        shape = (ellipsoid.whitening, ellipsoid.stretch, 1.0 / grid, limit)
        return self._add(units, x, batch, _MODES[projection], *shape, pool=pool)

    def add_plain(
        self, total: Vector, x: Vector, batch: Rows, pool: Executor | None = None
    ) -> tuple[int, int]:
        """total += Σ_i ∇F(x; z_i) over the rows of the batch: no bound, no grid."""
        return self._add(total, x, batch, _UNBOUNDED, x, x, 1.0, 1.0, pool=pool)

    def _add(
        self,
        total: Vector,
        x: Vector,
        batch: Rows,
        mode: int,
        *shape: Any,
        pool: Executor | None,
    ) -> tuple[int, int]:
        fixed = (self.targets, x, self.loss.code, self.loss.parameter, mode, *shape)
        work = batch.size * self.rows.entries_per_row
        if work < max(_SPLIT_FROM, 8 * x.size):
            return self.rows.add_gradients(batch, total, *fixed)

        # Cut by the work alone, so that results do not depend on the number of threads.
        def add_part(part: Rows) -> tuple[Vector, int, int]:
            partial = np.zeros_like(total)
            return partial, *self.rows.add_gradients(part, partial, *fixed)

        run = map if pool is None else pool.map
        clipped = nonfinite = 0
        for partial, shrunk, left_out in run(add_part, np.array_split(batch, 4)):
            total += partial
            clipped += shrunk
            nonfinite += left_out
        return clipped, nonfinite


@njit(cache=True, nogil=True, error_model="numpy", fastmath=_REORDER)
def _add_dense(
    array: Any, batch: Any, total: Any, targets: Any, x: Any, code: Any, parameter: Any,
    mode: Any, whitening: Any, stretch: Any, units: Any, limit: Any,
) -> Any:  # fmt: skip
    dim = x.size
    flat = array.reshape(-1)
    line = 64 // array.itemsize
    scratch = np.empty(dim if mode == _EUCLIDEAN else 0)
    # Targets lie scattered: gathered first, their cache misses overlap.
    gathered = targets[batch]
    clipped = 0
    nonfinite = 0
    for i in range(batch.size):
        if i + _AHEAD < batch.size:
            start = batch[i + _AHEAD] * dim
            for j in range(0, dim, line):
                prefetch(flat, start + j)
        row = array[batch[i]]
        margin = 0.0
        squares = 0.0
        for j in range(dim):
            value = np.float64(row[j])
            whitened = value * whitening[j]
            margin += value * x[j]
            squares += whitened * whitened
        factor = slope(code, parameter, margin, gathered[i])
        norm = abs(factor) * (_large_norm(row, whitening) if squares == _INF else math.sqrt(squares))
        shrink = _shrinkage(mode, margin, factor, norm, limit)
        if math.isnan(shrink):
            nonfinite += 1
            continue
        clipped += shrink < 1.0
        if mode == _UNBOUNDED:
            for j in range(dim):
                total[j] += factor * np.float64(row[j])
        elif shrink < 1.0 and mode == _EUCLIDEAN:
            for j in range(dim):
                scratch[j] = factor * np.float64(row[j]) * whitening[j]
            _move_onto_ellipsoid(scratch, stretch, limit)
            for j in range(dim):
                total[j] += np.rint(scratch[j] * units)
        else:
            factor *= shrink * units
            for j in range(dim):
                total[j] += np.rint(np.float64(row[j]) * whitening[j] * factor)
    return clipped, nonfinite


@njit(cache=True, nogil=True, error_model="numpy", fastmath=_REORDER)
def _add_sparse(
    data: Any, indices: Any, indptr: Any, batch: Any, total: Any, targets: Any, x: Any, code: Any,
    parameter: Any, mode: Any, whitening: Any, stretch: Any, units: Any, limit: Any,
) -> Any:  # fmt: skip
    gathered = targets[batch]
    starts = indptr[batch]
    stops = indptr[batch + 1]
    line = 64 // data.itemsize
    clipped = 0
    nonfinite = 0
    for i in range(batch.size):
        if i + 1 < batch.size:
            for j in range(starts[i + 1], stops[i + 1], line):
                prefetch(data, j)
                prefetch(indices, j)
        values = data[starts[i] : stops[i]]
        columns = indices[starts[i] : stops[i]]
        margin = 0.0
        squares = 0.0
        for j in range(columns.size):
            value = np.float64(values[j])
            whitened = value * whitening[columns[j]]
            margin += value * x[columns[j]]
            squares += whitened * whitened
        factor = slope(code, parameter, margin, gathered[i])
        norm = abs(factor) * (
            _large_norm(values, whitening[columns]) if squares == _INF else math.sqrt(squares)
        )
        shrink = _shrinkage(mode, margin, factor, norm, limit)
        if math.isnan(shrink):
            nonfinite += 1
            continue
        clipped += shrink < 1.0
        if mode == _UNBOUNDED:
            for j in range(columns.size):
                total[columns[j]] += factor * np.float64(values[j])
        elif shrink < 1.0 and mode == _EUCLIDEAN:
            scratch = factor * values * whitening[columns]
            _move_onto_ellipsoid(scratch, stretch[columns], limit)
            for j in range(columns.size):
                total[columns[j]] += np.rint(scratch[j] * units)
        else:
            factor *= shrink * units
            for j in range(columns.size):
                total[columns[j]] += np.rint(np.float64(values[j]) * whitening[columns[j]] * factor)
    return clipped, nonfinite


@njit(cache=True, nogil=True, error_model="numpy", inline="always")
def _shrinkage(mode: Any, margin: Any, factor: Any, norm: Any, limit: Any) -> Any:
    """What brings a vector of this norm within `limit`; NaN leaves it out as not finite."""
    if mode == _UNBOUNDED:
        return 1.0 if math.isfinite(margin) and math.isfinite(factor) else math.nan
    if norm <= limit:
        return 1.0
    return limit / norm if math.isfinite(norm) else math.nan


@njit(cache=True, nogil=True, error_model="numpy")
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


@njit(cache=True, nogil=True, error_model="numpy")
def _move_onto_ellipsoid(whitened: Any, stretch: Any, limit: Any) -> Any:
    """π_A in whitened coordinates, then onto norm ≤ limit whatever the root's last ulps are."""
    root = secular_root(whitened, stretch, limit)
    squares = 0.0
    for j in range(whitened.size):
        whitened[j] /= 1.0 + root * stretch[j]
        squares += whitened[j] * whitened[j]
    shrink = min(1.0, limit / math.sqrt(squares))
    for j in range(whitened.size):
        whitened[j] *= shrink
