"""Tables in files that the workers of a cluster read, each its own part of the rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from privagrad.data.encoding import Encoding, encoding_of
from privagrad.data.files import fingerprint, of_folder
from privagrad.data.frames import infer_schema
from privagrad.data.libsvm import LibsvmTable, is_libsvm
from privagrad.data.matrices import PartitionedTable
from privagrad.data.pieces import (
    LinePiece,
    RowPiece,
    SeenFile,
    count_rows,
    cut_lines,
    files_there,
    widened,
)
from privagrad.data.schema import Schema
from privagrad.data.sources import files_of, is_plain
from privagrad.data.tables import Table
from privagrad.distributed import ClusterPartitions, asked_of_a_worker, gathered
from privagrad.glm.examples import Examples, PartitionedExamples, Sums

_PART_BYTES, _LEAST_ROWS, _LEAST_BYTES = 2**27, 1000, 2**20
"""The most memory of a partition's numbers, and from how many rows, or bytes of a LIBSVM file, on
it is worth to cut: the result does not depend on it."""

_EACH = 2
"""Partitions for every thread of the workers, at least."""


@dataclass(frozen=True, kw_only=True)
class _ClusterTable(PartitionedTable):
    """Rows on the workers alone."""

    def strange_labels(self) -> tuple[int, int]:
        """How many rows have a label that is none of the stated ones; 0 for the first of them."""
        [found] = self.data.total(_strange_labels, sample=None)
        return int(found[0]), 0


@dataclass(frozen=True, kw_only=True)
class ColumnsOnCluster(_ClusterTable):
    """A table with named columns, whose schema states all categories."""

    public_columns: ClassVar[str] = Table.public_columns

    @cached_property
    def encoding(self) -> Encoding:
        return encoding_of(self.schema)

    @property
    def file_schema(self) -> Schema:
        return self.schema


@dataclass(frozen=True, kw_only=True)
class LibsvmOnCluster(_ClusterTable):
    """The rows of a LIBSVM file."""

    public_columns: ClassVar[str] = LibsvmTable.public_columns


@dataclass(frozen=True)
class ClusterFiles:
    """A table that every worker of a cluster reads at the same path.

    Guarantees
    ----------
    Rows go from the files to the workers. Here arrive the names, sizes and fingerprints of files,
    the names and kinds of columns, and how many rows there are.
    """

    client: Any
    path: Path

    @classmethod
    def of(cls, client: Any, path: Path) -> ClusterFiles:
        """The table at a path, whatever folder the workers were started in."""
        return cls(client, path.absolute())

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def libsvm(self) -> bool:
        return not self._found[0] and is_libsvm(self.path)

    def fingerprint(self) -> str:
        folder, files = self._found
        if folder:
            return of_folder((file.fingerprint, file.path.name) for file in files)
        return files[0].fingerprint

    def has_content_of(self, path: Path) -> bool:
        own = {file.fingerprint for file in self._found[1]}
        return any(fingerprint(file) in own for file in files_of(path))

    def infer_schema(self, encoding: str) -> Schema:
        first = self._found[1][0].path
        schema: Schema = asked_of_a_worker(self.client, _inferred, first, encoding)
        return schema

    def open(self, schema: Schema) -> Table:
        """The rows in the memory of the workers."""
        _require_served(schema)
        if schema.libsvm:
            return self._open_lines(schema)
        pieces = list(self._pieces(schema))
        if not pieces:
            raise ValueError(f"Expected rows in {self.name}, found none.")
        data = PartitionedExamples.of(ClusterPartitions.load(self.client, pieces))
        return ColumnsOnCluster(schema, np.empty(0), {}, data=data)

    def _open_lines(self, schema: Schema) -> Table:
        [file] = self._found[1]
        even = file.size // (_EACH * self._threads)
        size = min(max(even, _LEAST_BYTES), _PART_BYTES)
        lines = asked_of_a_worker(self.client, cut_lines, file, size)
        submit = self.client.submit
        loaded = [submit(LinePiece(file, schema, some), pure=False) for some in lines]
        dims = gathered(self.client, self.client.map(_dim, loaded, pure=False))
        futures = self.client.map(widened, loaded, dim=max(dims, default=1), pure=False)
        data = PartitionedExamples.of(ClusterPartitions.of(self.client, futures))
        return LibsvmOnCluster(schema, np.empty(0), {}, data=data)

    @cached_property
    def _found(self) -> tuple[bool, list[SeenFile]]:
        """Whether it is a folder, and its files."""
        folder, paths = asked_of_a_worker(self.client, files_there, self.path)
        return folder, gathered(self.client, self.client.map(SeenFile.of, paths, pure=False))

    @property
    def _threads(self) -> int:
        return max(int(sum(self.client.nthreads().values())), 1)

    def _pieces(self, schema: Schema) -> Iterator[RowPiece]:
        """All rows in the order of the files, cut so that every worker gets about as many."""
        files = self._found[1]
        counting = self.client.map(count_rows, files, schema=schema, pure=False)
        counts: list[int] = gathered(self.client, counting)
        encoding = encoding_of(schema)
        stored = len(schema.encoded) + encoding.indicators
        width = 12 * stored if encoding.sparse else 4 * len(encoding.names)
        even = -(-sum(counts) // (_EACH * self._threads))
        rows = min(max(even, _LEAST_ROWS), max(_PART_BYTES // max(width, 1), 1))
        before = accumulate(counts, initial=1 + schema.header)
        for file, count, line in zip(files, counts, before, strict=False):
            # What must be unpacked or decoded first is read as a whole.
            parts = -(-count // rows) if is_plain(file.path, schema) else min(count, 1)
            edges = [count * k // parts for k in range(parts + 1)] if parts else []
            for first, stop in pairwise(edges):
                yield RowPiece(file, schema, first, stop - first, line + first)


def _require_served(schema: Schema) -> None:
    """Refuse what needs the rows, or their cells, at one place."""
    if schema.user is not None:
        raise ValueError(
            f"Expected no column of users with --cluster, found {schema.user!r}: the rows of a "
            "user may lie on several workers, which would each bound a part of them. Fit without "
            "--cluster to protect users. Nothing was spent."
        )
    if unknown := schema.undiscovered:
        raise ValueError(
            f"Expected stated categories with --cluster, found none of {_listed(unknown)}: to "
            "discover them, all values of a column that occur would be needed at one place, and "
            "cells do not leave the workers. State them in the schema, those of the target also "
            "with --classes; or fit without --cluster. Nothing was spent."
        )


def _listed(names: Iterable[str]) -> str:
    found = list(names)
    more = f" and {len(found) - 5} more" if len(found) > 5 else ""
    return ", ".join(map(repr, found[:5])) + more


def _inferred(path: Path, encoding: str) -> Schema:
    return infer_schema(path, encoding=encoding)


def _dim(examples: Examples) -> int:
    return examples.shape[1]


def _strange_labels(examples: Examples) -> Sums:
    return (np.array([np.count_nonzero(examples.targets < 0)]),)
