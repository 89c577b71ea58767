"""Arrays and CSR matrices as tables: numbers alone, in memory without a copy, or elsewhere."""

from __future__ import annotations

import zlib
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, NoReturn

import numpy as np
from numpy.typing import NDArray

from privagrad._internal.validate import Vector
from privagrad.data.encoding import Encoding
from privagrad.data.overlap import Marks, marks_of
from privagrad.data.schema import Column, Schema
from privagrad.data.tables import Rows, Table
from privagrad.glm.examples import Examples, PartitionedExamples, Sums
from privagrad.glm.rows import DenseRows, SparseRows


@dataclass(frozen=True, kw_only=True)
class NumberTable(Table):
    """Finite numbers: the schema holds the target alone.

    `edges` are public bounds (low, high) of the columns, infinite where none is known, within which
    all entries are.
    """

    names: tuple[str, ...] | None = None
    edges: tuple[Vector, Vector] | None = None

    public_columns: ClassVar[str] = "the columns' number, names and given bounds"

    @property
    @abstractmethod
    def sparse(self) -> bool:
        """Whether entries that are 0 are not stored."""

    @property
    @abstractmethod
    def width(self) -> int:
        """The number of columns."""

    @cached_property
    def encoding(self) -> Encoding:
        names = self._names
        if self.edges is None:
            return Encoding(names, self.sparse)
        limits = np.maximum(np.abs(self.edges[0]), np.abs(self.edges[1]))
        bounds = self.edges if np.isfinite(limits).all() else None
        return Encoding(names, self.sparse, bounds, limits=np.where(limits == 0, 1.0, limits))

    @property
    def _names(self) -> list[str]:
        if self.names is not None:
            return list(self.names)
        first, prefix = (1, "") if self.sparse else (0, "x")
        return [f"{prefix}{j}" for j in range(first, first + self.width)]

    @property
    def file_schema(self) -> Schema | None:
        """Of a file with these columns: none for sparse rows, which LIBSVM files hold."""
        if self.sparse:
            return None
        names, target = self._names, self.target
        while target.name in names:
            target = replace(target, name=f"{target.name} (target)")
        columns = (*(Column(name, missing=False) for name in names), target)
        return Schema(columns, target.name)


@dataclass(frozen=True, kw_only=True)
class PartitionedTable(NumberTable):
    """Numbers that are not in memory, with targets as numbers or as codes of categories."""

    data: PartitionedExamples

    @property
    def sparse(self) -> bool:
        return self.data.sparse

    @property
    def width(self) -> int:
        return self.data.shape[1]

    @property
    def n(self) -> int:
        return self.data.shape[0]

    def examples(self) -> PartitionedExamples:
        return self.data

    def rows(self) -> NoReturn:
        raise TypeError("Expected rows in memory, found rows in partitions.")

    def parts(self) -> NoReturn:
        self.rows()

    def buffers(self) -> list[NDArray[Any]]:
        return []

    @cached_property
    def checksum(self) -> int:
        """Of all rows: the sum of those of the partitions' rows."""
        [found] = self.data.total(_checksums, sample=None)
        return zlib.crc32(found.tobytes(), self.n)

    def within(self, edges: tuple[Vector, Vector] | None) -> PartitionedTable:
        """The same table with every entry clipped to public bounds."""
        if edges is None:
            return self
        return replace(self, data=self.data.mapped(_clipped_examples, edges), edges=edges)


def _checksums(examples: Examples) -> Sums:
    """A number that changes with any entry, whatever the partitions are."""
    rows = examples.rows
    if isinstance(rows, DenseRows):
        words = np.ascontiguousarray(rows.array, dtype=np.float64).view(np.uint64)
        return (np.array([int(words.sum(dtype=np.uint64))], dtype=np.uint64),)
    words = np.ascontiguousarray(rows.data, dtype=np.float64).view(np.uint64)
    mixed = words * (2 * rows.indices.astype(np.uint64) + 1)
    return (np.array([int(mixed.sum(dtype=np.uint64))], dtype=np.uint64),)


def _clipped_examples(examples: Examples, edges: tuple[Vector, Vector]) -> Examples:
    return replace(examples, rows=_clipped(examples.rows, edges))


@dataclass(frozen=True, kw_only=True)
class MatrixTable(NumberTable):
    """Numbers in memory; `given` are the entries before they were brought within the bounds."""

    data: DenseRows | SparseRows
    given: DenseRows | SparseRows | None = None

    @property
    def sparse(self) -> bool:
        return self.data.sparse

    @property
    def width(self) -> int:
        return self.data.shape[1]

    def rows(self) -> DenseRows | SparseRows:
        return self.data

    def parts(self) -> Iterator[Rows]:
        yield Rows(self.data.matrix, self.targets, self.encoding.names)

    def within(self, edges: tuple[Vector, Vector] | None) -> MatrixTable:
        """The same table with every entry clipped to public bounds."""
        if edges is None:
            return self
        return replace(self, data=_clipped(self.data, edges), edges=edges, given=self.data)

    def marks(self) -> Marks | None:
        rows = self.data if self.given is None else self.given
        if isinstance(rows, DenseRows):
            return marks_of([rows.array])
        # A product with a fixed vector is computed row by row.
        weights = np.random.default_rng(0).standard_normal(rows.dim)
        return marks_of([np.asarray(rows.matrix @ weights)[:, None]])

    def buffers(self) -> list[NDArray[Any]]:
        rows = self.data if self.given is None else self.given
        return [rows.array] if isinstance(rows, DenseRows) else [rows.data, rows.indices]


def _clipped(
    rows: DenseRows | SparseRows, edges: tuple[Vector, Vector]
) -> DenseRows | SparseRows:  # fmt: skip
    low, high = edges
    if isinstance(rows, DenseRows):
        return DenseRows(np.clip(rows.array, low, high).astype(rows.array.dtype))
    if (low > 0).any() or (high < 0).any():
        raise ValueError(
            "Expected bounds that contain 0 for a sparse table, whose absent entries are 0; found "
            "bounds that do not. Give the table as a dense array, or wider bounds."
        )
    data = np.clip(rows.data, low[rows.indices], high[rows.indices]).astype(rows.data.dtype)
    return SparseRows(data, rows.indices, rows.indptr, rows.dim)
