"""The accountant against closed forms, concrete worst cases and other accountants."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from scipy.special import log_ndtr, ndtr

from privagrad.privacy.accounting import PrivacyPlan
from privagrad.privacy.composition import (
    Composition,
    _discounted,
    gaussian_delta,
    gaussian_epsilon,
    gaussian_mu,
)
from privagrad.privacy.events import Event, GaussianEvent, ObjectiveEvent, SelectEvent, merged
from privagrad.privacy.privacy_loss import (
    LossGrid,
    Tails,
    _repeats,
    fixed_size_tails,
    on_grid,
    poisson_tails,
)

STEPS = [1, 7, 5000, 10**6]
NOISES = [1, 3.7, 100, 300]
DELTAS = [1e-3, 1e-5, 1e-9, 1e-12, 1e-15]


def exact_delta(epsilon: float, mu: float) -> float:
    """Φ(mu/2 - ε/mu) - e^ε Φ(-mu/2 - ε/mu)."""
    upper = float(log_ndtr(mu / 2 - epsilon / mu))
    return -math.exp(upper) * math.expm1(float(log_ndtr(-mu / 2 - epsilon / mu)) + epsilon - upper)


@pytest.mark.parametrize("delta", DELTAS)
@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("under", ["zero-out", "replace-one"])
def test_releases_over_all_rows_cost_the_closed_form(steps, noise, delta, under):
    """`steps` Gaussians of multiplier z are one of multiplier z/√steps, at every δ."""
    mu = math.sqrt(steps) / noise * (2 if under == "replace-one" else 1)
    event = GaussianEvent(noise, steps, under=under)
    epsilon = PrivacyPlan((event,)).epsilon(delta)
    assert exact_delta(epsilon, mu) <= delta * (1 + 1e-8)
    if epsilon > 0:
        assert exact_delta(epsilon * (1 - 1e-6), mu) > delta
    sampled_fully = GaussianEvent(
        noise, steps, "poisson" if under == "zero-out" else "without_replacement", 50, 50
    )
    assert PrivacyPlan((sampled_fully,)).epsilon(delta) == epsilon


@pytest.mark.parametrize(
    ("steps", "noise", "delta", "least"), [(10**6, 300, 1e-12, 28.46), (5000, 100, 1e-13, 5.212)]
)
def test_many_steps_at_a_small_delta_are_not_under_counted(steps, noise, delta, least):
    assert least <= PrivacyPlan((GaussianEvent(noise, steps),)).epsilon(delta) <= least + 0.01


@given(st.floats(0.0, 60.0), st.floats(1e-4, 30.0))
def test_the_gaussian_profile_is_never_too_small(epsilon, mu):
    found, exact = gaussian_delta(epsilon, mu), exact_delta(epsilon, mu)
    assert found >= exact * (1 - 1e-9) - 1e-17
    assert found <= exact * (1 + 1e-6) + 1e-11


@given(st.floats(1e-3, 60.0), st.sampled_from(DELTAS))
def test_the_largest_gaussian_within_a_budget(epsilon, delta):
    mu = gaussian_mu(epsilon, delta)
    assert gaussian_delta(epsilon, mu) <= delta < gaussian_delta(epsilon, mu * (1 + 1e-6))


def test_no_noise_budget_is_beyond_reach():
    assert gaussian_epsilon(0.0, 1.0) == math.inf
    assert gaussian_epsilon(0.5, 1e-3) == 0.0


@pytest.mark.parametrize("delta", [1e-5, 1e-9, 1e-13])
@pytest.mark.parametrize(("steps", "noise"), [(1, 1.0), (100, 20.0), (10**4, 70.0), (10**6, 300.0)])
def test_the_transform_agrees_with_the_closed_form(steps, noise, delta):
    """Composed on a grid as sampled releases are: above the closed form, and close to it."""
    mu = 1 / noise
    interval = mu / 20
    grid = on_grid(poisson_tails(mu, 1.0, True, 1e-8 * delta / steps), interval)
    composition = Composition([(grid, steps)], interval)
    exact = gaussian_epsilon(delta, mu * math.sqrt(steps))
    epsilon = composition.epsilon(delta)
    assert exact <= epsilon <= 1.003 * exact
    assert delta / 1.2 <= composition.delta(exact * 1.003) <= delta * 1.001


@pytest.mark.parametrize("removed", [True, False])
@pytest.mark.parametrize("delta", [1e-3, 1e-9, 1e-14])
def test_the_transform_agrees_with_sums_of_products(removed, delta):
    """Convolution by multiplying and adding positive numbers keeps every digit of small ones."""
    interval, steps = 0.01, 8
    grid = on_grid(poisson_tails(1.0, 0.2, removed, 1e-25), interval)
    masses = grid.masses
    for _ in range(3):
        masses = np.convolve(masses, masses)
    losses = interval * (steps * grid.first + np.arange(masses.size))

    def direct(epsilon):
        return float(np.maximum(-np.expm1(epsilon - losses), 0) @ masses)

    epsilon = Composition([(grid, steps)], interval).epsilon(delta)
    assert direct(epsilon) <= delta * (1 + 1e-12)
    assert direct(epsilon) >= delta * (1 - 1e-5)
    apart = Composition([(grid, 3), (grid, 1), (grid, 4)], interval)
    assert apart.epsilon(delta) == pytest.approx(epsilon, rel=1e-7)


@pytest.mark.parametrize("count", [1, 10, 1000, 10**6])
def test_the_bound_on_rounding_holds(count):
    """Sums of fair coins are binomial: what is computed differs by less than the bound."""
    coin = LossGrid(0, np.array([0.5, 0.5]), 0.0, 0.0)
    composition = Composition([(coin, count)], 0.1)
    reach = math.ceil(8 * math.sqrt(count)) + 4
    first, size = count // 2 - reach, 2 ** math.ceil(math.log2(2 * reach))
    found, bound = composition._convolved([np.array([0.5, 0.5])], first, size)
    exact = stats.binom(count, 0.5).pmf(np.arange(first, first + size))
    assert 0 < bound < 1e-6 * exact.max()
    # What lies outside of eight deviations is wrapped into the window.
    assert np.abs(found - exact).max() <= bound + 1e-15 * exact.max()


@pytest.mark.parametrize("count", [2, 1000, 10**6])
def test_the_bound_covers_the_worst_error_of_the_transform(count, monkeypatch):
    """A spectrum that is off by what its own bound allows, in the most harmful direction."""
    masses, size = stats.binom(40, 0.5).pmf(np.arange(41)), 2 ** (17 if count > 1000 else 13)
    composition = Composition([(LossGrid(0, masses, 0.0, 0.0), count)], 0.1)
    first = 20 * count - size // 2
    exact, _ = composition._convolved([masses], first, size)
    transform = np.fft.rfft

    def wrong(values):
        spectrum = transform(values)
        weights = np.abs(spectrum) ** (count - 1)
        phases = np.exp(-1j * (count - 1) * np.angle(spectrum))
        allowed = 8 * 2.0**-53 * math.log2(size) * np.linalg.norm(values) * math.sqrt(size / 2)
        return spectrum + 0.9 * allowed * phases * weights / np.linalg.norm(weights)

    monkeypatch.setattr(np.fft, "rfft", wrong)
    found, bound = composition._convolved([masses], first, size)
    moved = np.abs(found - exact).max()
    assert bound / 4 < moved <= bound


@pytest.mark.parametrize("delta", [1e-4, 1e-9])
def test_errors_within_the_bound_do_not_lower_epsilon(delta, monkeypatch):
    interval, steps = 0.01, 50
    grid = on_grid(poisson_tails(1.0, 0.1, True, 1e-25), interval)
    composition = Composition([(grid, steps)], interval)
    right = composition.epsilon(delta)
    convolved = Composition._convolved

    def too_small(self, *arguments):
        found, _ = convolved(self, *arguments)
        bound = 0.01 * found.max()
        return found - bound, bound

    monkeypatch.setattr(Composition, "_convolved", too_small)
    assert composition.epsilon(delta) >= right * (1 - 1e-12)
    assert composition.delta(right) >= delta * (1 - 1e-6)


@pytest.mark.parametrize("outside", [0.9, 0.5, 0.2, 0.05, 1e-3])
@pytest.mark.parametrize("steps", [20, 37, 60, 100])
def test_losses_outside_of_the_window_count(outside, steps, monkeypatch):
    """Through a window that is too narrow epsilon is larger, never smaller."""
    mu = 0.2
    grid = on_grid(poisson_tails(mu, 1.0, True, 1e-25), 0.01)
    monkeypatch.setattr("privagrad.privacy.composition._OUTSIDE", outside)
    for delta in (1e-3, 1e-8):
        exact = gaussian_epsilon(delta, mu * math.sqrt(steps))
        assert Composition([(grid, steps)], 0.01).epsilon(delta) >= exact
        assert Composition([(grid, steps)], 0.01).delta(exact) >= delta * (1 - 1e-9)


def test_what_lies_above_the_window_is_bounded_and_paid_from_delta(monkeypatch):
    mu, steps, interval = 0.2, 60, 0.01
    composition = Composition(
        [(on_grid(poisson_tails(mu, 1.0, True, 1e-25), interval), steps)], interval
    )
    half = composition.epsilon(1e-6)
    window_at, total = composition._window, mu * math.sqrt(steps)
    window = window_at(2.0)
    top = (window.first + window.deltas.size - 1) * interval
    assert window.above >= ndtr(total / 2 - top / total)
    monkeypatch.setattr(composition, "_window", lambda tilt: replace(window_at(tilt), above=1e-6))
    assert composition.epsilon(2e-6) == pytest.approx(half, rel=1e-6)
    assert composition.delta(half) == pytest.approx(2e-6, rel=1e-4)


def test_infinite_losses_are_paid_from_delta():
    interval, count = 0.01, 10
    grid = on_grid(poisson_tails(1.0, 0.1, True, 1e-25), interval)
    plain = Composition([(grid, count)], interval)
    leaking = Composition([(replace(grid, certain=1e-7), count)], interval)
    assert leaking.epsilon(3e-6) == pytest.approx(plain.epsilon(2e-6), rel=1e-6)
    assert leaking.epsilon(0.9e-6) == math.inf
    assert leaking.delta(2.0) == pytest.approx(plain.delta(2.0) + 1e-6, rel=1e-6)


@pytest.mark.parametrize("tail", [1e-2, 1e-6])
def test_losses_that_are_left_out_count_as_infinite(tail):
    mu, interval = 1.0, 0.01
    grid = on_grid(poisson_tails(mu, 1.0, True, tail), interval)
    top = interval * (grid.first + grid.masses.size - 1)
    assert grid.certain >= ndtr(mu / 2 - top / mu) * (1 - 1e-9) > 0.9 * tail
    for epsilon in (top - 0.5, top, top + 0.1):
        assert Composition([(grid, 1)], interval).delta(epsilon) >= exact_delta(epsilon, mu)
    event = GaussianEvent(1.0, 1, "with_replacement", 40, 40)
    assert fixed_size_tails(event, tail).certain == _repeats(40, 40, tail)[2] > 0


@pytest.mark.parametrize("epsilon", [-0.05, 0.0, 0.3, 5.0, 60.0])
def test_delta_is_found_wherever_epsilon_lies(epsilon):
    """Inside, below and beyond the losses that are possible."""
    interval = 0.01
    grid = on_grid(poisson_tails(1.0, 0.3, True, 1e-25), interval)
    upper, lower = poisson_tails(1.0, 0.3, True, 1e-25).of(np.array([epsilon]))
    exact = float(upper[0] - math.exp(epsilon) * lower[0])
    found = Composition([(grid, 1)], interval).delta(epsilon)
    assert exact - 1e-12 <= found <= 1.001 * exact + 1e-12


SAMPLED = [
    (100, 1, 0.1, 1e-5), (1000, 2, 0.014, 1e-5), (1000, 2, 0.014, 1e-8), (10**4, 1.5, 0.01, 1e-6),
    (10**5, 4, 0.01, 1e-7), (10**5, 1, 1e-3, 1e-12), (10**6, 5, 0.01, 1e-12),
    (50, 0.6, 0.02, 1e-12),
]  # fmt: skip


def poisson(steps: int, noise: float, rate: float) -> GaussianEvent:
    return GaussianEvent(noise, steps, "poisson", 10**6, round(rate * 10**6))


@pytest.mark.parametrize(("steps", "noise", "rate", "delta"), SAMPLED)
def test_sampled_releases_cost_at_most_the_renyi_bound(steps, noise, rate, delta):
    from dp_accounting import NeighboringRelation, dp_event
    from dp_accounting.rdp import RdpAccountant

    one = dp_event.PoissonSampledDpEvent(rate, dp_event.GaussianDpEvent(float(noise)))
    accountant = RdpAccountant(neighboring_relation=NeighboringRelation.REPLACE_SPECIAL)
    renyi = accountant.compose(one, steps).get_epsilon(delta)
    epsilon = PrivacyPlan((poisson(steps, noise, rate),)).epsilon(delta)
    assert 0.7 * renyi < epsilon < renyi


@pytest.mark.parametrize(("steps", "noise", "rate", "delta"), SAMPLED[:3])
def test_sampled_releases_cost_at_least_the_optimistic_estimate(steps, noise, rate, delta):
    from dp_accounting.pld import privacy_loss_distribution as pld

    one = pld.from_gaussian_mechanism(
        float(noise), sampling_prob=rate, pessimistic_estimate=False, use_connect_dots=False,
        value_discretization_interval=5e-5,
    )  # fmt: skip
    least = one.self_compose(steps).get_epsilon_for_delta(delta)
    epsilon = PrivacyPlan((poisson(steps, noise, rate),)).epsilon(delta)
    assert 0.9 * epsilon < least <= epsilon


@pytest.mark.parametrize(
    ("steps", "noise", "rate", "delta"), [case for case in SAMPLED if case[0] <= 1000]
)
def test_sampled_releases_cost_at_least_losses_rounded_down(steps, noise, rate, delta):
    """The same tails with every loss lowered to the grid, at any δ."""
    interval = rate / noise / 200
    tails = poisson_tails(1 / noise, rate, True, 1e-8 * delta / steps)
    numbers = np.arange(math.floor(tails.low / interval), math.ceil(tails.high / interval) + 1)
    above, _ = tails.of(interval * numbers)
    lowered = replace(on_grid(tails, interval), masses=np.append(-np.diff(above), 0), certain=0.0)
    least = Composition([(lowered, steps)], interval).epsilon(delta)
    epsilon = PrivacyPlan((poisson(steps, noise, rate),)).epsilon(delta)
    assert 0.85 * epsilon < least <= epsilon


@pytest.mark.parametrize(("steps", "noise", "rate", "delta"), SAMPLED[4:7])
def test_a_finer_grid_finds_hardly_less(steps, noise, rate, delta):
    """Coarser grids only add to epsilon, and a little."""
    deviation = rate * math.sqrt(math.expm1(noise**-2))
    tails = poisson_tails(1 / noise, rate, True, 1e-8 * delta / steps)
    coarse, fine = (
        Composition([(on_grid(tails, interval), steps)], interval).epsilon(delta)
        for interval in (deviation / 8, deviation / 32)
    )
    assert fine < coarse < 1.01 * fine


@pytest.mark.parametrize("sampling", ["without_replacement", "with_replacement"])
@pytest.mark.parametrize(("steps", "noise", "rate", "delta"), SAMPLED[:4])
def test_fixed_sizes_cost_at_least_a_concrete_worst_case(steps, noise, rate, delta, sampling):
    """All rows are -1 but one, which is +1 or -1: at least a Poisson sample with 2 for 1."""
    event = replace(poisson(steps, 2 * noise, rate), sampling=sampling)
    worst = PrivacyPlan((poisson(steps, noise, rate),)).epsilon(delta)
    bound = PrivacyPlan((event,)).epsilon(delta)
    assert worst < bound
    if sampling == "without_replacement":
        assert bound < 2 * worst


def two_sided_tails(mu: float, rate: float) -> Tails:
    """All rows are 0 but one, which is +1 or -1: (1 - q) N(0, 1) + q N(±mu, 1)."""

    def loss_at(x):
        up, down = (np.log(rate) + sign * mu * x - mu * mu / 2 for sign in (1, -1))
        return np.logaddexp(np.log1p(-rate), up) - np.logaddexp(np.log1p(-rate), down)

    def of(losses):
        low, high = np.full_like(losses, -40.0), np.full_like(losses, 40.0)
        for _ in range(70):
            middle = (low + high) / 2
            below = loss_at(middle) < losses
            low, high = np.where(below, middle, low), np.where(below, high, middle)
        nothing = (1 - rate) * ndtr(-low)
        return nothing + rate * ndtr(mu - low), nothing + rate * ndtr(-mu - low)

    return Tails(of, float(loss_at(-9.0)), float(loss_at(12.0 + mu)))


@pytest.mark.parametrize(("noise", "rate"), [(0.5, 0.1), (1.0, 0.01), (2.0, 0.3), (8.0, 0.02)])
def test_the_fixed_size_pair_dominates_concrete_tables(noise, rate):
    """δ(ε) of one step lies above those of three pairs of tables, at negative ε as well."""
    event = GaussianEvent(noise, 1, "without_replacement", 1000, round(1000 * rate))
    epsilons = np.concatenate([-np.geomspace(1e-3, 4, 60), [0.0], np.geomspace(1e-3, 6, 60)])

    def profile(tails):
        upper, lower = tails.of(epsilons)
        return upper - np.exp(epsilons) * lower

    bound = profile(fixed_size_tails(event, 1e-25))
    for tails in (
        poisson_tails(2 / noise, rate, True, 1e-25),
        poisson_tails(2 / noise, rate, False, 1e-25),
        two_sided_tails(1 / noise, rate),
    ):
        assert np.all(bound >= profile(tails) - 1e-14)


@pytest.mark.parametrize(("steps", "noise", "rate", "delta"), SAMPLED[:7])
def test_fixed_sizes_cost_at_least_what_a_change_of_sign_costs(steps, noise, rate, delta):
    event = replace(poisson(steps, noise, rate), sampling="without_replacement")
    interval = 2 * rate * math.sqrt(math.expm1(noise**-2)) / 20
    grid = on_grid(two_sided_tails(1 / noise, rate), interval)
    concrete = Composition([(grid, steps)], interval).epsilon(delta)
    assert concrete < PrivacyPlan((event,)).epsilon(delta)


ZERO_OUT: list[Event] = [
    GaussianEvent(8.0, purpose="moments"),
    GaussianEvent(9, leak=1e-8, purpose="categories"),
    GaussianEvent(5.0, 2, under="zero-out"),
    GaussianEvent(1.5, 3, "poisson", 1000, 20),
    GaussianEvent(2.0, 1, "poisson", 1000, 1000),
    ObjectiveEvent(6.0, 0.01),
]
REPLACE_ONE: list[Event] = [
    GaussianEvent(12.0),
    GaussianEvent(20.0, 2, under="replace-one"),
    GaussianEvent(3.0, 2, "with_replacement", 1000, 5),
    GaussianEvent(2.0, 3, "without_replacement", 1000, 5),
    GaussianEvent(30.0, 1, "without_replacement", 40, 40),
]
SELECTED: list[Event] = [
    GaussianEvent(8.0),
    GaussianEvent(2.0, 4, "poisson", 1000, 10),
    SelectEvent((GaussianEvent(30.0, 2), GaussianEvent(4.0, 5, "poisson", 1000, 10)), 5.0),
    SelectEvent((GaussianEvent(40.0),), 10.0, count=2),
]


@pytest.mark.parametrize("event", ZERO_OUT + REPLACE_ONE + SELECTED, ids=str)
def test_a_count_costs_as_much_as_that_many_events(event):
    times = 7
    many = replace(event, count=times * event.count)
    apart = tuple(replace(event, purpose=f"{event.purpose} {i}") for i in range(times))
    together = PrivacyPlan((many,)).epsilon(1e-6)
    assert together == pytest.approx(PrivacyPlan(apart).epsilon(1e-6), rel=1e-9)
    assert together > 1.5 * PrivacyPlan((event,)).epsilon(1e-6)
    assert PrivacyPlan((many,)).delta(1.0) == pytest.approx(PrivacyPlan(apart).delta(1.0), rel=1e-7)


@settings(max_examples=30, deadline=None)
@given(
    st.one_of(
        [
            st.lists(st.sampled_from(kinds), min_size=1, max_size=7)
            for kinds in (ZERO_OUT, REPLACE_ONE, SELECTED)
        ]
    )
)
def test_merged_events_cost_as_much_as_separate_ones(events):
    fewer = merged(events)
    assert len({replace(event, count=1) for event in fewer}) == len(fewer)
    assert sum(event.count for event in fewer) == sum(event.count for event in events)
    apart = PrivacyPlan(tuple(events)).epsilon(1e-6)
    assert PrivacyPlan(fewer).epsilon(1e-6) == pytest.approx(apart, rel=1e-9)


def test_fifty_searches_cost_fifty_searches():
    search = SelectEvent((GaussianEvent(30.0, 10), GaussianEvent(50.0)), 10.0)
    apart = PrivacyPlan((search,) * 50).epsilon(1e-5)
    assert apart > 5 * PrivacyPlan((search,)).epsilon(1e-5)
    assert PrivacyPlan(merged([search] * 50)).epsilon(1e-5) == pytest.approx(apart, rel=1e-12)


def test_a_selection_under_replace_one_is_refused():
    doubled = SelectEvent((GaussianEvent(30.0, under="replace-one"),), 5.0)
    with pytest.raises(ValueError, match="under zero-out, beside a selection"):
        PrivacyPlan((doubled,)).epsilon(1e-5)


def test_releases_over_all_rows_compose_with_sampled_ones():
    """Nothing is forgotten: more than each, less than the sum, and the order does not matter."""
    sampled, query = poisson(1000, 2.0, 0.014), GaussianEvent(5.0, 2)
    alone = [PrivacyPlan((event,)).epsilon(1e-6) for event in (sampled, query)]
    both = PrivacyPlan((sampled, query)).epsilon(1e-6)
    assert 1.1 * max(alone) < both < sum(alone)
    assert PrivacyPlan((query, sampled)).epsilon(1e-6) == pytest.approx(both, rel=1e-9)


@pytest.mark.parametrize("interval", [1e-4, 0.05, 1.0, 30.0])
def test_discounted_sums(interval):
    """Σ_{j ≥ i} p_j e^{-(j - i) h} by its recursion, for probabilities of all sizes."""
    masses = np.exp(np.random.default_rng(0).uniform(-300, 0, 3000))
    sums, last = np.empty_like(masses), 0.0
    for i in range(masses.size - 1, -1, -1):
        last = sums[i] = masses[i] + math.exp(-interval) * last
    assert _discounted(masses, interval) == pytest.approx(sums, rel=1e-12)


@pytest.mark.parametrize(("n", "draws"), [(1, 1), (2, 2), (40, 4), (1000, 1000), (10**6, 300)])
@pytest.mark.parametrize("tail", [1e-3, 1e-9, 1e-25])
def test_repeats_of_a_row_are_binomial(n, draws, tail):
    counts, weights, rest = _repeats(n, draws, tail)
    law = stats.binom(draws, 1 / n)
    assert weights == pytest.approx(law.pmf(counts), rel=1e-9)
    assert law.sf(counts[-1]) * (1 - 1e-9) <= rest <= tail
