import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scipy import stats
from scipy.special import ndtr

import privagrad as pg
from privagrad.privacy.accounting import _bracket, _calibrated
from privagrad.privacy.events import ACCOUNTED, SelectEvent
from privagrad.privacy.privacy_loss import fixed_size_tails

SETTINGS: list[dict[str, Any]] = [
    {"epsilon": 1.0, "delta": 1e-5, "n_examples": 5000, "batch_size": 70, "steps": 1000},
    {"epsilon": 0.1, "delta": 1e-6, "n_examples": 5000, "batch_size": 70, "steps": 5102},
    {"epsilon": 8.0, "delta": 1e-7, "n_examples": 60_000, "batch_size": 600, "steps": 500},
    {"epsilon": 2.0, "delta": 1e-5, "n_examples": 400, "batch_size": 400, "steps": 20},
    {"epsilon": 1.0, "delta": 1e-3, "n_examples": 1, "batch_size": 1, "steps": 1},
]


def gaussian_delta(epsilon: float, mu: float) -> float:
    """The Gaussian mechanism's exact profile (Balle and Wang 2018)."""
    return float(ndtr(mu / 2 - epsilon / mu) - math.exp(epsilon) * ndtr(-mu / 2 - epsilon / mu))


@pytest.mark.parametrize("sampling", ACCOUNTED)
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_calibration_ends_on_the_safe_side_and_close(setting, sampling):
    plan = pg.PrivacyPlan.calibrate(**setting, sampling=sampling)
    spent = plan.epsilon(setting["delta"])
    assert spent <= setting["epsilon"]
    assert spent >= 0.9995 * setting["epsilon"]
    (event,) = plan.events
    assert isinstance(event, pg.GaussianEvent)
    noisier = replace(event, noise_multiplier=plan.noise_multiplier * 2 / 3)
    assert pg.PrivacyPlan((noisier,)).epsilon(setting["delta"]) > 1.2 * setting["epsilon"]


@pytest.mark.parametrize("relation", ["ADD_OR_REMOVE_ONE", "REPLACE_SPECIAL"])
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_poisson_agrees_with_dp_accounting(setting, relation):
    import dp_accounting
    from dp_accounting.pld import PLDAccountant

    plan = pg.PrivacyPlan.calibrate(**setting)
    relation = dp_accounting.NeighboringRelation[relation]
    interval = min(1e-4, 2e-4 * setting["epsilon"])
    accountant = PLDAccountant(relation, value_discretization_interval=interval)
    rate = setting["batch_size"] / setting["n_examples"]
    gaussian = dp_accounting.GaussianDpEvent(plan.noise_multiplier)
    sampled = dp_accounting.PoissonSampledDpEvent(rate, gaussian) if rate < 1 else gaussian
    accountant.compose(sampled, setting["steps"])
    expected = accountant.get_epsilon(setting["delta"])
    assert plan.epsilon(setting["delta"]) == pytest.approx(expected, rel=2e-3)
    assert plan.relation == "zero-out"


@pytest.mark.parametrize("count", [1, 30])
def test_releases_over_all_rows_compose_exactly(count):
    plan = pg.PrivacyPlan((pg.GaussianEvent(4.0, count),))
    epsilon = plan.epsilon(1e-6)
    assert gaussian_delta(epsilon, math.sqrt(count) / 4.0) == pytest.approx(1e-6, rel=0.02)


def test_under_replace_one_the_sensitivity_doubles():
    query = pg.GaussianEvent(4.0)
    rare = pg.GaussianEvent(1e6, 1, "without_replacement", 10**6, 1)
    plan = pg.PrivacyPlan((query, rare))
    assert plan.relation == "replace-one"
    assert gaussian_delta(plan.epsilon(1e-6), 2 / 4.0) == pytest.approx(1e-6, rel=0.05)


def test_whole_numbers_are_not_under_accounted():
    assert pg.PrivacyPlan((pg.GaussianEvent(4, 10),)).epsilon(1e-5) == pg.PrivacyPlan(
        (pg.GaussianEvent(4.0, 10),)
    ).epsilon(1e-5)
    assert isinstance(pg.GaussianEvent(4).noise_multiplier, float)


def worst_case_delta(event: pg.GaussianEvent, epsilon: float, runs: int) -> tuple[float, float]:
    """δ(ε) and its standard error for rows that are all -1, but for one that is +1 or -1.

    By Monte Carlo: with the odd row +1 a step sees 2K more, K ~ Binomial(b, 1/n) with replacement
    and K ~ Bernoulli(b/n) without; the privacy losses of the steps add up.
    """
    rng = np.random.default_rng(0)
    b, n, z = event.batch_size, event.n_examples, event.noise_multiplier
    draws, rate = (b, 1 / n) if event.sampling == "with_replacement" else (1, b / n)
    counts = np.arange(min(draws, 12) + 1)
    weights = stats.binom(draws, rate).pmf(counts)
    losses = np.zeros(runs)
    for _ in range(event.count):
        seen = 2 * rng.binomial(draws, rate, runs) + z * rng.standard_normal(runs)
        ratios = np.exp(2 * counts * (seen[:, None] - counts) / (z * z))
        losses += np.log(ratios @ weights)
    parts = np.maximum(0.0, -np.expm1(epsilon - losses))
    return float(parts.mean()), float(parts.std() / math.sqrt(runs))


@pytest.mark.parametrize("sampling", ["with_replacement", "without_replacement"])
@pytest.mark.parametrize(("count", "epsilon"), [(1, 0.2), (1, 0.8), (20, 1.0), (20, 2.5)])
def test_fixed_size_bounds_lie_above_a_concrete_worst_case(sampling, count, epsilon):
    event = pg.GaussianEvent(1.5, count, sampling, 40, 4)
    delta, error = worst_case_delta(event, epsilon, 400_000)
    assert delta > 8 * error, "the simulation must see the tail it speaks of"
    bound = pg.PrivacyPlan((event,)).delta(epsilon)
    assert bound >= delta - 4 * error
    assert bound <= 3 * delta + 4 * error, "sound, and not useless"
    forgetful = replace(event, noise_multiplier=2 * event.noise_multiplier)
    assert pg.PrivacyPlan((forgetful,)).delta(epsilon) < delta - 4 * error


@pytest.mark.parametrize("setting", SETTINGS[:3], ids=str)
def test_fixed_sizes_cost_more_than_poisson(setting):
    def epsilon(sampling, noise):
        shape = (sampling, setting["n_examples"], setting["batch_size"])
        event = pg.GaussianEvent(noise, setting["steps"], *shape)
        return pg.PrivacyPlan((event,)).epsilon(setting["delta"])

    for noise in (1.0, 4.0):
        poisson, once, often = (
            epsilon(s, noise) for s in ("poisson", "without_replacement", "with_replacement")
        )
        assert poisson < once < often


def fixed_size_profile(event: pg.GaussianEvent, epsilons: np.ndarray) -> np.ndarray:
    """δ(ε) = P(L > ε) - e^ε Q(L > ε)."""
    upper, lower = fixed_size_tails(event, 1e-20).of(epsilons)
    return np.asarray(upper - np.exp(epsilons) * lower)


def test_the_profile_is_a_dominating_pairs():
    """δ(-∞) = 1, decreasing, convex in e^ε, and H_α(P‖Q) = 1 - α + α H_{1/α}(P‖Q)."""
    for sampling in ("with_replacement", "without_replacement"):
        event = pg.GaussianEvent(1.2, 1, sampling, 30, 6)
        alphas = np.linspace(0.01, 4, 2001)
        deltas = fixed_size_profile(event, np.log(alphas))
        assert np.all(np.diff(deltas) <= 1e-15)
        assert np.all(np.diff(deltas, 2) >= -1e-14)
        assert np.all(deltas >= np.maximum(0, 1 - alphas) - 1e-15)
        flipped = 1 - alphas + alphas * fixed_size_profile(event, -np.log(alphas))
        assert deltas == pytest.approx(flipped, abs=1e-12)


def test_one_draw_of_one_row_is_the_same_with_and_without_replacement():
    epsilons = np.linspace(-1, 3, 9)
    once = [
        fixed_size_profile(pg.GaussianEvent(1.0, 1, sampling, 50, 1), epsilons)
        for sampling in ("with_replacement", "without_replacement")
    ]
    assert once[0] == pytest.approx(once[1], rel=1e-9)


def test_further_events_are_paid_from_the_same_budget():
    moments = pg.GaussianEvent(8.0, 3, purpose="moments")
    alone = pg.PrivacyPlan.calibrate(**SETTINGS[0])
    both = pg.PrivacyPlan.calibrate(**SETTINGS[0], other_events=[moments])
    (event,) = alone.events
    assert isinstance(event, pg.GaussianEvent)
    assert both.events == (moments, replace(event, noise_multiplier=both.noise_multiplier))
    assert both.noise_multiplier > 1.02 * alone.noise_multiplier
    assert 0.993 <= both.epsilon(1e-5) <= 1.0
    forgotten = pg.PrivacyPlan(both.events[1:])
    assert forgotten.epsilon(1e-5) < 0.97


def test_a_training_may_be_calibrated_beside_earlier_trainings():
    first = pg.PrivacyPlan.calibrate(**SETTINGS[0])
    second = pg.PrivacyPlan.calibrate(**SETTINGS[0] | {"epsilon": 2.0}, other_events=first.events)
    _, training = second.events
    assert isinstance(training, pg.GaussianEvent)
    assert second.noise_multiplier == training.noise_multiplier
    assert second.noise_multiplier != first.noise_multiplier
    assert second.sampling == first.sampling
    assert second.epsilon(1e-5) <= 2.0


def test_a_budget_already_spent_is_refused():
    with pytest.raises(ValueError, match="spent on moments: raise epsilon"):
        pg.PrivacyPlan.calibrate(
            **SETTINGS[0], other_events=[pg.GaussianEvent(1.0, purpose="moments")]
        )


def test_relations_do_not_mix():
    mixed = [pg.GaussianEvent(1.0, 1, s, 10, 2) for s in ("poisson", "with_replacement")]
    with pytest.raises(ValueError, match="one neighbouring relation"):
        pg.PrivacyPlan(tuple(mixed))


def test_relations_have_one_name_and_a_former_one():
    assert pg.PrivacyPlan((pg.GaussianEvent(1.0),)).relation == "zero-out"
    old = pg.GaussianEvent(1.0, under="add-or-remove-one")  # type: ignore[arg-type]
    assert old == pg.GaussianEvent(1.0, under="zero-out")
    with pytest.raises(ValueError, match="zero-out, replace-one"):
        pg.GaussianEvent(1.0, under="replace-two")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"under='zero-out' or None with sampling='poisson'"):
        pg.GaussianEvent(1.0, 1, "poisson", 10, 2, under="replace-one")


def test_repeated_calibration_is_cached():
    pg.PrivacyPlan.calibrate(**SETTINGS[0])
    hits = _calibrated.cache_info().hits
    pg.PrivacyPlan.calibrate(**SETTINGS[0])
    assert _calibrated.cache_info().hits == hits + 1


def test_there_is_noise_even_where_delta_alone_would_pay():
    with pytest.warns(UserWarning, match="not below 1/n_examples"):
        plan = pg.PrivacyPlan.calibrate(1.0, 1e-4, 10**6, 1, 1)
    assert 1e-4 < plan.noise_multiplier < 1e-2
    assert plan.epsilon(1e-4) <= 1.0


def test_fewer_steps_that_are_planned_cost_less():
    plan = pg.PrivacyPlan.calibrate(**SETTINGS[0])
    half = pg.PrivacyPlan((replace(plan.events[-1], count=500),))
    assert half.epsilon(1e-5) < 0.8 * plan.epsilon(1e-5)
    assert pg.PrivacyPlan(()).epsilon(1e-5) == pg.PrivacyPlan(()).delta(1.0) == 0.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"epsilon": -1.0}, "epsilon > 0"),
        ({"epsilon": float("inf")}, "epsilon > 0"),
        ({"epsilon": 1e9}, "protects nobody"),
        ({"epsilon": "1"}, "number"),
        ({"delta": 0.0}, "delta > 0"),
        ({"delta": 1.0}, "delta in"),
        ({"batch_size": 5001}, "batch_size <= n_examples"),
        ({"batch_size": 0}, "batch_size >= 1"),
        ({"steps": 2.5}, "whole number"),
        ({"sampling": "shuffle"}, "poisson, with_replacement, without_replacement"),
    ],
)
def test_wrong_plans_say_why(change, message):
    with pytest.raises((ValueError, TypeError), match=message):
        pg.PrivacyPlan.calibrate(**{**SETTINGS[0], **change})


def test_a_large_delta_is_pointed_out():
    with pytest.warns(UserWarning, match="publishes one random row"):
        pg.PrivacyPlan.calibrate(**{**SETTINGS[0], "delta": 2e-4})


def test_a_selection_has_no_single_noise_multiplier():
    chosen = SelectEvent((pg.GaussianEvent(30.0),), 3.0)
    with pytest.raises(ValueError, match="'gradients', found selection"):
        pg.PrivacyPlan((chosen,)).noise_multiplier  # noqa: B018


def test_a_report_says_that_the_user_vouches():
    report = pg.minimize(
        "linear", np.ones((20, 1)), epsilon=1.0, delta=1e-3, ellipsoid=pg.Ellipsoid.ball(1, 1.0),
        domain=pg.Box(-1, 1), batch_size=5, steps=2,
    ).privacy  # fmt: skip
    assert "vouches" not in str(report)
    assert "the user vouches" in str(replace(report, verified=False))


@pytest.mark.parametrize("root", [-8.0, -6.9, -1.0, 0.0, 3.0, 39.9, 41.0])
@pytest.mark.parametrize("guess", [-9.0, -1.0, 0.0, 3.0, 50.0])
def test_a_bracket_holds_the_root_from_any_guess(guess, root):
    """Also where the guess is the root itself; both ends are equal where there is no root."""
    low, high = _bracket(lambda x: root - x, guess)
    if low == high:
        assert low in (math.log(1e-3), 40.0)
        assert (root > 40) if low == 40 else (root <= math.log(1e-3))
    else:
        assert math.log(1e-3) <= low < root <= high <= 40
