import os
import pickle
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from privagrad.privacy.events import GaussianEvent
from privagrad.privacy.noise import keyed_generator, random_source
from privagrad.privacy.sampling import SAMPLINGS, batches, samples_of
from tests.statistics import FALSE_ALARM, rate_accepted

BY_STEP = [sampling for sampling in SAMPLINGS if sampling != "random_allocation"]
"""Samplings whose steps are independent of each other."""

SHAPES = [(1, 1), (2, 1), (7, 3), (10, 10), (1000, 5), (1000, 400), (1000, 900), (4097, 64)]


GENERATORS = [
    np.random.MT19937, np.random.PCG64, np.random.PCG64DXSM, np.random.Philox, np.random.SFC64,
]  # fmt: skip


def draw(sampling, n, size, steps, seed=0):
    return list(batches(sampling, n, size, steps, random_source(seed).sampler))


@pytest.mark.parametrize(("n", "size"), SHAPES)
@pytest.mark.parametrize("sampling", BY_STEP)
def test_batches_hold_valid_rows(sampling, n, size):
    drawn = draw(sampling, n, size, 50)
    assert len(drawn) == 50
    for batch in drawn:
        assert batch.dtype == np.int64
        assert batch.size == 0 or (batch.min() >= 0 and batch.max() < n)
        if sampling != "poisson":
            assert batch.size == size
        if sampling != "with_replacement":
            assert np.unique(batch).size == batch.size


def test_no_sampling_is_all_rows_every_time():
    """Each time another array: the oracle tells batches apart by which array they are."""
    drawn = draw(None, 7, 7, 5)
    assert [batch.tolist() for batch in drawn] == [list(range(7))] * 5
    assert all(batch.dtype == np.int64 for batch in drawn)
    assert len({id(batch) for batch in drawn}) == 5


@given(seed=st.integers(0, 2**32), n=st.integers(1, 1000), sampling=st.sampled_from(SAMPLINGS))
def test_every_step_has_an_array_of_its_own(seed, n, sampling):
    """Also steps without rows: the oracle tells batches apart by which array they are."""
    drawn = draw(sampling, n, 1, 3, seed)
    assert len({id(batch) for batch in drawn}) == 3


@pytest.mark.parametrize(("n", "size"), SHAPES)
@pytest.mark.parametrize("sampling", BY_STEP)
def test_a_row_is_in_a_batch_at_the_rate_the_accountant_assumes(sampling, n, size):
    steps = 4000
    rate = GaussianEvent(1.0, 1, sampling, n, size).rate
    drawn = draw(sampling, n, size, steps)
    for row in {0, n // 2, n - 1}:
        hits = sum(bool(np.any(batch == row)) for batch in drawn)
        assert rate_accepted(hits, steps, rate)
        if 0.05 < rate < 0.6:
            assert not rate_accepted(hits, steps, rate * 1.5)


@pytest.mark.parametrize("bits", GENERATORS)
@pytest.mark.parametrize("sampling", BY_STEP)
def test_the_rate_is_right_with_every_generator_of_numpy(sampling, bits):
    """Also with MT19937, whose words have 32 bits."""
    n, size, steps = 1000, 50, 4000
    rate = GaussianEvent(1.0, 1, sampling, n, size).rate
    drawn = draw(sampling, n, size, steps, np.random.Generator(bits(1)))
    for row in (0, n // 2, n - 1):
        assert rate_accepted(sum(bool(np.any(batch == row)) for batch in drawn), steps, rate)


@settings(max_examples=40)
@given(data=st.data(), sampling=st.sampled_from([*SAMPLINGS, None]))
def test_every_part_of_the_rows_can_draw_its_own(data, sampling):
    """All parts together are the sample of the whole table, at any step and in any process."""
    n = data.draw(st.integers(1, 400))
    size, steps = data.draw(st.integers(1, n)), data.draw(st.integers(1, 30))
    cuts = [0, *sorted(data.draw(st.lists(st.integers(0, n), max_size=4))), n]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("privagrad.privacy.sampling._BLOCK", data.draw(st.integers(7, 500)))
        patch.setattr("privagrad.privacy.sampling._CHUNK", data.draw(st.integers(1, 900)))
        samples_of.cache_clear()
        samples = batches(sampling, n, size, steps, random_source(1).sampler)
        elsewhere = pickle.loads(pickle.dumps(samples))
        step = data.draw(st.integers(0, steps - 1))
        parts = [elsewhere.of_step(step, low, high) for low, high in pairwise(cuts)]
        for part, (low, high) in zip(parts, pairwise(cuts), strict=True):
            assert ((part >= low) & (part < high)).all()
        for edge in (*range(0, n, samples._width), n):
            assert elsewhere.of_step(step, edge, edge).size == 0
        whole = samples.of_step(step)
        assert np.array_equal(np.sort(np.concatenate(parts)), np.sort(whole))
        assert np.array_equal(np.sort(list(samples)[step]), np.sort(whole))
        if sampling in ("with_replacement", "without_replacement"):
            assert whole.size == size
    samples_of.cache_clear()


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_threads_may_share_samples(sampling, monkeypatch):
    monkeypatch.setattr("privagrad.privacy.sampling._BLOCK", 64)
    monkeypatch.setattr("privagrad.privacy.sampling._CHUNK", 50)
    before, steps = sys.getswitchinterval(), 25
    samples, alone = (batches(sampling, 700, 20, steps, random_source(1).sampler) for _ in "ab")
    expected = [np.sort(rows) for rows in alone]

    def part(low):
        return [samples.of_step(step, low, low + 175) for step in range(steps)]

    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(4) as pool:
            parts = list(pool.map(part, range(0, 700, 175)))
    finally:
        sys.setswitchinterval(before)
    found = [np.sort(np.concatenate(own)) for own in zip(*parts, strict=True)]
    assert all(np.array_equal(*pair) for pair in zip(found, expected, strict=True))


@pytest.mark.parametrize("sampling", BY_STEP)
def test_rows_of_different_blocks_are_as_likely_and_as_independent(sampling, monkeypatch):
    """60 rows in 9 blocks of 7, of which the last one is short."""
    monkeypatch.setattr("privagrad.privacy.sampling._BLOCK", 7)
    n, size, steps = 60, 12, 20_000
    drawn = draw(sampling, n, size, steps)
    counts = np.zeros((steps, n))
    for step, batch in enumerate(drawn):
        np.add.at(counts[step], batch, 1)
    assert stats.chisquare(counts.sum(axis=0)).pvalue > FALSE_ALARM
    both = (counts[:, 3] > 0) & (counts[:, 50] > 0)
    missed = {"poisson": (1 - size / n) ** 2, "with_replacement": (1 - 2 / n) ** size}
    none = missed.get(sampling, (48 * 47) / (60 * 59))
    rate = GaussianEvent(1.0, 1, sampling, n, size).rate
    assert rate_accepted(int(both.sum()), steps, 2 * rate - 1 + none)


def test_chunks_and_blocks_have_words_of_their_own():
    """No generator of a run reaches the words of another, however far chunks and blocks are."""
    samples = batches("poisson", 100, 10, 5, random_source(0).sampler)
    far = [(0, 0), (0, 1), (1, 0), (1, 1), (0, 4096), (2**20, 0), (2**40, 4096), (2**55, 1)]
    words = [samples._generator(*place).bytes(64) for place in far]
    assert len(set(words)) == len(far)
    other = batches("poisson", 100, 10, 5, random_source(1).sampler)
    assert other._generator(0, 0).bytes(64) not in words
    # A counter counts blocks of 16 bytes: so many lie between two places.
    key, start = samples.key, 5
    assert keyed_generator(key, start).bytes(64)[16:] == keyed_generator(key, start + 1).bytes(48)


def test_chunks_of_steps_are_independent(monkeypatch):
    monkeypatch.setattr("privagrad.privacy.sampling._CHUNK", 5)
    drawn = draw("poisson", 20, 5, 20_000)  # every step is a chunk of its own
    member = np.array([np.any(batch == 3) for batch in drawn])
    assert rate_accepted(int(member.sum()), member.size, 1 / 4)
    assert rate_accepted(int((member[1:] & member[:-1]).sum()), len(member) - 1, 1 / 16)


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_integers_of_numpy_draw_the_same(sampling, monkeypatch):
    """Shifted by 72 bits they are 0: every chunk of steps would see the rows of the first one."""
    monkeypatch.setattr("privagrad.privacy.sampling._CHUNK", 64)
    plain = batches(sampling, 300, 30, 40, random_source(0).sampler)
    count, size, steps = np.array([300, 30, 40])
    other = batches(sampling, count, size, steps, random_source(0).sampler)
    for step in np.arange(40):
        assert np.array_equal(plain.of_step(int(step)), other.of_step(step))  # type: ignore[arg-type]


def test_an_epoch_of_an_allocation_holds_every_row_once(monkeypatch):
    monkeypatch.setattr("privagrad.privacy.sampling._BLOCK", 16)
    monkeypatch.setattr("privagrad.privacy.sampling._CHUNK", 20)
    n, period, epochs = 50, 7, 3000
    drawn = draw("random_allocation", n, 7, period * epochs)
    places = np.empty((epochs, n), dtype=np.int64)
    for epoch in range(epochs):
        steps = drawn[epoch * period : (epoch + 1) * period]
        assert np.array_equal(np.sort(np.concatenate(steps)), np.arange(n))
        for step, rows in enumerate(steps):
            places[epoch, rows] = step
    # Uniform, independent of other rows in the same block and in others, and of other epochs.
    for row, other in ((0, 1), (3, 40), (49, 20)):
        pairs = places[:, row] * period + places[:, other]
        assert stats.chisquare(np.bincount(pairs, minlength=period**2)).pvalue > FALSE_ALARM
    following = places[:-1, 5] * period + places[1:, 5]
    assert stats.chisquare(np.bincount(following, minlength=period**2)).pvalue > FALSE_ALARM


@pytest.mark.parametrize("sampling", BY_STEP)
def test_all_rows_are_equally_likely(sampling):
    counts = np.bincount(np.concatenate(draw(sampling, 100, 8, 20_000)), minlength=100)
    # Fixed-size batches only lower the variance of the counts.
    assert stats.chisquare(counts).pvalue > FALSE_ALARM


def test_poisson_sizes_are_binomial_and_rows_independent():
    n, size, steps = 50, 5, 40_000
    drawn = draw("poisson", n, size, steps)
    sizes = np.bincount([batch.size for batch in drawn], minlength=n + 1)
    law = stats.binom(n, size / n).pmf(np.arange(n + 1)) * steps
    common = law > 20
    observed = np.append(sizes[common], sizes[~common].sum())
    expected = np.append(law[common], law[~common].sum())
    assert stats.chisquare(observed, expected).pvalue > FALSE_ALARM
    assert sizes[0] > 0, "an empty batch is a batch"
    both = sum(bool(np.any(b == 3) and np.any(b == 4)) for b in drawn)
    assert rate_accepted(both, steps, (size / n) ** 2)


def test_consecutive_batches_are_independent():
    drawn = draw("poisson", 20, 5, 40_000)
    member = np.array([np.any(batch == 3) for batch in drawn])
    assert rate_accepted(int((member[1:] & member[:-1]).sum()), len(member) - 1, 1 / 16)


@pytest.mark.parametrize("sampling", BY_STEP)
def test_time_and_memory_do_not_grow_with_the_rows(sampling):
    """A hundred billion rows: anything of the order of n would not return."""
    for batch in draw(sampling, 10**11, 20, 100):
        assert batch.size < 80
        assert np.all((batch >= 0) & (batch < 10**11))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_does_not_go_on_with_the_samples():
    steps = iter(batches("poisson", 100, 10, 5, random_source().sampler))
    next(steps)
    child = os.fork()
    if child == 0:
        try:
            next(steps)
        except RuntimeError:
            os._exit(7)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert next(steps) is not None
