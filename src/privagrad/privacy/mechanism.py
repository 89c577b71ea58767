"""The Gaussian mechanism on a public grid: the only place where noise meets data."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
from numpy.random import Generator

from privagrad._internal.jit import kernel
from privagrad._internal.validate import Floats, Vector
from privagrad.geometry.ellipsoid import Ellipsoid, euclidean_norm
from privagrad.privacy.noise import RandomSource

ULP = 2.0**-52
_GRID_STEPS_PER_NOISE = 2**20
_EXACT_INTEGERS = 2**52
_MOST_UNITS = 2.0**51
_BLOCK = 2**13
_SPLIT_FROM = 2**17

Adds = Callable[..., tuple[int, int]]
"""A function ``add(units, per_unit, limit, *arguments)`` that bounds vectors and adds them up.

It adds round(v · per_unit), with ‖v‖ ≤ limit as it computes the norm, for the vector v of each
example to `units`, and returns how many it shrank and how many it left out as not finite.
"""


@dataclass(frozen=True)
class GaussianSum:
    """Releases a sum of vectors, each of norm at most 1 in whitened coordinates.

    The sum is a whole number of units of `grid`, a power of two, in every coordinate, and whole
    units of noise are added.

    Parameters
    ----------
    dim : int
        The number of coordinates that one example's vector has.
    noise_multiplier : float
        The standard deviation of the noise over the sensitivity.
    batch_size : float
        The expected batch size, which the noisy sum is divided by.
    slack : float
        How much longer than 1 a vector may be by the rounding of the caller's own arithmetic.

    Guarantees
    ----------
    Replacing one vector by zero moves the rounded sum by at most ``sensitivity`` =
    1 + slack + sqrt(dim) · grid, because rounding moves each coordinate by at most half a unit
    before and after. The noise has standard deviation ``noise_multiplier · sensitivity``, so the
    release is a Gaussian mechanism of that noise multiplier followed by rounding: rounded sum
    plus rounded noise equals the rounded value of rounded sum plus noise, and a whole number of
    units below 2⁵³ is exact in floating point, so that low-order bits carry nothing.

    What must stay public: dim, the noise multiplier, the expected batch size, the ellipsoid.
    """

    dim: int
    noise_multiplier: float
    batch_size: float
    slack: float = 0.0

    @cached_property
    def grid(self) -> float:
        """2^-20 of the noise shared among the coordinates, or as fine as doubles count exactly."""
        fine = self.noise_multiplier / (_GRID_STEPS_PER_NOISE * math.sqrt(self.dim))
        # A Poisson batch beyond twice its expectation plus 64 has probability below 1e-20.
        coarse = (2 * self.batch_size + 64) / _EXACT_INTEGERS
        return max(_power_of_two_below(fine), 2 * _power_of_two_below(coarse))

    @cached_property
    def limit(self) -> float:
        """The largest norm, as computed, of a vector whose norm is at most 1 in real numbers.

        A norm of `dim` coordinates is off by fewer than dim + 8 units in the last place.
        """
        return 1.0 - (self.dim + 8) * ULP

    @property
    def sensitivity(self) -> float:
        """How far one vector can move the rounded sum, in whitened coordinates."""
        return 1.0 + self.slack + math.sqrt(self.dim) * self.grid

    @cached_property
    def _deviation(self) -> float:
        return self.noise_multiplier * self.sensitivity / self.grid

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
        return BoundedSum(_MECHANISM, self, out, ellipsoid)

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

    def sum_of_parts(
        self, parts: Sequence[Part], radius: float, memory: Vector, share: Share | None = None
    ) -> BoundedSum:
        """Sums that the caller bounded to norm `radius` in the norm of the parts' scales.

        Parameters
        ----------
        parts : sequence of Part
            The coordinates, tensor by tensor.
        radius : float
            B: the sum of an example's scale_j g_j² is at most B², up to the mechanism's slack.
        memory : array of shape (dim,)
            Memory for the whole sum.
        share : Share, optional
            Given where several processes hold shares of the sum.
        """
        return _SumOfParts(_MECHANISM, self, memory, parts, radius, share)

    def release(
        self, total: BoundedSum, source: RandomSource, pool: Executor | None = None
    ) -> Vector:
        """The private mean: the sum, noise added, in the ellipsoid's own coordinates.

        A^{-1/2} grid (units + round(N(0, (z · sensitivity/grid)²))) / batch_size. It takes the
        place of the sum's memory; of a sum of parts, that of each part's `out`.
        """
        if not isinstance(total, BoundedSum) or total.mechanism is not self:
            raise TypeError(
                "Expected a sum that this mechanism bounded (see GaussianSum.sum), found "
                f"{type(total).__name__}: noise protects only what was bounded for it."
            )
        total.close()
        size, lanes = total.memory.size, source.lanes
        if size < _SPLIT_FROM:
            self._add_noise(total, lanes[0], 0, size)
        else:
            edges = np.linspace(0, size, len(lanes) + 1).astype(int).tolist()
            run = map if pool is None else pool.map
            list(run(partial(self._add_noise, total), lanes, edges[:-1], edges[1:]))
        if total.share is not None:
            total.share.combine(total.memory)
            for span in total.spans:
                span.scale(slice(None), self)
        return total.memory

    def _add_noise(self, total: BoundedSum, lane: Generator, start: int, stop: int) -> None:
        """Release the coordinates from `start` to before `stop`, block by block."""
        share, first = total.share, 0
        for span in total.spans:
            last = first + span.memory.size
            for low in range(max(start, first), min(stop, last), _BLOCK):
                place = slice(low - first, min(low + _BLOCK, stop, last) - first)
                block = span.units(place, self)
                if share is None or share.noisy:
                    _add_normals(block, lane.standard_normal(block.size), self._deviation)
                if share is None:
                    span.scale(place, self)
            first = last


_MECHANISM = object()
"""The proof that `GaussianSum` makes a `BoundedSum`: no other code has it."""


class BoundedSum:
    """A sum of vectors that a mechanism bounded; made by `GaussianSum`, released once.

    Attributes
    ----------
    mechanism : GaussianSum
        The mechanism that releases it.
    memory : array
        The sum in units of the grid; after the release, the private mean.
    ellipsoid : Ellipsoid or None
        The set whose whitened coordinates the vectors are in; None: the unit ball.
    clipped, nonfinite : int
        How many vectors were shrunk, and how many were left out because they are not finite. Both
        are facts about the data, NOT private.
    """

    __slots__ = ("clipped", "ellipsoid", "mechanism", "memory", "nonfinite", "open")

    def __init__(
        self, maker: object, mechanism: GaussianSum, memory: Vector, ellipsoid: Ellipsoid | None
    ) -> None:
        if maker is not _MECHANISM:
            raise TypeError("Expected a sum made by GaussianSum.sum(), found a direct call.")
        self.mechanism, self.memory, self.ellipsoid = mechanism, memory, ellipsoid
        self.clipped = self.nonfinite = 0
        self.open = True

    def add(self, vectors: Floats) -> None:
        """Add each row of `vectors`, shrunk to norm at most 1 and rounded to whole units.

        Rows that are only known up to the mechanism's slack are rounded together, by the release:
        rounding each could move many of them by a unit. Rows that are not finite, or whose norm is
        not, contribute nothing and are counted.

        Guarantees
        ----------
        What a row adds depends on nothing but the row.
        """
        if vectors.ndim != 2 or vectors.shape[1] != self.memory.size:
            raise ValueError(
                f"Expected vectors of {self.memory.size} coordinates, one a row, found shape "
                f"{vectors.shape}."
            )
        self.add_by(_add_bounded, vectors, self.mechanism.slack == 0.0)

    def add_by(self, add: Adds, *arguments: Any) -> None:
        """Let a kernel bound and add vectors, by this mechanism's grid and limit."""
        self._require_open()
        mechanism = self.mechanism
        clipped, nonfinite = add(self.memory, 1.0 / mechanism.grid, mechanism.limit, *arguments)
        self.clipped += clipped
        self.nonfinite += nonfinite

    def close(self) -> None:
        """Called by the release: a second release of the same rows would not be paid for."""
        self._require_open()
        self.open = False

    def _require_open(self) -> None:
        if not self.open:
            raise ValueError(
                "Expected a sum that was not released yet, found one that was: every release is "
                "charged by itself. Bound and sum the rows again."
            )

    @property
    def share(self) -> Share | None:
        """Given where several processes hold shares of the sum."""
        return None

    @property
    def spans(self) -> Sequence[BoundedSum | _Tensor]:
        """The parts that are turned into units, and back, in their own way."""
        return (self,)

    def units(self, place: slice, mechanism: GaussianSum) -> Vector:
        """The memory at `place`, filled with units."""
        return self.memory[place]

    def scale(self, place: slice, mechanism: GaussianSum) -> None:
        """Turn noisy units at `place` into the private mean."""
        factor = mechanism.grid / mechanism.batch_size
        if self.ellipsoid is None:
            self.memory[place] *= factor
        else:
            _unwhiten(self.memory[place], self.ellipsoid.noise_std[place], factor)


class Part(NamedTuple):
    """Some coordinates, flat: the bounded sum, sqrt(scale), where the private mean goes."""

    total: Floats
    root_scale: Floats
    out: Floats


class Share(NamedTuple):
    """One process's share of a sum: whether it adds the noise, and what adds all shares up."""

    noisy: bool
    combine: Callable[[Vector], None]


class _SumOfParts(BoundedSum):
    """A sum in the units of several tensors; A is diag(scale)/radius²."""

    __slots__ = ("_share", "_spans")

    def __init__(
        self, maker: object, mechanism: GaussianSum, memory: Vector, parts: Sequence[Part],
        radius: float, share: Share | None,
    ) -> None:  # fmt: skip
        super().__init__(maker, mechanism, memory, None)
        ends = list(accumulate(part.total.size for part in parts))
        pieces = np.split(memory, ends[:-1])
        self._share = share
        self._spans = [
            _Tensor(piece, part, radius) for piece, part in zip(pieces, parts, strict=True)
        ]

    @property
    def share(self) -> Share | None:
        return self._share

    @property
    def spans(self) -> Sequence[_Tensor]:
        return self._spans


class _Tensor(NamedTuple):
    memory: Vector
    part: Part
    radius: float

    def units(self, place: slice, mechanism: GaussianSum) -> Vector:
        total, root_scale, _ = self.part
        block = self.memory[place]
        per_unit = 1 / (mechanism.grid * self.radius)
        _to_units(total[place], root_scale[place], per_unit, block)
        return block

    def scale(self, place: slice, mechanism: GaussianSum) -> None:
        _, root_scale, out = self.part
        factor = mechanism.grid * self.radius / mechanism.batch_size
        _from_units(self.memory[place], root_scale[place], factor, out[place])


def _power_of_two_below(value: float) -> float:
    return math.ldexp(1.0, math.frexp(value)[1] - 1)


@kernel()
def _add_bounded(
    units: Vector, per_unit: float, limit: float, vectors: Floats, rounded: bool
) -> tuple[int, int]:
    clipped = nonfinite = 0
    for i in range(vectors.shape[0]):
        norm = euclidean_norm(vectors[i])
        if not math.isfinite(norm):
            nonfinite += 1
            continue
        factor = per_unit
        if norm > limit:
            factor *= limit / norm
            clipped += 1
        for j in range(units.size):
            value = vectors[i, j] * factor
            units[j] += np.rint(value) if rounded else value
    return clipped, nonfinite


@kernel()
def _add_normals(units: Vector, normals: Vector, deviation: float) -> None:
    for k in range(normals.size):
        units[k] = np.rint(units[k]) + np.rint(normals[k] * deviation)


@kernel()
def _unwhiten(units: Vector, unwhiten: Vector, factor: float) -> None:
    for j in range(units.size):
        units[j] *= factor * unwhiten[j]


@kernel()
def _to_units(total: Floats, root_scale: Floats, per_unit: float, units: Vector) -> None:
    for j in range(units.size):
        units[j] = np.rint(np.float64(total[j]) * np.float64(root_scale[j]) * per_unit)


@kernel()
def _from_units(units: Vector, root_scale: Floats, factor: float, out: Floats) -> None:
    for j in range(units.size):
        out[j] = units[j] * factor / np.float64(root_scale[j])
