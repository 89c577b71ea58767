"""What people decide by, from weighted values: the rows themselves, or a private histogram.

Weights have the shape (1 + copies, groups, values): the first are the known ones, the others the
same with more noise, which tell how much of a figure is noise. Exact weights have no copies.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import numpy as np

from privagrad._internal.markup import html_table
from privagrad._internal.validate import Vector
from privagrad.queries.histograms import Weights
from privagrad.queries.verdicts import (
    Estimate,
    labelled,
    verdict_on_classes,
    verdict_on_numbers,
)

_LEAST_SHARE, _CLEAR = 0.05, 8.0
"""Of the rows in a point of the calibration plot, and of its noise, in standard deviations."""

_ROC_POINTS = np.linspace(0.0, 1.0, 51)
_RESIDUAL_BINS = 6
Columns = dict[str, list[float]]


class Sample(NamedTuple):
    """Values in increasing order, and the weights of their groups."""

    values: Vector
    weights: Weights


@dataclass(frozen=True)
class Evaluation:
    """How well a model predicts some rows.

    Attributes
    ----------
    private : bool
        Whether the figures come from a private release; else they are exact.
    figures : dict of Estimate
        For classes `accuracy`, `baseline_accuracy` of the most frequent class and their difference
        `gain`; `auc` of two classes; with probabilities `log_loss`, `baseline_log_loss` of the
        classes' shares, and `calibration_error`, the root of the mean squared distance between
        predicted and observed shares. For numbers `error` and `baseline_error`, mean absolute
        errors (of other quantiles than 0.5, mean quantile losses) of the model and of the best
        constant, and their difference `error_gain`; `removed`, the part of it that the model
        removes; `half_within` and `ninety_within`, how far off 50 % and 90 % of the predictions
        are at most; `below`, the share of targets below their predictions.
    answer : float
        The best constant: the number of the most frequent class, or a number.
    quantile : float or None
        Which one is predicted; None for classes.
    shares : list of float
        Of the classes.
    confusion : list of lists
        Shares of the rows, by true class and then by predicted class.
    confusion_noise : float
        The standard deviation of the noise in one of them.
    roc : dict
        `false_positive`, `true_positive` and its `noise`, for two classes.
    calibration : dict
        `predicted` and `observed` shares, its `noise`, and the `share` of the rows.
    residuals : dict
        `shares` of the predictions by how much too large they are, below, between and above the
        `edges`, and their `noise`.
    scale : tuple of two floats or None
        Centre and unit of the target that a private release of numbers was made in.
    """

    private: bool
    figures: dict[str, Estimate]
    answer: float
    quantile: float | None = None
    shares: list[float] = field(default_factory=list)
    confusion: list[list[float]] = field(default_factory=list)
    confusion_noise: float = 0.0
    roc: Columns = field(default_factory=dict)
    calibration: Columns = field(default_factory=dict)
    residuals: Columns = field(default_factory=dict)
    scale: tuple[float, float] | None = None

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Self:
        """From what JSON keeps of it; of files of earlier versions, the figures they have."""
        names = cls.__dataclass_fields__
        known = {name: value for name, value in values.items() if name in names}
        if "figures" in values:
            known["figures"] = {name: Estimate(**f) for name, f in values["figures"].items()}
            return cls(**known)
        return cls(False, *_former(values)) if "rows" in values else cls(True, *_former(values))

    def _repr_html_(self) -> str:
        kind = "Private figures" if self.private else "Exact figures, NOT private"
        numbers = None if self.quantile is not None else [
            f"class {k}" for k in range(len(self.shares))
        ]  # fmt: skip
        told = self.verdict(numbers) if {"gain", "removed"} & set(self.figures) else ""
        rows = [
            (label, f.value, f"± {2 * f.noise:.2g}" if f.noise else "")
            for label, f, _ in labelled(self.figures, self.quantile)
        ]
        return html_table(f"{kind}. {told}".strip(), ("figure", "value", "95 % noise"), rows)

    def verdict(self, classes: list[str] | None) -> str:
        """Whether the model is better than a constant, in a sentence."""
        if classes is None:
            return verdict_on_numbers(self.figures, self.answer)
        constant = "the most frequent class"
        if not math.isnan(self.answer):
            constant = repr(str(classes[int(self.answer)]))
        return verdict_on_classes(self.figures, constant)


def _former(values: Mapping[str, Any]) -> tuple[dict[str, Estimate], float]:
    """Figures and best constant of files of version 0.1."""
    shares = values.get("shares") or []
    answer = float(np.argmax(shares)) if shares else math.nan
    noise = values.get("score_noise", 0.0)
    if "mean_absolute_error" in values:
        error, baseline = values["mean_absolute_error"], values["mean_absolute_error_of_median"]
        return {"error": Estimate(error), "baseline_error": Estimate(baseline)}, answer
    if "score" in values and not shares:
        names = "score", "baseline_score"
        pair = values["score"], values["baseline"]
        return {name: Estimate(v, noise) for name, v in zip(names, pair, strict=True)}, answer
    accuracy = values.get("accuracy", values.get("score", math.nan))
    baseline = values.get("majority", values.get("baseline", math.nan))
    return {
        "accuracy": Estimate(accuracy, noise),
        "baseline_accuracy": Estimate(baseline, noise),
        "gain": Estimate(accuracy - baseline, math.sqrt(2) * noise),
    }, answer


def two_classes(scores: Sample, edges: Vector | None) -> Evaluation:
    """From the scores of both classes, where scores above 0 mean the second one.

    With `edges` scores are log-odds, and these cut them into parts to be compared with what is
    observed.
    """
    values, weights = scores
    total = _floored(weights.sum(axis=(1, 2)))
    above = np.stack([weights[..., values <= 0].sum(-1), weights[..., values > 0].sum(-1)], -1)
    confusion = above / total[:, None, None]
    shares = confusion.sum(axis=2)
    found = _answers(confusion[:, 0, 0] + confusion[:, 1, 1], shares)
    no, yes = weights[:, 0], weights[:, 1]
    wholes = _floored(no.sum(axis=1)) * _floored(yes.sum(axis=1))
    found["auc"] = np.clip((yes * (np.cumsum(no, axis=1) - no / 2)).sum(axis=1) / wholes, 0, 1)
    calibration: Columns = {}
    if edges is not None:
        losses = (no * np.logaddexp(0, values) + yes * np.logaddexp(0, -values)).sum(axis=1)
        found["log_loss"] = losses / total
        found["baseline_log_loss"] = _entropy(shares)
        chances = 1 / (1 + np.exp(-np.clip(values, -500, 500)))
        bins = np.searchsorted(edges, values)
        found["calibration_error"], calibration = _calibration(chances, weights, bins)
    exact_and_one_class = len(weights) == 1 and float(shares[0].min()) == 0.0
    if exact_and_one_class:
        del found["auc"]
    return _of_classes(
        found, shares, confusion, roc={} if exact_and_one_class else _roc(no, yes),
        calibration=calibration,
    )  # fmt: skip


def several_classes(
    shares: Weights, confusion: Weights, right: Sample, losses: Sample | None, edges: Vector
) -> Evaluation:
    """From shares of the classes and the confusion matrix.

    Their shapes are (copies, k) and (copies, k, k). `right` holds the largest probability of rows
    predicted wrongly and rightly, cut by the edges; `losses` the negative logarithms of the true
    class's probability, None without probabilities.
    """
    known = right.weights.sum(axis=(1, 2))
    total = _floored(shares.sum(axis=1))
    shares = shares / total[:, None]
    found = _answers(right.weights[:, 1].sum(axis=1) / _floored(known), shares)
    calibration: Columns = {}
    if losses is not None:
        sums = losses.weights[:, 0]
        found["log_loss"] = (sums * losses.values).sum(axis=1) / _floored(sums.sum(axis=1))
        found["baseline_log_loss"] = _entropy(shares)
        bins = np.searchsorted(edges, right.values)
        error, calibration = _calibration(right.values, right.weights, bins)
        found["calibration_error"] = error
    cells = confusion / _floored(confusion.sum(axis=(1, 2)))[:, None, None]
    return _of_classes(found, shares, cells, calibration)


def numbers(
    targets: Sample, residuals: Sample, quantile: float, scale: tuple[float, float]
) -> Evaluation:
    """From targets and from predictions minus targets, in the given centre and unit."""
    centre, unit = scale
    weights, below = residuals.weights[:, 0], residuals.values > 0
    total = _floored(weights.sum(axis=1))
    best = _quantile(targets, quantile)
    error = (weights * _loss(residuals.values, quantile)).sum(axis=1) / total
    counted = targets.weights[:, 0]
    off = _loss(best[:, None] - targets.values, quantile)
    constant = (counted * off).sum(axis=1) / _floored(counted.sum(axis=1))
    order = np.argsort(np.abs(residuals.values), kind="stable")
    sizes = Sample(np.abs(residuals.values)[order], residuals.weights[..., order])
    found = {
        "error": unit * np.maximum(error, 0.0),
        "baseline_error": unit * np.maximum(constant, 0.0),
        "removed": 1 - error / _floored(constant),
        "error_gain": unit * (constant - error),
        "half_within": unit * _quantile(sizes, 0.5),
        "ninety_within": unit * _quantile(sizes, 0.9),
        "below": np.clip(weights[:, below].sum(axis=1) / total, 0, 1),
    }
    return Evaluation(
        len(weights) > 1,
        _estimates(found),
        centre + unit * float(best[0]),
        quantile,
        residuals=_residuals(residuals, total, unit),
    )


def _loss(residuals: Vector, quantile: float) -> Vector:
    """Absolute errors; of other quantiles than 0.5, what the quantile minimises."""
    factor = 2.0 if quantile == 0.5 else 1.0
    return np.asarray(factor * np.maximum((1 - quantile) * residuals, -quantile * residuals))


def _answers(accuracy: Vector, shares: Weights) -> dict[str, Vector]:
    # Of the class that is the most frequent as far as is known: a maximum of noise is too large.
    baseline = shares[:, int(shares[0].argmax())]
    return {
        "accuracy": np.clip(accuracy, 0, 1),
        "baseline_accuracy": np.clip(baseline, 0, 1),
        "gain": accuracy - baseline,
    }


def _of_classes(
    found: dict[str, Vector], shares: Weights, confusion: Weights, calibration: Columns,
    roc: Columns | None = None,
) -> Evaluation:  # fmt: skip
    return Evaluation(
        len(shares) > 1,
        _estimates(found),
        float(shares[0].argmax()),
        shares=np.clip(shares[0], 0, 1).tolist(),
        confusion=np.clip(confusion[0], 0, 1).tolist(),
        confusion_noise=float(np.mean(_spread(confusion))),
        roc=roc or {},
        calibration=calibration,
    )


def _roc(no: Weights, yes: Weights) -> Columns:
    """The curve at the same shares of false positives for all copies."""
    start = np.zeros((len(no), 1))
    rates = []
    for part in (no, yes):
        counts = np.cumsum(np.hstack([start, part[:, ::-1]]), axis=1)
        rates.append(np.clip(_monotone(counts / _floored(counts[:, -1])[:, None]), 0, 1))
    heights = np.array([np.interp(_ROC_POINTS, *pair) for pair in zip(*rates, strict=True)])
    heights[:, -1] = 1.0
    return {
        "false_positive": [0.0, *_ROC_POINTS.tolist()],
        "true_positive": [0.0, *heights[0].tolist()],
        "noise": [0.0, *_spread(heights).tolist()],
    }


def _calibration(chances: Vector, weights: Weights, bins: Any) -> tuple[Vector, Columns]:
    """The error over all copies, and the points of the plot.

    Bins are joined until a point has enough rows to be clear of noise.
    """
    first = np.flatnonzero(np.diff(bins, prepend=-1))
    mass = np.add.reduceat(weights.sum(axis=1), first, axis=1)
    true = np.add.reduceat(weights[:, 1], first, axis=1)
    expected = np.add.reduceat(weights.sum(axis=1) * chances, first, axis=1)
    whole = _floored(mass.sum(axis=1))
    starts = _joined(mass, float(whole[0]))
    mass, true, expected = (np.add.reduceat(a, starts, axis=1) for a in (mass, true, expected))
    mass = np.maximum(mass, 1e-12)
    gaps = np.square(expected - true) - np.square(_spread(expected - true))
    error = np.sqrt(np.maximum((gaps / mass).sum(axis=1) / whole, 0.0))
    observed = np.clip(true / mass, 0, 1)
    return error, {
        "predicted": np.clip(expected[0] / mass[0], 0, 1).tolist(),
        "observed": observed[0].tolist(),
        "noise": _spread(observed).tolist(),
        "share": (mass[0] / whole[0]).tolist(),
    }


def _joined(mass: Weights, whole: float) -> list[int]:
    """The first bins of parts with enough rows each; the last part takes what is left."""
    starts = [0]
    for stop in range(1, mass.shape[1]):
        here, rest = mass[:, starts[-1] : stop].sum(axis=1), mass[:, stop:].sum(axis=1)
        if all(
            part[0] >= max(_LEAST_SHARE * whole, _CLEAR * float(_spread(part)))
            for part in (here, rest)
        ):
            starts.append(stop)
    return starts


def _residuals(residuals: Sample, total: Vector, unit: float) -> Columns:
    """Shares in bins of equal width, about half the typical error, and beyond them."""
    weights = residuals.weights[:, 0]
    sizes = np.abs(residuals.values)
    typical = unit * float(weights[0] @ sizes / total[0])
    if not typical > 0:
        return {}
    power = 10.0 ** math.floor(math.log10(typical / 2))
    width = next(m * power for m in (1, 2, 5, 10) if m * power >= typical / 2)
    edges = width * np.arange(-_RESIDUAL_BINS, _RESIDUAL_BINS + 1)
    bins = np.searchsorted(edges, unit * residuals.values)
    shares = np.stack([weights[:, bins == b].sum(axis=1) for b in range(edges.size + 1)], axis=1)
    shares = shares / total[:, None]
    return {
        "edges": edges.tolist(),
        "shares": np.clip(shares[0], 0, 1).tolist(),
        "noise": _spread(shares).tolist(),
    }


def _quantile(sample: Sample, quantile: float) -> Vector:
    """Of each copy, the least value up to which so much of the weight lies."""
    weights = sample.weights[:, 0]
    sums = _monotone(np.cumsum(weights, axis=1))
    goals = quantile * _floored(weights.sum(axis=1)) * (1 - 1e-12)
    pairs = zip(sums, goals, strict=True)
    places = [int(np.searchsorted(one, goal)) for one, goal in pairs]
    return np.asarray(sample.values[np.minimum(places, sample.values.size - 1)])


def _monotone(rows: Weights) -> Weights:
    """Halfway between the largest value so far and the least one to come."""
    if len(rows) == 1:
        return rows
    up = np.maximum.accumulate(rows, axis=1)
    down = np.minimum.accumulate(rows[:, ::-1], axis=1)[:, ::-1]
    return np.asarray((up + down) / 2)


def _entropy(shares: Weights) -> Vector:
    known = np.clip(shares, 1e-12, 1)
    return np.asarray(-(np.clip(shares, 0, 1) * np.log(known)).sum(axis=1))


def _floored(values: Vector) -> Vector:
    """At least the noise in them, so that they can be divided by."""
    return np.maximum(values, max(float(_spread(values)), 1e-12))


def _spread(values: Weights) -> Any:
    """The standard deviation over the copies: 0 where there are none."""
    return np.std(values[1:], axis=0, ddof=1) if len(values) > 2 else np.zeros(values.shape[1:])


def _estimates(found: dict[str, Vector]) -> dict[str, Estimate]:
    return {name: Estimate(float(v[0]), float(_spread(v))) for name, v in found.items()}
