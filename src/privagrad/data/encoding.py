"""Numbers and codes as a matrix: what a schema says of its columns."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from privagrad._internal.validate import Integers, Vector
from privagrad.data.columns import Column, Schema

Codes = NDArray[np.int32]

_SPARSE = 0.3
"""Below this share of entries that are not 0, one-hot tables are kept sparse."""


@dataclass(frozen=True)
class Encoding:
    """The columns of the encoded matrix. All of it is public.

    A number keeps its column's name, and "column is missing" follows it unless the schema says what
    a blank is; a category is "column=category". `bounds` are known for all columns or None.
    `groups` are the ranges of one-hot columns. No entry of a column exceeds its limit in size; it
    is infinite where none is known. `blanks` holds for each column the place of the one that says
    where it is missing, or -1; None where there are none.
    """

    names: list[str]
    sparse: bool
    bounds: tuple[Vector, Vector] | None = None
    groups: tuple[tuple[int, int], ...] = ()
    limits: Vector | None = None
    blanks: Integers | None = None

    @property
    def indicators(self) -> int:
        """How many columns say where others are missing."""
        return 0 if self.blanks is None else int(np.count_nonzero(self.blanks >= 0))


def encoding_of(schema: Schema) -> Encoding:
    """The matrix that a schema's features are encoded as; unknown categories have no columns."""
    names: list[str] = []
    edges: list[tuple[float, float]] = []
    groups: list[tuple[int, int]] = []
    blanks: list[int] = []
    for column, part in _parts(schema):
        if part.kind == "number":
            names.append(part.name)
            low = -math.inf if part.low is None else part.low
            edges.append((low, math.inf if part.high is None else part.high))
            blanks.append(-1)
            if column.indicator is not None:
                names.append(column.indicator)
                edges.append((0.0, 1.0))
                blanks[-1:] = [len(names) - 1, -1]
        elif part.categories:
            groups.append((len(names), len(names) + len(part.categories)))
            names += [f"{part.name}={category}" for category in part.categories]
            edges += [(0.0, 1.0)] * len(part.categories)
            blanks += [-1] * len(part.categories)
    # One-hot columns hold one entry each, and columns that tell of blanks hardly any.
    places = np.array(blanks, dtype=np.int64)
    told = int(np.count_nonzero(places >= 0))
    sparse = bool(groups) and are_sparse(len(schema.encoded), len(names) - told)
    lower, upper = np.array(edges, dtype=np.float64).reshape(-1, 2).T.copy()
    limits = np.maximum(np.abs(lower), np.abs(upper))
    bounds = None
    if np.isfinite(limits).all():
        # Entries that a sparse matrix does not store are 0.
        bounds = (np.minimum(lower, 0.0), np.maximum(upper, 0.0)) if sparse else (lower, upper)
    limits = np.where(limits == 0, 1.0, limits)
    return Encoding(names, sparse, bounds, tuple(groups), limits, places if told else None)


def are_sparse(entries: int, columns: int) -> bool:
    """Whether one-hot rows with so many entries, of so many columns, are kept as sparse ones."""
    return entries < _SPARSE * columns


def _parts(schema: Schema) -> Iterator[tuple[Column, Column]]:
    """The features, each with all that it is read as."""
    for column in schema.features:
        for part in column.encoded:
            yield column, part


def renumbered(codes: Codes, counts: Counter[str], categories: tuple[str, ...]) -> Codes:
    """Codes of the values that were counted as codes of categories, -1 for all others."""
    places = {category: place for place, category in enumerate(categories)}
    table = [places.get(value, -1) for value in counts]
    return np.array([*table, -1], dtype=np.int32)[codes]


def one_hot(schema: Schema, encoding: Encoding, numbers: Any, codes: Codes, dtype: Any) -> Any:
    """The matrix of some rows: CSR of doubles, or an array of the dtype."""
    if encoding.sparse:
        return _csr(schema, encoding, numbers, codes)
    dense = np.zeros((len(numbers), len(encoding.names)), dtype=dtype)
    at = 0
    for part, cells in _cells(schema, numbers, codes):
        if part.kind == "number":
            dense[:, at] = cells
            if part.missing is None:
                at += 1
                dense[:, at] = np.isnan(cells)
            at += 1
        else:
            known = np.flatnonzero(cells >= 0)
            dense[known, at + cells[known]] = 1.0
            at += len(part.categories)
    return dense


def _csr(schema: Schema, encoding: Encoding, numbers: Any, codes: Codes) -> Any:
    """The rows as a CSR matrix: a category has at most one entry in a row, a blank has two."""
    from scipy.sparse import csr_array

    shape = len(numbers), len(schema.encoded) + encoding.indicators
    values, places = np.empty(shape), np.empty(shape, dtype=np.int32)
    at = k = 0
    for part, cells in _cells(schema, numbers, codes):
        if part.kind == "number":
            values[:, k], places[:, k] = cells, at
            if part.missing is None:
                at, k = at + 1, k + 1
                values[:, k], places[:, k] = np.isnan(cells), at
            at += 1
        else:
            values[:, k], places[:, k] = cells >= 0, at + cells
            at += len(part.categories)
        k += 1
    stored = values != 0
    starts = np.zeros(len(numbers) + 1, dtype=np.int32)
    np.cumsum(stored.sum(axis=1), out=starts[1:])
    entries = values[stored], places[stored], starts
    return csr_array(entries, shape=(len(numbers), len(encoding.names)))


def _cells(schema: Schema, numbers: Any, codes: Codes) -> Iterator[tuple[Column, Any]]:
    """What the features are read as, each with its numbers or its codes."""
    cells = {"number": iter(numbers.T), "category": iter(codes.T)}
    for part in schema.encoded:
        yield part, next(cells[part.kind])
