"""Noise that is correlated over the steps of a run: banded Toeplitz matrices and their history.

Let C be the lower-triangular Toeplitz matrix with C_{t,t-k} = c_k for k < b (b "bands") and w_t
independent normals. A run releases X + C^{-1} w: the noise M of step t is

    M_t = w_t - Σ_{k=1}^{b-1} c_k M_{t-k},

so that a part of what was added before is taken away again, and sums of many releases are less
noisy. The c_k are those of the square root of the matrix of prefix sums, binom(2k, k)/4^k, cut off
after b (Kalinin and Lampert 2024, "Banded square root matrix factorization").
"""

from __future__ import annotations

import math
import os
from functools import lru_cache
from typing import Any, NoReturn

import numpy as np

from privagrad._internal import validate
from privagrad._internal.jit import kernel
from privagrad._internal.validate import Vector

MOST_BANDS = 32
"""Up to so many bands all c_k differ, and sums of c_k M are exact in doubles."""

INDEPENDENT = (1.0,)
"""The coefficients of independent noise."""

_PARTS = 2**10
"""Coefficients are multiples of one part in so many."""
_LONGEST = 2**12
"""So many coefficients of C^{-1} are computed; up to MOST_BANDS bands the others are < 1e-30."""
_LARGEST_INTEGER = 2.0**31 - 1
_LARGEST_EXACT = 2.0**40


def coefficients_of(bands: int) -> tuple[float, ...]:
    """c_0, ..., c_{b-1}, each rounded to a multiple of 2⁻¹⁰: 1, 1/2, 3/8, 5/16, ..."""
    if not 1 <= validate.integer("bands", bands) <= MOST_BANDS:
        raise ValueError(f"Expected 1 to {MOST_BANDS} bands of correlated noise, found {bands}.")
    found, exact = [1.0], 1.0
    for k in range(1, bands):
        exact *= (2 * k - 1) / (2 * k)
        found.append(round(exact * _PARTS) / _PARTS)
    return tuple(found)


def inverse_of(coefficients: tuple[float, ...], count: int) -> Vector:
    """h_0, ..., h_{count-1} of the Toeplitz matrix C^{-1}: M_t = Σ_k h_k w_{t-k}."""
    inverse = np.zeros(count)
    inverse[0] = 1.0
    for t in range(1, count):
        reach = min(t, len(coefficients) - 1)
        inverse[t] = -sum(coefficients[k] * inverse[t - k] for k in range(1, reach + 1))
    return inverse


@lru_cache(maxsize=MOST_BANDS)
def spread_of(bands: int) -> float:
    """The standard deviation of a late M_t over that of independent noise at the same z: |c| |h|.

    It is 1 for one band.
    """
    coefficients = coefficients_of(bands)
    return math.hypot(*coefficients) * math.hypot(*inverse_of(coefficients, _LONGEST))


@lru_cache(maxsize=64)
def largest_noise(coefficients: tuple[float, ...], largest: float) -> float:
    """A bound on |M_t| where |w_t| ≤ `largest`, in whole units, each sum rounded by up to half."""
    inverse = np.abs(inverse_of(coefficients, _LONGEST))
    return (1 + 1e-6) * float(inverse.sum()) * (largest + 1.0)


class NoiseHistory:
    """The noise M of the last b - 1 releases of one run, in whole units.

    Parameters
    ----------
    mechanism : object
        The mechanism that makes all releases of the run.
    coefficients : tuple of float
        1 = c_0, ..., c_{b-1}.
    size : int
        How many coordinates are released.
    largest : float
        A bound on |w_t|.

    Attributes
    ----------
    is_open : bool
        Whether a release has begun and not ended.

    Guarantees
    ----------
    It is SECRET: with the releases it gives the exact sums. It stays in the memory of the process
    that began it. A copy, a pickle or a fork of it is refused, and a checkpoint has none of it: a
    run that goes on elsewhere begins another history, which is private by itself.
    """

    def __init__(
        self, mechanism: Any, coefficients: tuple[float, ...], size: int, largest: float
    ) -> None:
        self.mechanism, self.size, self.is_open = mechanism, size, False
        bound = largest_noise(coefficients, largest)
        if not bound < _LARGEST_EXACT:
            raise ValueError(
                f"Expected correlated noise of less than 2^40 units, found up to {bound:.3g}: take "
                "a coarser grid."
            )
        kind = np.int32 if bound < _LARGEST_INTEGER else np.int64
        self._coefficients = np.array(coefficients[1:])
        self._past = np.zeros((len(coefficients) - 1, size), kind)
        self._next, self._process = 0, os.getpid()

    def begin(self, mechanism: object, size: int) -> None:
        """Called before a release: refuse one of another mechanism, length or process."""
        if os.getpid() != self._process:
            raise RuntimeError(
                "Expected a run to go on in the process that began it, found a forked one: its "
                "noise would be taken away from two releases. Begin a run of its own there."
            )
        if mechanism is not self.mechanism or size != self.size:
            raise ValueError(
                f"Expected a release of {self.size} coordinates by the mechanism that the history "
                f"was made for, found {size}, or another mechanism."
            )
        if self.is_open:
            raise RuntimeError(
                "Expected the release before this one to have ended, found one that was broken "
                "off, or two at once: of its noise only a part is known. Begin another history."
            )
        self.is_open = True
        # c_k belongs to the place that was written k releases ago.
        self._in_place = np.roll(self._coefficients[::-1], self._next)

    def subtract(self, units: Vector, start: int) -> Vector:
        """Round `units`, take round(Σ c_k M_{t-k}) away; a copy of the rounded units before."""
        kept = np.empty_like(units)
        past = self._past[:, start : start + units.size]
        _subtract(units, kept, past, self._in_place)
        return kept

    def keep(self, units: Vector, before: Vector, start: int) -> None:
        """Note the noise that has been added: noisy `units` less those `before`."""
        self._past[self._next, start : start + units.size] = units - before

    def end(self) -> None:
        """Called after a release."""
        self._advance()
        self.is_open = False

    def _advance(self) -> None:
        self._next = (self._next + 1) % len(self._past)

    def skip(self, count: int) -> None:
        """So many steps release nothing: their sums and their noise are 0."""
        for _ in range(min(count, len(self._past))):
            self._past[self._next] = 0
            self._advance()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "Expected the noise of a run to stay where it is, found a copy or a pickle of it: with "
            "the releases it gives the sums without noise."
        )


@kernel()
def _subtract(units: Vector, kept: Vector, past: Any, coefficients: Vector) -> None:
    for j in range(units.size):
        kept[j] = np.rint(units[j])
        total = 0.0
        for k in range(coefficients.size):
            total += coefficients[k] * np.float64(past[k, j])
        units[j] = kept[j] - np.rint(total)
