"""Lower bounds from scores: they hold, they are near what is there, and nonsense is refused."""

import math
from typing import Any

import numpy as np
import pytest
from scipy import stats

from privagrad.audit import measure_release, measure_run
from privagrad.audit.bounds import _chance, guessed
from privagrad.privacy.accounting import PrivacyPlan
from privagrad.privacy.events import GaussianEvent

DELTA = 1e-5


def scores(mu: float, count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.normal(mu, 1, count), rng.normal(0, 1, count)


@pytest.mark.parametrize("epsilon", [0.5, 1.0, 4.0])
def test_a_gaussian_release_is_measured_nearly_in_full(epsilon: float) -> None:
    plan = PrivacyPlan.calibrate_event(GaussianEvent(1.0), epsilon, DELTA)
    (event,) = plan.events
    mu = 1 / event.noise_multiplier  # type: ignore[union-attr]
    found = measure_release(*scores(mu, 500_000), plan.events, DELTA)
    assert 0.8 * epsilon < found.measured <= epsilon
    assert not found.violated


def test_less_noise_than_claimed_is_a_violation() -> None:
    plan = PrivacyPlan.calibrate_event(GaussianEvent(1.0), 1.0, DELTA)
    (event,) = plan.events
    mu = 1.5 / event.noise_multiplier  # type: ignore[union-attr]
    found = measure_release(*scores(mu, 100_000), plan.events, DELTA)
    assert found.violated
    assert "VIOLATED" in found.verdict
    assert found.measured == pytest.approx(1.6, rel=0.15)


def test_bounds_hold_as_often_as_they_say() -> None:
    """40 audits of a true claim at confidence 0.9: more than 18 violations have p < 1e-8."""
    events = (GaussianEvent(2.0),)
    runs = [measure_release(*scores(0.5, 2000, seed), events, DELTA, 0.9) for seed in range(40)]
    assert sum(run.violated for run in runs) <= 18
    assert max(run.measured for run in runs) > 0


def test_scores_that_tell_nothing_show_nothing() -> None:
    assert measure_release(*scores(0.0, 1000), (GaussianEvent(2.0),), DELTA).measured == 0.0
    rng = np.random.default_rng(1)
    assert measure_run(rng.random(1000) < 0.5, rng.normal(size=1000), 1.0, DELTA).measured < 0.3


def test_the_order_of_the_canaries_shows_nothing() -> None:
    """Those that are in come last: with equal scores, ranks by place would be right guesses."""
    included = np.sort(np.random.default_rng(0).random(1000) < 0.5)
    assert measure_run(included, np.zeros(1000), 1.0, DELTA).measured == 0.0


@pytest.mark.parametrize("canaries", [10, 11, 13, 15, 1001])
def test_no_canary_is_guessed_twice(canaries: int) -> None:
    found = guessed(np.arange(canaries) % 2, np.arange(canaries))
    assert max(one.guesses for one in found) == canaries // 2 * 2


def test_the_chance_of_right_guesses_bounds_randomized_response() -> None:
    """Without delta it is a binomial tail, which randomized response attains."""
    for epsilon in (0.1, 1.0, 3.0):
        exact = stats.binom.sf(79, 100, 1 / (1 + math.exp(-epsilon)))
        assert _chance(1000, 100, 80, epsilon, 0.0) == pytest.approx(exact, rel=1e-9)
        assert _chance(1000, 100, 80, epsilon, 1e-6) > exact


@pytest.mark.parametrize("epsilon", [0.5, 2.0])
def test_a_run_of_randomized_response(epsilon: float) -> None:
    """Canaries that show by randomized response are (epsilon, 0)-private: the bound holds."""
    rng = np.random.default_rng(0)
    included = rng.random(20_000) < 0.5
    true = rng.random(included.size) < 1 / (1 + math.exp(-epsilon))
    shown = np.where(true, included, ~included) + 0.001 * rng.random(included.size)
    found = measure_run(included, shown, epsilon, 1e-9)
    assert 0.8 * epsilon < found.measured <= epsilon
    assert measure_run(included, shown, 0.7 * epsilon, 1e-9).violated


@pytest.mark.parametrize(
    ("included", "found", "message"),
    [
        ([True] * 5, [1.0] * 5, "at least 10 finite numbers"),
        ([True] * 20, [1.0] * 19, "with a score each"),
        ([True] * 20, [1.0] * 19 + [math.nan], "19 are finite"),
        ([-1, 1] * 10, [1.0] * 20, r"True or False \(1 or 0\)"),
        (["0", "1"] * 10, [1.0] * 20, r"True or False \(1 or 0\)"),
        ([math.nan, 1.0] * 10, [1.0] * 20, r"True or False \(1 or 0\)"),
    ],
)
def test_bad_scores_are_refused(included: list[Any], found: list[float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        measure_run(included, found, 1.0, DELTA)


@pytest.mark.parametrize(
    ("epsilon", "delta"), [(-1.0, DELTA), (math.nan, DELTA), (1.0, -0.1), (1.0, math.nan), (1.0, 1)]
)
def test_claims_without_a_meaning_are_refused(epsilon: float, delta: float) -> None:
    with pytest.raises(ValueError, match=r"Expected (epsilon|delta)"):
        measure_run([True, False] * 10, np.arange(20.0), epsilon, delta)


def test_selections_cannot_be_audited_this_way() -> None:
    with pytest.raises(ValueError, match="Gaussian"):
        measure_release(*scores(1.0, 100), (), DELTA)
    with pytest.raises(ValueError, match=r"confidence in \[0.5, 1\)"):
        measure_release(*scores(1.0, 100), (GaussianEvent(1.0),), DELTA, 1.0)
