"""How much of a model is noise: its training repeated on made-up rows that follow the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from privagrad._internal.validate import Vector
from privagrad.glm.gradients import GlmGradients
from privagrad.glm.losses import Loss
from privagrad.glm.rows import DenseRows
from privagrad.methods import Method, Setting
from privagrad.methods.loop import train
from privagrad.privacy.accounting import PrivacyPlan
from privagrad.privacy.events import training_event
from privagrad.privacy.noise import random_source
from privagrad.privacy.releases import Releases
from privagrad.privacy.sampling import Batches
from privagrad.queries.moments import Columns

_WORK, _LEAST, _MOST = 5e9, 6, 10
_ROWS, _ROWS_PER_COLUMN = 2000, 5
_RESIDUAL = 0.7
_NEARLY_ALL = 0.97


@dataclass(frozen=True)
class MadeUpRows:
    """What made-up rows follow: everything that is known of the real ones, privately.

    Attributes
    ----------
    loss : Loss
        What is minimised.
    columns : Columns
        The learned sizes of the columns.
    groups : sequence of (int, int)
        Columns from the first to before the last of which a row has at most one.
    intercept : bool
        Whether there is one.
    """

    loss: Loss
    columns: Columns
    groups: Sequence[tuple[int, int]]
    intercept: bool

    def gradients(self, weights: Vector, count: int, rng: Generator) -> GlmGradients:
        """The gradients of so many rows, with targets that the model predicts."""
        columns = self.columns
        outputs = weights.size // (columns.unit.size + self.intercept)
        made = DenseRows(_rows(columns, self.groups, count, rng))
        table = made.standardized(columns.centre, columns.unit, self.intercept)
        margins = table.margins(weights.reshape(outputs, -1).T if outputs > 1 else weights)
        return GlmGradients(self.loss, table, _targets(self.loss, margins, rng), outputs)


def repeated_spread(
    made_up: MadeUpRows, method: Method, setting: Setting, weights: Vector
) -> Vector | None:
    """Standard deviation of the weights over trainings that differ in their noise alone.

    It needs no further look at the rows. None where that would take too long.
    """
    steps = setting.batches.steps
    rows = max(_ROWS, _ROWS_PER_COLUMN * made_up.columns.unit.size)
    repeats = min(_MOST, int(_WORK / (2 * rows * weights.size * steps)))
    if repeats < _LEAST:
        return None
    gradients = made_up.gradients(weights, rows, np.random.default_rng(0))
    batches = Batches(rows, rows, steps, None)
    # The same noise in the mean gradient, whatever the number of rows.
    noise = setting.noise_multiplier * rows / setting.batches.batch_size
    plan = PrivacyPlan((training_event(batches, noise),))
    same = replace(setting, batches=batches, plan=plan)
    ends = []
    for seed in range(repeats):
        x = np.zeros(setting.dim)
        releases = Releases(plan, random_source(seed), delta=0.5)
        train(method, gradients, same, releases, x, progress=False)
        ends.append(x)
    return np.asarray(np.std(ends, axis=0, ddof=1))


def _rows(
    columns: Columns,
    groups: Sequence[tuple[int, int]],
    count: int,
    rng: Generator,
) -> NDArray[np.float64]:
    """Rows in original units."""
    shape = (count, columns.unit.size)
    # An indicator is 0 or 1 unit. What is centred has its share as centre.
    share = np.where(columns.centre != 0, np.abs(columns.centre) / columns.unit, columns.moments)
    indicator = ~columns.varied & (share < 1.0)
    normal = columns.centre + columns.unit * np.sqrt(columns.moments) * rng.standard_normal(shape)
    rows = np.where(indicator, columns.unit * (rng.random(shape) < share), normal)
    shares = np.square(columns.centre) + np.square(columns.unit) * columns.moments
    for first, last in groups:
        edges = np.cumsum(np.clip(shares[first:last], 0.0, 1.0))
        # Where nearly all rows have one, all may: then nothing holds their sum but the intercept.
        total = edges[-1] if edges[-1] > _NEARLY_ALL else 1.0
        which = np.searchsorted(edges / total, rng.random(count))
        rows[:, first:last] = which[:, None] == np.arange(last - first)
    return np.asarray(rows)


def _targets(loss: Loss, margins: Vector, rng: Generator) -> Vector:
    """Targets as the model would have them."""
    if loss.multiclass:
        noisy = margins + rng.gumbel(size=margins.shape)
        return np.asarray(noisy.argmax(axis=1), dtype=np.float64)
    if loss.task == "classification":
        noisy = margins + rng.logistic(size=margins.shape)
        return np.where(noisy > 0, 1.0, -1.0)
    return np.asarray(margins + _RESIDUAL * rng.standard_normal(margins.shape))
