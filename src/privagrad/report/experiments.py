"""Reports of experiments: the comparison of optimizers, Figure 1, rates, Table 1."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from privagrad.report.charts import Series, bar_chart, line_chart
from privagrad.report.page import Banner, Block, Figure, Table, write_page

Row = dict[str, Any]
"""One line of a result, as it is kept in CSV or JSON."""

_NOT_PRIVATE = (
    "NOT PRIVATE: the methods were tuned and measured on these rows without privacy. This "
    "experiment compares methods; it does not release a model."
)

_SEEDED = "NOT PRIVATE: an experiment with seeded noise on synthetic rows."


def write_compare_report(path: Path, problem: str, rows: Sequence[Row]) -> None:
    """Write the losses of all methods, one chart for each epsilon."""
    blocks: list[Block] = [Banner(_NOT_PRIVATE, "warning")]
    blocks += _bars(rows)
    columns = ("method", "epsilon", "loss", "low", "high", "excess", "epsilon_spent", "seconds",
               "step_size", "radius_factor", "schedule")  # fmt: skip
    blocks.append(_table("All results", columns, rows))
    write_page(path, "Comparison of private optimizers", f"on {problem}", blocks)


def write_figure1_report(path: Path, summary: dict[str, Any]) -> None:
    """Write the final losses of Figure 1."""
    rows = summary["results"]
    blocks: list[Block] = [Banner(_SEEDED, "warning"), *_bars(rows)]
    columns = ("method", "epsilon", "loss", "low", "high", "excess", "step_size")
    blocks.append(_table("Final losses", columns, rows))
    ratios = summary["excess_ratio_of_pagan"]
    named = ("epsilon", "over", "ratio", "low", "high")
    blocks.append(_table("Excess loss of PAGAN relative to other methods", named, ratios))
    write_page(path, "Figure 1", "Absolute regression on the synthetic data of the paper", blocks)


def write_rates_report(
    path: Path, points: Sequence[Row], slopes: Sequence[Row], labels: Mapping[str, str]
) -> None:
    """Write the excess losses against n, d, epsilon and decay, with the paper's bounds."""
    blocks: list[Block] = [Banner(_SEEDED, "warning")]
    for varied, method in dict.fromkeys((p["varied"], p["method"]) for p in points):
        some = [p for p in points if (p["varied"], p["method"]) == (varied, method)]
        at, excess, low, high, upper, lower = (
            [p[key] for p in some] for key in ("value", "excess", "low", "high", "upper", "lower")
        )
        lines = [
            Series(method, at, excess, low, high),
            Series("upper bound", at, upper),
            Series("lower bound", at, lower),
        ]
        chart = line_chart(
            lines, labels[varied], "excess loss", log_x=varied != "decay", log_y=True
        )
        title = f"{method.upper()} against {labels[varied]}"
        blocks.append(Figure(title, chart, "Median over seeds; the band shows the quartiles."))
    columns = ("method", "varied", "measured", "predicted")
    blocks.append(_table("Slopes of log excess loss", columns, slopes))
    write_page(path, "Rates", "Measured excess loss and the bounds of the paper", blocks)


def write_images_report(path: Path, rows: Sequence[Row]) -> None:
    """Write the accuracies on images of digits."""
    blocks: list[Block] = [
        Banner("The noise is seeded: these runs are for figures, not for release.", "warning")
    ]
    columns = ("method", "epsilon", "seed", "accuracy", "epsilon_spent", "seconds")
    blocks.append(_table("All runs", columns, rows))
    write_page(path, "Digits", "A private linear model on fixed features", blocks)


def write_language_report(path: Path, rows: Sequence[Row]) -> None:
    """Write the perplexities of Table 1 and the curves of Figure 2."""
    blocks: list[Block] = [
        Banner("The noise is seeded: these runs are for figures, not for release.", "warning")
    ]
    for epsilon in dict.fromkeys(row["epsilon"] for row in rows):
        lines = [
            Series(
                f"{row['method']}, batches of {row['batch_size']}, seed {row['seed']}",
                list(range(1, len(row["valid_curve"]) + 1)),
                row["valid_curve"],
            )
            for row in rows
            if row["epsilon"] == epsilon
        ]
        chart = line_chart(lines, "epoch", "validation perplexity", log_y=True)
        caption = "The state of the LSTM is carried along the text."
        blocks.append(Figure(f"Epsilon {epsilon:g}", chart, caption))
    columns = ("method", "epsilon", "seed", "epochs", "batch_size", "step_size", "radius",
               "valid_perplexity", "valid_perplexity_reset", "test_perplexity", "epsilon_spent",
               "seconds")  # fmt: skip
    blocks.append(_table("Table 1", columns, rows))
    write_page(path, "Table 1 and Figure 2", "An LSTM language model on WikiText-2", blocks)


def _bars(rows: Sequence[Row]) -> list[Block]:
    """Excess losses, one chart for each epsilon, with the methods in the order of the rows."""
    blocks: list[Block] = []
    for epsilon in dict.fromkeys(row["epsilon"] for row in rows):
        some = [row for row in rows if row["epsilon"] == epsilon]
        chart = bar_chart(
            [row["method"] for row in some],
            [row["excess"] for row in some],
            [max(row["high"] - row["loss"], 0.0) for row in some],
            x_label="excess loss over the optimum",
        )
        caption = "Medians. Whiskers are ± the upper half of the 95 % confidence band."
        title = "Without privacy" if math.isinf(epsilon) else f"Epsilon {epsilon:g}"
        blocks.append(Figure(title, chart, caption))
    return blocks


def _table(title: str, columns: Sequence[str], rows: Sequence[Row]) -> Table:
    names = [column.replace("_", " ") for column in columns]
    return Table(title, names, [[row.get(column) for column in columns] for row in rows])
