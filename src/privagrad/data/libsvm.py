"""LIBSVM files: lines of `label index:value ...`, indices from 1."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from privagrad._internal.validate import Vector
from privagrad.data.encoding import Encoding
from privagrad.data.schema import Column, Kind, Schema
from privagrad.data.tables import Rows, Table

ENDINGS = (".libsvm", ".svm", ".svmlight", ".t", "")
LABEL = "(target)"


MOST_COLUMNS = 2**26
"""One line could otherwise ask for more memory than there is."""


def is_libsvm(path: Path) -> bool:
    return path.suffix.lower() in ENDINGS


def libsvm_schema(kind: Kind, classes: tuple[str, ...] = ()) -> Schema:
    """The schema of a LIBSVM file: its label is the target, its columns have numbers alone."""
    return Schema((Column(LABEL, kind, categories=classes),), LABEL, libsvm=True)


@dataclass(frozen=True)
class LibsvmTable(Table):
    """The rows of a LIBSVM file as a CSR matrix."""

    X: Any

    public_columns: ClassVar[str] = "the columns' number"

    @property
    def file_schema(self) -> None:
        return None

    def buffers(self) -> list[NDArray[Any]]:
        return [self.X.data, self.X.indices]

    @cached_property
    def encoding(self) -> Encoding:
        return Encoding([str(j + 1) for j in range(self.X.shape[1])], sparse=True)

    def rows(self) -> Any:
        return self.X

    def parts(self) -> Iterator[Rows]:
        yield Rows(self.X, self.targets, self.encoding.names)


def open_libsvm(path: Path, schema: Schema, columns: int | None = None) -> LibsvmTable:
    """A LIBSVM file as a table; `columns` as for `read_libsvm`."""
    X, labels = read_libsvm(path, columns)
    target = schema.column(LABEL)
    counts: dict[str, Counter[str]] = {}
    y = labels
    if target.kind == "category":
        values, places, times = np.unique(labels, return_inverse=True, return_counts=True)
        texts = [f"{value:g}" for value in values]
        if not target.categories:
            counts[LABEL] = Counter()
            for text, count in zip(texts, times.tolist(), strict=True):
                counts[LABEL][text] += count
        numbers = {text: k for k, text in enumerate(counts.get(LABEL, target.categories))}
        y = np.array([numbers.get(text, -1) for text in texts], dtype=np.float64)[places]
    return LibsvmTable(schema, y, counts, X)


def read_libsvm(path: Path, columns: int | None = None) -> tuple[Any, Vector]:
    """A CSR matrix and the labels.

    Indices above `columns` are left out: a model with that many columns ignores them.
    """
    from scipy.sparse import csr_array

    labels: list[float] = []
    values: list[float] = []
    indices: list[int] = []
    starts = [0]
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError:
        raise ValueError(
            f"Expected UTF-8 text in {path.name}, found other bytes: convert it to UTF-8."
        ) from None
    for number, line in enumerate(lines, start=1):
        fields = line.split("#")[0].split()
        if not fields:
            continue
        try:
            labels.append(float(fields[0]))
            for field in fields[1:]:
                index, _, value = field.partition(":")
                if columns is None or int(index) <= columns:
                    indices.append(int(index) - 1)
                    values.append(float(value))
        except ValueError:
            raise ValueError(
                f"Expected 'label index:value ...' in line {number} of {path.name}, found other "
                "text."
            ) from None
        starts.append(len(indices))
    if not labels or min(indices, default=0) < 0:
        raise ValueError(
            f"Expected rows with indices from 1 in {path.name}, found none or an index 0."
        )
    dim = max(indices, default=0) + 1 if columns is None else columns
    if dim > MOST_COLUMNS:
        raise ValueError(
            f"Expected indices up to {MOST_COLUMNS:,} in {path.name}, found {dim}: a model has "
            "several numbers for every column."
        )
    X = csr_array((np.array(values), np.array(indices), np.array(starts)), shape=(len(labels), dim))
    return X, np.array(labels)
