"""Cells as numbers and codes: what a schema says of its columns."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from privagrad._internal.validate import Vector
from privagrad.data._polars import polars
from privagrad.data.columns import DATE_PARTS, MISSING_MARKS, Column, Schema
from privagrad.data.encoding import Codes
from privagrad.data.times import SECONDS_OF_DAY, read_dates, read_durations

if TYPE_CHECKING:
    import polars as pl

_OTHER, _MISSING = -1, -2
"""Codes of texts that are no category, and of missing ones."""

_UNTOLD = -1
"""Instead of the line of a row, where messages tell none."""

_LARGEST = 1e38
"""What rows in single precision can hold."""


class Cells(NamedTuple):
    """Some rows after parsing.

    `y` holds numbers, or codes of categories with -1 for others; NaN where missing. `numbers` are
    within their bounds, NaN where a blank stays one. `codes` are -1 for blanks and unknown
    categories.
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
    With `of_model` the schema is that of a model, which other rows do not change. With `users` the
    column that names users is among the `columns`.
    """

    def __init__(
        self,
        schema: Schema,
        *,
        target: bool = True,
        unknown: Sequence[str] = (),
        tally: Tally | None = None,
        of_model: bool = False,
        users: bool = False,
    ) -> None:
        self.users = schema.user if users else None
        self.schema, self.target, self.tally, self.of_model = schema, target, tally, of_model
        self.counts: dict[str, Counter[str]] = {name: Counter() for name in unknown}

    @property
    def columns(self) -> list[str]:
        """Names of the columns that are parsed."""
        target = [self.schema.target] if self.target and self.schema.target else []
        users = [] if self.users is None else [self.users]
        return [column.name for column in self.schema.features] + target + users

    def parse(self, frame: pl.DataFrame, first: int) -> Cells:
        """The cells of some rows; `first` is the line of the first one, for messages.

        Where users are read, the number of rows is private: messages tell no lines and no counts.
        """
        if self.users is not None:
            first = _UNTOLD
        y = self._targets(frame, first) if self.target and self.schema.target else None
        values: list[Vector] = []
        codes: list[Codes] = []
        for column in self.schema.features:
            if column.kind == "category":
                codes.append(self._categories(frame[column.name], column))
            elif column.kind == "date":
                self._dates(frame[column.name], column, first, values, codes)
            else:
                values.append(self._numbers(frame[column.name], column, first))
        n = len(frame)
        return Cells(y, _beside(values, n, np.float64), _beside(codes, n, np.int32))

    def labels(self, frame: pl.DataFrame) -> pl.Series:
        """The users of some rows, those of texts without blanks around them."""
        pl = polars()
        series = frame[str(self.users)]
        if series.dtype == pl.String:
            texts = series.str.strip_chars()
            series = texts.set(texts.is_in(list(self.schema.blanks)), None)
        if series.dtype.is_float():
            series = series.fill_nan(None)
        if series.null_count():
            raise ValueError(
                f"Expected a user in every row, found blanks in column {self.users!r}: nobody's "
                "guarantee would cover these rows. Name their users, or drop them. Nothing was "
                "spent."
            )
        return series

    def _categories(self, series: pl.Series, column: Column) -> Codes:
        found = self._codes(series, column)
        if self.tally is not None:
            blanks, others = ((found == code).sum() for code in (_MISSING, _OTHER))
            self.tally.add(column, int(blanks), int(others))
        return np.maximum(found, _OTHER)

    def _dates(
        self, series: pl.Series, column: Column, first: int, values: list[Vector],
        codes: list[Codes],
    ) -> None:  # fmt: skip
        """The parts of dates, in the order of their columns."""
        pl = polars()
        if series.dtype == pl.String:
            texts = self._known_texts(series, column)
            written = f"like {column.format!r}" if column.format else "like 2024-01-31"
            dates = read_dates(texts, column.format)
            self._require_all(
                texts, dates, column, first, f"dates {written}", "state their `format`"
            )
        elif series.dtype == pl.Date:
            dates = series.cast(pl.Datetime("ms"))  # which holds every day
        elif series.dtype == pl.Datetime:
            dates = series.dt.replace_time_zone(None)
        else:
            raise _wrong_type(series, column, "dates")
        numbers = {
            "days": dates.dt.epoch("ms") / (1000 * SECONDS_OF_DAY),
            "month": dates.dt.month() - 1,
            "weekday": dates.dt.weekday() - 1,
            "hour": dates.dt.hour(),
        }
        days = self._within_bounds(numbers["days"], column, first)
        for part in column.encoded:
            if part.kind == "number":
                values.append(days)
                continue
            name = next(n for n in DATE_PARTS if part.name == f"{column.name} {n}")
            codes.append(numbers[name].cast(pl.Int32).fill_null(_OTHER).to_numpy())

    def _targets(self, frame: pl.DataFrame, first: int) -> Vector:
        column = self.schema.column(str(self.schema.target))
        if column.kind == "number":
            return self._numbers(frame[column.name], column, first)
        codes = self._codes(frame[column.name], column)
        return np.where(codes == _MISSING, math.nan, codes)

    def _numbers(self, series: pl.Series, column: Column, first: int) -> Vector:
        """Numbers, or durations in seconds, within the bounds."""
        pl = polars()
        if column.kind == "duration":
            return self._within_bounds(self._durations(series, column, first), column, first)
        if series.dtype == pl.String:
            numbers = self._read_numbers(series, column, first)
        elif series.dtype.is_numeric() or series.dtype == pl.Boolean:
            numbers = series.cast(pl.Float64)
        else:
            raise _wrong_type(series, column, "numbers")
        return self._within_bounds(numbers, column, first)

    def _durations(self, series: pl.Series, column: Column, first: int) -> pl.Series:
        pl = polars()
        if series.dtype == pl.String:
            texts = self._known_texts(series, column)
            seconds = read_durations(texts)
            wanted = "durations like 1:30:00, 90 min or PT1H30M"
            advice = "make a column of plain numbers, such as seconds, a number"
            self._require_all(texts, seconds, column, first, wanted, advice)
            return seconds
        if series.dtype == pl.Duration:
            return series.dt.total_milliseconds() / 1000
        raise _wrong_type(series, column, "durations")

    def _within_bounds(self, numbers: pl.Series, column: Column, first: int) -> Vector:
        """As an array, within the bounds; blanks as the schema says, those of the target NaN."""
        values = numbers.to_numpy().astype(np.float64)
        blank = np.isnan(values)
        if self.tally is not None:
            self.tally.add(column, int(blank.sum()))
        target = column.name == self.schema.target
        if column.missing is False and not target and blank.any():
            why, advice = (
                "as `missing = false` in the schema says",
                "correct the schema or the file",
            )
            if self.of_model:
                why = "because the model was fitted to a table without blanks in it"
                advice = "fill them in, or drop those rows"
            line = "" if first == _UNTOLD else f", first in line {first + int(blank.argmax())}"
            raise ValueError(
                f"Expected no blanks in column {column.name!r}, {why}, found some{line}: {advice}."
            )
        if column.missing is not None and not target:
            values[blank] = column.missing
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
        if not column.aliases and not self._blank_numbers and not self._pattern:
            # No text that stands for a missing value or needs cleaning reads as a number.
            numbers = series.cast(pl.Float64, strict=False)
            if not numbers.null_count():
                return numbers
        texts = self._known_texts(series, column)
        numbers = plain_numbers(texts, self.schema) if self._pattern else texts
        numbers = numbers.cast(pl.Float64, strict=False)
        self._require_all(
            texts, numbers, column, first, "numbers",
            "list what stands for a missing value as `blanks`, state `decimal` and `thousands` if "
            "numbers are written like 1.234,5",
        )  # fmt: skip
        return numbers

    def _require_all(
        self, texts: pl.Series, read: pl.Series, column: Column, first: int, wanted: str,
        advice: str,
    ) -> None:  # fmt: skip
        """Refuse texts that could not be read. No cell is quoted."""
        if not (wrong := read.null_count() - texts.null_count()):
            return
        line = first + int((texts.is_not_null() & read.is_null()).arg_max() or 0)
        where = "" if first == _UNTOLD else f" in {wrong} rows, first in line {line}"
        told = f"{advice} in the schema, or make the column a category or ignored."
        if self.of_model:
            told = (
                "correct the file, which is read by the schema of the model "
                f"(decimal {self.schema.decimal!r}, thousands {self.schema.thousands!r})."
            )
        raise ValueError(
            f"Expected {wanted} in column {column.name!r}, found other text{where}: {told}"
        )

    @cached_property
    def _pattern(self) -> bool:
        """Whether numbers are written in another way than usual."""
        return (self.schema.decimal, self.schema.thousands) != (".", "")

    def _known_texts(self, series: pl.Series, column: Column) -> pl.Series:
        """Texts; None where they are blank or one of the usual marks of missing values."""
        texts = self._texts(series, column)
        return texts.set(texts.str.to_lowercase().is_in(list(MISSING_MARKS)), None)

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
        if series.dtype in (pl.List, pl.Array, pl.Binary, pl.Duration):
            raise TypeError(
                f"Expected categories in column {column.name!r}, found {series.dtype}: make it "
                "ignored in the schema."
            )
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


def plain_numbers(texts: pl.Series, schema: Schema) -> pl.Series:
    """Numbers in the schema's way of writing them as texts in the usual one; null for others."""
    pl = polars()
    point, group = re.escape(schema.decimal), re.escape(schema.thousands)
    whole = rf"(?:\d{{1,3}}(?:{group}\d{{3}})+|\d+)" if group else r"\d+"
    pattern = rf"^[+-]?(?:{whole}(?:{point}\d*)?|{point}\d+)(?:[eE][+-]?\d+)?$"
    told = texts.set(~texts.str.contains(pattern), None)
    if group:
        told = told.str.replace_all(schema.thousands, "", literal=True)
    return told.str.replace(schema.decimal, ".", literal=True).cast(pl.String)


def _beside(columns: Sequence[Any], rows: int, dtype: Any) -> Any:
    table = np.empty((rows, len(columns)), dtype=dtype)
    for j, column in enumerate(columns):
        table[:, j] = column
    return table


def _wrong_type(series: pl.Series, column: Column, wanted: str) -> TypeError:
    return TypeError(
        f"Expected {wanted} in column {column.name!r}, found {series.dtype}: make it a category or "
        "ignored in the schema."
    )
