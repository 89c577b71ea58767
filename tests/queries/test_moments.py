from contextlib import contextmanager
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.sparse import csr_array
from scipy.special import ndtr

import privagrad as pg
from privagrad import theory
from privagrad.experiments.problems import absolute_regression
from privagrad.glm.rows import as_rows
from privagrad.privacy.events import GaussianEvent
from privagrad.privacy.mechanism import GaussianSum
from privagrad.privacy.noise import random_source
from privagrad.queries import columns as queries
from privagrad.queries import moments
from tests.releases import releases_at, releases_of
from tests.statistics import assert_scale

ENTRIES = st.one_of(
    st.floats(-10, 10),
    st.sampled_from([0.0, np.nan, np.inf, -np.inf, 1e-300, 1e200, -1e300, 5e-324]),
)


LAYOUTS = ["dense", "csr"]


def rows_of(X, layout="dense"):
    return as_rows(csr_array(X) if layout == "csr" else X)


@contextmanager
def recorded():
    """The releases within: mechanism, what it was handed, what it gave."""
    made = []

    class Recorded(GaussianSum):
        def release(self, total, *rest):
            before = total.memory.copy()
            after = super().release(total, *rest)
            made.append((self, before, after.copy()))
            return after

    with pytest.MonkeyPatch.context() as patch:
        for room in (moments, queries):
            patch.setattr(room, "GaussianSum", Recorded)
        yield made


QUERIES = {
    "votes": lambda rows, noise, scale, norm: queries.private_ranges(
        rows, releases_at({"ranges": noise}), "ranges"
    ),
    "votes of rare columns": lambda rows, noise, scale, norm: votes_of_rare(rows, noise),
    "votes of both signs": lambda rows, noise, scale, norm: votes_of_both_signs(rows, noise),
    "powers": lambda rows, noise, scale, norm: queries.whitened_moments(
        rows, scale, norm, releases_at({"moments": noise}), "moments"
    ),
    "norms": lambda rows, noise, scale, norm: queries.private_norm(
        rows, scale, releases_at({"norms": noise}), "norms"
    ),
}


def votes_of_rare(rows, noise):
    dim = rows.shape[1]
    ones, none = np.ones(dim), np.zeros(dim, dtype=bool)
    known = queries.Ranges(ones, ones, ones, ones.astype(np.int64), none, True, 1.0, none)
    queries.with_rare(rows, known, releases_at({"rare": noise}), "rare")


def votes_of_both_signs(rows, noise):
    dim = rows.shape[1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(queries, "_CLEAR", np.inf)  # also where so few rows would not be asked
        moved = rows.centred(np.arange(dim), np.zeros(dim))
        queries.private_intervals(moved, releases_at({"around": noise}), "around")


def handed(query, rows, noise, scale, norm=1.0):
    with recorded() as made:
        QUERIES[query](rows, noise, scale, norm)
    ((mechanism, units, _),) = made
    return mechanism, units


@pytest.mark.parametrize("query", QUERIES)
@pytest.mark.parametrize("layout", LAYOUTS)
@given(data=st.data())
def test_one_row_moves_every_query_by_at_most_the_sensitivity(layout, query, data):
    """In exact arithmetic, for any row: added by one sensitivity, replaced by two."""
    n, dim = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 5))
    dtype = data.draw(st.sampled_from([np.float32, np.float64]))
    with np.errstate(over="ignore"):
        X = data.draw(arrays(float, (n, dim), elements=ENTRIES)).astype(dtype)
        changed, fewer = X.copy(), X.copy()
        changed[-1] = data.draw(arrays(float, dim, elements=ENTRIES)).astype(dtype)
    fewer[-1] = 0.0
    scale = 10.0 ** data.draw(arrays(float, dim, elements=st.floats(-6, 6)))
    noise, norm = data.draw(st.floats(0.01, 100)), data.draw(st.floats(0.1, 10))
    (mechanism, whole), (_, less), (_, other) = (
        handed(query, rows_of(table, layout), noise, scale, norm) for table in (X, fewer, changed)
    )
    assert mechanism.noise_multiplier == noise
    assert mechanism.batch_size == n
    most = (Fraction(mechanism.sensitivity) / Fraction(mechanism.grid)) ** 2
    for moved, times in ((whole - less, 1), (whole - other, 4)):
        assert np.isfinite(moved).all()
        assert sum(Fraction(v) ** 2 for v in moved.tolist()) <= times * most


@pytest.mark.parametrize("query", QUERIES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_row_uses_its_whole_norm(layout, query):
    for entry in (1.0, 1e6) if query != "powers" else (1e6,):
        row = rows_of(np.full((1, 9), entry), layout)
        mechanism, units = handed(query, row, 2.0, np.ones(9))
        assert np.linalg.norm(units) * mechanism.grid == pytest.approx(1, abs=1e-5)


def test_first_and_second_moments_share_one_norm():
    """(a, a²) as one vector: inside the bound as it is, outside shrunk onto it."""
    scale = np.array([1.0, 4.0, 1.0])
    for size in (1e-3, 0.5, 3.0, 100.0):
        a = size * np.array([1.0, -2.0, 0.0])
        with recorded() as made:
            # With a noise multiplier of 1 and one row the noise is as large as the bound.
            releases = releases_at({"moments": 1.0})
            bound = queries.whitened_moments(rows_of(a[None]), scale, 1.0, releases, "moments")[2]
        ((mechanism, units, _),) = made
        powers = np.concatenate([a / scale, (a / scale) ** 2])
        expected = powers / max(bound, np.linalg.norm(powers))
        assert units * mechanism.grid == pytest.approx(expected, abs=2 * mechanism.grid)


def test_every_release_has_the_noise_its_event_names():
    """What a release gives, less what it was handed, is its noise."""
    bounded = queries.Share("within bounds", 0.15)
    first, *others = moments.COLUMNS.shares
    shares = (first, moments.RARE, *others, bounded, moments.NORMS)
    releases = releases_of(shares, 1.0, 1e-4)
    events = [releases.plan[share.purpose] for share in shares]
    rows = rows_of(np.random.default_rng(0).normal(5, 1, (60, 300)))
    bounds = np.full(300, -5.0), np.full(300, 15.0)
    with recorded() as made:
        moments.private_columns(rows, moments.COLUMNS, releases, always=True)
        moments.bounded_columns(rows, bounds, releases, bounded.purpose)
        queries.private_norm(rows, np.ones(300), releases, moments.NORMS.purpose)
    assert len(made) == len(events)
    assert set(releases.made.values()) == {1}
    for (mechanism, units, released), event in zip(made, events, strict=True):
        assert mechanism.noise_multiplier == event.noise_multiplier
        assert_scale(released * 60 - units * mechanism.grid, event.noise_multiplier)


def test_the_floor_is_the_noise_of_the_moments():
    rows = rows_of(np.zeros((50, 300)))
    for norm, noise in ((1.0, 3.0), (4.0, 0.5)):
        means, squares, floor = queries.whitened_moments(
            rows, np.ones(300), norm, releases_at({"moments": noise}), "moments"
        )
        assert_scale(means, floor)
        assert_scale(squares, floor)


@pytest.mark.parametrize("sampling", ["poisson", "with_replacement"])
def test_the_queries_have_the_noise_that_the_report_names(sampling):
    X, y, _ = absolute_regression(n=400, dim=6)
    with recorded() as made:
        result = pg.minimize(
            "absolute", X, y, epsilon=2.0, delta=1e-4, domain=pg.Box(-1, 1), batch_size=20,
            steps=10, sampling=sampling,
        )  # fmt: skip
    events = result.privacy.events
    assert [event.purpose for event in events] == ["ranges", "moments", "gradients"]
    released = [(query.dim, query.noise_multiplier, query.batch_size) for query, _, _ in made]
    ranges, squares = (e.noise_multiplier for e in events[:2] if isinstance(e, GaussianEvent))
    # A column has its octaves and a cell for 1 and -1; then its entries and squares.
    assert released == [(6 * (queries.OCTAVES + 1), ranges, 400), (2 * 6, squares, 400)]
    assert result.privacy.epsilon <= 2.0
    assert result.privacy.epsilon == pg.PrivacyPlan(events).epsilon(1e-4)
    assert pg.PrivacyPlan(events[1:]).epsilon(1e-4) < 0.99 * result.privacy.epsilon


@pytest.mark.parametrize("relation", ["zero-out", "replace-one"])
@pytest.mark.parametrize(
    "shares", [moments.SCALES.shares, moments.COLUMNS.shares, [moments.NORMS]], ids=len
)
def test_a_part_of_the_budget_costs_its_part_alone(shares, relation):
    events = queries.query_events(shares, 1.0, 1e-5, relation)
    rare = pg.GaussianEvent(1e6, 1, "without_replacement", 10**6, 1)
    padding = (rare,) if relation == "replace-one" else ()
    for event, (purpose, part) in zip(events, shares, strict=True):
        assert (event.purpose, event.count, event.rate) == (purpose, 1, 1)
        assert pg.PrivacyPlan((event, *padding)).epsilon(1e-5) == pytest.approx(part, rel=0.01)


@pytest.mark.parametrize("units", ["alike", "wild"])
@pytest.mark.parametrize("layout", ["dense", "csr"])
def test_scales_are_found_at_epsilon_one_whatever_the_units(units, layout):
    """Section 5.1's columns differ by a factor of 1000; in wild units by up to 1e12 more."""
    X, _, sigma = absolute_regression()
    if units == "wild":
        factor = 10.0 ** np.random.default_rng(1).uniform(-6, 6, sigma.size)
        X, sigma = X * factor, sigma * factor
    rows = as_rows(csr_array(X) if layout == "csr" else X)
    for seed in range(3):
        releases = releases_of(moments.SCALES.shares, 1.0, 1e-5, seed)
        estimated = np.sqrt(moments.private_moments(rows, releases))
        assert np.abs(np.log2(estimated / sigma)).max() < 1


def test_sparse_columns_get_their_frequencies():
    rng = np.random.default_rng(0)
    rate = np.geomspace(0.5, 0.02, 40)
    X = csr_array((rng.uniform(size=(20_000, 40)) < rate).astype(float))
    releases = releases_of(moments.SCALES.shares, 1.0, 1e-6)
    estimated = moments.private_moments(as_rows(X), releases)
    off = np.abs(np.log2(estimated / rate))
    assert off[rate > 0.1].max() < 1
    assert off.max() < 2, "rare columns are near the noise's floor"


def test_nothing_to_see_gives_something_positive():
    for X in (np.zeros((50, 3)), np.full((50, 3), np.nan), np.ones((1, 1))):
        releases = releases_of(moments.SCALES.shares, 0.1, 1e-3)
        estimated = moments.private_moments(as_rows(X), releases)
        assert np.isfinite(estimated).all()
        assert (estimated > 0).all()


def private_columns_of(X, layout="dense", seed=0, epsilon=1.0, rare=False, evenness=0.5):
    shares = [*moments.COLUMNS.shares, *[moments.RARE] * rare]
    releases = releases_of(shares, epsilon, 1e-6, seed)
    rows = rows_of(X, layout)
    return moments.private_columns(rows, moments.COLUMNS, releases, evenness=evenness)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("unit", [1e-6, 1.0, 1e6])
def test_columns_that_vary_are_centred_and_divided_by_their_deviation(unit, layout):
    n, rng = 20_000, np.random.default_rng(0)
    X = rng.normal([4.0, -10.0, 0.0, 1.0], [1.0, 2.0, 1.0, 10.0], (n, 4)) * unit
    for seed in range(3):
        found = private_columns_of(X, layout, seed)
        off = np.abs(found.centre - X.mean(axis=0)) / X.std(axis=0)
        assert off.max() < 0.15
        assert np.abs(np.log2(found.unit / X.std(axis=0))).max() < 0.5
        assert found.moments == pytest.approx(np.ones(4))
        assert found.varied.all()
        assert found.found


@pytest.mark.parametrize(("ratio", "common"), [(3.0, True), (6.0, False)])
def test_columns_in_similar_units_keep_their_proportions(ratio, common):
    """Deviations within a factor of 4 become one unit, so that no information is lost."""
    n, rng = 20_000, np.random.default_rng(0)
    X = rng.normal([9.0, 0.0, 3.0], np.array([1.0, np.sqrt(ratio), ratio]), (n, 3))
    deviation = X.std(axis=0)
    for seed in range(3):
        found = private_columns_of(X, seed=seed)
        if common:
            assert np.ptp(found.unit) == 0
            assert found.unit[0] == pytest.approx(np.sqrt(np.mean(deviation**2)), rel=0.15)
        else:
            assert np.abs(np.log2(found.unit / deviation)).max() < 0.5
        assert found.unit * np.sqrt(found.moments) == pytest.approx(deviation, rel=0.25)


def test_means_within_their_noise_are_not_subtracted():
    """Of columns of mean 0 a mean is beyond 1.5 times its noise once in 7.5 times."""
    rng = np.random.default_rng(0)
    # Noise in the means is far beyond their own deviations.
    found = private_columns_of(rng.normal(0, 1, (2000, 200)))
    # Of 200 columns 27 are expected. Outside 5 and 62 with a probability below 1e-7.
    assert 5 <= np.count_nonzero(found.centre) <= 62
    far = private_columns_of(rng.normal(9, 1, (2000, 20)))
    assert far.centre.all()


def test_columns_as_tables_have_them():
    """An elevation, a year, a binary column, a constant: no bounds given, one budget."""
    n, rng = 20_000, np.random.default_rng(0)
    rate = np.array([0.3, 0.1])
    X = np.column_stack(
        [rng.normal(2959, 280, n), rng.normal(1990, 10, n), rng.uniform(size=(n, 2)) < rate,
         np.full(n, 7.0)]
    )  # fmt: skip
    for seed in range(3):
        found = private_columns_of(X, seed=seed)
        elevation, year, constant = found.centre[[0, 1, 4]] - [2959, 1990, 7]
        assert abs(elevation) < 0.15 * 280
        assert abs(np.log2(found.unit[0] / 280)) < 0.5
        assert abs(year) < 0.3 * 10
        assert 0.7 < found.unit[1] / 10 < 8, "half a percent of 1990 is hard to see"
        deviation = np.sqrt(rate * (1 - rate))
        assert found.unit[2:4] == pytest.approx(np.sqrt(deviation), abs=0.1)
        assert found.centre[2:4] == pytest.approx(rate, abs=0.05)
        assert found.moments[2:4] == pytest.approx(deviation, abs=0.15)
        assert abs(constant) < 0.5
        assert 0 < found.unit[4] < 7
        assert found.moments[[0, 1, 4]] == pytest.approx(1)
        assert found.varied.tolist() == [True, True, False, False, True]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", [1.0, 5.0, 1e-4])
def test_rare_columns_have_a_unit_between_deviation_and_size(size, layout):
    """Divided by their deviation, rows with a rare entry would be immense."""
    n, rng = 20_000, np.random.default_rng(0)
    rare = rng.normal(0, size, (n, 3)) * (rng.uniform(size=(n, 3)) < 0.02)
    X = np.column_stack([rng.normal(0, 100 * size, (n, 2)), rare])
    for seed in range(3):
        found = private_columns_of(X, layout, seed)
        assert np.abs(np.log2(found.unit[:2] / (100 * size))).max() < 0.75
        assert (found.unit[2:] < 2 * size).all()
        assert (found.unit[2:] > 1.5 * rare.std(axis=0)).all()


def test_only_frequent_columns_of_sparse_tables_are_centred():
    """Centred columns store all their entries."""
    n, rng = 20_000, np.random.default_rng(0)
    rate = np.array([0.05, 0.07, 0.3, 0.5, 0.9])
    X = (rng.uniform(size=(n, 5)) < rate).astype(float)
    for seed in range(3):
        dense, sparse = (private_columns_of(X, layout, seed) for layout in LAYOUTS)
        assert dense.centre == pytest.approx(rate, abs=0.03)
        assert (sparse.centre != 0).tolist() == [False, False, True, True, True]
        assert sparse.centre[2:] == pytest.approx(rate[2:], abs=0.03)
        for found in (dense, sparse):
            left = np.where(found.centre != 0, rate * (1 - rate), rate)
            assert found.moments * found.unit**2 == pytest.approx(left, abs=0.03)


@pytest.mark.parametrize("evenness", [0.0, 0.5, 1.0])
def test_units_of_sparse_indicators_go_from_one_to_their_deviations(evenness):
    n, rng = 20_000, np.random.default_rng(0)
    rate = np.array([0.02, 0.05, 0.07, 0.3, 0.5, 0.9])
    X = (rng.uniform(size=(n, rate.size)) < rate).astype(float)
    for seed in range(3):
        found = private_columns_of(X, "csr", seed, epsilon=4.0, evenness=evenness)
        spread = np.where(found.centre != 0, rate * (1 - rate), rate)
        assert found.unit == pytest.approx(spread ** (evenness / 2), rel=0.1)
    assert private_columns_of(X, epsilon=4.0, evenness=evenness).unit.tolist() == [1.0] * 6


def test_noise_in_columns_that_do_not_show_leaves_the_units_of_others():
    """1000 columns of zeros have 108,000 places for noise to look like a large entry."""
    n, rng = 5000, np.random.default_rng(0)
    X = np.zeros((n, 1010))
    X[:, :10] = rng.uniform(size=(n, 10)) < 0.4
    for layout in LAYOUTS:
        immense = 0
        for seed in range(5):
            found = private_columns_of(X, layout, seed, epsilon=4.0, evenness=0.0)
            assert np.ptp(found.unit[:10]) == 0
            assert 0.75 < found.unit[0] < 1.33
            immense += int(np.count_nonzero(found.unit > 4))
        # One in two tables is expected to have one. Above 10 with a probability below 1e-3.
        assert immense <= 10


def test_where_noise_hides_every_scale_nothing_is_left_of_the_columns():
    """Units are the largest there are, so that no coefficient is noise times a guess."""
    rng, hidden = np.random.default_rng(0), 0
    for seed in range(10):
        releases = releases_of(moments.COLUMNS.shares, 0.05, 1e-6, seed)
        found = moments.private_columns(
            rows_of(rng.normal(5, 1, (50, 4))), moments.COLUMNS, releases
        )
        if not found.found:
            hidden += 1
            assert found.unit.tolist() == [2.0 ** (queries.LOWEST + queries.OCTAVES)] * 4
            assert not found.centre.any()
            assert not found.moments.any()
    assert hidden >= 9


def test_a_dense_column_among_sparse_ones():
    n, rng = 20_000, np.random.default_rng(0)
    indicators = rng.uniform(size=(n, 30)) < 0.1
    table = csr_array(np.column_stack([indicators, rng.normal(50, 5, n)]))
    found = private_columns_of(table)
    assert not found.centre[:-1].any()
    assert np.abs(np.log2(found.unit[:-1] / 0.1**0.25)).max() < 0.5
    assert np.abs(np.log2(found.moments[:-1] / 0.1**0.5)).max() < 1
    assert abs(found.centre[-1] - 50) < 0.15 * 5
    assert abs(np.log2(found.unit[-1] / 5)) < 0.5


def test_noise_shows_nothing_beyond_what_entries_can_be():
    """With many rare categories, some column's noise looks like votes for an immense octave."""
    rng, limits = np.random.default_rng(0), np.ones(300)
    rows = rows_of((rng.uniform(size=(4000, 300)) < 0.002).astype(float))
    for seed in range(20):
        releases = releases_of(moments.COLUMNS.shares, 0.3, 1e-6, seed)
        found = moments.private_columns(rows, moments.COLUMNS, releases, limits=limits)
        if found.found:
            assert found.unit.max() <= 2
            assert (np.abs(found.centre) <= 2).all()
            assert (found.moments * found.unit**2 <= 16).all()


@pytest.mark.parametrize("side", [-1.0, 1.0])
def test_spreads_far_below_the_noise_of_the_centre_are_found(side):
    """A first centre that is off by several deviations is seen by the signs of what is left."""
    n, rng = 16_000, np.random.default_rng(0)
    far = side * rng.normal(120, 2, (n, 2))
    X = np.column_stack([far, rng.normal(0, 1, (n, 6))])
    units = [private_columns_of(X, seed=seed, epsilon=0.15).unit[:2] for seed in range(10)]
    assert np.mean(np.abs(np.log2(np.array(units) / 2)) < 1) >= 0.8


def test_rare_columns_show_when_they_vote_by_themselves():
    """Among 40 dense columns a rare one has few votes; without them it has nearly one a row."""
    n, rng, unit = 30_000, np.random.default_rng(0), 10.0 ** np.arange(-5, 5, 2)
    rare = unit * (rng.random((n, unit.size)) < 0.02)
    X = np.column_stack([rng.normal(0, 1, (n, 40)), rare])
    for asked_again, least, most in ((False, 0, 1), (True, 4, 5)):
        seen = [
            private_columns_of(X, seed=seed, epsilon=0.3, rare=asked_again).seen[40:].sum()
            for seed in range(3)
        ]
        assert least <= np.mean(seen) <= most
    found = private_columns_of(X, epsilon=0.3, rare=True)
    assert (np.abs(np.log2(found.unit[40:] / unit))[found.seen[40:]] < 3).all()


@pytest.mark.parametrize("share", [0.7, 0.85, 0.95])
def test_frequent_indicators_in_other_units_have_their_own_deviation(share):
    n, rng = 30_000, np.random.default_rng(0)
    X = np.column_stack([1e4 * (rng.random(n) < share), rng.normal(0, 1, (n, 6))])
    deviation = 1e4 * np.sqrt(share * (1 - share))
    for seed in range(5):
        assert abs(np.log2(private_columns_of(X, seed=seed).unit[0] / deviation)) < 1.3


def test_columns_in_units_of_all_sizes_do_not_disturb_each_other():
    n, rng = 20_000, np.random.default_rng(0)
    unit = 10.0 ** np.arange(-6, 7)
    X = rng.normal(4 * unit, unit, (n, unit.size))
    for seed in range(3):
        found = private_columns_of(X, seed=seed)
        assert np.abs(np.log2(found.unit / unit)).max() < 2
        assert (np.abs(found.centre - 4 * unit) / unit).max() < 1


def test_only_what_is_centred_is_asked_about_twice():
    rng = np.random.default_rng(0)
    X = rng.normal(0, 1, (2000, 3))
    for offset, always, count in ((0.0, False, 2), (9.0, False, 4), (0.0, True, 4)):
        releases = releases_of(moments.COLUMNS.shares, 4.0, 1e-5)
        with recorded() as made:
            found = moments.private_columns(rows_of(X + offset), moments.COLUMNS, releases, always)
        assert len(made) == sum(releases.made.values()) == count
        assert bool(found.centre.all()) == (count == 4)
    releases = releases_of(moments.SCALES.shares, 4.0, 1e-5)
    plain = moments.private_columns(rows_of(X + 9.0), moments.SCALES, releases)
    assert not plain.centre.any()


def test_strange_columns_give_something_finite_and_positive():
    def columns(rows, seed):
        releases = releases_of(moments.COLUMNS.shares, 0.1, 1e-3, seed)
        return moments.private_columns(rows, moments.COLUMNS, releases, seed > 1)

    def bounded(rows, low):
        releases = releases_of([moments.BOUNDED_COLUMNS], 0.1, 1e-3)
        return moments.bounded_columns(rows, (low, np.ones(3)), releases, "moments")

    for X in (np.zeros((50, 3)), np.full((50, 3), np.nan), np.ones((1, 3)), np.full((9, 3), 1e300)):
        rows = rows_of(X)
        for found in (
            *(columns(rows, seed) for seed in range(4)),
            bounded(rows, np.zeros(3)),
            bounded(rows, np.ones(3)),
        ):
            assert np.isfinite([found.centre, found.unit, found.moments]).all()
            assert (found.unit > 0).all()
            assert (found.moments > 0).all() if found.found else not found.moments.any()
        norm = queries.private_norm(rows, np.ones(3), releases_at({"norms": 10.0}), "norms")
        assert 0 < norm < np.inf


@pytest.mark.parametrize("layout", LAYOUTS)
def test_public_bounds_replace_three_of_four_releases(layout):
    n, rng = 20_000, np.random.default_rng(0)
    X = np.column_stack(
        [rng.uniform(10, 20, n), rng.uniform(size=n) < 0.3, 100 * rng.beta(9, 1, n),
         rng.uniform(-3, 3, n), np.full(n, 5.0)]
    )  # fmt: skip
    low, high = np.array([10, 0, 0, -3, 5.0]), np.array([20, 1, 100, 3, 5.0])
    releases = releases_of([moments.BOUNDED_COLUMNS], 1.0, 1e-6)
    with recorded() as made:
        found = moments.bounded_columns(rows_of(X, layout), (low, high), releases, "moments")
    noise = releases.plan["moments"].noise_multiplier
    assert [query.noise_multiplier for query, _, _ in made] == [noise]
    assert found.centre[[0, 2, 4]] == pytest.approx([15, 90, 5], abs=2)
    assert found.centre[[1, 3]] == pytest.approx([0.3, 0.0], abs=0.03)
    assert found.unit[1] == 1.0
    for j in (0, 3):
        assert abs(np.log2(found.unit[j] / X[:, j].std())) < 0.5
    assert 0.7 < found.unit[2] / X[:, 2].std() < 4, "ten percent of the range is hard to see"
    assert found.moments == pytest.approx([1, 0.3 * 0.7, 1, 1, 1], abs=0.03)
    assert found.varied.tolist() == [True, False, True, True, True]
    again = releases_of([moments.BOUNDED_COLUMNS], 1.0, 1e-6)
    plain = moments.bounded_columns(
        rows_of(X, layout), (low, high), again, "moments", centred=False
    )
    assert not plain.centre.any()
    sizes = np.sqrt(np.square(X).mean(axis=0))
    assert plain.unit == pytest.approx(np.where(low == high, 5.0, [*sizes[:1], 1, *sizes[2:]]),
                                       rel=0.1)  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
def test_columns_of_equal_bounds_share_the_largest_of_their_deviations(layout):
    """Pixels, for example: which of them vary is information that dividing would lose."""
    n, rng = 20_000, np.random.default_rng(0)
    X = np.column_stack([rng.uniform(0, 255, n), rng.uniform(0, 50, n), np.zeros(n)])
    releases = releases_of([moments.BOUNDED_COLUMNS], 1.0, 1e-6)
    bounds = np.zeros(3), np.full(3, 255.0)
    found = moments.bounded_columns(rows_of(X, layout), bounds, releases, "moments")
    assert found.unit == pytest.approx(np.full(3, X[:, 0].std()), rel=0.1)
    assert np.ptp(found.unit) == 0
    assert found.moments[0] == 1
    assert (found.moments[1:] < 0.2).all()
    target = releases_of([moments.BOUNDED_TARGET], 1.0, 1e-6)
    always = moments.bounded_columns(
        rows_of(X[:, 1:2]), (np.zeros(1), np.full(1, 255.0)), target, "target's moments",
        always=True,
    )  # fmt: skip
    assert abs(np.log2(always.unit[0] / X[:, 1].std())) < 0.5, "a target is standardised"
    assert always.centre[0] == pytest.approx(25, abs=3)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_known_columns_are_numpys_formulas(layout):
    rng = np.random.default_rng(0)
    X = np.column_stack(
        [rng.normal(50, 5, 200), rng.normal(0, 3, 200), 4.0 * (rng.uniform(size=200) < 0.2),
         np.zeros(200), np.full(200, 7.0), 9.0 * rng.normal(0, 1, 200) * (np.arange(200) < 4)]
    )  # fmt: skip
    found = moments.known_columns(rows_of(X, layout))
    means, deviations = X.mean(axis=0), X.std(axis=0)
    rms = np.sqrt(np.square(X).mean(axis=0))
    if layout == "csr":  # a mean below a tenth of an entry keeps its zeros
        means[[1, 5]], deviations[[1, 5]] = 0, rms[[1, 5]]
    assert found.centre == pytest.approx(means)
    entries = rms[5] / np.sqrt(4 / 200)
    assert found.unit == pytest.approx([deviations[0], deviations[1], 4, 1, 7, entries])
    assert found.moments[[0, 1, 3]] == pytest.approx([1, 1, 1])
    assert found.moments[[2, 5]] == pytest.approx(
        np.square(deviations[[2, 5]] / found.unit[[2, 5]])
    )
    assert found.varied.tolist() == [True, True, False, True, False, True]
    everything = moments.known_columns(rows_of(X, layout), always=True)
    assert everything.centre == pytest.approx(X.mean(axis=0))
    assert everything.unit[:3] == pytest.approx(X.std(axis=0)[:3])
    nothing = moments.known_columns(rows_of(X, layout), centred=False)
    assert not nothing.centre.any()
    assert nothing.unit[0] == pytest.approx(rms[0])
    similar = moments.known_columns(rows_of(X[:, :2], layout))
    unit = np.sqrt(np.mean(np.square([deviations[0], deviations[1]])))
    assert similar.unit == pytest.approx([unit, unit])


@pytest.mark.parametrize("quantile", [0.5, 0.9])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_private_norm_is_a_quantile_up_to_an_eighth_of_an_octave_or_two(layout, quantile):
    rng = np.random.default_rng(0)
    X = rng.standard_normal((20_000, 20)) * np.geomspace(0.01, 100, 20)
    X[rng.uniform(size=X.shape) < 0.3] = 0.0
    scale = np.geomspace(1, 1e-4, 20)
    truth = np.quantile(np.sqrt(np.square(X) @ scale), quantile)
    for seed in range(3):
        releases = releases_of([moments.NORMS], 1.0, 1e-6, seed)
        found = queries.private_norm(
            rows_of(X, layout), scale, releases, moments.NORMS.purpose, quantile
        )
        assert abs(np.log2(found / truth)) <= 2 / 8


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


def algorithm3_noises(X, epsilon, delta, **settings):
    with recorded() as made:
        moments.algorithm3(X, 2.0, epsilon, delta, random_source(0), **settings)
    return [mechanism.noise_multiplier for mechanism, _, _ in made]


@pytest.mark.parametrize(
    ("dim", "epsilon", "delta"), [(1, 1.0, 1e-6), (4, 0.5, 1e-4), (9, 3, 1e-8)]
)
def test_algorithm3s_noise_gives_its_guarantee(dim, epsilon, delta):
    """Gaussian releases of noise z compose to one of z/sqrt(T), whose δ(ε) is known exactly."""
    noises = algorithm3_noises(np.ones((100, dim)), epsilon, delta)
    assert len(set(noises)) == 1
    assert len(noises) == max(1, int(np.ceil(1.5 * np.log2(dim))))

    def spent(noise):
        mu = np.sqrt(len(noises)) / noise
        return ndtr(mu / 2 - epsilon / mu) - np.exp(epsilon) * ndtr(-mu / 2 - epsilon / mu)

    assert 0.9 * delta < spent(noises[0]) <= delta
    assert spent(noises[0] / 1.5) > delta


def test_algorithm3s_published_noise_is_there_and_gives_less():
    """ρ_t² T sqrt(d log(T/δ))/(nε), in the units of the release ρ_t² sqrt(d)."""
    noises = algorithm3_noises(np.ones((100, 4)), 0.5, 1e-4, noise="paper")
    assert noises == [3 * np.sqrt(np.log(3 / 1e-4)) / 0.5] * 3
    [published] = algorithm3_noises(np.ones((100, 1)), 1.0, 1e-6, noise="paper")
    assert pg.PrivacyPlan((GaussianEvent(published),)).delta(1.0) == pytest.approx(
        1.06e-5, rel=0.01
    )
    with pytest.raises(ValueError, match="accountant, paper"):
        moments.algorithm3(np.ones((100, 1)), 2.0, 1.0, 1e-6, random_source(0), noise="none")  # type: ignore[arg-type]


@pytest.mark.parametrize("strange", [np.nan, np.inf, -np.inf, 1e300])
def test_algorithm3_survives_any_row(strange):
    """One row, whatever it holds, leaves the estimates of the others as they are."""
    X = np.random.default_rng(0).standard_normal((5000, 4)) * [1.0, 0.3, 0.1, 0.7]
    odd = X.copy()
    odd[17, 0] = strange
    plain, found = (moments.algorithm3(rows, 3.0, 4.0, 1e-6, random_source(0)) for rows in (X, odd))
    assert np.array_equal(plain, found)


def test_public_rows_give_the_ellipsoid_for_nothing():
    X, y, _ = absolute_regression(n=3000)
    result = pg.minimize(
        "absolute", X[:2000], y[:2000], epsilon=1.0, domain=pg.Box(-1, 1), batch_size=45,
        steps=300, step_size=0.2, public=(X[2000:], y[2000:]), random_state=0,
    )  # fmt: skip
    assert [event.purpose for event in result.privacy.events] == ["gradients"]
    assert np.abs(X @ result.x - y).mean() < 0.05
    for kind in (X, csr_array(X)):
        squares = np.square(X).mean(axis=0)
        assert moments.known_moments(as_rows(kind)) == pytest.approx(
            squares + np.median(squares) / 3000
        )


def test_history_improves_a_ball_at_no_cost():
    """dp-adagrad from the same ball: 0.027; the events are the same."""
    X, y, _ = absolute_regression()
    losses, events = [], set()
    for method in ("dp-adagrad", "pagan-history"):
        result = pg.minimize(
            "absolute", X, y, method=method, epsilon=1.0, ellipsoid=pg.Ellipsoid.ball(100, 0.5),
            domain=pg.Box(-1, 1), batch_size=70, steps=1000, step_size=0.2, random_state=0,
        )  # fmt: skip
        losses.append(np.abs(X @ result.x - y).mean())
        events.add(result.privacy.events)
    assert losses[1] < 0.9 * losses[0]
    assert len(events) == 1
