"""Sources of randomness: secure by default, seeded for tests and figures."""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass
from functools import cache
from threading import Lock
from typing import Any, Literal, cast, get_args
from weakref import WeakSet

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from privagrad._internal import validate

STREAMS = 4
"""Independent streams of one source: large draws are split among them, whatever the machine,
so that a seed gives the same numbers with any number of threads."""

BUFFER = 2**13
"""Words that a stream keeps for small draws."""

PIECE = 4 * BUFFER
"""The most words of one draw: they stay in the processor's cache."""

RandomState = int | Generator | None
Noise = Literal["gaussian", "discrete"]
Words = NDArray[np.uint64]

_ZEROS = memoryview(bytes(8 * PIECE))


class KeyStream:
    """Random words: what AES-128 in counter mode makes of zeros.

    Parameters
    ----------
    key : bytes, optional
        16 bytes, for streams that can be repeated; None: a fresh key from the operating system.

    Attributes
    ----------
    lock : Lock
        To be held from a call of `words` until its words are used.

    Guarantees
    ----------
    No word is given twice. Without a given key no two processes and no two streams share one: a
    forked process draws a new key for every stream that it inherits, and so does a copy.
    """

    def __init__(self, key: bytes | None = None) -> None:
        self._key = key
        self._buffer = np.empty(PIECE, np.uint64)
        self._bytes: Any = self._buffer.view(np.uint8)
        self.restart()
        if key is None:
            _secure_streams().add(self)

    def restart(self) -> None:
        """Begin again: with a fresh key, unless one was given."""
        # Before anything can fail: Python goes on in a forked process whatever happens here.
        self._encrypt: Any = None
        self._used = BUFFER
        self.lock = Lock()
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

        key = self._key or secrets.randbits(128).to_bytes(16, "little")
        self._encrypt = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor().update_into

    def words(self, count: int) -> Words:
        """The next words, valid until the next call: up to BUFFER, or whole buffers up to PIECE."""
        if count > BUFFER and (count % BUFFER or count > PIECE):
            raise ValueError(
                f"Expected at most {BUFFER} words at a time, or a multiple of that up to {PIECE}, "
                f"found {count}."
            )
        first, last = self._used, self._used + count
        if last > BUFFER:
            size = 8 * max(count, BUFFER)
            self._encrypt(_ZEROS[:size], self._bytes[:size])
            first, last = 0, count
        self._used = min(last, BUFFER)
        return self._buffer[first : first + count]

    def __reduce__(self) -> Any:
        if self._key is not None:
            raise TypeError(
                "Expected a seeded stream to stay where it is, found a copy or a pickle of it: "
                "make another one from the seed."
            )
        return KeyStream, ()


@cache
def _secure_streams() -> WeakSet[KeyStream]:
    """All streams with keys of their own, which get new ones in a forked process."""
    alive: WeakSet[KeyStream] = WeakSet()

    def restart() -> None:
        for stream in list(alive):
            stream.restart()

    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=restart)
    return alive


@dataclass(frozen=True)
class RandomSource:
    """Streams for the noise (`streams`) and a generator for the choice of batches (`sampler`).

    `seeded` is True where someone could draw the same numbers again: such a run is not private.
    `noise` says which distribution the words of the streams are turned into.
    """

    streams: tuple[KeyStream, ...]
    sampler: Generator
    seeded: bool
    noise: Noise = "gaussian"

    def another_generator(self) -> Generator:
        """A generator for other choices, independent of what was and will be drawn here."""
        return self.sampler.spawn(1)[0] if self.seeded else secure_generator()


def secure_generator() -> Generator:
    """A generator on AES-128 in counter mode with a fresh key from the operating system.

    Guarantees
    ----------
    No two processes and no two generators share a stream: a forked process draws a new key for
    every generator that it inherits, and a copy or an unpickled generator has a new key.
    """
    return Generator(_secure_bits())


def keyed_generator(key: int, counter: int) -> Generator:
    """A generator on AES-128 in counter mode with this key of 128 bits, from this counter on.

    Whoever has the key can draw the same numbers again. Generators of one key are independent if
    their counters are further apart than what they draw, in blocks of 16 bytes.
    """
    from randomgen import AESCounter

    return Generator(AESCounter(key=key, counter=counter))


def _secure_bits() -> Any:
    return _secure_kind()()


@cache
def _secure_kind() -> Any:
    """The class of secure bit generators; made at first use, because randomgen loads slowly."""
    from randomgen import AESCounter

    alive: WeakSet[Any] = WeakSet()

    class SecureBits(AESCounter):  # type: ignore[misc]
        """AES-128 in counter mode; without a key, with a fresh one from the operating system."""

        def __init__(self, *, key: int | None = None, counter: int | None = None) -> None:
            super().__init__(key=secrets.randbits(128) if key is None else key, counter=counter)
            alive.add(self)

        def __reduce__(self) -> Any:
            return _secure_bits, ()

    def new_keys() -> None:
        for bits in list(alive):
            bits.state = SecureBits().state

    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=new_keys)
    return SecureBits


def random_source(
    random_state: RandomState = None, noise: Noise = "gaussian", process: int | None = None
) -> RandomSource:
    """The secure source for None; a seeded one for a whole number or a NumPy Generator.

    `process` is the number of this process, where several draw together: with the same seed each
    of them has streams of its own.

    Guarantees
    ----------
    With None every call draws new keys, and so does every forked process, for the streams that
    it inherits: no two runs, threads or processes share a stream, and the numbers cannot be
    distinguished from random ones without the key. A seeded source stays the same in a forked
    process.
    """
    noise = noise_kind(noise)
    if random_state is None:
        streams = (KeyStream() for _ in range(STREAMS))
        return RandomSource(tuple(streams), secure_generator(), seeded=False, noise=noise)
    if isinstance(random_state, Generator):
        return _seeded(random_state, noise, process)
    if isinstance(random_state, (int, np.integer)) and not isinstance(random_state, bool):
        if random_state < 0:
            raise ValueError(f"Expected random_state >= 0, found {random_state!r}.")
        return _seeded(np.random.default_rng(random_state), noise, process)
    raise TypeError(
        "Expected random_state to be None (secure), a whole number or a numpy Generator "
        f"(both reproducible and not private), found {random_state!r}."
    )


def noise_kind(name: object) -> Noise:
    """`name` as a kind of noise."""
    return cast(Noise, validate.choice("noise", name, get_args(Noise)))


def _seeded(generator: Generator, noise: Noise, process: int | None) -> RandomSource:
    if process is not None:
        generator = generator.spawn(process + 1)[process]
    sampler, *others = generator.spawn(STREAMS + 1)
    streams = tuple(KeyStream(other.bytes(16)) for other in others)
    return RandomSource(streams, sampler, seeded=True, noise=noise)
