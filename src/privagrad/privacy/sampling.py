"""Which rows each step sees: Poisson, of a fixed size with or without replacement, or allocated.

Rows are cut into blocks by their numbers, and what a step sees of a block follows from the run's
key, the step and the block alone. So whoever holds some of the rows can draw their part of every
sample, and all parts together are the same sample however the rows are shared out.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from threading import Lock
from typing import Any, Literal

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from privagrad._internal.jit import kernel
from privagrad.privacy.noise import keyed_generator

Sampling = Literal[
    "poisson", "with_replacement", "without_replacement", "random_allocation", "cyclic_poisson"
]
SAMPLINGS: tuple[Sampling, ...] = (
    "poisson",
    "with_replacement",
    "without_replacement",
    "random_allocation",
)
"""What users choose from. "cyclic_poisson" comes with correlated noise."""
Rows = NDArray[np.int64]

_BLOCK, _MOST_BLOCKS = 2**18, 4096
"""Rows of a block, and how many blocks there are at most: then blocks are larger."""

_CHUNK, _PASSES = 2**17, 16
"""About so many rows are drawn at once, those of several steps. An allocation of rows to the steps
of an epoch is drawn again for each chunk, so that a chunk has at least a part of an epoch."""

_WORD = 2**64 - 1
_MOST_COLORS = 10**9
"""Up to so many rows NumPy tells how a subset falls into blocks."""


@dataclass(frozen=True)
class Batches:
    """How a run sees its rows: how many there are, how many a step takes and how it draws them.

    Attributes
    ----------
    n_examples : int
        The number of rows.
    batch_size : int
        The expected number of rows of a step; when allocated, up to the rounding of `epoch`.
    steps : int
        The number of steps.
    sampling : Sampling or None
        How each step draws its rows; None: it takes all of them.
    bands : int
        Under "cyclic_poisson" the number b of groups that take turns; otherwise 1.
    """

    n_examples: int
    batch_size: int
    steps: int
    sampling: Sampling | None = "poisson"
    bands: int = 1

    def __post_init__(self) -> None:
        if (self.bands > 1) != (self.sampling == "cyclic_poisson"):
            raise ValueError(
                "Expected bands > 1 with sampling='cyclic_poisson' and with no other, found "
                f"bands={self.bands} and sampling={self.sampling!r}."
            )
        if self.sampling == "cyclic_poisson" and self.rate > 1:
            raise ValueError(
                f"Expected bands * batch_size <= n_examples = {self.n_examples}, found "
                f"{self.bands} * {self.batch_size}: each step draws from one of {self.bands} "
                "groups of rows. Take fewer bands, or smaller batches."
            )

    @property
    def epoch(self) -> int:
        """The steps in which a row is seen once on average; when allocated, exactly once."""
        return max(1, round(self.n_examples / self.batch_size))

    @property
    def expected_size(self) -> float:
        """The expected number of rows of a step, which sums are divided by."""
        allocated = self.sampling == "random_allocation"
        return self.n_examples / self.epoch if allocated else self.batch_size

    @property
    def rate(self) -> float:
        """The probability that a row is in a step for which it may be drawn.

        All rows may be, under "cyclic_poisson" those of one of `bands` groups.
        """
        return int(self.bands) * int(self.batch_size) / int(self.n_examples)

    def draw(self, generator: Generator) -> Samples:
        """The samples of a run, whose key the generator draws."""
        return Samples(self, int.from_bytes(generator.bytes(16), "little"))


class Samples:
    """The rows of every step of a run: all of them, or those of a part of the table.

    Parameters
    ----------
    batches : Batches
        How rows are drawn.
    key : int
        128 random bits, which nobody may know who is not trusted with the rows.

    Guarantees
    ----------
    ``"poisson"``: every row is in every batch independently with probability
    batch_size/n_examples; a batch may be empty. ``"with_replacement"``: batch_size independent
    uniform rows (the paper's). ``"without_replacement"``: a uniform subset of batch_size rows.
    ``"random_allocation"``: in every epoch of `Batches.epoch` steps, every row is in exactly one
    step, which is uniformly random and independent of all other rows. ``"cyclic_poisson"``: step t
    holds every row whose number leaves the remainder t when divided by `bands` independently with
    probability bands · batch_size/n_examples, and no other row: a row is in at most one of any
    `bands` steps in a row. None: all rows, every time.

    Several threads may ask for rows at once. Time and memory are of the order of the batches, but
    for a part for each block. An allocation takes time of the order of the rows for each chunk of
    steps.
    """

    def __init__(self, batches: Batches, key: int) -> None:
        self.batches, self.key = batches, key
        n = batches.n_examples
        # Of groups that take turns each block begins with a row of the first one.
        width, bands = max(_BLOCK, -(-n // _MOST_BLOCKS)), batches.bands
        self._width = -(-width // bands) * bands
        self._edges = np.append(np.arange(0, n, self._width), n)
        per_step = max(batches.batch_size, 1)
        if batches.sampling == "random_allocation":
            self._period = batches.epoch
            self._per_chunk = min(self._period, max(_CHUNK, n // _PASSES) // per_step + 1)
        else:
            self._period = batches.steps
            self._per_chunk = max(1, min(batches.steps, _CHUNK // per_step))
        self._chunk, self._sizes = -1, np.empty((0, 0), dtype=np.int64)
        self._drawn: dict[int, list[Rows]] = {}
        # A chunk that another thread closes would leave the sizes of one with the rows of another.
        self._turn = Lock()

    def __reduce__(self) -> Any:
        return samples_of, (self.batches, self.key)

    def __iter__(self) -> Iterator[Rows]:
        """The rows of every step, each time another array."""
        return map(self.of_step, self.numbers())

    def numbers(self) -> Iterator[int]:
        """The numbers of all steps, in the process that began the run.

        Two processes that both went on would use the same samples, and the cost of each would be
        that of samples of its own.
        """
        process = os.getpid()
        for step in range(self.batches.steps):
            if os.getpid() != process:
                raise RuntimeError(
                    "Expected a run to go on in the process that began it, found a forked one: "
                    "begin a run of its own there."
                )
            yield step

    def of_step(self, step: int, first: int = 0, stop: int | None = None) -> Rows:
        """The rows of a step with numbers from `first` to before `stop`."""
        batches = self.batches
        stop = batches.n_examples if stop is None else stop
        if batches.sampling is None or first == stop:
            return np.arange(first, stop)
        blocks = range(first // self._width, -(-stop // self._width))
        with self._turn:
            place = self._open(step)
            parts = [self._block(block)[place] for block in blocks]
        found = np.concatenate(parts) if len(parts) > 1 else parts[0]
        if first == 0 and stop == batches.n_examples:
            return found
        return found[(found >= first) & (found < stop)]

    def _open(self, step: int) -> int:
        """Turn to the chunk that a step is in; the step's place there."""
        epoch, within = divmod(step, self._period)
        chunk = epoch * -(-self._period // self._per_chunk) + within // self._per_chunk
        if chunk != self._chunk:
            self._drawn, self._chunk = {}, chunk
            first = within // self._per_chunk * self._per_chunk
            self._first = first
            self._count = min(self._per_chunk, self._period - first)
            if self.batches.sampling != "random_allocation":
                self._sizes = self._sizes_of(self._generator(chunk, 0))
        return within - self._first

    def _block(self, block: int) -> list[Rows]:
        """The rows of a block in every step of the open chunk."""
        if block not in self._drawn:
            start = self._edges[block]
            drawn = self._draw(block)
            self._drawn[block] = list(drawn) if block == 0 else [rows + start for rows in drawn]
        return self._drawn[block]

    def _draw(self, block: int) -> Iterator[Rows]:
        batches, width = self.batches, int(self._edges[block + 1] - self._edges[block])
        if batches.sampling == "random_allocation":
            epoch = self._chunk // -(-self._period // self._per_chunk)
            steps = self._generator(epoch, 1 + block).integers(self._period, size=width)
            yield from _allocated(steps, self._first, self._count)
            return
        sizes = self._sizes[:, block]
        if batches.sampling == "cyclic_poisson":
            yield from self._draw_in_turns(block, sizes)
            return
        if not sizes.any():
            # The oracle tells batches apart by which array they are.
            yield from (np.empty(0, dtype=np.int64) for _ in sizes)
            return
        generator = self._generator(self._chunk, 1 + block)
        if batches.sampling == "with_replacement":
            rows = generator.integers(width, size=int(sizes.sum()))
            yield from np.split(rows, np.cumsum(sizes)[:-1])
        else:
            yield from _subsets(width, sizes, generator)

    def _draw_in_turns(self, block: int, sizes: Rows) -> Iterator[Rows]:
        """The rows of a block in every step of the open chunk, each of its step's group."""
        bands = self.batches.bands
        widths, groups = self._widths_in_turns()[:, block], self._groups()
        generator = self._generator(self._chunk, 1 + block)
        drawn = {}
        for group in range(bands):
            own = sizes[groups == group]
            found = _subsets(int(widths[group]), own, generator) if own.any() else ()
            drawn[group] = iter(list(found))
        for group in groups.tolist():
            yield group + bands * next(drawn[group], np.empty(0, dtype=np.int64))

    def _groups(self) -> Rows:
        """The group of every step of the open chunk."""
        return (self._first + np.arange(self._count)) % self.batches.bands

    def _widths_in_turns(self) -> Rows:
        """How many rows of each group every block has, of shape (bands, blocks)."""
        bands = self.batches.bands
        return (np.diff(self._edges) - np.arange(bands)[:, None] + bands - 1) // bands

    def _sizes_of(self, generator: Generator) -> Rows:
        """How many rows of each block every step of a chunk draws, of shape (steps, blocks)."""
        batches, widths = self.batches, np.diff(self._edges)
        shape = self._count, widths.size
        if batches.sampling == "poisson":
            return generator.binomial(widths, batches.rate, size=shape)
        if batches.sampling == "cyclic_poisson":
            return generator.binomial(self._widths_in_turns()[self._groups()], batches.rate)
        if widths.size == 1:
            return np.full(shape, batches.batch_size)
        if batches.sampling == "with_replacement":
            shares = widths / batches.n_examples
            return generator.multinomial(batches.batch_size, shares, size=self._count)
        if batches.n_examples >= _MOST_COLORS:
            return self._counted_sizes(generator, shape)
        return generator.multivariate_hypergeometric(
            widths, batches.batch_size, size=self._count, method="marginals"
        )

    def _counted_sizes(self, generator: Generator, shape: tuple[int, int]) -> Rows:
        """Those of subsets without replacement, by drawing such subsets."""
        sizes = np.full(self._count, self.batches.batch_size)
        drawn = _subsets(self.batches.n_examples, sizes, generator)
        counted = (np.bincount(rows // self._width, minlength=shape[1]) for rows in drawn)
        return np.stack(list(counted))

    def _generator(self, chunk: int, slot: int) -> Generator:
        """A generator of its own for each chunk (or epoch) and block; slot 0 is for the sizes."""
        chunk = int(chunk)  # of an integer of NumPy's 64 bits none would be left
        return keyed_generator(self.key, (chunk << 72) | (slot << 48))


@lru_cache(maxsize=8)
def samples_of(batches: Batches, key: int) -> Samples:
    """The samples as a process keeps them that is told of them at every step."""
    return Samples(batches, key)


def batches(
    sampling: Sampling | None, n_examples: int, batch_size: int, steps: int, generator: Generator
) -> Samples:
    """`steps` batches of row numbers: see `Samples`."""
    return Batches(n_examples, batch_size, steps, sampling).draw(generator)


def _allocated(steps: Rows, first: int, count: int) -> Iterator[Rows]:
    """For each of the steps from `first` on, the rows that it was given."""
    inside = np.flatnonzero((steps >= first) & (steps < first + count))
    order = np.argsort(steps[inside], kind="stable")
    edges = np.searchsorted(steps[inside][order], np.arange(first, first + count + 1)).tolist()
    for low, high in pairwise(edges):
        yield inside[order[low:high]]


def poisson_batches(
    n_examples: int, rate: float, count: int, generator: Generator
) -> Iterator[Rows]:
    """`count` batches that hold every row independently with probability `rate`."""
    sizes = generator.binomial(n_examples, rate, size=count)
    yield from _subsets(n_examples, sizes, generator)


def _subsets(n_examples: int, sizes: Rows, generator: Generator) -> Iterator[Rows]:
    """Uniform subsets of the given sizes: uniform draws, repeats within a subset dropped."""
    largest = int(sizes.max())
    if 2 * largest > n_examples:
        for size in sizes:
            yield generator.permutation(n_examples)[:size]
        return
    bits = max(n_examples - 1, 1).bit_length()
    # Draws below n_examples, and of those the new ones, are more than half each.
    draws_per_row = 2**bits / n_examples * (1 + largest / n_examples)
    edges = np.concatenate([[0], np.cumsum(sizes)])
    rows = np.empty(edges[-1], dtype=np.int64)
    table = np.full(2 << largest.bit_length(), -1)
    done = 0
    while done < sizes.size:
        expected = (edges[-1] - edges[done]) * draws_per_row
        words = int((expected + 6 * expected**0.5) / (64 // bits)) + 16
        # Not random_raw, whose words have 32 bits for some generators (MT19937).
        draws = generator.integers(_WORD, size=words, dtype=np.uint64, endpoint=True)
        done = _fill(rows, edges, done, draws, bits, n_examples, table)
    bounds = edges.tolist()
    for first, last in pairwise(bounds):
        yield rows[first:last]


@kernel()
def _fill(rows: Rows, edges: Rows, subset: int, draws: Any, bits: int, n: int, table: Rows) -> int:
    """Fill subset after subset, rows[edges[k] : edges[k + 1]], as far as the draws go.

    Words are cut into draws of `bits` bits, of which those below `n` and not yet in the subset
    are taken; a subset that the draws do not fill is left to the next call, from its start: how
    many draws a subset takes does not depend on which rows are in it. `table` is the subset's
    hash set, empty between subsets.
    """
    mask = table.size - 1
    low = (np.uint64(1) << np.uint64(bits)) - np.uint64(1)
    position = 0
    while subset < edges.size - 1:
        start, stop = edges[subset], edges[subset + 1]
        found = start
        while found < stop and position < draws.size:
            word = draws[position]
            position += 1
            for _ in range(64 // bits):
                row = np.int64(word & low)
                word >>= np.uint64(bits)
                if row >= n or found == stop:
                    continue
                # Multiplying by an odd constant spreads neighbouring rows over the table.
                slot = ((row * 0x9E3779B1) >> 12) & mask
                while table[slot] != -1 and table[slot] != row:
                    slot = (slot + 1) & mask
                if table[slot] == -1:
                    table[slot] = row
                    rows[found] = row
                    found += 1
        if found > start:
            table[:] = -1
        if found < stop:
            break
        subset += 1
    return subset
