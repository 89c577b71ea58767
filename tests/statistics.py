"""Tests of distributions, each with its probability of a false alarm."""

from __future__ import annotations

import math

import numpy as np
from scipy import stats

from privagrad.privacy.noise import KeyStream, RandomSource, Words

FALSE_ALARM = 1e-7


def scale_accepted(samples: np.ndarray, std: float) -> bool:
    """Whether centred normal samples may have this standard deviation (two-sided χ² test)."""
    samples = np.ravel(samples)
    statistic = float(np.square(samples / std).sum())
    law = stats.chi2(samples.size)
    return 2 * min(law.cdf(statistic), law.sf(statistic)) > FALSE_ALARM


def assert_scale(samples: np.ndarray, std: float) -> None:
    """The right scale passes; a test that could not tell two thirds of it would be no test."""
    assert scale_accepted(samples, std)
    assert not scale_accepted(samples, std * 2 / 3)
    assert not scale_accepted(samples, std * 3 / 2)


class Constant(KeyStream):
    """Words whose normals are all the same number ≥ 0, or a millionth less: both of a pair.

    At an angle of an eighth of the circle both are r/sqrt(2), and r² = -2 log U.
    """

    def __init__(self, normal: float) -> None:
        super().__init__(bytes(16))
        lattice = math.ceil(math.exp(-(normal**2)) * 2**75)
        self.radius, tail = divmod(min(lattice, 2**75 - 1), 2**11)
        self.angle = (2**50 - 1) << 13 | tail

    def words(self, count: int) -> Words:
        return np.repeat(np.array([self.radius, self.angle], np.uint64), count // 2)

    @classmethod
    def source(cls, normal: float) -> RandomSource:
        return RandomSource((cls(normal),) * 4, np.random.default_rng(0), True)


def rate_accepted(successes: int, trials: int, rate: float) -> bool:
    """Whether this many successes may come from trials of this rate (two-sided binomial test)."""
    return bool(stats.binomtest(successes, trials, rate).pvalue > FALSE_ALARM)
