"""`privagrad budget`: the total of each data set, and what was spent, by whom and when."""

from __future__ import annotations

import csv
import json
import sys
from dataclasses import fields
from pathlib import Path
from typing import Annotated

import typer

from privagrad.cli._output import Json, JsonObject, LedgerPath, command, say, show_table
from privagrad.cli._units import unit_value, unit_words
from privagrad.privacy.codec import as_json as event_as_json
from privagrad.privacy.ledger import Account, Ledger
from privagrad.privacy.ledger_file import Entry

app = typer.Typer(
    no_args_is_help=True,
    help="""Privacy budgets: one total for all runs on a data set.

A run with `privagrad fit --dataset NAME` reserves its cost before it releases anything. A run that
would exceed the total is refused.

Examples:

`privagrad budget create people --epsilon 3 --delta 1e-6 --file people.csv`

`privagrad budget show people`""",
)


@app.command()
@command
def create(
    name: Annotated[str, typer.Argument(help="A name for the data set.")],
    epsilon: Annotated[
        float, typer.Option("--epsilon", "-e", help="The total. It cannot be changed later.")
    ],
    delta: Annotated[
        float,
        typer.Option(
            "--delta",
            help="Probability that the guarantee may fail: well below 1 / number of rows.",
        ),
    ],
    file: Annotated[
        Path | None,
        typer.Option(help="The data. Runs on any other content are refused."),
    ] = None,
    ledger: LedgerPath = None,
    as_json: Json = False,
) -> JsonObject:
    """Create a budget for a data set. Its total cannot be changed later.

    With --file the budget is for the content of this file only. A file that already belongs to
    another budget, or was charged to one, is refused.

    Example: `privagrad budget create people --epsilon 3 --delta 1e-6`
    """
    from privagrad.fitting import fingerprint, warn_if_weak

    warn_if_weak(epsilon, delta)
    if file is not None and not file.exists():
        raise FileNotFoundError(f"Expected the data set's file, found nothing at {file}.")
    mark = None if file is None else fingerprint(file)
    account = Ledger(ledger).create(name, epsilon, delta, mark)
    say(f"created a budget for {name}: epsilon {epsilon:g} at delta {delta:g}")
    return values(account)


@app.command("list")
@command
def list_(ledger: LedgerPath = None, as_json: Json = False) -> list[JsonObject]:
    """List all data sets with their totals and what is left.

    Example: `privagrad budget list`
    """
    opened = Ledger(ledger)
    found = [values(opened.account(name)) for name in opened.names()]
    rows = [
        (v["name"], f"{v['epsilon']:g}", f"{v['delta']:g}", f"{v['spent']:.4g}",
         f"{v['left']:.4g}", len(v["runs"]), v["unit"] or "–")
        for v in found
    ]  # fmt: skip
    columns = ("data set", "epsilon", "delta", "spent", "left", "runs", "unit")
    show_table(f"Budgets in {opened.where}", columns, rows)
    return found


@app.command()
@command
def show(
    name: Annotated[str, typer.Argument(help="The data set.")],
    ledger: LedgerPath = None,
    as_json: Json = False,
) -> JsonObject:
    """Show what was spent on a data set, run by run.

    The costs compose: all runs together cost at most the sum of their epsilons. The total also
    holds if later runs were chosen after seeing the results of earlier ones.

    Example: `privagrad budget show people`
    """
    account = Ledger(ledger).account(name)
    found = values(account)
    rows = [
        (r["run"], r["at"][:16].replace("T", " "), r["user"], r["state"],
         f"{r['epsilon_alone']:.4g}", r["note"])
        for r in found["runs"]
    ]  # fmt: skip
    title = (
        f"{name}: {account.spent:.4g} of epsilon {account.epsilon:g} spent, "
        f"{found['left']:.4g} left (delta {account.delta:g})"
    )
    if rows:
        show_table(title, ("run", "since", "user", "state", "epsilon alone", "note"), rows, left=6)
    else:
        say(f"{title}. No runs yet.")
    if told := unit_words(found["unit"]):
        say(told)
    reserved = [r["run"] for r in found["runs"] if r["state"] == "reserved"]
    if reserved:
        say(
            f"Reserved, not finished: {', '.join(reserved)}. These runs are still running, or "
            "they were killed. If you are sure that a run released nothing: privagrad budget "
            "release RUN --reason WHY"
        )
    return found


@app.command()
@command
def release(
    run: Annotated[str, typer.Argument(help="A reserved run, from `privagrad budget show`.")],
    reason: Annotated[str, typer.Option(help="How you know that the run released nothing.")],
    ledger: LedgerPath = None,
    as_json: Json = False,
) -> JsonObject:
    """Return what a killed run reserved. The reason is kept in the history.

    Do this only if you know that the run released nothing. If the run is in fact still running, it
    is charged when it ends, and its model is not saved.

    Example: `privagrad budget release 3f2a91c07b5e --reason "power cut while reading the file"`
    """
    Ledger(ledger).release(run, reason)
    say(f"released {run}")
    return {"run": run, "state": "released", "reason": reason}


@app.command()
@command
def export(
    name: Annotated[str, typer.Argument(help="The data set.")],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="A .json or .csv file. Default: print JSON.")
    ] = None,
    ledger: LedgerPath = None,
    as_json: Json = False,
) -> list[JsonObject]:
    """Export the full history of a budget, with every event.

    Example: `privagrad budget export people -o history.csv`
    """
    history = Ledger(ledger).history(name)
    entries = [{**vars(e), "events": [event_as_json(v) for v in e.events]} for e in history]
    if out is None:
        json.dump(entries, sys.stdout, indent=1)
        print()
    elif out.suffix == ".csv":
        with out.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, [field.name for field in fields(Entry)])
            writer.writeheader()
            writer.writerows({**e, "events": json.dumps(e["events"])} for e in entries)
    elif out.suffix == ".json":
        out.write_text(json.dumps(entries, indent=1), encoding="utf-8")
    else:
        raise ValueError(f"Expected a .json or .csv file, found {out.name}.")
    if out is not None:
        say(f"wrote {out}")
    return entries


def values(account: Account) -> JsonObject:
    """An account as JSON values."""
    from privagrad.privacy.accounting import PrivacyPlan

    spent = account.spent
    return {
        "name": account.name,
        "epsilon": account.epsilon,
        "delta": account.delta,
        "fingerprint": account.fingerprint,
        "spent": spent,
        "left": max(account.epsilon - spent, 0.0),
        "unit": unit_value(account),
        "runs": [
            {
                "run": run.name, "at": run.at, "user": run.user, "state": run.state,
                "note": run.note, "epsilon_alone": PrivacyPlan(run.events).epsilon(account.delta),
                "events": [event_as_json(event) for event in run.events],
            }
            for run in account.runs
        ],
    }  # fmt: skip
