"""Queries over all rows: votes for octaves, sums of powers, votes for norms.

Each query is one Gaussian release of vectors of norm at most 1. An entry that is NaN is missing: it
adds nothing, and the row's other entries count. A row with an infinite one adds no powers or norm.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from privagrad._internal.jit import kernel
from privagrad._internal.validate import Integers, Vector
from privagrad.glm.kernels import FlatRows
from privagrad.privacy.accounting import PrivacyPlan, require_meaningful
from privagrad.privacy.bounded import Adds, BoundedSum
from privagrad.privacy.events import GaussianEvent, Relation, relation_named
from privagrad.privacy.mechanism import GaussianSum
from privagrad.privacy.releases import Releases

LOWEST, OCTAVES = -40, 108
"""The lowest exponent of 2 and how many are distinguished: entries from 1e-12 to 3e20."""

# Octaves that the magnitude of a normal variable falls into, from 2^-3 σ to 2^2 σ.
_SHAPE = np.array([0.10, 0.19, 0.30, 0.27, 0.04])
_SHAPE_BELOW_SIGMA = 2  # σ is at the upper edge of the octave this many places after the first
LIKELY, SURE, CERTAIN = 3.8, 4.0, 5.0  # standard deviations of noise, by number of chances
_BOUND = 1.5  # a row's entries and squares, in units of the root of its number of entries
_TAIL = 0.02  # of a column's entries may be larger than its range
_WEIGHT_OF_ONE = 0.5
_CELLS, _OCTAVE_OF_ONE = OCTAVES + 1, -LOWEST
_NEAR, _OTHER_SIDE = 7, 0.25  # octaves near the most votes; votes of the other sign that are few
_CLEAR = 0.06  # noise in a vote, over that of a row for one column, at which signs are worth asking
_ALARMS, _ALARMS_OF_ONE = 0.002, 0.05  # false ones a table, and a column by itself
_GUESSES = 0.5  # columns of a table that noise alone may give a higher octave than others
_SEEN = 2.0  # standard deviations from which on votes for 1 are believed in tables of indicators
_LEVEL = 0.1  # part of the votes of the first octave from which on another one counts
_NORM_BINS_PER_OCTAVE, _NORM_OCTAVES = 8, 4


class Table(Protocol):
    """Rows that queries add up, in memory or elsewhere."""

    @property
    def shape(self) -> tuple[int, int]:
        """The number of rows and of columns."""

    def add_to(self, total: BoundedSum, add: Adds, *arguments: Any) -> None:
        """Let ``add(units, per_unit, limit, table, *arguments)`` bound and add all rows."""


class DenseTable(Table, Protocol):
    """Rows that store entries that are 0."""

    def centred(self, columns: NDArray[Any], centre: Vector) -> DenseTable:
        """These columns minus their centres."""

    def sides(self) -> Table:
        """Positive entries, and beside them the sizes of negative ones."""


class FeatureTable(Table, Protocol):
    """Rows whose columns can be centred."""

    @property
    def sparse(self) -> bool:
        """Whether entries that are 0 are not stored."""

    def centred(self, columns: NDArray[Any], centre: Vector) -> DenseTable:
        """These columns minus their centres."""


class Share(NamedTuple):
    """A query over all rows and the part of epsilon it may cost alone.

    Gaussian noise adds up in squares: a part of 0.3 costs the training 5 % more noise.
    """

    purpose: str
    part: float


@dataclass(frozen=True)
class Ranges:
    """What the votes show about columns.

    Attributes
    ----------
    scale : array of shape (d,)
        A power of two near the size of the column's entries that are not 0: not below it.
    top : array of shape (d,)
        A power of two that all but the largest entries of the column are below.
    share : array of shape (d,)
        The share of rows where the column is not 0.
    levels : array of int, of shape (d,)
        How many octaves clearly have votes.
    indicators : array of bool, of shape (d,)
        Whether the entries that are not 0 are seen to be 1 or -1.
    found : bool
        Whether any scale was found; if not, all of them are the largest one.
    row_norm : float
        The root of the number of non-zero entries of a row, averaged over rows.
    seen : array of bool, of shape (d,)
        Whether the column has votes of its own; the scale of others is that of most columns.
    """

    scale: Vector
    top: Vector
    share: Vector
    levels: NDArray[np.int64]
    indicators: NDArray[np.bool_]
    found: bool
    row_norm: float
    seen: NDArray[np.bool_]


def query_event(share: Share, epsilon: float, delta: float, relation: Relation) -> GaussianEvent:
    """The query, with the noise that its part of epsilon allows."""
    require_meaningful(epsilon)
    double = 2.0 if relation_named(relation) == "replace-one" else 1.0
    query = GaussianEvent(1.0, purpose=share.purpose)
    alone = PrivacyPlan.calibrate_event(query, share.part * epsilon, delta)
    return replace(query, noise_multiplier=double * alone.noise_multiplier)


def query_events(
    shares: Iterable[Share], epsilon: float, delta: float, relation: Relation
) -> list[GaussianEvent]:
    """The queries, each with the noise that its part of epsilon allows."""
    return [query_event(share, epsilon, delta, relation) for share in shares]


def private_ranges(rows: Table, releases: Releases, purpose: str) -> Ranges:
    """A first scale for every column, without any prior knowledge.

    Guarantees
    ----------
    One Gaussian release for the purpose: a row casts a vote for every entry that is not 0, and its
    votes have norm 1 together. Entries of 1 or -1, most of which are indicators, vote for a place
    of their own, with half the weight of others.
    """
    return _ranges(*_cells(rows, releases, purpose))


def with_rare(rows: Table, ranges: Ranges, releases: Releases, purpose: str) -> Ranges:
    """The ranges, with those of columns that did not show: they vote once more, by themselves.

    A row's votes are not shared with its frequent columns then, and rare columns show.

    Guarantees
    ----------
    One Gaussian release for the purpose, as that of `private_ranges`, of the other columns alone:
    which these are is known from the release before.
    """
    places = np.flatnonzero(~ranges.seen)
    if not (ranges.found and places.size):
        return ranges
    rare = _ranges(*_cells(rows, releases, purpose, places))
    chosen = places[rare.seen]
    changed = {}
    for name in ("scale", "top", "share", "levels", "indicators", "seen"):
        values = getattr(ranges, name).copy()
        values[chosen] = getattr(rare, name)[rare.seen]
        changed[name] = values
    return replace(ranges, **changed)


def private_intervals(
    rows: DenseTable, releases: Releases, purpose: str
) -> tuple[Ranges, Vector, Vector]:
    """The ranges of columns that were centred roughly, and the intervals that most entries lie in.

    Returns the ranges, the middles of the intervals and half their lengths. Entries of one sign
    alone show that the centre was off. Where noise would hide that, and for one column, whose
    centre is found well, the middles are 0.

    Guarantees
    ----------
    One Gaussian release, as that of `private_ranges`, of positive and negative entries in columns
    of their own: a row has as many entries that are not 0 as before.
    """
    n, dim = rows.shape
    if dim == 1 or releases.plan[purpose].noise_multiplier * math.sqrt(dim) > _CLEAR * n:
        found = private_ranges(rows, releases, purpose)
        return found, np.zeros(dim), found.top
    cells, noise = _cells(rows.sides(), releases, purpose)
    found = _ranges(cells[:dim] + cells[dim:], math.sqrt(2) * noise)
    signed = cells[:, :OCTAVES]
    signed[:, _OCTAVE_OF_ONE] += cells[:, OCTAVES] / _WEIGHT_OF_ONE
    up, down = signed[:dim], signed[dim:]
    near = _near_peak(up + down)
    above, below = (np.where(near, side, 0.0).sum(axis=1) for side in (up, down))
    least = SURE * noise * math.sqrt(2 * _NEAR)
    sign = np.where(above - below > least, 1.0, np.where(below - above > least, -1.0, 0.0))
    sign[np.minimum(above, below) > _OTHER_SIDE * np.maximum(above, below)] = 0.0
    total = (up + down).sum(axis=1, keepdims=True)
    side, other = np.where(sign[:, None] > 0, (up, down), (down, up))
    shown = side > np.maximum(_TAIL * total, CERTAIN * noise)
    beyond = _near_peak(up + down, 1 + _NEAR) & (other > np.maximum(_TAIL * total, SURE * noise))
    # Few entries of the other sign may be far away, as the zeros of a frequent indicator are.
    sign[~shown.any(axis=1) | beyond.any(axis=1)] = 0.0
    nearest = 2.0 ** (LOWEST + shown.argmax(axis=1))
    farthest = 2.0 ** (LOWEST + 1 + _highest(shown, 0))
    middle = sign * (nearest + farthest) / 2
    return found, middle, np.where(sign == 0, found.top, (farthest - nearest) / 2)


def _near_peak(votes: Vector, above: int = 1) -> NDArray[np.bool_]:
    """The octaves up to so many above that of the most votes, `_NEAR` in all."""
    places = np.arange(OCTAVES) - votes.argmax(axis=1)[:, None]
    return np.asarray((places <= above) & (places > above - _NEAR))


def _cells(
    rows: Table, releases: Releases, purpose: str, places: NDArray[np.int64] | None = None
) -> tuple[Vector, float]:
    """All votes of the columns, as shares of the rows, and the deviation of the noise in them.

    With `places`, of these columns alone.
    """
    n, dim = rows.shape
    order = np.arange(dim)
    if places is not None:
        order[:], dim = -1, places.size
        order[places] = np.arange(dim)
    mechanism = GaussianSum(dim * _CELLS, releases.noise_for(purpose), n)
    total = mechanism.sum()
    rows.add_to(total, _vote, order, LOWEST, OCTAVES)
    cells = mechanism.release(total, releases.source).reshape(dim, _CELLS)
    return cells, mechanism.noise_multiplier / n


def _ranges(cells: Vector, noise: float) -> Ranges:
    """What votes show, for this deviation of the noise in each of them."""
    dim = len(cells)
    votes, ones = cells[:, :OCTAVES], cells[:, OCTAVES]
    fits = _fits(votes) / noise
    found = fits.max(axis=1) > _chance_level(fits.size, _ALARMS if dim > 1 else _ALARMS_OF_ONE)
    indicators = ~found & (ones > noise * _one_level(ones, noise))
    octave = np.where(indicators, _OCTAVE_OF_ONE, fits.argmax(axis=1))
    known = found | indicators
    together = votes.sum(axis=0, keepdims=True) > SURE * noise * math.sqrt(dim)
    if not (known.any() or (together.any() and dim > 1)):
        return _nothing_found(dim)
    usual = _usual_octave(octave[known], together)
    likely = max(LIKELY, _chance_level(fits.size, _GUESSES))
    octave = np.where(known, octave, np.maximum(_highest(fits > likely, usual), usual))
    clear = votes > np.maximum(_LEVEL * votes.max(axis=1, keepdims=True), CERTAIN * noise)
    share, row_norm = _shares(votes, ones, noise)
    tail = votes > np.maximum(_TAIL * votes.sum(axis=1, keepdims=True), CERTAIN * noise)
    top = np.maximum(_highest(tail, octave), octave)
    return Ranges(
        2.0 ** (octave + LOWEST + 1), 2.0 ** (top + LOWEST + 1), share,
        np.count_nonzero(clear, axis=1), indicators, True, row_norm, known,
    )  # fmt: skip


def _chance_level(windows: int, alarms: float) -> float:
    """Standard deviations that noise alone exceeds in any of so many places this rarely."""
    return NormalDist().inv_cdf(1 - alarms / windows)


def _one_level(ones: Vector, noise: float) -> float:
    """Standard deviations from which on a column's votes for 1 are believed.

    If all columns together show ones, few are enough.
    """
    if ones.sum() > SURE * noise * math.sqrt(ones.size):
        return _SEEN
    return _chance_level(ones.size, _ALARMS)


def _shares(votes: Vector, ones: Vector, noise: float) -> tuple[Vector, float]:
    """Shares of the entries of columns that are not 0, and the root of their number in a row.

    Of k ones and m others, one has w/s votes, w being the weight of a one, and another 1/s, with
    s² = m + k w². So that all votes of the others, m/s, and of ones, k w/s, give s.
    """
    # Octaves where the columns together show nothing count only where one column stands out.
    wide = noise * math.sqrt(ones.size)
    common = votes.sum(axis=0) > SURE * wide
    votes = np.where(common | (votes > CERTAIN * noise), votes, 0.0)
    ones = np.where((ones.sum() > SURE * wide) | (ones > CERTAIN * noise), ones, 0.0)
    size = max(float(votes.sum() + _WEIGHT_OF_ONE * ones.sum()), 0.0)
    entries = votes.sum(axis=1) + ones / _WEIGHT_OF_ONE
    row_norm = math.sqrt(min(max(float(entries.sum()) * size, 1.0), ones.size))
    return entries * size, row_norm


def _nothing_found(dim: int) -> Ranges:
    largest = np.full(dim, 2.0 ** (LOWEST + OCTAVES))
    nothing, seen = np.zeros(dim, dtype=np.int64), np.zeros(dim, dtype=bool)
    return Ranges(largest, largest, 0.0 * largest, nothing, seen, False, math.sqrt(dim), seen)


def _fits(votes: Vector) -> Vector:
    """How well each octave is that of σ, or of all entries; of the noise in a vote if it is not."""
    below, above = _SHAPE_BELOW_SIGMA, _SHAPE.size - 1 - _SHAPE_BELOW_SIGMA
    padded = np.pad(votes, ((0, 0), (below, above)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, _SHAPE.size, axis=1)
    return np.asarray(np.maximum(windows @ (_SHAPE / np.linalg.norm(_SHAPE)), votes))


def _usual_octave(known: NDArray[np.int64], together: NDArray[np.bool_]) -> int:
    """For columns with few votes: the octave of most others, or the highest where they differ.

    A column whose scale is too large is lost. One whose scale is too small hides the others in
    noise, so that higher octaves are preferred.
    """
    counts = np.bincount(known, minlength=OCTAVES)
    if counts.max() > max(known.size / 2, 2):
        return int(counts.argmax())
    return max(int(_highest(together, 0)[0]), int(known.max(initial=0)))


def _highest(shown: NDArray[np.bool_], otherwise: Any) -> Vector:
    """Per column the highest octave that is shown."""
    highest = OCTAVES - 1 - shown[:, ::-1].argmax(axis=1)
    return np.asarray(np.where(shown.any(axis=1), highest, otherwise))


def whitened_moments(
    rows: Table, scale: Vector, row_norm: float, releases: Releases, purpose: str
) -> tuple[Vector, Vector, float]:
    """E[a_j] and E[a_j²] with every column in units of its scale, and what noise hides of both.

    Guarantees
    ----------
    One Gaussian release for the purpose: each row's entries and their squares, bounded to norm
    1.5 · row_norm as one vector, contribute norm ≤ 1 after division by that.
    """
    n, dim = rows.shape
    mechanism = GaussianSum(2 * dim, releases.noise_for(purpose), n)
    bound = _BOUND * row_norm
    total = mechanism.sum()
    rows.add_to(total, _add_powers, 1.0 / scale, 1.0 / bound)
    powers = mechanism.release(total, releases.source) * bound
    return powers[:dim], powers[dim:], mechanism.noise_multiplier * bound / n


def private_norm(
    rows: Table,
    scale: Vector,
    releases: Releases,
    purpose: str,
    quantile: float = 0.5,
    guess: float | None = None,
) -> float:
    """A quantile of the rows' norms sqrt(Σ_j scale_j a_j²), rounded up to an eighth of an octave.

    Votes far from a `guess` are noise. It is also the answer where noise hides all votes; by
    default it is that of rows of ones there.

    Guarantees
    ----------
    One Gaussian release for the purpose: a row votes once, for its norm's eighth.
    """
    n = rows.shape[0]
    mechanism = GaussianSum(OCTAVES * _NORM_BINS_PER_OCTAVE, releases.noise_for(purpose), n)
    total = mechanism.sum()
    rows.add_to(total, _vote_norms, np.sqrt(scale), LOWEST, _NORM_BINS_PER_OCTAVE)
    votes = mechanism.release(total, releases.source)
    kept = np.where(votes > SURE * mechanism.noise_multiplier / n, votes, 0.0)
    if guess is not None:
        octaves = LOWEST + np.arange(votes.size) / _NORM_BINS_PER_OCTAVE - math.log2(guess)
        kept[np.abs(octaves) > _NORM_OCTAVES] = 0.0
    if not kept.any():
        return math.sqrt(float(scale.sum())) if guess is None else guess
    where = np.searchsorted(np.cumsum(kept), quantile * kept.sum())
    return float(2.0 ** (LOWEST + (where + 1) / _NORM_BINS_PER_OCTAVE))


@kernel()
def _vote(
    total: Vector, per_unit: float, limit: float, table: FlatRows, order: Integers, lowest: int,
    octaves: int,
) -> tuple[int, int]:  # fmt: skip
    """Votes of the columns j with order[j] >= 0, which is their place."""
    data, indices, starts, dense = table
    for i in range(starts.size - 1):
        first = starts[i] if dense else 0
        squares = 0.0
        for k in range(starts[i], starts[i + 1]):
            place = order[indices[k - first]]
            if place >= 0 and data[k] != 0.0 and math.isfinite(data[k]):
                squares += _WEIGHT_OF_ONE**2 if abs(data[k]) == 1.0 else 1.0
        if squares == 0.0:
            continue
        vote = limit * per_unit / math.sqrt(squares)
        for k in range(starts[i], starts[i + 1]):
            place = order[indices[k - first]]
            if place >= 0 and data[k] != 0.0 and math.isfinite(data[k]):
                octave = math.frexp(abs(np.float64(data[k])))[1] - 1 - lowest
                octave, weight = min(max(octave, 0), octaves - 1), 1.0
                if abs(data[k]) == 1.0:
                    octave, weight = octaves, _WEIGHT_OF_ONE
                total[place * (octaves + 1) + octave] += np.rint(weight * vote)
    return 0, 0


@kernel()
def _add_powers(
    total: Vector, per_unit: float, limit: float, table: FlatRows, inverse: Vector, factor: float
) -> tuple[int, int]:
    data, indices, starts, dense = table
    dim = inverse.size
    clipped = nonfinite = 0
    for i in range(starts.size - 1):
        first = starts[i] if dense else 0
        squares = 0.0
        for k in range(starts[i], starts[i + 1]):
            if not math.isnan(data[k]):
                value = np.float64(data[k]) * inverse[indices[k - first]]
                squares += (value * factor) ** 2 + (value * value * factor) ** 2
        norm = math.sqrt(squares)
        if not math.isfinite(norm):
            nonfinite += 1
            continue
        clipped += norm > limit
        shrink = per_unit if norm <= limit else per_unit * limit / norm
        for k in range(starts[i], starts[i + 1]):
            if not math.isnan(data[k]):
                j = indices[k - first]
                value = np.float64(data[k]) * inverse[j]
                total[j] += np.rint(value * factor * shrink)
                total[dim + j] += np.rint(value * value * factor * shrink)
    return clipped, nonfinite


@kernel()
def _vote_norms(
    total: Vector, per_unit: float, limit: float, table: FlatRows, whitening: Vector, lowest: int,
    bins: int,
) -> tuple[int, int]:  # fmt: skip
    data, indices, starts, dense = table
    vote = np.rint(limit * per_unit)
    for i in range(starts.size - 1):
        first = starts[i] if dense else 0
        squares = 0.0
        for k in range(starts[i], starts[i + 1]):
            if not math.isnan(data[k]):
                squares += (np.float64(data[k]) * whitening[indices[k - first]]) ** 2
        if squares > 0.0 and math.isfinite(squares):
            octave = math.floor((math.log2(squares) / 2 - lowest) * bins)
            total[min(max(octave, 0), total.size - 1)] += vote
    return 0, 0
