"""The report of one fit: for those who decide, for those who use the model, for experts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from privagrad.data.models import INTERVAL, SavedModel
from privagrad.privacy.ledger import Account
from privagrad.report.charts import Kind, bar_chart, gauge
from privagrad.report.columns import column_blocks
from privagrad.report.figures import figure_blocks
from privagrad.report.mechanism import MOST_BARS, mechanism_blocks
from privagrad.report.officer import officer_blocks, statement_blocks, target_of
from privagrad.report.page import Banner, Block, Card, Figure, Part, Text, write_page
from privagrad.report.statement import Statement
from privagrad.report.verdict import verdict_of_model


def write_fit_report(
    path: Path,
    model: SavedModel,
    account: Account | None = None,
    statement: Statement | None = None,
) -> None:
    """Write one HTML file about a model, the budget that was charged, and the owner's statement."""
    made = model.made
    subtitle = f"{model.loss} on {made['table']}, {model.size}, {made['at']}"
    blocks: list[Block] = [
        Part("1 Data protection", "For those who decide whether the model may be published."),
        *officer_blocks(model, account, statement),
        Part("2 The model", "What it has learned, from which columns, and how well it predicts."),
        *_model_blocks(model, account),
        Part("3 The mechanism", "For experts: all releases, their noise, and what is proved."),
        *mechanism_blocks(model),
    ]
    write_page(path, f"Private model of {target_of(model)}", subtitle, blocks)


def write_evaluation_report(
    path: Path,
    model: SavedModel,
    found: Mapping[str, Any],
    account: Account | None = None,
    statement: Statement | None = None,
) -> None:
    """Write one HTML file about how well a model predicts a table.

    `account` is the budget that was charged for it. Without a statement nothing is asked.
    """
    unit = found.get("privacy", {}).get("unit", "row")
    where = f"table {found['table']}, {found['rows']:,} {unit}s"
    banner = Banner("NOT PRIVATE: exact figures, which reveal something about the rows.", "warning")
    if privacy := found.get("privacy"):
        verdict = verdict_of_model(privacy, found["rows"], account)
        cost = f"Cost: epsilon {privacy['epsilon']:.4g} at delta {privacy['delta']:.3g}."
        banner = Banner(verdict.headline, verdict.tone, (cost, *verdict.sentences))
    asked: list[Block] = [] if statement is None else statement_blocks(where, statement)
    blocks = [banner, *asked, *figure_blocks(found, model.classes, where), _model_card(model)]
    subtitle = f"{model.loss} of {model.made['at']}, evaluated on {where}"
    write_page(path, f"Evaluation of a model of {target_of(model)}", subtitle, blocks)


def _model_blocks(model: SavedModel, account: Account | None) -> list[Block]:
    blocks: list[Block] = []
    if "figures" in model.evaluation or "score" in model.evaluation:
        blocks += figure_blocks(model.evaluation, model.classes, "training rows")
    if test := model.evaluation.get("test"):
        where = f"test table {test['table']}, {test['rows']:,} rows"
        blocks += figure_blocks(test, model.classes, where)
    blocks.append(_coefficients(model))
    if account is not None:
        blocks.append(_budget(model, account))
    return [*blocks, *column_blocks(model)]


def _model_card(model: SavedModel) -> Card:
    made = model.made
    rows = [
        ("Target", target_of(model), ""),
        ("Loss", model.loss, ""),
        ("Fitted to", made["table"], model.size),
        ("Columns", f"{len(model.features)}", "after encoding"),
        ("privagrad", made["version"], ""),
    ]
    return Card("Model", rows)


def _budget(model: SavedModel, account: Account) -> Figure | Text:
    if not math.isfinite(account.spent):
        why = "Its runs exceed the part of delta that later runs may use."
        if len(account.units) > 1:
            why = "Some of its runs protect rows and others users, whose costs do not add up."
        return Text(f"Budget of {account.name}", [f"{why} Nothing is left of it."])
    others = [run for run in account.runs if run.name != model.made["run"]]
    before = Account(account.name, account.epsilon, account.delta, None, tuple(others)).spent
    open_runs = [run for run in others if run.state == "reserved"]
    parts: list[tuple[str, float, Kind]] = [("other runs", before, "spent")]
    if model.made["run"]:
        parts.append(("this run", max(account.spent - before, 0.0), "this run"))
    note = f"At delta {account.delta:g}. Costs compose: a run adds less than its own epsilon."
    if open_runs:
        note += f" Reserved and not finished, counted in full: {len(open_runs)}."
    return Figure(f"Budget of {account.name}", gauge(parts, account.epsilon, "epsilon"), note)


def _coefficients(model: SavedModel) -> Figure:
    effects = model.coef * model.unit
    noise = model.coef_noise * model.unit
    row = np.abs(effects).argmax(axis=0)
    columns = np.arange(effects.shape[1])
    effect, error = effects[row, columns], INTERVAL * noise[row, columns]
    order = model.ranking[: min(MOST_BARS, max(int(model.measurable.sum()), 1))]
    names = [model.features[j] for j in order]
    if len(model.intercept) > 1 and model.classes:
        names = [f"{model.features[j]} ({model.classes[row[j]]})" for j in order]
    chart = bar_chart(names, effect[order], error[order], x_label="effect of a typical change")
    caption = (
        "Coefficients times the learned units of the columns, the largest first. Whiskers are 95 % "
        "intervals: how far the noise of privacy may have moved a coefficient. That other rows "
        "would give other coefficients is not counted."
    )
    if not model.evaluation:
        caption += " They are upper bounds: the fit paid for no evaluation."
    if hidden := int((~model.measurable).sum()):
        caption += f" Not measurable, because too few rows have them: {hidden} columns."
    if model.classes and len(model.intercept) == 1:
        caption = f"Positive values raise the probability of {model.classes[1]}. {caption}"
    return Figure("Coefficients", chart, caption)
