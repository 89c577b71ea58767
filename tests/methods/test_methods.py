"""What every method must satisfy: one more row for each new one."""

import numpy as np
import pytest

import privagrad as pg
from privagrad.experiments.problems import absolute_regression
from privagrad.glm.gradients import GlmGradients
from privagrad.glm.rows import as_rows
from privagrad.methods import METHODS, Setting
from privagrad.methods.adagrad import DPAdaGrad
from privagrad.methods.adam import Adam
from privagrad.methods.oracle import GradientOracle
from privagrad.methods.pagan import PAGAN
from privagrad.methods.sgd import DPSGD
from privagrad.privacy.events import training_event
from privagrad.privacy.noise import random_source
from privagrad.privacy.releases import Releases
from privagrad.privacy.sampling import Batches

PRIVATE = [name for name, method in METHODS.items() if method.shape != "none"]
# The non-private method each private one becomes at epsilon = inf, where there is one.
PLAIN = {
    "dp-sgd": "sgd", "dp-adagrad": "adagrad", "pagan": "adagrad", "dp-adam": "adam",
    "dp-adambc": "adam", "scale-then-privatize": Adam(square_memory=0.99),
}  # fmt: skip
PUBLIC = absolute_regression(n=60, dim=12, seed=9)[:2]


def run(method, **changes):
    X, y, sigma = absolute_regression(n=300, dim=12)
    arguments = {
        "method": method,
        "epsilon": 1.0 if method in PRIVATE else None,
        "ellipsoid": pg.Ellipsoid(sigma ** (-4 / 3), 2.0),
        "domain": pg.Box(-1, 1),
        "batch_size": 20,
        "steps": 60,
        "step_size": 0.2,
        "random_state": 0,
        "delta": 1e-4,
        "public": PUBLIC,
    }
    return pg.minimize("absolute", X, y, **{**arguments, **changes})


@pytest.mark.parametrize("method", METHODS)
def test_a_seed_repeats_the_run(method):
    first, second, other = run(method), run(method), run(method, random_state=1)
    assert np.array_equal(first.last, second.last)
    assert not np.array_equal(first.last, other.last)
    assert first.privacy.seeded


@pytest.mark.parametrize("method", PRIVATE)
def test_without_privacy_it_is_the_plain_method_to_the_last_bit(method):
    unprivate = run(method, epsilon=float("inf"))
    assert unprivate.privacy.epsilon == float("inf")
    assert unprivate.privacy.events == ()
    assert unprivate.diagnostics.clipped == 0
    # No noise: the ellipsoid's shape and the noise's seed leave no trace.
    again = run(method, epsilon=float("inf"), ellipsoid=pg.Ellipsoid.ball(12, 2.0))
    assert np.array_equal(unprivate.last, again.last)
    if method in PLAIN:
        plain = run(PLAIN[method])
        for iterate in ("x", "last", "average", "suffix_average"):
            assert np.array_equal(getattr(unprivate, iterate), getattr(plain, iterate))


@pytest.mark.parametrize("method", PRIVATE)
def test_the_report_composes_everything_that_was_released(method):
    result = run(method)
    report = result.privacy
    assert report.epsilon <= 1.0
    assert report.epsilon == pg.PrivacyPlan(report.events).epsilon(report.delta)
    if METHODS[method].one_shot:
        assert report.events[-1].count == report.events[-1].rate == 1
    else:
        assert [event.count for event in report.events] == [60]
        assert report.events[0].rate == 20 / 300


@pytest.mark.parametrize("method", METHODS)
def test_every_iterate_stays_in_the_domain(method):
    inside = []
    run(
        method,
        domain=pg.Box(-0.3, 0.2),
        callback=lambda _, x: inside.append(x.min() >= -0.3 and x.max() <= 0.2),
    )
    assert len(inside) == (1 if METHODS[method].one_shot else 60)
    assert all(inside)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "domain", [pg.WholeSpace(), pg.L2Ball(1.0), pg.L1Ball(1.0), pg.Simplex()], ids=repr
)
def test_any_domain_will_do(method, domain):
    result = run(method, domain=domain)
    assert np.isfinite(result.last).all()
    assert domain.project(result.last) == pytest.approx(result.last, abs=1e-9)


@pytest.mark.parametrize("method", METHODS)
def test_rows_that_are_not_finite_are_counted_and_do_no_harm(method):
    X, y, _ = absolute_regression(n=300, dim=12)
    X[::10, 3] = np.nan
    X[5::10, 3] = np.inf
    for epsilon in (2.0, float("inf")) if method in PRIVATE else (None,):
        result = pg.minimize(
            "absolute", X, y, method=method, epsilon=epsilon, ellipsoid=pg.Ellipsoid.ball(12, 1.0),
            domain=pg.Box(-1, 1), batch_size=30, steps=30, step_size=0.1, delta=1e-4, public=PUBLIC,
        )  # fmt: skip
        assert np.isfinite(result.last).all()
        assert result.diagnostics.nonfinite > 0


@pytest.mark.parametrize("method", METHODS)
def test_columns_of_zeros_do_no_harm(method):
    X, y, _ = absolute_regression(n=300, dim=12)
    X[:, 4] = 0.0
    for domain in (pg.Box(-1, 1), pg.L2Ball(1.0)):
        result = pg.minimize(
            "absolute", X, y, method=method, epsilon=5.0 if method in PRIVATE else None,
            ellipsoid=pg.Ellipsoid.ball(12, 1.0), domain=domain, batch_size=20, steps=30,
            step_size=0.1, random_state=0, delta=1e-4, public=PUBLIC,
        )  # fmt: skip
        assert np.isfinite(result.last).all()
        if method not in PRIVATE:
            assert result.last[4] == 0.0


def test_a_ball_turns_every_mechanism_into_dp_sgds_bit_for_bit():
    """The same seed draws the same batches and noise: the first private gradients agree."""
    first_steps = {}
    for method in ("dp-sgd", "dp-adagrad", "pasan", "pagan"):
        result = run(
            method,
            ellipsoid=pg.Ellipsoid.ball(12, 0.5),
            domain=pg.WholeSpace(),
            steps=1,
            step_size=1.0,
        )
        first_steps[method] = result.last
    gradient = -first_steps["dp-sgd"]
    assert np.array_equal(first_steps["pasan"], -gradient * (1 / np.sqrt(gradient @ gradient)))
    assert np.array_equal(first_steps["pagan"], -(gradient / np.sqrt(gradient * gradient)))
    assert np.array_equal(
        run("pagan", ellipsoid=pg.Ellipsoid.ball(12, 0.5)).last,
        run("dp-adagrad", ellipsoid=pg.Ellipsoid.ball(12, 0.5)).last,
    )


def test_methods_with_a_ball_take_the_radius_alone():
    shaped = run("dp-adagrad", ellipsoid=pg.Ellipsoid(np.geomspace(1, 9, 12), 0.5))
    assert np.array_equal(shaped.last, run("dp-adagrad", ellipsoid=pg.Ellipsoid.ball(12, 0.5)).last)


def reference(method, gradients, x, alpha):
    """Algorithms 1 and 2 of the paper, line by line, on given private gradients."""
    history = []
    for g in gradients:
        history.append(g)
        if method == "pasan":
            x = x - alpha / np.sqrt(sum(h @ h for h in history)) * g
            metric = np.ones_like(x)
        else:
            metric = np.sqrt(np.diag(sum(np.outer(h, h) for h in history))) / alpha
            x = x - g / metric
        x = pg.L2Ball(0.8).project(x, metric)
        yield x


@pytest.mark.parametrize("method", ["pasan", "pagan"])
def test_steps_follow_the_papers_algorithms(method):
    rng = np.random.default_rng(0)
    gradients = rng.standard_normal((25, 6)) * np.geomspace(1, 1e-3, 6)
    rule, x, domain = METHODS[method], np.zeros(6), pg.L2Ball(0.8)
    state = rule.start(Setting(6, Batches(25, 1, 25), domain))
    for g, expected in zip(gradients, reference(method, gradients, x.copy(), 0.3), strict=True):
        metric = rule.step(state, x, g.copy(), 0.3)
        domain.project_into(x, x, metric)
        assert x == pytest.approx(expected, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("kind", [DPAdaGrad, PAGAN])
def test_a_head_start_is_a_part_of_the_noise_to_come(kind):
    """x₁ = x₀ - α g/sqrt(h T s² + g²), s the noise of one step: radius/sqrt(scale) · z/b."""
    rule = kind(head_start=0.25)
    ellipsoid = pg.Ellipsoid(np.array([1.0, 4.0, 100.0]), 2.0)
    batches = Batches(100, 8, 50)
    plan = pg.PrivacyPlan((training_event(batches, 1.5),))
    setting = Setting(3, batches, pg.WholeSpace(), plan, ellipsoid)
    g, x = np.array([0.3, -2.0, 0.0]), np.ones(3)
    noise = 1.5 / 8 * np.array([2.0, 1.0, 0.2])
    state = rule.start(setting)
    metric = rule.step(state, x, g, 0.7)
    root = np.sqrt(0.25 * 50 * noise**2 + g**2)
    assert x == pytest.approx(1 - 0.7 * g / root)
    assert metric == pytest.approx(root / 0.7)
    rule.step(state, x, g, 0.7)
    later = np.sqrt(0.25 * 50 * noise**2 + 2 * g**2)
    assert x == pytest.approx(1 - 0.7 * g / root - 0.7 * g / later)


@pytest.mark.parametrize("kind", [DPAdaGrad, PAGAN])
def test_without_noise_a_head_start_is_none(kind):
    ahead = run(kind(head_start=0.5), epsilon=float("inf"))
    assert np.array_equal(ahead.last, run(kind.name, epsilon=float("inf")).last)
    private = run(kind(head_start=0.5), epsilon=1.0)
    assert not np.array_equal(private.last, run(kind.name).last)


class _Careless(DPSGD):
    """Asks for gradients without saying what to bound them to."""

    name = "careless"

    def gradient(self, state, oracle, x, batch):
        return oracle.bounded(x, batch, None)


class _Greedy(DPSGD):
    """Averages two noisy gradients of one batch, of which the plan knows one."""

    name = "greedy"

    def gradient(self, state, oracle, x, batch):
        first = oracle.bounded(x, batch, state.setting.ellipsoid).copy()
        return (first + oracle.bounded(x, batch, state.setting.ellipsoid)) / 2


def test_a_method_cannot_release_a_batch_twice():
    with pytest.raises(ValueError, match="one private release a batch"):
        run(_Greedy(), epsilon=1.0)


class _Sly(DPSGD):
    """Asks twice, the second time for a copy of the batch."""

    name = "sly"

    def gradient(self, state, oracle, x, batch):
        oracle.bounded(x, batch, state.setting.ellipsoid)
        return oracle.bounded(x, batch.copy(), state.setting.ellipsoid)


def test_a_method_cannot_release_more_than_the_plan():
    with pytest.raises(RuntimeError, match="beyond those of the plan"):
        run(_Sly(), epsilon=1.0)


def test_a_method_cannot_get_plain_gradients_of_a_private_run():
    with pytest.raises(ValueError, match="bound private gradients"):
        run(_Careless(), epsilon=1.0)


def test_zero_over_zero_is_zero():
    for method in (METHODS[name] for name in ("adagrad", "pasan", "pagan")):
        x = np.ones(3)
        state = method.start(Setting(3, Batches(1, 1, 1), pg.WholeSpace()))
        method.step(state, x, np.zeros(3), 0.5)
        assert x.tolist() == [1.0, 1.0, 1.0]


class _Boastful(DPSGD):
    """Claims to see fewer rows than the loop draws."""

    name = "boastful"

    def training(self, batches, epsilon):
        return training_event(Batches(10**6, 1, batches.steps))


def test_a_method_cannot_plan_other_releases_than_the_loop_makes():
    with pytest.raises(ValueError, match="charged for what the loop draws"):
        run(_Boastful(), epsilon=1.0)


def test_an_oracle_takes_noise_and_counts_from_one_plan():
    batches = Batches(10, 2, 3)
    planned, other = (pg.PrivacyPlan((training_event(batches, z),)) for z in (1.0, 2.0))
    setting = Setting(2, batches, pg.WholeSpace(), planned)
    gradients = GlmGradients.of(pg.Loss("linear"), as_rows(np.ones((10, 2))), None)
    with pytest.raises(ValueError, match="Expected the plan of the setting"):
        GradientOracle(gradients, setting, Releases(other, random_source(0)), None)
