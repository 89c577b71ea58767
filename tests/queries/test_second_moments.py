"""The matrix of second moments: what a row can move, its noise, its layout."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.sparse import csr_array

from privagrad.glm.examples import Examples
from privagrad.glm.rows import as_rows
from privagrad.privacy.mechanism import GaussianSum
from privagrad.privacy.users import Users
from privagrad.queries import second_moments
from privagrad.queries.second_moments import (
    PURPOSE,
    Factors,
    exact_second_moments,
    private_second_moments,
)
from tests.releases import releases_at
from tests.statistics import assert_scale

ENTRIES = st.one_of(
    st.sampled_from([0.0, 1.0, np.nan, np.inf, 1e154, 1e300, 5e-324]), st.floats(-1e3, 1e3)
)


def table(n=400, dim=4, seed=0):
    rng = np.random.default_rng(seed)
    return rng.standard_normal((n, dim)) * (rng.random((n, dim)) < 0.7), rng.standard_normal(n)


def handed(X, y, radius, noise, layout=np.asarray, users=None):
    """The mechanism, and the units that it was handed."""
    made = []

    class Recorded(GaussianSum):
        def release(self, total, *rest):
            made.append((self, total.memory.copy()))
            return super().release(total, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(second_moments, "GaussianSum", Recorded)
        releases = releases_at({PURPOSE: noise})
        rows = Examples(as_rows(layout(X)), y)
        private_second_moments(rows, radius, releases, users=users)
    return made[0]


@pytest.mark.parametrize("layout", [np.asarray, csr_array])
@pytest.mark.parametrize("scale", [1e-9, 1e-3, 1.0, 1e3])
@given(
    entries=st.lists(ENTRIES, min_size=2, max_size=9),
    target=ENTRIES,
    radius=st.floats(0.01, 100),
    noise=st.floats(0.01, 100),
)
def test_a_row_moves_the_matrix_by_at_most_the_sensitivity(
    layout, scale, entries, target, radius, noise
):
    """Neighbours that differ in one row, which is a row or nothing; in exact arithmetic."""
    X, y = table(3, len(entries))
    X[1], y[1] = scale * np.array(entries), scale * target
    mechanism, units = handed(X, y, radius, noise, layout)
    without_X, without_y = X.copy(), y.copy()
    without_X[1] = without_y[1] = 0.0
    _, rest = handed(without_X, without_y, radius, noise, layout)
    squares = sum(Fraction(v) ** 2 for v in (units - rest).tolist())
    assert squares <= (Fraction(mechanism.sensitivity) / Fraction(mechanism.grid)) ** 2


def test_a_row_at_the_bound_moves_it_by_one():
    """So that a smaller bound, or off-diagonal entries that count less, would be noticed."""
    X, y = np.array([[3.0, -4.0, 12.0]]), np.array([84.0])
    for radius in (85.0, 20.0):
        mechanism, units = handed(X, y, radius, 1.0)
        assert np.linalg.norm(units) * mechanism.grid == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize("count", [2, 30])
def test_a_user_at_the_bound_moves_it_by_one_with_all_rows_together(count):
    X, y = table(4 + count)
    X[4:], y[4:] = [3.0, -4.0, 12.0, 0.0], 84.0
    users = Users.of([0, 0, 1, 1] + [2] * count, 4 + count).draw(np.random.default_rng(0))
    mechanism, units = handed(X, y, 20.0, 1.0, users=users)
    X[4:] = y[4:] = 0.0
    _, rest = handed(X, y, 20.0, 1.0, users=users)
    moved = np.linalg.norm(units - rest) * mechanism.grid
    assert 1 - 1e-4 < moved <= mechanism.sensitivity


@pytest.mark.parametrize("layout", [np.asarray, csr_array])
@pytest.mark.parametrize("radius", [100.0, 1.5])
def test_without_much_noise_it_is_the_mean_of_outer_products(layout, radius):
    X, y = table()
    found = private_second_moments(
        Examples(as_rows(layout(X)), y), radius, releases_at({PURPOSE: 1e-6})
    )
    V = np.column_stack([X, y])
    V *= np.minimum(1, radius / np.linalg.norm(V, axis=1))[:, None]
    assert found.matrix == pytest.approx(V.T @ V / 400, abs=1e-4)
    assert np.array_equal(found.matrix, found.matrix.T)
    factors = Factors(lambda examples: np.full((400, 1, 1), 0.5), (), 1)
    rows = Examples(as_rows(X), y)
    alone = private_second_moments(rows, 1e3, releases_at({PURPOSE: 1e-8}), PURPOSE, factors)
    assert alone.matrix == pytest.approx(0.5 * X.T @ X / 400, abs=1e-4)


@pytest.mark.parametrize("layout", [np.asarray, csr_array])
def test_without_privacy_it_is_exact(layout):
    X, y = table()
    V = np.column_stack([X, y])
    assert exact_second_moments(layout(X), y) == pytest.approx(V.T @ V / 400)


def test_rows_and_targets_that_are_not_finite_add_nothing():
    X, y = table()
    zeros, wrong, missing = X.copy(), X.copy(), y.copy()
    zeros[[3, 8]], wrong[3, 1], missing[8] = 0.0, np.nan, np.inf
    less = np.where(np.isin(np.arange(400), (3, 8)), 0.0, y)
    first = private_second_moments(
        Examples(as_rows(wrong), missing), 3.0, releases_at({PURPOSE: 1.0})
    )
    second = private_second_moments(
        Examples(as_rows(zeros), less), 3.0, releases_at({PURPOSE: 1.0})
    )
    assert np.array_equal(first.matrix, second.matrix)


def test_the_noise_is_as_stated():
    """On the diagonal and off it, and as the mechanism needs; false alarm 1e-7 each."""
    rows, radius, z = Examples(as_rows(np.zeros((50, 40))), np.zeros(50)), 3.0, 7.0
    found = private_second_moments(rows, radius, releases_at({PURPOSE: z}))
    assert found.noise == pytest.approx(z * radius**2 / (math.sqrt(2) * 50))
    assert_scale(found.matrix[np.triu_indices(41, 1)], found.noise)
    many = [
        np.diag(private_second_moments(rows, radius, releases_at({PURPOSE: z}, s))
                .matrix)
        for s in range(20)
    ]  # fmt: skip
    assert_scale(np.array(many), math.sqrt(2) * found.noise)


@pytest.mark.parametrize("layout", [np.asarray, csr_array])
def test_threads_share_the_rows_out_without_a_trace(layout, monkeypatch):
    X, y = table(97)
    X[11, 2] = np.nan
    rows = Examples(as_rows(layout(X)), y)

    def answer():
        return private_second_moments(rows, 2.0, releases_at({PURPOSE: 0.3})).matrix

    whole = answer()
    monkeypatch.setattr(second_moments, "_SPLIT_FROM", 0)
    assert np.array_equal(answer(), whole)


def test_a_plan_without_the_event_refuses_it():
    X, y = table()
    with pytest.raises(RuntimeError, match="second moments"):
        private_second_moments(Examples(as_rows(X), y), 1.0, releases_at({"moments": 1.0}))
