"""Which columns of a table a model uses, how it reads them, and which it does not use, and why."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from datetime import UTC, datetime, timedelta

from privagrad.data.columns import Column
from privagrad.data.encoding import encoding_of
from privagrad.data.models import SavedModel
from privagrad.data.schema import Schema
from privagrad.report.page import Block, Table, Text, readable

_FEW = 40
_SHOWN = 6
_LEARNED = "range learned with noise"
_IGNORED = "Ignored columns:"
"""How the note begins that the table makes superfluous."""


def column_blocks(model: SavedModel) -> list[Block]:
    """A table of all columns of the file, and what a user should know about them."""
    schema, hidden = model.schema, set(model.made.get("not_measurable", []))
    if schema is None or len(schema.columns) < 2:
        return [_unnamed(model, hidden)]
    rows = [(column.name, *_use(column, schema, hidden)) for column in schema.columns]
    if math.isinf(model.privacy["epsilon"]):
        rows = [(name, use, told.replace(_LEARNED, "range learned")) for name, use, told in rows]
    used = sum(use.startswith("used") for _, use, _ in rows)
    unused = sum(use.startswith(("ignored", "not used")) for _, use, _ in rows)
    title = f"Columns: {used:,} used, {unused:,} not used"
    blocks: list[Block] = [
        Table(title, ("column", "use", "read as"), rows, collapsed=len(rows) > _FEW)
    ]
    notes = [note for note in model.made.get("notes", []) if not note.startswith(_IGNORED)]
    return [*blocks, Text("Notes on columns", notes)] if notes else blocks


def _unnamed(model: SavedModel, hidden: Collection[str]) -> Text:
    """Of arrays and LIBSVM files, which have no schema."""
    count = len(model.features)
    lines = [f"All {count:,} columns are used, as numbers." if count > 1 else
             "The one column is used, as a number."]  # fmt: skip
    if hidden:
        lines.append(f"Not measurable, because too few rows have them: {_few(sorted(hidden))}.")
    return Text("Columns", lines)


def _use(column: Column, schema: Schema, hidden: Collection[str]) -> tuple[str, str]:
    """Whether a column is used, and how it is read."""
    if column.name == schema.target:
        return "target", _target(column)
    if column.kind == "ignore":
        return "ignored: the schema says so", "–"
    if column.kind == "user":
        return "names the user of each row, who is protected", "–"
    names = encoding_of(Schema((column,))).names
    if not names:
        return "not used: no category was frequent enough to be discovered", "category"
    lost = [name for name in names if name in hidden]
    use = "used"
    if len(lost) == len(names):
        use = "used, but not measurable: too few rows have it"
    elif lost == [column.indicator]:
        use = "used; too few blanks to learn from them"
    elif lost:
        use = f"used; too few rows to measure {_few(lost)}"
    return use, "; ".join(_reading(column))


def _target(column: Column) -> str:
    if column.kind == "category":
        return f"{len(column.categories)} classes" if column.categories else "classes"
    return f"number, {_bounds(column)}"


def _reading(column: Column) -> Iterator[str]:
    """The encoding of a column in short."""
    if column.kind == "category":
        yield f"{_count(len(column.categories))}: {_few(column.categories)}"
        return
    if column.kind == "date":
        yield "date: " + ", ".join(
            part.name.removeprefix(f"{column.name} ").removeprefix("in ") for part in column.encoded
        )
    else:
        yield "duration in seconds" if column.kind == "duration" else "number"
    if any(part.kind == "number" for part in column.encoded):
        yield _bounds(column)
    if column.indicator is not None:
        yield "a column of its own for blanks"
    elif column.missing is not False:
        yield f"missing counts as {readable(column.missing)}"


def _count(categories: int) -> str:
    return f"{categories:,} categories" if categories != 1 else "1 category"


def _bounds(column: Column) -> str:
    low, high = (_edge(column, edge) for edge in (column.low, column.high))
    if column.low is None and column.high is None:
        return _LEARNED
    if column.low is None or column.high is None:
        return f"at most {high} (stated)" if column.low is None else f"at least {low} (stated)"
    return f"{low} to {high} (stated)"


def _edge(column: Column, value: float | None) -> str:
    if value is not None and column.kind == "date":
        return f"{datetime.fromtimestamp(0, UTC) + timedelta(days=value):%Y-%m-%d}"
    return readable(value)


def _few(names: Collection[str]) -> str:
    shown = [name.strip() or "–" for name in list(names)[:_SHOWN]]
    more = f" and {len(names) - _SHOWN:,} more" if len(names) > _SHOWN else ""
    return ", ".join(shown) + more
