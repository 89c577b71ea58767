"""The results as files: CSV, Markdown, plot."""

from __future__ import annotations

import math
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from privagrad.experiments import write_csv
from privagrad.experiments.images.settings import Plan
from privagrad.experiments.plots import COLOURS, figure, save

Row = dict[str, Any]
"""The fields of a `Setting` and of a `RunResult`, as they are kept in JSON."""

LABELS = {
    "pagan": "PAGAN (ellipsoid), scattering",
    "dp-adagrad": "DP-AdaGrad (ball), scattering",
    "dp-sgd": "DP-SGD (ball), scattering",
    "dp-sgd-pixels": "DP-SGD (ball), pixels",
}
PUBLISHED = {
    1.0: (("DP-SGD", 91.7), ("DP-AdamBC", 94.0), ("DP-KFC", 94.2)),
    3.0: (("linear model on scattering features (Tramèr and Boneh 2021)", 98.7),),
}
"""Accuracies in percent at delta = 1e-5."""

_ERRORS = (1.0, 2.0, 5.0, 10.0)
COLUMNS = (
    "method", "epsilon", "seed", "accuracy", "epsilon_spent", "step_size", "radius", "steps",
    "noise_multiplier", "seconds",
)  # fmt: skip


def write_results(out: Path, rows: list[Row], plan: Plan) -> None:
    """Write images.csv, images.md, images.png and images.svg."""
    write_csv(out / "images.csv", COLUMNS, [[row[key] for key in COLUMNS] for row in rows])
    (out / "images.md").write_text(_markdown(rows, plan), encoding="utf-8")
    _draw(out / "images", rows)


def groups(rows: list[Row]) -> dict[tuple[str, float], list[Row]]:
    """The runs of each method at each epsilon."""
    found: dict[tuple[str, float], list[Row]] = {}
    for row in rows:
        found.setdefault((row["method"], row["epsilon"]), []).append(row)
    return dict(sorted(found.items(), key=lambda item: item[0][1]))


def spread(values: list[float]) -> str:
    """The mean in percent, and the standard deviation of several values."""
    percent = [100 * value for value in values]
    if len(percent) == 1:
        return f"{percent[0]:.2f}"
    return f"{mean(percent):.2f} ± {stdev(percent):.2f}"


def _markdown(rows: list[Row], plan: Plan) -> str:
    lines = [
        "| method | epsilon | accuracy in % | seeds | seconds a run |",
        "|---|---|---|---|---|",
    ]
    for (method, epsilon), group in groups(rows).items():
        accuracy = spread([row["accuracy"] for row in group])
        seconds = mean(row["seconds"] for row in group)
        lines.append(
            f"| {LABELS[method]} | {epsilon:g} | {accuracy} | {len(group)} | {seconds:.0f} |"
        )
    if not (plan.quick or plan.held_out):
        lines += [
            f"| {name} | {epsilon:g} | {accuracy} (published) | | |"
            for epsilon, found in PUBLISHED.items()
            if any(row["epsilon"] == epsilon for row in rows)
            for name, accuracy in found
        ]
    lines += ["", "Mean ± standard deviation over seeds. The noise is seeded."]
    lines += ["Seconds are those of training, without the features, which all runs share."]
    if plan.held_out:
        lines.append("Measured on training rows that were held out: for tuning.")
    if plan.quick:
        lines.append("Few images and few axes: not comparable with published figures.")
    return "\n".join([*lines, *_differences(rows)]) + "\n"


def _differences(rows: list[Row]) -> list[str]:
    """What the ellipsoid gains over each method with a ball, seed by seed, with an interval."""
    found = {(r["method"], r["epsilon"], r["seed"]): 100 * r["accuracy"] for r in rows}
    notes = []
    for method, epsilon in groups(rows):
        gains = [
            found["pagan", epsilon, seed] - value
            for (name, at, seed), value in found.items()
            if (name, at) == (method, epsilon) and ("pagan", epsilon, seed) in found
        ]
        if method != "pagan" and len(gains) > 1:
            middle, half = _interval(gains)
            notes.append(
                f"- {LABELS[method]}, epsilon {epsilon:g}: {middle:+.2f} "
                f"({middle - half:+.2f} to {middle + half:+.2f})"
            )
    if not notes:
        return []
    title = "Points that PAGAN gains, mean over seeds with its 95 % interval (Student's t):"
    return ["", title, "", *notes]


def _interval(values: list[float]) -> tuple[float, float]:
    """The mean of two or more values, and half the length of its 95 % interval."""
    from scipy.stats import t

    half = t.ppf(0.975, len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return mean(values), float(half)


def _draw(stem: Path, rows: list[Row]) -> None:
    fig, (axes,) = figure(1, width=5.5, height=4.2)
    found = groups(rows)
    for colour, method in zip(COLOURS, dict.fromkeys(row["method"] for row in rows), strict=False):
        epsilons = [epsilon for name, epsilon in found if name == method]
        errors = [
            100 - 100 * mean(row["accuracy"] for row in found[method, epsilon])
            for epsilon in epsilons
        ]
        axes.plot(epsilons, errors, "o-", color=colour, label=LABELS[method])
    axes.set(xlabel="epsilon", ylabel="error in %", xscale="log", yscale="log")
    for ticks, of in (
        (sorted({row["epsilon"] for row in rows}), axes.xaxis),
        (_ERRORS, axes.yaxis),
    ):
        of.set_ticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.legend(frameon=False, fontsize="small")
    save(fig, stem)
