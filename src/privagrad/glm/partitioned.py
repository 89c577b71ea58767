"""Gradients of generalized linear models over rows in partitions."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import numpy as np

from privagrad._internal.threads import pool_of
from privagrad._internal.validate import Vector
from privagrad.geometry.ellipsoid import Projection
from privagrad.glm.examples import Examples, PartitionedExamples, StepOfRun, Sums, add_part
from privagrad.glm.gradients import GlmGradients, Shape, shape_of
from privagrad.glm.losses import Loss
from privagrad.privacy.bounded import BoundedSum
from privagrad.privacy.sampling import Samples

_MOST_CLASSES = 1000


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

    @classmethod
    def of(cls, loss: Loss, examples: PartitionedExamples) -> PartitionedGradients:
        """From targets as users give them: see `Loss.targets`."""
        if loss.needs == "none":
            return cls(loss, examples.mapped(_without_targets))
        if loss.needs == "numbers":
            return cls(loss, examples)
        counts, strange = examples.total(_label_counts, sample=None)
        if strange.any():
            classes = f"classes 0, 1, 2, ... below {_MOST_CLASSES}"
            asked = classes if loss.multiclass else "labels -1 and 1, or 0 and 1,"
            raise ValueError(f"Expected {asked} for the {loss.name} loss, found other targets.")
        negative, zero = counts[:2]
        if loss.multiclass and not negative:
            return cls(loss, examples, int(np.flatnonzero(counts).max()))
        if loss.multiclass or (negative and zero) or counts[3:].any():
            raise ValueError(
                f"Expected {'classes 0, 1, 2, ...' if loss.multiclass else 'two labels'} for the "
                f"{loss.name} loss, found others. Map your classes to 0 and 1 first."
            )
        return cls(loss, examples.mapped(_as_signs) if zero else examples)

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
        return (StepOfRun(samples, number) for number in samples.numbers())

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


def _label_counts(examples: Examples) -> Sums:
    """How often the labels -1, 0, 1, ... occur, and how many targets are none of them."""
    targets = examples.targets
    whole = (targets >= -1) & (targets < _MOST_CLASSES) & (targets == np.floor(targets))
    counts = np.bincount(1 + targets[whole].astype(np.int64), minlength=_MOST_CLASSES + 1)
    return counts, np.array([np.count_nonzero(~whole)])


def _as_signs(examples: Examples) -> Examples:
    """Labels 0 and 1 as -1 and 1."""
    return replace(examples, targets=2.0 * examples.targets - 1.0)


def _without_targets(examples: Examples) -> Examples:
    return replace(examples, targets=np.zeros(examples.shape[0]))


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
