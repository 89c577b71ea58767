"""What is public about a table: its columns, their kinds, bounds and categories; kept as TOML."""

from __future__ import annotations

import difflib
import json
import math
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args

Kind = Literal["number", "category", "ignore"]
KINDS: tuple[Kind, ...] = get_args(Kind)
MISSING_MARKS = frozenset(
    ("?", "-", "--", ".", "na", "n/a", "#n/a", "nan", "null", "none", "nil", "missing", "unknown")
)
"""What usually stands for a missing number, in small letters."""


@dataclass(frozen=True)
class Column:
    """One column of the file.

    Attributes
    ----------
    name : str
    kind : {"number", "category", "ignore"}
    low, high : float or None
        Bounds of a number, known without looking: entries beyond are brought to them.
    missing : float or None
        What a blank number counts as; None: the middle of the bounds, or 0.
    categories : tuple of str
        What a category can be; empty: to be discovered privately. Blanks and anything else count
        as none of them.
    aliases : mapping of str to str
        Other spellings: {"<=50K.": "<=50K"}.
    """

    name: str
    kind: Kind = "number"
    low: float | None = None
    high: float | None = None
    missing: float | None = None
    categories: tuple[str, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)

    @property
    def bounded(self) -> bool:
        return self.low is not None and self.high is not None

    @property
    def fill(self) -> float:
        """What a blank number counts as."""
        if self.missing is not None:
            return self.missing
        return (self.low + self.high) / 2 if self.low is not None and self.high is not None else 0.0


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
    """

    columns: tuple[Column, ...]
    target: str | None = None
    separator: str = ","
    header: bool = True
    blanks: tuple[str, ...] = ("",)
    libsvm: bool = False

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
        return tuple(c for c in self.columns if c.kind != "ignore" and c.name != self.target)

    def with_columns(self, changed: Iterable[Column]) -> Schema:
        """The same with some columns replaced, by name."""
        new = {column.name: column for column in changed}
        return replace(self, columns=tuple(new.get(c.name, c) for c in self.columns))


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A hint: the nearest of the known names, or the first of them."""
    names = list(known)
    if near := difflib.get_close_matches(name, names, n=1):
        return f" Did you mean {near[0]!r}?"
    shown = ", ".join(names[:12]) + (", ..." if len(names) > 12 else "")
    return f" Columns: {shown}."


def read_schema(path: Path) -> Schema:
    """A schema from a TOML file; every problem is named at once."""
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise FileNotFoundError(
            f"Expected a schema, found nothing at {path}. Write one: "
            f"privagrad schema TABLE -o {path}"
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"Expected TOML in {path.name}, found: {error}.") from error
    problems: list[str] = []
    given = values.get("column", [])
    if not isinstance(given, list) or not given:
        raise ValueError(f"Expected [[column]] entries in {path.name}, found none.")
    columns = [_column(entry, number, problems) for number, entry in enumerate(given, start=1)]
    names = [column.name for column in columns]
    twice = sorted(name for name, count in Counter(names).items() if count > 1)
    problems += [f"column {name!r} stands there twice" for name in twice]
    target = values.get("target") or None
    if target is not None and target not in names:
        problems.append(f"target {target!r} is no column.{did_you_mean(str(target), names)}")
    file = _table(values.get("file", {}), "file", ("separator", "header", "blanks"), problems)
    separator = file.get("separator", ",")
    if not isinstance(separator, str) or len(separator) != 1:
        problems.append(f"file: separator must be one character, found {separator!r}")
    blanks = _texts(file.get("blanks", []), "file: blanks", problems)
    _table(values, path.name, ("column", "target", "file"), problems)
    if problems:
        raise ValueError(f"Expected a schema in {path.name}, found: " + "; ".join(problems) + ".")
    marks = tuple(dict.fromkeys(["", *blanks]))
    return Schema(tuple(columns), target, separator, bool(file.get("header", True)), marks)


def _column(given: Any, number: int, problems: list[str]) -> Column:
    name = given.get("name") if isinstance(given, dict) else None
    where = f"column {number if name is None else name!r}"
    entry = _table(given, where, [f.name for f in fields(Column)], problems)
    if not isinstance(name, str):
        problems.append(f"{where}: needs a name")
    kind = entry.get("kind", "number")
    if kind not in KINDS:
        problems.append(f"{where}: kind must be one of {', '.join(KINDS)}, found {kind!r}")
    low, high, missing = (
        _number(entry.get(key), f"{where}: {key}", problems) for key in ("low", "high", "missing")
    )
    if low is not None and high is not None and low >= high:
        problems.append(f"{where}: low must be below high, found {low:g} and {high:g}")
    categories = _texts(entry.get("categories", []), f"{where}: categories", problems)
    if len(set(categories)) < len(categories):
        problems.append(f"{where}: a category stands there twice")
    aliases = entry.get("aliases", {})
    if not isinstance(aliases, dict):
        problems.append(f'{where}: aliases must be a table, {{ "spelling" = "category" }}')
        aliases = {}
    texts = {str(key): str(value) for key, value in aliases.items()}
    return Column(str(name), kind, low, high, missing, categories, texts)


def _table(given: Any, where: str, known: Iterable[str], problems: list[str]) -> dict[str, Any]:
    """A table of known entries."""
    if not isinstance(given, dict):
        problems.append(f"{where}: must be a table of entries, found {given!r}")
        return {}
    problems += [f"{where}: unknown entry {name!r}" for name in sorted(set(given) - set(known))]
    return given


def _number(value: Any, where: str, problems: list[str]) -> float | None:
    if value is None:
        return None
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not math.isfinite(value):
        problems.append(f"{where} must be a finite number, found {value!r}")
        return None
    return float(value)


def _texts(value: Any, where: str, problems: list[str]) -> tuple[str, ...]:
    if not isinstance(value, list):
        problems.append(f"{where} must be a list, found {value!r}")
        return ()
    return tuple(str(item) for item in value)


def template(schema: Schema, table: str) -> str:
    """A schema to fill in, from names and types alone."""
    lines = [
        f"# What is public about {table}. It was written from the header and the types alone.",
        "# Fill in what you know WITHOUT looking at the rows: from the codebook, the law, common",
        "# sense. Whatever you take from the rows is not protected.",
        "",
        f"target = {_quoted(schema.target or '')}",
        "",
        "[file]",
        f"separator = {_quoted(schema.separator)}",
        f"header = {'true' if schema.header else 'false'}",
        "# What stands for a missing value:",
        f"blanks = [{', '.join(_quoted(blank) for blank in schema.blanks)}]",
    ]
    for column in schema.columns:
        lines += ["", "[[column]]", f"name = {_quoted(column.name)}"]
        lines.append(f"kind = {_quoted(column.kind)}  # number, category or ignore")
        if column.kind == "number":
            lines += [
                "# low = 0.0      # with bounds for all columns no budget goes to finding ranges",
                "# high = 100.0",
                "# missing = 0.0  # what a blank counts as",
            ]
        else:
            lines += [
                "categories = []  # all that can occur; empty: discovered from the same budget",
                '# aliases = { "another spelling" = "a category" }',
            ]
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    """A TOML basic string: JSON's escapes are among TOML's."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def as_values(schema: Schema) -> dict[str, Any]:
    """Plain values, for a model's file."""
    values = asdict(schema)
    del values["libsvm"]
    return values


def from_values(values: Mapping[str, Any]) -> Schema:
    columns = tuple(
        Column(**{**entry, "categories": tuple(entry["categories"])}) for entry in values["columns"]
    )
    return Schema(**{**values, "columns": columns, "blanks": tuple(values["blanks"])})
