"""Roots on the safe side, and minima."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from privagrad.privacy.roots import crossing, least

CURVES = {
    "line": lambda x, root: root - x,
    "steep": lambda x, root: math.expm1(30 * (root - x)),
    "flat": lambda x, root: (root - x) ** 5,
    "jump": lambda x, root: 1.0 if x < root else -1e-3,
    "infinite": lambda x, root: math.inf if x < root else -math.inf,
    "clipped": lambda x, root: max(20 * (root - x), -0.5),
}


@pytest.mark.parametrize("curve", CURVES.values(), ids=CURVES)
@given(root=st.floats(-0.99, 1.99), mirrored=st.booleans())
def test_a_crossing_ends_below_zero_and_near_the_root(curve, root, mirrored):
    calls = []

    def f(x):
        calls.append(x)
        return curve(-x if mirrored else x, root)

    sign = -1 if mirrored else 1
    found = sign * crossing(f, sign * -1.0, sign * 2.0, 1e-6)
    assert curve(found, root) <= 0
    assert root <= found <= root + 1e-6
    # Two ends, and at most three steps for every halving.
    assert len(calls) <= 2 + 3 * math.ceil(math.log2(3 / 1e-6) + 1)


def test_a_crossing_ends_early_where_that_is_near_enough():
    assert -0.1 <= 0.3 - crossing(lambda x: 0.3 - x, -1.0, 2.0, 1e-9, 0.1) <= 0
    slow = crossing(lambda x: math.expm1(8 * (0.3 - x)), -1.0, 2.0, 1e-9, 0.01)
    assert -0.01 <= math.expm1(8 * (0.3 - slow)) <= 0


@given(st.floats(-2.0, 3.0))
def test_the_least_value_is_found(place):
    found = least(lambda x: abs(x - place) ** 1.5, -2.0, 3.0, 1e-3)
    assert abs(found - place) <= 1e-3
