"""The discrete Gaussian: exact probabilities, and what they are worth."""

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from scipy import stats

from privagrad.privacy.discrete import _add_samples, add_discrete, discrete_parameter
from privagrad.privacy.mechanism import GaussianSum
from privagrad.privacy.noise import BUFFER, KeyStream, random_source
from tests.statistics import FALSE_ALARM, assert_scale


def samples(sigma, count):
    stream, found, done = KeyStream(), np.zeros(count), 0
    while done < count:
        done = _add_samples(found, done, stream.words(BUFFER), sigma)
    return found


def probabilities(sigma, whole):
    weights = np.exp(-(whole.astype(float) ** 2) / (2 * sigma**2))
    return weights / weights.sum()


@pytest.mark.parametrize("sigma", [1, 2, 3, 10])
def test_small_parameters_have_the_exact_probabilities(sigma):
    found, count = samples(sigma, 100_000), 100_000
    whole = np.arange(-20 * sigma, 20 * sigma + 1)
    expected = count * probabilities(sigma, whole)
    observed = np.array([(found == x).sum() for x in whole])
    common = expected > 20
    pooled = [np.append(x[common], x[~common].sum()) for x in (observed, expected)]
    assert stats.chisquare(pooled[0], pooled[1]).pvalue > FALSE_ALARM


@pytest.mark.parametrize("sigma", [1000, 2**31 + 11])
def test_large_parameters_look_normal(sigma):
    found = samples(sigma, 50_000) / sigma
    assert_scale(found, 1.0)
    assert stats.kstest(found, "norm").pvalue > FALSE_ALARM
    assert np.abs(np.corrcoef(found[1:], found[:-1])[0, 1]) < 7 / math.sqrt(found.size)


def profile(p, q, epsilons):
    """δ(ε) = Σ (p - e^ε q)⁺."""
    return np.maximum(p - np.exp(epsilons)[:, None] * q, 0.0).sum(1)


def gaussian_profile(mu, epsilons):
    cdf = stats.norm.cdf
    return cdf(mu / 2 - epsilons / mu) - np.exp(epsilons) * cdf(-mu / 2 - epsilons / mu)


@pytest.mark.parametrize("deviation", [2.7, 3.0, 4.2, 7.0, 12.9])
@pytest.mark.parametrize("shift", [1, 2, 5])
def test_it_protects_at_least_as_well_as_the_gaussian_it_is_charged_as(deviation, shift):
    epsilons = np.linspace(0.0, 3 * shift / deviation, 400)
    charged = gaussian_profile(shift / deviation, epsilons)

    def discrete(sigma):
        whole = np.arange(-40 * math.ceil(sigma), 40 * math.ceil(sigma) + 1)
        p = probabilities(sigma, whole)
        return profile(p, np.roll(p, shift), epsilons)

    sigma = discrete_parameter(deviation)
    assert sigma**2 >= deviation**2 + 9
    assert np.all(discrete(sigma) <= charged + 1e-15)
    assert np.any(discrete(deviation * 0.95) > charged)


@pytest.mark.parametrize("deviation", [2.0**30, 2.0**40, 2.0**28 - 1e-8, 5.0, 1e-9])
def test_the_parameter_is_the_least_whole_number_that_is_large_enough(deviation):
    """Also where doubles lose the 9 beside the square."""
    sigma, needed = discrete_parameter(deviation), Fraction(deviation) ** 2 + 9
    assert (sigma - 1) ** 2 < needed <= sigma**2


@pytest.mark.parametrize("noise_multiplier", [0.7, 30.0])
def test_releases_have_whole_units_of_the_right_scale(noise_multiplier):
    mechanism, source = GaussianSum(1000, noise_multiplier, 1), random_source(None, "discrete")
    released = np.array([mechanism.release(mechanism.sum(), source) for _ in range(30)])
    assert_scale(released, noise_multiplier)
    units = released / mechanism.grid
    assert np.array_equal(units, np.rint(units))
    assert np.gcd.reduce(units.astype(int).ravel()) == 1


def test_releases_are_the_sum_and_samples_of_the_stream():
    mechanism = GaussianSum(100, 2.0, 1)
    total = mechanism.sum()
    total.add(np.eye(100))
    expected = total.memory.copy()
    add_discrete(expected, random_source(5).streams[0], mechanism.deviation)
    released = mechanism.release(total, random_source(5, "discrete"))
    assert np.array_equal(released, expected * mechanism.grid)


class _FewWords:
    """A stream that is used up at once: 1 asks for another trial again and again."""

    def __init__(self):
        self.stream, self.buffers = KeyStream(), 0

    def words(self, count):
        self.buffers += 1
        return np.zeros(count, np.uint64) if self.buffers == 1 else self.stream.words(count)


def test_a_stream_that_never_decides_is_given_up():
    stream: Any = _FewWords()
    units = np.array([0.4, -1.6])
    add_discrete(units, stream, 100.0)
    assert stream.buffers == 2
    assert np.array_equal(units, np.rint(units))
