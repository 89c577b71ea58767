"""What is public about a table: its columns, their kinds, bounds and categories."""

from __future__ import annotations

import calendar
import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, Self, get_args

Kind = Literal["number", "category", "date", "duration", "ignore", "user"]
KINDS: tuple[Kind, ...] = get_args(Kind)
MISSING_MARKS = frozenset(
    ("?", "-", "--", ".", "na", "n/a", "#n/a", "nan", "null", "none", "nil", "missing", "unknown")
)
"""What usually stands for a missing number, date or duration, in small letters."""

DATE_PARTS: Mapping[str, tuple[str, ...]] = {
    "days": (),
    "month": tuple(calendar.month_name)[1:],
    "weekday": tuple(calendar.day_name),
    "hour": tuple(str(hour) for hour in range(24)),
}
"""What a date is read as: days since 1970 as a number, and categories."""

_BOOLEANS = {"false": ("no", "f", "n", "off", "0"), "true": ("yes", "t", "y", "on", "1")}
USUAL_PARTS = ("days", "month", "weekday")
"""What is used of a date whose `parts` are not stated."""


@dataclass(frozen=True)
class Column:
    """One column of the file.

    Attributes
    ----------
    name : str
    kind : {"number", "category", "date", "duration", "ignore", "user"}
        "user": it names the user of each row, is no feature, and makes a fit protect users.
    low, high : float or None
        Bounds of a number, of a date in days since 1970, or of a duration in seconds, known
        without looking: entries beyond are brought to them.
    missing : float, False or None
        What a blank counts as. None: as the column's centre, which is learned, and a further column
        says which ones are blank. False: it is public knowledge that there are none.
    categories : tuple of str
        What a category can be; empty: to be discovered privately. Blanks and anything else count
        as none of them.
    aliases : mapping of str to str
        Other spellings: {"<=50K.": "<=50K"}.
    format : str or None
        How dates are written, as for `strptime`; None: one of the usual ways.
    parts : tuple of str
        What of a date is used, of `DATE_PARTS`; empty: days, month and weekday.
    """

    name: str
    kind: Kind = "number"
    low: float | None = None
    high: float | None = None
    missing: float | Literal[False] | None = None
    categories: tuple[str, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)
    format: str | None = None
    parts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(
                f"Expected a kind of column {self.name!r} among {', '.join(KINDS)}, found "
                f"{self.kind!r}. For true and false: Column.boolean(name)."
            )

    @classmethod
    def boolean(cls, name: str, aliases: Mapping[str, str] | None = None) -> Self:
        """A category that is true or false, in the usual spellings."""
        spelled = {
            spelling: value
            for value, others in _BOOLEANS.items()
            for text in (value, *others)
            for spelling in (text, text.upper(), text.capitalize())
            if spelling != value
        }
        return cls(
            name, "category", categories=tuple(_BOOLEANS), aliases=spelled | dict(aliases or {})
        )

    @property
    def bounded(self) -> bool:
        return self.low is not None and self.high is not None

    @property
    def encoded(self) -> tuple[Column, ...]:
        """What it is read as: numbers and categories, with names of their own."""
        if self.kind == "duration":
            return (replace(self, name=f"{self.name} in seconds", kind="number"),)
        if self.kind != "date":
            return (self,)
        parts = self.parts or USUAL_PARTS
        days = replace(self, name=f"{self.name} in days", kind="number")
        return tuple(
            Column(f"{self.name} {part}", "category", categories=values) if values else days
            for part, values in DATE_PARTS.items()
            if part in parts
        )

    @property
    def indicator(self) -> str | None:
        """The name of the column that says which entries are blank, if it has one."""
        return f"{self.name} is missing" if self.missing is None else None


@dataclass(frozen=True)
class Schema:
    """The columns of a table in the file's order, its target, and how the file is written.

    Attributes
    ----------
    columns : tuple of Column
    target : str or None
        The name of the column to predict.
    separator : str
        Between the cells of a text file.
    header : bool
        Whether the first line of a text file names the columns.
    blanks : tuple of str
        What stands for a missing value.
    libsvm : bool
        A LIBSVM file: the label is the only column with a name.
    encoding : str
        That of a text file.
    decimal, thousands : str
        The decimal point of numbers in text, and what separates groups of three digits, or "".
    sheet : str or None
        Of an Excel file with several.
    """

    columns: tuple[Column, ...]
    target: str | None = None
    separator: str = ","
    header: bool = True
    blanks: tuple[str, ...] = ("",)
    libsvm: bool = False
    encoding: str = "utf-8"
    decimal: str = "."
    thousands: str = ""
    sheet: str | None = None

    def column(self, name: str) -> Column:
        for column in self.columns:
            if column.name == name:
                return column
        raise ValueError(
            f"Expected one of the table's columns, found {name!r}."
            f"{did_you_mean(name, (c.name for c in self.columns))}"
        )

    @property
    def features(self) -> tuple[Column, ...]:
        unused = ("ignore", "user")
        return tuple(c for c in self.columns if c.kind not in unused and c.name != self.target)

    @property
    def user(self) -> str | None:
        """The name of the column that names the user of each row, if there is one."""
        return next((c.name for c in self.columns if c.kind == "user"), None)

    def with_user(self, name: str) -> Schema:
        """The same where this column, and no other, names the user of each row."""
        if self.libsvm:
            raise ValueError(
                f"Expected a table with named columns for users, found a LIBSVM file without "
                f"{name!r}: write it as CSV or Parquet."
            )
        if self.user not in (None, name):
            raise ValueError(
                f"Expected the schema's column of users, {self.user!r}, found {name!r}: name one."
            )
        if name == self.target:
            raise ValueError(f"Expected another column of users than the target {name!r}.")
        self.column(name)
        return self.with_columns([Column(name, "user")])

    @property
    def encoded(self) -> tuple[Column, ...]:
        """What the features are read as: numbers and categories alone."""
        return tuple(part for column in self.features for part in column.encoded)

    @property
    def undiscovered(self) -> tuple[str, ...]:
        """Columns whose categories are to be discovered, the target the last of them."""
        columns = (*self.features, self.column(str(self.target)))
        return tuple(c.name for c in columns if c.kind == "category" and not c.categories)

    def with_columns(self, changed: Iterable[Column]) -> Schema:
        """The same with some columns replaced, by name."""
        new = {column.name: column for column in changed}
        return replace(self, columns=tuple(new.get(c.name, c) for c in self.columns))


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A hint: the nearest of the known names, or the first of them."""
    names = list(known)
    if near := difflib.get_close_matches(name, names, n=1):
        return f" Did you mean {near[0]!r}?"
    more = f" and {len(names) - 12} more" if len(names) > 12 else ""
    return f" Columns: {', '.join(names[:12])}{more}."
