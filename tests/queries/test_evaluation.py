"""What rows say of a fit: the right figures, with the noise that was paid for."""

from dataclasses import replace

import numpy as np
import pytest
from scipy.sparse import csr_array
from scipy.special import expit

from privagrad.geometry.ellipsoid import Ellipsoid
from privagrad.glm.gradients import GlmGradients
from privagrad.glm.losses import Loss
from privagrad.glm.rows import as_rows
from privagrad.linear import (
    Choices,
    Problem,
    plan_fit,
    run_fit,
)
from privagrad.privacy.accounting import PrivacyPlan
from privagrad.privacy.events import GaussianEvent
from privagrad.privacy.mechanism import GaussianSum
from privagrad.privacy.noise import random_source
from privagrad.queries import evaluation
from privagrad.queries.calibration import Calibration
from privagrad.queries.evaluation import evaluate
from tests.releases import releases_at
from tests.statistics import assert_scale

EXACT = 1e-9
RNG = np.random.default_rng(0)
X = RNG.standard_normal((700, 5)) * [1, 2, 0.5, 1, 3]
W = np.array([1.0, -0.5, 2.0, 0.0, 0.3])
BALL = Ellipsoid(np.array([1.0, 2.0, 0.5, 1.0, 0.3]), 0.8)


def cases():
    margins = X @ W
    yield "logistic", Loss("logistic"), np.where(margins + RNG.logistic(size=700) > 0, 1.0, -1.0), 1
    yield "hinge", Loss("hinge"), np.where(margins + RNG.logistic(size=700) > 0, 1.0, -1.0), 1
    yield "softmax", Loss("softmax"), RNG.integers(0, 3, 700).astype(float), 3
    yield "huber", Loss("huber"), margins + RNG.standard_normal(700), 1
    yield "quantile", Loss("quantile", 0.3), margins + RNG.standard_normal(700), 1


CASES = list(cases())


@pytest.mark.parametrize(("name", "loss", "y", "outputs"), CASES, ids=[c[0] for c in CASES])
def test_parts_in_threads_say_the_same(name, loss, y, outputs, monkeypatch):
    ball = Ellipsoid(np.tile(BALL.scale, outputs), BALL.radius)
    weights = np.tile(W, outputs) * np.repeat([1.0, 0.2, -1.0][:outputs], 5)
    gradients = GlmGradients(loss, as_rows(X), y, outputs)
    left_out = np.arange(700) % 9 == 0

    def found():
        path = [(0, np.zeros_like(weights)), (10, weights)]
        return evaluate(gradients, ball, path, left_out, releases_at({"evaluation": 0.5}))

    whole = found()
    monkeypatch.setattr(evaluation, "_ROWS", 11)
    assert repr(found()) == repr(whole)


@pytest.mark.parametrize("layout", ["dense", "csr"])
@pytest.mark.parametrize(("name", "loss", "y", "outputs"), CASES, ids=[c[0] for c in CASES])
def test_without_noise_it_is_the_exact_mean(name, loss, y, outputs, layout):
    rows = as_rows(csr_array(X) if layout == "csr" else X)
    ball = Ellipsoid(np.tile(BALL.scale, outputs), BALL.radius)
    weights = np.tile(W, outputs) * np.repeat([1.0, 0.2, -1.0][:outputs], 5)
    path = [(0, np.zeros_like(weights)), (5, weights / 2), (10, weights)]
    gradients = GlmGradients(loss, rows, y, outputs)
    found = evaluate(gradients, ball, path, None, releases_at({"evaluation": EXACT}))

    def margins(x):
        return X @ x.reshape(outputs, -1).T if outputs > 1 else X @ x

    for k, x in ((1, weights / 2), (2, weights)):
        losses = np.minimum(loss.value(margins(x), y), found.loss_cap)
        assert found.losses[k] == pytest.approx(losses.mean(), abs=1e-6)
        each = gradients.per_example(x, np.arange(700))
        norms = ball.norm(each) / ball.radius
        if name in ("huber", "quantile"):
            norms = loss.lipschitz * BALL.norm(X) / BALL.radius
        assert found.clipped[k] == pytest.approx(np.mean(norms > 1), abs=1e-6)
    if name in ("huber", "quantile"):
        assert found.score == pytest.approx(1 - losses.mean() / found.loss_cap, abs=1e-6)
        zero = np.minimum(loss.value(np.zeros(700), y), found.loss_cap).mean()
        assert found.baseline == pytest.approx(1 - zero / found.loss_cap, abs=1e-6)
        return
    guess = margins(weights).argmax(1) if outputs > 1 else np.sign(margins(weights))
    assert found.score == pytest.approx((guess == y).mean(), abs=1e-6)
    _, counts = np.unique(y, return_counts=True)
    assert found.shares == pytest.approx(counts / 700, abs=1e-6)
    assert found.baseline == pytest.approx(counts.max() / 700, abs=1e-6)
    assert found.losses[0] == pytest.approx(loss.value(margins(0 * weights), y).mean())


def recorded(gradients, path, left_out, noise, seed):
    made = []

    class Recorded(GaussianSum):
        def release(self, total, *rest):
            before = total.memory * self.grid
            after = super().release(total, *rest)
            made.append((before, after.copy()))
            return after

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluation, "GaussianSum", Recorded)
        releases = releases_at({"evaluation": noise}, seed)
        found = evaluate(gradients, BALL, path, left_out, releases)
    return *made[0], found


PATH = [(k, k / 10 * W) for k in range(11)]


@pytest.mark.parametrize("loss", [Loss("logistic"), Loss("huber")], ids=lambda k: k.name)
def test_one_row_is_a_vector_of_norm_at_most_one(loss):
    strange = np.array([[1e30, 1, 1, 1, 1], [np.nan, 0, 0, 0, 0], [np.inf, 0, 0, 0, 0]])
    rows = np.vstack([X[:40], strange, np.zeros((1, 5)), 1e-9 * np.ones((1, 5))])
    for row in rows:
        gradients = GlmGradients(loss, as_rows(row[None]), np.ones(1))
        with np.errstate(all="ignore"):
            handed, _, _ = recorded(gradients, PATH, None, 3.0, 0)
        assert np.linalg.norm(handed) <= 1 + 1e-6


def test_rows_that_are_left_out_add_nothing():
    y = CASES[0][2]
    out = np.arange(700) >= 600
    some = recorded(GlmGradients(Loss("logistic"), as_rows(X), y), PATH, out, EXACT, 0)
    rest = recorded(GlmGradients(Loss("logistic"), as_rows(X[:600]), y[:600]), PATH, None, EXACT, 0)
    assert np.allclose(some[0], rest[0], rtol=1e-9)
    assert some[2].score == pytest.approx(rest[2].score, abs=1e-6)


def test_its_noise_is_as_large_as_it_says():
    gradients = GlmGradients(Loss("logistic"), as_rows(X), CASES[0][2])
    exact = recorded(gradients, PATH, None, EXACT, 0)[2]
    scores, points, raw = [], [], []
    for seed in range(60):
        handed, after, found = recorded(gradients, PATH, None, 4.0, seed)
        raw.append(after * 700 - handed)
        scores.append((found.score - exact.score) / found.score_noise)
        points.append((found.losses[3] - exact.losses[3]) / (found.curve_noise * found.loss_cap))
    assert_scale(np.concatenate(raw), 4.0)
    # The share of rows counted is noisy too, so that figures have up to sqrt(2) times the noise.
    assert 0.6 < np.std(scores) < 1.8
    assert 0.6 < np.std(points) < 1.8


def test_the_evaluation_is_an_event_of_the_plan():
    y = CASES[0][2]
    problem = Problem(Loss("logistic"), as_rows(X), y)
    plan = plan_fit(problem.facts, 2.0, 1e-4, Choices(steps=20), evaluated=True)
    assert [e.purpose for e in plan.privacy.events].count("evaluation") == 1
    assert plan.privacy.epsilon(1e-4) <= 2.0
    model = run_fit(problem, plan, plan.releases(random_source(0)), False)
    assert model.privacy.events == plan.privacy.events
    assert model.trace is not None
    without = plan_fit(problem.facts, 2.0, 1e-4, Choices(steps=20))
    assert without.privacy.noise_multiplier < plan.privacy.noise_multiplier
    assert run_fit(problem, without, without.releases(random_source(0)), False).trace is None


def test_rows_without_a_target_teach_nothing():
    """Whatever the targets of rows that are left out, the model is the same."""
    y = CASES[0][2]
    out = np.arange(700) % 7 == 0
    plan = plan_fit(Problem(Loss("logistic"), as_rows(X), y).facts, 2.0, 1e-4, Choices(steps=20))
    one = run_fit(
        Problem(Loss("logistic"), as_rows(X), y, left_out=out),
        plan,
        plan.releases(random_source(0)),
        False,
    )
    other = run_fit(
        Problem(Loss("logistic"), as_rows(X), np.where(out, -y, y), left_out=out),
        plan, plan.releases(random_source(0)), False,
    )  # fmt: skip
    assert np.array_equal(one.coef, other.coef)
    all_in = run_fit(
        Problem(Loss("logistic"), as_rows(X), y), plan, plan.releases(random_source(0)), False
    )
    assert not np.allclose(one.coef, all_in.coef)


def leave_margins(*_):
    """A calibration that changes nothing."""
    return Calibration(1.0, np.zeros(1))


def test_columns_in_all_units_are_learned():
    n = 6000
    rng = np.random.default_rng(1)
    rows = rng.standard_normal((n, 4)) * [1, 100, 0.01, 5]
    weights = np.array([1.5, 0.01, -150.0, 0.2])
    y = np.where(rng.random(n) < expit(rows @ weights), 1.0, -1.0)
    problem = Problem(Loss("logistic"), as_rows(rows), y)
    plan = plan_fit(problem.facts, 2.0, 1e-5, Choices(), evaluated=True)
    model = run_fit(problem, plan, plan.releases(random_source(3)), False)
    best = (np.sign(rows @ weights) == y).mean()
    assert (np.sign(rows @ model.coef[0] + model.intercept[0]) == y).mean() > best - 0.02


@pytest.mark.parametrize("calibrated", [False, True])
def test_the_noise_of_coefficients_is_of_the_right_size(calibrated, monkeypatch):
    """Over seeds, coefficients of independent columns vary as much as each fit says."""
    n = 8000
    rng = np.random.default_rng(2)
    group = rng.integers(0, 3, n)
    rows = np.column_stack([rng.standard_normal((n, 2)) * [1, 30], group[:, None] == np.arange(3)])
    weights = np.array([1.0, 0.02, -1.0, 0.0, 1.0])
    y = np.where(rng.random(n) < expit(rows @ weights), 1.0, -1.0)
    low = np.array([-5.0, -150.0, 0, 0, 0])
    problem = Problem(Loss("logistic"), as_rows(rows), y, bounds=(low, np.maximum(-low, 1.0)),
                      groups=((2, 5),))  # fmt: skip
    if not calibrated:
        monkeypatch.setattr("privagrad.linear.fit.calibrate", leave_margins)
    plan = plan_fit(problem.facts, 1.0, 1e-5, Choices(steps=100), evaluated=True)
    seeds = range(100, 130)
    fits = [run_fit(problem, plan, plan.releases(random_source(seed)), False) for seed in seeds]
    real = np.std([fit.coef[0] for fit in fits], axis=0, ddof=1)
    told = np.median([fit.noise.coef[0] for fit in fits if fit.noise], axis=0)
    assert (real / told < 2).all()
    assert (real / told > 0.5).all()


def test_public_limits_bound_the_units():
    """A one-hot column whose range drowns in noise is not taken for one of billions."""
    rng = np.random.default_rng(4)
    rows = np.column_stack([rng.standard_normal((400, 3)), rng.random((400, 12)) < 0.01])
    limits = np.array([np.inf] * 3 + [1.0] * 12)
    problem = Problem(Loss("logistic"), as_rows(rows * 1.0), np.sign(rows[:, 0]), limits=limits)
    plan = plan_fit(problem.facts, 0.5, 1e-5, Choices(steps=10), evaluated=True)

    def trace_of(problem, seed):
        return run_fit(problem, plan, plan.releases(random_source(seed)), False).trace

    for seed in range(5):
        trace = trace_of(problem, seed)
        assert trace is not None
        assert (trace.columns.unit <= limits).all()
    free = replace(problem, limits=None)
    traces = [
        run_fit(free, plan, plan.releases(random_source(seed)), False).trace for seed in range(5)
    ]
    assert any((trace.columns.unit > limits).any() for trace in traces if trace is not None)


def test_the_plan_pays_for_what_comes_before_it():
    problem = Problem(Loss("logistic"), as_rows(X), CASES[0][2])
    before = GaussianEvent(9.0, purpose="categories", leak=1e-6)
    plan = plan_fit(problem.facts, 1.0, 1e-4, Choices(steps=10), [before])
    assert before in plan.privacy.events
    assert PrivacyPlan(plan.privacy.events).epsilon(1e-4) <= 1.0


def test_probabilities_of_a_fit_are_right(monkeypatch):
    """Only with the calibration: bounding gradients stretches margins."""
    n = 8000
    rng = np.random.default_rng(6)
    rows = rng.standard_normal((n, 4)) * [1, 100, 0.01, 5]
    chance = expit(rows @ np.array([1.0, 0.005, -50.0, 0.1]))
    y = np.where(rng.random(n) < chance, 1.0, -1.0)
    problem = Problem(Loss("logistic"), as_rows(rows), y)
    plan, losses = plan_fit(problem.facts, 2.0, 1e-5, Choices(), evaluated=True), {}
    for calibrated in (True, False):
        if not calibrated:
            monkeypatch.setattr("privagrad.linear.fit.calibrate", leave_margins)
        model = run_fit(problem, plan, plan.releases(random_source(0)), False)
        assert model.trace is not None
        assert (model.trace.factor != 1) == calibrated
        margins = rows @ model.coef[0] + model.intercept[0]
        losses[calibrated] = np.logaddexp(0, -y * margins).mean()
    best = -np.where(y > 0, np.log(chance), np.log1p(-chance)).mean()
    assert losses[True] < best + 0.01
    assert losses[False] > losses[True] + 0.02
