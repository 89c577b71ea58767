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
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

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

# Octaves that the magnitude of a normal variable falls into, from 2^-3 σ to 2^2 σ.
_SHAPE = np.array([0.10, 0.19, 0.30, 0.27, 0.04])
_SHAPE_BELOW_SIGMA = 2  # σ is at the upper edge of the octave this many places after the first
_LIKELY, _SURE, _CERTAIN = 3.0, 4.0, 5.0  # standard deviations of noise, by number of chances
_BOUND = 1.5  # a row's entries and squares, in units of the root of its number of entries
_HIDDEN = 0.1  # part of the noise in a column's square that its spread may hide in
_TAIL = 0.02  # of a column's entries may be larger than its range
_NORM_BINS_PER_OCTAVE = 8


class Share(NamedTuple):
    """A query over all rows and the part of epsilon it may cost alone.

    Gaussian noise adds up in squares: a part of 0.3 costs the training 5 % more noise.
    """

    purpose: str
    part: float


SCALES = (Share("ranges", 0.3), Share("moments", 0.15))
COLUMNS = (
    Share("ranges", 0.25),
    Share("moments", 0.12),
    Share("ranges around centres", 0.12),
    Share("moments around centres", 0.12),
)
BOUNDED_COLUMNS = (Share("moments", 0.15),)
TARGET = (
    Share("target's range", 0.1),
    Share("target's moments", 0.05),
    Share("target's range around its centre", 0.1),
    Share("target's moments around its centre", 0.05),
)
BOUNDED_TARGET = (Share("target's moments", 0.05),)
NORMS = (Share("row norms", 0.06),)


@dataclass(frozen=True)
class Ranges:
    """What the votes tell about columns.

    Attributes
    ----------
    scale : per column a power of two near the size of its entries that are not 0
    top : per column a power of two that all but the largest entries are below
    share : per column the share of rows where it is not 0
    row_norm : root of the number of non-zero entries of a row, averaged over rows
    """

    scale: Vector
    top: Vector
    share: Vector
    row_norm: float


@dataclass(frozen=True)
class Columns:
    """The affine map that makes columns comparable, (a_j - centre_j)/unit_j, and what it leaves.

    Columns whose mean is beyond their spread are centred; in others 0 keeps its meaning, and the
    unit is the size of an entry that is not 0. `moments` are E[((a_j - centre_j)/unit_j)²]: about 1
    in dense columns, the share of non-zero entries in sparse ones.
    """

    centre: Vector
    unit: Vector
    moments: Vector


def query_events(
    shares: Iterable[Share], epsilon: float, delta: float, relation: Relation
) -> list[GaussianEvent]:
    """The queries, with the noise that their parts of epsilon allow."""
    double = 2.0 if relation == "replace-one" else 1.0
    events = []
    for purpose, part in shares:
        alone = PrivacyPlan.calibrate_event(GaussianEvent(1.0), part * epsilon, delta)
        events.append(GaussianEvent(double * alone.noise_multiplier, purpose=purpose))
    return events


def private_moments(
    rows: DenseRows | SparseRows, events: Sequence[GaussianEvent], source: RandomSource
) -> Vector:
    """Second moments E[a_j²] of all columns, all positive, from the releases of `SCALES`."""
    ranges = private_ranges(rows, events[0].noise_multiplier, source)
    _, squares, floor = whitened_moments(
        rows, ranges.scale, ranges.row_norm, events[1].noise_multiplier, source
    )
    moments: Vector = ranges.scale**2 * np.maximum(squares, floor)
    return moments


def private_columns(
    rows: DenseRows | SparseRows,
    events: Sequence[GaussianEvent],
    source: RandomSource,
    always: bool = False,
) -> Columns:
    """Centres, units and moments of all columns from the releases of `COLUMNS`.

    With those of `SCALES` nothing is centred; with `always` everything is.
    """
    noises = [event.noise_multiplier for event in events]
    ranges = private_ranges(rows, noises[0], source)
    means, squares, floor = whitened_moments(rows, ranges.scale, ranges.row_norm, noises[1], source)
    share = np.clip(ranges.share, floor, 1.0)
    size = _entry_size(squares, ranges.share, floor)
    centred = len(events) > len(SCALES)
    offset = np.flatnonzero(_is_offset(means, squares, floor) & centred | always)
    centre = np.zeros(share.size)
    centre[offset] = (ranges.scale * means)[offset]
    unit, moments = ranges.scale * size, share
    if offset.size:
        # A spread too small to be seen from afar is believed only so far: where it is wrong, rows
        # with the rare other values would be immense.
        least = ranges.scale[offset] * math.sqrt(_HIDDEN * floor)
        moved = rows.centred(offset, centre[offset])
        near = private_ranges(moved, noises[2], source)
        means, squares, floor = whitened_moments(moved, near.top, near.row_norm, noises[3], source)
        centre[offset] += near.top * means
        spread = near.top * np.sqrt(np.maximum(squares - means**2, floor))
        unit[offset] = np.maximum(spread, least)
        moments[offset] = 1.0
    return Columns(centre, unit, moments)


def bounded_columns(
    rows: DenseRows | SparseRows,
    low: Vector,
    high: Vector,
    event: GaussianEvent,
    source: RandomSource,
    centred: bool = True,
    always: bool = False,
) -> Columns:
    """`private_columns` where public bounds of the columns are known: one release instead of four.

    Entries must lie within the bounds.
    """
    offset = ((low > 0) | (high < 0)) & centred | always
    centre = np.where(offset, (low + high) / 2, 0.0)
    scale = np.maximum(high - centre, centre - low)
    scale[scale == 0] = 1.0
    everything = np.arange(centre.size)
    moved = rows.centred(everything, centre) if offset.any() else rows
    norm = math.sqrt(centre.size)
    means, squares, floor = whitened_moments(moved, scale, norm, event.noise_multiplier, source)
    offset |= _is_offset(means, squares, floor) & centred
    spread = np.maximum(squares - np.where(offset, means**2, 0.0), floor)
    return Columns(
        np.where(offset, centre + scale * means, 0.0),
        np.where(offset, scale * np.sqrt(spread), scale),
        np.where(offset, 1.0, spread),
    )


def known_columns(
    rows: DenseRows | SparseRows, centred: bool = True, always: bool = False
) -> Columns:
    """`private_columns` of rows that need no protection, exactly."""
    n, dim = rows.shape
    count, means, squares = _exact_powers(rows)
    share = np.maximum(count, 1) / n
    offset = np.flatnonzero(_is_offset(means, squares, 0.0) & centred | always)
    centre, unit = np.zeros(dim), np.sqrt(squares / share)
    centre[offset] = means[offset]
    if offset.size:
        unit[offset] = rows.centred(offset, centre[offset]).array.std(axis=0)
        share[offset] = 1.0
    unit[~(unit > 0)] = 1.0
    return Columns(centre, unit, share)


def known_moments(rows: DenseRows | SparseRows) -> Vector:
    """E[a_j²] of rows that need no protection, plus one pseudo-row of typical size: never 0."""
    _, _, squares = _exact_powers(rows)
    typical = float(np.median(squares[squares > 0])) if squares.any() else 1.0
    return np.asarray(squares + typical / rows.shape[0])


def _exact_powers(rows: DenseRows | SparseRows) -> tuple[Vector, Vector, Vector]:
    """How many entries of each column are not 0, and their first and second moments."""
    n, dim = rows.shape
    data, indices, _, dense = rows.flat
    values = np.asarray(data, dtype=np.float64)
    if dense:
        table = values.reshape(n, dim)
        return (
            np.count_nonzero(table, axis=0).astype(np.float64),
            table.mean(axis=0),
            np.square(table).mean(axis=0),
        )
    powers = (values != 0, values, np.square(values))
    count, means, squares = (np.bincount(indices, power, dim) for power in powers)
    return np.asarray(count, dtype=np.float64), means / n, squares / n


def _entry_size(squares: Vector, share: Vector, floor: float) -> Vector:
    """Root mean square of the entries that are not 0: rare columns lean on all columns together."""
    squares, share = np.maximum(squares, 0.0), np.clip(share, 0.0, 1.0)
    clear = share > _CERTAIN * floor
    common = squares[clear].sum() / share[clear].sum() if clear.any() else 1.0
    weight = _CERTAIN * floor
    size: Vector = np.sqrt((squares + weight * common) / (share + weight))
    return np.clip(size, 0.25, 2.0)


def _is_offset(means: Vector, squares: Vector, floor: float) -> NDArray[np.bool_]:
    """Where the mean is clear of the noise and beyond the spread, m² > E[a²]/2."""
    return (2 * means**2 > squares) & (np.abs(means) > _SURE * floor)


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
    fits = _fit_shape(kept)
    sure = fits > _SURE * noise * float(np.linalg.norm(_SHAPE))
    if not sure.any():  # the best guess there is
        kept = votes
        fits = _fit_shape(kept)
        sure = fits == fits.max()
    octave = fits.argmax(axis=1)
    found = sure.any(axis=1)
    octave = np.where(found, octave, _cautious_octaves(votes, noise, octave[found]))
    totals = kept.sum(axis=1)
    shown = votes > np.maximum(_TAIL * totals[:, None], _CERTAIN * noise)
    top = np.maximum(_highest(shown, octave), octave)
    return Ranges(
        2.0 ** (octave + LOWEST + 1), 2.0 ** (top + LOWEST + 1), totals * row_norm, row_norm
    )


def _fit_shape(votes: Vector) -> Vector:
    """How well each octave is that of σ, columns × octaves."""
    below, above = _SHAPE_BELOW_SIGMA, _SHAPE.size - 1 - _SHAPE_BELOW_SIGMA
    padded = np.pad(votes, ((0, 0), (below, above)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, _SHAPE.size, axis=1)
    return np.asarray(windows @ _SHAPE)


def _cautious_octaves(votes: Vector, noise: float, others: NDArray[np.int64]) -> Vector:
    """For columns that show little: the octave of most others, or if they differ the highest.

    A column taken for too large is lost, one taken for too small drowns the others: so a higher
    octave that it seems to show counts more.
    """
    counts = np.bincount(others, minlength=OCTAVES)
    usual = counts.argmax() if 2 * counts.max() > others.size else others.max()
    shown = votes > _LIKELY * noise
    return np.maximum(_highest(shown, usual), usual)


def _highest(shown: NDArray[np.bool_], otherwise: Any) -> Vector:
    """Per column the highest octave that is shown."""
    highest = OCTAVES - 1 - shown[:, ::-1].argmax(axis=1)
    return np.asarray(np.where(shown.any(axis=1), highest, otherwise))


def whitened_moments(
    rows: DenseRows | SparseRows,
    scale: Vector,
    row_norm: float,
    noise_multiplier: float,
    source: RandomSource,
) -> tuple[Vector, Vector, float]:
    """E[a_j] and E[a_j²] with every column in units of its scale, and what noise hides of both.

    Guarantees
    ----------
    One Gaussian release of the noise multiplier: each row's entries and their squares, bounded to
    norm 1.5 · row_norm as one vector, contribute norm ≤ 1 after division by that.
    """
    n, dim = rows.shape
    mechanism = GaussianSum(2 * dim, noise_multiplier, n)
    bound = _BOUND * row_norm
    units = np.zeros(2 * dim)
    limit = 1 - (2 * dim + 8) * ULP
    _add_powers(*rows.flat, 1.0 / scale, 1.0 / bound, 1.0 / mechanism.grid, limit, units)
    powers = _mean(mechanism, units, source) * bound
    return powers[:dim], powers[dim:], noise_multiplier * bound / n


def private_norm(
    rows: DenseRows | SparseRows,
    scale: Vector,
    noise_multiplier: float,
    source: RandomSource,
    quantile: float = 0.5,
) -> float:
    """A quantile of the rows' norms sqrt(Σ_j scale_j a_j²), rounded up to an eighth of an octave.

    Guarantees
    ----------
    One Gaussian release of the noise multiplier: a row votes once, for its norm's eighth.
    """
    n = rows.shape[0]
    size = OCTAVES * _NORM_BINS_PER_OCTAVE
    mechanism = GaussianSum(size, noise_multiplier, n)
    units = np.zeros(size)
    whole = np.rint((1 - 8 * ULP) / mechanism.grid)
    _vote_norms(*rows.flat, np.sqrt(scale), LOWEST, _NORM_BINS_PER_OCTAVE, whole, units)
    votes = _mean(mechanism, units, source)
    kept = np.where(votes > _SURE * noise_multiplier / n, votes, 0.0)
    if not kept.any():
        return math.sqrt(float(scale.sum()))
    where = np.searchsorted(np.cumsum(kept), quantile * kept.sum())
    return float(2.0 ** (LOWEST + (where + 1) / _NORM_BINS_PER_OCTAVE))


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
def _add_powers(
    data: Any, indices: Any, starts: Any, dense: Any, inverse: Any, factor: Any, units: Any,
    limit: Any, total: Any,
) -> None:  # fmt: skip
    dim = inverse.size
    for i in range(starts.size - 1):
        first = starts[i] if dense else 0
        squares = 0.0
        for k in range(starts[i], starts[i + 1]):
            value = np.float64(data[k]) * inverse[indices[k - first]]
            squares += (value * factor) ** 2 + (value * value * factor) ** 2
        norm = math.sqrt(squares)
        if not math.isfinite(norm):
            continue
        shrink = units if norm <= limit else units * limit / norm
        for k in range(starts[i], starts[i + 1]):
            j = indices[k - first]
            value = np.float64(data[k]) * inverse[j]
            total[j] += np.rint(value * factor * shrink)
            total[dim + j] += np.rint(value * value * factor * shrink)


@kernel()
def _vote_norms(
    data: Any, indices: Any, starts: Any, dense: Any, whitening: Any, lowest: Any, bins: Any,
    vote: Any, total: Any,
) -> None:  # fmt: skip
    for i in range(starts.size - 1):
        first = starts[i] if dense else 0
        squares = 0.0
        for k in range(starts[i], starts[i + 1]):
            squares += (np.float64(data[k]) * whitening[indices[k - first]]) ** 2
        if squares > 0.0 and math.isfinite(squares):
            octave = math.floor((math.log2(squares) / 2 - lowest) * bins)
            total[min(max(octave, 0), total.size - 1)] += vote
