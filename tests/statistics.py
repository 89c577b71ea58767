"""Tests of distributions, each with its probability of a false alarm."""

from __future__ import annotations

import numpy as np
from scipy import stats

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


def rate_accepted(successes: int, trials: int, rate: float) -> bool:
    """Whether this many successes may come from trials of this rate (two-sided binomial test)."""
    return bool(stats.binomtest(successes, trials, rate).pvalue > FALSE_ALARM)
