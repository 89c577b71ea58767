"""How much privacy a run costs: plans made before it, reports that travel with its result.

Every release is a sum of vectors of norm at most 1 plus Gaussian noise, over all rows or over a
sample of them: a `GaussianEvent`. Releases over all rows compose in closed form. Others compose as
privacy loss distributions (PLD); discretisation and rounding err on the side of a larger epsilon.
Selections are composed by dp-accounting's Rényi accountant.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import numpy as np

from privagrad._internal import validate
from privagrad._internal.markup import html_table
from privagrad._internal.validate import Vector
from privagrad.privacy.composition import gaussian_mu
from privagrad.privacy.events import (
    TRAINING,
    Event,
    GaussianEvent,
    Relation,
    Release,
    SelectEvent,
    Unit,
    events_table,
    training_event,
    unit_of,
)
from privagrad.privacy.noise import Noise
from privagrad.privacy.roots import Function, crossing
from privagrad.privacy.sampling import Batches, Sampling
from privagrad.privacy.totals import Total, sensitivity_of

ACCOUNTANT = "PLD"
RENYI_ACCOUNTANT = "RDP (dp-accounting)"

_SAFE_SIDE = 1e-4
"""By how much the logarithm of a calibrated noise multiplier may exceed what is needed."""

_NEAR = 1e-3
_HARDLY_ANY = 1e-2
_MEANINGLESS = 1e6
_LEAST_LOG_NOISE, _MOST_LOG_NOISE = math.log(1e-3), 40.0
_SMALLEST_DELTA = 1e-14
"""Below that, delta(epsilon) is only rough."""


def require_meaningful(epsilon: float) -> None:
    """Refuse an epsilon that protects nobody."""
    if validate.positive("epsilon", epsilon) > _MEANINGLESS:
        raise ValueError(
            f"Expected epsilon <= {_MEANINGLESS:g}, found {epsilon!r}: such a budget protects "
            "nobody. For no privacy minimise with epsilon=float('inf')."
        )


@dataclass(frozen=True)
class PrivacyReport:
    """What a result really cost.

    Attributes
    ----------
    epsilon, delta : float
        The guarantee.
    relation : {"zero-out", "replace-one"}
        The neighbouring relation.
    sampling : {"poisson", "with_replacement", "without_replacement", "random_allocation"} or None
        How the training drew its rows; None: all rows at once.
    accountant : str
        How the releases were composed.
    events : tuple of events
        All releases.
    seeded : bool
        Whether someone could draw the same noise again: such a result is NOT private.
    verified : bool
        False where the user vouches that every example's gradient depends on that example alone.
    noise : {"gaussian", "discrete"}
        Whether the noise is a rounded Gaussian or an exact discrete Gaussian; both cost the same.
    """

    epsilon: float
    delta: float
    relation: Relation
    sampling: Sampling | None
    accountant: str
    events: tuple[Event, ...]
    seeded: bool
    verified: bool = True
    noise: Noise = "gaussian"

    @property
    def unit(self) -> Unit:
        """Whose contribution is protected: that of each row, or of all rows of each user."""
        return unit_of(self.events) or "row"

    def __str__(self) -> str:
        if not self.events:
            return "not private (epsilon = inf)"
        parts = ", ".join(str(event) for event in self.events)
        text = (
            f"({self.epsilon:.4g}, {self.delta:.2g})-differential privacy, {self.relation}, "
            f"{self.sampling or 'no'} sampling, {self.accountant}: {parts}"
        )
        if self.unit == "user":
            text += "; unit: user"
        if self.noise == "discrete":
            text += "; discrete Gaussian noise"
        if not self.verified:
            text += "; not verified: the user vouches that examples are kept apart"
        return f"NOT PRIVATE (seeded noise); would be {text}" if self.seeded else text

    def _repr_html_(self) -> str:
        if not self.events:
            return html_table("Not private (epsilon = inf)", (), ())
        title = f"({self.epsilon:.4g}, {self.delta:.2g})-differential privacy"
        facts = [
            ("neighbouring relation", self.relation),
            ("unit", self.unit),
            ("sampling", self.sampling or "all rows at once"),
            ("accountant", self.accountant),
            ("noise", self.noise),
        ]
        if not self.verified:
            facts.append(("not verified", "the user vouches that examples are kept apart"))
        title = f"NOT PRIVATE (seeded noise); would be {title}" if self.seeded else title
        return html_table(title, (), facts, left=2) + events_table("Releases", self.events)


@dataclass(frozen=True)
class PrivacyPlan:
    """Releases that will be made, in one neighbouring relation; ``plan[purpose]`` is one of them.

    Parameters
    ----------
    events : tuple of events
        What will be released.
    training : str
        The purpose of the event whose noise was calibrated.
    unprotected : bool
        Whether something is released without noise besides: epsilon is then infinite.

    Guarantees
    ----------
    ``epsilon(delta)`` is an upper bound for the composition of all events of this plan. What is
    computed in each release may depend on the results of earlier ones; the events (noise,
    sampling, counts) are fixed beforehand. A run that stops early because of its results costs its
    whole plan. Runs that are chosen by earlier results need a filter
    (`privagrad.privacy.filters`).
    ``calibrate`` ends on the safe side: ``plan.epsilon(delta) <= epsilon``.
    """

    events: tuple[Event, ...]
    training: str = TRAINING
    unprotected: bool = False

    def __post_init__(self) -> None:
        relations = {event.relation for event in self.events} - {None}
        if len(relations) > 1:
            raise ValueError(
                "Expected all events of a plan under one neighbouring relation, found "
                f"{sorted(str(r) for r in relations)}: use one kind of sampling throughout."
            )
        unit_of(self.events)

    @classmethod
    def calibrate(
        cls,
        epsilon: float,
        delta: float,
        n_examples: int,
        batch_size: int,
        steps: int,
        sampling: Sampling = "poisson",
        other_events: Iterable[Event] = (),
    ) -> PrivacyPlan:
        """The least noise for `steps` gradients that keeps everything within (epsilon, delta).

        Parameters
        ----------
        epsilon, delta : float
            The budget.
        n_examples, batch_size, steps : int
            The number of rows, the expected number of rows in a step, the number of steps.
        sampling : {"poisson", "with_replacement", "without_replacement", "random_allocation"}
            How each step draws its rows. Random allocation is charged by whole epochs of
            round(n_examples/batch_size) steps: an epoch that is begun counts.
        other_events : iterable of events
            Further releases of fixed cost paid from the same budget (a moment query, a tuning
            run), composed with the gradients.
        """
        validate.integer("n_examples", n_examples)
        validate.integer("steps", steps)
        validate.integer("batch_size", batch_size)
        training = training_event(Batches(n_examples, batch_size, steps, sampling))
        delta = validate.delta_of(delta, n_examples)
        return cls.calibrate_event(training, epsilon, delta, other_events)

    @classmethod
    def calibrate_event(
        cls, event: Release, epsilon: float, delta: float, other_events: Iterable[Event] = ()
    ) -> PrivacyPlan:
        """`calibrate` for any event: the least noise multiplier that keeps within the budget."""
        require_meaningful(epsilon)
        delta = validate.delta_of(delta)
        earlier = f"earlier {event.purpose}"
        others = tuple(
            replace(other, purpose=earlier) if other.purpose == event.purpose else other
            for other in other_events
        )
        return cls(_calibrated(others, event, float(epsilon), delta), event.purpose)

    def _repr_html_(self) -> str:
        title = f"Planned releases, {self.relation}, {self.accountant}"
        if self.unprotected:
            title += "; something is released without noise besides (epsilon = inf)"
        return events_table(title, self.events)

    def __getitem__(self, purpose: str) -> Release:
        """The one event with this purpose."""
        found = [event for event in self.events if event.purpose == purpose]
        if len(found) != 1 or isinstance(found[0], SelectEvent):
            planned = ", ".join(str(event.purpose) for event in self.events) or "none"
            raise KeyError(
                f"Expected one release for {purpose!r} in the plan, found {len(found)} (planned: "
                f"{planned})."
            )
        return found[0]

    def __contains__(self, purpose: str) -> bool:
        return any(event.purpose == purpose for event in self.events)

    @property
    def noise_multiplier(self) -> float:
        """Of the training: noise over the bound on one example's gradient; 0 without privacy."""
        if self.unprotected:
            return 0.0
        if self.training not in self:
            raise ValueError(
                f"Expected a plan with one training, {self.training!r}, found "
                f"{', '.join(event.purpose for event in self.events) or 'nothing'}."
            )
        return self[self.training].noise_multiplier

    @property
    def sampling(self) -> Sampling | None:
        """How the training draws its rows; None: all rows at once."""
        drawn = [event.sampling for event in self.events if event.purpose == self.training]
        return drawn[-1] if drawn else None

    @property
    def relation(self) -> Relation:
        return next((e.relation for e in self.events if e.relation), "zero-out")

    @property
    def unit(self) -> Unit:
        """Whose contribution is protected: that of each row, or of all rows of each user."""
        return unit_of(self.events) or "row"

    @property
    def accountant(self) -> str:
        """Rényi's where something is selected, privacy loss distributions otherwise."""
        if self.unprotected and not self.events:
            return "none"
        return RENYI_ACCOUNTANT if _releases(self.events) is None else ACCOUNTANT

    def epsilon(self, delta: float) -> float:
        """The composition of all events at `delta`."""
        if self.unprotected:
            return math.inf
        return _epsilon(self.events, self.relation, validate.delta_of(delta), fine=True)

    def delta(self, epsilon: float) -> float:
        """The composition of all events at `epsilon`."""
        return float(self.deltas(np.array([float(epsilon)]))[0])

    def deltas(self, epsilons: Vector) -> Vector:
        """The composition of all events at several `epsilons` in ascending order."""
        if self.unprotected:
            return np.ones(len(epsilons))
        releases = _releases(self.events)
        if releases is None:
            account = _renyi(self.events)
            return np.array([float(account.get_delta(float(epsilon))) for epsilon in epsilons])
        if not releases:
            return np.zeros(len(epsilons))
        total = Total.of(releases, self.relation, _SMALLEST_DELTA, fine=True)
        return total.deltas(np.asarray(epsilons, dtype=np.float64))

    def report(
        self, delta: float, *, seeded: bool, verified: bool = True, noise: Noise = "gaussian"
    ) -> PrivacyReport:
        """What a run with this plan costs at `delta`, also where it stopped before its end.

        The time of such a stop depends on the releases.
        """
        return PrivacyReport(
            self.epsilon(delta),
            delta,
            self.relation,
            self.sampling,
            self.accountant,
            self.events,
            seeded,
            verified,
            noise,
        )


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
    return Total.of(releases, relation, delta, fine).epsilon(delta)


@lru_cache(maxsize=256)
def _calibrated(
    others: tuple[Event, ...], training: Release, epsilon: float, delta: float
) -> tuple[Event, ...]:
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
        """log(ε / asked), nearly linear in the logarithm of the noise."""
        found = _epsilon(events_at(log_noise), relation, delta, fine)
        return math.log(max(found / epsilon, _HARDLY_ANY)) if found < math.inf else math.inf

    place = _estimate(others, training, epsilon, delta)
    for fine, tolerance in ((False, _NEAR), (True, _SAFE_SIDE)):
        search = partial(excess, fine=fine)
        low, high = _bracket(search, place)
        if low == high == _MOST_LOG_NOISE:
            raise ValueError(
                f"No noise keeps {training.count} steps within epsilon={epsilon:g} at "
                f"delta={delta:g}: raise epsilon or delta, or take fewer steps."
            )
        # Where delta alone would pay for rows so rarely seen, both are the least noise.
        place = crossing(search, low, high, tolerance, tolerance / 2) if low < high else low
    return events_at(place)


def _bracket(excess: Function, guess: float) -> tuple[float, float]:
    """(low, high) with excess(low) > 0 ≥ excess(high), where excess falls about as fast as -x.

    Both are the end of the range of noise where it never changes its sign.
    """
    place = min(max(guess, _LEAST_LOG_NOISE), _MOST_LOG_NOISE)
    found = excess(place)
    end = _MOST_LOG_NOISE if found > 0 else _LEAST_LOG_NOISE
    step = min(max(2 * abs(found), _SAFE_SIDE), 1.0) * (1 if found > 0 else -1)
    while place != end:
        last, place = place, min(max(place + step, _LEAST_LOG_NOISE), _MOST_LOG_NOISE)
        if (excess(place) > 0) != (found > 0):
            return min(last, place), max(last, place)
        step *= 2
    return end, end


def _estimate(others: tuple[Event, ...], training: Release, epsilon: float, delta: float) -> float:
    """About the logarithm of the noise that calibration ends with, for the search to start from.

    Many releases are about one Gaussian, whose μ² is the sum of theirs: rate² (e^{s²/z²} - 1) for
    sampled rows (Bu, Dong, Long and Su 2020), s²/z² for all rows.
    """
    sensitivity = sensitivity_of(training.relation)
    square = gaussian_mu(epsilon, delta) ** 2
    spent = 0.0
    for other in _releases(others) or ():
        each = (sensitivity / other.noise_multiplier) ** 2
        if other.rate < 1:
            each = other.rate**2 * math.expm1(min(each, 50.0))
        spent += other.count / getattr(other, "bands", 1) * each
    left = max(square - spent, square / 10) / training.count * getattr(training, "bands", 1)
    if training.rate < 1:
        left = math.log1p(left / training.rate**2)
    return math.log(sensitivity) - math.log(left) / 2


def _renyi(events: tuple[Event, ...]) -> Any:
    """The Rényi accountant after all events, under zero-out."""
    from dp_accounting import NeighboringRelation, dp_event
    from dp_accounting.rdp import RdpAccountant

    def translated(event: Event) -> Any:
        if isinstance(event, SelectEvent):
            inner = dp_event.ComposedDpEvent([translated(e) for e in event.events])
            one = dp_event.RepeatAndSelectDpEvent(inner, event.mean, 1.0)
            return dp_event.SelfComposedDpEvent(one, event.count)
        plain = isinstance(event, GaussianEvent) and event.leak == 0
        if not plain or event.sampling not in (None, "poisson") or event.relation == "replace-one":
            raise ValueError(
                "Expected Gaussian releases over all rows or Poisson samples, under zero-out, "
                f"beside a selection; found {event}."
            )
        one = dp_event.GaussianDpEvent(event.noise_multiplier)
        if event.sampling == "poisson":
            one = dp_event.PoissonSampledDpEvent(event.rate, one)
        return dp_event.SelfComposedDpEvent(one, event.count)

    accountant = RdpAccountant(neighboring_relation=NeighboringRelation.REPLACE_SPECIAL)
    for event in events:
        accountant.compose(translated(event))
    return accountant
