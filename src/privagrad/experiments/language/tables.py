"""Table 1 and Figure 2 as files: CSV, Markdown with the paper's figures, plots."""

from __future__ import annotations

import math
from pathlib import Path
from statistics import mean, stdev
from typing import TYPE_CHECKING, Any

from privagrad.experiments import DELTA, write_csv
from privagrad.experiments.language.corpus import LENGTH, Sequences, Texts
from privagrad.experiments.language.settings import PAPER_WIDTH, SHAPED
from privagrad.experiments.language.tuning import Trial, price
from privagrad.experiments.plots import COLOURS, figure, save
from privagrad.privacy.bands import with_bands
from privagrad.privacy.events import training_event
from privagrad.privacy.sampling import Batches

if TYPE_CHECKING:
    from matplotlib.lines import Line2D

Row = dict[str, Any]
"""The fields of a `Setting` and of a `RunResult`, as they are kept in JSON."""

LABELS = {
    "dp-sgd": "DP-SGD",
    "pasan": "PASAN",
    "pagan": "PAGAN",
    "sgd": "SGD (not private)",
    "adagrad": "AdaGrad (not private)",
}
PAPER = {
    "dp-sgd": {3.0: 238.44, 1.0: 285.11, 0.5: 350.23},
    "pasan": {3.0: 238.87, 1.0: 274.63, 0.5: 332.52},
    "pagan": {3.0: 224.82, 1.0: 253.41, 0.5: 291.41},
    "sgd": {math.inf: 75.45},
    "adagrad": {math.inf: 79.74},
}
"""Test perplexities of the paper's Table 1."""

_STARTS = {"random": "", "words": ", word frequencies", "public": ", from the public model"}
_LINES = {"random": "-", "words": "--", "public": ":"}

COLUMNS = (
    "method", "epsilon", "seed", "epochs", "step_size", "radius", "bands",
    "valid_perplexity", "test_perplexity", "epsilon_spent", "seconds",
)  # fmt: skip


def _label(row: Row) -> str:
    return LABELS[row["kind"]] + _STARTS[row["start"]]


def write_results(out: Path, rows: list[Row], texts: Texts, trials: list[Trial]) -> None:
    """Write table1.csv and .md, curves.csv, figure2.png and .svg."""
    write_csv(out / "table1.csv", COLUMNS, [[row[key] for key in COLUMNS] for row in rows])
    curves = [
        (row["method"], row["epsilon"], row["seed"], epoch, rounds, row["valid_curve"][epoch - 1])
        for row in rows
        for epoch, rounds in enumerate(_rounds(row), start=1)
    ]
    columns = ("method", "epsilon", "seed", "epoch", "rounds", "valid_perplexity")
    write_csv(out / "curves.csv", columns, curves)
    notes = _differences(rows) + _prices(trials, rows, len(Sequences(texts.train)))
    if texts.test is None:
        notes.append("There was no test.txt: the test column is empty.")
    (out / "table1.md").write_text(_markdown(rows, notes), encoding="utf-8")
    _draw(out / "figure2", rows)


def _rounds(row: Row) -> list[int]:
    """The number of steps after each epoch."""
    epochs = len(row["valid_curve"])
    return [row["steps_made"] * epoch // epochs for epoch in range(1, epochs + 1)]


def _differences(rows: list[Row]) -> list[str]:
    """The perplexity of shaped noise relative to the ball, seed by seed, with an interval."""
    found = {(r["kind"], r["start"], r["epsilon"], r["seed"]): r["valid_perplexity"] for r in rows}
    notes = []
    for kind, start, epsilon in dict.fromkeys(key[:3] for key in found if key[0] in SHAPED):
        differences = [
            100 * (value / found["dp-sgd", *key[1:]] - 1)
            for key, value in found.items()
            if key[:3] == (kind, start, epsilon) and ("dp-sgd", *key[1:]) in found
        ]
        if len(differences) > 1:
            middle, half = interval(differences)
            notes.append(
                f"- {LABELS[kind]} against DP-SGD{_STARTS[start]} at epsilon {epsilon:g}: "
                f"{middle:+.1f} % ({middle - half:+.1f} to {middle + half:+.1f} %)"
            )
    if not notes:
        return []
    title = "Validation perplexity, mean over seeds with its 95 % interval (Student's t):"
    return ["", title, "", *notes, ""]


def interval(values: list[float]) -> tuple[float, float]:
    """The mean of two or more values, and half the length of its 95 % interval."""
    from scipy.stats import t

    half = t.ppf(0.975, len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return mean(values), float(half)


def _prices(trials: list[Trial], rows: list[Row], examples: int) -> list[str]:
    """What the tuning would cost if it were charged."""
    if not trials:
        return []
    notes = [
        f"Step size, radius and schedule are the best of {len(trials)} trials on the validation "
        "text (tuning.csv). The trials are not charged. If every trial were a private run:"
    ]
    finals = {(row["method"], row["epsilon"]): row for row in rows}
    for (method, epsilon), row in finals.items():
        own = [t for t in trials if (t.method, t.epsilon) == (method, epsilon)]
        if own and math.isfinite(epsilon):
            batch = min(row["batch_size"], examples)
            noise, steps = row["noise_multiplier"], row["steps_made"]
            batches = with_bands(Batches(examples, batch, steps), row["bands"])
            final = training_event(batches, noise)
            notes.append(
                f"- {_label(row)}: {len(own)} trials and the run itself, epsilon "
                f"{price(own, final, DELTA):.3g} instead of {epsilon:g}"
            )
    return notes


def _markdown(rows: list[Row], notes: list[str]) -> str:
    lines = [
        "| method | epsilon | validation, state carried | "
        f"reset every {LENGTH} | test | paper's test |",
        "|---|---|---|---|---|---|",
    ]
    for method, epsilon in dict.fromkeys((row["method"], row["epsilon"]) for row in rows):
        group = [r for r in rows if (r["method"], r["epsilon"]) == (method, epsilon)]
        cells = [_spread([r[key] for r in group]) for key in _SHOWN]
        paper = PAPER.get(method, {}).get(epsilon)
        lines.append(f"| {_label(group[0])} | {epsilon:g} | {' | '.join(cells)} | {paper or ''} |")
    lines += ["", "Perplexity, mean ± standard deviation over seeds. The noise is seeded."]
    lines.append(
        "The vocabulary is taken from the training text unless --vocabulary public: that is "
        "not private."
    )
    if any(row["start"] == "public" for row in rows):
        lines.append(
            "From the public model: trained on the public text without privacy first. This is not "
            "in the paper."
        )
    if any(row["start"] == "words" for row in rows):
        lines.append(
            "Word frequencies: the biases start from the word frequencies of the public text, and "
            "the rows of rare words take smaller steps. This is not in the paper."
        )
    if any(row["sample"] for row in rows):
        lines.append(
            "Trials: all steps of a run with all of its noise, on few examples a step. Not private."
        )
    if any(row["width"] != PAPER_WIDTH for row in rows):
        lines.append("A small model on a part of the text: not comparable with the paper.")
    return "\n".join([*lines, *notes]) + "\n"


_SHOWN = ("valid_perplexity", "valid_perplexity_reset", "test_perplexity")


def _spread(values: list[float | None]) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return ""
    return f"{mean(known):.1f}" + (f" ± {stdev(known):.1f}" if len(known) > 1 else "")


def _draw(stem: Path, rows: list[Row]) -> None:
    epsilons = sorted({r["epsilon"] for r in rows if math.isfinite(r["epsilon"])}, reverse=True)
    panels = epsilons or [math.inf]
    colours = dict(zip(LABELS, COLOURS, strict=False))
    lines: dict[str, Line2D] = {}
    fig, grid = figure(len(panels), width=4.2 * len(panels), height=4.2)
    for axes, epsilon in zip(grid, panels, strict=True):
        for row in (row for row in rows if row["epsilon"] == epsilon):
            best = [min(row["valid_curve"][: k + 1]) for k in range(len(row["valid_curve"]))]
            style = _LINES[row["start"]]
            (lines[_label(row)],) = axes.plot(
                _rounds(row), best, color=colours[row["kind"]], linestyle=style
            )
        axes.set(title=f"epsilon = {epsilon:g}", xlabel="rounds")
    grid[0].set_ylabel("best validation perplexity so far")
    grid[-1].legend(list(lines.values()), list(lines), frameon=False, fontsize="small")
    save(fig, stem)
