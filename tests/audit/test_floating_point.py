"""Attacks on the low-order bits of noise: textbook noise falls to them, noise on a grid does not.

A release says whether one row is in a sum. Noise hides that up to a small epsilon, if numbers were
real. As doubles they have more to say:

- Mironov (2012, "On significance of the least significant bits for differential privacy"): the
  doubles that x + noise can be have holes, and for another x others. 0 + noise has bits far below
  the last one of x, and x + noise has none of them.
- Jin, McMurtry, Rubinstein and Ohrimenko (2022, "Are we there yet? Timing and floating-point
  attacks on differential privacy systems"): normals made of uniform numbers of 53 bits are few.
  The radius of a Box-Muller pair gives its uniform number back, a multiple of 2⁻⁵³, to whoever
  subtracts the right sum.

The attacker knows everything but whether the row is there.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from scipy import stats

from privagrad.audit import Audit, measure_release
from privagrad.privacy.accounting import PrivacyPlan
from privagrad.privacy.events import GaussianEvent
from privagrad.privacy.mechanism import GaussianSum
from privagrad.privacy.noise import Noise, random_source
from tests.statistics import FALSE_ALARM

DELTA, NOISE, DIM = 1e-5, 16.0, 2**12
EVENTS = (GaussianEvent(NOISE),)
ROW = 2.0**-6
"""The row in every coordinate, so that its norm is 1. Nothing else is in the sum."""

RELEASES = 400

Release = Callable[[bool, np.random.Generator], np.ndarray]
Attack = Callable[[np.ndarray], float]


def numpy_noise(present: bool, rng: np.random.Generator) -> np.ndarray:
    """What most code does."""
    return np.asarray(ROW * present + rng.normal(0.0, NOISE, DIM))


def box_muller_noise(present: bool, rng: np.random.Generator) -> np.ndarray:
    """The textbook's normals. A power of two scales them without any rounding."""
    radius = np.sqrt(-2.0 * np.log(1.0 - rng.random(DIM // 2)))
    angle = 2 * np.pi * rng.random(DIM // 2)
    pairs = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])
    return np.asarray(ROW * present + NOISE * pairs)


def on_the_grid(noise: Noise) -> Release:
    """The same by this library. A row whose low-order bits say that it is there is the worst."""
    mechanism = GaussianSum(DIM, NOISE, 1.0)

    def release(present: bool, rng: np.random.Generator) -> np.ndarray:
        total = mechanism.sum()
        total.add(np.full((1, DIM), ROW * (1 + 2.0**-52) * present))
        return mechanism.release(total, random_source(int(rng.integers(2**62)), noise))

    return release


def holes(released: np.ndarray) -> float:
    """Minus the number of coordinates that ROW + noise cannot be.

    ROW + noise is a multiple of 2⁻⁵⁹: from 2⁻⁷ on, noise is one itself, and below that the sum is
    at least 2⁻⁷, of which the last bit is 2⁻⁵⁹. Noise alone has bits as low as it is small.
    """
    scaled = released * 2.0**59
    return -float(np.count_nonzero(scaled != np.rint(scaled)))


def radii(released: np.ndarray) -> float:
    """How far the uniform numbers of the pairs are from multiples of 2⁻⁵³, if the row is not there.

    Small ones, so that doubles tell such multiples apart. About 0 if it is not, 1/4 if it is.
    """
    first, second = np.split(released / NOISE, 2)
    uniform = np.exp(-(first**2 + second**2) / 2)
    scaled = uniform[uniform < 2.0**-8] * 2.0**53
    return float(np.abs(scaled - np.rint(scaled)).mean()) if scaled.size else 0.25


def low_bits(released: np.ndarray) -> float:
    """How often the last bits of the grid units are those of the row."""
    grid = GaussianSum(DIM, NOISE, 1.0).grid
    units, row = released / grid, np.rint(ROW / grid)
    return float(np.count_nonzero((units - row) % 8 == 0) - np.count_nonzero(units % 8 == 0))


def audit(release: Release, attack: Attack) -> Audit:
    rng = np.random.default_rng(5)
    present, absent = (
        [attack(release(there, rng)) for _ in range(RELEASES)] for there in (True, False)
    )
    return measure_release(present, absent, EVENTS, DELTA, 1 - FALSE_ALARM)


CLAIMED = PrivacyPlan(EVENTS).epsilon(DELTA)


@pytest.mark.parametrize(("release", "attack"), [(numpy_noise, holes), (box_muller_noise, radii)])
def test_textbook_noise_falls(release: Release, attack: Attack) -> None:
    found = audit(release, attack)
    assert CLAIMED < 0.3
    assert found.violated
    assert found.measured > 10 * CLAIMED


@pytest.mark.parametrize("attack", [holes, radii, low_bits])
@pytest.mark.parametrize("noise", ["gaussian", "discrete"])
def test_noise_on_the_grid_does_not_fall(noise: Noise, attack: Attack) -> None:
    """A false alarm has a probability of 1e-7 at most: the confidence of the bound."""
    assert not audit(on_the_grid(noise), attack).violated


@pytest.mark.parametrize("present", [False, True])
@pytest.mark.parametrize("noise", ["gaussian", "discrete"])
def test_released_numbers_are_whole_units_with_uniform_last_bits(
    noise: Noise, present: bool
) -> None:
    """With the row and without: the same doubles are possible, and their last 4 bits are uniform.

    A false alarm of the χ² test has a probability of 1e-7.
    """
    rng, grid = np.random.default_rng(6), GaussianSum(DIM, NOISE, 1.0).grid
    release = on_the_grid(noise)
    units = np.concatenate([release(present, rng) for _ in range(50)]) / grid
    assert np.array_equal(units, np.rint(units))
    assert np.abs(units).max() < 2**51
    counts = np.bincount((units % 16).astype(int), minlength=16)
    assert stats.chisquare(counts).pvalue > FALSE_ALARM
