"""A privacy filter: what runs cost together when later ones are chosen by earlier results."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy.optimize import bisect
from scipy.special import log_ndtr, ndtr
from scipy.stats import norm

from privagrad._internal.validate import Vector
from privagrad.privacy.accounting import PrivacyPlan
from privagrad.privacy.events import Event, GaussianEvent, ObjectiveEvent, SelectEvent
from privagrad.privacy.filters import epsilon_of_runs
from privagrad.privacy.ledger import BudgetError, Ledger

EPSILON, DELTA = 1.0, 1e-6
FIRST = GaussianEvent(7.0)


def flat(noise: float) -> Event:
    return GaussianEvent(noise)


def steep(noise: float) -> Event:
    """One look at a small sample with little noise: its rare losses are large."""
    return GaussianEvent(noise, 1, "poisson", 1_000, 1)


def training(noise: float) -> GaussianEvent:
    return GaussianEvent(noise, 50, "poisson", 10_000, 100)


def replaced(noise: float) -> Event:
    return GaussianEvent(noise, 1, "without_replacement", 100_000, 1)


def strongest(admitted: Callable[[Event], bool], family: Callable[[float], Event]) -> Event:
    """The least noise that still fits."""
    low, high = math.log(0.4), math.log(12.0)
    for _ in range(8):
        middle = (low + high) / 2
        if admitted(family(math.exp(middle))):
            high = middle
        else:
            low = middle
    return family(math.exp(high))


def gaussian(mu: float, epsilons: Vector) -> Vector:
    second = np.exp(epsilons + log_ndtr(-mu / 2 - epsilons / mu))
    return np.asarray(ndtr(mu / 2 - epsilons / mu) - second)


def adaptive_delta(mu: float, choices: list[Event]) -> float:
    """δ(EPSILON) of a Gaussian release of `mu`, then the choice that hurts most at its result.

    The first loss L is N(μ²/2, μ²), and δ = E max_choice δ_choice(EPSILON - L).
    """
    losses = np.linspace(mu * mu / 2 - 9 * mu, mu * mu / 2 + 9 * mu, 1801)
    weights = norm.pdf(losses, mu * mu / 2, mu)
    weights /= weights.sum()
    left = (EPSILON - losses)[::-1]
    profiles = [PrivacyPlan((choice,)).deltas(left) for choice in choices]
    return float(weights[::-1] @ np.max(profiles, axis=0))


@pytest.mark.parametrize(
    "families",
    [(flat, steep), (flat, training), (flat, training, steep)],
    ids=["flat or steep", "flat or training", "any of three"],
)
def test_runs_chosen_by_looking_at_the_first_stay_within_the_total(
    tmp_path: Path, families: tuple[Callable[[float], Event], ...]
) -> None:
    """Each choice alone fits; so must the choice among them after the first result is known."""
    ledger = Ledger(tmp_path / "ledger.db")
    ledger.create("people", EPSILON, DELTA)
    ledger.finish(ledger.reserve("people", [FIRST], "a query"), [FIRST])
    account = ledger.account("people")

    def admitted(event: Event) -> bool:
        return account.spent_with([event]) <= EPSILON

    choices = [strongest(admitted, family) for family in families]
    mu = 1 / FIRST.noise_multiplier
    assert adaptive_delta(mu, choices) <= DELTA * 1.001  # of the discretisation of L
    # The test sees what goes wrong without a filter: each choice composed with the first run.
    unfiltered = [
        strongest(lambda e: PrivacyPlan((FIRST, e)).epsilon(DELTA) <= EPSILON, family)
        for family in families
    ]
    if steep in families:
        assert adaptive_delta(mu, unfiltered) > 1.5 * DELTA


def test_gaussian_runs_cost_what_they_cost_together() -> None:
    """For Gaussian releases over all rows the filter is exact, but for its part of delta."""
    runs = [(GaussianEvent(7.0),), (GaussianEvent(9.0, 2),), (GaussianEvent(30.0),)]
    whole = tuple(event for run in runs for event in run)
    assert epsilon_of_runs(runs, EPSILON, DELTA) == pytest.approx(
        PrivacyPlan(whole).epsilon(0.8 * DELTA), rel=2e-3
    )
    assert epsilon_of_runs(runs[:1], EPSILON, DELTA) == PrivacyPlan(whole[:1]).epsilon(DELTA)
    assert epsilon_of_runs([], EPSILON, DELTA) == 0.0


@pytest.mark.parametrize(("batch_size", "more"), [(300, 0.15), (3000, 0.02)])
def test_usual_trainings_cost_little_more_than_if_fixed_beforehand(
    batch_size: int, more: float
) -> None:
    one = PrivacyPlan.calibrate(1.0, DELTA, 30_000, batch_size, 300).events
    fixed = PrivacyPlan(one * 3).epsilon(DELTA)
    assert fixed < epsilon_of_runs([one] * 3, 3.0, DELTA) < (1 + more) * fixed


EVENTS: list[Event] = [
    flat(8.0),
    training(2.0),
    steep(0.6),
    replaced(3.0),
    replace(training(2.0), sampling="with_replacement"),
    GaussianEvent(20.0, leak=0.02 * DELTA),
    ObjectiveEvent(9.0, 0.01),
    SelectEvent((GaussianEvent(30.0),), 3.0),
]


@pytest.mark.parametrize("event", EVENTS, ids=str)
def test_a_later_run_costs_at_least_its_own_and_composes_with_the_first(event: Event) -> None:
    """Never below the composition that holds for settings fixed beforehand."""
    first = GaussianEvent(10.0)
    bound = epsilon_of_runs([(first,), (event,)], 3.0, DELTA)
    assert bound >= PrivacyPlan((event,)).epsilon(DELTA)
    if not isinstance(event, SelectEvent):  # composed by another accountant, whose bound is looser
        assert bound >= PrivacyPlan((first, event)).epsilon(DELTA)
    assert math.isfinite(bound)


def test_replace_one_doubles_what_queries_move() -> None:
    query, sampled = GaussianEvent(20.0), replaced(3.0)
    both = epsilon_of_runs([(sampled,), (query,)], EPSILON, DELTA)
    assert both >= PrivacyPlan((sampled, query)).epsilon(DELTA)
    alone = replace(query, under="replace-one")
    assert both >= PrivacyPlan((alone,)).epsilon(DELTA) > PrivacyPlan((query,)).epsilon(DELTA)


def test_the_order_of_later_runs_does_not_matter() -> None:
    a, b, c = (flat(8.0),), (training(2.0),), (GaussianEvent(20.0, leak=1e-9), training(3.0))
    assert epsilon_of_runs([a, b, c], EPSILON, DELTA) == pytest.approx(
        epsilon_of_runs([a, c, b], EPSILON, DELTA), rel=1e-12
    )


def test_leaks_of_later_runs_have_their_own_part_of_delta(tmp_path: Path) -> None:
    """Whoever could pay with either delta or epsilon could choose by the first result."""
    ledger = Ledger(tmp_path / "ledger.db")
    ledger.create("people", 10.0, DELTA)
    leaking = GaussianEvent(100.0, leak=0.06 * DELTA)
    for _ in range(4):  # the first, and three times 0.06 of 0.2
        ledger.finish(ledger.reserve("people", [leaking], "categories"), [leaking])
    with pytest.raises(BudgetError, match="part of delta"):
        ledger.reserve("people", [leaking], "categories")
    assert math.isfinite(ledger.account("people").spent)
    ledger.reserve("people", [replace(leaking, leak=0.0)], "no leak")


def test_ledgers_with_more_leaks_by_older_rules_still_say_what_was_spent() -> None:
    leaking = GaussianEvent(100.0, leak=0.1 * DELTA)
    spent = epsilon_of_runs([(leaking,)] * 5, EPSILON, DELTA)
    assert spent == pytest.approx(
        PrivacyPlan((replace(leaking, count=5),)).epsilon(DELTA), rel=1e-3
    )
    assert math.isfinite(spent)
    assert epsilon_of_runs([(leaking,)] * 5, EPSILON, DELTA, (leaking,)) == math.inf


def test_the_cover_is_above_the_profile_everywhere() -> None:
    """Tried against the exact profile of one sampled release, between and beyond the grid."""
    from privagrad.privacy.filters import _cover

    event = GaussianEvent(1.0, 1, "poisson", 100, 1)
    cover = _cover((event,), EPSILON, 1e-5)

    def exact(epsilon: float) -> float:
        # Without the row N(0, 1), with it (1 - q) N(0, 1) + q N(1, 1): densities cross at x.
        q = event.rate
        x = math.log((math.exp(epsilon) - 1 + q) / q) + 0.5
        return (1 - q) * norm.sf(x) + q * norm.sf(x - 1) - math.exp(epsilon) * norm.sf(x)

    for epsilon in np.linspace(0.0, 3.0, 997):
        covered = float(gaussian(cover.mu, np.array([epsilon]))[0])
        assert exact(float(epsilon)) <= cover.leak + (1 - cover.leak) * covered + 1e-15
    assert cover.mu == pytest.approx(
        bisect(lambda mu: _worst(mu, cover.leak, exact), 0.5 * cover.mu, cover.mu), rel=0.02
    )


def _worst(mu: float, leak: float, exact: Callable[[float], float]) -> float:
    """How far the profile rises above the cover; negative: nowhere."""
    grid = np.linspace(0.0, 3.0, 300)
    covers = leak + (1 - leak) * gaussian(mu, grid)
    return float(max(exact(float(e)) - c for e, c in zip(grid, covers, strict=True))) + 1e-16
