"""The report of one fit: privacy cost, scores, and what the model has learned."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from privagrad.data.models import INTERVAL, SavedModel
from privagrad.privacy.ledger import Account
from privagrad.report.charts import Kind, bar_chart, gauge
from privagrad.report.figures import figure_blocks
from privagrad.report.page import Banner, Block, Card, Cell, Figure, Table, Text, write_page

_BARS = 24
_HIDDEN = {
    "zero-out": "whether one given row contributed; the number of rows is public",
    "replace-one": "what any one row holds; the number of rows is public",
}
"""What a neighbouring relation hides: the only place where the report states it."""
_CHANGE = {
    "zero-out": "Let any one row contribute nothing instead of its values, or its values instead "
    "of nothing, while the number of rows stays the same",
    "replace-one": "Replace the values of any one row by any others, while the number of rows "
    "stays the same",
}
"""How neighbours differ."""

_WHOSE = {"row": "of each row", "user": "of all rows of a user together"}
"""What a guarantee protects."""

_SEPARATELY = {
    "row": "The guarantee protects each row separately. It is weaker for a person with several "
    "rows, or for a group of related rows.",
    "user": "The guarantee protects each user with all of the user's rows together. It is weaker "
    "for a group of related users.",
}
"""What the guarantee does not cover."""


def _of_unit(texts: Mapping[str, str], privacy: Mapping[str, Any]) -> str:
    """The text of a relation, of rows or of users."""
    return texts[privacy["relation"]].replace("row", privacy.get("unit", "row"))


def write_fit_report(path: Path, model: SavedModel, account: Account | None = None) -> None:
    """Write one HTML file about a model and the budget that was charged for it."""
    made = model.made
    subtitle = f"{model.loss} on {made['table']}, {model.size}, {made['at']}"
    write_page(path, f"Private model of {_target(model)}", subtitle, _blocks(model, account))


def write_evaluation_report(path: Path, model: SavedModel, found: Mapping[str, Any]) -> None:
    """Write one HTML file about how well a model predicts a table."""
    unit = found.get("privacy", {}).get("unit", "row")
    where = f"table {found['table']}, {found['rows']} {unit}s"
    banner = Banner("NOT PRIVATE: exact figures, which reveal something about the rows.", "warning")
    if privacy := found.get("privacy"):
        banner = Banner("NOT PRIVATE: the noise was seeded and can be repeated.", "warning")
        if not privacy["seeded"]:
            banner = Banner(
                f"Epsilon {privacy['epsilon']:.4g} at delta {privacy['delta']:.3g} for these "
                f"figures: a reader can hardly tell {_of_unit(_HIDDEN, privacy)}.",
                "good",
            )
    blocks = [banner, *figure_blocks(found, model.classes, where), _model_card(model)]
    subtitle = f"{model.loss} of {model.made['at']}, evaluated on {where}"
    write_page(path, f"Evaluation of a model of {_target(model)}", subtitle, blocks)


def _blocks(model: SavedModel, account: Account | None) -> list[Block]:
    privacy = model.privacy
    guarantee = (
        f"Epsilon {privacy['epsilon']:.4g} at delta {privacy['delta']:.3g}: a reader of this "
        f"model and this report can hardly tell {_of_unit(_HIDDEN, privacy)}."
    )
    if "test" in model.evaluation:
        guarantee += " The scores on the test table are exact: they are not private."
    banner = Banner(guarantee, "good")
    if privacy["seeded"]:
        banner = Banner("NOT PRIVATE: the noise was seeded and can be repeated.", "warning")
    if math.isinf(privacy["epsilon"]):
        banner = Banner("NOT PRIVATE: epsilon is infinite, no noise was added.", "warning")
    blocks: list[Block] = [banner, _privacy_card(model), _model_card(model)]
    if account is not None:
        blocks.append(_budget(model, account))
    if "figures" in model.evaluation or "score" in model.evaluation:
        blocks += figure_blocks(model.evaluation, model.classes, "training rows")
    if test := model.evaluation.get("test"):
        where = f"test table {test['table']}, {test['rows']} rows"
        blocks += figure_blocks(test, model.classes, where)
    blocks.append(_coefficients(model))
    if np.ptp(model.scale) > 0:
        blocks.append(_ellipsoid(model))
    blocks += [_events(model), _all_coefficients(model)]
    return blocks if math.isinf(privacy["epsilon"]) else [*blocks, _guarantee(model)]


def _target(model: SavedModel) -> str:
    return "the target" if model.schema is None else str(model.schema.target)


def _privacy_card(model: SavedModel) -> Card:
    privacy = model.privacy
    # Models of version 0.1 do not say it.
    kind = "discrete Gaussian" if privacy.get("noise") == "discrete" else "Gaussian"
    rows = [
        ("Epsilon", f"{privacy['epsilon']:.4g}", "the total of all releases below"),
        ("Delta", f"{privacy['delta']:.3g}", "probability that the guarantee may fail"),
        ("Neighbours", privacy["relation"], _of_unit(_HIDDEN, privacy)),
        ("Unit", model.privacy_unit, _WHOSE[model.privacy_unit]),
        ("Sampling", privacy["sampling"], ""),
        ("Accountant", privacy["accountant"], "releases are composed, not added"),
        ("Noise", "seeded: NOT private" if privacy["seeded"] else "from a secure source", kind),
    ]
    return Card("Privacy", [*rows, *(("Public", fact, "") for fact in privacy["public"])])


def _model_card(model: SavedModel) -> Card:
    made = model.made
    drawn = f"{made['batch_size']} {model.privacy_unit}s"
    rows = [
        ("Target", _target(model), ""),
        ("Loss", model.loss, ""),
        ("Method", made["method"], f"{made['steps']} steps of about {drawn}"),
        ("Columns", f"{len(model.features)}", "after encoding"),
        ("privagrad", made["version"], ""),
    ]
    if made["radius"] is not None:
        bound = f"{made['radius']:.4g}"
        rows.insert(-1, ("Bound on gradients", bound, "radius of the ellipsoid"))
    if made["dataset"]:
        rows.append(("Budget", made["dataset"], f"run {made['run']}"))
    return Card("Model", rows)


def _budget(model: SavedModel, account: Account) -> Figure:
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
    order = model.ranking[: min(_BARS, max(int(model.measurable.sum()), 1))]
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


def _ellipsoid(model: SavedModel) -> Figure:
    half_axes = model.made["radius"] / np.sqrt(model.scale)
    order = np.argsort(-half_axes)
    shown = order if order.size <= _BARS else np.r_[order[: _BARS // 2], order[-_BARS // 2 :]]
    chart = bar_chart(
        [model.features[j] for j in shown], half_axes[shown], x_label="half axis of the ellipsoid"
    )
    few = "" if order.size <= _BARS else "The longest and the shortest half axes. "
    return Figure(
        "The ellipsoid",
        chart,
        few + "A half axis bounds the gradient of a row in that column. The noise in the column is "
        "proportional to it. Columns are in their learned units.",
    )


def _events(model: SavedModel) -> Table:
    rows = [
        (e["purpose"], e["count"], f"{e['noise_multiplier']:.4g}", e.get("sampling") or "all rows")
        for e in model.privacy["events"]
    ]
    return Table("All releases", ("purpose", "times", "noise multiplier", "rows"), rows)


def _all_coefficients(model: SavedModel) -> Table:
    names = model.classes if len(model.intercept) > 1 and model.classes else [""]
    columns = ["feature", *(f"coefficient {name}".strip() for name in names), "95 %: ±", "centre"]
    measurable, reach = model.measurable, INTERVAL * model.coef_noise.max(axis=0)
    rows: list[list[Cell]] = [
        [model.features[j], *model.coef[:, j].tolist(), float(reach[j]), float(model.centre[j]),
         float(model.unit[j]) if measurable[j] else "not measurable"]
        for j in model.ranking
    ]  # fmt: skip
    constant = [*model.intercept.tolist(), INTERVAL * float(model.intercept_noise.max()), 0.0, 1.0]
    rows.append(["(intercept)", *constant])
    return Table("All coefficients, in original units", (*columns, "unit"), rows, collapsed=True)


def _guarantee(model: SavedModel) -> Text:
    privacy = model.privacy
    return Text(
        "What is guaranteed",
        [
            f"{_of_unit(_CHANGE, privacy)}: no result of this run becomes more than "
            f"exp({privacy['epsilon']:.3g}) times as likely or unlikely, except with probability "
            f"{privacy['delta']:.2g}. This holds whatever else is known about "
            f"the {model.privacy_unit}.",
            f"{_SEPARATELY[model.privacy_unit]} It does not hide what is true of the whole "
            "population: the model is there to learn that.",
            "Other runs on the same rows add to the cost. Use a budget to keep track of them.",
        ],
    )
