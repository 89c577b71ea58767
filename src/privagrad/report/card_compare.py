"""What one part of a privacy card says about another: budgets, trainings, fixed sentences."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from privagrad.privacy.accounting import PrivacyReport
from privagrad.privacy.codec import from_json
from privagrad.privacy.events import TRAINING, Event, GaussianEvent, merged
from privagrad.report import card_run as run
from privagrad.report.card import TOLERANCE, Card
from privagrad.report.card_privacy import INFINITY
from privagrad.report.card_schema import Place, shown
from privagrad.report.statement import one_line
from privagrad.report.verdict import exceeds

_MOST_SAMPLED = 10**8


def trainings(events: Iterable[Event]) -> list[GaussianEvent]:
    """The releases of gradients, of one run where runs are chosen from."""
    return [
        event
        for event in run.single_releases(events)
        if isinstance(event, GaussianEvent) and event.purpose == TRAINING
    ]


def require_computable(events: Iterable[Event]) -> None:
    """Refuse releases whose composition would take hours, as only a forged card has them."""
    found = sum(event.count for event in run.single_releases(events) if event.sampling is not None)
    if found > _MOST_SAMPLED:
        raise ValueError(f"expected at most {_MOST_SAMPLED:,} sampled releases, found {found:,}")


def wrong_training(card: Card, report: PrivacyReport) -> Iterator[tuple[Place, str]]:
    """Numbers of rows, steps and batches that cannot belong to the events."""
    counted = [
        event
        for event in run.single_releases(report.events)
        if isinstance(event, GaussianEvent) and event.n_examples > 1
    ]
    sampled = [event for event in counted if event.sampling is not None]
    rows, algorithm = card["guarantee"]["rows"], card["mechanism"]["algorithm"]
    least = max((event.n_examples for event in counted), default=0)
    if rows is not None and rows < least:
        yield ("guarantee", "rows"), f"expected at least {least}, found {rows}"
    steps = {
        sum(event.count for event in kind) for kind in (trainings(report.events), sampled) if kind
    }
    if steps and algorithm["steps"] is not None and algorithm["steps"] not in steps:
        where: Place = ("mechanism", "algorithm", "steps")
        yield where, expected_found(max(steps), algorithm["steps"])
    sizes = {event.batch_size for event in counted}
    if sizes and algorithm["batch_size"] is not None and algorithm["batch_size"] not in sizes:
        where = ("mechanism", "algorithm", "batch_size")
        yield where, expected_found(max(sizes), algorithm["batch_size"])


def wrong_budget(ledger: Mapping[str, Any], report: PrivacyReport) -> Iterator[tuple[Place, str]]:
    """What a budget has spent, and whether the card's run is in it with the card's releases."""
    account = ledger["account"]
    charged = ledger["dataset"] is not None or account is not None
    if ledger["charged"] != charged:
        yield ("ledger", "charged"), expected_found(charged, ledger["charged"])
    if account is None:
        return
    where: Place = ("ledger", "account")
    try:
        runs = [tuple(from_json(event) for event in one["events"]) for one in account["runs"]]
        require_computable(event for events in runs for event in events)
        spent = run.spent_of(runs, account["epsilon"], account["delta"])
    except (ValueError, TypeError, ArithmeticError) as error:
        yield (*where, "runs"), one_line(error)
        return
    left = max(account["epsilon"] - epsilon_number(spent), 0.0)
    found = {"spent": account["spent"], "left": account["left"]}
    yield from differences(found, {"spent": spent, "left": left}, where, prose=True)
    for place, (one, events) in enumerate(zip(account["runs"], runs, strict=True)):
        this = ledger["run"] is not None and one["run"] == ledger["run"]
        here: Place = (*where, "runs", place)
        if one["this_run"] != this:
            yield (*here, "this_run"), expected_found(this, one["this_run"])
        elif (
            this
            and one["state"] == "finished"
            and set(merged(events)) != set(merged(report.events))
        ):
            yield (*here, "events"), "expected the releases of the card, found others"
    if ledger["run"] is not None and all(one["run"] != ledger["run"] for one in account["runs"]):
        yield (*where, "runs"), f"expected the run {shown(ledger['run'])}, found none"


def fixed_sections(card: Card, report: PrivacyReport) -> dict[str, Any]:
    """What this version says in every card of such a run."""
    ledger, others = card["ledger"], run.not_private_outputs(None)
    account = ledger["account"]
    beyond = account is not None and exceeds(account["epsilon"], epsilon_number(account["spent"]))
    told = card["not_private"][0]["status"] if card["not_private"] else ""
    if told in run.TESTED.values():
        others[0]["status"] = told
    return {
        "trust": run.trust(),
        "side_channels": run.side_channels(),
        "not_private": others,
        "mechanism": {"mechanisms": run.mechanisms(report)},
        "utility": run.utility_words(report.unit, measured=bool(card["utility"]["figures"])),
        "ledger": run.ledger_words(ledger["charged"], account is not None, beyond),
    }


def differences(
    found: Any, expected: Any, path: Place, *, prose: bool
) -> Iterator[tuple[Place, str]]:
    """Where a value of a card is not the expected one; sentences count only with `prose`."""
    if isinstance(expected, dict):
        for name, value in expected.items():
            if name not in ("contribution", "resets", "words", "remarks") or prose:
                yield from differences(found[name], value, (*path, name), prose=prose)
    elif isinstance(expected, list):
        if len(found) != len(expected):
            yield path, f"expected {len(expected)} entries, found {len(found)}"
            return
        for place, value in enumerate(expected):
            yield from differences(found[place], value, (*path, place), prose=prose)
    elif not same_value(found, expected):
        yield path, expected_found(expected, found)


def same_value(found: Any, expected: Any) -> bool:
    if isinstance(expected, bool) or isinstance(found, bool):
        return found is expected
    if isinstance(expected, int | float) and isinstance(found, int | float):
        return math.isclose(found, expected, rel_tol=TOLERANCE, abs_tol=1e-12)
    return bool(found == expected)


def expected_found(expected: Any, found: Any) -> str:
    return f"expected {shown(expected)}, found {shown(found)}"


def epsilon_number(epsilon: float | str) -> float:
    return math.inf if epsilon == INFINITY else float(epsilon)
