"""Box–Muller: words to normals, against the exact values and the distribution."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mpmath import mp, mpf
from scipy import stats

from privagrad.privacy import normals
from privagrad.privacy.noise import BUFFER, PIECE, KeyStream, random_source
from tests.statistics import FALSE_ALARM, assert_scale

WORDS = st.one_of(
    st.integers(0, 2**64 - 1),
    st.integers(0, 63).flatmap(lambda bits: st.integers(0, 2**bits)),
    st.integers(0, 63).flatmap(lambda bits: st.integers(2**64 - 2**bits, 2**64 - 1)),
    st.integers(-(2**12), 2**12).map(lambda near: math.isqrt(2**127) + near),
)
FINE = 2.0**52


def pair(radius, angle):
    """Both normals, rounded to multiples of 2^-52."""
    units = np.zeros(2)
    normals._add_pairs(units, np.array([radius, angle], np.uint64), FINE)
    return units / FINE


def exact_pair(radius, angle):
    """The radius and both normals in 200 bits."""
    with mp.workprec(200):
        uniform = (radius + (mpf(angle % 2**11) + mpf(0.5)) / 2**11) / 2**64
        place = angle >> 13
        place -= 2**51 if place >= 2**50 else 0
        phi = (place + mpf(0.5)) / 2**51 * mp.pi / 2
        r = mp.sqrt(-2 * mp.log(uniform))
        both = [r * mp.cos(phi), r * mp.sin(phi)]
        if angle >> 11 & 1:
            both.reverse()
        sign = -1 if angle >> 12 & 1 else 1
        return r, [sign * value for value in both]


@given(radius=WORDS, angle=WORDS)
def test_normals_are_as_accurate_as_stated(radius, angle):
    r, exact = exact_pair(radius, angle)
    rounding = 2.0**-53 if r < 1 else 0.0  # of the test's own grid
    for found, value in zip(pair(radius, angle), exact, strict=True):
        assert abs(mpf(float(found)) - value) <= normals.RELATIVE_ERROR * r + rounding
    assert r <= normals.LARGEST


@pytest.mark.parametrize("t", [1e-6, 0.1, 1.0, 5.0, 8.0, 9.0, 9.5, 10.0])
def test_tails_are_right(t):
    """P(r > t) = e^{-t²/2}: the place of that quantile among all 2^75 radii has the radius t."""
    with mp.workprec(200):
        radius, tail = divmod(int(mp.exp(-(mpf(t) ** 2) / 2) * 2**75), 2**11)
    found = np.hypot(*pair(radius, tail))
    assert found == pytest.approx(t, rel=1e-6 if t < 9.5 else 3e-2)


def drawn(stream, count=2**18):
    units = np.zeros(count)
    for block in np.split(units, count // BUFFER):
        normals.add_normals(block, stream, FINE)
    return units.reshape(-1, 2, BUFFER // 2) / FINE


@pytest.mark.parametrize("random_state", [None, 3])
def test_normals_are_standard_and_independent(random_state):
    streams = random_source(random_state).streams
    draws = np.array([drawn(stream) for stream in streams])
    assert_scale(draws, 1.0)
    assert stats.kstest(draws.ravel(), "norm").pvalue > FALSE_ALARM
    drawn_by_stream = draws.reshape(len(streams), -1)
    correlations = np.corrcoef(np.vstack([drawn_by_stream, np.roll(drawn_by_stream, 1, axis=1)]))
    off = correlations[~np.eye(len(correlations), dtype=bool)]
    assert np.abs(off).max() < 7 / np.sqrt(drawn_by_stream.shape[1])


def test_pairs_have_exponential_squares_and_uniform_angles():
    a, b = np.moveaxis(drawn(KeyStream()), 1, 0).reshape(2, -1)
    assert stats.kstest((a**2 + b**2) / 2, "expon").pvalue > FALSE_ALARM
    turns = np.arctan2(b, a) / (2 * np.pi) + 0.5
    assert stats.kstest(turns, "uniform").pvalue > FALSE_ALARM
    # The joint distribution, in the eight octants by four quarters of the radius.
    cells = np.floor(8 * turns) * 4 + np.floor(4 * np.exp(-(a**2 + b**2) / 2))
    counts = np.bincount(cells.astype(int), minlength=32)
    assert stats.chisquare(counts).pvalue > FALSE_ALARM


@pytest.mark.parametrize("size", [1, 2, 3, 8, 101])
def test_every_unit_gets_a_normal_of_its_own(size):
    words = KeyStream(bytes(16)).words(size + size % 2).copy()
    units = np.full(size, 0.3)
    normals.add_normals(units, KeyStream(bytes(16)), 2.0**30)
    half = words.size // 2
    pairs = np.array([pair(*both) for both in zip(words[:half], words[half:], strict=True)])
    assert np.abs(units - pairs.T.ravel()[:size] * 2.0**30).max() <= 0.51
    assert np.unique(units).size == size


def test_several_buffers_are_one_after_the_other():
    together, one_by_one = np.zeros(PIECE), np.zeros(PIECE)
    normals.add_normals(together, KeyStream(bytes(16)), 2.0**30)
    stream = KeyStream(bytes(16))
    for block in np.split(one_by_one, PIECE // BUFFER):
        normals.add_normals(block, stream, 2.0**30)
    assert np.array_equal(together, one_by_one)
