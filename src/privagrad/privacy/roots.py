"""Where a function of one variable crosses zero, and where it is least."""

from __future__ import annotations

import math
from collections.abc import Callable

Function = Callable[[float], float]

_GOLDEN = (math.sqrt(5) - 1) / 2


def crossing(
    f: Function, above: float, below: float, tolerance: float, enough: float = 0.0
) -> float:
    """A point with f ≤ 0 at most `tolerance` away from one with f > 0, or with f ≥ -`enough`.

    f(above) > 0 ≥ f(below); `above` may lie on either side of `below`, and f may be infinite.
    False position with halved values at an end that stays (Illinois); a bisection where three
    steps have not halved the bracket.
    """
    f_above, f_below = f(above), f(below)
    reached = f_below
    steps, allowed, stayed = 0, abs(below - above), 0
    while abs(below - above) > tolerance and reached < -enough:
        share = 0.5 if math.isinf(f_above - f_below) else f_above / (f_above - f_below)
        steps += 1
        if steps % 3 == 0:
            allowed /= 2
            share = 0.5 if abs(below - above) > allowed else share
        # At least half a tolerance away from both ends, so that both close in.
        edge = min(0.5, tolerance / 2 / abs(below - above))
        middle = above + (below - above) * min(max(share, edge), 1 - edge)
        if middle in (above, below):
            break
        value = f(middle)
        if value > 0:
            above, f_above = middle, value
            f_below, stayed = (f_below / 2 if stayed > 0 else f_below), 1
        else:
            below, f_below, reached = middle, value, value
            f_above, stayed = (f_above / 2 if stayed < 0 else f_above), -1
    return below


def least(f: Function, low: float, high: float, tolerance: float) -> float:
    """Where a function with one minimum in [low, high] is least, by golden section."""
    left, right = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
    f_left, f_right = f(left), f(right)
    while high - low > tolerance:
        if f_left <= f_right:
            high, right, f_right = right, left, f_left
            left = high - _GOLDEN * (high - low)
            f_left = f(left)
        else:
            low, left, f_left = left, right, f_right
            right = low + _GOLDEN * (high - low)
            f_right = f(right)
    return left if f_left <= f_right else right
