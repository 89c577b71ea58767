"""`privagrad compare`: methods on one problem under equal conditions, as a table and a plot."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from privagrad.experiments import write_csv
from privagrad.experiments.plots import COLOURS, figure, save
from privagrad.experiments.ring import Comparison, median_band, tune_and_run


class Row(NamedTuple):
    """One method at one epsilon; `loss` is the median over the runs of the final loss."""

    method: str
    epsilon: float
    loss: float
    low: float
    high: float
    excess: float
    epsilon_spent: float
    seconds: float
    step_size: float
    radius_factor: float
    schedule: str


def run(
    out: Path, comparison: Comparison, methods: Iterable[str], workers: int | None = None
) -> list[Row]:
    """Rows sorted by epsilon and loss; writes compare.csv, compare.png and compare.svg."""
    results = tune_and_run(comparison, methods, out / "compare.journal.jsonl", workers)
    optimum = comparison.reference(results)
    table = []
    for (name, epsilon), found in results.items():
        loss, low, high = (float(value) for value in median_band(found.losses[:, -1]))
        spent, setting = (found.epsilon, found.seconds), (found.step_size, found.radius_factor)
        measured = (loss, low, high, loss - optimum, *spent)
        table.append(Row(name, epsilon, *measured, *setting, found.schedule))
    table.sort(key=lambda row: (row.epsilon, row.loss))
    write_csv(out / "compare.csv", Row._fields, table)
    _draw(table, out / "compare", comparison)
    return table


def _draw(table: list[Row], stem: Path, comparison: Comparison) -> None:
    """A dot for every method and epsilon: excess loss to the right, the best method on top.

    The method that the excess is measured from has none, and no dot.
    """
    table = [row for row in table if row.excess != 0] or table
    best = {row.method: row.excess for row in reversed(table)}
    names = sorted(best, key=lambda name: -best[name])
    fig, (axes,) = figure(1, width=7.5, height=1.2 + 0.36 * len(names))
    epsilons = sorted({row.epsilon for row in table})
    floor = min((row.excess for row in table if row.excess > 0), default=1e-6)
    for epsilon, colour in zip(epsilons, COLOURS * len(epsilons), strict=False):
        chosen = [row for row in table if row.epsilon == epsilon]
        heights = [names.index(row.method) for row in chosen]
        middle = np.maximum([row.excess for row in chosen], floor)
        spread = np.array([[row.loss - row.low, row.high - row.loss] for row in chosen]).T
        spread[0] = np.minimum(spread[0], 0.999 * middle)
        label = "not private" if math.isinf(epsilon) else f"epsilon = {epsilon:g}"
        axes.errorbar(
            middle, heights, xerr=spread, fmt="o", color=colour, label=label, capsize=2,
            markersize=5,
        )  # fmt: skip
    axes.set_yticks(range(len(names)), names)
    axes.set(xscale="log", xlabel=comparison.measure, title=comparison.title)
    axes.legend(frameon=False)
    save(fig, stem)
