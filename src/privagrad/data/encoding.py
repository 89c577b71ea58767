"""Cells as numbers and codes, and codes one-hot: what a schema says of its columns."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from privagrad._internal.validate import Vector
from privagrad.data.schema import MISSING_MARKS, Column, Schema

if TYPE_CHECKING:
    import polars as pl

Codes = NDArray[np.int32]

_SPARSE = 0.3
"""Below this share of entries that are not 0, one-hot tables are kept sparse."""

_OTHER, _MISSING = -1, -2
"""Codes of texts that are no category, and of missing ones."""

_LARGEST = 1e38
"""What rows in single precision can hold."""


def polars() -> Any:
    try:
        import polars
    except ImportError as error:
        raise ImportError(
            "Reading tables needs Polars: pip install 'privagrad[tables]'."
        ) from error
    return polars


@dataclass(frozen=True)
class Encoding:
    """The columns of the encoded matrix. All of it is public.

    A number keeps its column's name, a category is "column=category". `bounds` are known for all
    columns or None. `groups` are the ranges of one-hot columns. No entry of a column exceeds its
    limit in size; it is infinite where none is known.
    """

    names: list[str]
    sparse: bool
    bounds: tuple[Vector, Vector] | None = None
    groups: tuple[tuple[int, int], ...] = ()
    limits: Vector | None = None


def encoding_of(schema: Schema) -> Encoding:
    """The matrix that a schema's features are encoded as; unknown categories have no columns."""
    names: list[str] = []
    edges: list[tuple[float, float]] = []
    groups: list[tuple[int, int]] = []
    for column in schema.features:
        if column.kind == "number":
            names.append(column.name)
            low = -math.inf if column.low is None else column.low
            edges.append((low, math.inf if column.high is None else column.high))
        elif column.categories:
            groups.append((len(names), len(names) + len(column.categories)))
            names += [f"{column.name}={category}" for category in column.categories]
            edges += [(0.0, 1.0)] * len(column.categories)
    # One-hot columns hold one entry each.
    sparse = bool(groups) and len(schema.features) < _SPARSE * len(names)
    lower, upper = np.array(edges, dtype=np.float64).reshape(-1, 2).T.copy()
    limits = np.maximum(np.abs(lower), np.abs(upper))
    bounds = None
    if np.isfinite(limits).all():
        # Entries that a sparse matrix does not store are 0.
        bounds = (np.minimum(lower, 0.0), np.maximum(upper, 0.0)) if sparse else (lower, upper)
    return Encoding(names, sparse, bounds, tuple(groups), np.where(limits == 0, 1.0, limits))


class Cells(NamedTuple):
    """Some rows after parsing.

    `y` holds numbers, or codes of categories with -1 for others; NaN where missing. `numbers` are
    within their bounds and without blanks. `codes` are -1 for blanks and unknown categories.
    """

    y: Vector | None
    numbers: Vector
    codes: Codes


@dataclass(frozen=True)
class Tally:
    """How many cells of each column are blank, or hold a category that is not stated.

    It is exact: for rows that are the user's own, never for private ones.
    """

    blanks: Counter[str] = field(default_factory=Counter)
    unseen: Counter[str] = field(default_factory=Counter)

    def add(self, column: Column, blanks: int, unseen: int = 0) -> None:
        self.blanks[column.name] += blanks
        self.unseen[column.name] += unseen

    def sentences(self) -> list[str]:
        """What was found, column by column."""
        return [
            f"Column {name!r}: {count} {what}."
            for counts, what in (
                (self.blanks, "missing values"),
                (self.unseen, "values of categories that the model does not know"),
            )
            for name, count in counts.items()
            if count
        ]


class Parser:
    """Texts or typed cells as numbers and codes.

    The values of `unknown` columns, whose categories are to be discovered, get codes as they occur.
    `counts` holds them in the order of their codes, with their numbers of rows. It is not private.
    """

    def __init__(
        self,
        schema: Schema,
        *,
        target: bool = True,
        unknown: Sequence[str] = (),
        tally: Tally | None = None,
    ) -> None:
        self.schema, self.target, self.tally = schema, target, tally
        self.counts: dict[str, Counter[str]] = {name: Counter() for name in unknown}

    @property
    def columns(self) -> list[str]:
        """Names of the columns that are parsed."""
        target = [self.schema.target] if self.target and self.schema.target else []
        return [column.name for column in self.schema.features] + target

    def parse(self, frame: pl.DataFrame, first: int) -> Cells:
        """The cells of some rows; `first` is the line of the first one, for messages."""
        y = self._targets(frame, first) if self.target and self.schema.target else None
        features = self.schema.features
        numbers = [c for c in features if c.kind == "number"]
        categories = [c for c in features if c.kind == "category"]
        values = np.empty((len(frame), len(numbers)))
        for j, column in enumerate(numbers):
            values[:, j] = self._numbers(frame[column.name], column, first)
        codes = np.empty((len(frame), len(categories)), dtype=np.int32)
        for j, column in enumerate(categories):
            found = self._codes(frame[column.name], column)
            if self.tally is not None:
                blanks, others = ((found == code).sum() for code in (_MISSING, _OTHER))
                self.tally.add(column, int(blanks), int(others))
            codes[:, j] = np.maximum(found, _OTHER)
        return Cells(y, values, codes)

    def _targets(self, frame: pl.DataFrame, first: int) -> Vector:
        column = self.schema.column(str(self.schema.target))
        if column.kind == "number":
            return self._numbers(frame[column.name], column, first, fill=math.nan)
        codes = self._codes(frame[column.name], column)
        return np.where(codes == _MISSING, math.nan, codes)

    def _numbers(
        self, series: pl.Series, column: Column, first: int, fill: float | None = None
    ) -> Vector:
        """Numbers within the bounds; blanks filled, by default by the column's public rule."""
        pl = polars()
        if series.dtype == pl.String:
            numbers = self._read_numbers(series, column, first)
        elif series.dtype.is_numeric() or series.dtype == pl.Boolean:
            numbers = series.cast(pl.Float64)
        else:
            raise TypeError(
                f"Expected numbers in column {column.name!r}, found {series.dtype}: make it a "
                "category or ignored in the schema."
            )
        values = numbers.to_numpy().astype(np.float64)
        blank = np.isnan(values)
        if self.tally is not None:
            self.tally.add(column, int(blank.sum()))
        values[blank] = column.fill if fill is None else fill
        if column.low is not None or column.high is not None:
            np.clip(values, column.low, column.high, out=values)
        if (np.abs(values) > _LARGEST).any():
            raise ValueError(
                f"Expected numbers below {_LARGEST:g} in column {column.name!r}, found larger ones "
                "or inf: give it bounds in the schema, to which such entries are brought."
            )
        return values

    def _read_numbers(self, series: pl.Series, column: Column, first: int) -> pl.Series:
        """Texts as numbers; null where one is missing."""
        pl = polars()
        if not column.aliases and not self._blank_numbers:
            # No text that stands for a missing value or needs cleaning reads as a number.
            numbers = series.cast(pl.Float64, strict=False)
            if not numbers.null_count():
                return numbers
        texts = self._texts(series, column)
        texts = texts.set(texts.str.to_lowercase().is_in(list(MISSING_MARKS)), None)
        numbers = texts.cast(pl.Float64, strict=False)
        if wrong := numbers.null_count() - texts.null_count():
            line = first + int((texts.is_not_null() & numbers.is_null()).arg_max() or 0)
            raise ValueError(
                f"Expected numbers in column {column.name!r}, found other text in {wrong} "
                f"rows, first in line {line}: list what stands for a missing value as `blanks` "
                "in the schema, or make the column a category or ignored."
            )
        return numbers

    @cached_property
    def _blank_numbers(self) -> bool:
        """Whether a number stands for a missing value."""
        pl = polars()
        blanks = pl.Series(list(self.schema.blanks), dtype=pl.String)
        return bool(blanks.cast(pl.Float64, strict=False).is_not_null().any())

    def _codes(self, series: pl.Series, column: Column) -> Codes:
        """The places of texts among the stated categories, or among all values met so far.

        `_OTHER` for other texts, `_MISSING` for none. Each different text is looked at once.
        """
        pl = polars()
        spellings, times = series.cast(pl.String).drop_nulls().value_counts().get_columns()
        texts = self._texts(spellings, column).to_list()
        counts = self.counts.get(column.name)
        if counts is not None:
            for text, count in zip(texts, times.to_list(), strict=True):
                if text is not None:
                    counts[text] += count
        known = column.categories if counts is None else counts
        places = {text: place for place, text in enumerate(known)}
        codes = [_MISSING if text is None else places.get(text, _OTHER) for text in texts]
        if not codes:
            return np.full(len(series), _MISSING, dtype=np.int32)
        found = series.cast(pl.String).replace_strict(
            spellings, pl.Series(codes, dtype=pl.Int32), default=_MISSING, return_dtype=pl.Int32
        )
        return np.asarray(found.fill_null(_MISSING).to_numpy(), dtype=np.int32)

    def _texts(self, series: pl.Series, column: Column) -> pl.Series:
        """Texts without blanks around them; None for missing ones; one spelling of each."""
        pl = polars()
        texts = series.cast(pl.String).str.strip_chars()
        texts = texts.set(texts.is_in(list(self.schema.blanks)), None)
        if column.aliases:
            texts = texts.replace(dict(column.aliases))
        return texts


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
    for column, cells in _cells(schema, numbers, codes):
        if column.kind == "number":
            dense[:, at] = cells
            at += 1
        else:
            known = np.flatnonzero(cells >= 0)
            dense[known, at + cells[known]] = 1.0
            at += len(column.categories)
    return dense


def _csr(schema: Schema, encoding: Encoding, numbers: Any, codes: Codes) -> Any:
    """The rows as a CSR matrix: every feature has at most one entry in a row."""
    from scipy.sparse import csr_array

    shape = len(numbers), len(schema.features)
    values, places = np.empty(shape), np.empty(shape, dtype=np.int32)
    at = 0
    for k, (column, cells) in enumerate(_cells(schema, numbers, codes)):
        if column.kind == "number":
            values[:, k], places[:, k] = cells, at
            at += 1
        else:
            values[:, k], places[:, k] = cells >= 0, at + cells
            at += len(column.categories)
    stored = values != 0
    starts = np.zeros(len(numbers) + 1, dtype=np.int32)
    np.cumsum(stored.sum(axis=1), out=starts[1:])
    entries = values[stored], places[stored], starts
    return csr_array(entries, shape=(len(numbers), len(encoding.names)))


def _cells(schema: Schema, numbers: Any, codes: Codes) -> Iterator[tuple[Column, Any]]:
    """The features, each with its numbers or its codes."""
    cells = {"number": iter(numbers.T), "category": iter(codes.T)}
    for column in schema.features:
        yield column, next(cells[column.kind])
