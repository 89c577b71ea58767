import copy
import os
import pickle
from typing import Any

import numpy as np
import pytest
from scipy import stats

from privagrad.privacy.noise import LANES, random_source, secure_generator
from tests.statistics import FALSE_ALARM, assert_scale


def test_the_secure_source_is_aes_in_counter_mode():
    """The example of FIPS 197, appendix C.1, with the plain text as counter."""
    key = bytes(range(16))
    counter = bytes.fromhex("00112233445566778899aabbccddeeff")
    aes: Any = type(secure_generator().bit_generator)
    bits = aes(key=int.from_bytes(key, "little"), counter=int.from_bytes(counter, "little"))
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


def drawn_in_a_child(draw):
    """What `draw` returns in a forked process, as bytes."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.write(writing, draw())
            status = 0
        finally:
            os._exit(status)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        found = pipe.read()
    assert os.waitpid(child, 0)[1] == 0
    return found


# Python warns of forks in processes with threads; the child here only draws and exits.
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
@pytest.mark.parametrize("random_state", [None, 5])
def test_forked_processes_share_no_secure_stream(random_state):
    """Parent and two children draw different normals and samples, also from generators kept."""
    source = random_source(random_state)
    lane, sampler = source.lanes[0], source.sampler
    for generator in (lane, sampler):  # half-used blocks and words must not be shared either
        generator.standard_normal(3)
        generator.integers(2**31, dtype=np.int32)

    def draw():
        numbers = [
            *(kept.standard_normal(4) for kept in (lane, *source.lanes[1:])),
            sampler.integers(2**63, size=4).astype(float),
            sampler.integers(2**31, size=4, dtype=np.int32).astype(float),
            sampler.bit_generator.random_raw(4).astype(float),
        ]
        return np.concatenate(numbers).tobytes()

    seen = np.array(
        [np.frombuffer(drawn) for drawn in (*map(drawn_in_a_child, [draw] * 2), draw())]
    )
    equal = [(seen[i] == seen[j]) for i, j in ((0, 1), (0, 2), (1, 2))]
    assert np.all(equal) if random_state else not np.any(equal)


@pytest.mark.parametrize(
    "duplicate", [copy.copy, copy.deepcopy, lambda g: pickle.loads(pickle.dumps(g))]
)
def test_copies_of_a_secure_generator_have_streams_of_their_own(duplicate):
    source = random_source()
    assert duplicate(source.sampler).integers(2**63) != source.sampler.integers(2**63)
    other = duplicate(random_source(3).sampler)
    assert other.integers(2**63) == random_source(3).sampler.integers(2**63)
    if duplicate is not copy.copy:  # a shallow copy of a source is the same generators
        assert duplicate(source).lanes[0].random() != source.lanes[0].random()
