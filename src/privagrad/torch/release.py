"""The one release of a training: noise on the bounded sums of a batch."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
from torch import Tensor

from privagrad.privacy.bounded import Part, Share
from privagrad.privacy.mechanism import GaussianSum
from privagrad.privacy.noise import RandomSource
from privagrad.torch.processes import Processes
from privagrad.torch.scales import Scale

FLOAT32 = 2.0**-10
"""What norms and sums in float32 may be off, counted as sensitivity."""

LARGEST_COUNT = 0.5
"""What one example adds to a count at most, in absolute value."""


def slack_of(batch_size: float, most_rows: int = 1) -> float:
    """How much longer than 1 the vector of an example, or of a user, may be by rounding in float32.

    Its own norm is off by up to 2⁻¹⁰. Beside it all other vectors of a batch may move by 16
    roundings, 2⁻²⁰ of their length: other shapes of products are summed in another order. A user's
    rows may add one rounding each, of the whole sum.
    """
    return FLOAT32 * (1 + batch_size * 2.0**-10 * (1 + (most_rows - 1) / 16))


class ReleaseTerms(NamedTuple):
    """How one batch is bounded and released: the same for all its parts and in all processes."""

    noise_multiplier: float
    max_grad_norm: float
    expected_batch_size: float


class Count(NamedTuple):
    """A count that is released with the sums.

    Each example adds at most ½ in absolute value; `share` is the length, below 1, that this ½ has
    in a whitened vector of length 1.
    """

    total: float
    share: float


class Released(NamedTuple):
    """What a release has made of the sums: they are `factor` times too small.

    `noise_std` is the standard deviation of a sum's noise at a coordinate of scale 1, `counted`
    the noisy count.
    """

    factor: float
    noise_std: float
    counted: float


class SumRelease:
    """Adds the noise to the bounded sums of all tensors, as one Gaussian mechanism.

    Parameters
    ----------
    source : RandomSource
    processes : Processes
    batch_size : int
        The expected batch size.
    most_rows : int
        How many rows of a user count; 1 where rows are protected.

    Guarantees
    ----------
    Let ‖g_i‖_C ≤ B. The whitened vector of an example is (C^{1/2} g_i, c_i)/B', c_i the count's
    coordinate. With a count of share h it has B' = B/sqrt(1 - h²), so that the squares of its
    parts are at most 1 - h² and h², without one B' = B. The noise is N(0, z² I) in these
    coordinates: a release of noise multiplier z. What a user adds is such a vector: an average of
    rows, each of norm ≤ B. Sums of up to `most_rows` times as many rows are rounded more often, and
    the slack that is counted as sensitivity grows with that: `slack_of`.
    """

    def __init__(
        self, source: RandomSource, processes: Processes, batch_size: float, most_rows: int = 1
    ) -> None:
        self.processes, self.batch_size = processes, batch_size
        self._slack = slack_of(batch_size, most_rows)
        self._source = source
        self._pool: ThreadPoolExecutor | None = None

    def __call__(
        self, totals: Mapping[str, Tensor], scales: Mapping[str, Scale], terms: ReleaseTerms,
        count: Count | None = None,
    ) -> Released:  # fmt: skip
        """Add noise to `totals`, flat and on the CPU, in place."""
        counted = np.array([count.total if count is not None else 0.0])
        if terms.noise_multiplier == 0:
            for total in totals.values():
                self.processes.sum(total)
            self.processes.sum_array(counted)
            return Released(1.0, 0.0, float(counted[0]))
        radius, parts = terms.max_grad_norm, []
        if count is not None:
            radius /= math.sqrt(1 - count.share**2)
            root = np.array([radius * count.share / LARGEST_COUNT])
            parts = [Part(counted, root, counted)]
        parts += [
            Part(total.numpy(), scales[name].root, total.numpy()) for name, total in totals.items()
        ]
        self._release(parts, terms.noise_multiplier, radius)
        count_now = float(counted[0]) * self.batch_size
        return Released(self.batch_size, terms.noise_multiplier * radius, count_now)

    def _release(self, parts: list[Part], noise: float, radius: float) -> None:
        mechanism = GaussianSum(
            sum(part.total.size for part in parts),
            noise,
            self.batch_size,
            slack=self._slack,
        )
        share = None
        if self.processes.count > 1:
            share = Share(self.processes.first, self.processes.sum_array)
        bounded = mechanism.sum_of_parts(parts, radius, share)
        mechanism.release(bounded, self._source, self._threads())

    def _threads(self) -> ThreadPoolExecutor | None:
        if self._pool is None and (os.cpu_count() or 1) > 1:
            self._pool = ThreadPoolExecutor(min(4, os.cpu_count() or 1))
        return self._pool
