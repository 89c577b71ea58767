from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.sparse import csr_array

import privagrad as pg
from privagrad import moments, theory
from privagrad.experiments.problems import absolute_regression
from privagrad.mechanism import ULP, GaussianSum
from privagrad.noise import random_source
from privagrad.tables import as_rows

ENTRIES = st.one_of(
    st.floats(-10, 10),
    st.sampled_from([0.0, np.nan, np.inf, -np.inf, 1e-300, 1e200, -1e300, 5e-324]),
)


def votes(rows, grid):
    units = np.zeros(rows.shape[1] * moments.OCTAVES)
    moments._vote(*rows.flat, moments.LOWEST, moments.OCTAVES, (1 - 8 * ULP) / grid, units)
    return units


def squares(rows, inverse, bound, grid):
    dim = rows.shape[1]
    units = np.zeros(dim)
    limit = 1 - (dim + 8) * ULP
    moments._add_squares(*rows.flat, inverse, 1 / bound, 1 / grid, limit, units)
    return units


@pytest.mark.parametrize("layout", ["dense", "csr"])
@given(data=st.data())
def test_one_row_moves_both_queries_by_at_most_the_sensitivity(layout, data):
    n, dim = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 5))
    X = data.draw(arrays(float, (n, dim), elements=ENTRIES))
    inverse = 10.0 ** data.draw(arrays(float, dim, elements=st.floats(-6, 6)))
    bound = data.draw(st.floats(0.1, 10))
    make = as_rows if layout == "dense" else lambda table: as_rows(csr_array(table))
    fewer = X.copy()
    fewer[-1] = 0.0
    for query, size in (
        (votes, dim * moments.OCTAVES),
        (lambda rows, grid: squares(rows, inverse, bound, grid), dim),
    ):
        mechanism = GaussianSum(size, 2.0, n)
        moved = query(make(X), mechanism.grid) - query(make(fewer), mechanism.grid)
        assert np.isfinite(moved).all()
        norm = sum(Fraction(v) ** 2 for v in moved.tolist())
        assert norm <= (Fraction(mechanism.sensitivity) / Fraction(mechanism.grid)) ** 2


def test_a_row_uses_its_whole_norm():
    assert np.linalg.norm(votes(as_rows(np.ones((1, 9))), 2.0**-30)) * 2.0**-30 == pytest.approx(1)
    loud = squares(as_rows(np.full((1, 9), 1e6)), np.ones(9), 1.0, 2.0**-30)
    assert np.linalg.norm(loud) * 2.0**-30 == pytest.approx(1)


@pytest.mark.parametrize("sampling", ["poisson", "with_replacement"])
def test_the_queries_have_the_noise_that_the_report_names(sampling, monkeypatch):
    made = []

    class Recorded(GaussianSum):
        def release(self, *arguments):
            made.append((self.dim, self.noise_multiplier, self.batch_size))
            return super().release(*arguments)

    monkeypatch.setattr(moments, "GaussianSum", Recorded)
    X, y, _ = absolute_regression(n=400, dim=6)
    result = pg.minimize(
        "absolute", X, y, epsilon=2.0, delta=1e-4, domain=pg.Box(-1, 1), batch_size=20, steps=10,
        sampling=sampling,
    )  # fmt: skip
    events = result.privacy.events
    assert [event.purpose for event in events] == ["ranges", "second moments", "gradients"]
    assert made == [
        (6 * moments.OCTAVES, events[0].noise_multiplier, 400),
        (6, events[1].noise_multiplier, 400),
    ]
    assert result.privacy.epsilon <= 2.0
    assert result.privacy.epsilon == pg.PrivacyPlan(events).epsilon(1e-4)
    assert pg.PrivacyPlan(events[1:]).epsilon(1e-4) < 0.99 * result.privacy.epsilon


def test_a_part_of_the_budget_costs_its_part_alone():
    for relation in ("add-or-remove-one", "replace-one"):
        first, second = moments.moment_events(1.0, 1e-5, relation)
        rare = pg.GaussianEvent(1e6, 1, "without_replacement", 10**6, 1)
        padding = (rare,) if relation == "replace-one" else ()
        assert pg.PrivacyPlan((first, *padding)).epsilon(1e-5) == pytest.approx(0.3, rel=0.01)
        assert pg.PrivacyPlan((second, *padding)).epsilon(1e-5) == pytest.approx(0.15, rel=0.01)


@pytest.mark.parametrize("units", ["alike", "wild"])
@pytest.mark.parametrize("layout", ["dense", "csr"])
def test_scales_are_found_at_epsilon_one_whatever_the_units(units, layout):
    """Section 5.1's columns differ by a factor of 1000; in wild units by up to 1e12 more."""
    X, _, sigma = absolute_regression()
    if units == "wild":
        factor = 10.0 ** np.random.default_rng(1).uniform(-6, 6, sigma.size)
        X, sigma = X * factor, sigma * factor
    rows = as_rows(csr_array(X) if layout == "csr" else X)
    events = moments.moment_events(1.0, 1e-5, "add-or-remove-one")
    for seed in range(3):
        estimated = np.sqrt(moments.private_moments(rows, events, random_source(seed)))
        assert np.abs(np.log2(estimated / sigma)).max() < 1


def test_sparse_columns_get_their_frequencies():
    rng = np.random.default_rng(0)
    rate = np.geomspace(0.5, 0.02, 40)
    X = csr_array((rng.uniform(size=(20_000, 40)) < rate).astype(float))
    events = moments.moment_events(1.0, 1e-6, "add-or-remove-one")
    estimated = moments.private_moments(as_rows(X), events, random_source(0))
    off = np.abs(np.log2(estimated / rate))
    assert off[rate > 0.1].max() < 1
    assert off.max() < 2, "rare columns are near the noise's floor"


def test_nothing_to_see_gives_something_positive():
    events = moments.moment_events(0.1, 1e-3, "add-or-remove-one")
    for X in (np.zeros((50, 3)), np.full((50, 3), np.nan), np.ones((1, 1))):
        estimated = moments.private_moments(as_rows(X), events, random_source(0))
        assert np.isfinite(estimated).all()
        assert (estimated > 0).all()


@pytest.mark.parametrize(("epsilon", "most"), [(1.0, 0.0115), (4.0, 0.0104)])
def test_pagan_with_unknown_moments_is_nearly_as_good_as_with_known_ones(epsilon, most):
    """Known moments: 0.0107 at epsilon 1; round noise: 0.023. One budget pays for everything."""
    X, y, _ = absolute_regression()
    losses = []
    for seed in range(7):
        result = pg.minimize(
            "absolute", X, y, epsilon=epsilon, domain=pg.Box(-1, 1), batch_size=70, steps=1000,
            step_size=0.2, random_state=seed,
        )  # fmt: skip
        losses.append(np.abs(X @ result.x - y).mean())
    assert np.median(losses) <= most


@pytest.mark.parametrize("method", ["dp-sgd", "dp-adagrad", "pasan", "output-perturbation"])
def test_every_private_method_can_learn_its_ellipsoid(method):
    X, y, _ = absolute_regression(n=500, dim=5)
    result = pg.minimize(
        "absolute",
        X,
        y,
        method=method,
        epsilon=2.0,
        delta=1e-4,
        domain=pg.Box(-1, 1),
        step_size=0.2,
    )
    assert np.isfinite(result.x).all()
    assert result.privacy.events[0].purpose == "ranges"
    assert result.privacy.epsilon <= 2.0


def test_algorithm3_keeps_theorem_3s_promise():
    dim, ratio, epsilon, delta, beta = 4, 2.0, 4.0, 1e-6, 0.05
    n = theory.required_rows(dim, ratio, epsilon, delta, beta)
    sigma = np.array([1.0, 0.5, 0.25, 0.01])
    for seed in range(3):
        X = np.random.default_rng(seed).standard_normal((n, dim)) * sigma
        found = moments.algorithm3(X, ratio, epsilon, delta, random_source(seed))
        assert np.all(found >= np.maximum(sigma, dim**-1.5) / 2)
        assert np.all(found <= 2 * np.maximum(sigma, dim**-1.5))


def test_algorithm3_needs_a_ratio_above_one():
    with pytest.raises(ValueError, match="ratio > 1"):
        moments.algorithm3(np.ones((10, 2)), 1.0, 1.0, 1e-3, random_source(0))


def test_algorithm3s_noise_is_the_papers(monkeypatch):
    """ρ_t² T sqrt(d log(T/δ))/(nε), in the units of the release ρ_t² sqrt(d)."""
    made = []

    class Recorded(GaussianSum):
        def release(self, *arguments):
            made.append(self.noise_multiplier)
            return super().release(*arguments)

    monkeypatch.setattr(moments, "GaussianSum", Recorded)
    moments.algorithm3(np.ones((100, 4)), 2.0, 0.5, 1e-4, random_source(0))
    assert made == [3 * np.sqrt(np.log(3 / 1e-4)) / 0.5] * 3
