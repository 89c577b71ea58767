"""LIBSVM files: lines of `label index:value ...`, indices from 1."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from privagrad._internal.validate import Integers, Vector
from privagrad.data.encoding import Encoding
from privagrad.data.schema import Column, Kind, Schema
from privagrad.data.tables import CHUNK, Rows, Spool, Table
from privagrad.glm.examples import Examples, PartitionedExamples
from privagrad.glm.rows import SparseRows, as_rows
from privagrad.glm.stored import stored_or_not

ENDINGS = (".libsvm", ".svm", ".svmlight", ".t", "")
LABEL = "(target)"
_BLOCK, _BEYOND = 2**22, 2**40
_TORN = (b" :", b": ", b"\t:", b":\t", b":\n", b"\n:", b"_")
_BLANK, _NEWLINE, _COLON = b" \n:"

MOST_COLUMNS = 2**26
"""One line could otherwise ask for more memory than there is."""


def is_libsvm(path: Path) -> bool:
    return path.suffix.lower() in ENDINGS and not path.is_dir()


def libsvm_schema(kind: Kind, classes: tuple[str, ...] = ()) -> Schema:
    """The schema of a LIBSVM file: its label is the target, its columns have numbers alone."""
    return Schema((Column(LABEL, kind, categories=classes),), LABEL, libsvm=True)


@dataclass(frozen=True)
class LibsvmTable(Table):
    """The rows of a LIBSVM file."""

    data: SparseRows

    public_columns: ClassVar[str] = "the columns' number"

    @property
    def file_schema(self) -> None:
        return None

    def buffers(self) -> list[NDArray[Any]]:
        return [self.data.data, self.data.indices]

    @cached_property
    def encoding(self) -> Encoding:
        return Encoding([str(j + 1) for j in range(self.data.dim)], sparse=True)

    def rows(self) -> Any:
        return self.data.matrix

    def examples(self) -> Examples | PartitionedExamples:
        return stored_or_not(self.data, self.targets)

    def parts(self) -> Iterator[Rows]:
        for first in range(0, self.data.shape[0], CHUNK):
            place = slice(first, min(first + CHUNK, self.data.shape[0]))
            part = self.data.part(place.start, place.stop).matrix
            yield Rows(part, self.targets[place], self.encoding.names)


def open_libsvm(path: Path, schema: Schema, columns: int | None = None) -> LibsvmTable:
    """A LIBSVM file as a table; `columns` as for `read_libsvm`."""
    rows, labels = read_rows(path, columns)
    y, counts = targets_of(labels, schema.column(LABEL))
    return LibsvmTable(schema, y, counts, rows)


def targets_of(labels: Vector, target: Column) -> tuple[Vector, dict[str, Counter[str]]]:
    """Numbers, or codes of categories; labels that are to be discovered are counted."""
    counts: dict[str, Counter[str]] = {}
    if target.kind != "category":
        return labels, counts
    values, places, times = np.unique(labels, return_inverse=True, return_counts=True)
    texts = [f"{value:g}" for value in values]
    if not target.categories:
        counts[LABEL] = Counter()
        for text, count in zip(texts, times.tolist(), strict=True):
            counts[LABEL][text] += count
    numbers = {text: k for k, text in enumerate(counts.get(LABEL, target.categories))}
    return np.array([numbers.get(text, -1) for text in texts], dtype=np.float64)[places], counts


def read_libsvm(path: Path, columns: int | None = None) -> tuple[Any, Vector]:
    """A CSR matrix and the labels.

    Indices above `columns` are left out: a model with that many columns ignores them.
    """
    rows, labels = read_rows(path, columns)
    return rows.matrix, labels


class Lines(NamedTuple):
    """Some lines of a file: from a byte to before another one, and the number of the first."""

    first: int
    stop: int
    number: int


def cut(path: Path, size: int) -> list[Lines]:
    """All lines of a file, in parts of about so many bytes."""
    parts: list[Lines] = []
    first = stop = 0
    line = number = 1
    for block in blocks_of(path):
        stop += len(block)
        line += block.count(b"\n")
        if stop - first >= size:
            parts.append(Lines(first, stop, number))
            first, number = stop, line
    return [*parts, Lines(first, stop, number)] if stop > first else parts


def read_rows(
    path: Path, columns: int | None = None, lines: Lines | None = None
) -> tuple[SparseRows, Vector]:
    """The rows and the labels; large files are parsed into files of numbers, part by part.

    Only some `lines` may have no rows.
    """
    labels, values = Spool(1, np.float64), Spool(1, np.float64)
    places, starts = Spool(1, np.int32), Spool(1, np.int64)
    starts.append(np.zeros((1, 1)))
    largest, line = 0, 1 if lines is None else lines.number
    for block in blocks_of(path, lines):
        found, counts, indices, entries = _parsed(block, path, line)
        line += block.count(b"\n")
        if not found.size:
            continue
        if indices.size and indices.min() < 1:
            raise _without_rows(path)
        if columns is None and indices.max(initial=0) > MOST_COLUMNS:
            raise ValueError(
                f"Expected indices up to {MOST_COLUMNS:,} in {path.name}, found "
                f"{indices.max()}: a model has several numbers for every column."
            )
        if columns is not None:
            kept = indices <= columns
            counts = np.bincount(np.repeat(np.arange(counts.size), counts)[kept],
                                 minlength=counts.size)  # fmt: skip
            indices, entries = indices[kept], entries[kept]
        largest = max(largest, int(indices.max(initial=0)))
        part = _canonical(counts, indices - 1, entries)
        starts.append(values.count + part.indptr[1:, None].astype(np.int64))
        labels.append(found[:, None])
        values.append(part.data[:, None])
        places.append(part.indices[:, None])
    if not labels.count and lines is None:
        raise _without_rows(path)
    dim = max(largest, 1) if columns is None else columns
    rows = SparseRows(values.column(), places.column(), starts.column(), dim)
    return rows, labels.column()


def _canonical(counts: Integers, indices: Integers, entries: Vector) -> SparseRows:
    """Rows with increasing indices, each once."""
    from scipy.sparse import csr_array

    starts = np.concatenate([[0], np.cumsum(counts)])
    shape = counts.size, int(indices.max(initial=0)) + 1
    found = as_rows(csr_array((entries, indices, starts), shape=shape))
    if not isinstance(found, SparseRows):
        raise TypeError("Expected sparse rows of a CSR matrix.")
    return found


def blocks_of(path: Path, lines: Lines | None = None) -> Iterator[bytes]:
    """All lines of a file or some of them, some megabytes at a time."""
    with path.open("rb") as file:
        rest, left = b"", sys.maxsize
        if lines is not None:
            left = lines.stop - file.seek(lines.first)
        while piece := file.read(min(_BLOCK, left)):
            left -= len(piece)
            rest += piece
            whole = rest.rfind(b"\n") + 1
            if whole:
                yield rest[:whole]
                rest = rest[whole:]
        if rest:
            yield rest


def _parsed(block: bytes, path: Path, line: int) -> tuple[Vector, Integers, Integers, Vector]:
    """Labels, numbers of entries, indices and entries of the lines that are not empty."""
    _require_text(block, path)
    lines = block.split(b"\n")
    if b"#" in block:
        lines = [text.split(b"#")[0] for text in lines]
    told = [text.strip() for text in lines if text and not text.isspace()]
    counts = np.array([text.count(b":") for text in told], dtype=np.int64)
    joined = b"\n".join([b"", *told, b""])
    words = joined.replace(b":", b" ").split()
    starts = np.concatenate([[0], np.cumsum(1 + 2 * counts)])
    try:
        torn = any(mark in joined for mark in _TORN) or _unpaired(joined)
        if len(words) != starts[-1] or torn:
            raise ValueError
        numbers = np.fromiter(map(float, words), np.float64, len(words))
        first = np.zeros(numbers.size, dtype=np.bool_)
        first[starts[:-1]] = True
        pairs = numbers[~first].reshape(-1, 2)
        if not (pairs[:, 0] == np.floor(pairs[:, 0])).all():
            raise ValueError
        indices = np.clip(pairs[:, 0], -1, _BEYOND).astype(np.int64)
    except (ValueError, OverflowError):
        raise _fault(lines, path, line) from None
    return numbers[first], counts, indices, pairs[:, 1]


def _unpaired(lines: bytes) -> bool:
    """Whether an index does not follow a blank.

    Where none is, and there are as many numbers as there should be, no line takes a number of
    another one.
    """
    text = np.frombuffer(lines, np.uint8)
    marks = text[(text <= _BLANK) | (text == _COLON)]
    before, colons = marks[:-1], marks[1:] == _COLON
    return bool((colons & ((before == _COLON) | (before == _NEWLINE))).any())


def _require_text(block: bytes, path: Path) -> None:
    try:
        block.decode("utf-8")
    except UnicodeDecodeError:
        raise ValueError(
            f"Expected UTF-8 text in {path.name}, found other bytes: convert it to UTF-8."
        ) from None


def _fault(lines: list[bytes], path: Path, line: int) -> ValueError:
    """The first line that is no row. It is not quoted."""
    for number, text in enumerate(lines, start=line):
        try:
            label, *pairs = text.decode("utf-8").split() or ["0"]
            float(label)
            for pair in pairs:
                index, _, value = pair.partition(":")
                int(index), float(value)
        except ValueError:
            return ValueError(
                f"Expected 'label index:value ...' in line {number} of {path.name}, found other "
                "text."
            )
    return ValueError(f"Expected 'label index:value ...' in {path.name}, found other text.")


def _without_rows(path: Path) -> ValueError:
    return ValueError(
        f"Expected rows with indices from 1 in {path.name}, found none or an index 0."
    )
