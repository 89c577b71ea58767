"""The privacy loss of random allocation ("balls and bins"), computed from above.

In every epoch of t steps each row takes part in exactly one step, chosen uniformly at random and
independently of the other rows. A step releases the sum of its rows' vectors, of norm at most 1,
plus N(0, z² I). All t releases of an epoch are one event, with one privacy loss.

Notes
-----
*One pair dominates an epoch.* Under zero-out the tables differ in whether one row contributes.
Fix the steps of all other rows: they do not depend on that row, and whatever holds for each choice
holds for the random one. Let v_k, ‖v_k‖ ≤ 1, be what the row would contribute in step k, chosen
with the help of all earlier releases, and let

    P = (1/t) Σ_i N(e_i, z² I),    Q = N(0, z² I)    in t dimensions.

From a draw u of either of them the releases are made one after the other: in step k add
v_k u_k + N(0, z² (I - v_k v_kᵀ)) to the sum of the other rows. Given the past that is N(0, z² I) if
u_k ~ N(0, z²) and N(v_k, z² I) if u_k ~ N(1, z²), independent of what came before. So P gives the
releases with the row, Q those without it, by the same random map: (P, Q) dominates the epoch in
both directions, however the v_k were chosen. (The same pair: Chua et al. 2025, "Balls-and-Bins
Sampling for DP-SGD"; Feldman and Shenfeld 2025, "Privacy amplification by random allocation".)
Other releases that do not depend on the row's step may be made in between. Epochs draw anew, and
dominating pairs compose (Zhu, Dong, Wang 2022, Theorem 10).

*The ratio is a mean.* With μ = 1/z, dP/dQ = (Y_1 + ... + Y_t)/t =: R, and under Q the Y_i are
independent, Y_i = exp(μ g_i - μ²/2) with g_i ~ N(0, 1) and mean 1. For all ε

    with the row against without:  δ(ε) = E_Q[(R - e^ε)⁺],
    without against with:          δ(ε) = E_Q[(1 - e^ε R)⁺].

*Discretisation.* Both are expectations of convex functions of the Y_i. They do not fall if a value
is replaced by a random one of the same mean: here by one of the two neighbours in a geometric grid.
That is done with every Y_i and, while means of 2, 4, 8, ... of them are formed, with every mean.
The result R̂ has δ̂(ε) ≥ δ(ε) for all ε in both directions, and E_Q[R̂] = 1: it is the ratio of a
pair that dominates (P, Q), so it composes. The added variance is of second order in the grid. For
one pair this is "connect the dots" (Doroshenko et al. 2022).

*What is left out.* Let B be the event that the mean of some block of m of the Y_i falls into a set
T that is cut off. There are at most t/m such blocks, so that

    Q(B) ≤ (t/m) P(Ŵ ∈ T),    P(B) = E_Q[R̂; B] ≤ (t/m) P(Ŵ ∈ T) + E[Ŵ; Ŵ ∈ T]

for the mean Ŵ of a block. On B the loss counts as infinite.

*Rounding.* Only products of positive numbers are added, so that all probabilities are accurate
relative to themselves, however small they are. Where a share of a mass may be off by κ, both
neighbours get κ more. Other errors are counted in `rounding`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from privagrad._internal.jit import kernel
from privagrad._internal.validate import Integers, Vector
from privagrad.privacy.rounding import ROUNDING

LARGEST_MU = 10.0
"""Up to there allocation is accounted; with less noise as if everybody knew each row's step."""

_FINENESS = 0.0125
"""The grid of logarithms of Y, over their standard deviation."""
_TOLERATED = 1.05
_BULK = 8.0
"""How many deviations above its median a mean stays on the finest grid."""
_BELOW = 0.1587
_MORE = 1 + 1e-6
"""For bounds that are computed with rounding. _BELOW: Φ(-1)."""
_NODES = 10
"""Gauss and Legendre's nodes in a cell: in cells of 0.0125 deviations the error is below 1e-30."""


@dataclass(frozen=True)
class Ratio:
    """A bound R̂ on dP/dQ: under Q it is e^{interval places[i]} with probability masses[i].

    Attributes
    ----------
    lost, lost_with : float
        Bounds on the probabilities of all other values under Q and under P.
    rounding : float
        A bound on the relative error of the masses.
    """

    places: Integers
    masses: Vector
    interval: float
    lost: float
    lost_with: float
    rounding: float

    @property
    def logs(self) -> Vector:
        return np.asarray(self.interval * self.places.astype(np.float64))


@lru_cache(maxsize=64)
def likelihood_ratio(mu: float, steps: int, tail: float) -> Ratio:
    """R̂ for `steps` steps an epoch, with values of probability at most `tail` left out.

    Means of m values are formed for every m whose binary digits begin those of `steps`. Their grid
    is as much finer than that of the Y_i as they are closer together, up to a factor of two.
    """
    part = tail / (4 * steps.bit_length())
    one = _one_step(mu, steps, part)
    found, size = one, 1
    for digit in bin(steps)[3:]:
        enough = found.interval <= _TOLERATED * _FINENESS * _bulk(found)[1]
        spacing = found.interval if enough else found.interval / 2
        found = _mean(found, found, 0.5, spacing)
        size *= 2
        found = _thinned(_without_ends(found, steps / size, part), one.interval)
        if digit == "1":
            size += 1
            found = _mean(found, one, 1 / size, spacing)
            found = _thinned(_without_ends(found, steps / size, part), one.interval)
    return found


def _one_step(mu: float, steps: int, tail: float) -> Ratio:
    """Y on a grid. A cell's mass is split by integrals of positive functions.

    Of the mass at y, e^lo ≤ y ≤ e^hi, the part (y - e^lo)/(e^hi - e^lo) goes to the upper end.
    """
    from scipy.special import ndtr, ndtri

    h = _FINENESS * mu
    low = float(ndtri(tail / (2 * steps)))
    high = max(mu - float(ndtri(tail / 4)), -float(ndtri(tail / (4 * steps))))
    first, last = (math.floor((g - mu / 2) / _FINENESS) for g in (low, high))
    places = np.arange(first, last + 2)
    nodes, weights = np.polynomial.legendre.leggauss(_NODES)
    inside = (nodes + 1) / 2
    g = _FINENESS * (places[:-1, None] + inside) + mu / 2
    density = np.exp(-g * g / 2) * (weights * _FINENESS / 2 / math.sqrt(2 * math.pi))
    upper, lower = _shares(h * inside, h)
    masses = np.zeros(places.size)
    masses[:-1] += density @ lower
    masses[1:] += density @ upper
    bottom, top = _FINENESS * first + mu / 2, _FINENESS * (last + 1) + mu / 2
    # g is off by a few roundings of `furthest`, exp(-g²/2) by |g| times that; then shares and sums.
    furthest = max(abs(bottom), abs(top))
    rounding = ROUNDING * (8 * furthest**2 + 2 * _NODES + 100)
    lost = steps * float(ndtr(bottom) + ndtr(-top)) * _MORE
    lost_with = lost + float(ndtr(mu - top) + ndtr(bottom - mu)) * _MORE
    return Ratio(places, masses, h, lost, lost_with, rounding)


def _shares(above: Vector, width: Vector | float) -> tuple[Vector, Vector]:
    """How a mass is split that lies `above` the lower end of a cell of this width, in logarithms.

    The parts of the upper and the lower end, each accurate relative to itself.
    """
    whole = np.expm1(width)
    return np.expm1(above) / whole, np.exp(width) * -np.expm1(above - width) / whole


def _mean(x: Ratio, y: Ratio, weight: float, spacing: float) -> Ratio:
    """(1 - weight) X + weight Y for independent X and Y, on a grid of the given spacing.

    The spacings differ by powers of two, x's being at least the new one and at most y's. What was
    left out stays so.
    """
    finer, stride = round(x.interval / spacing), round(y.interval / x.interval)
    ours, others = x.places, y.places * stride
    differences, index = _differences(ours, others)
    lower, upper, lower_share, upper_share = _splits(differences, weight, x.interval, spacing)
    # A mean lies between both values.
    first = finer * min(ours[0], others[0]) - 1
    masses = np.zeros(finer * max(ours[-1], others[-1]) + 3 - first)
    _pair_up(
        finer * ours - first, x.masses, y.masses, index, lower, upper, lower_share, upper_share,
        masses,
    )  # fmt: skip
    # In each new cell and the two beside it, a value of y meets at most 7 values of x that weigh
    # more in the mean, and the other way round: so many terms are added.
    terms = 8 * (ours.size + others.size) + 8
    rounding = x.rounding + y.rounding + ROUNDING * terms
    places = np.arange(first, first + masses.size)
    return Ratio(places, masses, spacing, x.lost, x.lost_with, rounding)


def _differences(ours: Integers, others: Integers) -> tuple[Integers, Integers]:
    """What the places of others lie above ours, and the number of each pair's (other, our) value.

    Where the values are few but far apart, only those that occur.
    """
    above = others[:, None] - ours
    lowest, highest = int(above[0, -1]), int(above[-1, 0])
    if highest - lowest < above.size:
        return np.arange(lowest, highest + 1), above - lowest
    differences, index = np.unique(above, return_inverse=True)
    return differences, index.reshape(above.shape)


def _splits(
    differences: Integers, weight: float, interval: float, spacing: float
) -> tuple[Integers, Integers, Vector, Vector]:
    """Where e^x (1 - w + w e^{y - x}) goes for y - x = `differences` intervals.

    The two places, in units of `spacing` from x on, and the shares of the mass, which are never
    too small: `slack` is several times what roundings move a place by.
    """
    apart = interval * differences.astype(np.float64)
    near = np.log1p(weight * np.expm1(np.minimum(apart, 1.0)))
    far = apart + np.log(weight + (1 - weight) * np.exp(-np.maximum(apart, 1.0)))
    places = np.where(apart < 1.0, near, far) / spacing
    # In `far` two terms may cancel.
    terms = np.abs(places) + np.where(apart < 1.0, 0.0, apart / spacing)
    slack = 64 * ROUNDING * (1 + terms)
    lower = np.floor(places)
    # So close to a grid point that rounding decides on which side: spread over both cells.
    same = differences == 0
    above = (places - lower < slack) & ~same
    below = (lower + 1 - places < slack) & ~same
    lower = np.where(above, lower - 1, lower)
    width = np.where(above | below, 2.0, 1.0)
    share, rest = _shares(spacing * (places - lower), spacing * width)
    lower_share = np.where(same, 1.0, np.minimum(rest + slack, 1.0))
    upper_share = np.where(same, 0.0, np.minimum(share + slack, 1.0))
    return lower.astype(np.int64), (lower + width).astype(np.int64), lower_share, upper_share


@kernel()
def _pair_up(
    places: Integers,
    x: Vector,
    y: Vector,
    index: Integers,
    lower: Integers,
    upper: Integers,
    lower_share: Vector,
    upper_share: Vector,
    masses: Vector,
) -> None:
    """Add the mass of every pair (y_j, x_i) to two places, which are `lower` and `upper` from x."""
    for j in range(y.size):
        for i in range(x.size):
            k = index[j, i]
            mass = x[i] * y[j]
            masses[places[i] + lower[k]] += mass * lower_share[k]
            masses[places[i] + upper[k]] += mass * upper_share[k]


def _without_ends(ratio: Ratio, blocks: float, tail: float) -> Ratio:
    """The same without the smallest and largest values, whose probabilities count as lost."""
    costs = (np.exp(ratio.logs) + blocks) * ratio.masses
    start = int(np.searchsorted(np.cumsum(costs), tail))
    stop = costs.size - int(np.searchsorted(np.cumsum(costs[::-1]), tail))
    kept = slice(start, stop)
    cut = ratio.masses.copy()
    cut[kept] = costs[kept] = 0.0
    return replace(
        ratio,
        places=ratio.places[kept],
        masses=ratio.masses[kept],
        lost=ratio.lost + blocks * float(cut.sum()) * _MORE,
        lost_with=ratio.lost_with + float(costs.sum()) * _MORE,
    )


def _bulk(ratio: Ratio) -> tuple[float, float]:
    """The median of the logarithm, and what the value at one normal deviation lies below it."""
    sums = np.cumsum(ratio.masses)
    low, middle = ratio.logs[np.searchsorted(sums, sums[-1] * np.array([_BELOW, 0.5]))]
    return float(middle), float(middle - low)


def _thinned(ratio: Ratio, coarsest: float) -> Ratio:
    """The same with fewer places far above 1, where one large Y decides: relative to it as fine."""
    median, deviation = _bulk(ratio)
    end = math.exp(median) * (1 + _BULK * deviation)
    gaps = coarsest / ratio.interval * (1 - end * np.exp(-ratio.logs))
    steps = np.maximum(gaps, 1.0).astype(np.int64).tolist()
    chosen = [0]
    while chosen[-1] < len(steps) - 1:
        chosen.append(min(chosen[-1] + steps[chosen[-1]], len(steps) - 1))
    ends = np.array(chosen)
    if ends.size == len(steps):
        return ratio
    cells = np.minimum(np.searchsorted(ends, np.arange(len(steps)), side="right"), ends.size - 1)
    start, stop = ends[cells - 1], ends[cells]
    above = (np.arange(len(steps)) - start) * ratio.interval
    share, rest = _shares(above, (stop - start) * ratio.interval)
    masses = np.zeros(ends.size)
    masses += np.bincount(cells, ratio.masses * share, ends.size)
    masses += np.bincount(cells - 1, ratio.masses * rest, ends.size)
    # Sums of up to two cells, and shares with differences of places.
    rounding = ratio.rounding + ROUNDING * (20 + 6 * int(np.diff(ends).max()))
    return replace(ratio, places=ratio.places[ends], masses=masses, rounding=rounding)
