"""The schema of a table as a TOML file, and as values of a model's file."""

from __future__ import annotations

import codecs
import json
import math
import re
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields, replace
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

from privagrad.data.columns import (
    DATE_PARTS,
    KINDS,
    MISSING_MARKS,
    Column,
    Kind,
    Schema,
    did_you_mean,
)

__all__ = [
    "KINDS",
    "MISSING_MARKS",
    "Column",
    "Kind",
    "Schema",
    "as_values",
    "did_you_mean",
    "encoding_named",
    "from_values",
    "read_schema",
    "template",
]

_FILE = ("separator", "header", "blanks", "encoding", "decimal", "thousands", "sheet")
_WHOLE_DATE = re.compile(r"%[YyFDs]")
_KIND_HELP = "number, category, boolean, date, duration, ignore or user"


def read_schema(path: Path) -> Schema:
    """A schema from a TOML file; every problem is named at once."""
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise FileNotFoundError(
            f"Expected a schema, found nothing at {path}. Write one: "
            f"privagrad schema TABLE -o {path}"
        ) from None
    except (ValueError, RecursionError) as error:  # TOML, UTF-8, numbers of many digits
        raise ValueError(f"Expected TOML in {path.name}, found: {error}.") from error
    problems: list[str] = []
    given = values.get("column", [])
    if not isinstance(given, list) or not given:
        raise ValueError(f"Expected [[column]] entries in {path.name}, found none.")
    columns = [_column(entry, number, problems) for number, entry in enumerate(given, start=1)]
    names = [column.name for column in columns]
    twice = sorted(name for name, count in Counter(names).items() if count > 1)
    problems += [f"column {name!r} stands there twice" for name in twice]
    users = [column.name for column in columns if column.kind == "user"]
    if len(users) > 1:
        problems.append(f"more than one column of kind 'user': {', '.join(map(repr, users))}")
    target = values.get("target") or None
    if target in users:
        problems.append(f"target {target!r} is the column of users")
    if target is not None and target not in names:
        problems.append(f"target {target!r} is no column.{did_you_mean(str(target), names)}")
    file = _file(values.get("file", {}), problems)
    _table(values, path.name, ("column", "target", "file"), problems)
    if problems:
        raise ValueError(f"Expected a schema in {path.name}, found: " + "; ".join(problems) + ".")
    return replace(file, columns=tuple(columns), target=target)


def _file(given: Any, problems: list[str]) -> Schema:
    """How the file is written: a schema without columns."""
    file = _table(given, "file", _FILE, problems)
    told: dict[str, Any] = {
        key: file[key] for key in ("separator", "encoding", "decimal", "thousands", "sheet")
        if key in file
    }  # fmt: skip
    for key, value in told.items():
        if not isinstance(value, str):
            problems.append(f"file: {key} must be a text, found {value!r}")
            return Schema(())
    header = file.get("header", True)
    if not isinstance(header, bool):
        problems.append(f"file: header must be true or false, found {header!r}")
    marks = tuple(dict.fromkeys(["", *_texts(file.get("blanks", []), "file: blanks", problems)]))
    told["sheet"] = told.get("sheet") or None
    found = Schema((), header=bool(header), blanks=marks, **told)
    if len(found.separator) != 1:
        problems.append(f"file: separator must be one character, found {found.separator!r}")
    if found.decimal not in (".", ","):
        problems.append(f'file: decimal must be "." or ",", found {found.decimal!r}')
    if len(found.thousands) > 1 or found.thousands in (found.decimal, *"+-eE0123456789"):
        problems.append(
            f"file: thousands must be one character, and not the decimal point, or empty; found "
            f"{found.thousands!r}"
        )
    try:
        encoding_named(found.encoding)
    except ValueError as error:
        problems.append(f"file: encoding: {str(error).rstrip('.')}")
    return found


def encoding_named(name: str) -> str:
    """The usual name of a text encoding that Python knows."""
    try:
        if codecs.lookup(name)._is_text_encoding:
            return codecs.lookup(name).name
    except LookupError:
        pass
    raise ValueError(
        f"Expected an encoding such as utf-8, latin-1, cp1252 or utf-16, found {name!r}."
    )


def _column(given: Any, number: int, problems: list[str]) -> Column:
    name = given.get("name") if isinstance(given, dict) else None
    where = f"column {number if name is None else name!r}"
    entry = _table(given, where, [f.name for f in fields(Column)], problems)
    if not isinstance(name, str):
        problems.append(f"{where}: needs a name")
    kind = entry.get("kind", "number")
    if kind not in (*KINDS, "boolean"):
        problems.append(f"{where}: kind must be {_KIND_HELP}, found {kind!r}")
        return Column(str(name), "ignore")  # what else is wrong depends on the kind
    low, high, missing = (
        _number(entry.get(key), kind, f"{where}: {key}", problems)
        for key in ("low", "high", "missing")
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
    if kind == "boolean":
        boolean = Column.boolean(str(name), texts)
        kind, categories, texts = boolean.kind, boolean.categories, dict(boolean.aliases)
    written = _format(entry.get("format"), kind, where, problems)
    parts = _parts(entry.get("parts", []), kind, where, problems)
    return Column(str(name), kind, low, high, missing, categories, texts, written, parts)


def _format(given: Any, kind: str, where: str, problems: list[str]) -> str | None:
    if given is None:
        return None
    if kind != "date":
        problems.append(f"{where}: format is for dates, found it for kind {kind!r}")
    elif not isinstance(given, str) or not _WHOLE_DATE.search(given):
        problems.append(f'{where}: format must be like "%d/%m/%Y", found {given!r}')
    elif re.search(r"%[:#]?z.", given):
        problems.append(f"{where}: %z must be the end of format, found {given!r}")
    else:
        return given
    return None


def _parts(given: Any, kind: str, where: str, problems: list[str]) -> tuple[str, ...]:
    parts = _texts(given, f"{where}: parts", problems)
    if parts and kind != "date":
        problems.append(f"{where}: parts are for dates, found them for kind {kind!r}")
    problems += [
        f"{where}: parts must be of {', '.join(DATE_PARTS)}, found {part!r}"
        for part in parts
        if part not in DATE_PARTS
    ]
    return parts


def _table(given: Any, where: str, known: Iterable[str], problems: list[str]) -> dict[str, Any]:
    """A table of known entries."""
    if not isinstance(given, dict):
        problems.append(f"{where}: must be a table of entries, found {given!r}")
        return {}
    problems += [f"{where}: unknown entry {name!r}" for name in sorted(set(given) - set(known))]
    return given


def _number(value: Any, kind: str, where: str, problems: list[str]) -> Any:
    """A finite number; of dates, as days since 1970. `missing` may be false, or true: as usual."""
    if value is None or (isinstance(value, bool) and where.endswith("missing")):
        return False if value is False else None
    if kind == "date" and isinstance(value, date):
        moment = datetime.fromisoformat(value.isoformat()).replace(tzinfo=UTC)
        return moment.timestamp() / 86_400
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if kind == "date" or not number or not math.isfinite(value):
        wanted = "a date like 2024-01-31, without quotes" if kind == "date" else "a finite number"
        problems.append(f"{where} must be {wanted}, found {value!r}")
        return None
    return float(value)


def _texts(value: Any, where: str, problems: list[str]) -> tuple[str, ...]:
    if not isinstance(value, list):
        problems.append(f"{where} must be a list, found {value!r}")
        return ()
    return tuple(str(item) for item in value)


def template(schema: Schema, table: str) -> str:
    """A schema to fill in, from names and kinds."""
    lines = [
        f"# What is public about {table}. In a text or Excel file, the kinds and the way to write",
        "# numbers were guessed from its first 10,000 rows, and using them makes public whether",
        "# all entries there read as numbers or dates: keep what you would have stated anyway.",
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
        *_written(schema),
    ]
    for column in schema.columns:
        lines += ["", "[[column]]", f"name = {_quoted(column.name)}"]
        lines.append(f"kind = {_quoted(column.kind)}  # {_KIND_HELP}")
        lines += _stated(column, _entries(column))
    return "\n".join(lines) + "\n"


def _written(schema: Schema) -> list[str]:
    """How the file is written, where that is not the usual way."""
    usual, lines = Schema(()), []
    if schema.encoding != usual.encoding:
        lines.append(f"encoding = {_quoted(schema.encoding)}")
    if (schema.decimal, schema.thousands) != (usual.decimal, usual.thousands):
        lines += [
            "# The first rows look as if numbers were written like this. Check it:",
            f"decimal = {_quoted(schema.decimal)}",
            f"thousands = {_quoted(schema.thousands)}",
        ]
    if schema.sheet is not None:
        lines.append(f"sheet = {_quoted(schema.sheet)}")
    return lines


def _entries(column: Column) -> list[str]:
    """The entries of a column, most of them to be filled in."""
    never = "# missing = false  # if it is public knowledge that it is never blank"
    if column.kind == "user":
        return []
    if column.kind == "number":
        return [
            "# low = 0.0      # with bounds for all columns no budget goes to finding ranges",
            "# high = 100.0",
            never,
        ]
    if column.kind in ("date", "duration"):
        low, high = ("2000-01-01", "2030-12-31") if column.kind == "date" else ("0", "86400")
        bounds = [f"# low = {low}", f"# high = {high}", never]
        if column.kind == "duration":
            return ["# bounds are in seconds", *bounds]
        parts = f"parts = [{', '.join(map(_quoted, column.parts))}]  # of {', '.join(DATE_PARTS)}"
        return [parts, '# format = "%d/%m/%Y"  # if not like 2024-01-31 or 31.01.2024', *bounds]
    told = "all that can occur; empty: discovered from the same budget"
    return [
        f"categories = [{', '.join(map(_quoted, column.categories))}]  # {told}",
        '# aliases = { "another spelling" = "a category" }',
    ]


def _stated(column: Column, lines: list[str]) -> list[str]:
    """The entries of a column with what it states instead of the examples."""
    told = {
        f"# {key} = ": f"{key} = {_value(column, value)}"
        for key in ("low", "high", "missing")
        if (value := getattr(column, key)) is not None
    }
    return [next((told[start] for start in told if line.startswith(start)), line) for line in lines]


def _value(column: Column, value: float | bool) -> str:
    if value is False or column.kind != "date":
        return "false" if value is False else repr(float(value))
    moment = datetime.fromtimestamp(0, UTC) + timedelta(days=value)
    return (moment.date() if value == int(value) else moment.replace(tzinfo=None)).isoformat()


def _quoted(text: str) -> str:
    """A TOML basic string: JSON's escapes are among TOML's."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def as_values(schema: Schema) -> dict[str, Any]:
    """Plain values, for a model's file."""
    values = asdict(schema)
    del values["libsvm"]
    return values


def from_values(values: Mapping[str, Any], *, indicators: bool = True) -> Schema:
    """The schema of a model's file; until version 1 there were no `indicators` of blanks."""
    columns = []
    for entry in values["columns"]:
        lists = {key: tuple(entry.get(key, ())) for key in ("categories", "parts")}
        column = Column(**{**entry, **lists})
        if not indicators and column.missing is None:
            low, high = column.low, column.high
            middle = 0.0 if low is None or high is None else (low + high) / 2
            column = replace(column, missing=middle)
        columns.append(column)
    return Schema(**{**values, "columns": tuple(columns), "blanks": tuple(values["blanks"])})
