import copy
import os
import pickle
from typing import Any

import numpy as np
import pytest

from privagrad.privacy.noise import (
    BUFFER,
    PIECE,
    STREAMS,
    KeyStream,
    random_source,
    secure_generator,
)


def test_words_are_aes_of_a_counter():
    """The blocks 0 and 1 under the key 0: test case 1 of the specification of GCM."""
    stream = KeyStream(bytes(16))
    expected = "66e94bd4ef8a2c3b884cfa59ca342b2e58e2fccefa7e3061367f1d57a4e7455a"
    assert stream.words(4).astype("<u8").tobytes().hex() == expected


def test_no_word_is_given_twice():
    stream = KeyStream()
    counts = [1, 3, BUFFER, 7, BUFFER - 7, PIECE, 100, BUFFER - 99, 2 * BUFFER, 2]
    words = np.concatenate([stream.words(count).copy() for count in counts])
    assert words.size == sum(counts)
    assert np.unique(words).size == words.size


@pytest.mark.parametrize("before", [0, 5, BUFFER])
@pytest.mark.parametrize("buffers", [2, PIECE // BUFFER])
def test_several_buffers_are_one_after_the_other(before, buffers):
    one, other = KeyStream(bytes(16)), KeyStream(bytes(16))
    one.words(before), other.words(before)
    expected = np.concatenate([one.words(BUFFER).copy() for _ in range(buffers)])
    assert np.array_equal(other.words(buffers * BUFFER), expected)
    assert np.array_equal(one.words(3), other.words(3))


@pytest.mark.parametrize("count", [BUFFER + 1, PIECE - 1, PIECE + BUFFER])
def test_more_words_than_there_are_at_a_time_are_refused(count):
    with pytest.raises(ValueError, match="at most"):
        KeyStream().words(count)


def test_a_stream_without_a_new_key_gives_nothing(monkeypatch):
    """Python ignores errors in what runs after a fork: words of the parent must not be there."""
    stream = KeyStream()
    stream.words(10)

    def fails(bits):
        raise OSError("no entropy")

    monkeypatch.setattr("privagrad.privacy.noise.secrets.randbits", fails)
    with pytest.raises(OSError, match="entropy"):
        stream.restart()
    with pytest.raises(TypeError):
        stream.words(1)


def test_the_secure_sampler_is_aes_in_counter_mode():
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
    words = [int(stream.words(1)[0]) for s in (first, second) for stream in s.streams]
    draws = [s.sampler.integers(2**63) for s in (first, second)]
    assert len({*words, *draws}) == 2 * (STREAMS + 1)


def test_seeds_repeat_and_say_so():
    for make in (lambda: 7, lambda: np.random.default_rng(7)):
        first, second = random_source(make()), random_source(make())
        assert first.seeded
        assert second.seeded
        for a, b in zip(first.streams, second.streams, strict=True):
            assert np.array_equal(a.words(3), b.words(3))
    one, other = random_source(7), random_source(8)
    assert one.sampler.random() != other.sampler.random()
    assert (
        len({int(stream.words(1)[0]) for s in (one, other) for stream in s.streams}) == 2 * STREAMS
    )


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
    stream, sampler = source.streams[0], source.sampler
    stream.words(3)  # half-used blocks and words must not be shared either
    sampler.integers(2**31, dtype=np.int32)

    def draw():
        numbers = [
            *(kept.words(4).astype(float) for kept in (stream, *source.streams[1:])),
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
        assert duplicate(source).streams[0].words(1) != source.streams[0].words(1)


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_seeded_stream_is_not_copied(duplicate):
    """A copy would give the same words once more."""
    with pytest.raises(TypeError, match="Expected a seeded stream to stay where it is"):
        duplicate(random_source(3).streams[0])


def test_unknown_noise_is_refused():
    with pytest.raises(ValueError, match="Expected noise to be one of gaussian, discrete"):
        random_source(None, "laplace")  # type: ignore[arg-type]
