"""Queries over all rows: votes for octaves, sums of powers, votes for norms.

Each query is one Gaussian release of vectors of norm at most 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from privagrad._internal.jit import kernel
from privagrad._internal.threads import add_parts, pool_of
from privagrad._internal.validate import Vector
from privagrad.glm.kernels import FlatRows
from privagrad.privacy.accounting import PrivacyPlan
from privagrad.privacy.bounded import Adds, BoundedSum
from privagrad.privacy.events import GaussianEvent, Relation, relation_named
from privagrad.privacy.mechanism import GaussianSum
from privagrad.privacy.releases import Releases

LOWEST, OCTAVES = -40, 80
"""The lowest exponent of 2 and how many are distinguished: entries from 1e-12 to 1e12."""

# Octaves that the magnitude of a normal variable falls into, from 2^-3 σ to 2^2 σ.
_SHAPE = np.array([0.10, 0.19, 0.30, 0.27, 0.04])
_SHAPE_BELOW_SIGMA = 2  # σ is at the upper edge of the octave this many places after the first
LIKELY, SURE, CERTAIN = 3.0, 4.0, 5.0  # standard deviations of noise, by number of chances
_BOUND = 1.5  # a row's entries and squares, in units of the root of its number of entries
_TAIL = 0.02  # of a column's entries may be larger than its range
_NORM_BINS_PER_OCTAVE = 8
_PARTS, _SPLIT_FROM, _ENTRIES_PER_SUM = 4, 1_000_000, 8
"""Into how many parts rows are cut for threads, and from how many entries on: in all, and for each
of the sums, which every part has for itself."""


class Table(Protocol):
    """Rows that can be read part by part."""

    @property
    def shape(self) -> tuple[int, int]:
        """The number of rows and of columns."""

    def parts(self) -> Iterable[FlatRows]:
        """All rows, in as many parts as memory requires."""


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
        A power of two near the size of the column's entries that are not 0.
    top : array of shape (d,)
        A power of two that all but the largest entries of the column are below.
    share : array of shape (d,)
        The share of rows where the column is not 0.
    row_norm : float
        The root of the number of non-zero entries of a row, averaged over rows.
    """

    scale: Vector
    top: Vector
    share: Vector
    row_norm: float


def query_event(share: Share, epsilon: float, delta: float, relation: Relation) -> GaussianEvent:
    """The query, with the noise that its part of epsilon allows."""
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
    One Gaussian release for the purpose: a row with k non-zero entries casts k votes of 1/sqrt(k),
    a vector of norm 1.
    """
    n, dim = rows.shape
    mechanism = GaussianSum(dim * OCTAVES, releases.noise_for(purpose), n)
    total = mechanism.sum()
    _add_rows(total, _vote, rows, LOWEST, OCTAVES)
    votes = mechanism.release(total, releases.source).reshape(dim, OCTAVES)
    noise = mechanism.noise_multiplier / n
    # Octaves where the columns together show nothing count only where one column stands out.
    common = votes.sum(axis=0) > SURE * noise * math.sqrt(dim)
    kept = np.where(common | (votes > CERTAIN * noise), votes, 0.0)
    row_norm = float(np.clip(kept.sum(), 1.0, math.sqrt(dim)))
    fits = _fit_shape(kept)
    sure = fits > SURE * noise * float(np.linalg.norm(_SHAPE))
    if not sure.any():  # the best guess there is
        kept = votes
        fits = _fit_shape(kept)
        sure = fits == fits.max()
    octave = fits.argmax(axis=1)
    found = sure.any(axis=1)
    octave = np.where(found, octave, _cautious_octaves(votes, noise, octave[found]))
    totals = kept.sum(axis=1)
    shown = votes > np.maximum(_TAIL * totals[:, None], CERTAIN * noise)
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
    """For columns with few votes: the octave of most others, or the highest if they differ.

    A column whose scale is too large is lost. One whose scale is too small hides the others in
    noise, so a higher octave with some votes is preferred.
    """
    counts = np.bincount(others, minlength=OCTAVES)
    usual = counts.argmax() if 2 * counts.max() > others.size else others.max()
    shown = votes > LIKELY * noise
    return np.maximum(_highest(shown, usual), usual)


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
    _add_rows(total, _add_powers, rows, 1.0 / scale, 1.0 / bound)
    powers = mechanism.release(total, releases.source) * bound
    return powers[:dim], powers[dim:], mechanism.noise_multiplier * bound / n


def private_norm(
    rows: Table, scale: Vector, releases: Releases, purpose: str, quantile: float = 0.5
) -> float:
    """A quantile of the rows' norms sqrt(Σ_j scale_j a_j²), rounded up to an eighth of an octave.

    Guarantees
    ----------
    One Gaussian release for the purpose: a row votes once, for its norm's eighth.
    """
    n = rows.shape[0]
    mechanism = GaussianSum(OCTAVES * _NORM_BINS_PER_OCTAVE, releases.noise_for(purpose), n)
    total = mechanism.sum()
    _add_rows(total, _vote_norms, rows, np.sqrt(scale), LOWEST, _NORM_BINS_PER_OCTAVE)
    votes = mechanism.release(total, releases.source)
    kept = np.where(votes > SURE * mechanism.noise_multiplier / n, votes, 0.0)
    if not kept.any():
        return math.sqrt(float(scale.sum()))
    where = np.searchsorted(np.cumsum(kept), quantile * kept.sum())
    return float(2.0 ** (LOWEST + (where + 1) / _NORM_BINS_PER_OCTAVE))


def _add_rows(total: BoundedSum, add: Adds, rows: Table, *arguments: Any) -> None:
    """Let a kernel add all rows. Sums are exact, so that threads may share them out."""
    for part in rows.parts():
        total.add_by(_add_by_threads, add, part, arguments)


def _add_by_threads(
    units: Vector, per_unit: float, limit: float, add: Adds, table: FlatRows,
    arguments: tuple[Any, ...],
) -> tuple[int, int]:  # fmt: skip
    data, indices, starts, dense = table
    if starts[-1] - starts[0] < max(_SPLIT_FROM, _ENTRIES_PER_SUM * units.size):
        return add(units, per_unit, limit, table, *arguments)

    def add_part(partial: Vector, edges: tuple[int, int]) -> tuple[int, int]:
        rows = FlatRows(data, indices, starts[edges[0] : edges[1] + 1], dense)
        return add(partial, per_unit, limit, rows, *arguments)

    edges = np.linspace(0, starts.size - 1, _PARTS + 1).astype(int).tolist()
    with pool_of() as pool:
        return add_parts(units, add_part, pairwise(edges), pool)


@kernel()
def _vote(
    total: Vector, per_unit: float, limit: float, table: FlatRows, lowest: int, octaves: int
) -> tuple[int, int]:
    data, indices, starts, dense = table
    for i in range(starts.size - 1):
        first = starts[i] if dense else 0
        count = 0
        for k in range(starts[i], starts[i + 1]):
            if data[k] != 0.0 and math.isfinite(data[k]):
                count += 1
        if count == 0:
            continue
        vote = np.rint(limit * per_unit / math.sqrt(count))
        for k in range(starts[i], starts[i + 1]):
            if data[k] != 0.0 and math.isfinite(data[k]):
                octave = math.frexp(abs(np.float64(data[k])))[1] - 1 - lowest
                octave = min(max(octave, 0), octaves - 1)
                total[indices[k - first] * octaves + octave] += vote
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
            value = np.float64(data[k]) * inverse[indices[k - first]]
            squares += (value * factor) ** 2 + (value * value * factor) ** 2
        norm = math.sqrt(squares)
        if not math.isfinite(norm):
            nonfinite += 1
            continue
        clipped += norm > limit
        shrink = per_unit if norm <= limit else per_unit * limit / norm
        for k in range(starts[i], starts[i + 1]):
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
            squares += (np.float64(data[k]) * whitening[indices[k - first]]) ** 2
        if squares > 0.0 and math.isfinite(squares):
            octave = math.floor((math.log2(squares) / 2 - lowest) * bins)
            total[min(max(octave, 0), total.size - 1)] += vote
    return 0, 0
