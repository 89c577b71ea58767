"""Dates and durations in text: by public rules alone, whatever the other rows hold."""

from __future__ import annotations

import re
from itertools import product
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import polars as pl

SECONDS_OF_DAY = 86_400.0
_DATES = ("%Y-%m-%d", "%Y/%m/%d", "%d.%m.%Y", "%d %b %Y", "%d %B %Y", "%b %d, %Y", "%B %d, %Y")
_TIMES = ("", " %H:%M:%S%.f", " %H:%M")
_DEFAULT = tuple(day + time for day, time in product(_DATES, _TIMES))
_OFFSET = r"(:[0-9]{2}(?:\.[0-9]+)?)\s*(?:Z|UTC|[+-][0-9]{2}:?[0-9]{2})$"
"""A time zone after a time: hours and weekdays are those of the clock on the wall."""

_ZONE_OF_FORMAT = re.compile(r"\s*%[:#]?z$")
_ZONE = r"\s*(?:Z|UTC|[+-][0-9]{2}(?::?[0-9]{2})?)$"
"""A time zone at the end of a format, and of a text in it."""

_EARLY_YEAR = r"(?:^|[^0-9])0[0-9]{3}(?:[^0-9]|$)"
_T = r"^([0-9]{4}-[0-9]{1,2}-[0-9]{1,2})T([0-9])"
"""Between the day and the time of ISO 8601."""

_DAY = r"(?:[0-9]{4}-[0-9]{2}-[0-9]{2}|[0-9]{1,2}\.[0-9]{1,2}\.[0-9]{4})"
_DATE = rf"^{_DAY}(?:[T ][0-9]{{2}}:[0-9]{{2}}.*)?$"

_UNITS = {"w": 7 * SECONDS_OF_DAY, "d": SECONDS_OF_DAY, "h": 3600.0, "m": 60.0, "s": 1.0}
_AMOUNT = r"[0-9]+(?:\.[0-9]+)?"
_SPELLINGS = {
    "w": "w|weeks?", "d": "d|days?", "h": "h|hrs?|hours?", "m": "m|mins?|minutes?",
    "s": "s|secs?|seconds?",
}  # fmt: skip
_WORDS = r"[\s,]*".join(
    rf"(?:(?P<{unit}>{_AMOUNT})\s*(?:{names})\b)?" for unit, names in _SPELLINGS.items()
)
_DURATIONS = (
    r"(?i)^(?P<sign>-)?(?:(?P<d>[0-9]+)\s*(?:d|days?)[\s,]+)?(?P<h>[0-9]+):(?P<m>[0-5][0-9]):"
    r"(?P<s>[0-5][0-9](?:\.[0-9]+)?)$",
    rf"(?i)^(?P<sign>-)?{_WORDS}$",
    rf"^(?P<sign>-)?P(?:(?P<w>{_AMOUNT})W)?(?:(?P<d>{_AMOUNT})D)?"
    rf"(?:T(?:(?P<h>{_AMOUNT})H)?(?:(?P<m>{_AMOUNT})M)?(?:(?P<s>{_AMOUNT})S)?)?$",
)


def read_dates(texts: pl.Series, written: str | None = None) -> pl.Series:
    """Moments on the wall's clock; null where a text is no date.

    Without a format: ISO 8601, 2024/01/31, 31.01.2024, 31 Jan 2024 or Jan 31, 2024, optionally with
    a time. 01/02/2024 is none of them, because nobody knows which of its numbers is the month; nor
    is 31.01.24, whose year `%y` in a format reads. An offset from UTC is left out.
    """
    if written is not None:
        bare = _ZONE_OF_FORMAT.sub("", written)
        if bare != written:
            zoned = texts.str.contains(_ZONE)
            texts = texts.str.replace(_ZONE, "").set(~zoned, None)
        return _with_whole_years(texts, texts.str.to_datetime(bare, strict=False, time_unit="us"))
    texts = texts.str.replace(_OFFSET, "${1}").str.replace(_T, "$1 $2")
    found = texts.str.to_datetime(_DEFAULT[0], strict=False, time_unit="us")
    for format_ in _DEFAULT[1:]:
        left = found.is_null() & texts.is_not_null()
        if not left.any():
            break
        some = texts.filter(left).str.to_datetime(format_, strict=False, time_unit="us")
        found = found.scatter(left.arg_true(), some)
    return _with_whole_years(texts, found)


def _with_whole_years(texts: pl.Series, dates: pl.Series) -> pl.Series:
    """Null where a year has less than four digits: `%Y` reads 31.01.24 as one of the year 24."""
    short = (dates.dt.year() < 1000) & ~texts.str.contains(_EARLY_YEAR)
    return dates.set(short.fill_null(False), None)


def read_durations(texts: pl.Series) -> pl.Series:
    """Seconds; null where a text is no duration.

    1:30:00, 2 days 1:30:00, 90 min, 1h 30m, PT1H30M. 1:30 is none, because nobody knows whether it
    means hours or minutes; nor are months and years, which differ in length.
    """
    found = _seconds(texts, _DURATIONS[0])
    for pattern in _DURATIONS[1:]:
        found = found.zip_with(found.is_not_null(), _seconds(texts, pattern))
    return found


def _seconds(texts: pl.Series, pattern: str) -> pl.Series:
    import polars as pl

    groups = texts.str.extract_groups(pattern).struct.unnest()
    units = [unit for unit in _UNITS if unit in groups.columns]
    amounts = groups.select(pl.col(u).cast(pl.Float64, strict=False) * _UNITS[u] for u in units)
    total = amounts.select(
        pl.when(pl.any_horizontal(pl.all().is_not_null())).then(pl.sum_horizontal(pl.all()))
    ).to_series()
    sign = groups["sign"].is_not_null()
    return total.zip_with(~sign, -total)


def looks_like_dates(texts: pl.Series) -> bool:
    """Whether all texts are dates like 2024-01-31 or 31.01.2024, with or without a time."""
    dates = texts.str.contains(_DATE).all()
    return bool(len(texts)) and bool(dates) and not read_dates(texts).null_count()
