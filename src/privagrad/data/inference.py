"""The kinds of columns, from the types of a file or from how its first rows are written."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from privagrad.data._polars import polars
from privagrad.data.columns import USUAL_PARTS
from privagrad.data.parsing import plain_numbers
from privagrad.data.schema import MISSING_MARKS, Column, Schema
from privagrad.data.times import looks_like_dates

if TYPE_CHECKING:
    import polars as pl

_USUAL = (".", "")
_STYLES = ((",", ""), (",", "."), (",", " "), (".", ","), (".", "'"))
"""Ways to write numbers besides the usual one: decimal point and separator of thousands."""


def typed_column(name: str, dtype: Any) -> Column:
    pl = polars()
    if dtype.is_numeric():
        return Column(name)
    if dtype == pl.Boolean:
        return Column(name, "category", categories=("false", "true"))
    if dtype in (pl.Date, pl.Datetime):
        hour = ("hour",) if dtype == pl.Datetime else ()
        return Column(name, "date", parts=(*USUAL_PARTS, *hour))
    return Column(name, "duration" if dtype == pl.Duration else "category")


def text_column(texts: pl.Series, schema: Schema) -> Column:
    """Numbers or dates where all texts but blanks and the usual marks of missing values are.

    The parts of a date are the same whatever the texts hold.
    """
    known = _known(texts)
    if are_numbers(texts, schema):
        return Column(texts.name)
    if looks_like_dates(known):
        return Column(texts.name, "date", parts=USUAL_PARTS)
    return Column(texts.name, "category")


def are_numbers(texts: pl.Series, schema: Schema | None = None) -> bool:
    known = _known(texts)
    if not len(known) and len(not_blank(texts)):
        return False
    usual = schema is None or (schema.decimal, schema.thousands) == _USUAL
    plain = known if schema is None or usual else plain_numbers(known, schema)
    return not plain.cast(polars().Float64, strict=False).null_count()


def _known(texts: pl.Series) -> pl.Series:
    """Texts that are neither blank nor one of the usual marks of missing values."""
    told = not_blank(texts)
    return told.filter(~told.str.to_lowercase().is_in(list(MISSING_MARKS)))


def number_style(columns: list[pl.Series]) -> tuple[str, str]:
    """The decimal point and the separator of thousands that make numbers of the most columns.

    The usual ones where others are no better, or where 1,234 may mean either.
    """
    usual = Schema(())
    plain: list[pl.Series] = []
    strange: list[pl.Series] = []
    for column in columns:
        if len(_known(column)):
            (plain if are_numbers(column) else strange).append(column)
    styles = [replace(usual, decimal=d, thousands=t) for d, t in _STYLES]
    counts = [sum(are_numbers(column, style) for column in strange) for style in styles]
    best = [style for style, count in zip(styles, counts, strict=True) if count == max(counts)]
    # Columns that are numbers in the usual way must stay numbers.
    stay = all(are_numbers(column, best[0]) for column in plain)
    if not max(counts) or len({style.decimal for style in best}) > 1 or not stay:
        return _USUAL
    return best[0].decimal, best[0].thousands


def not_blank(texts: pl.Series) -> pl.Series:
    texts = texts.str.strip_chars()
    return texts.filter(texts.is_not_null() & (texts != ""))


def tells_of_a_header(texts: pl.Series) -> bool:
    """Whether these are numbers or dates, below a text that is neither."""
    return are_numbers(texts) or looks_like_dates(_known(texts))
