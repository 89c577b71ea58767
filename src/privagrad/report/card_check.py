"""Whether a privacy card is what it says: its form, and every number that follows from others."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from privagrad.privacy.accounting import PrivacyPlan, PrivacyReport
from privagrad.privacy.codec import from_json
from privagrad.report.card import FORMAT, TOLERANCE, VERSION, Card
from privagrad.report.card_compare import (
    differences,
    epsilon_number,
    expected_found,
    fixed_sections,
    require_computable,
    same_value,
    trainings,
    wrong_budget,
    wrong_training,
)
from privagrad.report.card_privacy import installed, privacy_sections
from privagrad.report.card_questions import answered
from privagrad.report.card_schema import Place, card_schema, schema_problems, shown
from privagrad.report.statement import one_line, statement_of

_LARGEST = 50_000_000
"""Bytes; a card of a budget of a thousand runs has about two million."""


@dataclass(frozen=True)
class Finding:
    """Something that is wrong in a card.

    Attributes
    ----------
    line : int
        Where it stands in the file; 1 if the file was not given.
    pointer : str
        Where it stands in the card, as a JSON pointer.
    problem : str
        What was expected, and what was found.
    """

    line: int
    pointer: str
    problem: str

    def __str__(self) -> str:
        where = json.dumps(self.pointer or "/")[1:-1]  # a name may hold anything
        return f"line {self.line}, {where}: {self.problem}"


def read_card(path: Path | str) -> Card:
    """A card from its file; a wrong one is refused, with everything that is wrong with it."""
    path = Path(path)
    findings = check_card(path)
    if findings:
        told = "; ".join(str(finding) for finding in findings[:10])
        more = f"; and {len(findings) - 10} more" if len(findings) > 10 else ""
        raise ValueError(f"Expected a privacy card in {path.name}, found: {told}{more}.")
    return _parsed(path.read_text(encoding="utf-8"), path.name)


def check_card(path: Path | str) -> list[Finding]:
    """Everything that is wrong in a card's file: its form, or a number that does not follow.

    Epsilon is computed again from the events, at every delta; so are mu, what a budget has spent,
    and, of a card that this version of privagrad wrote, its sentences and which questions are open.

    Guarantees
    ----------
    A card without findings states an epsilon that its events have. Whether these events are all
    that was released, no program can see from a card; nor whether its figures, its facts about the
    table, the source of its noise and the owner's words are true.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"Expected a privacy card, found nothing at {path}.")
    if path.stat().st_size > _LARGEST:
        raise ValueError(f"Expected a privacy card, found {path.stat().st_size} bytes.")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"Expected a privacy card in UTF-8, found {error}.") from error
    card = _parsed(text, path.name)
    found = card_problems(card)
    return [Finding(line_of(text, where), _pointer(where), problem) for where, problem in found]


def writer_of(path: Path | str) -> str | None:
    """The version that wrote a card, if it is another one; `check_card` skips its sentences."""
    path = Path(path)
    card = _parsed(path.read_text(encoding="utf-8"), path.name)
    return None if _written_here(card) else one_line(card["library"]["version"])


def card_problems(card: Any) -> list[tuple[Place, str]]:
    """Where a card is wrong, and how; a card of a newer version is refused."""
    if not isinstance(card, dict) or card.get("format") != FORMAT:
        told = card.get("format") if isinstance(card, dict) else card
        raise ValueError(f"Expected a card with the format {FORMAT!r}, found {shown(told)}.")
    version = card.get("version")
    if isinstance(version, int) and version > VERSION:
        raise ValueError(
            f"Expected a card of version {VERSION}, found version {version}: a newer privagrad "
            "wrote it. Upgrade this one."
        )
    problems = schema_problems(card, card_schema())
    return problems or list(_wrong_values(card))


def line_of(text: str, path: Place) -> int:
    """The line of a JSON text on which the value at a path begins."""
    decoder, place = json.JSONDecoder(), _after_blanks(text, 0)
    for step in path:
        here, number = _after_blanks(text, place + 1), 0
        while True:
            name: str | int = number
            if text[place] == "{":
                name, here = decoder.raw_decode(text, here)
                here = _after_blanks(text, _after_blanks(text, here) + 1)
            if name == step:
                break
            _, here = decoder.raw_decode(text, here)
            here = _after_blanks(text, here)
            if text[here] != ",":  # a field that is not there
                return text.count("\n", 0, place) + 1
            here, number = _after_blanks(text, here + 1), number + 1
        place = here
    return text.count("\n", 0, place) + 1


def _written_here(card: Card) -> bool:
    """Whether this version wrote a card, so that its sentences can be compared."""
    return bool(card["library"]["version"] == installed("privagrad"))


def _wrong_values(card: Card) -> Iterator[tuple[Place, str]]:
    """What does not follow from the events and from the other facts of a card of the right form."""
    try:
        report = _report_of(card)
        rows = card["guarantee"]["rows"]
        expected = privacy_sections(report, rows)
    except (ValueError, TypeError, ArithmeticError) as error:
        yield ("native", "events"), one_line(error)
        return
    same = _written_here(card)
    for name, section in expected.items():
        if name != "accountant":
            yield from differences(card[name], section, (name,), prose=same)
    if card["accountant"]["name"] != report.accountant:
        yield ("accountant", "name"), expected_found(report.accountant, card["accountant"]["name"])
    if rows != card["product"]["rows"]:
        yield ("product", "rows"), expected_found(rows, card["product"]["rows"])
        yield ("guarantee", "rows"), expected_found(card["product"]["rows"], rows)
    stated, epsilon = (epsilon_number(card["guarantee"][n]) for n in ("stated_epsilon", "epsilon"))
    if stated < epsilon * (1 - TOLERANCE):
        yield ("guarantee", "stated_epsilon"), f"expected at least {epsilon:g}, found {stated:g}"
    yield from wrong_training(card, report)
    yield from wrong_budget(card["ledger"], report)
    try:
        statement_of(card["statement"])
    except ValueError as error:
        yield ("statement",), one_line(error)
    if same:
        for name, section in fixed_sections(card, report).items():
            yield from differences(card[name], section, (name,), prose=True)
        yield from differences(card["questions"], answered(card), ("questions",), prose=True)


def _report_of(card: Card) -> PrivacyReport:
    """The report that the card's events make."""
    guarantee, native = card["guarantee"], card["native"]
    events = tuple(from_json(event) for event in native["events"])
    require_computable(events)
    plan = PrivacyPlan(events, unprotected=native["unprotected"])
    delta, scheme = guarantee["delta"], card["sampling"]["scheme"]
    drawn = {event.sampling for event in trainings(events)}
    if drawn and scheme not in drawn:
        raise ValueError(f"expected releases with the sampling {shown(scheme)}, found others")
    # Sentences round epsilon: take the card's own number where it is right.
    found, stated = plan.epsilon(delta), epsilon_number(guarantee["epsilon"])
    epsilon = stated if same_value(stated, found) else found
    return PrivacyReport(
        epsilon, delta, plan.relation, scheme, plan.accountant, events,
        card["noise"]["seeded"], guarantee["verified"], card["noise"]["kind"],
    )  # fmt: skip


def _parsed(text: str, name: str) -> Card:
    """Strict JSON: no NaN, no infinity, no name twice in one object."""

    def refuse(constant: str) -> NoReturn:
        raise ValueError(f"{constant}, which is no JSON")

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            names = [key for key, _ in pairs]
            twice = next(key for key in names if names.count(key) > 1)
            raise ValueError(f"the name {shown(twice)} twice in one object")
        return found

    try:
        card: Card = json.loads(text, parse_constant=refuse, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"Expected JSON in {name}, found: {error}.") from error
    return card


def _after_blanks(text: str, place: int) -> int:
    while place < len(text) and text[place] in " \t\r\n":
        place += 1
    return place


def _pointer(path: Place) -> str:
    return "".join(f"/{str(step).replace('~', '~0').replace('/', '~1')}" for step in path)
