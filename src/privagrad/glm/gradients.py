"""Gradients of generalized linear models, bounded to an ellipsoid and summed batch by batch."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from privagrad._internal.validate import Vector
from privagrad.geometry.ellipsoid import Ellipsoid, Projection
from privagrad.glm import kernels
from privagrad.glm.losses import Loss
from privagrad.glm.rows import DenseRows, SparseRows, as_targets
from privagrad.privacy.mechanism import ULP
from privagrad.privacy.sampling import Rows

_MODES = {
    "radial": kernels.RADIAL,
    "euclidean": kernels.EUCLIDEAN,
    "rows": kernels.BY_ROWS,
}
_PARTS, _SPLIT_FROM = 4, 1_000_000


@dataclass(frozen=True)
class GlmGradients:
    """Gradients of a GLM loss over the rows of a table, bounded and summed batch by batch.

    With several `outputs`, one a class, x holds the weights of one class after the other.
    """

    loss: Loss
    rows: DenseRows | SparseRows
    targets: Vector
    outputs: int = 1

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

    def objective(self, x: Vector) -> float:
        """The mean loss over all rows. Not private."""
        weights = x.reshape(self.outputs, -1).T if self.loss.multiclass else x
        return float(self.loss.value(self.rows.margins(weights), self.targets).mean())

    def objective_and_gradient(self, x: Vector) -> tuple[float, Vector]:
        """The mean loss over all rows and its gradient. Not private."""
        total, count = np.zeros_like(x), self.rows.shape[0]
        self.add_plain(total, x, np.arange(count))
        return self.objective(x), total / count

    def per_example(self, x: Vector, batch: Rows) -> Vector:
        """The batch's gradients that are finite, one a row of a dense matrix.

        Guarantees
        ----------
        A gradient depends on its row, its target and x alone: not on the rest of the batch.
        """
        gradients = np.zeros((batch.size, self.dim))
        finite = np.empty(batch.size, dtype=np.bool_)
        kernels.fill_gradients(
            *self.rows.flat, batch, self.targets, self.point(x), *self.loss.key, self.outputs,
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
        if ellipsoid.scale.size != self.dim:
            raise ValueError(
                f"Expected an ellipsoid of dimension {self.dim}, found {ellipsoid.dim}."
            )
        limit = 1.0 - (x.size + 8) * ULP
        shape = (ellipsoid.whitening, ellipsoid.scale, 1.0 / grid, limit)
        return self._add(units, x, batch, _MODES[projection], *shape, pool=pool)

    def add_plain(
        self, total: Vector, x: Vector, batch: Rows, pool: Executor | None = None
    ) -> tuple[int, int]:
        """total += Σ_i ∇F(x; z_i) over the rows of the batch: no bound, no grid."""
        return self._add(total, x, batch, kernels.UNBOUNDED, x, x, 1.0, 1.0, pool=pool)

    def _add(
        self,
        total: Vector,
        x: Vector,
        batch: Rows,
        mode: int,
        *shape: Any,
        pool: Executor | None,
    ) -> tuple[int, int]:
        if not total.size == x.size == self.dim:
            raise ValueError(
                f"Expected a point and a sum of {self.dim} coordinates, found {x.size} and "
                f"{total.size}."
            )
        fixed = (self.targets, x, *self.loss.key, mode, *shape)
        fused: tuple[Callable[..., tuple[int, int]], tuple[Any, ...]] = self.rows.kernel
        if self.loss.multiclass:
            fused, fixed = (kernels.add_classes, self.rows.flat), (*fixed, self.outputs)
        add, table = fused
        if batch.size * self.rows.entries_per_row * self.outputs < max(_SPLIT_FROM, 8 * x.size):
            return add(*table, batch, total, *fixed)

        # Cut by the work alone, so that results do not depend on the number of threads.
        def add_part(part: Rows) -> tuple[Vector, int, int]:
            partial = np.zeros_like(total)
            return partial, *add(*table, part, partial, *fixed)

        run = map if pool is None else pool.map
        clipped = nonfinite = 0
        for partial, shrunk, left_out in run(add_part, np.array_split(batch, _PARTS)):
            total += partial
            clipped += shrunk
            nonfinite += left_out
        return clipped, nonfinite
