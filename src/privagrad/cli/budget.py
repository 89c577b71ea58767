"""`privagrad budget`: totals of data sets, what was spent on them, by whom and when."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from privagrad.cli._output import Json, LedgerPath, command, say, table
from privagrad.privacy.codec import as_json as event_as_json
from privagrad.privacy.ledger import Account, Ledger

app = typer.Typer(
    no_args_is_help=True,
    help="""Budgets of data sets, kept across runs and people.

`privagrad budget create people --epsilon 3 --delta 1e-6 --file people.csv`

`privagrad budget show people`""",
)


@app.command()
@command
def create(
    name: Annotated[str, typer.Argument(help="What you call the data set.")],
    epsilon: Annotated[float, typer.Option("--epsilon", "-e", help="The total, fixed once.")],
    delta: Annotated[float, typer.Option("--delta", help="Well below one over the rows.")],
    file: Annotated[
        Path | None,
        typer.Option(help="Its file: runs on other content are then refused.", dir_okay=False),
    ] = None,
    ledger: LedgerPath = None,
    as_json: Json = False,
) -> dict[str, Any]:
    """Open a budget for a data set. Its total cannot be changed later.

    With --file the budget is for this content alone. Content that another budget was opened for, or
    has paid for, is refused.

    Example: `privagrad budget create people --epsilon 3 --delta 1e-6`
    """
    from privagrad.fitting import fingerprint

    mark = None if file is None else fingerprint(file)
    account = Ledger(ledger).create(name, epsilon, delta, mark)
    if not as_json:
        say(f"opened a budget for {name}: epsilon {epsilon:g} at delta {delta:g}")
    return values(account)


@app.command("list")
@command
def list_(ledger: LedgerPath = None, as_json: Json = False) -> list[dict[str, Any]]:
    """All data sets, their totals and what is left.

    Example: `privagrad budget list`
    """
    book = Ledger(ledger)
    found = [values(book.account(name)) for name in book.names()]
    if not as_json:
        rows = [
            (v["name"], f"{v['epsilon']:g}", f"{v['delta']:g}", f"{v['spent']:.4g}",
             f"{v['left']:.4g}", len(v["runs"]))
            for v in found
        ]  # fmt: skip
        columns = ("data set", "epsilon", "delta", "spent", "left", "runs")
        table(f"Budgets in {book.path}", columns, rows)
    return found


@app.command()
@command
def show(
    name: Annotated[str, typer.Argument(help="The data set.")],
    ledger: LedgerPath = None,
    as_json: Json = False,
) -> dict[str, Any]:
    """One data set: what was spent, run by run. Costs compose, they do not add up.

    The total holds also if later runs were chosen by looking at the results of earlier ones.

    Example: `privagrad budget show people`
    """
    account = Ledger(ledger).account(name)
    told = values(account)
    if not as_json:
        rows = [
            (
                r["run"],
                r["at"][:16].replace("T", " "),
                r["user"],
                r["state"],
                f"{r['epsilon_alone']:.4g}",
                r["note"],
            )
            for r in told["runs"]
        ]
        title = (
            f"{name}: {account.spent:.4g} of epsilon {account.epsilon:g} spent, "
            f"{told['left']:.4g} left (delta {account.delta:g})"
        )
        table(title, ("run", "since", "by", "state", "alone", "what"), rows, left=6)
        dead = [r["run"] for r in told["runs"] if r["state"] == "reserved"]
        if dead:
            say(
                f"Reserved and not finished, still running or dead: {', '.join(dead)}. Only for a "
                "run that surely released nothing: privagrad budget release RUN --reason WHY"
            )
    return told


@app.command()
@command
def release(
    run: Annotated[str, typer.Argument(help="A reserved run, as `budget show` names it.")],
    reason: Annotated[str, typer.Option(help="How you know that it released nothing.")],
    ledger: LedgerPath = None,
    as_json: Json = False,
) -> dict[str, Any]:
    """Give back what a dead run reserved. The reason goes into the history for good.

    Only if you know that the run released nothing. A run that is still alive is charged when it
    ends, and its model is not saved.

    Example: `privagrad budget release 3f2a91c07b5e --reason "power cut while reading the file"`
    """
    Ledger(ledger).release(run, reason)
    if not as_json:
        say(f"released {run}")
    return {"run": run, "state": "released", "reason": reason}


@app.command()
@command
def export(
    name: Annotated[str, typer.Argument(help="The data set.")],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="A .json or .csv file; default: print JSON.")
    ] = None,
    ledger: LedgerPath = None,
    as_json: Json = False,
) -> list[dict[str, Any]]:
    """The whole history of a data set's budget, every event of it.

    Example: `privagrad budget export people -o history.csv`
    """
    entries = [
        {
            "number": e.number, "at": e.at, "user": e.user, "dataset": e.dataset, "run": e.run,
            "state": e.state, "note": e.note, "events": [event_as_json(v) for v in e.events],
        }
        for e in Ledger(ledger).history(name)
    ]  # fmt: skip
    if out is None:
        if not as_json:
            json.dump(entries, sys.stdout, indent=1)
            print()
    elif out.suffix == ".csv":
        with out.open("w", encoding="utf-8", newline="") as file:
            fields = ("number", "at", "user", "dataset", "run", "state", "note", "events")
            writer = csv.DictWriter(file, fields)
            writer.writeheader()
            writer.writerows({**e, "events": json.dumps(e["events"])} for e in entries)
    elif out.suffix == ".json":
        out.write_text(json.dumps(entries, indent=1), encoding="utf-8")
    else:
        raise ValueError(f"Expected a .json or .csv file, found {out.name}.")
    if out is not None and not as_json:
        say(f"wrote {out}")
    return entries


def values(account: Account) -> dict[str, Any]:
    """An account as plain values."""
    from privagrad.privacy.accounting import PrivacyPlan

    spent = account.spent
    return {
        "name": account.name,
        "epsilon": account.epsilon,
        "delta": account.delta,
        "fingerprint": account.fingerprint,
        "spent": spent,
        "left": max(account.epsilon - spent, 0.0),
        "runs": [
            {
                "run": run.name, "at": run.at, "user": run.user, "state": run.state,
                "note": run.note, "epsilon_alone": PrivacyPlan(run.events).epsilon(account.delta),
                "events": [event_as_json(event) for event in run.events],
            }
            for run in account.runs
        ],
    }  # fmt: skip
