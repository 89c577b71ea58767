"""The privacy loss of one release, put on a grid so that it can be composed.

For two neighbouring tables let P and Q be the distributions of what is released. The privacy loss
is L = log(dP/dQ) under P, and δ(ε) = E_P[(1 - e^{ε - L})⁺]. Losses of successive releases add up.
Everything here is computed from the upper tails P(L > ε) and Q(L > ε), which are sums of positive
terms: they are accurate relative to themselves, however small they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from privagrad._internal.validate import Vector
from privagrad.privacy.allocation import LARGEST_MU, likelihood_ratio
from privagrad.privacy.events import GaussianEvent, ObjectiveEvent, Release, releases_per_draw
from privagrad.privacy.rounding import ROUNDING

_LARGEST_EXPONENT = 600.0
_LEFT_OUT_BELOW = 1e-19
"""Probability of small losses that are rounded up to one value."""


@dataclass(frozen=True)
class Tails:
    """ε ↦ P(L > ε), Q(L > ε); the range that holds nearly all losses; P(L = ∞).

    Q = 0 where nothing is known about it: losses are then rounded up.
    """

    of: Callable[[Vector], tuple[Vector, Vector]]
    low: float
    high: float
    certain: float = 0.0


@dataclass(frozen=True)
class Atoms:
    """A discrete distribution of losses that dominates the real one, on any places.

    Attributes
    ----------
    losses, masses : array
        The losses, ascending, and their probabilities.
    certain : float
        The probability of an infinite loss.
    rounding : float
        A bound on the relative error of the masses.
    """

    losses: Vector
    masses: Vector
    certain: float
    rounding: float

    @property
    def low(self) -> float:
        return float(self.losses[0])

    @property
    def high(self) -> float:
        return float(self.losses[-1])


@dataclass(frozen=True)
class LossGrid:
    """A distribution of losses on multiples of an interval that dominates the real one.

    Attributes
    ----------
    first : int
        The number of the smallest loss, in intervals.
    masses : array
        Probabilities of the losses first, first + 1, ...
    certain : float
        The probability of an infinite loss.
    rounding : float
        A bound on the relative error of upper tails by floating-point arithmetic.
    """

    first: int
    masses: Vector
    certain: float
    rounding: float


def loss_tails(event: Release, sensitivity: float, removed: bool, tail: float) -> Tails | Atoms:
    """Losses of one release; `removed`: P is with the row, Q without it, or the other way round.

    Losses of probability `tail` at the top may count as infinite. Under random allocation they are
    those of one epoch, with correlated noise those of `bands` releases in a row.
    """
    if isinstance(event, ObjectiveEvent):
        return objective_tails(event, tail)
    mu = sensitivity / event.noise_multiplier
    if event.sampling in (None, "poisson", "cyclic_poisson"):
        return poisson_tails(mu, event.rate, removed, tail)
    if event.sampling == "random_allocation":
        return allocation_atoms(mu, releases_per_draw(event), removed, tail)
    return fixed_size_tails(event, tail)


def on_grid(losses: Tails | Atoms, interval: float) -> LossGrid:
    """Losses on multiples of an interval: δ(ε) does not fall for any ε."""
    if isinstance(losses, Atoms):
        return _atoms_on_grid(losses, interval)
    return _tails_on_grid(losses, interval)


def _atoms_on_grid(atoms: Atoms, interval: float) -> LossGrid:
    """Split every mass between the grid points beside it, so that E[e^{-L}] stays as it is.

    With M = e^{-L}, δ(ε) = E_P[(1 - e^ε M)⁺] is convex in M, and so is δ of a composition: it does
    not fall when M gets a random value of the same mean. Of the mass at L in (e, e + h] the part
    (1 - e^{-(L - e)})/(1 - e^{-h}) goes to the upper end.
    """
    cells = np.floor(atoms.losses / interval)
    share = np.expm1(interval * cells - atoms.losses) / math.expm1(-interval)
    share = np.clip(share, 0.0, 1.0)
    first = int(cells[0])
    places = cells.astype(np.int64) - first
    masses = np.zeros(int(places[-1]) + 2)
    masses += np.bincount(places, atoms.masses * (1 - share), masses.size)
    masses += np.bincount(places + 1, atoms.masses * share, masses.size)
    depth = 8 + 2 * max(abs(atoms.low), abs(atoms.high))
    rounding = atoms.rounding + ROUNDING * (8 * depth / min(interval, 1.0) + places.size)
    return LossGrid(first, masses, atoms.certain, rounding)


def _tails_on_grid(tails: Tails, interval: float) -> LossGrid:
    """Split the mass between two neighbouring grid points so that P and Q keep theirs.

    Masses a of P and b of Q on losses in (e, e + h] go to the ends: those of P sum to a, and those
    of Q, e^{-loss} times as large, to b. δ(ε) of the result is the largest profile that agrees with
    the real one on the grid ("connect the dots", Doroshenko et al. 2022).
    """
    first, last = math.floor(tails.low / interval), math.ceil(tails.high / interval)
    edges = interval * np.arange(first, last + 1, dtype=np.float64)
    above, above_other = tails.of(edges)
    mass = np.maximum(-np.diff(above), 0.0)
    other = np.maximum(-np.diff(above_other), 0.0)
    start = edges[:-1]
    # Beyond this exponent all mass goes to the upper end.
    other = np.where(start > _LARGEST_EXPONENT, 0.0, other)
    scaled = other * np.exp(np.minimum(start, _LARGEST_EXPONENT))
    upper = np.clip((mass - scaled) / -math.expm1(-interval), 0.0, mass)
    masses = np.zeros(edges.size)
    masses[0] = max(1.0 - above[0], 0.0)
    masses[:-1] += mass - upper
    masses[1:] += upper
    # A normal tail at t has a relative error of about t² ≈ -2 log(tail) roundings, a loss one of
    # about its own size; the division by the interval enlarges both.
    least = float(above[above > 0].min())
    depth = 8 - 4 * math.log(least) + 2 * max(abs(tails.low), abs(tails.high))
    rounding = 8 * ROUNDING * depth / min(interval, 1.0)
    return LossGrid(first, masses, float(above[-1]) + tails.certain, rounding)


def poisson_tails(mu: float, rate: float, removed: bool, tail: float) -> Tails:
    """N(0, 1) against (1 - rate) N(0, 1) + rate N(mu, 1); at rate 1 all rows are used.

    The log-ratio of the mixture to N(0, 1) increases with x: log(1 - rate + rate e^{mu x - mu²/2}).
    """
    from scipy.special import ndtr, ndtri

    far, near = -float(ndtri(tail)), -float(ndtri(_LEFT_OUT_BELOW))

    def loss_at(x: float) -> float:
        grown = math.log(rate) + mu * x - mu * mu / 2
        return grown if rate == 1 else float(np.logaddexp(math.log1p(-rate), grown))

    def place(losses: Vector) -> Vector:
        small = np.expm1(np.minimum(losses, _LARGEST_EXPONENT)) / rate
        with np.errstate(divide="ignore"):
            grown = np.log1p(np.maximum(small, -1.0))
        grown = np.where(losses > _LARGEST_EXPONENT, losses - math.log(rate), grown)
        return np.asarray((losses if rate == 1 else grown) / mu + mu / 2)

    def with_row(losses: Vector) -> tuple[Vector, Vector]:
        x = place(losses)
        without = ndtr(-x)
        return (1 - rate) * without + rate * ndtr(mu - x), without

    def without_row(losses: Vector) -> tuple[Vector, Vector]:
        x = place(-losses)
        without = ndtr(x)
        return without, (1 - rate) * without + rate * ndtr(x - mu)

    if removed:
        return Tails(with_row, loss_at(-near if rate < 1 else mu - near), loss_at(mu + far))
    return Tails(without_row, -loss_at(near), -loss_at(-far))


def fixed_size_tails(event: GaussianEvent, tail: float) -> Tails:
    """One release over a sample of fixed size, under replace-one.

    Let two tables differ in row i, let K be how often the sample holds row i, p_k = P(K = k),
    η = P(K ≥ 1). Given K = 0 the releases have one distribution, ω₀; so they are
    (1 - η) ω₀ + η ω₁ and (1 - η) ω₀ + η ω₁'. With α' = e^{ε'} = 1 + η (α - 1), α ≥ 1, advanced
    joint convexity (Balle, Barthe, Gaboardi 2018, Theorem 2) gives
    H_α'(·‖·) = η H_α(ω₁ ‖ (1 - β) ω₀ + β ω₁') with β = α'/α ∈ [0, 1], and joint convexity
    bounds that by η ((1 - β) H_α(ω₁ ‖ ω₀) + β H_α(ω₁ ‖ ω₁')).

    Couple the samples: replacing the k draws of row i by other draws, or by the changed row,
    changes k vectors of norm ≤ 1, so that both divergences, given K = k, are at most δ_k(ε): the
    profile of a Gaussian whose means lie 2k apart. Hence (their Theorem 10)

        δ(ε') ≤ Σ_{k ≥ 1} p_k δ_k(log(1 + (e^{ε'} - 1)/η)),    ε' ≥ 0.

    Without replacement K is 0 or 1 and p_1 = η = batch_size/n; with replacement K is binomial.
    The pair of tables is exchangeable, so for ε' < 0 the bound follows from
    H_α(P‖Q) = 1 - α + α H_{1/α}(Q‖P). The two branches form one convex function of e^{ε'}, hence
    the profile of a dominating pair. With G_k and H_k the tails of the Gaussian's two
    distributions at ε = log(1 + (e^{ε'} - 1)/η), the pair's tails for ε' ≥ 0 are

        P(L > ε') = Σ p_k (G_k + H_k (1 - η)/η),    Q(L > ε') = Σ p_k H_k/η,

    and P(L ≤ -ε') = Q(L ≥ ε').
    """
    from scipy.special import ndtr

    rate = event.rate
    if event.sampling == "without_replacement":
        counts, weights, rest = np.array([1.0]), np.array([rate]), 0.0
    else:
        counts, weights, rest = _repeats(event.n_examples, event.batch_size, tail)

    def above(losses: Vector) -> tuple[Vector, Vector]:
        inner = np.log1p(np.expm1(np.minimum(losses, _LARGEST_EXPONENT)) / rate)
        inner = np.where(losses > _LARGEST_EXPONENT, losses - math.log(rate), inner)
        upper, lower = np.zeros_like(losses), np.zeros_like(losses)
        for count, weight in zip(counts, weights, strict=True):
            mu = 2.0 * count / event.noise_multiplier
            other = ndtr(-mu / 2 - inner / mu)
            upper += weight * (ndtr(mu / 2 - inner / mu) + other * (1 - rate) / rate)
            lower += weight / rate * other
        return upper, lower

    def of(losses: Vector) -> tuple[Vector, Vector]:
        upper, lower = above(np.abs(losses))
        below = losses < 0
        return np.where(below, 1 - lower, upper), np.where(below, 1 - upper, lower)

    trials = np.geomspace(1e-3, 1e9, 1000)
    upper, lower = above(trials)
    high = float(trials[np.argmax(upper <= tail)])
    low = -float(trials[np.argmax(lower <= _LEFT_OUT_BELOW)])
    return Tails(of, low, high, rest)


def allocation_atoms(mu: float, steps: int, removed: bool, tail: float) -> Tails | Atoms:
    """One epoch of random allocation: the loss is log R under P, or -log R under Q.

    E_Q[f(R)] = E_P[f(R)/R]: under P the masses are R times as large. With very little noise the
    epoch costs as much as one release over all rows: that is what it costs for somebody who knows
    the row's step, and knowing less does not help.
    """
    if mu > LARGEST_MU:
        return poisson_tails(mu, 1.0, removed, tail)
    ratio = likelihood_ratio(mu, steps, tail)
    logs, rounding = ratio.logs, ratio.rounding + 8 * ROUNDING
    if removed:
        return Atoms(logs, ratio.masses * np.exp(logs), ratio.lost_with, rounding)
    return Atoms(-logs[::-1], ratio.masses[::-1], ratio.lost, rounding)


def objective_tails(event: ObjectiveEvent, tail: float) -> Tails:
    """The bound log_volume + μ |Z| + μ²/2 on the loss, Z ~ N(0, 1)."""
    from scipy.special import ndtr, ndtri

    mu = 1.0 / event.noise_multiplier
    least = event.log_volume + mu * mu / 2

    def of(losses: Vector) -> tuple[Vector, Vector]:
        return 2 * ndtr(-np.maximum(losses - least, 0.0) / mu), np.zeros_like(losses)

    return Tails(of, least, least - mu * float(ndtri(tail / 2)))


def _repeats(n_examples: int, draws: int, tail: float) -> tuple[Vector, Vector, float]:
    """How often `draws` uniform draws hit one row: counts ≥ 1, probabilities, the tail left out.

    Binomial probabilities fall by p_{k+1}/p_k = (draws - k)/((k + 1)(n - 1)), at most 1/(k + 1)
    as draws ≤ n: what follows p_k is at most p_{k+1} (1 + 1/2 + 1/4 + ...) = 2 p_{k+1}.
    """
    missed = math.exp((draws - 1) * math.log1p(-1 / n_examples)) if draws > 1 else 1.0
    weights: list[float] = []
    following = draws / n_examples * missed
    while following > 0 and (not weights or 2 * following > tail):
        weights.append(following)
        count = len(weights)
        following *= (draws - count) / ((count + 1) * (n_examples - 1)) if draws > count else 0.0
    return np.arange(1.0, len(weights) + 1), np.array(weights), 2 * following
