"""Sources of randomness: secure by default, seeded for tests and figures."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any
from weakref import WeakSet

import numpy as np
from numpy.random import Generator

LANES = 4
"""Independent generators of one source: large draws are split among them, whatever the machine,
so that a seed gives the same numbers with any number of threads."""

RandomState = int | Generator | None


@dataclass(frozen=True)
class RandomSource:
    """Generators for the noise (`lanes`) and for the choice of batches (`sampler`).

    `seeded` is True where someone could draw the same numbers again: such a run is not private.
    """

    lanes: tuple[Generator, ...]
    sampler: Generator
    seeded: bool


def secure_generator() -> Generator:
    """A generator on AES-128 in counter mode with a fresh key from the operating system.

    Guarantees
    ----------
    No two processes and no two generators share a stream: a forked process draws a new key for
    every generator that it inherits, and a copy or an unpickled generator has a new key.
    """
    return Generator(_secure_bits())


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


def random_source(random_state: RandomState = None) -> RandomSource:
    """The secure source for None; a seeded one for a whole number or a NumPy Generator.

    Guarantees
    ----------
    With None every call draws new keys, and so does every forked process, for the generators that
    it inherits: no two runs, threads or processes share a stream, and the numbers cannot be
    distinguished from random ones without the key. A seeded source stays the same in a forked
    process.
    """
    if random_state is None:
        return _source((secure_generator() for _ in range(LANES + 1)), seeded=False)
    if isinstance(random_state, Generator):
        return _source(random_state.spawn(LANES + 1), seeded=True)
    if isinstance(random_state, (int, np.integer)) and not isinstance(random_state, bool):
        if random_state < 0:
            raise ValueError(f"Expected random_state >= 0, found {random_state!r}.")
        return _source(np.random.default_rng(random_state).spawn(LANES + 1), seeded=True)
    raise TypeError(
        "Expected random_state to be None (secure), a whole number or a numpy Generator "
        f"(both reproducible and not private), found {random_state!r}."
    )


def _source(generators: Iterable[Generator], *, seeded: bool) -> RandomSource:
    sampler, *lanes = generators
    return RandomSource(tuple(lanes), sampler, seeded)
