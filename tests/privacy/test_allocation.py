"""Random allocation: the bound on an epoch's privacy loss, and the events that use it."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from decimal import Decimal, getcontext
from typing import Any

import numpy as np
import pytest
from scipy.optimize import brentq
from scipy.special import ndtr

from privagrad._internal.validate import Vector
from privagrad.privacy import codec
from privagrad.privacy.accounting import PrivacyPlan
from privagrad.privacy.allocation import (
    LARGEST_MU,
    Ratio,
    _mean,
    _one_step,
    _splits,
    likelihood_ratio,
)
from privagrad.privacy.composition import gaussian_delta, gaussian_epsilon
from privagrad.privacy.events import (
    GaussianEvent,
    SelectEvent,
    merged,
    releases_per_draw,
    single,
    training_event,
)
from privagrad.privacy.filters import epsilon_of_runs
from privagrad.privacy.ledger import Ledger
from privagrad.privacy.privacy_loss import Atoms, allocation_atoms, on_grid
from privagrad.privacy.report_codec import report_as_json, report_from_json
from privagrad.privacy.sampling import Batches
from privagrad.privacy.totals import Total

ERRORS = 5
"""Standard errors: a normal estimate is off by more, to one side, with probability 3e-7."""
WAYS = pytest.mark.parametrize("removed", [True, False], ids=["with row", "without row"])


def profile(losses: Any, epsilon: float) -> float:
    """δ(ε) = E[(1 - e^{ε - L})⁺] of discrete losses."""
    if not isinstance(losses, Atoms):
        raise TypeError(losses)
    parts = -np.expm1(np.minimum(epsilon - losses.losses, 0.0))
    return float(losses.masses @ parts) + losses.certain


def delta(mu: float, steps: int, removed: bool, epsilon: float) -> float:
    return profile(allocation_atoms(mu, steps, removed, 1e-20), epsilon)


def call(strike: Vector | float, mu: float) -> Vector:
    """E[(Y - k)⁺] of Y = exp(mu g - mu²/2), for any k."""
    with np.errstate(divide="ignore", invalid="ignore"):
        place = -np.log(np.maximum(strike, 0.0)) / mu + mu / 2
    found = ndtr(place) - strike * ndtr(place - mu)
    return np.where(np.asarray(strike) > 0, found, 1.0 - strike)


def of_two_steps(mu: float, epsilon: float) -> tuple[float, float]:
    """δ(ε) for t = 2 in both directions: the mean over g of an option's price, by Simpson's rule.

    E[(1 - e^ε R)⁺] = 1 - e^ε + e^ε E[(R - e^{-ε})⁺] would cancel: it is a put, priced as such.
    """
    g = np.linspace(-15.0, 15.0 + mu, 40_001)
    weights = np.full(g.size, 2.0)
    weights[1::2], weights[0], weights[-1] = 4.0, 1.0, 1.0
    weights *= (g[1] - g[0]) / 3 * np.exp(-g * g / 2) / math.sqrt(2 * math.pi)
    other = np.exp(mu * g - mu * mu / 2)
    strike = 2 * math.exp(-epsilon) - other
    place = np.log(np.maximum(strike, 1e-300)) / mu
    put = np.where(strike > 0, strike * ndtr(place + mu / 2) - ndtr(place - mu / 2), 0.0)
    calls = call(2 * math.exp(epsilon) - other, mu)
    return float(weights @ calls) / 2, math.exp(epsilon) * float(weights @ put) / 2


@WAYS
@pytest.mark.parametrize("mu", [0.05, 0.5, 1.0, 2.0, 4.0])
def test_two_steps_agree_with_numerical_integration(mu: float, removed: bool) -> None:
    for spread in (0.0, 0.5, 1.0, 2.0, 3.0):
        epsilon = spread * mu
        exact = of_two_steps(mu, epsilon)[0 if removed else 1]
        assert exact > 1e-12
        found = delta(mu, 2, removed, epsilon)
        assert exact * (1 - 1e-7) <= found <= exact * (1 + 2e-2)


def test_tiny_probabilities_are_accurate_relative_to_themselves() -> None:
    for removed, epsilon in ((True, 8.0), (False, 5.8)):
        exact = of_two_steps(1.0, epsilon)[0 if removed else 1]
        assert 1e-19 < exact < 1e-14
        losses = allocation_atoms(1.0, 2, removed, 1e-26)
        assert exact * (1 - 1e-6) <= profile(losses, epsilon) <= 1.02 * exact


@WAYS
@pytest.mark.parametrize("mu", [1e-4, 0.1, 1.0, 5.0])
def test_one_step_is_a_gaussian_release(mu: float, removed: bool) -> None:
    for spread in (0.0, 1.0, 3.0, 6.0):
        exact = gaussian_delta(spread * mu, mu)
        found = delta(mu, 1, removed, spread * mu)
        assert exact * (1 - 1e-7) <= found <= exact * (1 + 1e-2)


def test_an_epoch_of_one_step_costs_what_all_rows_cost() -> None:
    shape = ("random_allocation", 7, 6)
    (allocated, full) = (GaussianEvent(3.0, 11, *shape), GaussianEvent(3.0, 11))  # type: ignore[arg-type]
    assert releases_per_draw(allocated) == 1
    assert allocated.rate == 1.0
    assert PrivacyPlan((allocated,)).epsilon(1e-6) == PrivacyPlan((full,)).epsilon(1e-6)


@pytest.mark.parametrize("steps", [2, 3, 7, 64, 100, 1000, 12_345, 10**6])
@pytest.mark.parametrize("mu", [1e-3, 0.3, 1.0, 2.0])
def test_moments_of_the_ratio_are_those_of_a_mean_of_lognormals(mu: float, steps: int) -> None:
    """E_Q[R²] = 1 + (e^{μ²} - 1)/t, which is also its Rényi divergence of order 2 (Feldman and
    Shenfeld 2025), and E_Q[(R - 1)³] = (e^{3 μ²} - 3 e^{μ²} + 2)/t²."""
    ratio = likelihood_ratio(mu, steps, 1e-20)
    assert ratio.masses.sum() == pytest.approx(1.0, abs=1e-5)
    assert ratio.masses @ np.exp(ratio.logs) == pytest.approx(1.0, abs=1e-5)
    second = ratio.masses @ np.expm1(ratio.logs) ** 2
    exact = math.expm1(mu * mu) / steps
    assert exact * (1 - 1e-5) <= second <= exact * (1 + 2e-3)
    if mu >= 0.3:
        third = ratio.masses @ np.expm1(ratio.logs) ** 3
        x = math.expm1(mu * mu)
        exact = (x**3 + 3 * x**2) / steps**2
        assert exact * (1 - 1e-3) <= third <= exact * (1 + 3e-2)


def with_row_simulated(mu: float, steps: int, epsilon: float, runs: int) -> tuple[float, float]:
    """δ(ε) = E_Q[(R - e^ε)⁺] and its standard error (Asmussen and Kroese 2006).

    The largest Y_i is integrated out: with k = t e^ε - Σ of the others and m the largest of them,
    it contributes E[(Y - k); Y > max(k, m)]. The others' normals are shifted by what makes the
    likeliest way to a ratio of e^ε.
    """

    def shift(own: float) -> float:
        missing = steps * math.exp(epsilon) - math.exp(mu * own - mu * mu / 2)
        return max(math.log(max(missing, 1e-9) / (steps - 1)) / mu, 0.0)

    trials = np.linspace(0.0, 12.0, 600)
    own = min(trials, key=lambda x: x * x - 2 * mu * x + (steps - 1) * shift(float(x)) ** 2)
    moved = shift(float(own))
    rng = np.random.default_rng(steps)
    parts = np.empty(runs)
    for start in range(0, runs, 2**13):
        g = moved + rng.standard_normal((min(2**13, runs - start), steps - 1))
        others = np.exp(mu * g - mu * mu / 2)
        weights = np.exp(-moved * g.sum(axis=1) + (steps - 1) * moved**2 / 2)
        strike = steps * math.exp(epsilon) - others.sum(axis=1)
        place = np.log(np.maximum(strike, others.max(axis=1))) / mu
        parts[start : start + len(g)] = weights * (
            ndtr(mu / 2 - place) - strike * ndtr(-mu / 2 - place)
        )
    return float(parts.mean()), float(parts.std() / math.sqrt(runs))


def without_row_simulated(mu: float, steps: int, epsilon: float, runs: int) -> tuple[float, float]:
    """δ(ε) = E_Q[(1 - e^ε R)⁺] and its standard error, by exponential tilting.

    The Y_i are drawn with density proportional to e^{-θ y}, θ so that they are e^{-ε} on average;
    by inversion on a grid of 20,000 normals.
    """
    g = np.linspace(-12.0, 12.0, 20_001)
    values = np.exp(mu * g - mu * mu / 2)

    def tilted(tilt: float) -> Vector:
        return np.asarray(np.exp(-g * g / 2 - tilt * (values - 1)))

    def excess(tilt: float) -> float:
        masses = tilted(tilt)
        return float(masses @ values / masses.sum()) - math.exp(-epsilon)

    tilt = float(brentq(excess, 0.0, 100.0))
    masses = tilted(tilt)
    log_factor = math.log(masses.sum() / tilted(0.0).sum())
    sums = np.cumsum(masses) / masses.sum()
    rng = np.random.default_rng(steps)
    places = np.searchsorted(sums, rng.random((runs, steps)))
    total = values[places].sum(axis=1)
    failed = np.maximum(1 - math.exp(epsilon) * total / steps, 0.0)
    parts = failed * np.exp(tilt * (total - steps) + steps * log_factor)
    return float(parts.mean()), float(parts.std() / math.sqrt(runs))


def simulated(mu: float, steps: int, removed: bool, epsilon: float) -> tuple[float, float]:
    one_way = with_row_simulated if removed else without_row_simulated
    return one_way(mu, steps, epsilon, max(2**20 // steps, 2**15))


CASES = [
    (0.5, 10, 0.1), (0.5, 10, 0.6), (1.0, 5, 1.0), (1.0, 10, 1.4), (2.0, 10, 2.0), (2.0, 10, 3.5),
    (1.0, 100, 0.1), (1.0, 100, 0.3), (2.0, 100, 0.8), (2.0, 100, 1.3), (0.2, 100, 0.08),
]  # fmt: skip


@WAYS
@pytest.mark.parametrize(("mu", "steps", "epsilon"), CASES)
def test_an_epoch_agrees_with_simulation(
    mu: float, steps: int, epsilon: float, removed: bool
) -> None:
    """Probability of a false alarm: below 6e-7 for each of 22 cases."""
    found, error = simulated(mu, steps, removed, epsilon)
    assert error < 0.02 * found, "the simulation must see the tail it speaks of"
    bound = delta(mu, steps, removed, epsilon)
    assert found - ERRORS * error <= bound <= 1.02 * found + ERRORS * error
    assert delta(mu * 3 / 2, steps, removed, epsilon) > 1.02 * found + ERRORS * error
    assert delta(mu * 2 / 3, steps, removed, epsilon) < found - ERRORS * error


@pytest.mark.parametrize(("mu", "steps", "epsilon"), [(2.0, 10, 3.0), (1.0, 100, 0.3)])
def test_the_direction_with_the_row_costs_more(mu: float, steps: int, epsilon: float) -> None:
    larger, error = simulated(mu, steps, True, epsilon)
    smaller, _ = simulated(mu, steps, False, epsilon)
    assert larger - ERRORS * error > 1.2 * smaller
    event = GaussianEvent(1 / mu, steps, "random_allocation", steps, 1)
    assert PrivacyPlan((event,)).delta(epsilon) >= larger - ERRORS * error


@WAYS
@pytest.mark.parametrize(("mu", "steps", "epochs", "epsilon"), [(0.5, 5, 4, 0.8), (1.0, 8, 3, 1.5)])
def test_epochs_compose(mu: float, steps: int, epochs: int, epsilon: float, removed: bool) -> None:
    """Probability of a false alarm: below 3e-7 for each of the four cases, to each side."""
    rng, runs = np.random.default_rng(7), 400_000
    losses = np.zeros(runs)
    for _ in range(epochs):
        g = rng.standard_normal((runs, steps))
        g[:, 0] += mu if removed else 0.0
        losses += np.log(np.exp(mu * g - mu * mu / 2).mean(axis=1)) * (1 if removed else -1)
    parts = np.maximum(0.0, -np.expm1(epsilon - losses))
    found, error = float(parts.mean()), float(parts.std() / math.sqrt(runs))
    assert error < 0.05 * found

    def bound(epochs: int) -> float:
        event = GaussianEvent(1 / mu, epochs * steps, "random_allocation", steps, 1)
        total = Total.of((event,), "zero-out", 1e-10, fine=True)
        with_row, without_row = total.sampled
        assert total.deltas(np.array([epsilon]))[0] >= without_row.delta(epsilon)
        return (with_row if removed else without_row).delta(epsilon)

    assert found - ERRORS * error <= bound(epochs) <= 1.02 * found + ERRORS * error
    assert bound(epochs - 1) < found - ERRORS * error


def test_an_epoch_composes_with_a_query() -> None:
    """Probability of a false alarm: below 6e-7."""
    mu, steps, other, epsilon, runs = 1.0, 6, 0.7, 1.5, 400_000
    rng = np.random.default_rng(8)
    g = rng.standard_normal((runs, steps))
    g[:, 0] += mu
    losses = np.log(np.exp(mu * g - mu * mu / 2).mean(axis=1))
    losses += other * rng.standard_normal(runs) + other * other / 2
    parts = np.maximum(0.0, -np.expm1(epsilon - losses))
    found, error = float(parts.mean()), float(parts.std() / math.sqrt(runs))
    events = GaussianEvent(1 / mu, steps, "random_allocation", steps, 1), GaussianEvent(1 / other)
    bound = PrivacyPlan(events).delta(epsilon)
    assert found - ERRORS * error <= bound <= 1.02 * found + ERRORS * error


@pytest.mark.parametrize(("noise", "steps", "epochs"), [(30.0, 50, 1000), (20.0, 500, 2000)])
def test_many_epochs_of_much_noise_are_one_gaussian_release(
    noise: float, steps: int, epochs: int
) -> None:
    """The loss of an epoch is about normal, of variance (e^{1/z²} - 1)/t."""
    event = GaussianEvent(noise, epochs * steps, "random_allocation", steps, 1)
    mu = math.sqrt(epochs * math.expm1(noise**-2) / steps)
    expected = gaussian_epsilon(1e-6, mu)
    assert PrivacyPlan((event,)).epsilon(1e-6) == pytest.approx(expected, rel=5e-3)


@pytest.mark.parametrize(
    ("noise", "steps", "epochs", "low", "high"),
    [(1.0, 1000, 100, 0.97, 1.0), (2.0, 1000, 100, 0.99, 1.01), (0.5, 100, 1, 0.4, 0.9)],
)
def test_it_costs_about_as_much_as_poisson_samples_or_less(
    noise: float, steps: int, epochs: int, low: float, high: float
) -> None:
    allocated = GaussianEvent(noise, epochs * steps, "random_allocation", steps, 1)
    poisson = replace(allocated, sampling="poisson")
    cost, other = (PrivacyPlan((event,)).epsilon(1e-6) for event in (allocated, poisson))
    assert low * other <= cost <= high * other


@pytest.mark.parametrize(("mu", "steps"), [(0.5, 20), (1.0, 100), (2.0, 30)])
def test_known_bounds_hold(mu: float, steps: int) -> None:
    """Whoever knows the row's step sees one Gaussian release, and more steps hide the row better.

    Without the row, -log R ≤ μ²/2 - (μ/t) Σ g_i by Jensen's inequality: a Gaussian release of
    μ/√t, shifted by (1 - 1/t) μ²/2 (Feldman and Shenfeld 2025, their bound for "add").
    """
    for epsilon in (0.0, 0.3, 1.0, 2.0):
        for removed in (True, False):
            found = delta(mu, steps, removed, epsilon)
            assert found <= gaussian_delta(epsilon, mu)
            assert delta(mu, 2 * steps, removed, epsilon) <= found + 1e-19
        shifted = epsilon - (1 - 1 / steps) * mu * mu / 2
        known = gaussian_delta(shifted, mu / math.sqrt(steps))
        assert delta(mu, steps, False, epsilon) <= known * (1 + 1e-2) + 1e-19


@WAYS
def test_what_is_left_out_counts(removed: bool) -> None:
    """With a third of the probability cut off, delta is above the exact one everywhere."""
    for tail in (0.3, 1e-2, 1e-4):
        ratio = likelihood_ratio(1.0, 50, tail)
        assert 0 < ratio.lost <= tail
        assert 0 < ratio.lost_with <= tail
        losses = allocation_atoms(1.0, 50, removed, tail)
        for epsilon in (0.0, 0.2, 0.5, 1.0, 3.0):
            exact = delta(1.0, 50, removed, epsilon)
            assert profile(losses, epsilon) >= exact * (1 - 5e-3)
        missing = 1 - likelihood_ratio(1.0, 50, tail).masses.sum()
        assert missing <= ratio.lost * (1 + 1e-9)


def calls(ratio: Ratio, strikes: Vector) -> Vector:
    return np.array([ratio.masses @ np.maximum(np.exp(ratio.logs) - k, 0.0) for k in strikes])


@pytest.mark.parametrize("mu", [0.3, 1.0, 2.5])
def test_one_step_on_the_grid_lies_above_in_convex_order(mu: float) -> None:
    """E[(Ŷ - k)⁺] ≥ E[(Y - k)⁺] for all k with equal means, and hardly above."""
    found = _one_step(mu, 100, 1e-25)
    strikes = np.exp(mu * np.linspace(-5.0, 6.0, 201))
    exact, above = call(strikes, mu), calls(found, strikes)
    assert (above >= exact * (1 - 1e-9)).all()
    assert (above <= exact * (1 + 1e-2)).all()
    assert found.masses @ np.exp(found.logs) == pytest.approx(1.0, rel=1e-11)
    assert (np.diff(above) < 0).all()


@pytest.mark.parametrize("weight", [0.5, 1 / 3, 1 / 101])
@pytest.mark.parametrize(("stride", "finer"), [(1, 1), (1, 2), (4, 1), (4, 2)])
def test_means_of_two_lie_above_in_convex_order(weight: float, stride: int, finer: int) -> None:
    rng = np.random.default_rng(stride + finer)
    h = 0.07
    x = Ratio(np.sort(rng.choice(np.arange(-40, 60), 30, False)), rng.random(30), h, 0.1, 0.2, 0.0)
    y = Ratio(np.arange(-9, 12), rng.random(21), stride * h, 0.1, 0.2, 0.0)
    found = _mean(x, y, weight, h / finer)
    values = (1 - weight) * np.exp(x.logs)[:, None] + weight * np.exp(y.logs)
    masses = x.masses[:, None] * y.masses
    assert (found.masses >= 0).all()
    assert found.masses.sum() == pytest.approx(masses.sum(), rel=1e-9)
    assert found.masses @ np.exp(found.logs) == pytest.approx((masses * values).sum(), rel=1e-9)
    strikes = np.geomspace(values.min() * 0.9, values.max() * 1.1, 301)
    exact = np.array([(masses * np.maximum(values - k, 0.0)).sum() for k in strikes])
    above = calls(found, strikes)
    assert (above >= exact * (1 - 1e-12)).all()
    # One cell moves a value by at most half its width in absolute mean.
    assert (above <= exact + masses.sum() * strikes * h / finer).all()


@pytest.mark.parametrize("weight", [0.5, 1 / 3, 1 / 101])
@pytest.mark.parametrize("spacing", [0.25, 2.0**-12, 2.0**-30])
def test_shares_are_never_too_small(weight: float, spacing: float) -> None:
    """Compared with an evaluation in 60 digits; without slack about half of them are too small."""
    getcontext().prec = 60
    differences = np.concatenate(
        [np.arange(-60, 61), np.geomspace(61, 20 / spacing, 40).astype(int)]
    )
    splits = _splits(differences, weight, spacing, spacing)
    h, w = Decimal(spacing), Decimal(weight)
    for d, lower, upper, below, above in zip(differences.tolist(), *splits, strict=True):
        value = 1 - w + w * (h * d).exp()
        low, high = ((h * int(place)).exp() for place in (lower, upper))
        share = (value - low) / (high - low)
        assert 0 <= share <= 1
        assert Decimal(float(above)) >= share
        assert Decimal(float(below)) >= 1 - share
        assert below + above <= 1 + 1e-12 * (1 + abs(d))


@pytest.mark.parametrize("interval", [1e-3, 0.05, 1.0])
def test_losses_go_to_a_grid_so_that_delta_does_not_fall(interval: float) -> None:
    rng = np.random.default_rng(3)
    losses = np.sort(rng.normal(0.3, 1.0, 500))
    atoms = Atoms(losses, rng.dirichlet(np.ones(500)), 1e-3, 1e-12)
    grid = on_grid(atoms, interval)
    places = interval * (grid.first + np.arange(grid.masses.size, dtype=np.float64))
    coarse = Atoms(places, grid.masses, grid.certain, 0.0)
    for epsilon in np.linspace(-3.0, 4.0, 97):
        fine = profile(atoms, epsilon)
        assert profile(coarse, epsilon) >= fine * (1 - 1e-12)
        assert profile(coarse, epsilon) <= fine + interval
    kept = atoms.masses @ np.exp(-losses)
    assert grid.masses @ np.exp(-places) == pytest.approx(kept, rel=1e-9)
    assert grid.rounding >= atoms.rounding


def test_epochs_of_millions_of_steps_and_hardly_any_noise_have_a_price() -> None:
    def epsilon(noise: float, steps: int) -> float:
        event = GaussianEvent(noise, steps, "random_allocation", steps, 1)
        return PrivacyPlan((event,)).epsilon(1e-6)

    assert 0 < epsilon(1.0, 10**7) < epsilon(0.5, 10**6) < epsilon(0.2, 10**6)
    below = 0.5 / LARGEST_MU
    assert epsilon(below, 100) == pytest.approx(gaussian_epsilon(1e-6, 1 / below), rel=1e-2)
    assert epsilon(1e9, 100) == 0.0


def test_an_event_holds_whole_epochs() -> None:
    event = GaussianEvent(1.0, 71 * 3, "random_allocation", 5000, 70)
    assert event.relation == "zero-out"
    assert releases_per_draw(event) == 71
    assert event.rate == pytest.approx(1 / 71)
    assert single(event).count == 71
    for count in (1, 70, 72):
        with pytest.raises(ValueError, match="Expected whole epochs of 71 steps"):
            replace(event, count=count)
    with pytest.raises(ValueError, match="Expected under='zero-out'"):
        replace(event, under="replace-one")


def test_merged_epochs_cost_what_separate_ones_cost() -> None:
    one = GaussianEvent(1.5, 20, "random_allocation", 200, 10)
    (three,) = merged([one, replace(one, count=40)])
    assert three == replace(one, count=60)
    apart = PrivacyPlan((one, replace(one, count=40, purpose="more"))).epsilon(1e-6)
    assert PrivacyPlan((three,)).epsilon(1e-6) == pytest.approx(apart, rel=1e-9)
    assert apart > 1.2 * PrivacyPlan((one,)).epsilon(1e-6)


def test_an_epoch_that_is_begun_is_charged() -> None:
    for steps, charged in ((1, 71), (71, 71), (72, 142), (1000, 1065)):
        batches = Batches(5000, 70, steps, "random_allocation")
        assert training_event(batches).count == charged
    plan = PrivacyPlan.calibrate(1.0, 1e-5, 5000, 70, 1000, "random_allocation")
    longer = PrivacyPlan.calibrate(1.0, 1e-5, 5000, 70, 1065, "random_allocation")
    assert plan == longer
    assert plan["gradients"].count == 1065


def test_it_is_written_and_read_again() -> None:
    event = GaussianEvent(2.0, 40, "random_allocation", 1000, 50, "gradients")
    assert codec.loads(codec.dumps([event])) == (event,)
    report = PrivacyPlan((event,)).report(1e-6, seeded=False)
    assert report.sampling == "random_allocation"
    assert report_from_json(json.loads(json.dumps(report_as_json(report)))) == report
    assert "random_allocation sampling" in str(report)


def test_what_is_not_known_is_refused() -> None:
    event = GaussianEvent(2.0, 40, "random_allocation", 1000, 50)
    with pytest.raises(ValueError, match="beside a selection"):
        PrivacyPlan((SelectEvent((event,), 5.0),)).epsilon(1e-6)
    with pytest.raises(ValueError, match="one neighbouring relation"):
        PrivacyPlan((event, replace(event, count=1, sampling="without_replacement")))


def test_budgets_charge_it(tmp_path: Any) -> None:
    events = (GaussianEvent(2.0, 40, "random_allocation", 1000, 50),)
    ledger = Ledger(tmp_path / "ledger.db")
    ledger.create("rows", 3.0, 1e-6)
    run = ledger.reserve("rows", events, "")
    ledger.finish(run, events)
    alone = PrivacyPlan(events).epsilon(1e-6)
    assert ledger.account("rows").spent == pytest.approx(alone)
    together = PrivacyPlan((replace(events[0], count=80),)).epsilon(1e-6)
    later = epsilon_of_runs([events], 3.0, 1e-6, events)
    assert together < later < 2 * alone


def test_calibration_meets_the_budget_from_below() -> None:
    for budget in (0.3, 4.0):
        setting = (budget, 1e-6, 10_000, 40, 1000, "random_allocation")
        alone = PrivacyPlan.calibrate(*setting)  # type: ignore[arg-type]
        plan = PrivacyPlan.calibrate(*setting, [GaussianEvent(40.0)])  # type: ignore[arg-type]
        assert 0.9995 * budget <= plan.epsilon(1e-6) <= budget
        assert plan.noise_multiplier > alone.noise_multiplier
