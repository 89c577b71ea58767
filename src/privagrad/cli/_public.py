"""Questions about what is public of a table: target, kinds, bounds, categories, blanks."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from privagrad.cli import _questions as read
from privagrad.cli._output import say, show_table
from privagrad.cli._questions import Questions

if TYPE_CHECKING:
    from privagrad.data.schema import Column, Schema
    from privagrad.fitting import Task

_TARGETS = ("target", "label", "class", "outcome", "y")


def ask_target(
    asked: Questions, schema: Schema, name: str | None, task: str | None
) -> tuple[Schema, Task]:
    """The target, what is to be learned of it, and its labels."""
    usable = [c.name for c in schema.columns if c.kind in ("number", "category")]
    if not usable:
        raise ValueError("Expected a column of numbers or categories to predict, found none.")
    usual = [name for name in usable if name.lower() in _TARGETS]
    say(f"{len(schema.columns)} columns, from the header and the types alone:")
    show_table("", ("column", "kind"), [(c.name, c.kind) for c in schema.columns], left=2)

    def parse(answer: str) -> Column:
        column = schema.column(answer.strip())
        if column.name not in usable:
            raise ValueError(f"Expected numbers or categories, found that it is a {column.kind}.")
        return column

    why = "The column to predict. By default one with a usual name, or the last one."
    target = asked.ask("Target", why, [*usable, *usual][-1], parse, name)
    chosen = "classification"
    if target.kind == "number" or task is not None:
        tasks = [chosen, *["regression"] * (target.kind == "number")]
        why = "Numbers may be quantities (regression) or labels (classification)."
        chosen = asked.ask("Task", why, tasks[-1], read.one_of(tasks), task)
    schema = replace(schema, target=target.name)
    if chosen == "regression":
        return schema, "regression"
    why = (
        "All labels that can occur, separated by commas: they become public, and cost nothing. "
        "Without an answer they are learned privately."
    )
    known = ",".join(target.categories)
    labels = asked.ask("Labels", why, known, read.labels)
    return schema.with_columns([replace(target, kind="category", categories=labels)]), (
        "classification"
    )


def ask_columns(asked: Questions, schema: Schema, task: Task) -> Schema:
    """Kinds, bounds, categories and blanks, as far as they are public."""
    schema = _kinds(asked, schema)
    if not schema.features:
        raise ValueError("Expected columns beside the target, found none that is not ignored.")
    target = schema.column(str(schema.target))
    numbers = [c for c in schema.features if c.kind != "category"]
    numbers += [target] * (task == "regression")
    texts = [c for c in schema.features if c.kind == "category" and not c.categories]
    changed: list[Column] = []
    why = (
        "Bounds that you know without looking at the rows save budget, if all columns have some. "
        "By default ranges are learned privately."
    )
    stated = bool(numbers) and asked.confirm("State bounds of numbers?", why, False)
    for column in numbers:
        pair = _bounds(asked, column) if stated else None
        low, high = pair or (None, None)
        changed.append(replace(column, low=low, high=high))
    why = (
        "Categories that you know without looking at the rows save budget and show even where they "
        "are rare. By default frequent ones are learned privately."
    )
    if texts and asked.confirm("State categories?", why, False):
        for column in texts:
            told = f"All categories of {column.name}, separated by commas; empty: learned."
            found = asked.ask(column.name, told, "", read.texts)
            changed.append(replace(column, categories=found))
    return _blanks(asked, schema.with_columns(changed))


def _kinds(asked: Questions, schema: Schema) -> Schema:
    from privagrad.data.schema import KINDS
    from privagrad.fitting.notes import looks_like_code

    changed = []
    for column in schema.features:
        if looks_like_code(column.name):
            why = (
                f"{column.name!r} is the name of an identifier or a code: such values tell rows "
                "apart, and a model learns nothing from their size."
            )
            if asked.confirm(f"Ignore {column.name}?", why, True):
                changed.append(replace(column, kind="ignore"))
    schema = schema.with_columns(changed)
    ignored = ", ".join(c.name for c in changed) or "none"

    def parse(answer: str) -> list[Column]:
        found = []
        for part in read.texts(answer):
            name, _, kind = (piece.strip() for piece in part.rpartition("="))
            column = schema.column(name)
            if name == schema.target:
                raise ValueError(f"Expected columns beside the target, found {name!r}.")
            if kind not in KINDS:
                raise ValueError(f"Expected a kind of {', '.join(KINDS)}, found {kind!r}.")
            plain = column if kind == column.kind else replace(column, categories=(), parts=())
            found.append(replace(plain, kind=kind))
        return found

    why = (
        f"Ignored so far: {ignored}. Other kinds, like zip=category, notes=ignore, "
        "born=date; ignore whatever cannot matter, because fewer columns need less noise."
    )
    return schema.with_columns(asked.ask("Changes", why, "", parse))


def _bounds(asked: Questions, column: Column) -> tuple[float, float] | None:
    unit = {"date": " as dates like 2000-01-31", "duration": " in seconds"}.get(column.kind, "")
    why = f"Bounds of {column.name}{unit}: low,high. Cells beyond are set to them. Empty: learned."
    return asked.ask(column.name, why, "", read.bounds(column))


def _blanks(asked: Questions, schema: Schema) -> Schema:
    why = (
        "What stands for a missing value besides empty cells, separated by commas. NA, ?, null and "
        "the like are known in columns of numbers, but count as categories elsewhere."
    )
    marks = asked.ask("Missing values", why, "", read.texts)
    schema = replace(schema, blanks=tuple(dict.fromkeys([*schema.blanks, *marks])))
    numbers = [c for c in schema.features if c.kind != "category"]

    def parse(answer: str) -> list[Column]:
        names = read.texts(answer)
        found = numbers if names == ("all",) else [schema.column(name) for name in names]
        for column in found:
            if column not in numbers:
                raise ValueError(f"Expected columns of numbers or dates, found {column.name!r}.")
        return [replace(column, missing=False) for column in found]

    if not numbers:
        return schema
    why = (
        "Columns of numbers that are never blank, if that is public knowledge: names separated by "
        "commas, or all. By default a model learns from each column where it is blank."
    )
    return schema.with_columns(asked.ask("Never blank", why, "", parse))
