"""Exact samples of the discrete Gaussian, in whole numbers alone.

The discrete Gaussian of parameter σ has probabilities proportional to e^{-x²/(2σ²)} on the whole
numbers x. For a whole σ, x = ±(σ k + j) with j < σ has the exponent (k + t)²/2, t = j/σ. Karney's
method (Sampling exactly from the normal distribution, ACM TOMS 2016) draws k with probability
proportional to e^{-k²/2}, a sign and j, and accepts them with probability e^{-t (2k + t)/2}. Every
decision compares random words with whole numbers: there is no rounding and no approximation.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np

from privagrad._internal.jit import kernel
from privagrad._internal.validate import Vector
from privagrad.privacy.noise import BUFFER, KeyStream

DISCRETE_SPREAD = 3.0
"""Discrete noise is a Gaussian, and whole numbers drawn around it with this spread."""

_RESERVE = BUFFER // 2
"""Words that are there when a sample begins. One needs about 25, and more than these with
probability below 2^-200; it would then be begun again."""


def discrete_parameter(deviation: float) -> int:
    """A whole σ for which noise protects at least as well as a Gaussian of `deviation`.

    Let σ² ≥ deviation² + 9. Up to a factor within 1 ± 10⁻⁷⁶, the discrete Gaussian around a whole
    number S is what one gets from S + N(0, σ² - 9) by drawing a whole number around it with
    probabilities proportional to those of N(·, 9): by Poisson's summation formula the sums that
    both are divided by vary by that little. So it is a Gaussian mechanism, processed further.
    """
    least = math.ceil(Fraction(deviation) ** 2 + Fraction(DISCRETE_SPREAD) ** 2)
    return math.isqrt(least - 1) + 1


def add_discrete(units: Vector, stream: KeyStream, deviation: float) -> None:
    """Round `units` to whole ones and add a sample of the discrete Gaussian to each."""
    np.rint(units, out=units)
    sigma, done = discrete_parameter(deviation), 0
    while done < units.size:
        done = _add_samples(units, done, stream.words(BUFFER), sigma)


@kernel()
def _add_samples(units: Vector, done: int, words: Any, sigma: int) -> int:
    """Add samples to units[done:] as far as the words go; the place of the next one."""
    at = np.zeros(1, np.int64)
    while done < units.size and at[0] <= words.size - _RESERVE:
        sample = _sample(words, at, sigma)
        if at[0] > words.size:
            break
        units[done] += sample
        done += 1
    return done


@kernel()
def _sample(words: Any, at: Any, sigma: int) -> int:
    while at[0] <= words.size:
        k = _half_normal_count(words, at)
        if k < 0:
            continue
        negative = _below(words, at, 2) == 0
        j = _below(words, at, sigma)
        if k == 0 and j == 0 and negative:
            continue  # 0 has one sign only
        accepted = True
        for _ in range(k + 1):
            if not _survives(words, at, j, sigma, k):
                accepted = False
                break
        if accepted:
            x = sigma * k + j
            return -x if negative else x
    return 0


@kernel()
def _half_normal_count(words: Any, at: Any) -> int:
    """k ≥ 0 with probability proportional to e^{-k²/2}, or -1: try again."""
    k = 0
    while at[0] <= words.size and _root_of_e(words, at):
        k += 1
    for _ in range(k * (k - 1)):
        if not _root_of_e(words, at):
            return -1
    return k


@kernel()
def _root_of_e(words: Any, at: Any) -> bool:
    """True with probability e^{-1/2}: P(more than n trials in a row succeed) = 2⁻ⁿ/n!."""
    n = 1
    while _below(words, at, 2 * n) == 0:
        n += 1
    return n % 2 == 1


@kernel()
def _survives(words: Any, at: Any, j: int, sigma: int, k: int) -> bool:
    """True with probability e^{-γ}, γ = t (2k + t)/(2k + 2), t = j/σ: trials of γ/n, as above."""
    n = 1
    while True:
        if n > 1 and _below(words, at, n) != 0:
            break
        if _below(words, at, sigma) >= j:
            break
        choice = _below(words, at, 2 * k + 2)
        if choice > 2 * k or (choice == 2 * k and _below(words, at, sigma) >= j):
            break
        n += 1
    return n % 2 == 1


@kernel()
def _below(words: Any, at: Any, n: int) -> int:
    """A uniform whole number below `n`; n itself, which ends every loop, without words left."""
    mask = np.uint64(n - 1)
    for shift in (1, 2, 4, 8, 16, 32):
        mask |= mask >> np.uint64(shift)
    while at[0] < words.size:
        value = np.int64(words[at[0]] & mask)
        at[0] += 1
        if value < n:
            return value  # type: ignore[return-value]
    at[0] = words.size + 1
    return n
