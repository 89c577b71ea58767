"""Gradients of generalized linear models over rows in partitions."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from privagrad._internal.threads import pool_of
from privagrad._internal.validate import Vector
from privagrad.geometry.ellipsoid import Projection
from privagrad.glm.examples import Examples, PartitionedExamples, StepOfRun, add_part
from privagrad.glm.gradients import GlmGradients, Shape, shape_of
from privagrad.glm.losses import Loss
from privagrad.privacy.bounded import BoundedSum
from privagrad.privacy.sampling import Samples


@dataclass(frozen=True)
class PartitionedGradients:
    """`GlmGradients` of rows in partitions: each partition bounds and sums those of its rows.

    Guarantees
    ----------
    Partitions add whole units of the mechanism's grid, so that the sum is the same to the last bit
    as that of all rows in memory. Gradients of single rows stay where the rows are.
    """

    loss: Loss
    examples: PartitionedExamples
    outputs: int = 1

    @property
    def dim(self) -> int:
        return self.examples.shape[1] * self.outputs

    @property
    def n_examples(self) -> int:
        return self.examples.shape[0]

    @property
    def rows(self) -> Any:
        """The features, for queries about them."""
        return self.examples.rows

    def slack(self, batch_size: float) -> float:
        return 0.0

    def draw(self, samples: Samples) -> Iterator[StepOfRun]:
        """Every step of a run; its rows are drawn where they are."""
        return (StepOfRun(samples, number) for number in range(samples.batches.steps))

    def add_bounded(
        self,
        total: BoundedSum,
        x: Vector,
        batch: StepOfRun,
        projection: Projection = "radial",
        pool: Executor | None = None,
    ) -> None:
        """total += Σ_i round(A^{1/2} bound(∇F(x; z_i)) / grid) over the rows of the step."""
        if total.ellipsoid is None:
            raise ValueError("Expected a sum in the coordinates of an ellipsoid, found none.")
        model, shape = (self.loss, self.outputs), shape_of(total.ellipsoid, projection)
        self.examples.add_step_to(total, batch, _add_gradients, model, x, shape)

    def add_plain(
        self, total: Vector, x: Vector, batch: StepOfRun, pool: Executor | None = None
    ) -> tuple[int, int]:
        """total += Σ_i ∇F(x; z_i): in another order of partitions the last digits may differ."""
        model, sample = (self.loss, self.outputs), (batch.samples, batch.number)
        found, counts = self.examples.total(
            add_part, total.size, 1.0, 1.0, _add_plain, (model, x), sample=sample
        )
        total += found
        batch.size = int(counts[2])
        return 0, int(counts[1])

    def per_example(self, x: Vector, batch: StepOfRun) -> NoReturn:
        raise ValueError(
            "Expected a method that uses sums of gradients, for rows in partitions, found one that "
            "uses the gradient of every row: these do not leave the partitions. Take 'pagan', "
            "'pasan', 'dp-sgd' or 'dp-adagrad', or load the rows into memory."
        )


def _add_gradients(
    units: Vector, per_unit: float, limit: float, examples: Examples, model: tuple[Loss, int],
    x: Vector, shape: Shape,
) -> tuple[int, int]:  # fmt: skip
    gradients = _gradients(examples, model)
    everything = np.arange(gradients.n_examples)
    with pool_of() as pool:
        return gradients.add_units(units, per_unit, limit, x, everything, shape, pool)


def _add_plain(
    units: Vector, per_unit: float, limit: float, examples: Examples, model: tuple[Loss, int],
    x: Vector,
) -> tuple[int, int]:  # fmt: skip
    gradients = _gradients(examples, model)
    return gradients.add_plain(units, x, np.arange(gradients.n_examples))


def _gradients(examples: Examples, model: tuple[Loss, int]) -> GlmGradients:
    loss, outputs = model
    return GlmGradients(loss, examples.rows, examples.targets, outputs, examples.left_out)
