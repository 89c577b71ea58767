"""Histograms in one private query, whose sums over ranges of bins have little noise.

With noise in each bin alone, the count below an edge has the noise of all bins below it. A row
therefore adds to its bin and, ever less, to the bins after it: the square root of the matrix of
prefix sums. Solving for the bins gives a histogram whose noise is a little larger in a bin and much
smaller in a sum: with 20 bins, 1.6 times and at most 0.45 times as large.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from privagrad._internal.jit import kernel
from privagrad._internal.validate import Integers, Vector
from privagrad.privacy.bounded import BoundedSum
from privagrad.privacy.mechanism import GaussianSum
from privagrad.privacy.releases import Releases

COPIES, _FEWEST, _MOST_CELLS = 200, 10, 4_000_000
"""How often noise of the released size is added again, to see what it does to a figure: fewer times
where that would be many numbers."""

Weights = NDArray[np.float64]


@dataclass(frozen=True)
class Histogram:
    """A row is in one bin of one group; bins are `ordered`, or each stands for itself."""

    groups: int
    bins: int
    ordered: bool = True

    @property
    def size(self) -> int:
        return self.groups * self.bins

    @property
    def profile(self) -> Vector:
        """What a row adds to its bin and to those after it: a vector of norm 1."""
        if not self.ordered:
            return np.ones(1)
        k = np.arange(1, self.bins)
        roots = np.concatenate([[1.0], np.cumprod((2 * k - 1) / (2 * k))])
        return np.asarray(roots / math.sqrt(float(np.square(roots).sum())))

    def solved(self, sums: Weights) -> Weights:
        """The histogram, of shape (..., groups, bins), whose rows have added up to the sums."""
        sums = sums.reshape(*sums.shape[:-1], self.groups, self.bins)
        if not self.ordered:
            return sums
        profile, strategy = self.profile, np.zeros((self.bins, self.bins))
        for j in range(self.bins):
            strategy[j:, j] = profile[: self.bins - j]
        return np.asarray(sums @ np.linalg.inv(strategy).T)


class Counted(Protocol):
    """Rows that can be put into cells, in memory or elsewhere."""

    @property
    def n(self) -> int:
        """The number of rows."""

    def add_to(self, total: BoundedSum, add: Callable[..., Any], *arguments: Any) -> None:
        """Let ``add(units, per_unit, limit, rows, *arguments)`` bound and add all rows."""


def release_histograms(
    histograms: Sequence[Histogram], rows: Counted, cells_of: Callable[[Any], Integers],
    releases: Releases, purpose: str,
) -> list[Weights]:  # fmt: skip
    """The shares of the rows in all cells, each of shape (1 + copies, groups, bins).

    The first ones are those released; the others are these with noise of the same size again.

    Parameters
    ----------
    histograms : sequence of Histogram
        What is counted.
    rows : Counted
        The rows.
    cells_of : callable
        The cell of each of some rows in each histogram, group by group, of shape (number of rows,
        number of histograms); -1 where a row adds nothing.
    releases : Releases
        What pays, and where noise comes from.
    purpose : str
        The plan's event.

    Guarantees
    ----------
    One Gaussian release: a row adds one vector of norm at most 1 for each histogram, over the root
    of their number, and these depend on the row's cells alone.
    """
    n, weight = rows.n, 1 / math.sqrt(len(histograms))
    ends = np.cumsum([histogram.size for histogram in histograms])
    mechanism = GaussianSum(int(ends[-1]), releases.noise_for(purpose), n)
    total = mechanism.sum()
    rows.add_to(total, _add_rows, cells_of, tuple(histograms))
    means = mechanism.release(total, releases.source) / weight
    noise = mechanism.noise_multiplier / (n * weight)
    # What is computed from a release needs no secure noise, and the same answer for all readers.
    copies = min(COPIES, max(_FEWEST, _MOST_CELLS // means.size))
    again = np.random.default_rng(0).standard_normal((copies, means.size))
    sums = np.vstack([means, means + noise * again])
    parts = np.split(sums, ends[:-1], axis=1)
    return [h.solved(part) for h, part in zip(histograms, parts, strict=True)]


def _add_rows(
    units: Vector, per_unit: float, limit: float, rows: Any, cells_of: Callable[[Any], Integers],
    histograms: Sequence[Histogram],
) -> tuple[int, int]:  # fmt: skip
    cells, weight, first = cells_of(rows), 1 / math.sqrt(len(histograms)), 0
    for j, histogram in enumerate(histograms):
        inside = np.ascontiguousarray(cells[:, j])
        _add(units, per_unit, limit, inside, first, histogram.bins, weight * histogram.profile)
        first += histogram.size
    return 0, 0


@kernel()
def _add(
    total: Vector, per_unit: float, limit: float, cells: Integers, first: int, bins: int,
    profile: Vector,
) -> tuple[int, int]:  # fmt: skip
    """Add the profile to each row's bin and those after it in the group: shrunk to `limit`."""
    units = np.rint(profile * (limit * per_unit))
    for i in range(cells.size):
        if cells[i] < 0:
            continue
        rest = bins - cells[i] % bins
        for k in range(min(rest, units.size)):
            total[first + cells[i] + k] += units[k]
    return 0, 0
