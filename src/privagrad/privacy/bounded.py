"""Sums of bounded vectors: values that only a mechanism makes, and that it releases once."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from privagrad._internal.jit import kernel
from privagrad._internal.validate import Floats, Vector
from privagrad.geometry.ellipsoid import Ellipsoid, euclidean_norm
from privagrad.privacy.grid import PublicGrid

Adds = Callable[..., tuple[int, int]]
"""A function ``add(units, per_unit, limit, *arguments)`` that bounds vectors and adds them up.

It adds round(v · per_unit), with ‖v‖ ≤ limit as it computes the norm, for the vector v of each
example to `units`, and returns how many it shrank and how many it left out as not finite.
"""

MECHANISM = object()
"""The proof that `GaussianSum` makes a `BoundedSum`: no other code has it."""


class BoundedSum:
    """A sum of vectors that a mechanism bounded; made by `GaussianSum`, released once.

    Attributes
    ----------
    mechanism : PublicGrid
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
        self, maker: object, mechanism: PublicGrid, memory: Vector, ellipsoid: Ellipsoid | None
    ) -> None:
        if maker is not MECHANISM:
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
        self.add_by(add_bounded, vectors, self.mechanism.slack == 0.0)

    def add_by(self, add: Adds, *arguments: Any) -> None:
        """Let a kernel bound and add vectors, by this mechanism's grid and limit."""
        self._require_open()
        mechanism = self.mechanism
        clipped, nonfinite = add(self.memory, 1.0 / mechanism.grid, mechanism.limit, *arguments)
        self.clipped += clipped
        self.nonfinite += nonfinite

    def averages(self) -> Averages:
        """A way to add one vector for each user: the average of the vectors of the user's rows."""
        return Averages(self)

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
    def spans(self) -> Sequence[BoundedSum | _Tensor]:
        """The parts that are turned into units, and back, in their own way."""
        return (self,)

    @property
    def size(self) -> int:
        """The number of coordinates."""
        return self.memory.size

    def units(self, place: slice, mechanism: PublicGrid) -> Vector:
        """The units at `place`, which may be written to."""
        return self.memory[place]

    def scale(self, place: slice, units: Vector, mechanism: PublicGrid) -> None:
        """Turn noisy `units` at `place` into the private mean."""
        factor = mechanism.grid / mechanism.batch_size
        if self.ellipsoid is None:
            units *= factor
        else:
            _unwhiten(units, self.ellipsoid.noise_std[place], factor)


class Averages:
    """The averages of users' rows, on their way into a bounded sum.

    `of(k)` takes the rows of users with k rows, all k of each, and adds 1/k of every row. `add`
    adds what was collected to the sum.

    Guarantees
    ----------
    A user moves the rounded sum by no more than one row may: `PublicGrid.sensitivity`. With g the
    grid, d the dimension and F parts of a unit (`PublicGrid.fineness`), each of a user's k rows has
    norm ≤ 1 - t, t = 4 ulps + k √d g/(2F). So 1/k of it, computed and rounded to parts, has norm
    ≤ (1 - t + ulp)/(k g) + √d/(2F) in units, and the sum of the k rows ≤ 1/g. `add` rounds the sum
    of all users once, which moves each coordinate by at most half a unit with the user and without:
    by at most 1/g + √d units together. A user with one row adds whole units, like a row, which
    rounding to the nearest unit, the upper one of two, leaves as they are.

    Sums of parts are exact: the same for any order of users and of their rows.
    """

    def __init__(self, total: BoundedSum) -> None:
        self.total, self.memory = total, np.empty(0)

    def of(self, count: int) -> BoundedSum:
        """Where rows of users with `count` rows are added, all rows of each."""
        if count == 1:
            return self.total
        if not self.memory.size:
            self.memory = np.zeros_like(self.total.memory)
        return _RowsOfUsers(self.total, self.memory, count)

    def add(self) -> None:
        """Add the averages to the sum, in whole units where all of its vectors are."""
        self.total._require_open()
        if not self.memory.size:
            return
        mechanism = self.total.mechanism
        self.memory /= mechanism.fineness
        if mechanism.slack == 0.0:
            self.memory += 0.5
            np.floor(self.memory, out=self.memory)
        self.total.memory += self.memory
        self.memory = np.empty(0)


class _RowsOfUsers(BoundedSum):
    """Parts of units, of users with `count` rows each; never released by itself."""

    __slots__ = ("count", "total")

    def __init__(self, total: BoundedSum, memory: Vector, count: int) -> None:
        super().__init__(MECHANISM, total.mechanism, memory, total.ellipsoid)
        self.total, self.count = total, count

    def add_by(self, add: Adds, *arguments: Any) -> None:
        self.total._require_open()
        mechanism, count = self.mechanism, self.count
        per_unit = mechanism.fineness / (count * mechanism.grid)
        limit = mechanism.limit_of_rows(count)
        clipped, nonfinite = add(self.memory, per_unit, limit, *arguments)
        self.total.clipped += clipped
        self.total.nonfinite += nonfinite

    def close(self) -> None:
        raise TypeError("Expected the sum of all users to be released, found a part of it.")


class Part(NamedTuple):
    """Some coordinates, flat: the bounded sums, sqrt(scale), where the private mean goes.

    What is released is the sum of `totals`, one of each process, each rounded to whole units.
    """

    totals: Sequence[Floats]
    root_scale: Floats
    out: Floats


class SumOfParts(BoundedSum):
    """A sum in the units of several tensors; A is diag(scale)/radius²."""

    __slots__ = ("_spans",)

    def __init__(
        self, maker: object, mechanism: PublicGrid, parts: Sequence[Part], radius: float
    ) -> None:
        super().__init__(maker, mechanism, np.empty(0), None)
        self._spans = [_Tensor(part, radius) for part in parts]

    @property
    def spans(self) -> Sequence[_Tensor]:
        return self._spans


class _Tensor(NamedTuple):
    """One tensor, or a part of it."""

    part: Part
    radius: float

    @property
    def size(self) -> int:
        return self.part.out.size

    def units(self, place: slice, mechanism: PublicGrid) -> Vector:
        (first, *others), root_scale = self.part.totals, self.part.root_scale[place]
        units = np.empty(place.stop - place.start)
        per_unit = 1 / (mechanism.grid * self.radius)
        _to_units(first[place], root_scale, per_unit, units)
        for total in others:
            _add_units(total[place], root_scale, per_unit, units)
        return units

    def scale(self, place: slice, units: Vector, mechanism: PublicGrid) -> None:
        factor = mechanism.grid * self.radius / mechanism.batch_size
        _from_units(units, self.part.root_scale[place], factor, self.part.out[place])


@kernel()
def add_bounded(
    units: Vector, per_unit: float, limit: float, vectors: Floats, rounded: bool
) -> tuple[int, int]:
    """Add the rows of a matrix, each shrunk to norm at most `limit`; not finite ones are left out.

    They are `rounded` to whole units, or not.
    """
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
def _unwhiten(units: Vector, unwhiten: Vector, factor: float) -> None:
    for j in range(units.size):
        units[j] *= factor * unwhiten[j]


@kernel()
def _to_units(total: Floats, root_scale: Floats, per_unit: float, units: Vector) -> None:
    for j in range(units.size):
        units[j] = np.rint(np.float64(total[j]) * np.float64(root_scale[j]) * per_unit)


@kernel()
def _add_units(total: Floats, root_scale: Floats, per_unit: float, units: Vector) -> None:
    for j in range(units.size):
        units[j] += np.rint(np.float64(total[j]) * np.float64(root_scale[j]) * per_unit)


@kernel()
def _from_units(units: Vector, root_scale: Floats, factor: float, out: Floats) -> None:
    for j in range(units.size):
        out[j] = units[j] * factor / np.float64(root_scale[j])
