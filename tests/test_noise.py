import numpy as np
import pytest
from scipy import stats

from privagrad.noise import LANES, random_source, secure_generator
from tests.statistics import FALSE_ALARM, assert_scale


def test_the_secure_source_is_aes_in_counter_mode():
    """The example of FIPS 197, appendix C.1, with the plain text as counter."""
    key = bytes(range(16))
    counter = bytes.fromhex("00112233445566778899aabbccddeeff")
    bits = type(secure_generator().bit_generator)(
        key=int.from_bytes(key, "little"), counter=int.from_bytes(counter, "little")
    )
    expected = bytes.fromhex("69c4e0d86a7b0430d8cdb78070b4c55a")
    assert bits.random_raw(2).astype("<u8").tobytes() == expected


def test_secure_keys_are_fresh_each_time():
    first, second = random_source(), random_source()
    assert not first.seeded
    draws = [g.integers(2**63) for s in (first, second) for g in (*s.lanes, s.sampler)]
    assert len(set(draws)) == 2 * (LANES + 1)


def test_seeds_repeat_and_say_so():
    for make in (lambda: 7, lambda: np.random.default_rng(7)):
        first, second = random_source(make()), random_source(make())
        assert first.seeded
        assert second.seeded
        for a, b in zip(first.lanes, second.lanes, strict=True):
            assert np.array_equal(a.standard_normal(3), b.standard_normal(3))
    assert random_source(7).sampler.random() != random_source(8).sampler.random()


@pytest.mark.parametrize("random_state", [None, 3])
def test_normals_are_standard_and_independent(random_state):
    lanes = random_source(random_state).lanes
    draws = np.array([lane.standard_normal(50_000) for lane in lanes])
    assert_scale(draws, 1.0)
    assert stats.kstest(draws.ravel(), "norm").pvalue > FALSE_ALARM
    correlations = np.corrcoef(np.vstack([draws, np.roll(draws, 1, axis=1)]))
    off = correlations[~np.eye(len(correlations), dtype=bool)]
    assert np.abs(off).max() < 7 / np.sqrt(50_000)


@pytest.mark.parametrize("wrong", ["seed", 1.5, True, -1])
def test_wrong_random_states_say_why(wrong):
    with pytest.raises((TypeError, ValueError), match="random_state"):
        random_source(wrong)
