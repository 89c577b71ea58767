"""How well rows are fitted, asked of them once and privately: the curve and the figures to show."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit, softmax

from privagrad import kernels
from privagrad._validate import Vector
from privagrad.events import GaussianEvent
from privagrad.geometry import Ellipsoid
from privagrad.glm import GlmGradients
from privagrad.losses import Loss
from privagrad.mechanism import GaussianSum, bounded_units
from privagrad.noise import RandomSource
from privagrad.queries import Share, mean_of

EVALUATION = Share("evaluation", 0.12)

_CURVE = 0.25
"""Weight of the curve's points beside the last model's figures."""

_ROWS = 65_536
FACTORS = np.geomspace(0.125, 1.414, 8)
_USUAL = 4
"""Bounded gradients make logistic models too sure; this factor is right for most of them."""


@dataclass(frozen=True)
class Evaluation:
    """Means over the rows, each with Gaussian noise of a known size.

    Attributes
    ----------
    steps, losses, clipped : the curve: after each of the steps, the mean loss, in which no row
        counts more than `loss_cap`, and the share of rows whose gradients are shrunk
    curve_noise : standard deviation of the noise in a point of `clipped`; times `loss_cap` in one
        of `losses`
    score : the share of right predictions, or 1 minus the mean loss over `loss_cap`
    baseline : the same of the most frequent class, or of the target's centre
    score_noise : standard deviation of the noise in both
    shares : of the classes; empty for a regression
    factor : what to multiply the model with so that its probabilities are right; 1 where it has
        none
    """

    steps: list[int]
    losses: list[float]
    clipped: list[float]
    curve_noise: float
    loss_cap: float
    score: float
    baseline: float
    score_noise: float
    shares: list[float]
    factor: float


def evaluate(
    gradients: GlmGradients,
    ellipsoid: Ellipsoid,
    path: Sequence[tuple[int, Vector]],
    left_out: NDArray[np.bool_] | None,
    event: GaussianEvent,
    source: RandomSource,
) -> Evaluation:
    """What the rows say of the iterates of `path`, the last of which is the model.

    Guarantees
    ----------
    One Gaussian release of the event's noise multiplier: a row's vector holds numbers from 0 to 1
    and is bounded to norm 1 after division by the largest norm such a vector can have.
    """
    loss, outputs, n = gradients.loss, gradients.outputs, gradients.rows.shape[0]
    regression = loss.name in ("quantile", "huber")
    cap = _cap(loss, outputs)
    classes = 0 if regression else max(outputs, 2)
    marks = len(path) - 1  # at the start all is known
    factors = FACTORS.size if loss.name in ("logistic", "softmax") else 0
    largest = math.sqrt((3 if regression else 2) + (2 * marks + factors) * _CURVE**2)
    first_mark = 1 + (classes or 2) + factors
    dim = first_mark + 2 * marks
    mechanism = GaussianSum(dim, event.noise_multiplier, n)
    units = np.zeros(dim)
    for first in range(0, n, _ROWS):
        stop = min(first + _ROWS, n)
        vectors = _answers(gradients, ellipsoid, path[1:], cap, classes, factors, first, stop)
        if left_out is not None:
            vectors[left_out[first:stop]] = 0.0
        units += bounded_units(vectors / largest, mechanism.grid)[0]
    noise = event.noise_multiplier * largest / n
    means = mean_of(mechanism, units, source) * largest
    known = means[1 : 1 + classes] if classes else means[2:3]
    counted = max(float(known.sum()), noise)
    curve = means[first_mark:].reshape(marks, 2) / (_CURVE * counted)
    scores = means[first_mark - factors : first_mark] / (_CURVE * counted)
    shares = np.clip(known / counted, 0.0, 1.0).tolist() if classes else []
    start = float(loss.value(*_at_start(outputs, classes))[0]) if classes else math.nan
    return Evaluation(
        [step for step, _ in path],
        [start, *(cap * curve[:, 0]).tolist()],
        [math.nan, *np.clip(curve[:, 1], 0.0, 1.0).tolist()],
        noise / (_CURVE * counted),
        cap,
        float(np.clip(means[0] / counted, 0.0, 1.0)),
        max(shares) if classes else float(np.clip(means[1] / counted, 0.0, 1.0)),
        noise / counted,
        shares,
        _best_factor(scores, noise / (_CURVE * counted)) if factors else 1.0,
    )


def _best_factor(scores: Vector, noise: float) -> float:
    """The factor of the least mean squared error of probabilities, where that is clear of noise."""
    smooth = np.convolve(np.pad(scores, 1, mode="edge"), np.ones(3) / 3, mode="valid")
    best = int(smooth.argmin())
    clear = smooth[_USUAL] - smooth[best] > 2 * noise
    return float(FACTORS[best if clear else _USUAL])


def _answers(
    gradients: GlmGradients,
    ellipsoid: Ellipsoid,
    path: Sequence[tuple[int, Vector]],
    cap: float,
    classes: int,
    factors: int,
    first: int,
    stop: int,
) -> NDArray[np.float64]:
    """One row of numbers from 0 to 1 for each of the table's rows."""
    loss, outputs = gradients.loss, gradients.outputs
    rows, targets = gradients.rows.part(first, stop), gradients.targets[first:stop]
    dim = rows.shape[1]
    norms = np.sqrt(rows.square_norms(np.square(ellipsoid.whitening[:dim])))
    answers = np.zeros((stop - first, 1 + (classes or 2) + factors + 2 * len(path)))
    margins = np.zeros(stop - first)
    for k, (_, x) in enumerate(path):
        margins = rows.margins(x.reshape(outputs, -1).T if outputs > 1 else x)
        with np.errstate(invalid="ignore", over="ignore"):
            losses = np.minimum(loss.value(margins, targets) / cap, 1.0)
        if outputs > 1:
            slopes = np.linalg.norm(kernels.all_class_slopes(loss.key[0], margins, targets), axis=1)
        elif classes:
            slopes = np.abs(kernels.slopes(*loss.key, margins, targets))
        else:  # a regression's rows are shrunk by what the largest slope would need
            slopes = np.full(targets.size, loss.lipschitz)
        at = answers.shape[1] - 2 * (len(path) - k)
        answers[:, at], answers[:, at + 1] = _CURVE * losses, _CURVE * (slopes * norms > 1.0)
    if not classes:
        answers[:, 0] = 1 - answers[:, -2] / _CURVE
        answers[:, 1] = 1 - np.minimum(loss.value(np.zeros_like(targets), targets) / cap, 1.0)
        answers[:, 2] = 1.0
        return answers
    labels = (targets if outputs > 1 else targets > 0).astype(int)
    guesses = margins.argmax(axis=1) if outputs > 1 else (margins > 0).astype(int)
    answers[:, 0] = guesses == labels
    answers[np.arange(targets.size), 1 + labels] = 1.0
    for k in range(factors):
        errors = _squared_errors(FACTORS[k] * margins, labels)
        answers[:, 1 + classes + k] = _CURVE * np.nan_to_num(errors, nan=1.0)
    return answers


def _squared_errors(margins: Vector, labels: NDArray[np.int64]) -> Vector:
    """Squared errors of the classes' probabilities, from 0 to 1; true ones have the least mean.

    Unlike a logarithm they are bounded, so that bounding rows does not favour being too sure.
    """
    if margins.ndim == 1:
        return np.square(expit(np.where(labels == 1, -margins, margins)))
    errors = softmax(margins, axis=1)
    errors[np.arange(labels.size), labels] -= 1.0
    return np.asarray(np.square(errors).sum(axis=1) / 2)


def _cap(loss: Loss, outputs: int) -> float:
    """What no row's loss counts more than: twice that of knowing nothing, or of four units."""
    if loss.name in ("quantile", "huber"):
        return 4 * loss.lipschitz
    return 2 * float(loss.value(*_at_start(outputs, max(outputs, 2)))[0])


def _at_start(outputs: int, classes: int) -> tuple[Vector, Vector]:
    """Margins and target of one row before the first step."""
    return (np.zeros((1, classes)), np.zeros(1)) if outputs > 1 else (np.zeros(1), np.ones(1))
