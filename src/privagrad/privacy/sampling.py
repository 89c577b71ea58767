"""Which rows each step sees: Poisson, or a fixed size with or without replacement."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from privagrad._internal.jit import kernel

Sampling = Literal["poisson", "with_replacement", "without_replacement", "random_allocation"]
SAMPLINGS: tuple[Sampling, ...] = ("poisson", "with_replacement", "without_replacement")
Rows = NDArray[np.int64]

_BLOCK = 2**14
_WORD = 2**64 - 1


@dataclass(frozen=True)
class Batches:
    """How a run sees its rows: how many there are, how many a step takes and how it draws them.

    Attributes
    ----------
    n_examples : int
        The number of rows.
    batch_size : int
        The expected number of rows of a step.
    steps : int
        The number of steps.
    sampling : {"poisson", "with_replacement", "without_replacement"} or None
        How each step draws its rows; None: it takes all of them.
    """

    n_examples: int
    batch_size: int
    steps: int
    sampling: Sampling | None = "poisson"

    @property
    def epoch(self) -> int:
        """The steps in which a row is seen once on average."""
        return max(1, round(self.n_examples / self.batch_size))

    def draw(self, generator: Generator) -> Iterator[Rows]:
        """The row numbers of every step: see `batches`."""
        return batches(self.sampling, self.n_examples, self.batch_size, self.steps, generator)


def batches(
    sampling: Sampling | None, n_examples: int, batch_size: int, steps: int, generator: Generator
) -> Iterator[Rows]:
    """`steps` batches of row numbers, in time and memory of the order of the batches alone.

    Guarantees
    ----------
    ``"poisson"``: every row is in every batch independently with probability
    batch_size/n_examples; a batch may be empty. ``"with_replacement"``: batch_size independent
    uniform rows (the paper's). ``"without_replacement"``: a uniform subset of batch_size rows.
    None: all rows, every time.
    """
    if sampling is None:
        everything = np.arange(n_examples)
        for _ in range(steps):
            yield everything[:]
        return
    if sampling == "random_allocation":
        raise NotImplementedError("Random allocation is accounted for, but not drawn yet.")
    per_block = max(1, min(steps, _BLOCK // batch_size))
    for start in range(0, steps, per_block):
        count = min(per_block, steps - start)
        if sampling == "with_replacement":
            yield from generator.integers(n_examples, size=(count, batch_size))
            continue
        if sampling == "poisson":
            yield from poisson_batches(n_examples, batch_size / n_examples, count, generator)
        else:
            yield from _subsets(n_examples, np.full(count, batch_size), generator)


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
