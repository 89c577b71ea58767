"""Unknown scales of columns, learned from noisy exponents and noisy powers.

1. `queries.private_ranges`: each row votes, in every column where it is not 0, for the octave of
   its entry, with votes that together have norm 1. A column's octave stands out whatever its scale,
   because votes, unlike values, do not grow.
2. `queries.whitened_moments`: columns divided by these scales, each row's entries and squares
   bounded in one norm for the whole row, summed with noise.

Columns far from 0 are centred, and both queries are repeated around their centres. `algorithm3` is
the paper's own way, for comparison.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from privagrad._internal import validate
from privagrad._internal.validate import Integers, Vector
from privagrad.geometry.ellipsoid import Ellipsoid
from privagrad.glm.rows import DenseRows, SparseRows
from privagrad.privacy.accounting import PrivacyPlan
from privagrad.privacy.events import GaussianEvent
from privagrad.privacy.mechanism import GaussianSum
from privagrad.privacy.noise import RandomSource
from privagrad.privacy.releases import Releases
from privagrad.queries.columns import (
    CERTAIN,
    SURE,
    FeatureTable,
    Ranges,
    Share,
    Table,
    private_intervals,
    private_ranges,
    whitened_moments,
    with_rare,
)

_HIDDEN = 0.01  # part of the noise in a column's square that its spread may hide in
_DENSE = 0.03  # share of entries that are not 0 from which on a column is more than a rare event
_LARGER = 1.5  # means beyond so many times their noise are subtracted
_FREQUENT = 0.1  # mean, in units of entries, from which on columns of sparse tables are centred
_ROUNDING = 1e-9
_LEAST_SPREAD = 0.01  # of an indicator, as far as it sets the unit
_COMMON = 4.0  # units that differ by no more than this factor are one unit
_NOTHING = 2.0**60  # unit of columns that are not to be learned: nothing is left of them
_LEAST_KNOWN = 0.02  # share of rows that a column is taken to be known in at least


class ColumnQueries(NamedTuple):
    """The releases that learn the scales of columns; `around` are the same around their centres."""

    ranges: Share
    moments: Share
    around: ColumnQueries | None = None

    @property
    def shares(self) -> list[Share]:
        """All of them, in the order of their release."""
        return [self.ranges, self.moments, *(self.around.shares if self.around else [])]


SCALES = ColumnQueries(Share("ranges", 0.3), Share("moments", 0.15))
COLUMNS = ColumnQueries(
    Share("ranges", 0.3),
    Share("moments", 0.15),
    ColumnQueries(Share("ranges around centres", 0.15), Share("moments around centres", 0.15)),
)
RARE = Share("ranges of rare columns", 0.15)
"""For columns whose ranges the votes of all columns do not show, where the plan has it."""

BOUNDED_COLUMNS = Share("moments", 0.15)
TARGET = ColumnQueries(
    Share("target's range", 0.1),
    Share("target's moments", 0.05),
    ColumnQueries(
        Share("target's range around its centre", 0.1),
        Share("target's moments around its centre", 0.05),
    ),
)
BOUNDED_TARGET = Share("target's moments", 0.05)
NORMS = Share("row norms", 0.06)


@dataclass(frozen=True)
class Columns:
    """The affine map that makes columns comparable, (a_j - centre_j)/unit_j, and what it leaves.

    `moments` are E[((a_j - centre_j)/unit_j)²]. `varied` tells columns whose entries that are not 0
    differ from indicators, which are 0 or one value. Where noise hides all scales, nothing is
    `found`: units are so large that nothing is left of the columns. `seen` tells columns whose own
    entries showed their scale; None: all of them.
    """

    centre: Vector
    unit: Vector
    moments: Vector
    varied: NDArray[np.bool_]
    found: bool = True
    seen: NDArray[np.bool_] | None = None


def private_moments(rows: Table, releases: Releases) -> Vector:
    """Second moments E[a_j²] of all columns, all positive, from the releases of `SCALES`."""
    ranges, (_, squares, floor) = _ranges_and_moments(rows, SCALES, releases)
    moments: Vector = ranges.scale**2 * np.maximum(squares, floor)
    return moments


def private_columns(
    rows: FeatureTable,
    queries: ColumnQueries,
    releases: Releases,
    always: bool = False,
    limits: Vector | None = None,
    blanks: Integers | None = None,
    evenness: float = 0.5,
) -> Columns:
    """Centres, units and moments of all columns from the releases of `queries`.

    Without queries around centres nothing is centred; with `always` everything is. `limits` are
    public bounds on the size of entries, infinite where there are none. `blanks` holds for each
    column the place of the one that is 1 where it is missing, or -1: centres and units are those of
    the entries that are not missing. Indicators and rare columns have units between the size of
    their entries (`evenness` 0) and their deviation (1).
    """
    ranges, (means, squares, noise) = _ranges_and_moments(rows, queries, releases, limits, blanks)
    dim = means.size
    # Votes, unlike powers, are not shrunk where another column of the row is large.
    told, known = _told(blanks, dim), _known_shares(ranges.share, noise, blanks)
    means, squares, floor = means / known, squares / known, noise / known
    silent = told & (means <= SURE * floor)
    ranges = replace(ranges, share=ranges.share / known)
    if not ranges.found:
        zeros, none = np.zeros(dim), ranges.seen
        return Columns(zeros, ranges.scale, zeros, ranges.levels > 1, found=False, seen=none)
    varied = (ranges.levels > 1) & ~ranges.indicators
    share = np.clip(ranges.share, floor, 1.0)
    size = _entry_size(squares, ranges.share, floor)
    size = np.where(ranges.indicators, 1 / ranges.scale, size)
    centre, spread = np.zeros(dim), np.maximum(squares, floor)
    offset = np.zeros(dim, dtype=bool)
    if queries.around is not None:
        offset = _is_offset(means, squares, floor) & ~ranges.indicators | always
        centred = offset | _is_centred(means, floor, rows.sparse)
        centre = np.where(centred, ranges.scale * means, 0.0)
        spread = np.maximum(squares - np.where(centred, means**2, 0.0), floor)
    deviation = ranges.scale * np.sqrt(spread)
    unit = np.where(varied & (share > _DENSE), deviation, ranges.scale * size)
    places = np.flatnonzero(offset)
    if places.size and queries.around is not None:
        # A spread too small to be seen from afar is believed only so far: where it is wrong, rows
        # with the rare other values would be immense.
        least = ranges.scale[places] * np.sqrt(_HIDDEN * floor[places])
        moved = rows.centred(places, centre[places])
        near, middle, half = private_intervals(moved, releases, queries.around.ranges.purpose)
        # Around its centre a column is not wider than around 0.
        top = np.minimum(half, 2 * ranges.top[places])
        moved = moved.centred(np.arange(middle.size), middle)
        means, squares, noise = whitened_moments(
            moved, top, near.row_norm, releases, queries.around.moments.purpose
        )
        means, squares = means / known[places], squares / known[places]
        if near.found:
            centre[places] += middle + top * means
            found = top * np.sqrt(np.maximum(squares - means**2, noise / known[places]))
            deviation[places] = np.maximum(found, least)
        # A frequent indicator has two values; what varies around its centre has more.
        varied[places] |= near.levels > 2
        varied[places] |= deviation[places] < math.sqrt(_DENSE) * unit[places]
        unit[places] = np.where(varied[places] | always, deviation[places], unit[places])
    # Units of columns that did not show are guesses, which do not decide about the others.
    small, shown = ~varied | (share <= _DENSE), (ranges.seen | ~ranges.seen.any()) & ~told
    if shown.any() and unit[shown].max() <= _COMMON * unit[shown].min():
        alike = ~told & (unit <= _COMMON * unit[shown].min())
        unit[alike] = math.sqrt(float(np.mean(unit[alike] ** 2)))
        if not rows.sparse:
            small = told
    unit = np.where(small, unit * np.clip(deviation / unit, _LEAST_SPREAD, 1.0) ** evenness, unit)
    if limits is not None:
        unit = np.minimum(unit, limits)
    # Of columns that say what is missing where nothing is, noise alone would be learned.
    unit[silent] = _NOTHING
    # Noise may show a deviation beyond the size of the entries.
    moments = np.minimum(np.square(deviation / unit), _COMMON)
    return Columns(centre, unit, moments, varied, seen=ranges.seen & ~silent)


def _ranges_and_moments(
    rows: Table,
    queries: ColumnQueries,
    releases: Releases,
    limits: Vector | None = None,
    blanks: Integers | None = None,
) -> tuple[Ranges, tuple[Vector, Vector, float]]:
    ranges = private_ranges(rows, releases, queries.ranges.purpose)
    if RARE.purpose in releases.plan:
        ranges = with_rare(rows, ranges, releases, RARE.purpose)
    if limits is not None and ranges.found:
        # Noise may show a range beyond what entries can be.
        scale, top = np.minimum(ranges.scale, limits), np.minimum(ranges.top, limits)
        ranges = replace(ranges, scale=scale, top=top)
    if blanks is not None and ranges.found:
        told = _told(blanks, ranges.scale.size)
        scale, top = np.where(told, 1.0, ranges.scale), np.where(told, 1.0, ranges.top)
        ranges = replace(ranges, scale=scale, top=top, indicators=ranges.indicators | told)
    return ranges, whitened_moments(
        rows, ranges.scale, ranges.row_norm, releases, queries.moments.purpose
    )


def _told(blanks: Integers | None, dim: int) -> NDArray[np.bool_]:
    """Which columns say that others are missing."""
    told = np.zeros(dim, dtype=bool)
    if blanks is not None:
        told[blanks[blanks >= 0]] = True
    return told


def _known_shares(shares: Vector, noise: float, blanks: Integers | None) -> Vector:
    """The share of rows in which each column is not missing, where that is clear of noise.

    `shares` are those of the rows where a column that tells of blanks is 1.
    """
    if blanks is None:
        return np.ones(shares.size)
    missing = np.where(blanks >= 0, shares[blanks], 0.0)
    known = np.maximum(1 - missing, max(_LEAST_KNOWN, SURE * noise))
    return np.where(missing > _LARGER * noise, np.minimum(known, 1.0), 1.0)


def bounded_columns(
    rows: FeatureTable,
    bounds: tuple[Vector, Vector],
    releases: Releases,
    purpose: str,
    centred: bool = True,
    always: bool = False,
    blanks: Integers | None = None,
) -> Columns:
    """`private_columns` where public bounds of the columns are known: one release instead of four.

    Entries must lie within the bounds. Columns with the same bounds share a unit: the largest of
    their deviations.
    """
    told = _told(blanks, bounds[0].size)
    low, high = bounds
    outside = ((low > 0) | (high < 0)) & centred | always
    middle = np.where(outside, low / 2 + high / 2, 0.0)
    scale = np.maximum(high - middle, middle - low)
    scale[scale == 0] = 1.0
    moved: Table = rows.centred(np.arange(middle.size), middle) if outside.any() else rows
    # Of a column and the one that says that it is missing, a row has one entry.
    norm = math.sqrt(np.count_nonzero(~told))
    means, squares, noise = whitened_moments(moved, scale, norm, releases, purpose)
    known = _known_shares(means, noise, blanks)
    means, squares, floor = means / known, squares / known, noise / known
    clear = outside | centred & _is_centred(means, floor, rows.sparse and not outside.any())
    centre = np.where(clear, middle + scale * means, 0.0)
    spread = np.maximum(squares - np.where(clear, means**2, 0.0), floor)
    indicators = (low == 0) & (high == 1)
    same = bool(np.ptp(scale[~told]) == 0) and not always
    deviation = scale * np.sqrt(spread)
    unit = np.where(indicators, scale, deviation)
    if same:
        unit[~told] = deviation[~told].max()
    unit[told & (means <= SURE * floor)] = _NOTHING
    return Columns(centre, unit, np.square(deviation / unit), ~indicators)


def known_columns(
    rows: DenseRows | SparseRows,
    centred: bool = True,
    always: bool = False,
    blanks: Integers | None = None,
) -> Columns:
    """`private_columns` of rows that need no protection, exactly."""
    n = rows.shape[0]
    count, means, squares = _exact_powers(rows)
    told, known = _told(blanks, means.size), _known_shares(means, 0.0, blanks)
    means, squares = means / known, squares / known
    share = np.maximum(count, 1) / (n * known)
    size = np.sqrt(squares / share)
    size[~(size > 0)] = 1.0
    clear = centred & _is_centred(means / size, 0.0, isinstance(rows, SparseRows)) | always
    centre = np.where(clear, means, 0.0)
    places = np.flatnonzero(clear)
    deviation = np.sqrt(squares)
    if places.size:
        spread = np.std if blanks is None else np.nanstd
        deviation[places] = spread(rows.centred(places, centre[places]).array, axis=0)
    deviation[~(deviation > 0)] = 1.0
    varied = np.abs(means) < (1 - _ROUNDING) * share * size
    unit = np.where(varied & (share > _DENSE) | always, deviation, size)
    rest = unit[~told]
    if rest.max() <= _COMMON * rest.min():
        unit[~told] = math.sqrt(float(np.mean(rest**2)))
    return Columns(centre, unit, np.square(deviation / unit), varied)


def known_moments(rows: DenseRows | SparseRows) -> Vector:
    """E[a_j²] of rows that need no protection, plus one pseudo-row of typical size: never 0."""
    _, _, squares = _exact_powers(rows)
    typical = float(np.median(squares[squares > 0])) if squares.any() else 1.0
    return np.asarray(squares + typical / rows.shape[0])


def _exact_powers(rows: DenseRows | SparseRows) -> tuple[Vector, Vector, Vector]:
    """How many entries of each column are not 0, and their first and second moments.

    Missing entries, NaN, count as 0.
    """
    n, dim = rows.shape
    data, indices, _, dense = rows.flat
    values = np.asarray(data, dtype=np.float64)
    if (missing := np.isnan(values)).any():
        values = np.where(missing, 0.0, values)
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


def _entry_size(squares: Vector, share: Vector, floor: Vector) -> Vector:
    """Root mean square of the entries that are not 0: rare columns lean on all columns together."""
    squares, share = np.maximum(squares, 0.0), np.clip(share, 0.0, 1.0)
    clear = share > CERTAIN * floor
    common = squares[clear].sum() / share[clear].sum() if clear.any() else 1.0
    weight = CERTAIN * floor
    size: Vector = np.sqrt((squares + weight * common) / (share + weight))
    return np.clip(size, 0.25, 2.0)


def _is_offset(means: Vector, squares: Vector, floor: Vector) -> NDArray[np.bool_]:
    """Where the mean is clear of the noise and beyond the spread, m² > E[a²]/2."""
    return (2 * means**2 > squares) & (np.abs(means) > SURE * floor)


def _is_centred(means: Vector, floor: Vector | float, sparse: bool) -> NDArray[np.bool_]:
    """Where the mean is larger than its noise; in sparse tables also frequent, to keep zeros."""
    least = _LARGER * floor
    return np.abs(means) > (np.maximum(least, _FREQUENT) if sparse else least)


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
    noise: Literal["accountant", "paper"] = "accountant",
) -> Vector:
    """Algorithm 3 of the paper: σ̂ from truncated second moments, halving.

    Parameters
    ----------
    X : array of shape (n, d)
        The rows.
    ratio : float
        r > 1, the moment ratio of the columns.
    epsilon, delta : float
        The budget.
    source : RandomSource
        The source of the noise.
    rounds : int, optional
        T, by default 3/2 log₂ d.
    noise : {"accountant", "paper"}
        "accountant" for the noise that gives the guarantee; "paper" for the standard deviation
        that the paper states, ρ_t² T sqrt(d log(T/δ)) / (n ε), which does NOT: the constant of
        the Gaussian mechanism is missing (for T = 1, ε = 1, δ = 1e-6 the true δ is 1.06e-5).

    Guarantees
    ----------
    With noise="accountant" (epsilon, delta)-differential privacy, as T Gaussian releases, n public.
    Rows that are not finite contribute nothing. For columns with moment ratio r, max σ_j = 1 and n
    as `theory.required_rows` states, with probability 1 - β max(σ_j, d^{-3/2})/2 ≤ σ̂_j ≤ 8 σ_j: the
    factor 2 of the theorem's statement is 8 in its proof, and columns below the floor return 2^-T.
    T = 3/2 log₂ d, so that the floor is d^{-3/2}.
    """
    rows = np.asarray(X, dtype=np.float64)
    n, dim = rows.shape
    if validate.positive("ratio", ratio) <= 1:
        raise ValueError(f"Expected ratio > 1, found {ratio!r}: log r must be positive.")
    validate.positive("epsilon", epsilon)
    validate.delta_of(delta, n)
    validate.choice("noise", noise, ("accountant", "paper"))
    T = max(1, math.ceil(1.5 * math.log2(dim))) if rounds is None else rounds
    # In units of ρ² sqrt(d): rows of truncated squares have norm ≤ 1.
    if noise == "paper":
        multiplier = T * math.sqrt(math.log(T / delta)) / epsilon
    else:
        event = GaussianEvent(1.0, validate.integer("rounds", T), purpose="moments")
        multiplier = PrivacyPlan.calibrate_event(event, epsilon, delta).noise_multiplier
    mechanism = GaussianSum(dim, multiplier, n)
    with np.errstate(over="ignore"):
        powers = np.where(np.isfinite(rows), np.square(rows), np.nan)
    result = np.full(dim, 2.0**-T)
    left = np.ones(dim, dtype=bool)
    for t in range(1, T + 1):
        rho = 4 * ratio * 2.0 ** -(t - 1) * math.log(ratio)
        truncated = np.minimum(powers, rho**2) / (rho**2 * math.sqrt(dim))
        total = mechanism.sum()
        total.add(truncated)
        squares = mechanism.release(total, source) * rho**2 * math.sqrt(dim)
        seen = left & (squares >= 4.0 ** -(t + 1))
        result[seen] = 2.0**-t
        left &= ~seen
    return result
