"""`minimize(correlation=)` from end to end: its noise, what a row moves, its rule, its refusals."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

import privagrad as pg
from privagrad._internal.validate import Vector
from privagrad.experiments.problems import absolute_regression
from privagrad.methods import METHODS, Setting
from privagrad.methods.oracle import GradientOracle
from privagrad.privacy.accounting import PrivacyPlan
from privagrad.privacy.bands import choices, choose_bands, predicted_error, with_bands
from privagrad.privacy.correlation import MOST_BANDS, coefficients_of, inverse_of, spread_of
from privagrad.privacy.events import GaussianEvent, training_event
from privagrad.privacy.noise import random_source
from privagrad.privacy.releases import Releases
from privagrad.privacy.sampling import Batches
from tests.statistics import FALSE_ALARM, assert_scale, rate_accepted

X, Y, SIGMA = absolute_regression(n=200, dim=8)
USUAL: dict[str, Any] = {
    "method": "pagan", "epsilon": 1.0, "delta": 1e-4,
    "ellipsoid": pg.Ellipsoid(SIGMA ** (-4 / 3), 2.0), "domain": pg.Box(-1, 1), "batch_size": 14,
    "steps": 40, "step_size": 0.2,
}  # fmt: skip


def usual(table: Any = X, y: Any = Y, **changes: Any) -> Any:
    return pg.minimize("absolute", table, y, **{**USUAL, **changes})


def gradients_of(rows: Vector, z_of: Any = None, **changes: Any) -> tuple[Any, Vector]:
    """The result of plain SGD on the linear loss, and all its private gradients."""
    found: list[Vector] = []
    before = np.zeros(rows.shape[1])

    def difference(_: int, x: Vector) -> None:
        found.append(before - x)
        np.copyto(before, x)

    options: dict[str, Any] = {
        "method": "dp-sgd", "epsilon": 2.0, "delta": 1e-4, "step_size": 1.0, "callback": difference,
        "ellipsoid": pg.Ellipsoid.ball(rows.shape[1], 0.3),
    }  # fmt: skip
    result = pg.minimize("linear", rows, **{**options, **changes})
    return result, np.array(found)


@pytest.mark.parametrize("noise", ["gaussian", "discrete"])
def test_the_noise_of_a_run_is_what_its_report_says(noise: Any) -> None:
    """Rows of zeros: C times the private gradients is white noise of z |c| B over the batch."""
    bands, steps, batch = 4, 141, 5
    result, noisy = gradients_of(
        np.zeros((60, 50)), batch_size=batch, steps=steps, correlation=bands, noise=noise
    )
    (event,) = result.privacy.events
    assert (event.count, event.bands, event.sampling) == (144, 4, "cyclic_poisson")
    assert event.rate == 4 * 5 / 60
    z, c = event.noise_multiplier, coefficients_of(bands)
    alone = PrivacyPlan.calibrate(2.0, 1e-4, 60, bands * batch, 144 // bands)
    assert z == pytest.approx(alone.noise_multiplier, rel=1e-6)
    white = np.array([np.convolve(series, c)[:steps] for series in noisy.T])
    assert_scale(white, z * math.hypot(*c) * 0.3 / batch)
    assert_scale(white[:, 1:] + white[:, :-1], math.sqrt(2) * z * math.hypot(*c) * 0.3 / batch)
    assert_scale(noisy[50:], z * spread_of(bands) * 0.3 / batch)


@pytest.mark.parametrize("row", [0, 10])
def test_a_row_is_as_visible_as_the_event_says(row: int) -> None:
    """One row is not zero: its blocks are (1 - r) N(0, 1) + r N(1/z, 1), of the event's r and z."""
    bands, steps, batch, n = 3, 12_000, 2, 11
    rows = np.zeros((n, 1))
    rows[row] = 1e6
    result, noisy = gradients_of(
        rows, epsilon=1000.0, delta=1e-3, batch_size=batch, steps=steps, correlation=bands
    )
    (event,) = result.privacy.events
    z, c = event.noise_multiplier, np.array(coefficients_of(bands))
    first = row % bands
    white = np.convolve(noisy[:, 0] / 0.3 * batch, c)[:steps]
    blocks = white[first : first + (steps - first) // bands * bands].reshape(-1, bands)
    seen = blocks @ c / (c @ c) / z

    def law(x: Any, rate: float, noise: float = 1.0) -> Any:
        with_row = stats.norm.cdf(x, loc=1 / z, scale=noise)
        return (1 - rate) * stats.norm.cdf(x, scale=noise) + rate * with_row

    assert stats.kstest(seen, lambda x: law(x, event.rate)).pvalue > FALSE_ALARM
    assert stats.kstest(seen, lambda x: law(x, batch / n)).pvalue < FALSE_ALARM
    assert stats.kstest(seen, lambda x: law(x, event.rate, 2 / 3)).pvalue < FALSE_ALARM


def test_rows_take_turns() -> None:
    result = usual(steps=400, correlation=5)
    event = result.privacy.events[-1]
    assert rate_accepted(result.diagnostics.examples, 400 * 40, event.rate)
    assert not rate_accepted(result.diagnostics.examples, 400 * 40, event.rate / 5)


def test_without_bands_it_is_todays_run_to_the_last_bit() -> None:
    plain = usual(random_state=3)
    for correlation in (None, 1):
        same = usual(random_state=3, correlation=correlation)
        assert np.array_equal(same.average, plain.average)
        assert same.privacy == plain.privacy
        assert "cyclic" not in str(same.privacy)
    other = usual(random_state=3, correlation=2)
    assert other.privacy.sampling == "cyclic_poisson"
    assert other.privacy.epsilon <= 1.0
    assert not np.array_equal(other.average, plain.average)


def test_a_run_stopped_by_its_callback_costs_its_whole_plan() -> None:
    stopped = usual(correlation=4, callback=lambda k, _: k == 9)
    assert stopped.privacy == usual(correlation=4).privacy


def test_rows_in_files_give_the_same_run(tmp_path: Path) -> None:
    """Partitions draw their own part of every group."""
    stored = np.memmap(tmp_path / "X", X.dtype, mode="w+", shape=X.shape)
    stored[:] = X
    for correlation in (3, "auto"):
        here = usual(random_state=1, correlation=correlation)
        there = usual(stored, random_state=1, correlation=correlation)
        assert np.array_equal(here.last, there.last)
        assert here.privacy == there.privacy


def test_auto_is_for_methods_that_add_gradients_up() -> None:
    """PAGAN divides by squares, which correlated noise makes larger: measured, it does worse."""
    options: dict[str, Any] = {"correlation": "auto", "epsilon": 50.0, "steps": 60}
    assert usual(**options).privacy.sampling == "poisson"
    plain = usual(method="dp-sgd", **options)
    assert plain.privacy.sampling == "cyclic_poisson"
    assert plain.privacy.epsilon <= 50.0


def test_a_learned_ellipsoid_is_one_for_the_whole_run() -> None:
    result = usual(ellipsoid=None, correlation=2, epsilon=4.0)
    assert len(result.privacy.events) == 3
    assert result.privacy.epsilon <= 4.0
    assert np.isfinite(result.x).all()


@pytest.mark.parametrize(
    ("batches", "epsilon"),
    [
        (Batches(5000, 70, 1000), 1.0),
        (Batches(5000, 70, 300), 8.0),
        (Batches(1000, 500, 100), 2.0),
        (Batches(1000, 1000, 30), 2.0),
        (Batches(300, 5, 1), 1.0),
        (Batches(60_000, 1000, 600), 8.0),
    ],
)
@pytest.mark.parametrize("schedule", ["constant", "linear"])
def test_auto_is_never_worse_than_independent_noise_by_its_own_measure(
    batches: Batches, epsilon: float, schedule: str
) -> None:
    steps = batches.steps
    sizes = np.ones(steps) if schedule == "constant" else 1 - np.arange(steps) / steps
    found = choices(batches, epsilon, 1e-6, sizes)
    bands = choose_bands("auto", batches, epsilon, 1e-6, sizes)
    errors = {choice.bands: choice.error for choice in found}
    assert found[0].bands == 1
    assert errors[bands] == min(errors.values()) <= errors[1]
    plain = PrivacyPlan.calibrate(
        epsilon, 1e-6, batches.n_examples, batches.batch_size, batches.steps
    )
    assert found[0].noise_multiplier == plain.noise_multiplier
    event = training_event(with_bands(batches, bands))
    assert PrivacyPlan.calibrate_event(event, epsilon, 1e-6).epsilon(1e-6) <= epsilon


def test_auto_takes_several_bands_where_amplification_is_weak() -> None:
    assert choose_bands("auto", Batches(60_000, 1000, 600), 8.0, 1e-5) > 4
    assert choose_bands("auto", Batches(5000, 70, 5000), 1.0, 1e-5) == 1
    assert choose_bands(None, Batches(60_000, 1000, 600), 8.0, 1e-5) == 1
    assert choose_bands(7, Batches(60_000, 1000, 600), 8.0, 1e-5) == 7


@pytest.mark.parametrize("bands", [1, 2, 6])
@pytest.mark.parametrize("steps", [1, 5, 40])
def test_the_predicted_error_is_that_of_sums_of_steps(bands: int, steps: int) -> None:
    rng = np.random.default_rng(0)
    sizes, c = rng.uniform(0.1, 1, steps), coefficients_of(bands)
    below = (h * np.eye(steps, k=-k) for k, h in enumerate(inverse_of(c, steps)))
    inverse = np.asarray(sum(below))
    noise = 1.7 * math.hypot(*c) * inverse @ rng.standard_normal((steps, 100_000))
    sums = np.cumsum(sizes[:, None] * noise, axis=0)
    measured = math.sqrt(np.square(sums).mean())
    assert predicted_error(c, 1.7, sizes) == pytest.approx(measured, rel=0.02)


def test_columns_between_are_interpolated() -> None:
    steps, c = 3000, coefficients_of(4)
    sizes = 1 - np.arange(steps) / steps
    inverse = inverse_of(c, steps)
    square = sum(np.square(np.cumsum(sizes[u:] * inverse[: steps - u])).sum() for u in range(steps))
    exact = 2.0 * math.hypot(*c) * math.sqrt(square / steps)
    assert predicted_error(c, 2.0, sizes) == pytest.approx(exact, rel=1e-3)


def the_usual_ellipsoid(_: Any) -> pg.Ellipsoid:
    ellipsoid: pg.Ellipsoid = USUAL["ellipsoid"]
    return ellipsoid


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sampling": "without_replacement"}, "poisson"),
        ({"sampling": "random_allocation"}, "poisson"),
        ({"groups": np.arange(200) // 2}, "groups"),
        ({"method": "output-perturbation", "ellipsoid": None}, "one sum of gradients"),
        ({"method": "objective-perturbation", "ellipsoid": None}, "one sum of gradients"),
        ({"method": "pagan-history"}, "one sum of gradients"),
        ({"method": "adaclip"}, "one sum of gradients"),
        ({"ellipsoid": the_usual_ellipsoid}, "function"),
        ({"epsilon": math.inf}, "without noise"),
        ({"method": "adagrad", "epsilon": None}, "without noise"),
        ({"batch_size": 120}, "fewer bands"),
        ({"correlation": MOST_BANDS + 1}, "bands"),
        ({"correlation": "best"}, "auto"),
        ({"correlation": 0}, "correlation"),
        ({"correlation": 2.5}, "correlation"),
        ({"correlation": True}, "correlation"),
        ({"sampling": "cyclic_poisson", "correlation": None}, "sampling"),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else value,
)
def test_what_is_not_known_to_be_sound_is_refused(changes: dict[str, Any], message: str) -> None:
    assert METHODS
    with pytest.raises((TypeError, ValueError), match=message):
        usual(**{"correlation": 2, **changes})


def test_methods_of_their_own_cannot_ask_for_other_releases() -> None:
    """One history is of one sum in one ellipsoid."""
    batches = Batches(200, 10, 8, "cyclic_poisson", 2)
    plan = PrivacyPlan((training_event(batches, 2.0),))
    ball = pg.Ellipsoid.ball(8, 1.0)
    setting = Setting(8, batches, pg.WholeSpace(), plan, ball)
    problem = _Zeros()
    oracle = GradientOracle(problem, setting, Releases(plan, random_source(0)), None)  # type: ignore[arg-type]
    rows = np.arange(3)
    with pytest.raises(ValueError, match="another one"):
        oracle.bounded(np.zeros(8), rows, pg.Ellipsoid.ball(8, 2.0))
    with pytest.raises(ValueError, match="other vectors"):
        oracle.private_mean_of(np.zeros(8), rows.copy(), lambda g: g, 8)
    assert oracle.bounded(np.zeros(8), rows.copy(), ball).shape == (8,)


class _Zeros:
    n_examples, dim = 200, 8

    def slack(self, batch_size: float) -> float:
        return 0.0

    def add_bounded(self, *_: Any) -> None:
        pass

    def per_example(self, x: Vector, batch: Any) -> Vector:
        return np.zeros((len(batch), 8))


def test_the_event_of_a_run_counts_as_one_gaussian_event() -> None:
    event = usual(correlation=3).privacy.events[-1]
    assert isinstance(event, GaussianEvent)
    assert event.count == 42
    assert str(event).endswith("correlated over 3 in a row")
