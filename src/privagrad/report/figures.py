"""Figures of an evaluation in words and charts: for reports and for the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

import numpy as np

from privagrad.queries.figures import Evaluation
from privagrad.queries.verdicts import Estimate, labelled
from privagrad.report.charts import Series, bar_chart, line_chart
from privagrad.report.page import Banner, Block, Card, Cell, Figure, Table, readable

_NEGLIGIBLE = 1e-6
_NOISE = "The band is ±2 standard deviations of the noise that was added."


def figure_lines(found: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Name, value with ±2 standard deviations of its noise, and meaning of each figure."""
    shown = Evaluation.read(found)
    for label, figure, note in labelled(shown.figures, shown.quantile):
        yield label, estimated(figure), note


def estimated(figure: Estimate) -> str:
    """The value ± two standard deviations, with as many decimals as the noise leaves."""
    value, error = figure.value, 2 * figure.noise
    if not error > _NEGLIGIBLE * abs(value):
        return readable(value)
    decimals = max(0, 1 - int(np.floor(np.log10(error))))
    return f"{value:,.{decimals}f} ± {error:,.{decimals}f}"


def verdict(found: Mapping[str, Any], classes: list[str] | None) -> str:
    """The verdict of a file, also of earlier versions, which state none."""
    return str(found.get("verdict") or Evaluation.read(found).verdict(classes))


def figure_blocks(found: Mapping[str, Any], classes: list[str] | None, where: str) -> list[Block]:
    """A card with the figures, and the charts and tables behind them."""
    shown = Evaluation.read(found)
    kind = "Private: measured with noise and charged to epsilon"
    if not shown.private:
        kind = "NOT private: exact figures"
    blocks: list[Block] = [
        Banner(f"On the {where}: {verdict(found, classes)} {kind}."),
        Card(f"Figures, {where}", list(figure_lines(found))),
    ]
    note = _NOISE if shown.private else "Exact, NOT private."
    for part in (_roc(shown, note), _calibration(shown, note), _residuals(shown, note)):
        if part is not None:
            blocks.append(Figure(f"{part.title}, {where}", part.chart, part.caption))
    if classes and shown.confusion:
        blocks.append(_confusion(shown, classes, where))
    return blocks


def _roc(shown: Evaluation, note: str) -> Figure | None:
    if not shown.roc:
        return None
    x, y, noise = (np.array(shown.roc[k]) for k in ("false_positive", "true_positive", "noise"))
    band = (np.clip(y - 2 * noise, 0, 1), np.clip(y + 2 * noise, 0, 1)) if noise.any() else ()
    lines = [Series("model", x, y, *band), Series("no better than chance", [0, 1], [0, 1])]
    chart = line_chart(lines, "false positives, share", "true positives, share", y_range=(0.0, 1.0))
    auc = shown.figures["auc"]
    return Figure("ROC curve", chart, f"The area below it is the AUC, {estimated(auc)}. {note}")


def _calibration(shown: Evaluation, note: str) -> Figure | None:
    if not shown.calibration:
        return None
    found = {name: np.array(values) for name, values in shown.calibration.items()}
    y, noise = found["observed"], found["noise"]
    band = (np.clip(y - 2 * noise, 0, 1), np.clip(y + 2 * noise, 0, 1)) if noise.any() else ()
    lines = [
        Series("model", found["predicted"], y, *band), Series("right", [0, 1], [0, 1])
    ]  # fmt: skip
    chart = line_chart(lines, "predicted probability", "observed share", y_range=(0.0, 1.0))
    what = "Of the second class." if shown.roc else "Of the most likely class."
    return Figure("Calibration", chart, f"{what} Rows are in parts of at least 5 %. {note}")


def _residuals(shown: Evaluation, note: str) -> Figure | None:
    if not shown.residuals:
        return None
    edges, shares = shown.residuals["edges"], shown.residuals["shares"]
    texts = [readable(edge) for edge in edges]
    names = [f"below {texts[0]}", *(f"{a} to {b}" for a, b in pairwise(texts)),
             f"above {texts[-1]}"]  # fmt: skip
    noise = 2 * np.array(shown.residuals["noise"])
    chart = bar_chart(names, shares, noise if noise.any() else None, x_label="share of the rows")
    whiskers = note.replace("The band is", "Whiskers are")
    return Figure("Prediction minus target", chart, whiskers)


def _confusion(shown: Evaluation, classes: list[str], where: str) -> Table:
    """Of each true class, how its rows were predicted; of many classes the table scrolls."""
    least = max(2 * shown.confusion_noise, 1e-12)
    rows: list[list[Cell]] = [
        [name, f"{share:.1%}",
         *(f"{min(cell / max(share, cell), 1.0):.0%}" if cell > least else None for cell in cells)]
        for name, cells, share in zip(classes, shown.confusion, shown.shares, strict=True)
    ]  # fmt: skip
    noise = f". Noise hides cells below {least:.2%} of all rows: –" if shown.confusion_noise else ""
    title = f"Confusion matrix, {where}: how the rows of each class were predicted{noise}"
    return Table(title, ["true class", "share", *classes], rows)
