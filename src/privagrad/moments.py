"""Scales of columns nobody knows beforehand: from noisy exponents and noisy squares.

Two queries over all rows learn every column's second moment, whatever its units:

1. `private_ranges`: each row votes, in every column where it is not 0, for the octave of its entry,
   with votes that together have norm 1. A column's octave stands out whatever its scale, because
   votes, unlike values, do not grow.
2. `whitened_moments`: columns divided by these scales, each row's vector of squares bounded in one
   norm for the whole row, summed with noise.

`algorithm3` is the paper's own way, for comparison.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from privagrad import _validate
from privagrad._numba import kernel
from privagrad._validate import Vector
from privagrad.accounting import PrivacyPlan
from privagrad.events import GaussianEvent, Relation
from privagrad.geometry import Ellipsoid
from privagrad.mechanism import ULP, GaussianSum
from privagrad.noise import RandomSource
from privagrad.tables import DenseRows, SparseRows

LOWEST, OCTAVES = -40, 80
"""Exponents of 2 that are told apart: entries from 1e-12 to 1e12."""

RANGES_SHARE, SQUARES_SHARE = 0.3, 0.15
"""Parts of epsilon. Gaussian noise adds up in squares: together they cost the training 6 %."""

# Octaves that the magnitude of a normal variable falls into, from 2^-3 σ to 2^2 σ.
_SHAPE = np.array([0.10, 0.19, 0.30, 0.27, 0.04])
_SHAPE_BELOW_SIGMA = 2  # σ is at the lower edge of the octave this many places after the first
_SURE, _CERTAIN = 3.0, 5.0  # standard deviations of noise: for few and for many chances


@dataclass(frozen=True)
class Ranges:
    """Per column: a power of two near its entries' size, and the share of rows where it is seen.

    Attributes
    ----------
    scale : array of shape (d,)
    row_norm : root of the number of non-zero entries of a row, averaged over rows
    """

    scale: Vector
    row_norm: float


def moment_events(epsilon: float, delta: float, relation: Relation) -> list[GaussianEvent]:
    """The two queries, with the noise that their shares of epsilon allow."""
    shares = (("ranges", RANGES_SHARE), ("second moments", SQUARES_SHARE))
    double = 2.0 if relation == "replace-one" else 1.0
    events = []
    for purpose, share in shares:
        alone = PrivacyPlan.calibrate_event(GaussianEvent(1.0), share * epsilon, delta)
        events.append(GaussianEvent(double * alone.noise_multiplier, purpose=purpose))
    return events


def private_moments(
    rows: DenseRows | SparseRows, events: list[GaussianEvent], source: RandomSource
) -> Vector:
    """Second moments E[a_j²] of all columns, all positive, from the releases of `events`."""
    ranges = private_ranges(rows, events[0].noise_multiplier, source)
    return whitened_moments(rows, ranges, events[1].noise_multiplier, source)


def private_ranges(
    rows: DenseRows | SparseRows, noise_multiplier: float, source: RandomSource
) -> Ranges:
    """A starting scale for every column from no knowledge at all.

    Guarantees
    ----------
    One Gaussian release of the noise multiplier: a row with k non-zero entries casts k votes of
    1/sqrt(k), a vector of norm 1.
    """
    n, dim = rows.shape
    mechanism = GaussianSum(dim * OCTAVES, noise_multiplier, n)
    units = np.zeros(dim * OCTAVES)
    _vote(*rows.flat, LOWEST, OCTAVES, (1 - 8 * ULP) / mechanism.grid, units)
    votes = _mean(mechanism, units, source).reshape(dim, OCTAVES)
    noise = noise_multiplier / n
    # Octaves where the columns together show nothing count only where one column stands out.
    common = votes.sum(axis=0) > _SURE * noise * math.sqrt(dim)
    kept = np.where(common | (votes > _CERTAIN * noise), votes, 0.0)
    row_norm = float(np.clip(kept.sum(), 1.0, math.sqrt(dim)))
    padded = np.pad(kept, ((0, 0), (_SHAPE.size - 1, 0)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, _SHAPE.size, axis=1)
    fits = windows @ _SHAPE  # dim × OCTAVES, by the octave the window ends in
    best = fits.argmax(axis=1)
    found = fits[np.arange(dim), best] > _SURE * noise * float(np.linalg.norm(_SHAPE))
    octave = best - (_SHAPE.size - 1) + _SHAPE_BELOW_SIGMA
    if found.any():
        octave = np.where(found, octave, np.median(octave[found]))
    return Ranges(2.0 ** (octave + LOWEST + 1), row_norm)


def whitened_moments(
    rows: DenseRows | SparseRows, ranges: Ranges, noise_multiplier: float, source: RandomSource
) -> Vector:
    """E[a_j²] with every column in units of its scale; at least what the noise would hide.

    Guarantees
    ----------
    One Gaussian release of the noise multiplier: each row's squares, bounded to norm
    2 · row_norm as a vector, contribute norm ≤ 1 after division by that.
    """
    n, dim = rows.shape
    mechanism = GaussianSum(dim, noise_multiplier, n)
    bound = 2.0 * ranges.row_norm
    units = np.zeros(dim)
    limit = 1 - (dim + 8) * ULP
    _add_squares(*rows.flat, 1.0 / ranges.scale, 1.0 / bound, 1.0 / mechanism.grid, limit, units)
    squares = _mean(mechanism, units, source) * bound
    floor = noise_multiplier * bound / n
    moments: Vector = ranges.scale**2 * np.maximum(squares, floor)
    return moments


def shaped_ellipsoid(moments: Vector, lipschitz: float, power: float) -> Ellipsoid:
    """Scale σ^power, and as radius half the root mean square of the gradients' norms in it.

    The gradient of a linear model is ℓ' a with |ℓ'| ≤ lipschitz.
    """
    scale = moments ** (power / 2)
    return Ellipsoid(scale, 0.5 * lipschitz * math.sqrt(float(scale @ moments)))


def algorithm3(
    X: ArrayLike,
    ratio: float,
    epsilon: float,
    delta: float,
    source: RandomSource,
    rounds: int | None = None,
) -> Vector:
    """Algorithm 3 of the paper, to the letter: σ̂ from truncated second moments, halving.

    Guarantees
    ----------
    (epsilon, delta)-differential privacy as Theorem 3 states it, from basic composition of T rounds
    with Gaussian noise of standard deviation ρ_t² T sqrt(d log(T/δ)) / (n ε). For columns with
    moment ratio r, max σ_j = 1 and n as `theory.required_rows` asks, with probability 1 - β
    max(σ_j, d^{-3/2})/2 ≤ σ̂_j ≤ 8 σ_j: the factor 2 of the theorem's statement is 8 in its proof,
    and columns below the floor return 2^-T. T = 3/2 log₂ d, so that the floor is d^{-3/2}.
    """
    rows = np.asarray(X, dtype=np.float64)
    n, dim = rows.shape
    if _validate.positive("ratio", ratio) <= 1:
        raise ValueError(f"Expected ratio > 1, found {ratio!r}: log r must be positive.")
    _validate.positive("epsilon", epsilon)
    _validate.delta_of(delta, n)
    T = max(1, math.ceil(1.5 * math.log2(dim))) if rounds is None else rounds
    result = np.full(dim, 2.0**-T)
    left = np.ones(dim, dtype=bool)
    for t in range(1, T + 1):
        rho = 4 * ratio * 2.0 ** -(t - 1) * math.log(ratio)
        # In units of ρ² sqrt(d): rows of truncated squares have norm ≤ 1.
        noise = T * math.sqrt(math.log(T / delta)) / epsilon
        mechanism = GaussianSum(dim, noise, n)
        truncated = np.minimum(np.square(rows), rho**2) / (rho**2 * math.sqrt(dim))
        units = np.rint(truncated * (1 - 8 * ULP) / mechanism.grid).sum(axis=0)
        squares = _mean(mechanism, units, source) * rho**2 * math.sqrt(dim)
        seen = left & (squares >= 4.0 ** -(t + 1))
        result[seen] = 2.0**-t
        left &= ~seen
    return result


def _mean(mechanism: GaussianSum, units: Vector, source: RandomSource) -> Vector:
    return mechanism.release(units, Ellipsoid.ball(mechanism.dim, 1.0), source)


@kernel()
def _vote(
    data: Any, indices: Any, starts: Any, dense: Any, lowest: Any, octaves: Any, units: Any,
    total: Any,
) -> None:  # fmt: skip
    for i in range(starts.size - 1):
        first = starts[i] if dense else 0
        count = 0
        for k in range(starts[i], starts[i + 1]):
            if data[k] != 0.0 and math.isfinite(data[k]):
                count += 1
        if count == 0:
            continue
        vote = np.rint(units / math.sqrt(count))
        for k in range(starts[i], starts[i + 1]):
            if data[k] != 0.0 and math.isfinite(data[k]):
                octave = math.frexp(abs(np.float64(data[k])))[1] - 1 - lowest
                octave = min(max(octave, 0), octaves - 1)
                total[indices[k - first] * octaves + octave] += vote


@kernel()
def _add_squares(
    data: Any, indices: Any, starts: Any, dense: Any, inverse: Any, factor: Any, units: Any,
    limit: Any, total: Any,
) -> None:  # fmt: skip
    for i in range(starts.size - 1):
        first = starts[i] if dense else 0
        squares = 0.0
        for k in range(starts[i], starts[i + 1]):
            value = (np.float64(data[k]) * inverse[indices[k - first]]) ** 2 * factor
            squares += value * value
        norm = math.sqrt(squares)
        if not math.isfinite(norm):
            continue
        shrink = units if norm <= limit else units * limit / norm
        for k in range(starts[i], starts[i + 1]):
            value = (np.float64(data[k]) * inverse[indices[k - first]]) ** 2 * factor
            total[indices[k - first]] += np.rint(value * shrink)
