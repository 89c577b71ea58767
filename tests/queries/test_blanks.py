"""Columns with blanks: a NaN costs its coordinate alone, and centres are those of known entries."""

import numpy as np
import pytest
from scipy.sparse import csr_array

from privagrad.glm.rows import as_rows
from privagrad.queries import moments
from privagrad.queries.columns import whitened_moments
from tests.releases import releases_at, releases_of

LAYOUTS = ["dense", "csr"]


def rows_of(X, layout="dense"):
    return as_rows(csr_array(X) if layout == "csr" else X)


def blank_table(share, n=10_000, seed=0):
    """A column 1990 ± 10 and a normal one, each followed by what tells of its blanks."""
    rng = np.random.default_rng(seed)
    known = rng.random((n, 2)) >= [share, 0.0]
    values = np.where(known, rng.normal([1990, 0], [10, 3], (n, 2)), np.nan)
    X = np.column_stack([values[:, 0], ~known[:, 0], values[:, 1], ~known[:, 1]])
    return X, np.array([1, -1, 3, -1]), np.array([np.inf, 1.0, np.inf, 1.0])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_missing_entry_costs_its_own_coordinate_alone(layout):
    X = np.array([[1.0, np.nan, 1.0], [1.0, 1.0, 1.0], [1.0, np.inf, 1.0]])
    means, squares, _ = whitened_moments(
        rows_of(X, layout), np.ones(3), 9.0, releases_at({"moments": 1e-9}), "moments"
    )
    assert np.allclose(means, [2 / 3, 1 / 3, 2 / 3], atol=1e-5)
    assert np.allclose(squares, means, atol=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_standardised_blanks_are_at_the_centre(layout):
    X = np.array([[np.nan, 2.0], [3.0, np.nan], [np.inf, 4.0]])
    table = rows_of(X, layout).standardized(np.array([1.0, 0.0]), np.array([2.0, 4.0]), True)
    found = table.matrix.toarray() if layout == "csr" else table.array
    assert found.tolist() == [[0, 0.5, 1], [1, 0, 1], [np.inf, 1, 1]]


@pytest.mark.parametrize("share", [0.0, 0.2, 0.5])
def test_centres_and_units_are_those_of_known_entries(share):
    """Filling with 0 made the centre 1990 (1 - share), and the unit hundreds."""
    X, blanks, limits = blank_table(share)
    for seed in range(5):
        releases = releases_of(moments.COLUMNS.shares, 1.0, 1e-6, seed)
        found = moments.private_columns(
            as_rows(X), moments.COLUMNS, releases, limits=limits, blanks=blanks
        )
        assert abs(found.centre[0] - 1990) < 40
        assert 8 < found.unit[0] < 80
        # Where nothing is missing, nothing is to be learned of it.
        assert (found.unit[1] <= 1) == (share > 0)
        assert found.unit[3] > 1e9
    exact = moments.known_columns(as_rows(X), blanks=blanks)
    assert exact.centre[0] == pytest.approx(np.nanmean(X[:, 0]))
    assert exact.unit[0] == pytest.approx(np.nanstd(X[:, 0]), rel=0.5)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_bounded_columns_with_blanks(layout):
    X, blanks, _ = blank_table(0.3)
    bounds = np.array([1900.0, 0, -20, 0]), np.array([2100.0, 1, 20, 1])
    X = np.clip(X, *bounds)
    releases = releases_of([moments.BOUNDED_COLUMNS], 1.0, 1e-6)
    rows, purpose = rows_of(X, layout), moments.BOUNDED_COLUMNS.purpose
    found = moments.bounded_columns(rows, bounds, releases, purpose, blanks=blanks)
    assert abs(found.centre[0] - 1990) < 5
    assert abs(found.centre[1] - 0.3) < 0.03
    assert found.unit[1] == 1
    assert found.unit[3] > 1e9
