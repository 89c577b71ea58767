import itertools
import math
import sys
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy import stats

from privagrad import Ellipsoid
from privagrad._internal.threads import pool_of
from privagrad.geometry.ellipsoid import euclidean_norm
from privagrad.privacy import normals
from privagrad.privacy.bounded import BoundedSum, Part
from privagrad.privacy.mechanism import GaussianSum
from privagrad.privacy.noise import BUFFER, PIECE, KeyStream, RandomSource, random_source
from tests.statistics import FALSE_ALARM, Constant, assert_scale

MULTIPLIERS = [0.01, 0.7, 3.0, 200.0]


def noise_of(mechanism, source, ellipsoid=None, pool=None):
    """The release of a sum without vectors."""
    return mechanism.release(mechanism.sum(ellipsoid), source, pool)


def summed(mechanism, vectors, ellipsoid=None):
    total = mechanism.sum(ellipsoid)
    total.add(vectors)
    return total


@pytest.mark.parametrize("noise_multiplier", MULTIPLIERS)
@pytest.mark.parametrize("random_state", [None, 0])
def test_noise_has_the_shape_and_scale_of_the_ellipsoid(noise_multiplier, random_state):
    dim, batch = 2000, 7
    ellipsoid = Ellipsoid(np.geomspace(1e-3, 1e3, dim), 2.5)
    mechanism = GaussianSum(dim, noise_multiplier, batch)
    source = random_source(random_state)
    released = np.array([noise_of(mechanism, source, ellipsoid) for _ in range(30)])
    standard = released * batch / ellipsoid.noise_std
    assert_scale(standard, noise_multiplier)
    assert_scale(standard[:, :100], noise_multiplier)
    assert_scale(standard[:, -100:], noise_multiplier)
    normal = stats.norm(0, noise_multiplier)
    assert stats.kstest(standard.ravel(), normal.cdf).pvalue > FALSE_ALARM


@pytest.mark.parametrize("dim", [1, 100, 10**6, 10**8])
@pytest.mark.parametrize("batch", [1, 4096, 10**6])
@pytest.mark.parametrize("noise_multiplier", MULTIPLIERS)
def test_the_grid_costs_nothing_and_counts_exactly(dim, batch, noise_multiplier):
    mechanism = GaussianSum(dim, noise_multiplier, batch)
    assert math.frexp(mechanism.grid)[0] == 0.5
    assert (2 * batch + 64) / mechanism.grid <= 2**53
    rounding = math.sqrt(dim) * mechanism.grid
    assert mechanism.sensitivity == 1 + rounding
    if batch < 10**6:
        part = max(2**-20, min(2**-12, 2**-24 * math.sqrt(dim)))
        assert rounding <= part * noise_multiplier + 2**-52 * 4 * batch * math.sqrt(dim)


@given(data=st.data(), dim=st.integers(1, 20), noise=st.floats(0.01, 1000))
def test_one_vector_moves_the_rounded_sum_by_at_most_the_sensitivity(data, dim, noise):
    mechanism = GaussianSum(dim, noise, 10)
    total = data.draw(arrays(float, dim, elements=st.floats(-10, 10)))
    vector = data.draw(arrays(float, dim, elements=st.floats(-1, 1)))
    vector /= max(1.0, np.linalg.norm(vector) * (1 + 1e-12))
    before, after = np.rint(total / mechanism.grid), np.rint((total + vector) / mechanism.grid)
    assert np.linalg.norm(after - before) * mechanism.grid <= mechanism.sensitivity


@pytest.mark.parametrize("dim", [1, 100, 10**6])
def test_the_error_of_normals_is_counted(dim):
    """Noise of σ covers the sensitivity and what errors of 2η sqrt(dim) σ add to it."""
    mechanism = GaussianSum(dim, 100.0, 1)
    deviation = mechanism.deviation * mechanism.grid
    apart = 2 * normals.RELATIVE_ERROR * normals.LARGEST * math.sqrt(dim) * deviation
    assert deviation >= 100.0 * (mechanism.sensitivity + apart) * (1 - 1e-15)
    assert deviation >= 100.0 * mechanism.sensitivity * (1 + 1e-13 * math.sqrt(dim))


@pytest.mark.parametrize("wrong", [0.0, -1.0, math.nan, math.inf, 1e14])
def test_noise_without_sense_is_refused(wrong):
    with pytest.raises(ValueError, match="Expected a noise multiplier"):
        noise_of(GaussianSum(3, wrong, 1), random_source())


def test_threads_that_share_a_source_share_no_noise():
    mechanism, source = GaussianSum(4000, 1.0, 1), random_source()
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(3) as pool:
            found = list(pool.map(lambda _: noise_of(mechanism, source), range(150)))
    finally:
        sys.setswitchinterval(before)
    for a, b in itertools.combinations(found, 2):
        assert (a == b).sum() < 100


def test_releases_lie_on_the_grid():
    """With a ball of radius 1 and a batch of 2^3 the outputs are whole multiples of grid/8."""
    mechanism = GaussianSum(500, 1.3, 8)
    total = summed(mechanism, np.random.default_rng(0).uniform(-5, 5, (8, 500)))
    released = mechanism.release(total, random_source())
    steps = released / (mechanism.grid / 8)
    assert np.array_equal(steps, np.rint(steps))
    assert np.gcd.reduce(steps.astype(int)) == 1


def test_the_sum_comes_through_unwhitened_over_the_expected_batch_size():
    ellipsoid = Ellipsoid(np.array([1.0, 4.0, 100.0]), 2.0)
    mechanism = GaussianSum(3, 1e-6, 5)
    vectors = np.array([[0.1, 0.5, -0.3], [0.9, 0.1, 0.0], [0.0, 0.0, -0.6]])
    released = mechanism.release(summed(mechanism, vectors, ellipsoid), random_source())
    expected = vectors.sum(axis=0) * [2.0, 1.0, 0.2] / 5
    assert released == pytest.approx(expected, rel=1e-4)


def test_threads_do_not_change_the_noise():
    dim = 2**17 + 3
    mechanism = GaussianSum(dim, 1.0, 1)
    alone = noise_of(mechanism, random_source(5))
    with ThreadPoolExecutor(3) as pool:
        together = noise_of(mechanism, random_source(5), pool=pool)
    assert np.array_equal(alone, together)
    assert np.unique(alone).size > 0.99 * dim
    assert_scale(alone, 1.0)


class _Ones(KeyStream):
    """Words of which half of the normals are 1 and the others 0."""

    def words(self, count):
        radius = int(math.exp(-0.5) * 2**64)
        return np.array([radius] * (count // 2) + [0] * (count // 2), np.uint64)


@pytest.mark.parametrize("dim", [1, 30, 10_000])
def test_the_noise_is_the_multiplier_times_the_sensitivity_to_the_last_unit(dim):
    mechanism = GaussianSum(dim, 3.0, 1)
    source = RandomSource((_Ones(),), np.random.default_rng(0), True)
    released = noise_of(mechanism, source)
    expected = round(3.0 * (1 + math.sqrt(dim) * mechanism.grid) / mechanism.grid)
    assert set(released / mechanism.grid) == ({expected, 0} if dim > 1 else {expected})
    assert expected > round(3.0 / mechanism.grid)


@given(data=st.data(), dim=st.integers(1, 6))
def test_bounded_vectors_move_the_sum_by_at_most_the_sensitivity(data, dim):
    extreme = st.one_of(st.floats(-5, 5), st.sampled_from([np.nan, np.inf, 1e200, -1e300, 1e-300]))
    vectors = data.draw(arrays(float, (data.draw(st.integers(1, 4)), dim), elements=extreme))
    mechanism = GaussianSum(dim, 1.0, 4)
    with_last, without = summed(mechanism, vectors), summed(mechanism, vectors[:-1])
    assert with_last.nonfinite == (~np.isfinite(vectors).all(axis=1)).sum()
    squares = sum(Fraction(v) ** 2 for v in (with_last.memory - without.memory).tolist())
    assert squares <= (Fraction(mechanism.sensitivity) / Fraction(mechanism.grid)) ** 2
    inside = np.array([[0.6] + [0.0] * (dim - 1), [3e200] + [0.0] * (dim - 1)])
    total = summed(mechanism, inside)
    assert total.memory[0] * mechanism.grid == pytest.approx(1.6, abs=1e-5)
    assert total.clipped == 1


def test_an_ellipsoid_too_small_for_the_sum_is_refused():
    with pytest.raises(ValueError, match="dimension 3"):
        GaussianSum(3, 1.0, 1).sum(Ellipsoid.ball(2, 1.0))


def test_only_what_a_mechanism_bounded_is_released_and_only_once():
    mechanism, source = GaussianSum(3, 1.0, 1), random_source(0)
    unbounded: Any = np.full(3, 1e9)
    with pytest.raises(TypeError, match="Expected a sum that this mechanism bounded"):
        mechanism.release(unbounded, source)
    with pytest.raises(TypeError, match="Expected a sum that this mechanism bounded"):
        mechanism.release(GaussianSum(3, 1.0, 1).sum(), source)
    with pytest.raises(TypeError, match="direct call"):
        BoundedSum(None, mechanism, unbounded, None)
    total = mechanism.sum()
    mechanism.release(total, source)
    with pytest.raises(ValueError, match="not released yet"):
        mechanism.release(total, source)
    with pytest.raises(ValueError, match="not released yet"):
        total.add(np.ones((1, 3)))  # would show the row in the released array
    with pytest.raises(ValueError, match="slack"):
        mechanism.certified(np.ones(3), 1.0)


def test_the_noise_covers_the_slack():
    mechanism, none = GaussianSum(3, 2.0, 1, slack=0.5), GaussianSum(3, 2.0, 1)
    assert mechanism.sensitivity == pytest.approx(none.sensitivity + 0.5, abs=1e-12)
    loud, quiet = (m.release(m.sum(), random_source(0)) for m in (mechanism, none))
    assert loud == pytest.approx(1.5 * quiet, rel=1e-4)


@pytest.mark.parametrize("shape", [(4, 2), (4, 4), (3,)])
def test_vectors_of_another_length_than_the_sum_are_refused(shape):
    """The kernel would read beyond a short row, into the next one."""
    with pytest.raises(ValueError, match="Expected vectors of 3 coordinates"):
        GaussianSum(3, 1.0, 1).sum().add(np.ones(shape))


@given(data=st.data(), dim=st.integers(1, 30))
def test_a_norm_as_computed_within_the_limit_is_at_most_one(data, dim):
    """The one rule of how far below 1 rounding asks to stay, in exact arithmetic."""
    mechanism = GaussianSum(dim, 1.0, 1)
    vector = data.draw(arrays(float, dim, elements=st.floats(-1, 1)))
    size = euclidean_norm(vector)
    if size > 0:
        vector = vector * (mechanism.limit / size)
        if euclidean_norm(vector) <= mechanism.limit:
            assert sum(Fraction(v) ** 2 for v in vector.tolist()) <= 1
    assert 1 - mechanism.limit < 1e-12


@given(data=st.data(), dim=st.integers(1, 40))
def test_what_a_vector_adds_does_not_depend_on_the_others(data, dim):
    rng = np.random.default_rng(data.draw(st.integers(0, 10**6)))
    vectors = rng.standard_normal((17, dim)) * 10.0 ** rng.integers(-300, 300, (17, 1))
    mechanism = GaussianSum(dim, 1e-6, 1)
    alone = [summed(mechanism, vectors[i : i + 1]).memory for i in range(17)]
    assert np.array_equal(summed(mechanism, vectors).memory, np.sum(alone, axis=0))
    columns = np.asfortranarray(vectors)
    assert np.array_equal(summed(mechanism, columns).memory, np.sum(alone, axis=0))


@pytest.mark.parametrize(
    "sizes", [[PIECE], [PIECE + 1], [3 * BUFFER - 1, 5], [7, 2 * PIECE + BUFFER + 3, 2**17 + 1]]
)
@pytest.mark.parametrize("threads", [None, 2])
def test_every_coordinate_of_large_tensors_gets_noise_of_its_own(sizes, threads):
    parts = [Part([np.zeros(n)], np.ones(n), np.zeros(n)) for n in sizes]
    mechanism = GaussianSum(sum(sizes), 1.0, 1.0)
    with pool_of(threads or 1) as pool:
        mechanism.release(mechanism.sum_of_parts(parts, 1.0), random_source(), pool)
    released = np.concatenate([part.out for part in parts])
    assert np.count_nonzero(released) > released.size - 10  # some are 0 by chance
    assert np.unique(released).size > 0.99 * released.size
    assert_scale(released, 1.0)


def test_sums_of_several_processes_are_each_rounded_and_then_added():
    totals = list(0.1 * np.random.default_rng(0).standard_normal((3, 5)))
    mechanism = GaussianSum(8, 1.0, 1.0)
    for order in (totals, totals[::-1]):
        part = Part(order, np.ones(5), np.zeros(5))
        mechanism.release(mechanism.sum_of_parts([part], 1.0), Constant.source(0.0))
        units = sum(np.rint(total / mechanism.grid) for total in totals)
        assert np.array_equal(part.out, units * mechanism.grid)


def test_more_coordinates_than_a_vector_has_are_refused():
    parts = [Part([np.zeros(5)], np.ones(5), np.zeros(5))] * 2
    with pytest.raises(ValueError, match="at most 8 coordinates, found 10"):
        GaussianSum(8, 1.0, 1.0).sum_of_parts(parts, 1.0)
