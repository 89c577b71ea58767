"""Rows with their targets: in memory, or in partitions that lie somewhere else.

All that a fit does to rows is one of two things: it maps each row, or it bounds something of each
row and adds that up. Both are functions of a table in memory. So rows may be anywhere that can
apply a function to a part of them and add the results: see `Partitions`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from privagrad._internal.validate import Integers, Vector
from privagrad.glm.rows import DenseRows, SparseRows
from privagrad.privacy.bounded import Adds, BoundedSum
from privagrad.privacy.sampling import Samples

Sums = tuple[NDArray[Any], ...]


@dataclass(frozen=True)
class Examples:
    """Rows in memory with their targets.

    Attributes
    ----------
    rows : DenseRows or SparseRows
        The features.
    targets : array of shape (n,)
        Numbers, signs or class numbers.
    left_out : array of bool or None
        Rows whose targets are unknown: they count towards n but add nothing.
    """

    rows: DenseRows | SparseRows
    targets: Vector
    left_out: NDArray[np.bool_] | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """The number of rows and of columns."""
        return self.rows.shape

    @property
    def sparse(self) -> bool:
        return self.rows.sparse

    def add_to(self, total: BoundedSum, add: Callable[..., Any], *arguments: Any) -> None:
        """Let ``add(units, per_unit, limit, examples, *arguments)`` bound and add all rows."""
        total.add_by(add, self, *arguments)

    def mapped(self, function: Callable[..., Examples], *arguments: Any) -> Examples:
        """``function(examples, *arguments)``, which maps every row by itself."""
        return function(self, *arguments)

    def kept(self) -> Examples:
        """The same, computed once."""
        return self

    def take(self, rows: Integers) -> Examples:
        """Some rows, in this order."""
        left_out = None if self.left_out is None else self.left_out[rows]
        return Examples(self.rows.take(rows), self.targets[rows], left_out)


class Partitions(Protocol):
    """Rows in partitions, wherever they are: all that a fit needs of a disk or of a cluster.

    Each partition holds `Examples`, and knows the number of its first row in the whole table, so
    that it can draw its part of a sample.
    """

    @property
    def shape(self) -> tuple[int, int]:
        """The number of all rows and of columns. Both are public."""

    @property
    def sparse(self) -> bool:
        """Whether rows are `SparseRows`."""

    def total(self, function: Callable[..., Sums], *arguments: Any, sample: Sample | None) -> Sums:
        """``function(examples, *arguments)`` of every partition, added up.

        Results are arrays of the same shapes everywhere. With a `sample` the examples are its rows
        alone. Every row counts exactly once, whatever fails on the way.
        """

    def kept(self, maps: Sequence[RowMap]) -> Partitions | None:
        """The partitions after `maps`, kept where they are; None: better mapped at every use."""


RowMap = tuple[Callable[..., "Examples"], tuple[Any, ...]]
"""A function of examples that maps every row by itself, and its arguments: it may change the
columns, but not the number or the order of the rows."""

Sample = tuple[Samples, int]
"""The samples of a run, and the number of a step."""


@dataclass(frozen=True)
class MemoryPartitions:
    """Parts of a table in this process: what a cluster does, without a cluster."""

    parts: Sequence[Examples]

    @property
    def shape(self) -> tuple[int, int]:
        return sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]

    @property
    def sparse(self) -> bool:
        return self.parts[0].sparse

    def total(self, function: Callable[..., Sums], *arguments: Any, sample: Sample | None) -> Sums:
        found, first = [], 0
        for part in self.parts:
            size, chosen = part.shape[0], part
            if sample is not None:
                samples, step = sample
                chosen = part.take(samples.of_step(step, first, first + size) - first)
            found.append(function(chosen, *arguments))
            first += size
        return tuple(sum(sums) for sums in zip(*found, strict=True))

    def kept(self, maps: Sequence[RowMap]) -> MemoryPartitions:
        return MemoryPartitions([apply(part, maps) for part in self.parts])


@dataclass(frozen=True)
class PartitionedExamples:
    """Rows in partitions, with functions that are applied to each part when it is used.

    Attributes
    ----------
    partitions : Partitions
        Where the rows are.
    dim : int
        The number of columns after the functions.
    sparse : bool
        Whether rows are then `SparseRows`.
    maps : tuple of (function, arguments)
        What is applied, one after the other.
    """

    partitions: Partitions
    dim: int
    sparse: bool
    maps: tuple[RowMap, ...] = ()

    @classmethod
    def of(cls, partitions: Partitions) -> PartitionedExamples:
        return cls(partitions, partitions.shape[1], partitions.sparse)

    @property
    def shape(self) -> tuple[int, int]:
        return self.partitions.shape[0], self.dim

    @property
    def rows(self) -> PartitionedRows:
        """The features alone, for queries about them."""
        return PartitionedRows(self)

    def add_to(self, total: BoundedSum, add: Callable[..., Any], *arguments: Any) -> None:
        """Let ``add(units, per_unit, limit, examples, *arguments)`` bound and add all rows."""
        total.add_by(_add_everywhere, self, None, add, arguments)

    def add_step_to(
        self, total: BoundedSum, step: StepOfRun, add: Callable[..., Any], *arguments: Any
    ) -> None:
        """`add_to` for the rows of one step alone."""
        total.add_by(_add_everywhere, self, step, add, arguments)

    def mapped(self, function: Callable[..., Examples], *arguments: Any) -> PartitionedExamples:
        """``function(examples, *arguments)``, which maps every row by itself."""
        # What the function makes of no rows tells which columns it leaves.
        shown = function(_without_rows(self), *arguments)
        maps = (*self.maps, (function, arguments))
        return replace(self, dim=shown.shape[1], sparse=shown.sparse, maps=maps)

    def kept(self) -> PartitionedExamples:
        """The same, with the functions applied once where the rows are, if that is faster."""
        kept = self.partitions.kept(self.maps) if self.maps else None
        return self if kept is None else replace(self, partitions=kept, maps=())

    def total(self, function: Callable[..., Sums], *arguments: Any, sample: Sample | None) -> Sums:
        """``function(examples, *arguments)`` of every part, added up; of a sample's rows alone."""
        return self.partitions.total(_of_mapped, self.maps, function, arguments, sample=sample)


@dataclass(frozen=True)
class PartitionedRows:
    """The features of `PartitionedExamples`, with what queries ask of rows in memory too."""

    examples: PartitionedExamples

    @property
    def shape(self) -> tuple[int, int]:
        return self.examples.shape

    @property
    def sparse(self) -> bool:
        return self.examples.sparse

    def add_to(self, total: BoundedSum, add: Adds, *arguments: Any) -> None:
        """Let ``add(units, per_unit, limit, table, *arguments)`` bound and add all rows."""
        self.examples.add_to(total, _add_rows, add, arguments)

    def centred(self, columns: NDArray[Any], centre: Vector) -> PartitionedRows:
        """These columns minus their centres."""
        return PartitionedRows(self.examples.mapped(_centred, columns, centre))

    def sides(self) -> PartitionedRows:
        """Positive entries, and beside them the sizes of negative ones."""
        return PartitionedRows(self.examples.mapped(_sides))


@dataclass
class StepOfRun:
    """The rows that one step of a run sees, drawn where they are.

    `size`, how many there are, is known when they were added up.
    """

    samples: Samples
    number: int
    size: int = 0


def in_memory(examples: object, what: str) -> Examples:
    """The examples, where `what` needs them in memory."""
    if not isinstance(examples, Examples):
        raise ValueError(f"Expected rows in memory for {what}, found rows in partitions.")
    return examples


def apply(examples: Examples, maps: Sequence[RowMap]) -> Examples:
    """What the functions make of the examples."""
    for function, arguments in maps:
        examples = function(examples, *arguments)
    return examples


def targets_as_rows(examples: Examples) -> Examples:
    """The targets as the only column; NaN where they are unknown."""
    column = examples.targets.reshape(-1, 1)
    if examples.left_out is not None:
        column = np.where(examples.left_out[:, None], np.nan, column)
    return replace(examples, rows=DenseRows(column))


def _add_everywhere(
    units: Vector, per_unit: float, limit: float, examples: PartitionedExamples,
    step: StepOfRun | None, add: Callable[..., Any], arguments: tuple[Any, ...],
) -> tuple[int, int]:  # fmt: skip
    """Add up what every part adds to a sum of its own: whole units, hence exact."""
    sample = None if step is None else (step.samples, step.number)
    found, counts = examples.total(
        add_part, units.size, per_unit, limit, add, arguments, sample=sample
    )
    units += found
    if step is not None:
        step.size = int(counts[2])
    return int(counts[0]), int(counts[1])


def _of_mapped(
    examples: Examples, maps: Sequence[RowMap], function: Callable[..., Sums],
    arguments: tuple[Any, ...],
) -> Sums:  # fmt: skip
    return function(apply(examples, maps), *arguments)


def add_part(
    examples: Examples, size: int, per_unit: float, limit: float, add: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> Sums:  # fmt: skip
    """The sum of some rows; how many were shrunk, were left out as not finite, and were seen."""
    units, counts = np.zeros(size), (0, 0)
    if examples.shape[0]:
        counts = add(units, per_unit, limit, examples, *arguments)
    return units, np.array([*counts, examples.shape[0]], dtype=np.int64)


def _add_rows(
    units: Vector, per_unit: float, limit: float, examples: Examples, add: Adds,
    arguments: tuple[Any, ...],
) -> tuple[int, int]:  # fmt: skip
    return examples.rows.add(units, per_unit, limit, add, arguments)


def _centred(examples: Examples, columns: NDArray[Any], centre: Vector) -> Examples:
    return replace(examples, rows=examples.rows.centred(columns, centre))


def _sides(examples: Examples) -> Examples:
    if not isinstance(examples.rows, DenseRows):
        raise TypeError("Expected centred columns, found sparse rows.")
    return replace(examples, rows=examples.rows.sides())


def _without_rows(examples: PartitionedExamples) -> Examples:
    """A table of no rows with these columns."""
    if examples.sparse:
        start = np.zeros(1, dtype=np.int64)
        none = SparseRows(np.empty(0), np.empty(0, np.int64), start, examples.dim)
        return Examples(none, np.empty(0))
    return Examples(DenseRows(np.empty((0, examples.dim))), np.empty(0))
