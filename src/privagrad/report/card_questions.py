"""The questions that a privacy card answers, and who answers each: the run, the owner, or nobody.

They are those of the draft of NIST SP 800-226, Guidelines for Evaluating Differential Privacy
Guarantees, in our own words.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Status = Literal["answered by the run", "stated by the owner", "open"]


@dataclass(frozen=True)
class Question:
    """A question, the parts of the card where a run answers it, and the owner's fields for it.

    The run answers if all of its parts say something, else the owner if all of the fields do.
    """

    text: str
    run: tuple[str, ...] = ()
    owner: tuple[str, ...] = ()


def _run(text: str, *parts: str, owner: tuple[str, ...] = ()) -> Question:
    return Question(text, parts, owner)


def _owner(text: str, *fields: str) -> Question:
    return Question(text, (), fields)


QUESTIONS = (
    _run("Which definition of differential privacy holds?", "/guarantee/definition"),
    _run("What are epsilon and delta?", "/guarantee/epsilon", "/guarantee/delta"),
    _run("Is delta far below 1/n?", "/guarantee/rows"),
    _run(
        "Which native parameters let others convert the guarantee to another delta?",
        "/native/events", "/native/epsilon_at",
    ),
    _run("Can the guarantee be compared with others?", "/guarantee/comparison"),
    _run("Which unit is protected: a row or a user?", "/unit/level"),
    _owner("What is this unit to a person?", "privacy_unit"),
    _owner("How many rows may one person have?", "rows_per_person"),
    _run("How is the contribution of one unit bounded?", "/unit/contribution"),
    _run("Does this bound ever reset?", "/unit/resets"),
    _run("Which tables are neighbours?", "/neighbours/relation"),
    _run("What is public under this relation?", "/neighbours/public"),
    _owner("Where do the public facts come from?", "public_facts"),
    _run("How were rows sampled?", "/sampling/words"),
    _run("Which accountant composed the releases?", "/accountant/name"),
    _run("Is the noise secret?", "/noise/words"),
    _run("Which other runs did the ledger charge to the same data?", "/ledger/account"),
    _owner("Which other releases were made from the same data?", "other_releases"),
    _owner("Which releases from the same data are planned?", "future_releases"),
    _run("What is the total budget, and what is left of it?", "/ledger/account"),
    _owner("Who may spend the budget, and for which period does it hold?", "budget_policy"),
    _run("What happens when it is used up?", "/ledger/when_used_up", owner=("budget_exhausted",)),
    _run("Are queries chosen one after the other?", "/ledger/query_model"),
    _run("Which outputs are not private?", "/not_private"),
    _run("Which algorithm, library and version were used?", "/mechanism/algorithm", "/library"),
    _run("Where are the mechanisms proved and tested?", "/mechanism/mechanisms"),
    _run("How good is the result, with intervals?", "/utility/figures"),
    _run("What do clipping and post-processing do to it?", "/utility/effects"),
    _owner("How does the error differ between groups?", "group_errors"),
    _run("What does the library assume of whom?", "/trust"),
    _owner("Who sees the raw rows?", "raw_access"),
    _owner("Who sees what is released?", "release_access"),
    _owner("What is assumed of each of them?", "trust"),
    _run("Which side channels are closed, and which are open?", "/side_channels"),
    _owner("How are the raw rows stored?", "storage_security"),
    _owner("Who may read them, and how is this enforced?", "access_control"),
    _owner("Where were they exposed during collection?", "collection_exposure"),
    _owner("What is the result to be used for?", "purpose"),
    _owner("What are the data?", "data_description", "region"),
    _owner("What was done with the data before the run, without privacy?", "preprocessing"),
    _owner("Why these parameters?", "justification"),
    _owner("Who publishes it, and whom can one ask?", "curators", "contact"),
)  # fmt: skip


def answered(card: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Every question with its status, and the places of its answer."""
    return [_answer(question, card) for question in QUESTIONS]


def _answer(question: Question, card: Mapping[str, Any]) -> dict[str, Any]:
    statement = card["statement"]
    status: Status = "open"
    places = [*question.run, *(f"/statement/{name}" for name in question.owner)]
    if question.run and all(_says(_at(card, part)) for part in question.run):
        status, places = "answered by the run", list(question.run)
    elif question.owner and all(_says(statement[name]) for name in question.owner):
        status, places = "stated by the owner", [f"/statement/{name}" for name in question.owner]
    return {"question": question.text, "status": status, "where": places}


def _at(card: Mapping[str, Any], pointer: str) -> Any:
    value: Any = card
    for name in pointer.split("/")[1:]:
        value = value[name]
    return value


def _says(value: Any) -> bool:
    if isinstance(value, list):
        return any(_says(part) for part in value)
    if isinstance(value, dict) and "value" in value:  # a figure that noise may have left without
        return value["value"] is not None
    return value not in (None, "", [], {})
