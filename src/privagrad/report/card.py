"""The privacy card of a run: a record for those who decide about a release and did not train it.

It is plain JSON that a program can check: every question about the guarantee is answered from the
run, or by the data owner's own statement, or stands there as open.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from privagrad._internal import validate
from privagrad.data.models import SavedModel
from privagrad.privacy.accounting import PrivacyPlan, PrivacyReport
from privagrad.privacy.events import GaussianEvent
from privagrad.privacy.ledger import Account
from privagrad.privacy.report_codec import report_from_json
from privagrad.report import card_run as run
from privagrad.report.card_privacy import finite, installed, privacy_sections
from privagrad.report.card_questions import answered
from privagrad.report.statement import Statement, read_statement

FORMAT, VERSION = "privagrad-privacy-card", 1
Card = dict[str, Any]
"""A card as plain JSON values."""

StatementLike = Statement | Path | str | None
_SETTINGS = "all settings of this run"
TOLERANCE = 1e-4
"""Relative difference up to which two values of epsilon count as the same."""


def privacy_card(
    model: SavedModel, *, statement: StatementLike = None, account: Account | None = None
) -> Card:
    """The card of a saved model, as plain JSON values.

    Parameters
    ----------
    model : SavedModel
        The model. Its coefficients, its exact figures and its categories stay out of the card.
    statement : Statement or path or None
        What the owner of the data states; None: all of that is open.
    account : Account or None
        The budget that the model was charged to.

    Guarantees
    ----------
    Everything in the card is public, or released under the guarantee that it states, or the owner's
    own words. Exact figures are named and left out.
    """
    if account is not None and all(one.name != model.made["run"] for one in account.runs):
        raise ValueError(
            f"Expected the budget that the model was charged to, run {model.made['run']!r}, found "
            f"none of that name in the budget of {account.name!r}: give the ledger of the fit."
        )
    report = report_from_json(model.privacy)
    rows = int(model.made["rows"])
    return _assembled(
        report,
        rows=rows,
        model=model,
        product=run.product_of_model(model),
        algorithm=run.algorithm_of_model(model),
        public=model.privacy["public"],
        ledger=run.ledger_section(model.made, account),
        statement=statement,
    )


def card_of_report(
    report: PrivacyReport,
    *,
    kind: str = "result of a private computation",
    algorithm: str | None = None,
    rows: int | None = None,
    public: Iterable[str] = (),
    statement: StatementLike = None,
    account: Account | None = None,
) -> Card:
    """The card of any run with a `PrivacyReport`: of `minimize`, a search or the PyTorch engine.

    Parameters
    ----------
    report : PrivacyReport
        What the run released.
    kind, algorithm : str
        What the result is, and how it was computed, in the user's words. Without them an algorithm
        is named by its releases.
    rows : int or None
        The number of rows; None: that of the sampled releases, or open.
    public : iterable of str
        What else is public. Without any, the question stays open unless `rows` are known.
    statement, account
        As for `privacy_card`.
    """
    steps = [
        event
        for event in run.single_releases(report.events)
        if isinstance(event, GaussianEvent) and event.sampling is not None
    ]
    read = max((event.n_examples for event in steps), default=1)
    if rows is None and steps:
        rows = read
    if rows is not None and validate.integer("rows", rows) < read:
        raise ValueError(
            f"Expected at least the {read} {report.unit}s that were sampled, found rows={rows}."
        )
    known = [f"the number of {report.unit}s: {rows:,}", _SETTINGS] if rows is not None else []
    return _assembled(
        report,
        rows=rows,
        model=None,
        product=run.product_of_report(kind, rows, installed("privagrad")),
        algorithm={
            "name": run.plain(algorithm or run.algorithm_of_report(report)),
            "loss": None,
            "steps": sum(e.count for e in steps) or None,
            "batch_size": steps[-1].batch_size if steps else None,
        },
        public=[*known, *public],
        ledger=run.ledger_section(None, account),
        statement=statement,
    )


def card_text(card: Card) -> str:
    """A card as strict JSON: no NaN, no infinity, ends with a line break."""
    return json.dumps(card, ensure_ascii=False, allow_nan=False, indent=1) + "\n"


def statement_from(given: StatementLike) -> Statement:
    """A statement, read from its file if a path is given."""
    if isinstance(given, Statement):
        return given
    return Statement() if given is None else read_statement(given)


def _assembled(
    report: PrivacyReport,
    *,
    rows: int | None,
    model: SavedModel | None,
    product: Card,
    algorithm: Card,
    public: Iterable[str],
    ledger: Card,
    statement: StatementLike,
) -> Card:
    sections = privacy_sections(_accounted(report), rows)
    sections["guarantee"]["stated_epsilon"] = finite(report.epsilon)
    sections["neighbours"]["public"] = run.public_facts(public)
    card: Card = {
        "format": FORMAT,
        "version": VERSION,
        "library": {"name": "privagrad", "version": installed("privagrad")},
        "product": product,
        **sections,
        "ledger": ledger,
        "not_private": run.not_private_outputs(model),
        "utility": run.utility(model, report),
        "mechanism": {"algorithm": algorithm, "mechanisms": run.mechanisms(report)},
        "trust": run.trust(),
        "side_channels": run.side_channels(),
        "statement": statement_from(statement).values(),
    }
    return {**card, "questions": answered(card)}


def _accounted(report: PrivacyReport) -> PrivacyReport:
    """The same with the epsilon of its events, by this version's accountant."""
    if math.isinf(report.epsilon):
        return report
    plan = PrivacyPlan(report.events)
    found = plan.epsilon(report.delta)
    if found > report.epsilon * (1 + TOLERANCE):
        raise ValueError(
            f"Expected releases within the epsilon {report.epsilon:.6g} that is stated, found that "
            f"they cost {found:.6g} at delta {report.delta:g}: the file was changed, or an earlier "
            "accountant missed something. No card is made of it."
        )
    return replace(report, epsilon=found, accountant=plan.accountant)
