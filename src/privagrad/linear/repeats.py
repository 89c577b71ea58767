"""How much of a model is noise: its training repeated on made-up rows that follow the model."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from privagrad._internal.validate import Vector
from privagrad.glm.gradients import GlmGradients
from privagrad.glm.losses import Loss
from privagrad.glm.rows import DenseRows
from privagrad.methods import Method, Setting
from privagrad.methods.minimize import train
from privagrad.privacy.noise import random_source
from privagrad.queries.moments import Columns

_WORK, _LEAST, _MOST = 5e9, 6, 10
_ROWS, _ROWS_PER_COLUMN = 2000, 5
_RESIDUAL = 0.7
_NEARLY_ALL, _RARE = 0.97, 0.5


def repeated_spread(
    loss: Loss,
    columns: Columns,
    groups: Sequence[tuple[int, int]],
    sparse: bool,
    intercept: bool,
    method: Method,
    setting: Setting,
    weights: Vector,
) -> Vector | None:
    """Standard deviation of the weights over trainings that differ in their noise alone.

    It needs no further look at the rows: made-up ones have the columns' learned sizes, drawn
    independently but for `groups` (first, last + 1) of which a row has at most one, and targets
    that the model predicts. Rare entries of a `sparse` table are 1 unit, other columns are
    normal. None where that would take too long.
    """
    dim = columns.unit.size
    outputs = weights.size // (dim + intercept)
    rows = max(_ROWS, _ROWS_PER_COLUMN * dim)
    repeats = min(_MOST, int(_WORK / (2 * rows * weights.size * setting.steps)))
    if repeats < _LEAST:
        return None
    rng = np.random.default_rng(0)
    made = DenseRows(_rows(columns, groups, sparse, rows, rng))
    table = made.standardized(columns.centre, columns.unit, intercept)
    margins = table.margins(weights.reshape(outputs, -1).T if outputs > 1 else weights)
    gradients = GlmGradients(loss, table, _targets(loss, margins, rng), outputs)
    # The same noise in the mean gradient, whatever the number of rows.
    noise = setting.noise_multiplier * rows / setting.batch_size
    same = Setting(
        setting.dim, setting.steps, rows, noise, setting.domain, setting.ellipsoid,
        n_examples=rows, step_size=setting.step_size, sampling=None,
        projection=setting.projection, schedule=setting.schedule,
    )  # fmt: skip
    ends = []
    for seed in range(repeats):
        x = np.zeros(setting.dim)
        source = random_source(seed)
        train(method, gradients, same, None, 0.5, x, source, progress=False, threads=1)
        ends.append(x)
    return np.asarray(np.std(ends, axis=0, ddof=1))


def _rows(
    columns: Columns,
    groups: Sequence[tuple[int, int]],
    sparse: bool,
    count: int,
    rng: Generator,
) -> NDArray[np.float64]:
    """Rows in original units."""
    shape = (count, columns.unit.size)
    rare = sparse & (columns.centre == 0) & (columns.moments < _RARE)
    normal = np.sqrt(columns.moments) * rng.standard_normal(shape)
    spread = np.where(rare, rng.random(shape) < columns.moments, normal)
    rows = columns.centre + columns.unit * spread
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
    if loss.name in ("logistic", "hinge"):
        noisy = margins + rng.logistic(size=margins.shape)
        return np.where(noisy > 0, 1.0, -1.0)
    return np.asarray(margins + _RESIDUAL * rng.standard_normal(margins.shape))
