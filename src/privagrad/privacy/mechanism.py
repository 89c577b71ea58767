"""The Gaussian mechanism on a public grid: the only place where noise meets data."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from functools import partial

import numpy as np

from privagrad._internal.validate import Vector
from privagrad.geometry.ellipsoid import Ellipsoid
from privagrad.privacy.bounded import MECHANISM, BoundedSum, Part, SumOfParts
from privagrad.privacy.correlation import NoiseHistory
from privagrad.privacy.discrete import add_discrete
from privagrad.privacy.grid import PublicGrid
from privagrad.privacy.noise import BUFFER, PIECE, KeyStream, Noise, RandomSource
from privagrad.privacy.normals import LARGEST, add_normals

_MOST_UNITS = 2.0**51
_SPLIT_FROM = 2**17

AddNoise = Callable[[Vector, KeyStream, float], None]


class GaussianSum(PublicGrid):
    """Releases a sum of vectors, each of norm at most 1 in whitened coordinates.

    The sum is a whole number of units of `grid`, a power of two, in every coordinate, and whole
    units of noise are added.

    Its parameters are those of `PublicGrid`.

    Guarantees
    ----------
    Replacing one vector by zero moves the rounded sum by at most ``sensitivity`` =
    1 + slack + sqrt(dim) · grid, because rounding moves each coordinate by at most half a unit
    before and after. The noise has standard deviation ``noise_multiplier · sensitivity``, so the
    release is a Gaussian mechanism of that noise multiplier followed by rounding: rounded sum
    plus rounded noise equals the rounded value of rounded sum plus noise, and a whole number of
    units below 2⁵³ is exact in floating point, so that low-order bits carry nothing. That the
    normals are off by up to `normals.RELATIVE_ERROR` is counted as a longer way between two sums;
    discrete noise has no such error.

    With `coefficients` of b > 1 bands the releases of a run share a `NoiseHistory`. Replacing one
    vector by zero then moves b releases in a row, which together are one Gaussian mechanism of that
    noise multiplier (docs/proofs/correlated.md). So a row must be in at most one of any b steps in
    a row, as it is in samples of "cyclic_poisson".

    What must stay public: dim, the noise multiplier, the expected batch size, the ellipsoid, the
    coefficients.
    """

    def sum(
        self, ellipsoid: Ellipsoid | None = None, size: int | None = None, out: Vector | None = None
    ) -> BoundedSum:
        """A sum without vectors yet, to be released once.

        Parameters
        ----------
        ellipsoid : Ellipsoid, optional
            The set whose whitened coordinates the vectors are in; None: the unit ball.
        size : int, optional
            The length of the sum where it is not `dim`: one vector has at most `dim` entries.
        out : array, optional
            Memory for the sum.
        """
        length = size if size is not None else self.dim
        if ellipsoid is not None and ellipsoid.scale.size != length:
            raise ValueError(
                f"Expected an ellipsoid of dimension {length}, as the sum; found {ellipsoid.dim}."
            )
        if out is None:
            out = np.zeros(length)
        else:
            out.fill(0.0)
        return BoundedSum(MECHANISM, self, out, ellipsoid)

    def certified(self, vector: Vector, sensitivity: float) -> BoundedSum:
        """`vector`, which one example can move by at most `sensitivity`, as a bounded sum.

        Dividing by the sensitivity rounds by less than a unit within the limits, to which bringing
        a coordinate moves no two vectors apart: the mechanism's slack must cover sqrt(dim) units.
        """
        if self.slack < math.sqrt(self.dim) * self.grid:
            raise ValueError(
                f"Expected slack >= sqrt(dim) · grid = {math.sqrt(self.dim) * self.grid:g} for a "
                f"certified vector, found {self.slack:g}."
            )
        total = self.sum(Ellipsoid.ball(self.dim, sensitivity * self.batch_size))
        units = np.clip(vector / (sensitivity * self.grid), -_MOST_UNITS, _MOST_UNITS)
        np.copyto(total.memory, units)
        return total

    def sum_of_parts(self, parts: Sequence[Part], radius: float) -> BoundedSum:
        """Sums that the caller bounded to norm `radius` in the norm of the parts' scales.

        Parameters
        ----------
        parts : sequence of Part
            The coordinates, tensor by tensor: all `dim`, or those that are released here where
            several processes release one sum together. Each coordinate is released once.
        radius : float
            B: the sum of an example's scale_j g_j² is at most B², up to the mechanism's slack.
        """
        if (size := sum(part.out.size for part in parts)) > self.dim:
            raise ValueError(f"Expected parts of at most {self.dim} coordinates, found {size}.")
        return SumOfParts(MECHANISM, self, parts, radius)

    def begin_history(self, noise: Noise, size: int | None = None) -> NoiseHistory | None:
        """What the releases of a run share where their noise is correlated; None where it is not.

        Parameters
        ----------
        noise : {"gaussian", "discrete"}
        size : int, optional
            How many coordinates each release has, where these are not `dim`.
        """
        if self.bands == 1:
            return None
        # Discrete noise is larger than 40 deviations with probability e⁻⁸⁰⁰.
        largest = (LARGEST if noise == "gaussian" else 40.0) * self.deviation
        return NoiseHistory(self, self.coefficients, size or self.dim, largest)

    def release(
        self,
        total: BoundedSum,
        source: RandomSource,
        pool: Executor | None = None,
        history: NoiseHistory | None = None,
    ) -> Vector:
        """The private mean: the sum, noise added, in the ellipsoid's own coordinates.

        A^{-1/2} grid (units + round(N(0, (z · sensitivity/grid)²))) / batch_size. It takes the
        place of the sum's memory; of a sum of parts, that of each part's `out`. Correlated noise
        needs the `history` of the run, and its releases in order.
        """
        if (history is not None) != (self.bands > 1):
            raise ValueError(
                "Expected the history of a run for correlated noise, and none for independent "
                f"noise; found {self.bands} bands and {type(history).__name__}."
            )
        if not isinstance(total, BoundedSum) or total.mechanism is not self:
            raise TypeError(
                "Expected a sum that this mechanism bounded (see GaussianSum.sum), found "
                f"{type(total).__name__}: noise protects only what was bounded for it."
            )
        size, streams = sum(span.size for span in total.spans), source.streams
        if history is not None:
            history.begin(self, size)
        total.close()
        add = partial(self._add_noise, total, _ADD_NOISE[source.noise], history)
        if size < _SPLIT_FROM:
            add(streams[0], 0, size)
        else:
            edges = np.linspace(0, size, len(streams) + 1).astype(int).tolist()
            run = map if pool is None else pool.map
            list(run(add, streams, edges[:-1], edges[1:]))
        if history is not None:
            history.end()
        return total.memory

    def _add_noise(
        self,
        total: BoundedSum,
        add: AddNoise,
        history: NoiseHistory | None,
        stream: KeyStream,
        start: int,
        stop: int,
    ) -> None:
        """Release the coordinates from `start` to before `stop`, block by block.

        A block stays in the processor's cache from the sum to the private mean.
        """
        first = 0
        for span in total.spans:
            last = first + span.size
            for place in _pieces(max(start, first) - first, min(stop, last) - first):
                units = span.units(place, self)
                here = first + place.start
                before = units if history is None else history.subtract(units, here)
                with stream.lock:
                    add(units, stream, self.deviation)
                if history is not None:
                    history.keep(units, before, here)
                span.scale(place, units, self)
            first = last


def _pieces(start: int, stop: int) -> Iterator[slice]:
    """Whole buffers, as many as one draw of noise can have, then what is left of one."""
    whole = start + (stop - start) // BUFFER * BUFFER
    for low in range(start, whole, PIECE):
        yield slice(low, min(low + PIECE, whole))
    if max(start, whole) < stop:
        yield slice(whole, stop)


_ADD_NOISE: dict[Noise, AddNoise] = {"gaussian": add_normals, "discrete": add_discrete}
