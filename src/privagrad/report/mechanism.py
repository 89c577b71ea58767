"""The last part of a report, for experts: all releases, their noise, what follows from it."""

from __future__ import annotations

import math

import numpy as np

from privagrad.data.models import INTERVAL, SavedModel
from privagrad.privacy.events import SelectEvent
from privagrad.privacy.report_codec import report_from_json
from privagrad.report.card_run import single_releases
from privagrad.report.charts import bar_chart
from privagrad.report.page import Block, Card, Cell, Figure, Row, Table, Text
from privagrad.report.verdict import best_guess, best_guess_of, percent

MOST_BARS = 24
"""In one chart."""

_CLASSES = 6
_CHANGE = {
    "zero-out": "Let any one {unit} contribute nothing instead of its values, or its values "
    "instead of nothing, while the number of {unit}s stays the same",
    "replace-one": "Replace the values of any one {unit} by any others, while the number of "
    "{unit}s stays the same",
}
"""How neighbours differ."""


def mechanism_blocks(model: SavedModel) -> list[Block]:
    """The guarantee's terms, all releases, the ellipsoid, all coefficients, and the theorem."""
    blocks: list[Block] = [_terms(model), _settings(model), _events(model)]
    if math.isfinite(model.privacy["epsilon"]):
        blocks.append(_guarantee(model))
    if np.ptp(model.scale) > 0:
        blocks.append(_ellipsoid(model))
    return [*blocks, *_all_coefficients(model)]


def _terms(model: SavedModel) -> Card:
    privacy = model.privacy
    # Models of version 0.1 do not say it.
    kind = "discrete Gaussian" if privacy.get("noise") == "discrete" else "Gaussian"
    rows: list[Row] = [
        ("Epsilon", f"{privacy['epsilon']:.4g}", "the total of all releases below"),
        ("Delta", f"{privacy['delta']:.3g}"),
        ("Unit", model.privacy_unit),
        ("Neighbours", privacy["relation"]),
        ("Sampling", privacy["sampling"].replace("all rows", f"all {model.privacy_unit}s")),
        ("Accountant", privacy["accountant"], "releases are composed, not added"),
        ("Noise", "seeded: NOT private" if privacy["seeded"] else "from a secure source", kind),
    ]
    if math.isinf(privacy["epsilon"]):
        rows[-1] = ("Noise", "none: NOT private")
    if math.isfinite(privacy["epsilon"]) and not privacy["seeded"]:
        bound = best_guess(privacy["epsilon"], privacy["delta"])
        found = min(bound, best_guess_of(report_from_json(privacy).events))
        note = "of any attacker who saw all that was released, from its own noise"
        rows.append(("50:50 guess, at most", percent(found), note))
    return Card("Privacy", rows)


def _settings(model: SavedModel) -> Card:
    made = model.made
    drawn = f"{made['batch_size']:,} {model.privacy_unit}s"
    rows: list[Row] = [
        ("Loss", model.loss),
        ("Method", made["method"], f"{made['steps']} steps of about {drawn}"),
        ("Columns", f"{len(model.features)}", "after encoding"),
        ("privagrad", made["version"]),
    ]
    if made["radius"] is not None:
        bound = f"{made['radius']:.4g}"
        rows.insert(-1, ("Bound on gradients", bound, "radius of the ellipsoid"))
    if made["dataset"]:
        rows.append(("Budget", made["dataset"], f"run {made['run']}"))
    return Card("Training", rows)


def _events(model: SavedModel) -> Table:
    events = report_from_json(model.privacy).events
    units = f"{model.privacy_unit}s"
    rows = [
        (e.purpose, e.count, f"{e.noise_multiplier:.4g}", e.sampling or f"all {units}")
        for e in single_releases(events)
    ]
    title = "All releases"
    for event in events:
        if isinstance(event, SelectEvent):
            title = f"Releases of one run; the best of {event.mean:g} on average was kept"
    return Table(title, ("purpose", "times", "noise multiplier", units), rows)


def _guarantee(model: SavedModel) -> Text:
    privacy, unit = model.privacy, model.privacy_unit
    proved = "What is proved"
    if privacy["seeded"]:
        proved = "What would be proved if the noise had not been seeded"
    epsilon, delta = f"{privacy['epsilon']:.4g}", f"{privacy['delta']:.3g}"
    change = _CHANGE[privacy["relation"]].format(unit=unit)
    return Text(
        proved,
        [
            f"{change}: no set of results of this run becomes more likely "
            f"than exp({epsilon}) times its probability before, plus {delta}. In formulas, P(S) ≤ "
            f"exp({epsilon}) Q(S) + {delta} for every set S of results, with P and Q their "
            "distributions before and after the change, and the other way round. This holds "
            f"whatever else is known about the {unit}.",
            "It follows that a 50:50 guess is right with a probability of at most (exp(ε) + δ) / "
            "(1 + exp(ε)), and that a suspicion, if it is true, has on average a probability of "
            "at most δ + (1 - δ) q afterwards, the odds of q being exp(ε) times those before "
            "(Kairouz, Oh and Viswanath 2015). A single result may raise the odds by more than "
            "exp(ε), and with a larger probability than δ.",
            _accounting(model),
        ],
    )


def _accounting(model: SavedModel) -> str:
    """Why epsilon bounds all releases together."""
    told = report_from_json(model.privacy).events
    events = tuple(single_releases(told))
    how = (
        f"Each release is a sum to which no {model.privacy_unit} contributes more than norm 1, "
        "plus Gaussian noise with the noise multiplier in the table as its standard deviation. "
    )
    if any(isinstance(event, SelectEvent) for event in told):
        return how + (
            "Only the best of a random number of such runs is shown, and the number stays secret. "
            "Such a choice costs a few times one run: its Rényi divergences are bounded from those "
            "of one run (Papernot and Steinke 2022), and turned into epsilon."
        )
    if any(getattr(event, "leak", 0) for event in events):
        how += "What the discovery of categories may reveal is added to delta. "
    if any(event.sampling for event in events):
        return how + (
            "Releases over samples are composed as privacy loss distributions, whose losses are "
            "rounded up; what the Fourier transform may lose is added to delta."
        )
    return how + (
        f"Releases over all {model.privacy_unit}s compose to one Gaussian release, whose delta is "
        "a known function of epsilon (Balle and Wang 2018)."
    )


def _ellipsoid(model: SavedModel) -> Figure:
    half_axes = model.made["radius"] / np.sqrt(model.scale)
    order = np.argsort(-half_axes)
    half = MOST_BARS // 2
    shown = order if order.size <= MOST_BARS else np.r_[order[:half], order[-half:]]
    chart = bar_chart(
        [model.features[j] for j in shown], half_axes[shown], x_label="half axis of the ellipsoid"
    )
    few = "" if order.size <= MOST_BARS else "The longest and the shortest half axes. "
    return Figure(
        "The ellipsoid",
        chart,
        few + "A half axis bounds the gradient of a row in that column. The noise in the column is "
        "proportional to it. Columns are in their learned units.",
    )


def _all_coefficients(model: SavedModel) -> list[Block]:
    """Tables of at most six classes each; centres and units stand in the first one."""
    names = model.classes if len(model.intercept) > 1 and model.classes else [""]
    measurable, reach = model.measurable, INTERVAL * model.coef_noise.max(axis=0)
    blocks: list[Block] = []
    for start in range(0, len(names), _CLASSES):
        some = slice(start, start + _CLASSES)
        columns = ["feature", *(name or "coefficient" for name in names[some]), "95 %: ±"]
        rows: list[list[Cell]] = [
            [model.features[j], *model.coef[some, j].tolist(), float(reach[j])]
            for j in model.ranking
        ]
        constant = model.intercept[some].tolist(), INTERVAL * float(model.intercept_noise.max())
        rows.append(["(intercept)", *constant[0], constant[1]])
        title = "All coefficients, in original units"
        if start == 0:
            columns += ["centre", "unit"]
            for j, row in zip(model.ranking, rows, strict=False):
                unit = float(model.unit[j]) if measurable[j] else "not measurable"
                row += [float(model.centre[j]), unit]
            rows[-1] += [0.0, 1.0]
        if len(names) > _CLASSES:
            title += f": classes {start + 1} to {min(start + _CLASSES, len(names))}"
        blocks.append(Table(title, columns, rows, collapsed=True))
    return blocks
