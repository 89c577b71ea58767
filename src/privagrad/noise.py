"""Sources of randomness: secure by default, seeded for tests and figures."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from dataclasses import dataclass

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
    """A generator on AES-128 in counter mode with a fresh key from the operating system."""
    from randomgen import AESCounter

    return Generator(AESCounter(key=secrets.randbits(128)))


def random_source(random_state: RandomState = None) -> RandomSource:
    """The secure source for None; a seeded one for a whole number or a NumPy Generator.

    Guarantees
    ----------
    With None every call draws new keys, so that no two runs, threads or forked processes share
    a stream, and the numbers cannot be told from random ones without the key.
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
