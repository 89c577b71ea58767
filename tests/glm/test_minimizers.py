import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import quad
from scipy.sparse import csr_array

import privagrad as pg
from privagrad.glm.gradients import GlmGradients
from privagrad.glm.losses import LOSSES
from privagrad.glm.minimizers import RegularizedRisk
from privagrad.glm.rows import as_rows
from privagrad.methods import Setting, oracle
from privagrad.privacy.events import (
    SOLVER_TOLERANCE,
    GaussianEvent,
    ObjectiveEvent,
    SelectEvent,
)
from privagrad.privacy.mechanism import GaussianSum
from privagrad.privacy.noise import random_source
from privagrad.privacy.releases import Releases
from privagrad.privacy.sampling import Batches
from tests.statistics import Constant, scale_accepted

SCALAR = [name for name in LOSSES if not pg.Loss(name).multiclass]


def risk(loss, X, y, bound=1.0, ridge=0.1, smoothing=0.2, tilt=0.0):
    return RegularizedRisk(
        GlmGradients(pg.Loss(loss), as_rows(X), y), bound, ridge, smoothing, tilt
    )


def problem(n=30, dim=4, seed=0):
    rng = np.random.default_rng(seed)
    return rng.standard_normal((n, dim)), rng.choice([-1.0, 1.0], n)


@pytest.mark.parametrize("loss", SCALAR)
@pytest.mark.parametrize("sparse", [False, True])
def test_solutions_are_certified(loss, sparse):
    X, y = problem()
    solved = risk(loss, csr_array(X) if sparse else X, y)
    x = solved.solve(1e-8)
    assert np.linalg.norm(solved.gradient(x)) <= 1e-8
    # Strong convexity: the gradient grows at least as ridge times the distance.
    for other in np.random.default_rng(1).standard_normal((5, 4)):
        assert solved.gradient(other) @ (other - x) >= 0.0999 * np.sum((other - x) ** 2)


@pytest.mark.parametrize("loss", ["absolute", "quantile", "hinge"])
def test_smoothed_slopes_are_the_losses_difference_quotients(loss):
    margins = np.linspace(-3, 3, 61)[:, None]
    kind, h = pg.Loss(loss), 0.2
    for target in (-1.0, 1.0):
        y = np.full(61, target)
        quotients = (kind.value(margins[:, 0] + h, y) - kind.value(margins[:, 0] - h, y)) / (2 * h)
        for margin, quotient in zip(margins, quotients, strict=True):
            one = risk(loss, margin[None], np.array([target]), bound=np.inf, ridge=0.0)
            assert one.gradient(np.ones(1)) == pytest.approx(margin * quotient, abs=1e-12)


@pytest.mark.parametrize("loss", ["absolute", "quantile", "huber"])
@pytest.mark.parametrize("target", [1e15, 1e17, -1e300])
def test_huge_targets_stay_within_the_bound(loss, target):
    """Where y + h and y - h are one double apart, a quotient would exceed every bound."""
    lonely = risk(loss, np.ones((1, 1)), np.array([target]), bound=1.0, ridge=0.0)
    for x in (-1.0, 0.0, 0.3, 1.0):
        assert np.abs(lonely.gradient(np.array([x]))) <= 1.0


@pytest.mark.parametrize("loss", SCALAR)
@settings(max_examples=25)
@given(seed=st.integers(0, 1000), bound=st.sampled_from([0.1, 1.0, 10.0]), huge=st.booleans())
def test_one_example_moves_the_minimiser_by_at_most_bound_over_n_ridge(loss, seed, bound, huge):
    X, y = problem(seed=seed)
    if huge:
        X[-1] *= 1e6
    tolerance = 1e-9
    without = X.copy()
    without[-1] = np.nan  # left out, with n unchanged
    near = [risk(loss, rows, y, bound).solve(tolerance) for rows in (X, without)]
    most = (bound / 30 + 2 * tolerance) / 0.1
    assert np.linalg.norm(near[0] - near[1]) <= most


@pytest.mark.parametrize("bound", [1e-3, 1e-9, 1e-12])
def test_rows_of_the_largest_doubles_stay_within_the_bound(bound):
    """What shrinks them has few digits there; a row that it cannot bring within it adds nothing."""
    for largest in np.linspace(1.0, 1.7, 20) * 1e308:
        huge = risk("linear", np.array([[largest]]), np.zeros(1), bound, ridge=0.0)
        assert np.abs(huge.gradient(np.zeros(1))) <= bound


def test_the_bound_on_the_move_is_nearly_attained():
    X = np.zeros((10, 1))
    X[-1] = 5.0
    moved = risk("linear", X, np.zeros(10), 1.0, 0.5).solve(1e-10)
    assert moved == pytest.approx([-1 / (10 * 0.5)], rel=1e-6)


@pytest.mark.parametrize(("noise", "epsilon"), [(2.0, 0.3), (2.0, 1.0), (0.7, 2.0), (5.0, 0.2)])
def test_the_objective_event_lies_above_the_exact_divergence(noise, epsilon):
    """One coordinate, logistic loss, Λ = 1: the density of the minimiser is known exactly."""
    ridge, row = 1.0, 1.0
    event = ObjectiveEvent(noise, np.log1p(0.25 * row**2 / ridge))
    sigma = noise * row

    def density(theta, examples):
        chance = 1 / (1 + np.exp(-theta * row))
        b = -(ridge * theta + examples * (chance - 1) * row)
        volume = ridge + examples * chance * (1 - chance) * row**2
        return np.exp(-((b / sigma) ** 2) / 2) / np.sqrt(2 * np.pi) / sigma * volume

    for with_row, without in ((1, 0), (0, 1)):
        exact, _ = quad(
            lambda t: max(0.0, density(t, with_row) - np.exp(epsilon) * density(t, without)),  # noqa: B023
            -60, 60, limit=2000, points=[0.0],
        )  # fmt: skip
        bound = pg.PrivacyPlan((event,)).delta(epsilon)
        assert bound >= exact
    assert bound <= 30 * max(exact, 1e-4)


def test_the_objective_event_counts_the_change_of_volume():
    """However much noise: the loss is never below log_volume, so δ(ε) ≥ 1 - exp(ε - log_volume)."""
    plan = pg.PrivacyPlan((ObjectiveEvent(1e3, 0.4),))
    for epsilon in (0.1, 0.3):
        assert plan.delta(epsilon) >= 1 - np.exp(epsilon - 0.4)
    assert plan.delta(0.42) < 1e-6


@pytest.mark.parametrize("loss", SCALAR)
def test_the_change_of_volume_is_at_most_what_is_charged(loss):
    """1 + ℓ'' ‖a‖²/Λ, for the longest row and where its loss bends most, by differences."""
    rule: Any = pg.methods.METHODS["objective-perturbation"]
    event, n = ObjectiveEvent(1.0, 0.2), 50
    plan = pg.PrivacyPlan((event,), training=event.purpose)
    for radius in (0.5, 3.0):
        ball = pg.Ellipsoid.ball(1, radius)
        setting = Setting(1, Batches(n, n, 1), pg.WholeSpace(), plan, ball, step_size=1e9)
        total = n * rule.ridge_for(setting, pg.Loss(loss))
        one = risk(loss, [[1e3]], np.array([1.0]), radius, 0.0, rule.smoothing)
        points = np.linspace(-5, 5, 20_001)
        slopes = np.array([one.gradient(np.array([x]))[0] for x in points])
        change = max(float(np.diff(slopes).max()) / (points[1] - points[0]), 0.0)
        assert math.log1p(change / total) <= event.log_volume * (1 + 1e-9)


@pytest.mark.parametrize("loss", ["logistic", "hinge"])
def test_the_tolerance_of_a_solver_is_counted_in_what_a_row_moves(loss):
    """Two answers may each lie tolerance/ridge from minimisers that are bound/(n ridge) apart."""
    n, ridge, radius = 50, 0.01, 0.5
    gradients = GlmGradients(pg.Loss(loss), as_rows(np.ones((n, 3))), np.ones(n))
    event = GaussianEvent(2.0, purpose="minimum")
    plan = pg.PrivacyPlan((event,), training="minimum")
    ball, told = pg.Ellipsoid.ball(3, radius), []
    setting = Setting(3, Batches(n, n, 1), pg.WholeSpace(), plan, ball)

    class Recorded(GaussianSum):
        def certified(self, vector, sensitivity):
            told.append((vector, sensitivity))
            return super().certified(vector, sensitivity)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(oracle, "GaussianSum", Recorded)
        asked = oracle.GradientOracle(gradients, setting, Releases(plan, random_source(0)), None)
        asked.minimum(ridge, 0.1)
    [(answer, sensitivity)] = told
    solved = RegularizedRisk(gradients, radius, ridge, 0.1)
    off = float(np.linalg.norm(solved.gradient(answer)))
    assert off > 0
    assert sensitivity >= (radius / n + 2 * off) / ridge


def test_objective_perturbation_pays_for_its_tolerance():
    X, y = problem(200, 5)
    result = pg.minimize(
        "logistic", X, y, method="objective-perturbation", epsilon=1.0, delta=1e-4,
        ellipsoid=pg.Ellipsoid.ball(5, 1.0), step_size=0.5,
    )  # fmt: skip
    assert [event.purpose for event in result.privacy.events] == ["solver tolerance", "objective"]
    assert 0.98 <= result.privacy.epsilon <= 1.0


def test_the_cover_is_wide_enough_for_discrete_noise():
    """Discrete noise lies within 36 units of a normal, which no fixed words can show."""
    drawn = GaussianSum(20, 3.0, 1.0)
    assert drawn.distance_from_normal("discrete") >= 36
    assert 0.5 <= drawn.distance_from_normal("gaussian") < 0.6


@pytest.mark.parametrize("noise", [1.0, 1e5])
def test_the_cover_hides_the_grid_of_the_noise_in_the_objective(noise):
    """Noise b is rounded to a grid: with rows of zeros the minimiser is -b/Λ, before and after.

    What is released may be half the declared sensitivity from the minimiser of the true b.
    """
    n, dim, ridge, normal = 50, 3, 0.01, 0.123456789
    gradients = GlmGradients(pg.Loss("logistic"), as_rows(np.zeros((n, dim))), np.ones(n))
    ball = pg.Ellipsoid.ball(dim, 1.0)
    events = (ObjectiveEvent(noise, 0.1), GaussianEvent(200.0, purpose=SOLVER_TOLERANCE))
    plan = pg.PrivacyPlan(events, training="objective")
    setting = Setting(dim, Batches(n, n, 1), pg.WholeSpace(), plan, ball)
    made = []

    class Recorded(GaussianSum):
        def release(self, total, *rest):
            made.append((self, total.memory.copy(), total.ellipsoid.radius))
            return super().release(total, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(oracle, "GaussianSum", Recorded)
        source = Constant.source(normal)
        asked = oracle.GradientOracle(gradients, setting, Releases(plan, source), None)
        asked.perturbed_minimum(ridge, 0.1)
    (tilted, _, tilt_radius), (cover, units, radius) = made
    declared = radius / cover.batch_size
    released = units * cover.grid * declared
    b = normal * noise * tilted.sensitivity * tilt_radius
    tolerance = 0.0005 / n
    grid = math.sqrt(dim) * tilted.grid * tilt_radius / tilted.batch_size
    assert declared >= 2 * (tolerance + grid / (2 * n)) / ridge
    assert np.linalg.norm(released + b / (n * ridge)) <= declared / 2
    assert cover.sensitivity >= 1 + 2 * math.sqrt(dim) * cover.grid


def test_the_cover_does_not_tell_how_long_the_noise_in_the_objective_is():
    """Its deviation is the same for all noise, and covers the rounding that the longest causes."""
    n, dim, ridge = 50, 3, 1e-4
    X, y = problem(n, dim)
    gradients = GlmGradients(pg.Loss("logistic"), as_rows(X), y)
    ball = pg.Ellipsoid.ball(dim, 1.0)
    events = (ObjectiveEvent(1e4, 0.1), GaussianEvent(200.0, purpose=SOLVER_TOLERANCE))
    plan = pg.PrivacyPlan(events, training="objective")
    setting = Setting(dim, Batches(n, n, 1), pg.WholeSpace(), plan, ball)
    told = []

    class Recorded(GaussianSum):
        def certified(self, vector, sensitivity):
            told.append(sensitivity)
            return super().certified(vector, sensitivity)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(oracle, "GaussianSum", Recorded)
        for normal in (0.01, 1.0, 10.0):
            source = Constant.source(normal)
            asked = oracle.GradientOracle(gradients, setting, Releases(plan, source), None)
            asked.perturbed_minimum(ridge, 0.1)
    assert len(told) == 3
    assert len(set(told)) == 1


@pytest.mark.parametrize("method", ["output-perturbation", "objective-perturbation"])
@pytest.mark.parametrize("sparse", [False, True])
def test_minimisers_survive_any_row(method, sparse):
    X, y = problem(20, 3)
    X[:6] = [
        [1.7e308] * 3,
        [np.nan, 1, 1],
        [np.inf, 0, 0],
        [1e200, -1e200, 0],
        [5e-324] * 3,
        [0] * 3,
    ]
    with np.errstate(all="ignore"):
        result = pg.minimize(
            "huber", csr_array(X) if sparse else X, 1e308 * y, method=method, epsilon=1.0,
            delta=1e-3, ellipsoid=pg.Ellipsoid.ball(3, 1.0), step_size=0.5, random_state=0,
        )  # fmt: skip
    assert np.isfinite(result.last).all()
    assert result.diagnostics.nonfinite in (2, 3)


@pytest.mark.parametrize("method", ["output-perturbation", "objective-perturbation"])
def test_perturbed_minimisers_have_the_noise_they_pay_for(method):
    """Rows of zeros: output noise has std z Δ; noise b in the objective moves x by -b/Λ."""
    rows, dim = 100, 400
    arguments: dict[str, Any] = {
        "method": method, "epsilon": 1.0, "delta": 1e-4, "ellipsoid": pg.Ellipsoid.ball(dim, 0.5),
        "step_size": 0.3,
    }  # fmt: skip
    draws = [
        pg.minimize("logistic", np.zeros((rows, dim)), np.ones(rows), **arguments)
        for _ in range(20)
    ]
    event = draws[0].privacy.events[-1]
    assert not isinstance(event, SelectEvent)
    noise = event.noise_multiplier
    rule: Any = pg.methods.METHODS[method]
    plan = pg.PrivacyPlan(draws[0].privacy.events, training=event.purpose)
    setting = pg.methods.Setting(
        dim, Batches(rows, rows, 1), pg.WholeSpace(), plan, arguments["ellipsoid"], step_size=0.3
    )
    if method == "output-perturbation":
        std = noise * (0.5 / rows) / rule.ridge(setting)
    else:
        std = noise * 0.5 / (rule.ridge_for(setting, pg.Loss("logistic")) * rows)
    seen = np.array([draw.last for draw in draws])
    # The tolerance's share widens the noise a little.
    measured = seen.std()
    assert 0.95 * std <= measured <= 1.06 * std
    assert not scale_accepted(seen, std * 2 / 3)
    assert not scale_accepted(seen, std * 3 / 2)


def test_problems_beyond_the_solver_are_refused_whatever_the_rows():
    X, y = problem()
    for rows in (X, 0 * X, np.full_like(X, np.nan)):
        hard = risk("huber", rows, y, bound=1e6, ridge=1e-6)
        with pytest.raises(ArithmeticError, match="Expected a problem"):
            hard.solve(1e-9)
