"""Gradients of generalized linear models, bounded to an ellipsoid and summed batch by batch."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from privagrad._internal.threads import add_parts
from privagrad._internal.validate import Vector
from privagrad.geometry.ellipsoid import Ellipsoid, Projection
from privagrad.glm import kernels
from privagrad.glm.examples import Examples, PartitionedExamples
from privagrad.glm.losses import Loss
from privagrad.glm.rows import DenseRows, SparseRows, as_targets
from privagrad.privacy.bounded import Adds, BoundedSum
from privagrad.privacy.sampling import Rows, Samples

_MODES = {
    "radial": kernels.BY_GRADIENT,
    "euclidean": kernels.BY_GRADIENT,
    "rows": kernels.BY_ROWS,
}
Shape = tuple[int, Vector, Vector | None]
"""How gradients are bounded, the whitening, and the scale where they are projected onto it."""

_PARTS, _SPLIT_FROM, _SPLIT_PLAIN_FROM = 4, 500_000, 1_000_000
"""Into how many parts a batch is cut for threads, and from how many entries on. Bounded sums are
exact, whatever the cut. Plain ones depend on it, so that they are cut by the work alone."""


def shape_of(ellipsoid: Ellipsoid, projection: Projection) -> Shape:
    """The shape that gradients are bounded to."""
    scale = ellipsoid.scale if projection == "euclidean" else None
    return _MODES[projection], ellipsoid.whitening, scale


class LinearGradients(Protocol):
    """Gradients of a generalized linear model, wherever its rows are."""

    @property
    def loss(self) -> Loss:
        """The loss."""

    @property
    def outputs(self) -> int:
        """The number of classes, or 1."""

    @property
    def examples(self) -> Examples | PartitionedExamples:
        """The rows and targets."""


@dataclass(frozen=True)
class GlmGradients:
    """Gradients of a GLM loss over the rows of a table, bounded and summed batch by batch.

    With several `outputs`, one per class, x holds the weights of one class after the other. Rows
    that are `left_out` have no target: they are rows of zeros.
    """

    loss: Loss
    rows: DenseRows | SparseRows
    targets: Vector
    outputs: int = 1
    left_out: NDArray[np.bool_] | None = None

    def __post_init__(self) -> None:
        self.loss.check_targets(self.targets, self.rows.shape[0], self.outputs)

    @classmethod
    def of(cls, loss: Loss, rows: DenseRows | SparseRows, y: Any) -> GlmGradients:
        """From targets as users give them."""
        targets = loss.targets(as_targets(y), rows.shape[0])
        return cls(loss, rows, targets, int(targets.max()) + 1 if loss.multiclass else 1)

    @cached_property
    def dim(self) -> int:
        return self.rows.shape[1] * self.outputs

    @cached_property
    def n_examples(self) -> int:
        return self.rows.shape[0]

    @cached_property
    def examples(self) -> Examples:
        return Examples(self.rows, self.targets, self.left_out)

    def take(self, rows: Rows) -> GlmGradients:
        """The gradients of some rows."""
        some = self.examples.take(rows)
        return replace(self, rows=some.rows, targets=some.targets, left_out=some.left_out)

    def draw(self, samples: Samples) -> Iterator[Rows]:
        """The rows of every step of a run."""
        return iter(samples)

    def slack(self, batch_size: float) -> float:
        """What a row can move beyond its own vector: nothing, every row is computed by itself."""
        return 0.0

    def value(self, x: Vector) -> float:
        """The mean loss over all rows. Not private."""
        weights = x.reshape(self.outputs, -1).T if self.loss.multiclass else x
        return float(self.loss.value(self.rows.margins(weights), self.targets).mean())

    def value_and_gradient(self, x: Vector) -> tuple[float, Vector]:
        """The mean loss over all rows and its gradient. Not private."""
        total, count = np.zeros_like(x), self.rows.shape[0]
        self.add_plain(total, x, np.arange(count))
        return self.value(x), total / count

    def per_example(self, x: Vector, batch: Rows) -> Vector:
        """The batch's gradients that are finite, as the rows of a dense matrix.

        Guarantees
        ----------
        A gradient depends on its row, its target and x alone: not on the rest of the batch.
        """
        gradients = np.zeros((batch.size, self.dim))
        finite = np.empty(batch.size, dtype=np.bool_)
        kernels.fill_gradients(
            self.rows.flat, batch, self.targets, self.point(x), *self.loss.key, self.outputs,
            self.loss.multiclass, gradients, finite,
        )  # fmt: skip
        return gradients[finite]

    def point(self, x: Vector) -> Vector:
        """x, whose size the kernels do not check."""
        if x.shape != (self.dim,):
            raise ValueError(f"Expected a point of shape ({self.dim},), found shape {x.shape}.")
        return x

    def add_bounded(
        self,
        total: BoundedSum,
        x: Vector,
        batch: Rows,
        projection: Projection = "radial",
        pool: Executor | None = None,
    ) -> None:
        """total += Σ_i round(A^{1/2} bound(∇F(x; z_i)) / grid) over the rows of the batch.

        Guarantees
        ----------
        Before rounding, every example's vector has Euclidean norm ≤ 1 in real numbers: its norm
        as computed is at most the mechanism's limit. Rounding adds at most sqrt(d)/2 units, within
        the mechanism's sensitivity.
        """
        if total.ellipsoid is None:
            raise ValueError("Expected a sum in the coordinates of an ellipsoid, found none.")
        total.add_by(self.add_units, x, batch, shape_of(total.ellipsoid, projection), pool)

    def add_plain(
        self, total: Vector, x: Vector, batch: Rows, pool: Executor | None = None
    ) -> tuple[int, int]:
        """total += Σ_i ∇F(x; z_i) over the rows of the batch: no bound, no grid.

        It returns 0 and how many gradients were left out because they are not finite.
        """
        return self.add_units(total, 1.0, 1.0, x, batch, (kernels.UNBOUNDED, x, None), pool)

    def add_units(
        self,
        total: Vector,
        per_unit: float,
        limit: float,
        x: Vector,
        batch: Rows,
        shape: Shape,
        pool: Executor | None,
    ) -> tuple[int, int]:
        """Add the batch's gradients in units, each bounded to this shape and within the limit.

        It returns how many were shrunk, and how many left out because they are not finite.
        """
        if not total.size == x.size == self.dim:
            raise ValueError(
                f"Expected a point and a sum of {self.dim} coordinates, found {x.size} and "
                f"{total.size}."
            )
        work = batch.size * self.rows.entries_per_row * self.outputs
        fixed: tuple[Any, ...] = (self.targets, x, *self.loss.key, *shape)
        kernel: tuple[Adds, tuple[Any, ...]] = self.rows.kernel
        if self.loss.multiclass:
            rows, used = self.rows, np.arange(self.rows.shape[1])
            if isinstance(rows, SparseRows) and work < x.size:
                # The kernel reads and writes all columns that it is given.
                rows, used = rows.narrowed(batch)
                fixed = (self.targets[batch], *fixed[1:])
                batch = np.arange(batch.size)
            kernel, fixed = (kernels.add_classes, (rows.flat,)), (*fixed, self.outputs, used)
        add, table = kernel
        plain = shape[0] == kernels.UNBOUNDED
        least = _SPLIT_PLAIN_FROM if plain else _SPLIT_FROM
        if work < max(least, 8 * x.size) or (pool is None and not plain):
            return add(total, per_unit, limit, *table, batch, *fixed)

        def add_part(partial: Vector, part: Rows) -> tuple[int, int]:
            return add(partial, per_unit, limit, *table, part, *fixed)

        return add_parts(total, add_part, np.array_split(batch, _PARTS), pool)
