"""Categories found in private rows: what shows, what stays hidden, what it costs."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import ndtri

from privagrad.privacy.accounting import PrivacyPlan
from privagrad.privacy.events import GaussianEvent, SelectEvent
from privagrad.privacy.mechanism import GaussianSum
from privagrad.queries import categories
from privagrad.queries.categories import PURPOSE, discover, discovery, threshold
from tests.releases import releases_at
from tests.statistics import Constant, assert_scale, rate_accepted


def discovered(counts, n, event, source):
    return discover(counts, n, releases_at({PURPOSE: event.noise_multiplier}, source, event.leak))


def released(counts, n, event, seed):
    """The noisy counts themselves, and what the mechanism was handed, in rows."""
    seen = []

    class Recorded(GaussianSum):
        def release(self, total, *rest):
            handed = total.memory * self.grid
            after = super().release(total, *rest)
            seen.append((handed, after * n * np.sqrt(len(counts))))
            return after

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(categories, "GaussianSum", Recorded)
        discovered(counts, n, event, seed)
    return seen[0]


def test_frequent_categories_show_most_frequent_first():
    counts = {"city": Counter(Bern=5000, Basel=9000, Chur=1), "job": Counter(cook=7000)}
    event = discovery(2, 1.0, 1e-6)
    found = discovered(counts, 20_000, event, 0)
    assert found == {"city": ("Basel", "Bern"), "job": ("cook",)}


def test_the_noise_is_that_of_the_event():
    counts = {"a": Counter({str(k): 10 for k in range(40)}), "b": Counter(), "c": Counter(x=3)}
    event = GaussianEvent(5.0, leak=1e-7)
    errors = []
    for seed in range(30):
        _, noisy = released(counts, 1000, event, seed)
        errors.append(noisy - np.array([10] * 40 + [3]))
    assert_scale(np.concatenate(errors), 5.0 * np.sqrt(3))


@given(st.lists(st.integers(0, 4), min_size=1, max_size=6), st.integers(0, 5))
def test_one_row_is_a_vector_of_norm_at_most_one(row, others):
    """A row with one category, or a blank (4), in each column moves what is summed by ≤ 1.

    But for the rounding to the grid, which the sensitivity counts.
    """
    columns = [f"c{k}" for k in range(len(row))]
    before = {name: Counter({str(v): others for v in range(4)}) for name in columns}
    after = {
        name: before[name] + Counter([str(v)] if v < 4 else [])
        for name, v in zip(columns, row, strict=True)
    }
    keys = [(name, str(v)) for name in columns for v in range(4)]
    event = GaussianEvent(3.0, leak=1e-7)

    def sums(counts):
        told = {name: Counter({str(v): counts[name][str(v)] for v in range(4)}) for name in columns}
        return released(told, 50, event, 0)[0]

    moved = sums(after) - sums(before)
    assert len(moved) == len(keys)
    assert np.linalg.norm(moved) <= GaussianSum(len(row), 3.0, 50).sensitivity
    if all(v < 4 for v in row):
        assert np.linalg.norm(moved) >= 1 - 1e-5


def test_a_category_of_one_row_shows_as_rarely_as_the_leak_says():
    """At a leak of 0.1 over two columns, a row's own categories show in at most 10 % of runs."""
    counts = {"a": Counter(alone=1), "b": Counter(mine=1)}
    event = GaussianEvent(3.0, leak=0.1)
    shown = sum(any(discovered(counts, 1000, event, seed).values()) for seed in range(6000))
    exact = 1 - (1 - 0.05) ** 2
    assert rate_accepted(shown, 6000, exact)
    assert not rate_accepted(shown, 6000, 1.4 * exact)
    assert not rate_accepted(shown, 6000, exact / 1.4)


def test_the_threshold_is_the_normal_quantile():
    event = GaussianEvent(7.0, leak=1e-6)
    assert threshold(4, 1000, event) == pytest.approx(1 + 14.0 * -ndtri(2.5e-7), rel=1e-3)
    assert threshold(4, 1000, event) > 1 + 14.0 * -ndtri(2.5e-7)


@pytest.mark.parametrize(("columns", "n"), [(1, 10), (50, 10**6), (2000, 10**9), (9, 10**12)])
def test_the_threshold_counts_the_grid(columns, n):
    """One row's category, with noise of exactly the quantile that may leak, stays hidden.

    The noise is z (1 + sqrt(k) grid) for a row's votes together, and whole units of the grid.
    """
    quantile = -ndtri(1e-6 / columns)
    source = Constant.source(quantile)
    counts = {f"c{k}": Counter(mine=1) for k in range(columns)}
    for noise in np.geomspace(0.4, 3.0, 23):
        event = GaussianEvent(noise, leak=1e-6)
        assert not any(discovered(counts, n, event, source).values())
    above = Constant.source(1.01 * quantile + 1.0 / threshold(columns, n, event))
    assert all(discovered(counts, n, event, above).values())


def test_the_leak_is_paid_from_delta():
    plain, leaky = GaussianEvent(4.0), GaussianEvent(4.0, leak=4e-6)
    for epsilon in (0.5, 1.0):
        got = PrivacyPlan((leaky,)).delta(epsilon)
        least = 4e-6 + (1 - 4e-6) * PrivacyPlan((plain,)).delta(epsilon)
        assert least * (1 - 1e-3) <= got <= least * 1.01
    assert PrivacyPlan((leaky,)).epsilon(1e-5) > PrivacyPlan((plain,)).epsilon(1e-5)
    assert PrivacyPlan((GaussianEvent(4.0, 3, leak=4e-6),)).epsilon(1e-5) == np.inf


def test_a_selection_cannot_hold_leaks():
    plan = PrivacyPlan((SelectEvent((GaussianEvent(4.0, leak=1e-7),), 5.0),))
    with pytest.raises(ValueError, match="beside a selection"):
        plan.epsilon(1e-5)


def test_an_impossible_leak_is_refused():
    with pytest.raises(ValueError, match="leak"):
        GaussianEvent(1.0, leak=1.0)
