"""Queries over all rows, as events."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.sparse import csr_array
from scipy.stats import binom

from privagrad.glm import rows as table_rows
from privagrad.glm.rows import as_rows
from privagrad.privacy.accounting import PrivacyPlan
from privagrad.privacy.events import GaussianEvent
from privagrad.privacy.mechanism import GaussianSum
from privagrad.queries import columns
from privagrad.queries.columns import (
    Share,
    private_norm,
    private_ranges,
    query_event,
    whitened_moments,
)
from tests.releases import releases_at
from tests.statistics import FALSE_ALARM


def test_a_query_costs_its_share_under_both_relations():
    """Under replace-one a row moves a sum twice as far, and the query has twice the noise."""
    share = Share("ranges", 0.3)
    for relation in ("zero-out", "replace-one"):
        event = query_event(share, 2.0, 1e-5, relation)
        under = GaussianEvent(event.noise_multiplier, under=relation)
        assert PrivacyPlan((under,)).epsilon(1e-5) == pytest.approx(0.6, rel=0.01)


@pytest.mark.parametrize("kind", [np.asarray, csr_array])
def test_threads_share_the_rows_out_without_a_trace(kind, monkeypatch):
    rng = np.random.default_rng(0)
    X = rng.standard_normal((97, 6)) * (rng.uniform(size=(97, 6)) < 0.7) * np.geomspace(1, 1e3, 6)
    X[11, 2] = np.nan
    rows, scale = as_rows(kind(X)), np.geomspace(1, 1e3, 6)

    def answers():
        releases = releases_at({"ranges": 0.3, "moments": 0.3, "norms": 0.3})
        ranges = private_ranges(rows, releases, "ranges")
        means, squares, _ = whitened_moments(rows, scale, 2.0, releases, "moments")
        norm = private_norm(rows, scale, releases, "norms")
        return np.concatenate([ranges.scale, ranges.share, means, squares, [norm]])

    whole = answers()
    monkeypatch.setattr(table_rows, "_SPLIT_FROM", 0)
    monkeypatch.setattr(table_rows, "_ENTRIES_PER_SUM", 0)
    assert np.array_equal(answers(), whole)


def votes_of(row, layout=np.asarray, noise=1.0):
    """Votes of one row: the mechanism, and its units by column and cell."""
    made = []

    class Recorded(GaussianSum):
        def release(self, total, *rest):
            made.append((self, total.memory.copy()))
            return super().release(total, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(columns, "GaussianSum", Recorded)
        private_ranges(as_rows(layout(row[None])), releases_at({"ranges": noise}), "ranges")
    [(mechanism, units)] = made
    return mechanism, units.reshape(row.size, columns.OCTAVES + 1)


ENTRIES = st.one_of(
    st.sampled_from([1.0, -1.0, 0.0]),
    st.sampled_from([np.nan, np.inf, np.nextafter(1.0, 2.0), np.nextafter(1.0, 0.0), 2.0, 5e-324]),
    st.floats(-1e300, 1e300),
)


@pytest.mark.parametrize("layout", [np.asarray, csr_array])
@given(entries=st.lists(ENTRIES, min_size=1, max_size=60), noise=st.floats(0.01, 100))
def test_votes_of_any_mix_of_ones_and_others_have_norm_one(layout, entries, noise):
    """In exact arithmetic: at most the sensitivity, and nearly 1 where there is any vote."""
    row = np.array(entries)
    mechanism, units = votes_of(row, layout, noise)
    squares = sum(Fraction(v) ** 2 for v in units.ravel().tolist())
    assert squares <= (Fraction(mechanism.sensitivity) / Fraction(mechanism.grid)) ** 2
    voting = np.isfinite(row) & (row != 0)
    norm = np.linalg.norm(units) * mechanism.grid
    assert norm == pytest.approx(1.0 if voting.any() else 0.0, abs=row.size * mechanism.grid + 1e-5)
    assert ((units != 0).sum(axis=1) == voting).all(), "one vote for each entry"
    ones = np.abs(row) == 1
    assert np.array_equal(units[:, -1] != 0, ones)
    if (ones & voting).any() and (voting & ~ones).any():
        one, other = units[ones].max(), units[voting & ~ones].max()
        assert one == pytest.approx(other / 2, abs=1), "others have twice the weight of ones"


def test_entries_vote_for_their_octaves():
    lowest, beyond = columns.LOWEST, columns.LOWEST + columns.OCTAVES
    row = np.array([0.75, -3.0, 2.0**lowest, 2.0 ** (beyond - 1), 1e-300, 1e300, 1.0])
    _, units = votes_of(row)
    octaves = units.argmax(axis=1) + lowest
    assert octaves.tolist() == [-1, 1, lowest, beyond - 1, lowest, beyond - 1, beyond]


@pytest.mark.parametrize("weight", [0.1, 0.5, 1.0])
def test_shares_and_row_norms_undo_the_weights_of_votes(weight):
    """Up to a quarter, because votes of rows with many entries are smaller."""
    n, rng = 20_000, np.random.default_rng(0)
    ones = rng.uniform(size=(n, 10)) < 0.4
    others = rng.normal(0, 3, (n, 10)) * (rng.uniform(size=(n, 10)) < weight)
    rows = as_rows(np.column_stack([ones, others]))
    found = private_ranges(rows, releases_at({"ranges": 3.0}), "ranges")
    assert found.share[:10] == pytest.approx(np.full(10, 0.4), rel=0.25)
    assert found.share[10:] == pytest.approx(np.full(10, weight), rel=0.25)
    assert found.row_norm == pytest.approx(np.sqrt(4 + 10 * weight), rel=0.1)
    assert found.indicators.tolist() == [True] * 10 + [False] * 10
    assert (found.scale[:10] == 2.0).all()


@pytest.mark.parametrize(("dim", "rate"), [(1, 0.1), (5, 0.01), (50, 0.01)])
def test_noise_alone_shows_no_scale(dim, rate):
    """In all columns and cells together once in 500 times; in a column by itself once in 20."""
    rows, trials = as_rows(np.zeros((50, dim))), 500
    found = sum(
        private_ranges(rows, releases_at({"ranges": 50.0}, seed), "ranges").found
        for seed in range(trials)
    )
    assert binom.sf(found - 1, trials, rate) > FALSE_ALARM


def test_noise_alone_shows_no_norm():
    """In all cells near the guess together about once in 500 times."""
    rows, trials = as_rows(np.zeros((50, 3))), 3000
    found = sum(
        private_norm(rows, np.ones(3), releases_at({"norms": 50.0}, seed), "norms", guess=7.0) != 7
        for seed in range(trials)
    )
    assert binom.sf(found - 1, trials, 0.003) > FALSE_ALARM


@pytest.mark.parametrize(
    ("factor", "seen"), [(0.1, True), (10.0, True), (0.03, False), (30, False)]
)
def test_norms_far_from_the_guess_are_noise(factor, seen):
    """Further than four octaves."""
    rows = as_rows(np.full((500, 4), factor))
    found = private_norm(rows, np.ones(4), releases_at({"norms": 1.0}), "norms", guess=2.0)
    assert found == pytest.approx(2 * factor if seen else 2.0, rel=0.1)


def test_columns_of_too_few_rows_are_not_seen():
    rng = np.random.default_rng(0)
    X = np.column_stack([rng.standard_normal((5000, 2)), rng.random((5000, 2)) < 0.3])
    X = np.column_stack([X, np.arange(5000) < 2, np.zeros(5000)])
    found = private_ranges(as_rows(X), releases_at({"ranges": 20.0}), "ranges")
    assert found.seen.tolist() == [True, True, True, True, False, False]
    assert not private_ranges(as_rows(X), releases_at({"ranges": 1e5}), "ranges").seen.any()
