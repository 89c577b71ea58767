"""Methods that divide by moments, or filter: Adam and its private forms, AdaDPS, DP² and DiSK."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

import privagrad as pg
from privagrad.experiments.problems import absolute_regression
from privagrad.methods._widths import ellipsoid_of, widths_of
from privagrad.methods.adadps import AdaDPS
from privagrad.methods.adam import Adam, DPAdam, DPAdamBC
from privagrad.methods.disk import DiSK
from privagrad.methods.dp2 import DP2
from privagrad.methods.oracle import GradientOracle
from privagrad.methods.scale_then_privatize import ScaleThenPrivatize
from tests.methods.test_baselines import NO_ROWS, GivenGradients, public_rows, run, setting
from tests.statistics import assert_scale

PRIVATE = [DPAdam(), DPAdamBC(), ScaleThenPrivatize(), AdaDPS(), DP2(delay=5), DiSK()]
named = pytest.mark.parametrize("method", PRIVATE, ids=lambda method: method.name)


class Recorded(GivenGradients):
    """An oracle that gives what a test says was released, and keeps what it was asked."""

    def __init__(self, gradient):
        self.gradient = gradient
        self.ellipsoids, self.points = [], []

    def bounded(self, x, batch, ellipsoid):
        self.ellipsoids.append(ellipsoid)
        self.points.append(x.copy())
        released = self.gradient(x) if callable(self.gradient) else self.gradient
        return np.array(released, dtype=float)


def steps_of(method, gradients, alpha, **given):
    """The points, and the oracle, of a method that is given these private gradients."""
    dim = len(gradients[0])
    state, x, oracle = method.start(setting(dim, **given)), np.zeros(dim), Recorded(None)
    points = []
    for gradient in gradients:
        oracle.gradient = gradient
        method.step(state, x, method.gradient(state, oracle, x, NO_ROWS), alpha)
        points.append(x.copy())
    return points, oracle


@named
def test_the_loss_falls_under_privacy(method):
    X, y, _ = absolute_regression(n=1000, dim=20)
    found = run(method, step_size=0.05, schedule="linear").last
    assert np.abs(X @ found - y).mean() < np.abs(y).mean() / 2


@named
def test_an_empty_batch_is_a_step_of_noise(method):
    X, y, _ = absolute_regression(n=50, dim=20)
    result = pg.minimize(
        "absolute", X, y, method=method, epsilon=1.0, ellipsoid=pg.Ellipsoid.ball(20, 1.0),
        domain=pg.Box(-1, 1), batch_size=1, steps=20, step_size=0.1, random_state=0,
        public=absolute_regression(n=30, dim=20, seed=77)[:2],
    )  # fmt: skip
    assert result.diagnostics.examples < 60
    assert np.isfinite(result.last).all()


@named
def test_the_noise_has_the_shape_of_the_steps_ellipsoid_and_the_scale_of_the_plan(
    method, monkeypatch
):
    """Rows of zeros: all that is released is noise."""
    released, real = [], GradientOracle.bounded

    def watched(self, x, batch, ellipsoid):
        gradient = real(self, x, batch, ellipsoid)
        released.append(gradient * self.setting.batches.expected_size / ellipsoid.noise_std)
        return gradient

    monkeypatch.setattr(GradientOracle, "bounded", watched)
    result = pg.minimize(
        "linear", np.zeros((1000, 100)), method=method, epsilon=1.0, delta=1e-6, batch_size=50,
        steps=20, step_size=1.0, ellipsoid=pg.Ellipsoid.ball(100, 3.0),
        public=(np.diag(np.geomspace(1, 1e-3, 100)), None),
    )  # fmt: skip
    [event] = result.privacy.events
    assert isinstance(event, pg.GaussianEvent)
    assert event.count == len(released) == 20
    assert_scale(np.array(released), event.noise_multiplier)


@named
def test_every_step_has_the_total_noise_of_the_ball(method):
    """So that a radius means the same in all of them."""
    rng = np.random.default_rng(0)
    gradients = rng.standard_normal((30, 8)) * np.geomspace(1, 1e-3, 8)
    rows = public_rows(np.diag(np.geomspace(1, 1e-3, 8)))
    _, oracle = steps_of(method, gradients, 0.1, radius=2.0, batch_size=5, public=rows)
    for ellipsoid in oracle.ellipsoids:
        assert np.square(ellipsoid.noise_std).sum() == pytest.approx(8 * 2.0**2)


@named
def test_the_ellipsoid_depends_on_earlier_releases_alone(method):
    """The ellipsoid of step k is the same whatever is released at step k, and not later."""
    rng = np.random.default_rng(0)
    gradients = rng.standard_normal((12, 4))
    other = gradients.copy()
    other[11] *= -50.0
    rows = public_rows(np.eye(4))
    _, first = steps_of(method, gradients, 0.1, public=rows)
    _, second = steps_of(method, other, 0.1, public=rows)
    for one, two in zip(first.ellipsoids, second.ellipsoids, strict=True):
        assert np.array_equal(one.scale, two.scale)
    if isinstance(method, ScaleThenPrivatize):
        changed = gradients.copy()
        changed[10] *= -50.0
        _, third = steps_of(method, changed, 0.1, public=rows)
        assert not np.array_equal(first.ellipsoids[11].scale, third.ellipsoids[11].scale)


# Widths


@given(
    roots=arrays(float, st.integers(1, 9), elements=st.floats(0, 1)),
    unit=st.sampled_from([1e-140, 1.0, 1e140]),
)
def test_widths_are_the_moments_roots_with_a_mean_square_of_one(roots, unit):
    widths = widths_of((unit * roots) ** 2, 1e-3)
    assert np.mean(widths**2) == pytest.approx(1)
    assert (widths > 0).all()
    size = math.sqrt(np.mean((unit * roots) ** 2))
    if size > 0:
        expected = unit * roots / size + 1e-3
        assert widths == pytest.approx(expected / math.sqrt(np.mean(expected**2)), rel=1e-6)


@pytest.mark.parametrize("moments", [[0.0, 0.0], [math.inf, 1.0], [math.nan, 1.0]])
def test_moments_that_tell_nothing_give_the_ball(moments):
    assert widths_of(np.array(moments), 0.01).tolist() == [1.0, 1.0]


def test_a_gradient_in_the_widths_proportions_keeps_its_norm():
    moments = np.geomspace(1e-6, 10, 7)
    ellipsoid = ellipsoid_of(widths_of(moments, 1e-12), 0.7)
    assert ellipsoid.norm(np.sqrt(moments)) == pytest.approx(math.sqrt(moments.sum()))


# Adam


def textbook_adam(gradients, alpha, first, second, floor=0.0, noise=0.0):
    """Algorithm 1 of Kingma and Ba; with `noise` the denominator of DP-AdamBC."""
    x = m = v = np.zeros(len(gradients[0]))
    for k, g in enumerate(gradients, start=1):
        m, v = first * m + (1 - first) * g, second * v + (1 - second) * g**2
        moment = np.maximum(v / (1 - second**k) - noise, floor * noise)
        x = x - alpha * (m / (1 - first**k)) / (np.sqrt(moment) + 1e-8)
        yield x


@pytest.mark.parametrize("kind", [Adam, DPAdam])
def test_steps_follow_adam(kind):
    gradients = np.random.default_rng(0).standard_normal((30, 5)) * np.geomspace(1, 1e-3, 5)
    points, _ = steps_of(kind(0.8, 0.95), gradients, 0.3)
    for x, expected in zip(points, textbook_adam(gradients, 0.3, 0.8, 0.95), strict=True):
        assert x == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_adams_metric_is_that_of_its_step():
    """Where nothing was remembered, x moves by g in the metric."""
    method, x = Adam(0.0, 0.0), np.zeros(3)
    gradient = np.array([2.0, -0.5, 0.0])
    state = method.start(setting(3))
    metric = method.step(state, x, gradient, 0.1)
    assert metric * x == pytest.approx(-gradient)


def test_dp_adambc_takes_away_the_variance_of_the_noise_and_no_more():
    """(z · radius/batch_size)², in every coordinate alike."""
    gradients = np.random.default_rng(0).standard_normal((30, 5)) * np.geomspace(2, 0.1, 5)
    method = DPAdamBC(0.9, 0.9, floor=0.2)
    points, _ = steps_of(method, gradients, 0.3, batch_size=5, noise=1.5, radius=2.0)
    noise = (1.5 * 2.0 / 5) ** 2
    reference = textbook_adam(gradients, 0.3, 0.9, 0.9, 0.2, noise)
    for x, expected in zip(points, reference, strict=True):
        assert x == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_dp_adambc_sees_the_gradients_own_second_moment():
    rng, noise = np.random.default_rng(0), 1.5 * 2.0 / 5
    true = np.array([0.0, 0.5, 1.0])
    gradients = true + noise * rng.standard_normal((20_000, 3))
    method = DPAdamBC(0.0, 0.9999, floor=1e-9)
    state, x = method.start(setting(3, batch_size=5, noise=1.5, radius=2.0)), np.zeros(3)
    for gradient in gradients:
        method.step(state, x, gradient, 0.1)
    # Some 9,000 effective steps of variance 2 s⁴ + 4 s² g²: six deviations.
    error = 6 * np.sqrt((2 * noise**4 + 4 * noise**2 * true**2) / 9000)
    assert (np.abs(method.second_moment(state) - true**2) <= error).all()
    assert (6 * error < noise**2 + 36 * error).all()


def test_dp_adambc_must_know_its_noise():
    with pytest.raises(ValueError, match="variance of the noise"):
        run(DPAdamBC(), ellipsoid=lambda released: pg.Ellipsoid.ball(20, 1.0))
    assert np.isfinite(run(DPAdam(), ellipsoid=lambda seen: pg.Ellipsoid.ball(20, 1.0)).last).all()


# Scale-then-privatize


def test_scale_then_privatize_begins_with_the_ball():
    _, oracle = steps_of(ScaleThenPrivatize(), np.ones((1, 6)), 0.1, radius=0.7)
    assert oracle.ellipsoids[0].noise_std == pytest.approx(np.full(6, 0.7))


def test_scale_then_privatize_uses_the_running_moment_that_began_at_the_noise():
    method = ScaleThenPrivatize(square_memory=0.8, floor=0.1)
    gradients = np.random.default_rng(0).standard_normal((10, 4))
    _, oracle = steps_of(method, gradients, 0.1, noise=2.0, batch_size=4, radius=3.0)
    moment = np.full(4, (2.0 * 3.0 / 4) ** 2)
    for ellipsoid, gradient in zip(oracle.ellipsoids, gradients, strict=True):
        roots = np.sqrt(moment)
        widths = roots + 0.1 * math.sqrt(np.mean(roots**2))
        widths /= math.sqrt(np.mean(widths**2))
        assert ellipsoid.noise_std == pytest.approx(3.0 * widths)
        moment = 0.8 * moment + 0.2 * gradient**2


def test_scale_then_privatize_learns_the_gradients_shape_under_noise():
    """Noise in proportion to √v adds the same part everywhere, so that v becomes that of g."""
    rng, true = np.random.default_rng(0), np.geomspace(1, 0.03, 6)
    method, x = ScaleThenPrivatize(square_memory=0.995, floor=1e-6), np.zeros(6)
    state = method.start(setting(6, batch_size=2, noise=1.0, radius=0.6))
    for _ in range(6000):
        noise = 0.5 * method.ellipsoid_at(state).noise_std
        method.step(state, x, true + noise * rng.standard_normal(6), 0.1)
    learned = method.ellipsoid_at(state).noise_std
    assert learned / learned[0] == pytest.approx(true, rel=0.25)


# AdaDPS


def test_adadps_scales_by_the_public_moments():
    rows = np.random.default_rng(0).standard_normal((40, 4)) * np.array([3.0, 1.0, 0.1, 0.01])
    moments = np.mean(rows**2, axis=0)
    roots, gradient = np.sqrt(moments), np.array([1.0, -2.0, 3.0, 4.0])
    points, oracle = steps_of(AdaDPS(floor=1e-9), [gradient], 0.2, public=public_rows(rows))
    [ellipsoid] = oracle.ellipsoids
    assert ellipsoid.noise_std == pytest.approx(roots / math.sqrt(moments.mean()))
    assert points[0] == pytest.approx(-0.2 * gradient / roots)


def test_adadps_is_the_same_in_other_units_of_the_columns():
    """The steps of constant gradients do not depend on the units of their coordinates."""
    rng = np.random.default_rng(0)
    X, public = rng.standard_normal((300, 5)), rng.standard_normal((40, 5))
    found = []
    for units in (np.ones(5), np.geomspace(100, 0.01, 5)):
        size = math.sqrt(np.mean((public * units) ** 2))
        found.append(
            pg.minimize(
                "linear", X * units, method=AdaDPS(floor=1e-12), epsilon=1.0, delta=1e-5, steps=20,
                batch_size=30, step_size=0.1, random_state=0, public=(public * units, None),
                ellipsoid=pg.Ellipsoid.ball(5, 1.5 * size),
            ).last
        )  # fmt: skip
    assert found[0] == pytest.approx(found[1], rel=1e-4, abs=1e-5)


def test_adadps_looks_at_public_rows_once_an_epoch():
    """Public gradients of the huber loss turn with the point."""
    rng = np.random.default_rng(0)
    X, looks = rng.standard_normal((30, 3)), []

    class Watched(AdaDPS):
        def _look(self, state, x):
            looks.append(state.steps)
            super()._look(state, x)

    pg.minimize(
        "huber", X, X[:, 0], method=Watched(), epsilon=5.0, delta=1e-3, batch_size=10, steps=8,
        step_size=0.1, ellipsoid=pg.Ellipsoid.ball(3, 1.0), public=(X, X[:, 0]), random_state=0,
    )  # fmt: skip
    assert looks == [0, 3, 6]


def test_adadps_without_public_gradients_is_dp_sgd():
    nothing = (np.zeros((3, 20)), np.zeros(3))
    assert np.array_equal(run(AdaDPS(), public=nothing).last, run("dp-sgd").last)


# DP²


def textbook_dp2(gradients, alpha, delay, memory):
    """Algorithm 1 of Li et al. with widths of mean square 1; also what divides each step."""
    x, v, total = np.zeros(4), np.zeros(4), np.zeros(4)
    for k, g in enumerate(gradients):
        if k // delay % 2 == 0:
            widths, total = np.ones(4), total + g
        else:
            widths = np.sqrt(v) / math.sqrt(v.mean())
        x = x - alpha * g / widths
        yield x, widths
        if k % (2 * delay) == delay - 1:
            v, total = memory * v + (1 - memory) * (total / delay) ** 2, np.zeros(4)


def test_steps_follow_dp2():
    gradients = np.random.default_rng(0).standard_normal((29, 4)) * np.array([1, 0.5, 0.1, 0.02])
    method = DP2(delay=3, square_memory=0.7, floor=1e-12)
    points, oracle = steps_of(method, gradients, 0.3, radius=2.0)
    reference = list(textbook_dp2(gradients, 0.3, 3, 0.7))
    for x, ellipsoid, (expected, widths) in zip(points, oracle.ellipsoids, reference, strict=True):
        assert x == pytest.approx(expected, rel=1e-9)
        assert ellipsoid.noise_std == pytest.approx(2.0 * widths)


def test_dp2_is_dp_sgd_before_its_first_preconditioner():
    assert np.array_equal(run(DP2(delay=200)).last, run("dp-sgd").last)
    assert not np.array_equal(run(DP2(delay=199)).last, run("dp-sgd").last)


def test_dp2s_delay_is_half_an_epoch():
    assert DP2().start(setting(3)).delay == 5
    assert run(DP2()).last == pytest.approx(run(DP2(delay=10)).last)


# DiSK


def test_disk_with_all_of_the_gradient_is_dp_sgd():
    assert np.array_equal(run(DiSK(gain=1.0)).last, run("dp-sgd").last)


@pytest.mark.parametrize("gain", [0.1, 0.7])
def test_disk_does_not_lag_on_a_quadratic(gain):
    """Where gradients are linear in x the estimate is the gradient at x, to the last step."""
    matrix = np.diag([1.0, 0.3, 0.01]) + 0.05
    method, oracle = DiSK(gain=gain), Recorded(lambda x: matrix @ (x - 1.0))
    state, x = method.start(setting(3)), np.zeros(3)
    for _ in range(40):
        estimate = method.gradient(state, oracle, x, NO_ROWS)
        assert estimate == pytest.approx(matrix @ (x - 1.0), rel=1e-9, abs=1e-12)
        method.step(state, x, estimate, 0.5)


def test_disk_averages_the_noise():
    """In the long run the variance is that of the noise times κ/(2 - κ)."""
    rng, seen = np.random.default_rng(0), []
    method, oracle = DiSK(gain=0.2), Recorded(lambda x: rng.standard_normal(50))
    state, x = method.start(setting(50)), np.zeros(50)
    for k in range(2000):
        estimate = method.gradient(state, oracle, x, NO_ROWS)
        if k >= 100 and k % 40 == 0:  # 0.8⁴⁰ is nothing: these are independent
            seen.append(estimate)
    assert_scale(np.array(seen), math.sqrt(0.2 / 1.8))


def test_disk_looks_ahead_within_the_domain():
    box, method, x = pg.Box(-1, 1), DiSK(gain=0.5), np.zeros(2)
    oracle = Recorded(lambda x: np.array([-1.0, 0.2]))
    state = method.start(setting(2, domain=box))
    for _ in range(5):
        method.step(state, x, method.gradient(state, oracle, x, NO_ROWS), 0.4)
        box.project_into(x, x, None)
    assert oracle.points[1] == pytest.approx([0.8, -0.16])
    assert all(np.abs(point).max() <= 1 for point in oracle.points)
    assert oracle.points[2][0] == 1


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        (Adam, {"mean_memory": 1.0}),
        (Adam, {"square_memory": -0.1}),
        (Adam, {"eps": 0.0}),
        (DPAdamBC, {"floor": 0.0}),
        (ScaleThenPrivatize, {"floor": -1.0}),
        (AdaDPS, {"floor": 0.0}),
        (DP2, {"delay": 0}),
        (DP2, {"square_memory": 1.0}),
        (DP2, {"step_ratio": 0.0}),
        (DiSK, {"gain": 1.5}),
    ],
)
def test_settings_that_make_no_sense_are_refused(kind, wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        kind(**wrong)
