"""Vectors of four in kernels: the same numbers as the scalar operations."""

import math

import numpy as np
import pytest

from privagrad._internal.jit import kernel
from privagrad._internal.lanes import LANES, add_product, add_rounded, add_squares

STRANGE = [math.nan, math.inf, -math.inf, 0.0, -0.0, 1e308, 1e-308, 2.5]


@kernel()
def products(total, at, factor, array, index):
    add_product(total, at, factor, array, index)


@kernel()
def squares(total, at, factor, array, index):
    add_squares(total, at, factor, array, index)


@kernel()
def rounded(total, at, value, array, factors, first):
    add_rounded(total, at, value, array, factors, first)


@pytest.fixture
def arrays():
    rng = np.random.default_rng(0)
    return rng.standard_normal(13), 1e3 * rng.standard_normal(13), rng.standard_normal(9)


@pytest.mark.parametrize("at", [0, 1, 5, 9])  # any alignment
def test_only_the_four_lanes_change(arrays, at):
    total, array, factors = arrays
    index, inside = 9 - at, np.arange(13) - at
    lanes = (inside >= 0) & (inside < LANES)
    expected = total.copy()
    expected[lanes] += 1.7 * array[index : index + LANES]
    found = total.copy()
    products(found, at, 1.7, array, index)
    assert found == pytest.approx(expected, rel=1e-15)
    assert np.array_equal(found[~lanes], total[~lanes])
    expected = total.copy()
    expected[lanes] += np.square(1.7 * array[index : index + LANES])
    found = total.copy()
    squares(found, at, 1.7, array, index)
    assert found == pytest.approx(expected, rel=1e-15)
    assert np.array_equal(found[~lanes], total[~lanes])
    expected = total.copy()
    expected[lanes] += np.rint(1.7 * array[at : at + LANES] * factors[3 : 3 + LANES])
    found = total.copy()
    rounded(found, at, 1.7, array, factors, 3)
    assert np.array_equal(found, expected)


@pytest.mark.parametrize("value", STRANGE)
def test_numbers_that_are_not_finite_stay_so_and_a_factor_of_zero_adds_nothing(value):
    array = np.array(STRANGE)
    for first in (0, 4):
        part = slice(first, first + LANES)
        found = np.zeros(LANES)
        products(found, 0, value, array, first)
        with np.errstate(all="ignore"):
            assert np.array_equal(found, value * array[part], equal_nan=True)
            found = np.zeros(LANES)
            squares(found, 0, value, array, first)
            assert np.array_equal(found, np.square(value * array[part]), equal_nan=True)
            total, factors = np.zeros(8), np.array([0.0, -0.0, 3.0, math.nan])
            rounded(total, first, value, array, factors, 0)
            expected = np.rint(value * array[part] * factors)
        expected[:2] = 0.0
        assert np.array_equal(total[part], expected, equal_nan=True)
