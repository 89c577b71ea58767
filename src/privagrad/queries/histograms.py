"""Histograms in one private query, whose sums over ranges of bins have little noise.

With noise in each bin alone, the count below an edge has the noise of all bins below it. A row
therefore adds to its bin and, ever less, to the bins after it: the square root of the matrix of
prefix sums. Solving for the bins gives a histogram whose noise is a little larger in a bin and much
smaller in a sum: with 20 bins, 1.6 times and at most 0.45 times as large.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from privagrad._internal.jit import kernel
from privagrad._internal.validate import Integers, Vector
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


def release_histograms(
    histograms: Sequence[Histogram], cells: Integers, releases: Releases, purpose: str
) -> list[Weights]:
    """The shares of the rows in all cells, each of shape (1 + copies, groups, bins).

    The first ones are those released; the others are these with noise of the same size again.

    Parameters
    ----------
    histograms : sequence of Histogram
        What is counted.
    cells : array of shape (n, number of histograms)
        The cell of each row in each of them, group by group; -1 where a row adds nothing.
    releases : Releases
        What pays, and where noise comes from.
    purpose : str
        The plan's event.

    Guarantees
    ----------
    One Gaussian release: a row adds one vector of norm at most 1 for each histogram, over the root
    of their number, and these depend on the row's cells alone.
    """
    n, count = cells.shape
    weight = 1 / math.sqrt(count)
    ends = np.cumsum([histogram.size for histogram in histograms])
    mechanism = GaussianSum(int(ends[-1]), releases.noise_for(purpose), n)
    total = mechanism.sum()
    for j, histogram in enumerate(histograms):
        first = int(ends[j]) - histogram.size
        inside = np.ascontiguousarray(cells[:, j])
        total.add_by(_add, inside, first, histogram.bins, weight * histogram.profile)
    means = mechanism.release(total, releases.source) / weight
    noise = mechanism.noise_multiplier / (n * weight)
    # What is computed from a release needs no secure noise, and the same answer for all readers.
    copies = min(COPIES, max(_FEWEST, _MOST_CELLS // means.size))
    again = np.random.default_rng(0).standard_normal((copies, means.size))
    sums = np.vstack([means, means + noise * again])
    parts = np.split(sums, ends[:-1], axis=1)
    return [h.solved(part) for h, part in zip(histograms, parts, strict=True)]


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
