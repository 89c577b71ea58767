"""`privagrad budget review`: what was spent in a time, by data set and user."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Annotated

import typer

from privagrad.cli._output import Json, JsonObject, LedgerPath, command, say, show_table
from privagrad.cli._units import unit_value, unit_words
from privagrad.privacy.ledger import Account, Ledger, Run

_STATES = {"finished": "finished", "reserved": "open", "released": "given back"}


@command
def review(
    name: Annotated[str | None, typer.Argument(help="A data set. Default: all of them.")] = None,
    since: Annotated[
        str | None, typer.Option(help="Only runs that began on this day or later: 2026-01-01.")
    ] = None,
    open_days: Annotated[
        float, typer.Option(min=0, help="Name runs that are open for more days than this.")
    ] = 7.0,
    ledger: LedgerPath = None,
    as_json: Json = False,
) -> JsonObject:
    """Review what was spent: for each data set its users, their runs, and what is left.

    What is spent and left counts all runs of a data set, also those before --since.

    Example: `privagrad budget review --since 2026-01-01`
    """
    begin, opened = _day(since), Ledger(ledger)
    names = opened.names() if name is None else [name]
    now = datetime.fromisoformat(opened.now())
    found = [_reviewed(opened.account(each), begin, now, open_days) for each in names]
    period = f"since {since}" if since else "in all time"
    say(f"Budgets in {opened.where}, runs {period}")
    for values in found:
        _show(values, open_days)
    return {"ledger": opened.where, "at": now.isoformat(), "since": since, "datasets": found}


def _day(since: str | None) -> datetime:
    if since is None:
        return datetime.min.replace(tzinfo=UTC)
    try:
        return _time(since)
    except ValueError:
        raise ValueError(f"Expected --since YYYY-MM-DD, found {since!r}.") from None


def _time(text: str) -> datetime:
    """A time of the ledger; one without a zone is in UTC."""
    time = datetime.fromisoformat(text)
    return time if time.tzinfo else time.replace(tzinfo=UTC)


def _reviewed(account: Account, begin: datetime, now: datetime, open_days: float) -> JsonObject:
    spent = account.spent
    runs = [run for run in account.runs if _time(run.at) >= begin]
    users = sorted({run.user for run in runs})
    # A run that has been open for long is named whenever it began.
    old = [
        run for run in account.runs
        if run.state == "reserved" and now - _time(run.at) > timedelta(days=open_days)
    ]  # fmt: skip
    return {
        "name": account.name,
        "epsilon": account.epsilon,
        "delta": account.delta,
        "spent": spent,
        "left": max(account.epsilon - spent, 0.0),
        "unit": unit_value(account),
        "users": [_of_user(user, runs, account.delta) for user in users],
        "runs": [
            {"run": run.name, "at": run.at, "user": run.user, "state": run.state,
             "note": run.note, "epsilon_alone": _epsilon([run], account.delta)}
            for run in runs
        ],
        "open_for_long": [
            {"run": run.name, "user": run.user, "days": (now - _time(run.at)).days} for run in old
        ],
    }  # fmt: skip


def _of_user(user: str, runs: Sequence[Run], delta: float) -> JsonObject:
    own = [run for run in runs if run.user == user]
    states = {word: sum(run.state == state for run in own) for state, word in _STATES.items()}
    return {"user": user, "runs": len(own), **states, "epsilon_alone": _epsilon(own, delta)}


def _epsilon(runs: Sequence[Run], delta: float) -> float:
    """What these runs cost together, as if there were no others."""
    from privagrad.privacy.accounting import PrivacyPlan
    from privagrad.privacy.events import merged

    events = merged(event for run in runs for event in run.events)
    if len({event.unit for event in events}) > 1:
        return math.inf
    return PrivacyPlan(events).epsilon(delta)


def _show(values: JsonObject, open_days: float) -> None:
    say(
        f"\n{values['name']}: {values['spent']:.4g} of epsilon {values['epsilon']:g} spent, "
        f"{values['left']:.4g} left (delta {values['delta']:g})"
    )
    if told := unit_words(values["unit"]):
        say(told)
    if not values["runs"]:
        say("No runs in this time.")
    else:
        users = [(*list(user.values())[:-1], f"{user['epsilon_alone']:.4g}")
                 for user in values["users"]]  # fmt: skip
        show_table("By user", ("user", "runs", *_STATES.values(), "epsilon alone"), users)
        runs = [
            (r["run"], r["at"][:16].replace("T", " "), r["user"], _STATES[r["state"]],
             f"{r['epsilon_alone']:.4g}", r["note"])
            for r in values["runs"]
        ]  # fmt: skip
        show_table("Runs", ("run", "since", "user", "state", "epsilon alone", "note"), runs, left=6)
    for run in values["open_for_long"]:
        say(
            f"Open for more than {open_days:g} days: {run['run']} of {run['user']}, {run['days']} "
            "days. It stays charged until it finishes or is given back."
        )
