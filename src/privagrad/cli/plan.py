"""`privagrad plan`: what a fit would cost and how good it may be, before anything is spent."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from privagrad.cli._output import (
    Json,
    JsonObject,
    LedgerPath,
    busy,
    command,
    explain,
    note,
    say,
    show_table,
)
from privagrad.cli.compare import parse_epsilons

if TYPE_CHECKING:
    from privagrad import fitting
    from privagrad.data.schema import Schema
    from privagrad.fitting.forecast import Cost, Forecast
    from privagrad.privacy.events import Event

_SIZE = "Instead of a table: for data that you do not have yet"


@command
def plan(
    table: Annotated[
        Path | None, typer.Argument(help="A table as for `privagrad fit`. No value is looked at.")
    ] = None,
    epsilons: Annotated[
        str, typer.Option("--epsilons", "-e", help="Values of epsilon, separated by commas.")
    ] = "0.1,1,3",
    target: Annotated[
        str | None, typer.Option("--target", "-t", help="The column to predict.")
    ] = None,
    schema: Annotated[
        Path | None, typer.Option(help="What is public about the table: see privagrad schema.")
    ] = None,
    task: Annotated[
        str | None, typer.Option(help="classification or regression, as for `privagrad fit`.")
    ] = None,
    loss: Annotated[str | None, typer.Option(help="As for `privagrad fit`.")] = None,
    classes: Annotated[
        str | None,
        typer.Option(help="All labels, separated by commas; with --rows the number of classes."),
    ] = None,
    regression: Annotated[
        bool, typer.Option("--regression", help="The target is a number: --task regression.")
    ] = False,
    delta: Annotated[
        float | None,
        typer.Option(
            help="Probability that the guarantee may fail. Default: that of the budget, or less "
            "than 1/(10 rows)."
        ),
    ] = None,
    user_column: Annotated[
        str | None, typer.Option(help="The column that names users, as for `privagrad fit`.")
    ] = None,
    dataset: Annotated[
        str | None, typer.Option(help="The budget that would be charged: see privagrad budget.")
    ] = None,
    ledger: LedgerPath = None,
    encoding: Annotated[
        str | None, typer.Option(help="Of a text file. Default: the schema's, or utf-8.")
    ] = None,
    rows: Annotated[
        int | None, typer.Option(help="Number of rows.", min=1, rich_help_panel=_SIZE)
    ] = None,
    columns: Annotated[
        int | None,
        typer.Option(help="Number of columns of numbers.", min=1, rich_help_panel=_SIZE),
    ] = None,
    as_json: Json = False,
) -> JsonObject:
    """Show what a fit would cost and how good it may be, before anything is spent.

    For each epsilon: the expected quality, the rows that 90 % of it needs, every release with its
    noise and its cost, and what is left of the budget of --dataset. Only public facts are used: the
    number of rows, the names and kinds of the columns, what the schema states. No value of the
    table changes the output, so it costs nothing and may be shown to anyone who knows those facts.

    `privagrad fit` with the same options makes exactly the releases that are shown. Whether the
    rows can be read and belong to the budget is checked by `privagrad fit --dry-run`.

    Examples:

    `privagrad plan people.csv --schema schema.toml --epsilons 0.1,1,3 --dataset people`

    `privagrad plan --rows 20000 --columns 30 --classes 3`

    `privagrad plan --rows 5000 --columns 12 --regression --epsilons 1`
    """
    from privagrad import fitting
    from privagrad.privacy.ledger import Ledger

    asked = parse_epsilons(epsilons)
    if ledger is not None and dataset is None:
        raise ValueError("Expected --dataset NAME with --ledger, found none.")
    if regression and task not in (None, "regression"):
        raise ValueError(f"Expected --task regression with --regression, found {task!r}.")
    task = "regression" if regression else task
    budgets = None if dataset is None else Ledger(ledger)
    if table is None:
        given = {"target": target, "schema": schema, "loss": loss, "encoding": encoding,
                 "user-column": user_column}  # fmt: skip
        size = _size(rows, columns, [name for name, value in given.items() if value is not None])
        account = None if budgets is None or dataset is None else budgets.account(dataset)
        count = _number_of_classes(classes, task)
        found = fitting.forecast_size(*size, count, asked, delta, account)
    else:
        if rows is not None or columns is not None:
            raise ValueError("Expected a table, or --rows and --columns; found both.")
        labels = None if classes is None else tuple(part.strip() for part in classes.split(","))
        request = fitting.FitRequest(
            table, target, asked[0], delta, loss, schema=_read(schema, encoding), classes=labels,
            dataset=dataset, ledger=budgets, task=cast("fitting.Task | None", task),
            encoding=encoding or "utf-8", user_column=user_column,
        )  # fmt: skip
        with busy(f"counting the rows of {table.name}"):
            found = fitting.forecast_table(request, asked)
    if not as_json:
        show_forecast(found)
    return values(found)


def _size(rows: int | None, columns: int | None, beside: list[str]) -> tuple[int, int]:
    if rows is None or columns is None:
        raise ValueError("Expected a table, or both --rows and --columns; found neither.")
    if beside:
        raise ValueError(
            f"Expected --rows and --columns without options of a table, found --{beside[0]}."
        )
    return rows, columns


def _number_of_classes(classes: str | None, task: str | None) -> int | None:
    """For a table that is not there: the number of its classes, None for a regression."""
    if task not in (None, "classification", "regression"):
        raise ValueError(f"Expected --task classification or regression, found {task!r}.")
    if task == "regression":
        if classes is not None:
            raise ValueError("Expected no --classes for a regression, found some.")
        return None
    text = "2" if classes is None else classes.strip()
    if not text.isdecimal():
        raise ValueError(f"Expected the number of classes with --rows, found {classes!r}.")
    return int(text)


def _read(path: Path | None, encoding: str | None) -> Schema | None:
    from privagrad.data.schema import encoding_named, read_schema

    schema = None if path is None else read_schema(path)
    if encoding is None or schema is None:
        return schema
    return replace(schema, encoding=encoding_named(encoding))


def show_forecast(found: Forecast) -> None:
    """Print what to expect at each epsilon, and the releases."""
    from privagrad.fitting.forecast import HONESTY
    from privagrad.linear.recipe import rounded_up

    account, paid = found.account, found.account is not None
    columns = ["epsilon", "expected quality", f"{found.table.unit}s for 90 %"]
    columns += ["spent after it", "left after it", "such runs fit"] * paid
    rows = [
        (f"{o.epsilon:g}", "refused" if o.refused else _quality(o.kept),
         rounded_up(o.rows), *(_budget_cells(o.cost) if o.cost else ()))
        for o in found.outlooks
    ]  # fmt: skip
    show_table(
        f"{found.table.n:,} {found.table.unit}s, delta {found.delta:.3g}", columns, rows, left=0
    )
    explain(HONESTY)
    for outlook in found.outlooks:
        if outlook.refused:
            note(outlook.refused)
        if outlook.cost and outlook.cost.out_of_delta:
            note(
                f"Not more than {outlook.cost.runs} runs of epsilon {outlook.epsilon:g} fit, "
                "because of delta, not of epsilon. Discovering categories takes most of delta: "
                "state them in the schema (classes: --classes)."
            )
    purposes = {e.purpose: e.count for o in found.outlooks for e in o.events}
    cells = [{e.purpose: _release(found, e) for e in o.events} for o in found.outlooks]
    show_table(
        "Releases: noise multiplier (epsilon of this release alone)",
        ["purpose", "times", *(f"epsilon {o.epsilon:g}" for o in found.outlooks)],
        [(purpose, times, *(column.get(purpose, "") for column in cells))
         for purpose, times in purposes.items()],
    )  # fmt: skip
    if account is not None:
        say(
            f"Budget {account.name}: {account.spent:.4g} of {account.epsilon:g} spent (delta "
            f"{account.delta:g}). Costs compose: several runs cost less than the sum of their "
            "epsilons."
        )
    say("Nothing was spent, and no value of the table was used.")


def _budget_cells(cost: Cost) -> tuple[str, str, str]:
    from privagrad.fitting.forecast import MOST_RUNS

    if not cost.runs:
        return "does not fit", "–", "0"
    runs = f"{cost.runs}" if cost.runs < MOST_RUNS else f"{MOST_RUNS} or more"
    return f"{cost.after:.4g}", f"{round(cost.left, 4):g}", runs


def _quality(kept: float) -> str:
    return "over 99 %" if kept > 0.99 else f"about {100 * kept:.0f} %"


def _release(found: Forecast, event: Event) -> str:
    from privagrad.privacy.events import SelectEvent

    alone = f"({found.alone(event):.2g})"
    return alone if isinstance(event, SelectEvent) else f"{event.noise_multiplier:.4g} {alone}"


def values(found: Forecast) -> JsonObject:
    """A forecast as JSON values."""
    from privagrad.fitting.forecast import HONESTY
    from privagrad.privacy.codec import as_json as event_as_json

    account, target = found.account, found.table.target
    return {
        "rows": found.table.n,
        "unit": found.table.unit,
        "encoded_columns": len(found.table.encoding.names),
        "undiscovered": list(found.table.counts),
        "loss": found.settings.loss_name,
        "classes": None if found.settings.loss.regression else list(target.categories),
        "delta": found.delta,
        "budget": None if account is None else {
            "name": account.name, "total": account.epsilon, "delta": account.delta,
            "spent": account.spent,
        },
        "plans": [
            {
                "epsilon": o.epsilon,
                "total_epsilon": o.plan.epsilon(found.delta),
                "expected_quality": o.kept,
                "rows_for_90_percent": math.ceil(o.rows),
                "refused": o.refused,
                "releases": [
                    {**event_as_json(e), "epsilon_alone": found.alone(e)} for e in o.events
                ],
                "budget": None if o.cost is None else {
                    "fits": o.cost.runs > 0,
                    "spent_after": o.cost.after if math.isfinite(o.cost.after) else None,
                    "left_after": o.cost.left,
                    "runs": o.cost.runs,
                    "limited_by": "delta" if o.cost.out_of_delta else "epsilon",
                },
            }
            for o in found.outlooks
        ],
        "about_quality": HONESTY,
        "spent": 0.0,
    }  # fmt: skip
