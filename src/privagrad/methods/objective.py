"""Any convex objective (1/n) Σ_i F(x; z_i), from the gradients of single examples."""

from __future__ import annotations

import math
from collections.abc import Iterator
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np

from privagrad._internal.jit import kernel
from privagrad._internal.validate import Vector, integer
from privagrad.geometry.ellipsoid import Projection, euclidean_norm, secular_root
from privagrad.glm.rows import DenseRows
from privagrad.privacy.bounded import Adds, BoundedSum
from privagrad.privacy.grid import ULP
from privagrad.privacy.sampling import Rows, Samples

_CHUNK_BYTES = 2**25
"""The most memory for the gradients of one chunk of examples."""

APART = 2.0**-40
"""How far other examples of a chunk may move a coordinate of a gradient by rounding, relative to
its size."""


@runtime_checkable
class Objective(Protocol):
    """F(x; z_i) for examples i = 0, ..., n_examples - 1, as `minimize` takes it.

    `value(x)`, the mean of F(x; z_i) over all examples, is optional: `minimize` never calls it.

    Guarantees
    ----------
    What the user must guarantee: row k of ``per_example_gradients(x, rows)`` depends on x, on
    example ``rows[k]`` and on public numbers alone, up to rounding: each coordinate to 2^-40 of
    its size. The examples are numbered once and for all; `dim` and `n_examples` are public.
    `privagrad.testing.check_objective` searches for violations.

    Products of matrices round by a row's place in the batch. Where F bends, that could decide on
    which side an example lies that is exactly on the bend: sum such margins row by row,
    ``(A[rows] * x).sum(axis=1)``, which does not depend on the batch.
    """

    @property
    def dim(self) -> int:
        """The dimension of x."""

    @property
    def n_examples(self) -> int:
        """The number of examples."""

    def per_example_gradients(self, x: Vector, rows: Rows) -> Vector:
        """∇F(x; z_i) for the examples i in `rows`, an array of shape (len(rows), dim)."""


@dataclass(frozen=True)
class ObjectiveGradients:
    """The gradients of an `Objective`, bounded and summed in chunks of bounded memory.

    Guarantees
    ----------
    Each example's vector is bounded to norm ≤ 1 by itself. The rounding of the user's arithmetic
    may depend on which other examples are in the chunk; `slack` covers that, and the rounding of
    sums.
    """

    objective: Objective
    dim: int = field(init=False)
    n_examples: int = field(init=False)

    def __post_init__(self) -> None:
        # Asked once: the plan and the kernels rely on both.
        for name in ("dim", "n_examples"):
            value = integer(f"objective.{name}", getattr(self.objective, name))
            object.__setattr__(self, name, value)

    def draw(self, samples: Samples) -> Iterator[Rows]:
        return iter(samples)

    def slack(self, batch_size: float) -> float:
        # No Poisson batch beyond twice its expectation plus 64 is seen in practice (1e-20).
        most = 2 * batch_size + 64
        # Bounding a vector moves it by a few times what moved the gradient.
        return most * (8 * APART + most * ULP)

    def chunks(self, x: Vector, batch: Rows) -> Iterator[Vector]:
        """The batch's gradients, checked, some rows at a time."""
        for rows in self._parts(batch):
            yield self._asked(x, rows)

    def chunks_alone(self, x: Vector, batch: Rows) -> Iterator[Vector]:
        """`chunks` where each gradient is asked for by itself: not even rounding sees others."""
        for rows in self._parts(batch):
            yield np.concatenate([self._asked(x, row).copy() for row in rows[:, None]])

    def _parts(self, batch: Rows) -> Iterator[Rows]:
        size = max(1, _CHUNK_BYTES // (8 * self.dim))
        for first in range(0, batch.size, size):
            yield batch[first : first + size]

    def _asked(self, x: Vector, rows: Rows) -> Vector:
        found = np.asarray(self.objective.per_example_gradients(x.copy(), rows), dtype=np.float64)
        if found.shape != (rows.size, self.dim):
            raise ValueError(
                f"Expected per_example_gradients of shape ({rows.size}, {self.dim}), one "
                f"gradient for each of the rows, found shape {found.shape}."
            )
        return np.ascontiguousarray(found)

    def add_bounded(
        self,
        total: BoundedSum,
        x: Vector,
        batch: Rows,
        projection: Projection = "radial",
        pool: Executor | None = None,
    ) -> None:
        """total += Σ_i A^{1/2} bound(∇F(x; z_i)) over the examples of the batch."""
        if (ellipsoid := total.ellipsoid) is None:
            raise ValueError("Expected a sum in the coordinates of an ellipsoid, found none.")
        shape = ellipsoid.whitening, ellipsoid.scale, projection == "euclidean"
        for gradients in self.chunks(x, batch):
            total.add_by(_add_gradients, gradients, *shape)

    def add_plain(
        self, total: Vector, x: Vector, batch: Rows, pool: Executor | None = None
    ) -> tuple[int, int]:
        """total += Σ_i ∇F(x; z_i); gradients that are not finite are left out and counted."""
        left_out = 0
        for gradients in self.chunks(x, batch):
            finite = np.isfinite(gradients).all(axis=1)
            left_out += int((~finite).sum())
            total += gradients[finite].sum(axis=0)
        return 0, left_out

    def per_example(self, x: Vector, batch: Rows) -> Vector:
        """The batch's gradients that are finite, one a row."""
        # What is made of gradients one by one may amplify rounding, so they are asked for alone.
        finite = [chunk[np.isfinite(chunk).all(axis=1)] for chunk in self.chunks_alone(x, batch)]
        return np.concatenate([np.empty((0, self.dim)), *finite])

    def at(self, x: Vector, examples: Rows | None = None) -> GradientTable:
        """The gradients at `x`, of all or of these examples, as the rows of a table."""
        asked = np.arange(self.n_examples) if examples is None else examples
        return GradientTable(self, x.copy(), asked)


@dataclass(frozen=True)
class GradientTable:
    """Gradients of an objective at one point, as rows that queries read part by part.

    Votes for octaves have no slack: where a gradient is a power of two, its last digit decides.
    Each gradient is therefore asked for by itself.
    """

    gradients: ObjectiveGradients
    x: Vector
    examples: Rows

    @property
    def shape(self) -> tuple[int, int]:
        return self.examples.size, self.gradients.dim

    def add_to(self, total: BoundedSum, add: Adds, *arguments: Any) -> None:
        for chunk in self.gradients.chunks_alone(self.x, self.examples):
            DenseRows(chunk).add_to(total, add, *arguments)


@kernel()
def _add_gradients(
    total: Vector, per_unit: float, limit: float, gradients: Vector, whitening: Vector,
    scale: Vector, euclidean: bool,
) -> tuple[int, int]:  # fmt: skip
    """Whiten each row, bound it to `limit` and add it in units, which the release rounds."""
    moved = np.empty(whitening.size)
    clipped = nonfinite = 0
    for i in range(gradients.shape[0]):
        for j in range(moved.size):
            moved[j] = gradients[i, j] * whitening[j]
        norm = euclidean_norm(moved)
        if not math.isfinite(norm):
            nonfinite += 1
            continue
        if norm > limit:
            clipped += 1
            if euclidean:
                root, top = secular_root(moved, scale, limit)
                for j in range(moved.size):
                    moved[j] /= 1.0 + root * (scale[j] / top)
                norm = euclidean_norm(moved)
        factor = per_unit if norm <= limit else per_unit * (limit / norm)
        for j in range(moved.size):
            total[j] += moved[j] * factor
    return clipped, nonfinite
