"""Frames of texts or typed columns as rows of numbers, as a schema says."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from privagrad._internal.validate import Vector
from privagrad.data.schema import Column, Schema

if TYPE_CHECKING:
    import polars as pl

_SPARSE = 0.3
"""Below this share of entries that are not 0, one-hot tables are kept sparse."""


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


class Encoder:
    """Frames of texts or typed columns as rows of numbers."""

    def __init__(self, schema: Schema) -> None:
        self.schema, self.features = schema, schema.features
        self.names: list[str] = []
        for column in self.features:
            if column.kind == "number":
                self.names.append(column.name)
            else:
                self.names += [f"{column.name}={category}" for category in column.categories]
        numbers = sum(column.kind == "number" for column in self.features)
        # One-hot columns hold one entry each.
        self.sparse = len(self.features) < _SPARSE * len(self.names) and numbers < len(self.names)

    @property
    def bounds(self) -> tuple[Vector, Vector] | None:
        """(low, high) of all columns, where all are known."""
        if not all(column.bounded for column in self.features if column.kind == "number"):
            return None
        low, high = [], []
        for column in self.features:
            ends = (column.low, column.high) if column.kind == "number" else (0.0, 1.0)
            count = 1 if column.kind == "number" else len(column.categories)
            low += [ends[0]] * count
            high += [ends[1]] * count
        edges = np.array(low, dtype=np.float64), np.array(high, dtype=np.float64)
        if self.sparse:  # whose absent entries are 0
            return np.minimum(edges[0], 0.0), np.maximum(edges[1], 0.0)
        return edges

    @property
    def groups(self) -> tuple[tuple[int, int], ...]:
        """One-hot columns: from the first of a column's categories to before the next column's."""
        found, at = [], 0
        for column in self.features:
            width = 1 if column.kind == "number" else len(column.categories)
            if column.kind == "category" and width:
                found.append((at, at + width))
            at += width
        return tuple(found)

    @property
    def limits(self) -> Vector:
        """What no entry of a column exceeds in size; infinite where nobody knows."""
        sizes: list[float] = []
        for column in self.features:
            if column.kind == "category":
                sizes += [1.0] * len(column.categories)
            elif column.low is not None and column.high is not None:
                sizes.append(max(abs(column.low), abs(column.high)) or 1.0)
            else:
                sizes.append(math.inf)
        return np.array(sizes)

    def matrix(self, frame: pl.DataFrame, first: int) -> Any:
        """The rows; `first` is the line of the first one, for messages."""
        from scipy.sparse import csr_array, hstack

        n = len(frame)
        dense = np.zeros((n, 0 if self.sparse else len(self.names)))
        blocks: list[Any] = []
        at = 0
        for column in self.features:
            if column.kind == "number":
                values = self.numbers(frame[column.name], column, first)
                if self.sparse:
                    blocks.append(csr_array(values[:, None]))
                else:
                    dense[:, at] = values
                at += 1
                continue
            index = self.categories(frame[column.name], column)
            known = np.flatnonzero(index >= 0)
            if self.sparse:
                shape = (n, len(column.categories))
                blocks.append(csr_array((np.ones(known.size), (known, index[known])), shape=shape))
            else:
                dense[known, at + index[known]] = 1.0
            at += len(column.categories)
        return hstack(blocks, format="csr") if self.sparse else dense

    def numbers(
        self, series: pl.Series, column: Column, first: int, fill: float | None = None
    ) -> Vector:
        """Numbers within the bounds; blanks filled, by default by the column's public rule."""
        pl = polars()
        if series.dtype == pl.String:
            texts = self.texts(series, column)
            numbers = texts.cast(pl.Float64, strict=False)
            if wrong := int((texts.is_not_null() & numbers.is_null()).sum()):
                line = first + int((texts.is_not_null() & numbers.is_null()).arg_max() or 0)
                raise ValueError(
                    f"Expected numbers in column {column.name!r}, found other text in {wrong} "
                    f"rows, first in line {line}: list what stands for a missing value as `blanks` "
                    "in the schema, or make the column a category or ignored."
                )
        elif series.dtype.is_numeric() or series.dtype == pl.Boolean:
            numbers = series.cast(pl.Float64)
        else:
            raise TypeError(
                f"Expected numbers in column {column.name!r}, found {series.dtype}: make it a "
                "category or ignored in the schema."
            )
        missing = column.fill if fill is None else fill
        values = numbers.fill_nan(None).fill_null(missing).to_numpy().astype(np.float64)
        if column.low is not None or column.high is not None:
            values = np.clip(values, column.low, column.high)
        if (np.abs(values) > _LARGEST).any():
            raise ValueError(
                f"Expected numbers below {_LARGEST:g} in column {column.name!r}, found larger ones "
                "or inf: give it bounds in the schema, to which such entries are brought."
            )
        return values

    def categories(self, series: pl.Series, column: Column) -> NDArray[np.int64]:
        """The number of each row's category, -1 for blanks and others."""
        pl = polars()
        texts = self.texts(series, column)
        known = pl.Series(column.categories, dtype=pl.String)
        numbers = texts.replace_strict(
            known, pl.Series(range(len(known)), dtype=pl.Int64), default=-1, return_dtype=pl.Int64
        )
        return numbers.fill_null(-1).to_numpy()

    def targets(self, frame: pl.DataFrame, first: int) -> Vector:
        """The target: numbers, or numbers of categories with -1 for others; NaN where missing."""
        assert self.schema.target is not None
        column = self.schema.column(self.schema.target)
        if column.kind == "number":
            return self.numbers(frame[column.name], column, first, fill=math.nan)
        codes = self.categories(frame[column.name], column).astype(np.float64)
        codes[self.texts(frame[column.name], column).is_null().to_numpy()] = math.nan
        return codes

    def texts(self, series: pl.Series, column: Column) -> pl.Series:
        """Texts without blanks around them; None for missing ones; one spelling of each."""
        pl = polars()
        texts = series.cast(pl.String).str.strip_chars()
        texts = texts.set(texts.is_in(list(self.schema.blanks)), None)
        if column.aliases:
            texts = texts.replace(dict(column.aliases))
        return texts
