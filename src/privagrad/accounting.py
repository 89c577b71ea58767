"""How much privacy a run costs: plans made before it, reports that travel with its result.

Every release is a sum of vectors of norm at most 1 plus Gaussian noise, over all rows or over a
sample of them: a `GaussianEvent`. Privacy loss distributions (PLD) of the events, taken from
dp-accounting, are composed; all discretisation errs on the side of a larger epsilon.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from privagrad import _validate
from privagrad._validate import Vector
from privagrad.sampling import SAMPLINGS, Sampling

if TYPE_CHECKING:
    from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

Relation = Literal["add-or-remove-one", "replace-one"]
ACCOUNTANT = "PLD (dp-accounting)"

_LEAST_POINTS, _COARSE_POINTS, _FINE_POINTS = 2 * 10**4, 10**5, 10**6
_COARSE_PER_DEVIATION, _FINE_PER_DEVIATION = 4, 20
_TAIL = 1e-20
_SAFE_SIDE = 5e-4
_MEANINGLESS = 1e6


@dataclass(frozen=True)
class GaussianEvent:
    """`count` releases of a sum of vectors of norm ≤ 1 plus N(0, noise_multiplier² I).

    Attributes
    ----------
    noise_multiplier : float
        The noise's standard deviation over the bound on one example's vector; under replace-one
        the sensitivity is twice that bound, and the accountant counts it so.
    count : int
    sampling : {"poisson", "with_replacement", "without_replacement"} or None
        How each release draws its rows; None: all rows.
    n_examples, batch_size : int
        Public; needed where rows are sampled. `batch_size` is the expected one.
    purpose : str
        For people: "gradients", "moments", ...
    """

    noise_multiplier: float
    count: int = 1
    sampling: Sampling | None = None
    n_examples: int = 1
    batch_size: int = 1
    purpose: str = "query"

    def __post_init__(self) -> None:
        # dp-accounting under-accounts integer noise multipliers: always a float.
        noise = _validate.positive("noise_multiplier", self.noise_multiplier)
        object.__setattr__(self, "noise_multiplier", noise)
        _validate.whole("count", self.count)
        _validate.whole("n_examples", self.n_examples)
        _validate.whole("batch_size", self.batch_size)
        if self.sampling is not None:
            _validate.choice("sampling", self.sampling, SAMPLINGS)
        if self.batch_size > self.n_examples:
            raise ValueError(
                f"Expected batch_size <= n_examples, found batch_size={self.batch_size} and "
                f"n_examples={self.n_examples}."
            )

    @property
    def relation(self) -> Relation | None:
        """The neighbouring relation its sampling is accounted under; None: either."""
        return None if self.sampling is None else relation_of(self.sampling)

    @property
    def rate(self) -> float:
        """The probability that one given row is in a given batch."""
        if self.sampling is None:
            return 1.0
        if self.sampling == "with_replacement" and self.n_examples > 1:
            return -math.expm1(self.batch_size * math.log1p(-1 / self.n_examples))
        return self.batch_size / self.n_examples


def relation_of(sampling: Sampling) -> Relation:
    """Add-or-remove-one for Poisson samples, replace-one for samples of fixed size."""
    return "add-or-remove-one" if sampling == "poisson" else "replace-one"


@dataclass(frozen=True)
class PrivacyReport:
    """What a result really cost. `seeded` True means: someone can redraw the noise, not private."""

    epsilon: float
    delta: float
    relation: Relation
    sampling: Sampling
    accountant: str
    events: tuple[GaussianEvent, ...]
    seeded: bool

    def __str__(self) -> str:
        if not self.events:
            return "not private (epsilon = inf)"
        parts = ", ".join(
            f"{e.count} x {e.purpose} at noise multiplier {e.noise_multiplier:.4g}"
            for e in self.events
        )
        text = (
            f"({self.epsilon:.4g}, {self.delta:.2g})-differential privacy, {self.relation}, "
            f"{self.sampling} sampling, {self.accountant}: {parts}"
        )
        return f"NOT PRIVATE (seeded noise); would be {text}" if self.seeded else text


@dataclass(frozen=True)
class PrivacyPlan:
    """Releases that will be made, in one neighbouring relation; the last event is the training.

    Guarantees
    ----------
    ``epsilon(delta)`` is an upper bound for the composition of all events, adaptively chosen or
    not. ``calibrate`` ends on the safe side: ``plan.epsilon(delta) <= epsilon``.
    """

    events: tuple[GaussianEvent, ...]

    def __post_init__(self) -> None:
        relations = {event.relation for event in self.events} - {None}
        if len(relations) > 1:
            raise ValueError(
                "Expected all events of a plan under one neighbouring relation, found "
                f"{sorted(str(r) for r in relations)}: use one kind of sampling throughout."
            )

    @classmethod
    def calibrate(
        cls,
        epsilon: float,
        delta: float,
        n_examples: int,
        batch_size: int,
        steps: int,
        sampling: Sampling = "poisson",
        also: Iterable[GaussianEvent] = (),
    ) -> PrivacyPlan:
        """The least noise for `steps` gradients that keeps everything within (epsilon, delta).

        Parameters
        ----------
        also : events
            Further releases of fixed cost paid from the same budget (a moment query, a tuning
            run), composed with the gradients.
        """
        if _validate.positive("epsilon", epsilon) > _MEANINGLESS:
            raise ValueError(
                f"Expected epsilon <= {_MEANINGLESS:g}, found {epsilon!r}: such a budget protects "
                "nobody. For no privacy minimise with epsilon=float('inf')."
            )
        _validate.whole("n_examples", n_examples)
        training = GaussianEvent(
            1.0,
            _validate.whole("steps", steps),
            sampling,
            n_examples,
            _validate.whole("batch_size", batch_size),
            "gradients",
        )
        delta = _validate.delta_of(delta, n_examples)
        return cls(_calibrated(tuple(also), training, float(epsilon), delta))

    @property
    def noise_multiplier(self) -> float:
        """Of the training: noise over the bound on one example's gradient."""
        return self.events[-1].noise_multiplier

    @property
    def relation(self) -> Relation:
        return next((e.relation for e in self.events if e.relation), "add-or-remove-one")

    def epsilon(self, delta: float) -> float:
        """The composition of all events at `delta`."""
        return _epsilon(self.events, self.relation, _validate.delta_of(delta), fine=True)

    def delta(self, epsilon: float) -> float:
        """The composition of all events at `epsilon`."""
        total = _compose(self.events, self.relation, fine=True)
        return float(total.get_delta_for_epsilon(float(epsilon)))

    def stopped_after(self, steps: int) -> PrivacyPlan:
        """The plan of a training that ended early, after `steps` gradients."""
        kept = (replace(self.events[-1], count=steps),) if steps else ()
        return PrivacyPlan(self.events[:-1] + kept)


@lru_cache(maxsize=1024)
def _epsilon(
    events: tuple[GaussianEvent, ...], relation: Relation, delta: float, fine: bool
) -> float:
    if not events:
        return 0.0
    return float(_compose(events, relation, fine).get_epsilon_for_delta(delta))


@lru_cache(maxsize=256)
def _calibrated(
    others: tuple[GaussianEvent, ...], training: GaussianEvent, epsilon: float, delta: float
) -> tuple[GaussianEvent, ...]:
    from scipy.optimize import brentq

    relation = PrivacyPlan((*others, training)).relation
    spent = _epsilon(others, relation, delta, fine=True)
    if spent >= epsilon:
        raise ValueError(
            "Expected a budget above what the other events already cost, found "
            f"epsilon={epsilon:g} with {spent:.4g} spent on "
            f"{', '.join(e.purpose for e in others)}: raise epsilon, or "
            "give those events more noise."
        )

    def events_at(log_noise: float) -> tuple[GaussianEvent, ...]:
        return (*others, replace(training, noise_multiplier=math.exp(log_noise)))

    def excess(log_noise: float, fine: bool) -> float:
        return _epsilon(events_at(log_noise), relation, delta, fine) - epsilon

    high = 0.0
    while excess(high, False) > 0:
        high += 1.0
        if high > 40:
            raise ValueError(
                f"No noise keeps {training.count} steps within epsilon={epsilon:g} at "
                f"delta={delta:g}: raise epsilon or delta, or take fewer steps."
            )
    low = high - 1.0
    while excess(low, False) <= 0:
        high, low = low, low - 0.5
    # The finer grid lowers epsilon, so the coarse root all but bounds the fine one from above.
    high = brentq(excess, low, high, args=(False,), xtol=2e-3) + 2e-3
    while excess(high, True) > 0:
        high += 0.01
    low = high - 0.02
    while excess(low, True) <= 0:
        high, low = low, low - 0.05
    safe = float(brentq(excess, low, high, args=(True,), xtol=_SAFE_SIDE))
    while excess(safe, True) > 0:
        safe += _SAFE_SIDE
    return events_at(safe)


def _compose(
    events: tuple[GaussianEvent, ...], relation: Relation, fine: bool
) -> PrivacyLossDistribution:
    interval = _interval(events, relation, fine)
    total: Any = None
    for event in events:
        one = _loss_distribution(event, relation, interval)
        many = one.self_compose(event.count) if event.count > 1 else one
        total = many if total is None else total.compose(many, tail_mass_truncation=1e-15)
    return total


def _interval(events: tuple[GaussianEvent, ...], relation: Relation, fine: bool) -> float:
    """Discretisation whose own variance is a small part of the privacy loss's variance."""
    sensitivity = 1.0 if relation == "add-or-remove-one" else 2.0
    variance = reach = 0.0
    for event in events:
        mu = sensitivity / event.noise_multiplier
        variance += event.count * event.rate**2 * math.expm1(min(mu * mu, 50.0))
        reach = max(reach, mu * mu + 20 * mu)
    deviation = math.sqrt(variance / sum(event.count for event in events))
    per_deviation = _FINE_PER_DEVIATION if fine else _COARSE_PER_DEVIATION
    points = _FINE_POINTS if fine else _COARSE_POINTS
    coarsest = max(1e-2, reach / _LEAST_POINTS)
    return max(min(deviation / per_deviation, coarsest), reach / points)


def _loss_distribution(
    event: GaussianEvent, relation: Relation, interval: float
) -> PrivacyLossDistribution:
    from dp_accounting.pld import pld_pmf
    from dp_accounting.pld import privacy_loss_distribution as pld

    if event.sampling in (None, "poisson"):
        return pld.from_gaussian_mechanism(
            event.noise_multiplier,
            sensitivity=1.0 if relation == "add-or-remove-one" else 2.0,
            sampling_prob=event.rate,
            value_discretization_interval=interval,
        )
    upper = 1
    while fixed_size_profile(event, np.full(1, upper * interval))[0] > 10 * _TAIL:
        upper *= 2
    # No outcome is less likely than 1 - rate times as likely under the neighbour.
    lower = -upper
    if event.rate < 1:
        lower = max(lower, math.floor(math.log1p(-event.rate) / interval) - 1)
    deltas = fixed_size_profile(event, interval * np.arange(lower, upper + 1, dtype=np.float64))
    pmf = pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(interval, lower, upper, deltas)
    return pld.PrivacyLossDistribution(pmf)


def fixed_size_profile(event: GaussianEvent, epsilons: Vector) -> Vector:
    """δ(ε) of one release over a sample of fixed size, under replace-one.

    Let two data sets differ in row i, let K be how often the sample holds row i, p_k = P(K = k),
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
    The pair of data sets is exchangeable, so for ε' < 0 the bound follows from
    H_α(P‖Q) = 1 - α + α H_{1/α}(Q‖P). The two branches form one convex function of e^{ε'}, hence
    the profile of a dominating pair, whose PLD may be composed.
    """
    from scipy.special import log_ndtr, ndtr

    log_alpha = np.abs(epsilons)
    if event.sampling == "without_replacement":
        counts, weights, tail = np.array([1.0]), np.array([event.rate]), 0.0
    else:
        counts, weights, tail = _repeats(event.n_examples, event.batch_size)
    inner = np.log1p(np.expm1(np.minimum(log_alpha, 700.0)) / event.rate)
    inner = np.where(log_alpha > 700.0, log_alpha - math.log(event.rate), inner)
    deltas = np.full_like(log_alpha, tail)
    for count, weight in zip(counts, weights, strict=True):
        mu = 2.0 * count / event.noise_multiplier
        upper = ndtr(mu / 2 - inner / mu)
        lower = np.exp(np.minimum(inner + log_ndtr(-mu / 2 - inner / mu), 0.0))
        deltas += weight * np.maximum(upper - lower, 0.0)
    negative = -np.expm1(-log_alpha) + np.exp(-log_alpha) * deltas
    return np.minimum(np.where(epsilons < 0, negative, deltas), 1.0)


def _repeats(n_examples: int, draws: int) -> tuple[Vector, Vector, float]:
    """How often `draws` uniform draws hit one row: counts ≥ 1, probabilities, the tail left out."""
    from scipy.stats import binom

    law = binom(draws, 1 / n_examples)
    most = 1
    while most < draws and law.sf(most) > _TAIL:
        most += 1
    counts = np.arange(1.0, most + 1)
    return counts, law.pmf(counts), float(law.sf(most))
