"""The bound by the privacy curve: sound against exact laws, tighter than (ε, δ) for Gaussians."""

import math

import numpy as np
import pytest
from scipy import stats

from privagrad.audit import measure_run, measure_run_by_curve
from privagrad.audit.curves import lines_of, too_many
from privagrad.privacy.accounting import PrivacyPlan
from privagrad.privacy.events import GaussianEvent, SelectEvent
from tests.statistics import FALSE_ALARM

DELTA = 1e-5


def claim(epsilon: float) -> GaussianEvent:
    (event,) = PrivacyPlan.calibrate_event(GaussianEvent(1.0), epsilon, DELTA).events
    assert isinstance(event, GaussianEvent)
    return event


def run(mu: float, canaries: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Every canary in its own coordinate: what a training with Gaussian noise shows at most."""
    rng = np.random.default_rng(seed)
    included = rng.random(canaries) < 0.5
    return included, mu * included + rng.normal(size=canaries)


def least_refuting(
    canaries: int, guesses: int, alpha: float, lines: tuple[np.ndarray, np.ndarray]
) -> int:
    """The fewest right guesses that refute a claim."""
    found = [c for c in range(guesses + 1) if too_many(canaries, guesses, c, alpha, *lines)]
    return min(found, default=guesses + 1)


@pytest.mark.parametrize("mu", [0.2, 1.0, 3.0])
@pytest.mark.parametrize("alpha", [0.05, 1e-4])
def test_no_more_false_alarms_than_stated_when_all_are_guessed(mu: float, alpha: float) -> None:
    """Exactly: right guesses are binomial with probability Φ(μ/2), for the best attack."""
    lines = lines_of((GaussianEvent(1 / mu),), "zero-out", DELTA)
    for canaries in (1, 2, 10, 200):
        c = least_refuting(canaries, canaries, alpha, lines)
        law = stats.binom(canaries, stats.norm.cdf(mu / 2))
        assert law.sf(c - 1) <= alpha


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 3.0])
def test_randomized_response_attains_the_bound_nearly(epsilon: float) -> None:
    """Its curve has two lines; right guesses are binomial with probability e^ε/(1 + e^ε)."""
    epsilons = np.array([0.0, epsilon])
    deltas = np.array([math.tanh(epsilon / 2), 0.0])
    law = stats.binom(100, 1 / (1 + math.exp(-epsilon)))
    c = least_refuting(100, 100, 0.01, (epsilons, deltas))
    assert law.sf(c - 1) <= 0.01
    assert c <= law.ppf(0.999) + 3


def test_canaries_that_share_one_secret_are_no_false_alarm() -> None:
    """All or nothing: a mechanism that shows all coins with probability δ, else none.

    It is (0, δ)-private. All guesses are right with probability δ, and then a bound that took
    canaries as independent would be refuted.
    """
    epsilons, deltas = np.array([0.0]), np.array([0.01])
    assert not too_many(100, 100, 100, 0.01, epsilons, deltas)
    assert too_many(100, 100, 100, 0.011, epsilons, deltas)


def test_bounds_hold_as_often_as_they_say() -> None:
    """60 audits of a true claim at confidence 0.9: more than 25 violations have p < 1e-9."""
    event = claim(2.0)
    found = [
        measure_run_by_curve(*run(1 / event.noise_multiplier, 300, seed), [event], DELTA, 0.9)
        for seed in range(60)
    ]
    assert stats.binom.sf(25, 60, 0.1) < FALSE_ALARM
    assert sum(one.violated for one in found) <= 25


@pytest.mark.parametrize("epsilon", [1.0, 4.0])
def test_tighter_than_guesses_on_gaussians(epsilon: float) -> None:
    event = claim(epsilon)
    seen = run(1 / event.noise_multiplier, 5000)
    found = measure_run_by_curve(*seen, [event], DELTA)
    older = measure_run(*seen, epsilon, DELTA)
    assert 1.15 * older.measured < found.measured <= epsilon


def test_half_of_the_noise_is_a_violation() -> None:
    """Which (ε, δ) alone does not see."""
    event = claim(1.0)
    seen = run(2.0 / event.noise_multiplier, 20_000)
    assert measure_run_by_curve(*seen, [event], DELTA).violated
    assert not measure_run(*seen, 1.0, DELTA).violated


def test_scores_that_tell_nothing_show_nothing() -> None:
    assert measure_run_by_curve(*run(0.0, 1000), [claim(1.0)], DELTA).measured < 0.1


def test_what_has_no_curve_is_refused() -> None:
    selection = SelectEvent((GaussianEvent(1.0),), 2.0)
    with pytest.raises(ValueError, match="Gaussian"):
        measure_run_by_curve(*run(1.0, 100), [selection], DELTA)
