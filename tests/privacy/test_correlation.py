"""Correlated noise: its covariance, what a row moves, and what becomes of its history."""

from __future__ import annotations

import copy
import math
import os
import pickle
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from privagrad.privacy.correlation import (
    MOST_BANDS,
    NoiseHistory,
    coefficients_of,
    inverse_of,
    largest_noise,
)
from privagrad.privacy.mechanism import GaussianSum
from privagrad.privacy.noise import Noise, RandomSource, random_source
from privagrad.privacy.normals import LARGEST
from tests.statistics import FALSE_ALARM, assert_scale, scale_accepted


def toeplitz(coefficients: tuple[float, ...], steps: int) -> np.ndarray:
    """C."""
    below = (c * np.eye(steps, k=-k) for k, c in enumerate(coefficients[:steps]))
    return np.asarray(sum(below))


def released(
    mechanism: GaussianSum,
    source: RandomSource,
    steps: int,
    size: int,
    vectors: dict[int, np.ndarray] | None = None,
) -> np.ndarray:
    """The noisy sums of a run, of shape (steps, size), in whitened coordinates."""
    history, found = mechanism.begin_history(source.noise, size), []
    for step in range(steps):
        total = mechanism.sum(size=size)
        if vectors and step in vectors:
            total.add(vectors[step])
        found.append(mechanism.release(total, source, None, history) * mechanism.batch_size)
    return np.array(found)


@pytest.mark.parametrize("bands", range(1, MOST_BANDS + 1))
def test_coefficients_are_those_of_the_root_of_prefix_sums(bands: int) -> None:
    found = np.array(coefficients_of(bands))
    k = np.arange(bands)
    exact = np.array([math.comb(2 * j, j) / 4**j for j in k])
    assert np.abs(found - exact).max() <= 2**-11
    assert np.array_equal(found * 2**10, np.rint(found * 2**10))
    assert found[0] == 1
    assert (np.diff(found) < 0).all()
    assert np.abs(np.convolve(exact, exact)[:bands] - 1).max() < 1e-12
    inverse = inverse_of(tuple(found), 60)
    assert np.abs(np.convolve(found, inverse)[1:60]).max(initial=0.0) < 1e-12
    assert np.abs(inverse_of(tuple(found), 4096)[-500:]).max() < 1e-30


@pytest.mark.parametrize("bands", [0, -1, MOST_BANDS + 1, 2.5])
def test_other_numbers_of_bands_are_refused(bands: int) -> None:
    with pytest.raises((TypeError, ValueError), match="bands"):
        coefficients_of(bands)


@pytest.mark.parametrize("noise", ["gaussian", "discrete"])
@pytest.mark.parametrize("bands", [2, 4, 9])
def test_the_covariance_of_the_noise_is_the_inverse_of_c_squared(bands: int, noise: Noise) -> None:
    """z² |c|² (CᵀC)^{-1}: C times the releases is white, in time and at every step."""
    steps, size, z, c = 14, 3000, 1.7, coefficients_of(bands)
    mechanism = GaussianSum(1, z, 8, coefficients=c)
    noisy = released(mechanism, random_source(3, noise), steps, size)
    white, deviation = toeplitz(c, steps) @ noisy, z * math.hypot(*c)
    for step in range(steps):
        assert_scale(white[step], deviation)
    for first in range(steps):
        for second in range(first):
            assert scale_accepted(white[first] + white[second], math.sqrt(2) * deviation)
            assert scale_accepted(white[first] - white[second], math.sqrt(2) * deviation)
    # Without C it is not: the sum of all releases has less noise than that of independent ones.
    inverse = np.linalg.inv(toeplitz(c, steps))
    expected = deviation * math.sqrt(float(np.square(inverse.sum(axis=0)).sum()))
    assert_scale(noisy.sum(axis=0), expected)
    assert expected < 0.8 * deviation * math.sqrt(steps)
    assert stats.kstest(white.ravel() / deviation, stats.norm.cdf).pvalue > FALSE_ALARM


@pytest.mark.parametrize("bands", [2, 5])
def test_a_row_is_as_visible_as_the_noise_multiplier_says(bands: int) -> None:
    """The log-likelihood ratio of the worst row's block is that of N(1/z, 1) against N(0, 1)."""
    z, size, c = 0.8, 2000, coefficients_of(bands)
    mechanism = GaussianSum(1, z, 5, coefficients=c)
    row = {2: np.full((1, 1), 5.0)}  # bounded to norm 1
    for vectors, mean in ((row, 1 / z), (None, 0.0)):
        source, ratios = random_source(7), []
        for _ in range(size):
            noisy = released(mechanism, source, 2 + bands, 1, vectors)
            seen = (toeplitz(c, 2 + bands) @ noisy)[2:, 0]
            ratios.append(seen @ np.array(c) / math.hypot(*c) ** 2 / z)
        assert_scale(np.array(ratios) - mean, 1.0)
        assert abs(np.mean(ratios) - mean) < 5.4 / math.sqrt(size)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32), dim=st.integers(1, 5), bands=st.integers(2, 8),
    z=st.sampled_from([1e-3, 0.5, 2.0**30]), slack=st.sampled_from([0.0, 0.25]),
)  # fmt: skip
def test_a_row_moves_the_sums_of_a_block_by_at_most_the_sensitivity(
    seed: int, dim: int, bands: int, z: float, slack: float
) -> None:
    """For the same releases the white noise that explains them moves by at most Δ, rounded or not.

    With coarse grids rounding is most of it.
    """
    rng = np.random.default_rng(seed)
    size, steps = (1, 12) if z < 2**30 else (2**50, 12)
    mechanism = GaussianSum(
        dim, min(z, 1e3), size, slack, units=float(rng.choice([2, 50, 2**20])),
        coefficients=coefficients_of(bands),
    )  # fmt: skip
    unit = rng.standard_normal(dim)
    vector = unit / np.linalg.norm(unit) * rng.choice([1.0, 0.3]) * (1 + slack) / mechanism.grid
    moved = [vector, np.rint(vector)][slack == 0.0]
    place = int(rng.integers(steps))
    histories = [NoiseHistory(mechanism, mechanism.coefficients, dim, 2.0**38) for _ in "ab"]
    square = 0.0
    for step in range(steps):
        other = rng.standard_normal(dim) * 3 / mechanism.grid
        other = other if slack else np.rint(other)
        release = np.rint(rng.standard_normal(dim) * mechanism.deviation)
        sums = []
        for history, own in zip(histories, (moved, 0 * moved), strict=True):
            history.begin(mechanism, dim)
            units = other + (own if step == place else 0)
            before = history.subtract(units, 0)
            sums.append(units)
            history.keep(release, before, 0)
            history.end()
        apart = sums[0] - sums[1]
        assert step >= place or not apart.any()
        assert place <= step < place + bands or not apart.any()
        square += float(apart @ apart)
    assert math.sqrt(square) <= mechanism.sensitivity / mechanism.grid * (1 + 1e-12)


def test_the_sensitivity_covers_the_rounding_of_what_is_taken_away() -> None:
    """On a grid of 1 a row of one unit moves many sums by c_k rounded up, if releases are so.

    A block then moves further than |c| times the 2 units that a single release counts.
    """
    bands = MOST_BANDS
    c, rng = np.array(coefficients_of(bands)), np.random.default_rng(0)
    mechanism = GaussianSum(1, 1.0, 1, units=1.0, coefficients=tuple(c))
    assert mechanism.grid == 1
    histories = [NoiseHistory(mechanism, mechanism.coefficients, 1, 1e6) for _ in "ab"]
    past, square = [[0.0] * bands, [0.0] * bands], 0.0
    for step in range(bands):
        sums, kept = [], []
        for history, row in zip(histories, (1.0, 0.0), strict=True):
            history.begin(mechanism, 1)
            units = np.array([row if step == 0 else 0.0])
            kept.append(history.subtract(units, 0))
            sums.append(units)
        square += float((sums[0] - sums[1])[0]) ** 2

        def next_apart(release: float, kept: Any = kept) -> float:
            noises = ([release - k[0], *old] for k, old in zip(kept, past, strict=True))
            taken = [np.rint(c[1:] @ np.array(noise)[: bands - 1]) for noise in noises]
            return float(abs(taken[0] - taken[1]))

        release = max(rng.integers(-500, 500, 200).tolist(), key=next_apart)
        for k, history in enumerate(histories):
            history.keep(np.array([float(release)]), kept[k], 0)
            history.end()
            past[k] = [release - kept[k][0], *past[k]][:bands]
    assert 2 * math.hypot(*c) < math.sqrt(square) <= mechanism.sensitivity


def test_one_band_is_independent_noise_to_the_last_bit() -> None:
    plain, one = GaussianSum(40, 1.3, 7), GaussianSum(40, 1.3, 7, coefficients=coefficients_of(1))
    assert plain == one
    assert one.begin_history("gaussian") is None
    assert plain.sensitivity == 1.0 + math.sqrt(40) * plain.grid
    first, second = (m.release(m.sum(), random_source(5)) for m in (plain, one))
    assert np.array_equal(first, second)
    several = GaussianSum(40, 1.3, 7, coefficients=coefficients_of(3))
    assert several.grid == plain.grid
    assert several.deviation > 1.17 * plain.deviation


def test_threads_and_blocks_do_not_change_correlated_noise() -> None:
    size = 2**17 + 5
    mechanism = GaussianSum(size, 1.0, 1, coefficients=coefficients_of(3))
    runs = []
    for workers in (None, 3):
        source, history = random_source(5), mechanism.begin_history("gaussian")
        with ThreadPoolExecutor(workers or 1) as pool:
            runs.append(
                [mechanism.release(mechanism.sum(), source, workers and pool, history)  # type: ignore[arg-type]
                 for _ in range(5)]
            )  # fmt: skip
    assert all(np.array_equal(a, b) for a, b in zip(*runs, strict=True))
    white = toeplitz(mechanism.coefficients, 5) @ np.array(runs[0])
    for row in white:
        assert_scale(row, math.hypot(*mechanism.coefficients) * 1.0)


def test_skipped_steps_count_as_steps_without_sum_and_noise() -> None:
    c = coefficients_of(4)
    mechanism, source = GaussianSum(4000, 1.0, 1, coefficients=c), random_source(2)
    history = mechanism.begin_history("gaussian")
    assert history is not None
    found = []
    for step in range(8):
        if step in (2, 5, 6):
            history.skip(1)
            found.append(np.zeros(4000))
        else:
            found.append(mechanism.release(mechanism.sum(), source, None, history))
    white = toeplitz(c, 8) @ np.array(found)
    for step in (0, 1, 3, 4, 7):
        assert_scale(white[step], math.hypot(*c))
        assert scale_accepted(
            white[step] + white[0], math.hypot(*c) * math.sqrt(2 + 2 * (not step))
        )
    history.skip(10**9)
    assert not history._past.any()


def test_a_release_needs_the_history_of_its_own_run() -> None:
    mechanism = GaussianSum(3, 1.0, 1, coefficients=coefficients_of(2))
    other = GaussianSum(3, 1.0, 1, coefficients=coefficients_of(2))
    source, history = random_source(0), mechanism.begin_history("gaussian")
    with pytest.raises(ValueError, match="history of a run"):
        mechanism.release(mechanism.sum(), source)
    plain = GaussianSum(3, 1.0, 1)
    with pytest.raises(ValueError, match="history of a run"):
        plain.release(plain.sum(), source, None, history)
    with pytest.raises(ValueError, match="mechanism that the history was made for"):
        other.release(other.sum(), source, None, history)
    with pytest.raises(ValueError, match="3 coordinates"):
        mechanism.release(mechanism.sum(size=2), source, None, history)


def test_a_release_that_was_broken_off_ends_the_history() -> None:
    """Of its noise a part is kept: what follows must not build on it."""
    mechanism = GaussianSum(3, 1.0, 1, coefficients=coefficients_of(2))
    history = mechanism.begin_history("gaussian")
    nothing = RandomSource((), np.random.default_rng(0), True)
    with pytest.raises(IndexError):
        mechanism.release(mechanism.sum(), nothing, None, history)
    with pytest.raises(RuntimeError, match="broken off"):
        mechanism.release(mechanism.sum(), random_source(0), None, history)


def test_the_history_is_not_copied_pickled_or_shown() -> None:
    mechanism = GaussianSum(3, 1.0, 1, coefficients=coefficients_of(2))
    history = mechanism.begin_history("gaussian")
    mechanism.release(mechanism.sum(), random_source(0), None, history)
    for take in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="noise of a run"):
            take(history)
    assert repr(history) == object.__repr__(history)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_does_not_go_on_with_the_history() -> None:
    """Its releases and those of its parent would have the same noise taken away."""
    mechanism = GaussianSum(3, 1.0, 1, coefficients=coefficients_of(2))
    source, history = random_source(0), mechanism.begin_history("gaussian")
    mechanism.release(mechanism.sum(), source, None, history)
    child = os.fork()
    if child == 0:
        try:
            mechanism.release(mechanism.sum(), source, None, history)
        except RuntimeError:
            os._exit(7)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    mechanism.release(mechanism.sum(), source, None, history)


@pytest.mark.parametrize("bands", [2, 8, MOST_BANDS])
def test_the_history_has_room_for_the_largest_noise(bands: int) -> None:
    """M = C^{-1} w, rounded, with w at the ends of its range: within the bound, which is tight."""
    c, largest = coefficients_of(bands), 1e6
    bound = largest_noise(c, largest)
    signs = np.sign(inverse_of(c, 400))[::-1]
    past = [0.0] * (bands - 1)
    for sign in np.where(signs == 0, 1.0, signs):
        taken = sum(a * m for a, m in zip(c[1:], past, strict=True))
        past = [sign * largest + 0.5 - np.rint(taken), *past][: bands - 1]
    assert 0.99 * bound < abs(past[0]) <= bound
    for dim in (1, 10**4, 2**20, 10**7):
        mechanism = GaussianSum(1, 1.0, 100, coefficients=c)
        grown = GaussianSum(dim, 1.0, 100, coefficients=c)
        assert largest_noise(c, LARGEST * grown.deviation) < 2**31
        assert mechanism.begin_history("gaussian")._past.dtype == np.int32  # type: ignore[union-attr]
        assert mechanism.begin_history("discrete")._past.dtype == np.int32  # type: ignore[union-attr]
    wide = GaussianSum(1, 1.0, 1, units=2.0**30, coefficients=c)
    assert wide.begin_history("gaussian")._past.dtype == np.int64  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="coarser grid"):
        NoiseHistory(object(), c, 3, 2.0**40)
