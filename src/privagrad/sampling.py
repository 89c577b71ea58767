"""Which rows each step sees: Poisson, or a fixed size with or without replacement."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

Sampling = Literal["poisson", "with_replacement", "without_replacement"]
SAMPLINGS: tuple[Sampling, ...] = ("poisson", "with_replacement", "without_replacement")
Rows = NDArray[np.int64]

_BLOCK = 2**14


def batches(
    sampling: Sampling, n_examples: int, batch_size: int, steps: int, generator: Generator
) -> Iterator[Rows]:
    """`steps` batches of row numbers, in time and memory of the order of the batches alone.

    Guarantees
    ----------
    ``"poisson"``: every row is in every batch independently with probability
    batch_size/n_examples; a batch may be empty. ``"with_replacement"``: batch_size independent
    uniform rows (the paper's). ``"without_replacement"``: a uniform subset of batch_size rows.
    """
    per_block = max(1, min(steps, _BLOCK // batch_size))
    for start in range(0, steps, per_block):
        count = min(per_block, steps - start)
        if sampling == "poisson":
            yield from _poisson(n_examples, batch_size, count, generator)
        elif sampling == "with_replacement":
            yield from generator.integers(n_examples, size=(count, batch_size))
        else:
            for _ in range(count):
                yield generator.choice(n_examples, batch_size, replace=False, shuffle=False)


def _poisson(n_examples: int, batch_size: int, steps: int, generator: Generator) -> Iterator[Rows]:
    """One Bernoulli process on a line of steps · n_examples cells, cut into steps."""
    positions = _bernoulli_cells(steps * n_examples, batch_size / n_examples, generator)
    edges = np.searchsorted(positions, np.arange(steps + 1) * n_examples).tolist()
    rows = positions % n_examples
    for first, last in zip(edges[:-1], edges[1:], strict=True):
        yield rows[first:last]


def _bernoulli_cells(cells: int, rate: float, generator: Generator) -> Rows:
    """The successes among `cells` trials of probability `rate`, by their geometric gaps."""
    expected = cells * rate
    draws = int(expected + 6 * math.sqrt(expected) + 16)
    positions = np.cumsum(generator.geometric(rate, size=draws)) - 1
    while positions[-1] < cells:
        more = np.cumsum(generator.geometric(rate, size=draws)) + positions[-1]
        positions = np.concatenate([positions, more])
    return positions[: np.searchsorted(positions, cells)]
