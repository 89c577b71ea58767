"""The one release of a training: noise on the bounded sums of a batch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from privagrad.privacy.bounded import Part
from privagrad.privacy.correlation import NoiseHistory, coefficients_of, spread_of
from privagrad.privacy.mechanism import GaussianSum
from privagrad.privacy.noise import RandomSource
from privagrad.torch.scales import Scale
from privagrad.torch.shares import Received, Shares

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
        Of this process alone: no other process draws from the same streams.
    shares : Shares
        The coordinates that this process releases.
    batch_size : int
        The expected batch size.
    most_rows : int
        How many rows of a user count; 1 where rows are protected.
    bands : int
        Over how many releases in a row the noise is correlated: then of one process alone.

    Guarantees
    ----------
    Let ‖g_i‖_C ≤ B. The whitened vector of an example is (C^{1/2} g_i, c_i)/B', c_i the count's
    coordinate. With a count of share h it has B' = B/sqrt(1 - h²), so that the squares of its
    parts are at most 1 - h² and h², without one B' = B. The noise is N(0, z² I) in these
    coordinates: a release of noise multiplier z. What a user adds is such a vector: an average of
    rows, each of norm ≤ B. Sums of up to `most_rows` times as many rows are rounded more often, and
    the slack that is counted as sensitivity grows with that: `slack_of`.

    Of several processes each adds the noise of the coordinates in its own share, from its own
    streams, to the sum of what all processes have there; the first one also that of the count. A
    coordinate is in one share only. So all processes together make one such release: each
    coordinate has its noise once, and no two coordinates have the same. What each process has is
    rounded to whole units by itself, and only one of them has the example that moves.
    """

    def __init__(
        self,
        source: RandomSource,
        shares: Shares,
        batch_size: float,
        most_rows: int = 1,
        bands: int = 1,
    ) -> None:
        self.shares, self.batch_size = shares, batch_size
        self._slack = slack_of(batch_size, most_rows)
        self._source = source
        self._pool: ThreadPoolExecutor | None = None
        self._roots: dict[str, _Root] = {}
        self.bands, self._run = bands, _Run(None, None, -1)

    def restart(self) -> None:
        """The next release is the first one of a run: its noise is independent of all before."""
        self._run = _Run(None, None, -1)

    def check(self, terms: ReleaseTerms) -> None:
        """Refuse, before anything is charged, another bound or noise where noise is correlated."""
        before = self._run.terms
        if self.bands > 1 and before is not None and before[:2] != terms[:2]:
            raise RuntimeError(
                "Expected the same noise_multiplier and max_grad_norm for the whole training with "
                f"correlated noise, found {terms[:2]} after {before[:2]}: earlier noise would not "
                "cancel. Leave correlation= out where they change."
            )

    def __call__(
        self, totals: Mapping[str, Tensor], scales: Mapping[str, Scale], terms: ReleaseTerms,
        count: Count | None = None, number: int | None = None,
    ) -> Released:  # fmt: skip
        """Add noise to `totals`, flat and on the CPU, in place: at this process's coordinates.

        At all others they stay what they are, which is not private. `number` is that of the batch:
        steps between it and the last one have released nothing.
        """
        processes = self.shares.processes
        counts = [[0.0]] if count is None else processes.gathered([count.total])
        if terms.noise_multiplier == 0:
            for name, place, values in self._received(totals):
                totals[name][place] = sum(values[1:], values[0])
            return Released(1.0, 0.0, sum(own for (own,) in counts))
        radius, parts, counted = terms.max_grad_norm, [], np.zeros(1)
        if count is not None:
            radius /= math.sqrt(1 - count.share**2)
            root = np.array([radius * count.share / LARGEST_COUNT])
            if processes.first:
                parts = [Part([np.array(own) for own in counts], root, counted)]
        mechanism, history = self._mechanism_of(terms, count is not None, number)
        for received in self.shares.exchanged(totals):
            parts += [self._part(totals, scales, own) for own in received]
            bounded = mechanism.sum_of_parts(parts, radius)
            mechanism.release(bounded, self._source, self._threads(), history)
            parts = []
        self._run = self._run._replace(number=self._place(number))
        if count is not None:
            processes.agree(torch.from_numpy(counted))
        count_now = float(counted[0]) * self.batch_size
        spread = terms.noise_multiplier * spread_of(self.bands)
        return Released(self.batch_size, spread * radius, count_now)

    def _place(self, number: int | None) -> int:
        """Which step of the run a batch is: one after the last if it has no number."""
        return self._run.number + 1 if number is None else number

    def _mechanism_of(
        self, terms: ReleaseTerms, counts: bool, number: int | None
    ) -> tuple[GaussianSum, NoiseHistory | None]:
        """The mechanism of a release; where noise is correlated that of all, and its history."""
        run, place = self._run, self._place(number)
        if run.history is None or run.history.is_open:
            mechanism = GaussianSum(
                self.shares.size + counts, terms.noise_multiplier, self.batch_size,
                slack=self._slack, coefficients=coefficients_of(self.bands),
            )  # fmt: skip
            history = mechanism.begin_history(self._source.noise)
            self._run = _Run(terms, history, place - 1)
            return mechanism, history
        if place <= run.number:
            raise ValueError(
                f"Expected a batch after number {run.number} with correlated noise, found {place}."
            )
        # A release that fails before it begins is skipped once more: rows are only further apart.
        run.history.skip(place - run.number - 1)
        return run.history.mechanism, run.history

    def _received(self, totals: Mapping[str, Tensor]) -> Iterator[Received]:
        for received in self.shares.exchanged(totals):
            yield from received

    def _part(
        self, totals: Mapping[str, Tensor], scales: Mapping[str, Scale], own: Received
    ) -> Part:
        name, place, values = own
        out = totals[name][place].numpy()
        return Part([value.numpy() for value in values], self._root(name, scales, place), out)

    def _root(self, name: str, scales: Mapping[str, Scale], place: slice) -> Any:
        """C^{1/2} of a tensor at `place`, kept for the next batch where this process owns it."""
        known, share = self._roots.get(name), self.shares.own.get(name, slice(0, 0))
        if known is None or known.scale is not scales[name]:
            self._roots[name] = known = _Root(scales[name], scales[name].root(share))
        if place == slice(None):
            return known.values
        return known.values[place.start - share.start : place.stop - share.start]

    def _threads(self) -> ThreadPoolExecutor | None:
        if self._pool is None and torch.get_num_threads() > 1:
            self._pool = ThreadPoolExecutor(min(4, torch.get_num_threads()))
        return self._pool


class _Run(NamedTuple):
    """Releases with correlated noise: their terms, the history, the number of the last batch."""

    terms: ReleaseTerms | None
    history: NoiseHistory | None
    number: int


class _Root(NamedTuple):
    """C^{1/2} at the coordinates of a tensor that this process owns."""

    scale: Scale
    values: Any
