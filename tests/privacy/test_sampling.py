import numpy as np
import pytest
from scipy import stats

from privagrad.privacy.events import GaussianEvent
from privagrad.privacy.noise import _secure_kind, random_source
from privagrad.privacy.sampling import SAMPLINGS, batches
from tests.statistics import FALSE_ALARM, rate_accepted

SHAPES = [(1, 1), (2, 1), (7, 3), (10, 10), (1000, 5), (1000, 400), (1000, 900), (4097, 64)]


GENERATORS = [
    np.random.MT19937, np.random.PCG64, np.random.PCG64DXSM, np.random.Philox, np.random.SFC64,
]  # fmt: skip


def draw(sampling, n, size, steps, seed=0):
    return list(batches(sampling, n, size, steps, random_source(seed).sampler))


@pytest.mark.parametrize(("n", "size"), SHAPES)
@pytest.mark.parametrize("sampling", SAMPLINGS)
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


@pytest.mark.parametrize(("n", "size"), SHAPES)
@pytest.mark.parametrize("sampling", SAMPLINGS)
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
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_the_rate_is_right_with_every_generator_of_numpy(sampling, bits):
    """Also with MT19937, whose words have 32 bits."""
    n, size, steps = 1000, 50, 4000
    rate = GaussianEvent(1.0, 1, sampling, n, size).rate
    drawn = draw(sampling, n, size, steps, np.random.Generator(bits(1)))
    for row in (0, n // 2, n - 1):
        assert rate_accepted(sum(bool(np.any(batch == row)) for batch in drawn), steps, rate)


@pytest.mark.parametrize("bits", [*GENERATORS[1:], lambda key: _secure_kind()(key=key)])
def test_draws_are_the_generators_own_words(bits):
    """Seeds keep the batches that they had when words were taken as they are."""
    [batch] = batches("without_replacement", 2**16, 100, 1, np.random.Generator(bits(1)))
    words = bits(1).random_raw(400)
    draws = (words[:, None] >> (16 * np.arange(4, dtype=np.uint64))) & np.uint64(2**16 - 1)
    assert list(batch) == list(dict.fromkeys(draws.ravel().tolist()))[:100]


@pytest.mark.parametrize("sampling", SAMPLINGS)
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


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_time_and_memory_do_not_grow_with_the_rows(sampling):
    """A hundred billion rows: anything of the order of n would not return."""
    for batch in draw(sampling, 10**11, 20, 100):
        assert batch.size < 80
        assert np.all((batch >= 0) & (batch < 10**11))
