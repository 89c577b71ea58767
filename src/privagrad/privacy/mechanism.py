"""The Gaussian mechanism on a public grid: the only place where noise meets data."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.random import Generator

from privagrad._internal.jit import kernel
from privagrad._internal.validate import Vector
from privagrad.geometry.ellipsoid import Ellipsoid, euclidean_norm
from privagrad.privacy.noise import RandomSource

ULP = 2.0**-52
_GRID_STEPS_PER_NOISE = 2**20
_EXACT_INTEGERS = 2**52
_BLOCK = 2**13
_SPLIT_FROM = 2**17


@dataclass(frozen=True)
class GaussianSum:
    """Releases a sum of vectors, each of norm at most 1 in whitened coordinates.

    The sum is handed in in units of `grid`, a power of two: it is rounded to whole units, and
    whole units of noise are added.

    Guarantees
    ----------
    Replacing one vector by zero moves the rounded sum by at most ``sensitivity`` =
    1 + sqrt(dim) · grid, because rounding moves each coordinate by at most half a unit before
    and after. The noise has standard deviation ``noise_multiplier · sensitivity``, so the
    release is a Gaussian mechanism of that noise multiplier followed by rounding: rounded sum
    plus rounded noise equals the rounded value of rounded sum plus noise, and a whole number of
    units below 2⁵³ is exact in floating point, so that low-order bits carry nothing.

    Callers whose vectors keep to norm 1 only up to the rounding of their own arithmetic say how
    far: ``sensitivity`` grows by `slack`.

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

    @property
    def sensitivity(self) -> float:
        """How far one vector can move the rounded sum, in whitened coordinates."""
        return 1.0 + self.slack + math.sqrt(self.dim) * self.grid

    @cached_property
    def _deviation(self) -> float:
        return self.noise_multiplier * self.sensitivity / self.grid

    def release(
        self,
        units: Vector,
        ellipsoid: Ellipsoid,
        source: RandomSource,
        pool: Executor | None = None,
    ) -> Vector:
        """Turn `units`, the whitened sum in units of the grid, into the private mean, in place.

        units ← A^{-1/2} grid (round(units) + round(N(0, (z · sensitivity / grid)²))) / batch_size
        with the EXPECTED batch size.
        """
        unwhiten, factor = ellipsoid.noise_std, self.grid / self.batch_size
        if units.size > unwhiten.size:
            raise ValueError(
                f"Expected an ellipsoid of dimension {units.size}, as the sum; found "
                f"{ellipsoid.dim}."
            )

        def release_span(lane: Generator, start: int, stop: int) -> None:
            for first in range(start, stop, _BLOCK):
                place = slice(first, min(first + _BLOCK, stop))
                block = units[place]
                _add_normals(block, lane.standard_normal(block.size), self._deviation)
                _unwhiten(block, unwhiten[place], factor)

        _over_lanes(release_span, source.lanes, units.size, pool)
        return units

    def release_parts(
        self,
        parts: Sequence[Part],
        units: Vector,
        source: RandomSource,
        radius: float = 1.0,
        pool: Executor | None = None,
        combine: Callable[[Vector], None] | None = None,
        noisy: bool = True,
    ) -> None:
        """`release` of a vector in parts, each with its own arrays; A is diag(scale)/radius².

        `units` is memory for the whole vector. Where several processes hold shares of the sum,
        `combine` adds their units up, and one of them alone is `noisy`.
        """
        edges = np.cumsum([0, *(part.total.size for part in parts)])
        inverse = 1 / (self.grid * radius)
        factor = self.grid * radius / self.batch_size

        def release_span(lane: Generator, start: int, stop: int) -> None:
            for part, first, last in zip(parts, edges[:-1], edges[1:], strict=True):
                for low in range(max(start, first), min(stop, last), _BLOCK):
                    high = min(low + _BLOCK, stop, last)
                    block, place = units[low:high], slice(low - first, high - first)
                    _to_units(part.total[place], part.root_scale[place], inverse, block)
                    if noisy:
                        _add_normals(block, lane.standard_normal(block.size), self._deviation)
                    if combine is None:
                        _from_units(block, part.root_scale[place], factor, part.out[place])

        _over_lanes(release_span, source.lanes, units.size, pool)
        if combine is not None:
            combine(units)
            for part, first, last in zip(parts, edges[:-1], edges[1:], strict=True):
                _from_units(units[first:last], part.root_scale, factor, part.out)


class Part(NamedTuple):
    """Some coordinates, flat: the bounded sum, sqrt(scale), where the private mean goes."""

    total: Any
    root_scale: Any
    out: Any


def _over_lanes(
    work: Callable[[Generator, int, int], None],
    lanes: Sequence[Generator],
    size: int,
    pool: Executor | None,
) -> None:
    """Spans of a long vector go to the lanes, a short one to the first."""
    if size < _SPLIT_FROM:
        work(lanes[0], 0, size)
        return
    edges = np.linspace(0, size, len(lanes) + 1).astype(int).tolist()
    run = map if pool is None else pool.map
    list(run(work, lanes, edges[:-1], edges[1:]))


def bounded_units(vectors: Vector, grid: float) -> tuple[Vector, int, int]:
    """Σ_i round(v_i min(1, 1/‖v_i‖) / grid) over the rows; how many were shrunk, how many left out.

    Rows that are not finite, or whose norm is not, contribute nothing and are counted.

    Guarantees
    ----------
    As for the fused kernels: before rounding each row has norm ≤ 1 in real numbers, and what it
    adds depends on nothing but the row.
    """
    units = np.zeros(vectors.shape[1])
    limit = 1.0 - (units.size + 8) * ULP
    clipped, nonfinite = _add_bounded(vectors, 1.0 / grid, limit, units)
    return units, clipped, nonfinite


@kernel()
def _add_bounded(vectors: Any, inverse: float, limit: float, units: Vector) -> tuple[int, int]:
    clipped = nonfinite = 0
    for i in range(vectors.shape[0]):
        norm = euclidean_norm(vectors[i])
        if not math.isfinite(norm):
            nonfinite += 1
            continue
        factor = inverse
        if norm > limit:
            factor *= limit / norm
            clipped += 1
        for j in range(units.size):
            units[j] += np.rint(vectors[i, j] * factor)
    return clipped, nonfinite


def _power_of_two_below(value: float) -> float:
    return math.ldexp(1.0, math.frexp(value)[1] - 1)


@kernel()
def _add_normals(units: Vector, normals: Vector, deviation: float) -> None:
    for k in range(normals.size):
        units[k] = np.rint(units[k]) + np.rint(normals[k] * deviation)


@kernel()
def _unwhiten(units: Vector, unwhiten: Vector, factor: float) -> None:
    for j in range(units.size):
        units[j] *= factor * unwhiten[j]


@kernel()
def _to_units(total: Any, root_scale: Any, inverse: float, units: Vector) -> None:
    for j in range(units.size):
        units[j] = np.rint(np.float64(total[j]) * np.float64(root_scale[j]) * inverse)


@kernel()
def _from_units(units: Vector, root_scale: Any, factor: float, out: Any) -> None:
    for j in range(units.size):
        out[j] = units[j] * factor / np.float64(root_scale[j])
