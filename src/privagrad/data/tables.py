"""Tables that were parsed once: numbers and codes in temporary files, encoded when asked."""

from __future__ import annotations

import weakref
import zlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from tempfile import TemporaryFile
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from privagrad._internal.validate import Integers, Vector
from privagrad.data.encoding import Codes, Encoding, encoding_of, one_hot, renumbered
from privagrad.data.overlap import Marks, marks_of
from privagrad.data.schema import Column, Schema
from privagrad.glm.examples import Examples, PartitionedExamples
from privagrad.glm.rows import SparseRows, as_rows
from privagrad.glm.stored import forget, is_stored, stored_or_not
from privagrad.privacy.events import Unit
from privagrad.privacy.users import Users

CHUNK = 50_000
"""Rows that are in memory at once."""

_LABELS = 2**20
"""How many targets are looked at together."""

_PIECES, _PIECE = 64, 2**16
"""A checksum reads about so many pieces of a buffer, of so many bytes each, at most."""


class Rows(NamedTuple):
    """Encoded rows: X of shape (n, d), dense or CSR, and the names of its columns.

    `y` holds numbers, or numbers of the schema's categories with -1 for others; NaN where missing.
    A blank number is NaN. `kept` are further columns, as they are in the file.
    """

    X: Any
    y: Vector | None
    names: list[str]
    kept: Sequence[Sequence[Any]] = ()


@dataclass(frozen=True)
class Table(ABC):
    """The rows of a file, parsed once. What is asked of it later is computed, not read again.

    `counts` holds the columns whose categories are to be discovered, the target the last of them:
    the values in the order of their codes, and how many rows have them. It is not private. `y` is
    the parsed target: numbers, codes of the stated categories (-1 for others), or codes of the
    values in `counts`; NaN where missing. `users` say whose rows they are, where users are
    protected.
    """

    schema: Schema
    y: Vector
    counts: Mapping[str, Counter[str]]
    users: Users | None = field(default=None, kw_only=True)

    public_columns: ClassVar[str] = (
        "names, kinds, bounds and categories of columns that the schema states"
    )

    @property
    def file_schema(self) -> Schema | None:
        """Of files that a model of these rows can read; None: LIBSVM files."""
        return self.schema

    @property
    def n(self) -> int:
        """The number of units, which is public: of users if they are known, or else of rows."""
        return self.y.size if self.users is None else self.users.count

    @property
    def unit(self) -> Unit:
        """What a guarantee for this table protects."""
        return "row" if self.users is None else "user"

    @property
    def target(self) -> Column:
        return self.schema.column(str(self.schema.target))

    @property
    @abstractmethod
    def encoding(self) -> Encoding:
        """The columns of the encoded matrix."""

    @abstractmethod
    def rows(self) -> Any:
        """All rows, encoded: a float32 array or a CSR matrix."""

    def examples(self) -> Examples | PartitionedExamples:
        """All rows, encoded, with `targets`; of large files part by part."""
        return stored_or_not(as_rows(self.rows()), self.targets)

    @abstractmethod
    def parts(self) -> Iterator[Rows]:
        """All rows with their targets, encoded in double precision, some at a time."""

    @abstractmethod
    def buffers(self) -> list[NDArray[Any]]:
        """The parsed rows as they are in memory, without their targets. NOT private."""

    @property
    def checksum(self) -> int:
        """Of the rows without their targets; of a large table, of pieces of it."""
        found = zlib.crc32(str(self.y.size).encode())
        for buffer in self.buffers():
            flat = buffer.reshape(-1)
            size = max(_PIECE // buffer.itemsize, 1)
            for start in range(0, flat.size, max(flat.size // _PIECES, size)):
                piece = flat[start : start + size]
                found = zlib.crc32(piece.data, found)
                forget(piece)
        return found

    def marks(self) -> Marks | None:
        """A number for each row that its entries determine, for rows in memory. NOT private."""
        return None

    def strange_labels(self) -> tuple[int, int]:
        """How many rows have a label that is none of the stated ones, and the first one from 1."""
        count = row = 0
        for first in range(0, self.targets.size, _LABELS):
            strange = np.flatnonzero(self.targets[first : first + _LABELS] < 0)
            if strange.size and not count:
                row = first + int(strange[0]) + 1
            count += strange.size
        return count, row

    def counts_of(self, rows: Integers) -> dict[str, Counter[str]]:
        """The `counts` of some rows alone."""
        return {name: self._counted(name, rows) for name in self.counts}

    def _counted(self, name: str, rows: Integers) -> Counter[str]:
        codes = self._codes_of(name)[rows]
        found = np.bincount(codes[codes >= 0], minlength=len(self.counts[name])).tolist()
        pairs = zip(self.counts[name], found, strict=True)
        return Counter({value: count for value, count in pairs if count})

    def _codes_of(self, name: str) -> Codes:
        """A column as places in its `counts`, -1 where it is missing; by default the target's."""
        return np.where(np.isnan(self.y), -1, self.y).astype(np.int32)

    def with_categories(self, found: Mapping[str, tuple[str, ...]]) -> Self:
        """The same rows where these columns have these categories, by name."""
        columns = (replace(self.schema.column(name), categories=c) for name, c in found.items())
        return replace(self, schema=self.schema.with_columns(columns))

    @cached_property
    def targets(self) -> Vector:
        """Numbers, or numbers of the schema's categories with -1 for others; NaN where missing."""
        counts = self.counts.get(self.target.name)
        if counts is None:
            return self.y
        missing = np.isnan(self.y)
        codes = np.where(missing, -1, self.y).astype(np.int32)
        return np.where(missing, np.nan, renumbered(codes, counts, self.target.categories))


class Spool:
    """Rows of equal width in a temporary file.

    The machine keeps the file in memory as far as there is room, and nobody else can open it.
    """

    def __init__(self, width: int, dtype: Any) -> None:
        self.width, self.dtype, self.count = width, np.dtype(dtype), 0
        self._file = TemporaryFile()  # noqa: SIM115
        weakref.finalize(self, self._file.close)

    def append(self, rows: NDArray[Any]) -> None:
        self._file.write(np.ascontiguousarray(rows, dtype=self.dtype).data)
        self.count += len(rows)

    def part(self, first: int, stop: int) -> NDArray[Any]:
        """A copy of some rows."""
        rows = np.empty((stop - first, self.width), self.dtype)
        self._file.seek(first * self.width * self.dtype.itemsize)
        self._file.readinto(rows.data)
        return rows

    def array(self) -> NDArray[Any]:
        """All rows, without a copy."""
        self._file.flush()
        shape = (self.count, self.width)
        if 0 in shape:
            return np.empty(shape, self.dtype)
        return np.asarray(np.memmap(self._file, self.dtype, mode="r+", shape=shape))

    def column(self) -> NDArray[Any]:
        """The only column: in memory, unless it is large."""
        column = self.array()[:, 0]
        return column if is_stored(column) else column.copy()


@dataclass(frozen=True)
class ColumnTable(Table):
    """A table with named columns: those of numbers and of categories, in the schema's order."""

    numbers: Spool
    codes: Spool

    def buffers(self) -> list[NDArray[Any]]:
        return [spool.array() for spool in (self.numbers, self.codes) if spool.width]

    def marks(self) -> Marks | None:
        if any(map(is_stored, self.buffers())):
            return None  # all of the file would be read into memory
        # Codes of categories that are not stated depend on the order of the rows.
        categories = [c for c in self.schema.encoded if c.kind == "category"]
        stated = [j for j, c in enumerate(categories) if c.name not in self.counts]
        parts = [self.numbers.array()] if self.numbers.width else []
        return marks_of([*parts, self.codes.array()[:, stated]] if stated else parts)

    @cached_property
    def encoding(self) -> Encoding:
        return encoding_of(self.schema)

    def _codes_of(self, name: str) -> Codes:
        if name == self.target.name:
            return super()._codes_of(name)
        categories = [c.name for c in self.schema.encoded if c.kind == "category"]
        return np.asarray(self.codes.array()[:, categories.index(name)])

    def rows(self) -> Any:
        if self.encoding.sparse:
            from scipy.sparse import csr_array

            table = self._csr()
            return csr_array((table.data, table.indices, table.indptr), shape=table.shape)
        plain = self.codes.width == 0 and self.encoding.blanks is None
        if plain:
            return self.numbers.array()
        encoded = Spool(len(self.encoding.names), np.float32)
        for _, X in self._matrices(np.float32):
            encoded.append(X)
        return encoded.array()

    def examples(self) -> Examples | PartitionedExamples:
        rows = self._csr() if self.encoding.sparse else as_rows(self.rows())
        return stored_or_not(rows, self.targets)

    def _csr(self) -> SparseRows:
        """All rows, written into files part by part, which stay there if they are large."""
        most = self.y.size * (len(self.schema.encoded) + self.encoding.indicators)
        small = np.int32 if most < 2**31 else np.int64
        data, indices, starts = Spool(1, np.float64), Spool(1, small), Spool(1, small)
        starts.append(np.zeros((1, 1)))
        for _, X in self._matrices(np.float64):
            starts.append(data.count + X.indptr[1:, None].astype(np.int64))
            data.append(X.data[:, None])
            indices.append(X.indices[:, None])
        names = self.encoding.names
        return SparseRows(data.column(), indices.column(), starts.column(), len(names))

    def parts(self) -> Iterator[Rows]:
        for place, X in self._matrices(np.float64):
            yield Rows(X, self.targets[place], self.encoding.names)

    def _matrices(self, dtype: Any) -> Iterator[tuple[slice, Any]]:
        categories = [c for c in self.schema.encoded if c.kind == "category"]
        for first in range(0, self.y.size, CHUNK):
            stop = min(first + CHUNK, self.y.size)
            codes: Codes = self.codes.part(first, stop)
            for j, column in enumerate(categories):
                if column.name in self.counts:
                    counts = self.counts[column.name]
                    codes[:, j] = renumbered(codes[:, j], counts, column.categories)
            numbers = self.numbers.part(first, stop)
            yield slice(first, stop), one_hot(self.schema, self.encoding, numbers, codes, dtype)
