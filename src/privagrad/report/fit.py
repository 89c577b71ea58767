"""The report of one fit: what it cost, how good it is, what it learned; all of it private."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from privagrad.data.models import SavedModel
from privagrad.privacy.ledger import Account
from privagrad.report.charts import Series, bar_chart, gauge, line_chart
from privagrad.report.page import Banner, Block, Card, Figure, Table, Text, write_page

_BARS = 24


class _Neighbours(NamedTuple):
    """A neighbouring relation in plain words: what stays hidden, and which change hides it."""

    hidden: str
    change: str


_NEIGHBOURS = {
    "zero-out": _Neighbours(
        "whether one given row contributed; the number of rows is public",
        "Let any one row contribute nothing instead of its values, or its values instead of "
        "nothing, while the number of rows stays the same",
    ),
    "replace-one": _Neighbours(
        "what any one row holds; the number of rows is public",
        "Replace the values of any one row by any others, while the number of rows stays the same",
    ),
}
"""The only place where the report says what its promise is about."""


def write_fit_report(path: Path, model: SavedModel, account: Account | None = None) -> None:
    """One HTML file about a model, beside the budget that paid for it."""
    made = model.made
    subtitle = f"{model.loss} on {made['table']}, {made['rows']} rows, {made['at']}"
    write_page(path, f"Private model of {_target(model)}", subtitle, _blocks(model, account))


def _blocks(model: SavedModel, account: Account | None) -> list[Block]:
    privacy = model.privacy
    promise = (
        f"Epsilon {privacy['epsilon']:.4g} at delta {privacy['delta']:.3g}: whoever sees this "
        f"model and this report can hardly tell {_NEIGHBOURS[privacy['relation']].hidden}."
    )
    if "test" in model.evaluation:
        promise += " Figures on the test table are exact, and tell about its own rows."
    banner = Banner(promise, "good")
    if privacy["seeded"]:
        banner = Banner("NOT PRIVATE: the noise was seeded and can be drawn again.", "warning")
    blocks: list[Block] = [banner, _privacy_card(model), _model_card(model)]
    if account is not None:
        blocks.append(_budget(model, account))
    blocks += [_quality(model), *_curves(model), _coefficients(model), _ellipsoid(model)]
    if "test" in model.evaluation:
        blocks.append(_test_card(model))
    return [*blocks, _events(model), _all_coefficients(model), _words(model)]


def _target(model: SavedModel) -> str:
    return "the target" if model.schema is None else str(model.schema.target)


def _privacy_card(model: SavedModel) -> Card:
    privacy = model.privacy
    rows = [
        ("Epsilon", f"{privacy['epsilon']:.4g}", "the total of all releases below"),
        ("Delta", f"{privacy['delta']:.3g}", "with at most this probability it says nothing"),
        ("Neighbours", privacy["relation"], _NEIGHBOURS[privacy["relation"]].hidden),
        ("Sampling", privacy["sampling"], ""),
        ("Accountant", privacy["accountant"], "releases are composed, not added"),
        ("Noise", "seeded, NOT private" if privacy["seeded"] else "from a secure source", ""),
    ]
    return Card("Privacy", [*rows, *(("Public", fact, "") for fact in privacy["public"])])


def _model_card(model: SavedModel) -> Card:
    made = model.made
    rows = [
        ("Target", _target(model), ""),
        ("Loss", model.loss, ""),
        ("Method", made["method"], f"{made['steps']} steps of about {made['batch_size']} rows"),
        ("Columns", f"{len(model.features)}", "after encoding"),
        ("Bound on gradients", f"{made['radius']:.4g}", "the ellipsoid's radius"),
        ("privagrad", made["version"], ""),
    ]
    if made["dataset"]:
        rows.append(("Budget", made["dataset"], f"run {made['run']}"))
    return Card("Model", rows)


def _budget(model: SavedModel, account: Account) -> Figure:
    others = [run for run in account.runs if run.name != model.made["run"]]
    before = Account(account.name, account.epsilon, account.delta, None, tuple(others)).spent
    open_runs = [run for run in others if run.state == "reserved"]
    parts: list[Any] = [("other runs", before, "spent")]
    if model.made["run"]:
        parts.append(("this run", max(account.spent - before, 0.0), "this run"))
    note = f"At delta {account.delta:g}. Costs compose: a run adds less than its own epsilon."
    if open_runs:
        note += f" Reserved and not finished, counted in full: {len(open_runs)}."
    return Figure(
        f"Budget of {account.name}",
        gauge(parts, account.epsilon, "epsilon"),
        note,
    )


def _quality(model: SavedModel) -> Figure:
    found = model.evaluation
    names = ["this model", "majority rule" if model.classes else "the target's centre"]
    error = 2 * found["score_noise"]
    what = "accuracy" if model.classes else "1 - mean loss / cap"
    chart = bar_chart(
        names, [found["score"], found["baseline"]], [error, error], x_label=f"{what}, own rows"
    )
    caption = "Private: asked of the rows with noise, paid from the same budget; whiskers are ±2 "
    return Figure("How good it is", chart, caption + "standard deviations of that noise.")


def _curves(model: SavedModel) -> list[Figure]:
    found = model.evaluation
    steps = np.array(found["steps"], dtype=np.float64)
    losses = np.array(found["losses"], dtype=np.float64)
    clipped = np.array(found["clipped"], dtype=np.float64)
    noise, cap = 2 * found["curve_noise"], found["loss_cap"]
    loss = line_chart(
        [Series("loss", steps, losses, losses - noise * cap, losses + noise * cap)],
        "step",
        f"mean loss (a row at most {cap:.3g})",
    )
    share = line_chart(
        [Series("shrunk", steps, clipped, clipped - noise, clipped + noise)],
        "step",
        "share of rows",
        y_range=(0.0, 1.0),
    )
    band = "The band is ±2 standard deviations of the noise that keeps it private."
    return [
        Figure("Loss", loss, band),
        Figure("Rows whose gradients are shrunk to the ellipsoid", share, band),
    ]


def _coefficients(model: SavedModel) -> Figure:
    effects = model.coef * model.unit
    noise = model.coef_noise * model.unit
    row = np.abs(effects).argmax(axis=0)
    columns = np.arange(effects.shape[1])
    effect, error = effects[row, columns], 2 * noise[row, columns]
    order = np.argsort(-np.abs(effect))[:_BARS]
    names = [model.features[j] for j in order]
    if len(model.intercept) > 1 and model.classes:
        names = [f"{model.features[j]} ({model.classes[row[j]]})" for j in order]
    chart = bar_chart(names, effect[order], error[order], x_label="effect of a typical change")
    caption = (
        "Coefficients times the columns' learned units, the largest first. Whiskers are ±2 "
        "standard deviations over trainings repeated on made-up rows with independent columns; "
        "columns that say the same thing share their effect more loosely than shown."
    )
    if model.classes and len(model.intercept) == 1:
        caption = f"Bars to the right speak for {model.classes[1]}. " + caption
    return Figure("Coefficients", chart, caption)


def _ellipsoid(model: SavedModel) -> Figure:
    half_axes = model.made["radius"] / np.sqrt(model.scale)
    order = np.argsort(-half_axes)
    shown = order if order.size <= _BARS else np.r_[order[: _BARS // 2], order[-_BARS // 2 :]]
    chart = bar_chart(
        [model.features[j] for j in shown], half_axes[shown], x_label="half axis of the ellipsoid"
    )
    few = "" if order.size <= _BARS else "The longest and the shortest. "
    return Figure(
        "The ellipsoid",
        chart,
        few + "How far one row may pull each column's coefficient in a step, and in the same "
        "proportion how much noise it gets; columns are in their learned units.",
    )


def _test_card(model: SavedModel) -> Card:
    test = model.evaluation["test"]
    rows = [
        (key.replace("_", " "), value if isinstance(value, str) else f"{value:.5g}", "")
        for key, value in test.items()
        if key != "private"
    ]
    return Card("On a test table: NOT private, exact figures about its rows", rows)


def _events(model: SavedModel) -> Table:
    rows = [
        (e["purpose"], e["count"], f"{e['noise_multiplier']:.4g}", e.get("sampling") or "all rows")
        for e in model.privacy["events"]
    ]
    return Table("Every release", ("what", "times", "noise multiplier", "rows"), rows)


def _all_coefficients(model: SavedModel) -> Table:
    names = model.classes if len(model.intercept) > 1 and model.classes else [""]
    columns = ["feature", *(f"coefficient {name}".strip() for name in names), "noise", "centre"]
    rows: list[list[Any]] = [
        [feature, *model.coef[:, j].tolist(), float(model.coef_noise[:, j].max()),
         float(model.centre[j]), float(model.unit[j])]
        for j, feature in enumerate(model.features)
    ]  # fmt: skip
    constant = [*model.intercept.tolist(), float(model.intercept_noise.max()), 0.0, 1.0]
    rows.append(["(intercept)", *constant])
    return Table("All coefficients, in original units", (*columns, "unit"), rows, collapsed=True)


def _words(model: SavedModel) -> Text:
    privacy = model.privacy
    return Text(
        "What this promises",
        [
            f"{_NEIGHBOURS[privacy['relation']].change}: no result of this run becomes more than "
            f"exp({privacy['epsilon']:.3g}) times as likely or unlikely, except with probability "
            f"{privacy['delta']:.2g}. This holds whatever else is known about the row.",
            "It protects rows, one at a time. If a person has several rows, or rows belong to a "
            "family, their protection is weaker. What holds of the whole population is learned and "
            "not hidden: that is what the model is for.",
            "Further runs on the same rows add to the cost. Keep account of them with a budget.",
        ],
    )
