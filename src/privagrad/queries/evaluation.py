"""How well a model predicts rows: one private query, or the same figures exactly."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from privagrad._internal.validate import Integers, Vector
from privagrad.glm.examples import Examples
from privagrad.glm.losses import Loss
from privagrad.privacy.bounded import BoundedSum
from privagrad.privacy.releases import Releases
from privagrad.queries.columns import Share, Table
from privagrad.queries.figures import Evaluation, Sample, numbers, several_classes, two_classes
from privagrad.queries.histograms import Histogram, Weights, release_histograms

EVALUATION = Share("evaluation", 0.12)

_POINTS = 8
"""Values that stand for a bin: its rows count as spread evenly."""


def _both_sides(*edges: float) -> Vector:
    return np.array([*(-e for e in reversed(edges)), 0.0, *edges])


# What lies beyond the outer edges counts as within them.
LOG_ODDS = _both_sides(0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0)
CHANCES = np.array(
    [0, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.98, 1.0]
)
SURPRISES = np.array(
    [0, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 3.5, 4.0]
)
UNITS = _both_sides(
    0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0
)


@dataclass(frozen=True)
class Predicted:
    """Rows with their margins and targets, in the same units, as the loss needs them.

    `known` says which rows count. For numbers, `scale` holds the centre and the unit that turn them
    into the target's own units.
    """

    loss: Loss
    margins: Vector
    targets: Vector
    known: NDArray[np.bool_]
    scale: tuple[float, float] = (0.0, 1.0)

    @classmethod
    def of(
        cls, loss: Loss, margins: Vector, targets: Vector,
        left_out: NDArray[np.bool_] | None = None, scale: tuple[float, float] = (0.0, 1.0),
    ) -> Predicted:  # fmt: skip
        """Rows that are left out, or whose margins or targets are not finite, do not count."""
        known = np.isfinite(targets)
        for column in margins.reshape(len(margins), -1).T:
            known &= np.isfinite(column)
        if left_out is not None:
            known &= ~left_out
        one = known if margins.ndim == 1 else known[:, None]
        return cls(
            loss, np.where(one, margins, 0.0), np.where(known, targets, 0.0), known, scale
        )  # fmt: skip

    def take(self, rows: Integers) -> Predicted:
        """Some rows."""
        margins, targets, known = self.margins[rows], self.targets[rows], self.known[rows]
        return replace(self, margins=margins, targets=targets, known=known)

    @property
    def n(self) -> int:
        return self.known.size

    @property
    def outputs(self) -> int:
        return 1 if self.margins.ndim == 1 else self.margins.shape[1]

    def add_to(self, total: BoundedSum, add: Callable[..., Any], *arguments: Any) -> None:
        """Let ``add(units, per_unit, limit, rows, *arguments)`` bound and add all rows."""
        total.add_by(add, self, *arguments)


@dataclass(frozen=True)
class PredictedExamples:
    """Rows that a linear model predicts when they are counted, where they are.

    `weights` are those of the loss's margins, for several outputs one after the other.
    """

    examples: Table
    loss: Loss
    outputs: int
    weights: Vector
    scale: tuple[float, float] = (0.0, 1.0)

    @property
    def n(self) -> int:
        return self.examples.shape[0]

    def add_to(self, total: BoundedSum, add: Callable[..., Any], *arguments: Any) -> None:
        """Let ``add(units, per_unit, limit, predicted, *arguments)`` bound and add all rows."""
        model = self.loss, self.outputs, self.weights, self.scale
        self.examples.add_to(total, _add_predicted, model, add, arguments)


def _add_predicted(
    units: Vector, per_unit: float, limit: float, examples: Examples, model: tuple[Any, ...],
    add: Callable[..., tuple[int, int]], arguments: tuple[Any, ...],
) -> tuple[int, int]:  # fmt: skip
    loss, outputs, weights, scale = model
    points = weights if outputs == 1 else weights.reshape(outputs, -1).T
    margins = examples.rows.margins(points)
    rows = Predicted.of(loss, margins, examples.targets, examples.left_out, scale)
    return add(units, per_unit, limit, rows, *arguments)


def evaluate(rows: Predicted | PredictedExamples, releases: Releases) -> Evaluation:
    """Figures with noise.

    Guarantees
    ----------
    One Gaussian release, the plan's event "evaluation", of histograms: see `release_histograms`.
    A row's cells depend on that row alone. Rows that do not count add nothing.
    """
    loss = rows.loss
    if loss.regression:
        asked, cells_of = [Histogram(1, _bins(UNITS))] * 2, _cells_of_numbers
    elif rows.outputs > 1:
        asked, cells_of = _asked_of_several(loss, rows.outputs), _cells_of_several
    else:
        asked, cells_of = [Histogram(2, _bins(LOG_ODDS))], _cells_of_two
    counts = release_histograms(asked, rows, cells_of, releases, EVALUATION.purpose)
    if loss.regression:
        targets, errors = (_spread(part, UNITS) for part in counts)
        found = numbers(targets, errors, _quantile(loss), rows.scale)
        return replace(found, scale=rows.scale)
    if rows.outputs > 1:
        return _several(loss, rows.outputs, counts)
    return two_classes(_spread(counts[0], LOG_ODDS), _edges(loss))


def evaluate_exactly(rows: Predicted) -> Evaluation:
    """The same figures without noise. NOT private."""
    known = rows.known
    if not known.any():
        raise ValueError("Expected rows with a target, found none.")
    margins, targets = rows.margins[known], rows.targets[known]
    if rows.loss.regression:
        with np.errstate(over="ignore"):
            samples = _exact(targets), _exact(margins - targets)
        return numbers(*samples, _quantile(rows.loss), rows.scale)
    if margins.ndim == 1:
        return two_classes(_exact(margins, targets > 0, 2), _edges(rows.loss))
    k, labels, guesses = margins.shape[1], targets.astype(np.int64), margins.argmax(axis=1)
    confusion = np.bincount(labels * k + guesses, minlength=k * k).reshape(1, k, k) / labels.size
    top, surprise = _chances(margins, labels)
    return several_classes(
        confusion.sum(axis=2),
        confusion,
        _exact(top, guesses == labels, 2),
        _exact(surprise) if _tells_chances(rows.loss) else None,
        CHANCES,
    )


def _cells_of_two(rows: Predicted) -> Integers:
    score = _binned(rows.margins, LOG_ODDS) + _bins(LOG_ODDS) * (rows.targets > 0)
    return _of_known(rows, [score])


def _cells_of_numbers(rows: Predicted) -> Integers:
    with np.errstate(over="ignore"):  # a warning would tell of a private target
        residuals = rows.margins - rows.targets
    return _of_known(rows, [_binned(rows.targets, UNITS), _binned(residuals, UNITS)])


def _asked_of_several(loss: Loss, k: int) -> list[Histogram]:
    """Shares of the classes, confusions, and how sure the model is or how large its losses are."""
    asked = [Histogram(1, k, ordered=False), Histogram(k, k, ordered=False)]
    if not _tells_chances(loss):
        return [*asked, Histogram(2, 1)]
    return [*asked, Histogram(2, _bins(CHANCES)), Histogram(1, _bins(_surprises(k)))]


def _surprises(k: int) -> Vector:
    return np.append(SURPRISES, SURPRISES[-1] + np.arange(1, 2 + int(np.log(k / 2))))


def _cells_of_several(rows: Predicted) -> Integers:
    k, labels = rows.outputs, rows.targets.astype(np.int64)
    guesses = rows.margins.argmax(axis=1)
    right = (guesses == labels).astype(np.int64)
    cells = [labels, labels * k + guesses, right]
    if _tells_chances(rows.loss):
        top, surprise = _chances(rows.margins, labels)
        sure = _binned(top, CHANCES) + _bins(CHANCES) * right
        cells[2:] = [sure, _binned(surprise, _surprises(k))]
    return _of_known(rows, cells)


def _several(loss: Loss, k: int, counts: list[Weights]) -> Evaluation:
    shares, confusion, sure, *losses = counts
    return several_classes(
        shares[:, 0],
        confusion,
        _spread(sure, CHANCES if losses else np.array([0.0, 1.0])),
        _spread(losses[0], _surprises(k)) if losses else None,
        CHANCES,
    )


def _of_known(rows: Predicted, cells: list[Integers]) -> Integers:
    """The cells of rows that count, and -1 for the others."""
    return np.where(rows.known[:, None], np.stack(cells, axis=1), -1)


def _quantile(loss: Loss) -> float:
    return float(loss.parameter or 0.5) if loss.name == "quantile" else 0.5


def _tells_chances(loss: Loss) -> bool:
    return loss.name in ("logistic", "softmax")


def _edges(loss: Loss) -> Vector | None:
    return LOG_ODDS if _tells_chances(loss) else None


@np.errstate(over="ignore")  # a warning would tell of a private row
def _chances(margins: Vector, labels: Integers) -> tuple[Vector, Vector]:
    """The largest probability, and -log of that of the true class.

    Class by class: the order of a sum over an axis may depend on a row's place.
    """
    best = margins[:, 0].copy()
    for column in margins.T[1:]:
        np.maximum(best, column, out=best)
    total = np.zeros(len(margins))
    for column in margins.T:
        total += np.exp(np.maximum(column - best, -700.0))
    at_label = np.take_along_axis(margins, labels[:, None], axis=1)[:, 0]
    return 1 / total, np.log(total) + (best - at_label)


def _bins(edges: Vector) -> int:
    return edges.size - 1


def _binned(values: Vector, edges: Vector) -> Integers:
    """The bin of each value, which is above its lower edge and at most its upper one."""
    return np.asarray(np.searchsorted(edges[1:-1], values), dtype=np.int64)


def _spread(counts: Weights, edges: Vector) -> Sample:
    """The bins as values within them."""
    inside = (np.arange(_POINTS) + 0.5) / _POINTS
    values = edges[:-1, None] + np.diff(edges)[:, None] * inside
    return Sample(values.ravel(), np.repeat(counts / _POINTS, _POINTS, axis=-1))


def _exact(values: Vector, groups: NDArray[np.bool_] | None = None, count: int = 1) -> Sample:
    """The different values, and the shares of the rows of each group that have them."""
    values, places = np.unique(values, return_inverse=True)
    cells = places if groups is None else places + values.size * groups
    shares = np.bincount(cells, minlength=count * values.size) / places.size
    return Sample(values, shares.reshape(1, count, values.size))
