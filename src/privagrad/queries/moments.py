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
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from privagrad._internal import validate
from privagrad._internal.validate import Vector
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
    Ranges,
    Share,
    Table,
    private_ranges,
    whitened_moments,
)

_HIDDEN = 0.1  # part of the noise in a column's square that its spread may hide in


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
    Share("ranges", 0.25),
    Share("moments", 0.12),
    ColumnQueries(Share("ranges around centres", 0.12), Share("moments around centres", 0.12)),
)
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

    Columns whose mean is beyond their spread are centred; in others 0 keeps its meaning, and the
    unit is the size of an entry that is not 0. `moments` are E[((a_j - centre_j)/unit_j)²]: about 1
    in dense columns, the share of non-zero entries in sparse ones.
    """

    centre: Vector
    unit: Vector
    moments: Vector


def private_moments(rows: Table, releases: Releases) -> Vector:
    """Second moments E[a_j²] of all columns, all positive, from the releases of `SCALES`."""
    ranges, (_, squares, floor) = _ranges_and_moments(rows, SCALES, releases)
    moments: Vector = ranges.scale**2 * np.maximum(squares, floor)
    return moments


def private_columns(
    rows: DenseRows | SparseRows,
    queries: ColumnQueries,
    releases: Releases,
    always: bool = False,
) -> Columns:
    """Centres, units and moments of all columns from the releases of `queries`.

    Without queries around centres nothing is centred; with `always` everything is.
    """
    ranges, (means, squares, floor) = _ranges_and_moments(rows, queries, releases)
    share = np.clip(ranges.share, floor, 1.0)
    size = _entry_size(squares, ranges.share, floor)
    centre = np.zeros(share.size)
    unit, moments = ranges.scale * size, share
    if queries.around is None:
        return Columns(centre, unit, moments)
    offset = np.flatnonzero(_is_offset(means, squares, floor) | always)
    centre[offset] = (ranges.scale * means)[offset]
    if offset.size:
        # A spread too small to be seen from afar is believed only so far: where it is wrong, rows
        # with the rare other values would be immense.
        least = ranges.scale[offset] * math.sqrt(_HIDDEN * floor)
        moved = rows.centred(offset, centre[offset])
        near = private_ranges(moved, releases, queries.around.ranges.purpose)
        means, squares, floor = whitened_moments(
            moved, near.top, near.row_norm, releases, queries.around.moments.purpose
        )
        centre[offset] += near.top * means
        spread = near.top * np.sqrt(np.maximum(squares - means**2, floor))
        unit[offset] = np.maximum(spread, least)
        moments[offset] = 1.0
    return Columns(centre, unit, moments)


def _ranges_and_moments(
    rows: Table, queries: ColumnQueries, releases: Releases
) -> tuple[Ranges, tuple[Vector, Vector, float]]:
    ranges = private_ranges(rows, releases, queries.ranges.purpose)
    return ranges, whitened_moments(
        rows, ranges.scale, ranges.row_norm, releases, queries.moments.purpose
    )


def bounded_columns(
    rows: DenseRows | SparseRows,
    bounds: tuple[Vector, Vector],
    releases: Releases,
    purpose: str,
    centred: bool = True,
    always: bool = False,
) -> Columns:
    """`private_columns` where public bounds of the columns are known: one release instead of four.

    Entries must lie within the bounds.
    """
    low, high = bounds
    offset = ((low > 0) | (high < 0)) & centred | always
    centre = np.where(offset, low / 2 + high / 2, 0.0)
    scale = np.maximum(high - centre, centre - low)
    scale[scale == 0] = 1.0
    everything = np.arange(centre.size)
    moved = rows.centred(everything, centre) if offset.any() else rows
    norm = math.sqrt(centre.size)
    means, squares, floor = whitened_moments(moved, scale, norm, releases, purpose)
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
    clear = share > CERTAIN * floor
    common = squares[clear].sum() / share[clear].sum() if clear.any() else 1.0
    weight = CERTAIN * floor
    size: Vector = np.sqrt((squares + weight * common) / (share + weight))
    return np.clip(size, 0.25, 2.0)


def _is_offset(means: Vector, squares: Vector, floor: float) -> NDArray[np.bool_]:
    """Where the mean is clear of the noise and beyond the spread, m² > E[a²]/2."""
    return (2 * means**2 > squares) & (np.abs(means) > SURE * floor)


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
