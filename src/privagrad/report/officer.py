"""The first part of a report: what someone must know who decides whether a model is published."""

from __future__ import annotations

import math
from collections.abc import Sequence

from privagrad.data.models import SavedModel
from privagrad.privacy.ledger import Account
from privagrad.report.card_run import kind_of
from privagrad.report.page import Banner, Block, Facts, Items, readable
from privagrad.report.statement import Statement
from privagrad.report.verdict import one_in, verdict_of_model

_OPEN = "open: to be filled in by the data owner"
_RELATIONS = {
    "zero-out": "One {unit} contributes its values, or nothing; the number of {unit}s is public.",
    "replace-one": "One {unit} holds its values, or any others; the number of {unit}s is public.",
}
"""A neighbouring relation in plain words."""

_FACTOR = 1e4


def officer_blocks(
    model: SavedModel, account: Account | None, statement: Statement | None
) -> list[Block]:
    """Verdict, purpose, guarantee, what is public, what is not covered, and who decides."""
    said = Statement() if statement is None else statement
    found = verdict_of_model(model.privacy, model.made["rows"], account)
    return [
        Banner(found.headline, found.tone, found.sentences),
        _purpose_of_model(model, said),
        _guarantee(model, account, said),
        Items("Public, not protected", list(model.privacy["public"])),
        Items("Not covered by the guarantee", list(_not_covered(model, account))),
        _decisions(said),
    ]


def statement_blocks(data: str, said: Statement) -> list[Block]:
    """What only the data owner can say about the figures of an evaluation on some data."""
    return [_purpose(data, "These figures, with this report.", said), _decisions(said)]


def target_of(model: SavedModel) -> str:
    """The name of the column that a model predicts."""
    return "the target" if model.schema is None else str(model.schema.target)


def _purpose_of_model(model: SavedModel, said: Statement) -> Facts:
    made = model.made
    what = f"A {kind_of(model)}, which predicts {target_of(model)}"
    released = f"{what}, fitted {made['at'][:10]}, and this report."
    return _purpose(f"{made['table']}, {model.size}", released, said)


def _purpose(name: str, released: str, said: Statement) -> Facts:
    data = f"{name}. {said.data_description}" if said.data_description else name
    rows = [
        ("Purpose", said.purpose),
        ("Owner", _listed(said.curators)),
        ("Contact", said.contact),
        ("Data set", data),
        ("Released", released),
    ]
    told = [("Name", said.name), ("Description", said.description)]
    return Facts("What it is for", [*(row for row in told if row[1]), *rows], _OPEN)


def _guarantee(model: SavedModel, account: Account | None, said: Statement) -> Facts:
    privacy = model.privacy
    unit, delta = privacy.get("unit", "row"), float(privacy["delta"])
    if not _is_private(model):
        nothing: list[tuple[str, str | None]] = [
            ("Protected", "Nothing and nobody: the run is not private."),
            ("Budget", _budget(model, account)),
        ]
        return Facts("What is guaranteed, and for whom", nothing, _OPEN)
    protected = f"One {unit} of the table."
    if unit == "row":
        protected = "One row of the table: a person, if no person has several rows."
    rows: list[tuple[str, str | None]] = [
        ("Protected", protected),
        (f"What a {unit} is to a person", said.privacy_unit),
        ("Rows of one person", said.rows_per_person),
        ("Tables compared", _RELATIONS[privacy["relation"]].format(unit=unit)),
        ("Epsilon", f"{readable(float(privacy['epsilon']))}, all releases of this run together"),
        ("Delta", f"{delta:.3g}: the guarantee fails in at most {one_in(delta)} cases"),
        ("Budget", _budget(model, account)),
    ]
    return Facts("What is guaranteed, and for whom", rows, _OPEN)


def _budget(model: SavedModel, account: Account | None) -> str:
    name = model.made["dataset"]
    if name is None:
        return "None: the run was charged to no budget. Other runs on these rows are not known."
    if account is None:
        return f"Budget {name}. This report was written without its ledger."
    spent = account.spent
    left = f"{max(account.epsilon - spent, 0.0):.4g}" if math.isfinite(spent) else "nothing"
    known = any(run.name == model.made["run"] for run in account.runs)
    missing = "" if known else f" The ledger does not hold run {model.made['run']} of this model."
    total = f"epsilon {account.epsilon:g} left, at delta {account.delta:g}."
    return f"Budget {name}: {left} of {total}{missing}"


def _not_covered(model: SavedModel, account: Account | None) -> Sequence[str]:
    privacy, made = model.privacy, model.made
    if not _is_private(model):
        return ["Everything that the model and this report show."]
    unit, epsilon = privacy.get("unit", "row"), privacy["epsilon"]
    factors = [math.exp(min(k * epsilon, 700.0)) for k in (1, 3)]
    shown = ["more than 10,000" if f > _FACTOR else f"{_rounded_up(f)}" for f in factors]
    groups = (
        f"Groups of related {unit}s. For k {unit}s together epsilon is k times as large, and delta "
        f"k exp((k - 1) epsilon) times: exp(epsilon) is {shown[0]} for one {unit}, {shown[1]} for "
        f"three, and delta for three is {_group_delta(3, epsilon, float(privacy['delta']))}."
    )
    if unit == "row":
        groups = f"A person with several rows. {groups}"
    lines = [groups]
    if test := model.evaluation.get("test"):
        lines.append(
            f"The scores on the test table {test['table']}: they are exact and NOT private, and "
            f"reveal something about its {test['rows']:,} rows."
        )
    runs = "Other runs on the same rows that were charged to no budget."
    if made["dataset"] is None:
        runs = "Other runs on the same rows: without a budget their costs are not added up."
    return [
        *lines,
        "What is true of the whole population: the model is there to learn it.",
        runs,
        "The same people in other data sets.",
    ]


def _is_private(model: SavedModel) -> bool:
    return math.isfinite(model.privacy["epsilon"]) and not model.privacy["seeded"]


def _group_delta(size: int, epsilon: float, delta: float) -> str:
    """The delta of so many units together, which may say nothing any more."""
    log = math.log(size * delta) + (size - 1) * epsilon if delta > 0 else -math.inf
    return "1, which is no guarantee at all" if log >= 0 else one_in(math.exp(log))


def _rounded_up(factor: float) -> str:
    """A factor that is never understated: 1.7, 42, 2,981."""
    return f"{math.ceil(factor * 10 - 1e-6) / 10:g}" if factor < 10 else f"{math.ceil(factor):,}"


def _decisions(said: Statement) -> Facts:
    rows = [
        ("Who receives the model", said.release_access),
        ("Why this epsilon and this delta", said.justification),
        ("Who may spend the budget", said.budget_policy),
        ("When it is used up", said.budget_exhausted),
        ("Origin of the public facts", said.public_facts),
        ("Who sees the raw rows", said.raw_access),
        ("Other releases of these data", said.other_releases),
    ]
    return Facts("Who decides what", rows, _OPEN)


def _listed(names: tuple[str, ...] | None) -> str | None:
    return None if names is None else ", ".join(names)
