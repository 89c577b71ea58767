"""What makes a classifier's margins log-odds: a factor and shifts, from one private query.

Bounding gradients stretches the margins of most models and shifts those of rare classes. For two
classes a histogram of margins and labels shows by how much. For more classes the factor is the one
of the least squared error of the probabilities.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from privagrad._internal.jit import kernel
from privagrad._internal.validate import Integers, Vector
from privagrad.glm.examples import Examples, in_memory
from privagrad.glm.gradients import LinearGradients
from privagrad.glm.losses import Loss
from privagrad.privacy.bounded import add_bounded
from privagrad.privacy.mechanism import GaussianSum
from privagrad.privacy.releases import Releases
from privagrad.queries.columns import Share, Table

CALIBRATION = Share("calibration", 0.15)
CLASS_SHARES = Share("class shares", 0.15)

_USUAL = 0.7
"""The factor that is right for most models; noise that hides a better one leaves it."""

_EDGES = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
EDGES = np.concatenate([-_EDGES[:0:-1], _EDGES])
_MIDDLES = np.concatenate([[-7.0], (EDGES[1:] + EDGES[:-1]) / 2, [7.0]])
_FACTORS = _USUAL * np.geomspace(0.25, 4.0, 9)
_PRIOR = np.array([10_000.0, 4_000.0])
"""Weights of the usual factor and of no shift, times the variance of the noise in a cell: about the
variance of the likelihood's gradient over its curvature, for deviations of 0.3 and 0.15."""

_LEAST_WEIGHT, _FIXED, _ROUNDS = 1e-4, 1e9, 50
_ROWS = 16_384


@dataclass(frozen=True)
class Calibration:
    """Margins times `factor` plus `shifts`, one for each output, are log-odds.

    The noise in both is stated by its standard deviations, as far as it is known.
    """

    factor: float
    shifts: Vector
    factor_noise: float = 0.0
    shift_noise: float = 0.0


def class_shares(examples: Table, classes: int, releases: Releases) -> Vector:
    """The shares of the classes 0, 1, ..., each at least the noise in it; exact without privacy.

    Two classes may be -1 and 1.

    Guarantees
    ----------
    One Gaussian release, the plan's event "class shares": a row adds 1 to one cell.
    """
    shares, noise = _shares(examples, classes, releases, CLASS_SHARES, _class_cells, ())
    known = np.maximum(shares, max(noise, 1 / examples.shape[0]))
    return np.asarray(known / known.sum())


def _class_cells(examples: Examples) -> Integers:
    """The number of each row's class; of two classes -1 and 1, that of -1 is 0."""
    cells = np.maximum(examples.targets, 0.0).astype(np.int64)
    if examples.left_out is not None:
        cells[examples.left_out] = -1
    return cells


def _shares(
    examples: Table, count: int, releases: Releases, asked: Share,
    cells_of: Callable[..., Integers], arguments: tuple[Any, ...],
) -> tuple[Vector, float]:  # fmt: skip
    """Shares of the rows in each cell, -1 being none, and the deviation of the noise in them."""
    n = examples.shape[0]
    if releases.plan.unprotected:
        cells = cells_of(in_memory(examples, "epsilon=inf"), *arguments)
        return np.bincount(cells[cells >= 0], minlength=count) / n, 0.0
    mechanism = GaussianSum(count, releases.noise_for(asked.purpose), n)
    total = mechanism.sum()
    examples.add_to(total, _add_cells, cells_of, arguments)
    return mechanism.release(total, releases.source), mechanism.noise_multiplier / n


def _add_cells(
    units: Vector, per_unit: float, limit: float, examples: Examples,
    cells_of: Callable[..., Integers], arguments: tuple[Any, ...],
) -> tuple[int, int]:  # fmt: skip
    return _count(units, per_unit, limit, cells_of(examples, *arguments))


def calibrate(gradients: LinearGradients, weights: Vector, releases: Releases) -> Calibration:
    """The calibration of a model on the rows; without privacy, an exact one.

    Guarantees
    ----------
    One Gaussian release, the plan's event "calibration". For two classes a row adds 1 to one cell
    of a histogram. For more it adds a vector of numbers from 0 to 1 over the largest norm that such
    a vector can have. Both depend on that row alone. Rows whose margins are not finite, and those
    left out, add nothing.
    """
    outputs, examples = gradients.outputs, gradients.examples
    if outputs == 1:
        return _from_histogram(*_histogram(examples, gradients.loss, weights, releases))
    return _from_errors(*_errors(examples, outputs, weights, releases), outputs)


def _margins_of(
    examples: Examples, outputs: int, weights: Vector
) -> tuple[Vector, NDArray[np.bool_]]:
    """Margins, and which rows count: those with a target and finite margins."""
    points = weights.reshape(outputs, -1).T if outputs > 1 else weights
    margins = examples.rows.margins(points)
    counts = np.asarray(np.isfinite(margins.reshape(len(margins), -1)).all(axis=1))
    return margins, counts if examples.left_out is None else counts & ~examples.left_out


def _histogram(
    examples: Table, loss: Loss, weights: Vector, releases: Releases
) -> tuple[Vector, float]:
    """Weights of both classes in each bin, of shape (2, bins), 1 in all; the noise in a cell."""
    bins = _MIDDLES.size
    shares, noise = _shares(examples, 2 * bins, releases, CALIBRATION, _margin_cells, (weights,))
    ratio = loss.ratio
    heavy = np.array([min(ratio, 1.0), min(1 / ratio, 1.0)])
    weighted = heavy[:, None] * shares.reshape(2, bins)
    total = max(float(weighted.sum()), noise)
    return weighted / total, noise / total


def _margin_cells(examples: Examples, weights: Vector) -> Integers:
    """The bin of each row's margin among those of its class."""
    margins, counts = _margins_of(examples, 1, weights)
    cells = np.searchsorted(EDGES, np.where(counts, margins, 0.0))
    return np.where(counts, cells + _MIDDLES.size * (examples.targets > 0), -1)


@kernel()
def _count(total: Vector, per_unit: float, limit: float, cells: Integers) -> tuple[int, int]:
    one = np.rint(limit * per_unit)
    for i in range(cells.size):
        if cells[i] >= 0:
            total[cells[i]] += one
    return 0, 0


def _from_histogram(shares: Vector, noise: float) -> Calibration:
    """Platt's scaling: factor and shift of the largest likelihood of the labels."""
    usual = np.array([_USUAL, 0.0])
    prior = _PRIOR * noise**2 + _LEAST_WEIGHT
    table = np.column_stack([_MIDDLES, np.ones(_MIDDLES.size)])
    (factor, shift), deviations = _platt(shares, table, usual, prior, noise)
    # A model that predicts the wrong way round is noise: it is not turned around.
    possible = float(np.clip(factor, _FACTORS[0], _FACTORS[-1]))
    if possible != factor:
        held = np.array([possible, 0.0])
        weights = np.array([_FIXED, prior[1]])
        (_, shift), deviations = _platt(shares, table, held, weights, noise)
    return Calibration(possible, np.array([shift]), *deviations.tolist())


def _platt(
    shares: Vector, table: Vector, usual: Vector, prior: Vector, noise: float
) -> tuple[Vector, Vector]:
    """Factor and shift by Newton's method, and the deviations that noise in the shares gives them.

    The usual ones, where it starts, have the weights of `prior`.
    """
    total, point, curvature = shares.sum(axis=0), usual, np.diag(prior)
    for _ in range(_ROUNDS):
        chance = _chance(table @ point)
        slope = table.T @ (total * chance - shares[1]) + prior * (point - usual)
        weights = np.maximum(total, 0.0) * chance * (1 - chance)
        curvature = table.T @ (weights[:, None] * table) + np.diag(prior)
        step = np.linalg.solve(curvature, slope)
        point = point - step / max(1.0, float(np.abs(step).max()))
    chance = _chance(table @ point)
    # The slope's noise: that of both cells of each bin, whose shares it is a sum of.
    cells = np.square(chance) + np.square(1 - chance)
    inverse = np.linalg.inv(curvature)
    spread = inverse @ (table.T @ (cells[:, None] * table)) @ inverse
    return point, noise * np.sqrt(np.diag(spread))


def _chance(margins: Vector) -> Vector:
    return np.asarray(1 / (1 + np.exp(-np.clip(margins, -500, 500))))


def _errors(
    examples: Table, outputs: int, weights: Vector, releases: Releases
) -> tuple[Vector, float]:
    """Mean squared errors of the factors, and the noise in them."""
    n, largest = examples.shape[0], math.sqrt(_FACTORS.size)
    if releases.plan.unprotected:
        vectors = _error_vectors(in_memory(examples, "epsilon=inf"), outputs, weights)
        return sum(part.sum(axis=0) for part in vectors) * (largest / n), 0.0
    mechanism = GaussianSum(_FACTORS.size, releases.noise_for(CALIBRATION.purpose), n)
    total = mechanism.sum()
    examples.add_to(total, _add_errors, outputs, weights)
    means = mechanism.release(total, releases.source) * largest
    return means, mechanism.noise_multiplier * largest / n


def _add_errors(
    units: Vector, per_unit: float, limit: float, examples: Examples, outputs: int, weights: Vector
) -> tuple[int, int]:
    clipped = nonfinite = 0
    for vectors in _error_vectors(examples, outputs, weights):
        one, other = add_bounded(units, per_unit, limit, vectors, True)
        clipped, nonfinite = clipped + one, nonfinite + other
    return clipped, nonfinite


def _error_vectors(examples: Examples, outputs: int, weights: Vector) -> Iterator[Vector]:
    """What rows add, some thousand rows at a time: vectors of norm at most 1."""
    margins, counts = _margins_of(examples, outputs, weights)
    largest = math.sqrt(_FACTORS.size)
    for first in range(0, len(margins), _ROWS):
        part = slice(first, first + _ROWS)
        vectors = np.zeros((counts[part].size, _FACTORS.size))
        known = np.where(counts[part, None], margins[part], 0.0)
        _answer(known, examples.targets[part].astype(np.int64), _FACTORS, vectors)
        vectors[~counts[part]] = 0.0
        yield vectors / largest


def _from_errors(errors: Vector, noise: float, outputs: int) -> Calibration:
    """The factor of the least error, where that is clear of noise."""
    smooth = np.convolve(np.pad(errors, 1, mode="edge"), np.ones(3) / 3, mode="valid")
    best, usual = int(smooth.argmin()), _FACTORS.size // 2
    clear = smooth[usual] - smooth[best] > 2 * noise
    return Calibration(float(_FACTORS[best if clear else usual]), np.zeros(outputs))


@kernel()
def _answer(margins: Any, labels: Any, factors: Any, answers: Any) -> None:
    """For each row the squared error of its probabilities for each factor, from 0 to 1.

    Unlike a logarithm a squared error is bounded, so that bounding rows does not favour
    overconfidence.
    """
    classes = margins.shape[1]
    for i in range(margins.shape[0]):
        best = margins[i].max()
        for f in range(factors.size):
            total = error = 0.0
            for c in range(classes):
                total += math.exp(factors[f] * (margins[i, c] - best))
            for c in range(classes):
                chance = math.exp(factors[f] * (margins[i, c] - best)) / total
                error += (chance - (1.0 if c == labels[i] else 0.0)) ** 2
            answers[i, f] = error / 2.0
