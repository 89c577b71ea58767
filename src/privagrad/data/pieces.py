"""Parts of files as a cluster's workers load them, each time the same rows."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from privagrad._internal.errors import ClusterError
from privagrad.data.encoding import encoding_of, one_hot
from privagrad.data.files import fingerprint
from privagrad.data.frames import frames_of_file, require_table, rows_of_file
from privagrad.data.libsvm import LABEL, Lines, cut, read_rows, targets_of
from privagrad.data.parsing import Parser
from privagrad.data.schema import Schema
from privagrad.data.sources import files_of
from privagrad.glm.examples import Examples
from privagrad.glm.rows import DenseRows, SparseRows
from privagrad.glm.stored import joined


@dataclass(frozen=True)
class SeenFile:
    """A file as it was when it was first looked at: its size, last change and fingerprint."""

    path: Path
    size: int
    changed: int
    fingerprint: str

    @classmethod
    def of(cls, path: Path) -> SeenFile:
        """The file as it is now."""
        before = _stat(path)
        found = fingerprint(path)
        seen = cls(path, before.st_size, before.st_mtime_ns, found)
        seen.require_same()
        return seen

    def require_same(self) -> None:
        """Refuse a file of other content. That of another machine may have another time."""
        now = _stat(self.path)
        if now.st_size == self.size and (
            now.st_mtime_ns == self.changed
            or _fingerprint(self.path, now.st_size, now.st_mtime_ns) == self.fingerprint
        ):
            return
        raise ClusterError(
            f"Expected the same content in {self.path.name} during the whole fit and on every "
            "worker, found other content: start again with a file that nobody writes to. What was "
            "released before stays charged."
        )


@dataclass(frozen=True)
class RowPiece:
    """Rows of a file with named columns: `count` of them from `first` on.

    `line` is the number of the first one in the whole table, for messages.
    """

    file: SeenFile
    schema: Schema
    first: int
    count: int
    line: int

    def __call__(self) -> Examples:
        self.file.require_same()
        parser, line, parts = Parser(self.schema), self.line, []
        rows = (self.first, self.count)
        for frame in frames_of_file(self.file.path, self.schema, parser.columns, rows):
            cells = parser.parse(frame, line)
            line += len(frame)
            table = _encoded(self.schema, cells.numbers, cells.codes)
            parts.append(Examples(table, np.asarray(cells.y, dtype=np.float64)))
        self.file.require_same()
        return joined(parts)


@dataclass(frozen=True)
class LinePiece:
    """Lines of a LIBSVM file, with as many columns as these need."""

    file: SeenFile
    schema: Schema
    lines: Lines

    def __call__(self) -> Examples:
        self.file.require_same()
        rows, labels = read_rows(self.file.path, lines=self.lines)
        self.file.require_same()
        y, _ = targets_of(labels, self.schema.column(LABEL))
        return Examples(rows, y)


def files_there(path: Path) -> tuple[bool, list[Path]]:
    """Whether a table is a folder, and its files, on the machine that this runs on."""
    _stat(path)
    require_table(path)
    return path.is_dir(), files_of(path)


def count_rows(file: SeenFile, schema: Schema) -> int:
    """How many rows a file has."""
    return rows_of_file(file.path, schema, Parser(schema).columns)


def cut_lines(file: SeenFile, size: int) -> list[Lines]:
    """The lines of a LIBSVM file, in parts of about so many bytes."""
    return cut(file.path, size)


def widened(examples: Examples, dim: int) -> Examples:
    """Sparse rows with more columns, which are 0."""
    if not isinstance(examples.rows, SparseRows):
        raise TypeError("Expected sparse rows of a LIBSVM file.")
    return replace(examples, rows=replace(examples.rows, dim=dim))


def _encoded(schema: Schema, numbers: Any, codes: Any) -> DenseRows | SparseRows:
    """The rows as a table that is parsed as a whole encodes them."""
    encoding = encoding_of(schema)
    X = one_hot(schema, encoding, numbers, codes, np.float32)
    if not encoding.sparse:
        return DenseRows(X)
    return SparseRows(X.data, X.indices, X.indptr, len(encoding.names))


def _stat(path: Path) -> os.stat_result:
    try:
        return path.stat()
    except FileNotFoundError:
        raise FileNotFoundError(
            f"Expected a table that every worker reads at {path}, found nothing there on one of "
            "them: put it where all workers see it under the same path."
        ) from None


@lru_cache(maxsize=256)
def _fingerprint(path: Path, size: int, changed: int) -> str:
    return fingerprint(path)
