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
from typing import TYPE_CHECKING, Any

import numpy as np

from privagrad import _validate
from privagrad._validate import Vector
from privagrad.events import (
    TAIL,
    Event,
    GaussianEvent,
    ObjectiveEvent,
    Relation,
    Release,
    SelectEvent,
    fixed_size_profile,
    objective_losses,
)
from privagrad.sampling import Sampling

if TYPE_CHECKING:
    from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

ACCOUNTANT = "PLD (dp-accounting)"
RENYI_ACCOUNTANT = "RDP (dp-accounting)"

_LEAST_POINTS, _COARSE_POINTS, _FINE_POINTS = 2 * 10**4, 10**5, 10**6
_COARSE_PER_DEVIATION, _FINE_PER_DEVIATION = 4, 20
_SAFE_SIDE = 5e-4
_MEANINGLESS = 1e6
_LEAST_LOG_NOISE = math.log(1e-3)


@dataclass(frozen=True)
class PrivacyReport:
    """What a result really cost. `seeded` True means: someone can redraw the noise, not private.

    `sampling` is how the training drew its rows; None: all rows at once.
    """

    epsilon: float
    delta: float
    relation: Relation
    sampling: Sampling | None
    accountant: str
    events: tuple[Event, ...]
    seeded: bool

    def __str__(self) -> str:
        if not self.events:
            return "not private (epsilon = inf)"
        parts = ", ".join(str(event) for event in self.events)
        text = (
            f"({self.epsilon:.4g}, {self.delta:.2g})-differential privacy, {self.relation}, "
            f"{self.sampling or 'no'} sampling, {self.accountant}: {parts}"
        )
        return f"NOT PRIVATE (seeded noise); would be {text}" if self.seeded else text


@dataclass(frozen=True)
class PrivacyPlan:
    """Releases that will be made, in one neighbouring relation; the last event is the training.

    Guarantees
    ----------
    ``epsilon(delta)`` is an upper bound for the composition of all events. What is asked in each
    release may depend on the results of earlier ones; the events (noise, sampling, counts) may not:
    see `privagrad.filters` for runs that are chosen by earlier results. ``calibrate`` ends on the
    safe side: ``plan.epsilon(delta) <= epsilon``.
    """

    events: tuple[Event, ...]

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
        also: Iterable[Event] = (),
    ) -> PrivacyPlan:
        """The least noise for `steps` gradients that keeps everything within (epsilon, delta).

        Parameters
        ----------
        also : events
            Further releases of fixed cost paid from the same budget (a moment query, a tuning
            run), composed with the gradients.
        """
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
        return cls.calibrate_event(training, epsilon, delta, also)

    @classmethod
    def calibrate_event(
        cls, event: Release, epsilon: float, delta: float, also: Iterable[Event] = ()
    ) -> PrivacyPlan:
        """`calibrate` for any event: the least noise multiplier that keeps within the budget."""
        if _validate.positive("epsilon", epsilon) > _MEANINGLESS:
            raise ValueError(
                f"Expected epsilon <= {_MEANINGLESS:g}, found {epsilon!r}: such a budget protects "
                "nobody. For no privacy minimise with epsilon=float('inf')."
            )
        delta = _validate.delta_of(delta)
        return cls(_calibrated(tuple(also), event, float(epsilon), delta))

    @property
    def noise_multiplier(self) -> float:
        """Of the training: noise over the bound on one example's gradient."""
        training = self.events[-1]
        if isinstance(training, SelectEvent):
            raise ValueError("Expected a plan that ends in a training, found a selection.")
        return training.noise_multiplier

    @property
    def relation(self) -> Relation:
        return next((e.relation for e in self.events if e.relation), "add-or-remove-one")

    @property
    def accountant(self) -> str:
        """Rényi's where something is selected, privacy loss distributions otherwise."""
        return RENYI_ACCOUNTANT if _releases(self.events) is None else ACCOUNTANT

    def epsilon(self, delta: float) -> float:
        """The composition of all events at `delta`."""
        return _epsilon(self.events, self.relation, _validate.delta_of(delta), fine=True)

    def delta(self, epsilon: float) -> float:
        """The composition of all events at `epsilon`."""
        return float(self.deltas(np.array([float(epsilon)]))[0])

    def deltas(self, epsilons: Vector) -> Vector:
        """The composition of all events at several `epsilons` in ascending order."""
        releases = _releases(self.events)
        if releases is None:
            account = _renyi(self.events)
            return np.array([float(account.get_delta(float(epsilon))) for epsilon in epsilons])
        total = _compose(releases, self.relation, fine=True)
        return np.asarray(total.get_delta_for_epsilon(epsilons.tolist()), dtype=np.float64)

    def stopped_after(self, steps: int) -> PrivacyPlan:
        """The plan of a training that ended early, after `steps` gradients."""
        kept = (replace(self.events[-1], count=steps),) if steps else ()
        return PrivacyPlan(self.events[:-1] + kept)


def _releases(events: tuple[Event, ...]) -> tuple[Release, ...] | None:
    """The events if all of them have privacy loss distributions."""
    releases = tuple(event for event in events if not isinstance(event, SelectEvent))
    return releases if len(releases) == len(events) else None


@lru_cache(maxsize=1024)
def _epsilon(events: tuple[Event, ...], relation: Relation, delta: float, fine: bool) -> float:
    if not events:
        return 0.0
    releases = _releases(events)
    if releases is None:
        return float(_renyi(events).get_epsilon(delta))
    return float(_compose(releases, relation, fine).get_epsilon_for_delta(delta))


@lru_cache(maxsize=256)
def _calibrated(
    others: tuple[Event, ...], training: Release, epsilon: float, delta: float
) -> tuple[Event, ...]:
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

    def events_at(log_noise: float) -> tuple[Event, ...]:
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
        if low < _LEAST_LOG_NOISE:
            # Rows so rarely seen that delta alone would pay for them: never without noise.
            return events_at(low)
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
    events: tuple[Release, ...], relation: Relation, fine: bool
) -> PrivacyLossDistribution:
    interval = _interval(events, relation, fine)
    total: Any = None
    for event in events:
        one = _loss_distribution(event, relation, interval)
        if isinstance(event, GaussianEvent) and event.leak:
            one = one.compose(_leak(event.leak, interval))
        many = one.self_compose(event.count) if event.count > 1 else one
        total = many if total is None else total.compose(many, tail_mass_truncation=1e-15)
    return total


def _renyi(events: tuple[Event, ...]) -> Any:
    """The Rényi accountant after all events, under add-or-remove-one."""
    from dp_accounting import dp_event
    from dp_accounting.rdp import RdpAccountant

    def translated(event: Event) -> Any:
        if isinstance(event, SelectEvent):
            inner = dp_event.ComposedDpEvent([translated(e) for e in event.events])
            return dp_event.RepeatAndSelectDpEvent(inner, event.mean, 1.0)
        plain = isinstance(event, GaussianEvent) and event.leak == 0
        if not plain or event.sampling not in (None, "poisson"):
            raise ValueError(
                f"Expected Gaussian releases over all rows or Poisson samples beside a selection, "
                f"found {event}."
            )
        one = dp_event.GaussianDpEvent(event.noise_multiplier)
        if event.sampling == "poisson":
            one = dp_event.PoissonSampledDpEvent(event.rate, one)
        return dp_event.SelfComposedDpEvent(one, event.count)

    accountant = RdpAccountant()
    for event in events:
        accountant.compose(translated(event))
    return accountant


def _interval(events: tuple[Release, ...], relation: Relation, fine: bool) -> float:
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


def _leak(probability: float, interval: float) -> PrivacyLossDistribution:
    """Nothing is shown, or with this probability everything."""
    from dp_accounting.pld import pld_pmf
    from dp_accounting.pld import privacy_loss_distribution as pld

    nothing = {0: 1 - probability}
    return pld.PrivacyLossDistribution(
        pld_pmf.create_pmf(nothing, interval, probability, pessimistic_estimate=True)
    )


def _loss_distribution(
    event: Release, relation: Relation, interval: float
) -> PrivacyLossDistribution:
    from dp_accounting.pld import pld_pmf
    from dp_accounting.pld import privacy_loss_distribution as pld

    if isinstance(event, ObjectiveEvent):
        first, masses, beyond = objective_losses(event, interval)
        losses = dict(enumerate(masses.tolist(), start=first))
        return pld.PrivacyLossDistribution(
            pld_pmf.create_pmf(losses, interval, beyond, pessimistic_estimate=True)
        )

    if event.sampling in (None, "poisson"):
        return pld.from_gaussian_mechanism(
            event.noise_multiplier,
            sensitivity=1.0 if relation == "add-or-remove-one" else 2.0,
            sampling_prob=event.rate,
            value_discretization_interval=interval,
        )
    upper = 1
    while fixed_size_profile(event, np.full(1, upper * interval))[0] > 10 * TAIL:
        upper *= 2
    # No outcome is less likely than 1 - rate times as likely under the neighbour.
    lower = -upper
    if event.rate < 1:
        lower = max(lower, math.floor(math.log1p(-event.rate) / interval) - 1)
    deltas = fixed_size_profile(event, interval * np.arange(lower, upper + 1, dtype=np.float64))
    pmf = pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(interval, lower, upper, deltas)
    return pld.PrivacyLossDistribution(pmf)
