"""Standard normals out of random words, by a Box–Muller transformation without branches.

Two words of 64 bits become two normals r cos φ and r sin φ, with r = sqrt(-2 log U) and a uniform
angle φ:

- U = (first word + (l + 1/2)/2¹¹)/2⁶⁴ with l the last 11 bits of the second word: 75 bits, so that
  the tail P(r > t) = e^{-t²/2} is right up to t = 10;
- φ = (i + 1/2) 2⁻⁵¹ π/2 in one quarter of the circle, with i the first 51 bits of the second
  word, signed; its remaining 2 bits choose the quarter.

The logarithm, the sine and the cosine are polynomials, interpolated at Chebyshev nodes in 60
digits, and every operation is one of IEEE 754. So the compiler can work on several pairs at once,
and the same words give the same normals, to the last bit, on every processor.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from privagrad._internal.jit import kernel
from privagrad._internal.validate import Vector
from privagrad.privacy.noise import BUFFER, KeyStream, Words

RELATIVE_ERROR = 2.0**-50
"""A normal differs from the exact value for its words by at most this part of its radius r."""

LARGEST = 10.3
"""No normal is larger: r ≤ sqrt(2 · 76 log 2); beyond it lies a probability of 7e-25."""

# sin(π x/2)/x, (1 - cos(π x/2))/x² and (log((1 + s)/(1 - s))/s - 2)/s² as polynomials in x² ≤ 1/4
# and s² ≤ (√2 - 1)⁴.
_SIN = (
    1.5707963267948966, -0.6459640975062443, 0.07969262624604301, -0.004681754132340976,
    0.0001604411507421909, -3.59864335298231e-06, 5.633933781537854e-08,
)  # fmt: skip
_COS = (
    1.2337005501361697, -0.2536695079010478, 0.020863480763340773, -0.0009192602745468447,
    2.5202039028029178e-05, -4.710678405505227e-07, 6.329396344967424e-09,
)  # fmt: skip
_LOG = (
    0.666666666666667, 0.39999999999899505, 0.28571428625975487, 0.2222221113479508,
    0.18182889125261723, 0.15331721600556042, 0.14616449685043406,
)  # fmt: skip
# log 2 = _LOG2 + _LOG2_REST; multiples of the first part up to 2¹³ are exact.
_LOG2, _LOG2_REST = 0.6931471805592082, 7.371002565167799e-13
_ROOT_HALF = 0x3FE6A09E667F3BCD  # the bits of the double sqrt(1/2)
_NEAR_ONE = np.uint64(0xB504F333F9DE6800)  # 2⁶⁴ sqrt(1/2), as that double
_MANTISSA = 2**52 - 1
_TAIL, _QUARTER, _ANGLE = np.uint64(2**11 - 1), np.uint64(11), 13
_SWAP, _FLIP = np.uint64(1), np.uint64(2)


@kernel(inline="late")
def normal_pair(radius: Any, angle: Any) -> tuple[float, float]:
    """Two independent standard normals out of two independent uniform words."""
    tail = np.float64(np.int64(angle & _TAIL))
    uniform = np.float64(radius) + (tail + 0.5) * 2.0**-11  # 2⁶⁴ U
    rest = np.float64(~radius) + (2047.5 - tail) * 2.0**-11  # 2⁶⁴ (1 - U), also where U rounds to 1
    # U = 2^exponent (1 + f), with 1 + f from sqrt(1/2) to sqrt(2).
    bits = np.float64(uniform).view(np.int64) - _ROOT_HALF
    mantissa = np.int64((bits & _MANTISSA) + _ROOT_HALF).view(np.float64)
    near = radius >= _NEAR_ONE
    exponent = 0.0 if near else np.float64((bits >> 52) - 64)
    f = -rest * 2.0**-64 if near else mantissa - 1.0
    s = f / (2.0 + f)
    z = s * s
    q = _LOG[5] + z * _LOG[6]
    q = _LOG[0] + z * (_LOG[1] + z * (_LOG[2] + z * (_LOG[3] + z * (_LOG[4] + z * q))))
    logarithm = exponent * _LOG2 + (exponent * _LOG2_REST + s * z * q + 2.0 * s)
    r = math.sqrt(-2.0 * logarithm)
    x = (np.float64(np.int64(angle) >> _ANGLE) + 0.5) * 2.0**-51
    y = x * x
    p = _SIN[5] + y * _SIN[6]
    p = _SIN[0] + y * (_SIN[1] + y * (_SIN[2] + y * (_SIN[3] + y * (_SIN[4] + y * p))))
    q = _COS[5] + y * _COS[6]
    q = _COS[0] + y * (_COS[1] + y * (_COS[2] + y * (_COS[3] + y * (_COS[4] + y * q))))
    sine, cosine = r * (x * p), r * (1.0 - y * q)
    quarter = angle >> _QUARTER
    swapped, flipped = (quarter & _SWAP) != 0, (quarter & _FLIP) != 0
    a = sine if swapped else cosine
    b = cosine if swapped else sine
    return -a if flipped else a, -b if flipped else b


def add_normals(units: Vector, stream: KeyStream, deviation: float) -> None:
    """Round `units` to whole ones and add round(N(0, deviation²)) to each.

    At most BUFFER units, or whole buffers up to PIECE, which are the same as one after the other.
    """
    if units.size % 2:
        even = np.append(units, 0.0)
        _add_pairs(even, stream.words(even.size), deviation)
        units[:] = even[:-1]
    else:
        _add_pairs(units, stream.words(units.size), deviation)


@kernel()
def _add_pairs(units: Vector, words: Words, deviation: float) -> None:
    for start in range(0, units.size, BUFFER):
        own, drawn = units[start : start + BUFFER], words[start : start + BUFFER]
        half = own.size // 2
        # Slices: of one array the compiler would not know that its halves do not overlap.
        first, second = own[:half], own[half:]
        radii, angles = drawn[:half], drawn[half:]
        for i in range(half):
            a, b = normal_pair(radii[i], angles[i])
            first[i] = np.rint(first[i]) + np.rint(a * deviation)
            second[i] = np.rint(second[i]) + np.rint(b * deviation)
