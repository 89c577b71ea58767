"""`privagrad compare`: any methods on one problem, tuned by one rule, in a table and a plot."""

from __future__ import annotations

import csv
import math
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path

import numpy as np

from privagrad.experiments.arena import (
    CONTENDERS,
    STEP_SIZES,
    best_of,
    final_bouts,
    median_band,
    run_trial,
    tuning_bouts,
)
from privagrad.experiments.plots import COLOURS, figure, save
from privagrad.experiments.problems import FileProblem, load_problem
from privagrad.experiments.tasks import run_tasks


@dataclass(frozen=True)
class Row:
    """One method at one epsilon; losses are medians of the last iterate's over the runs."""

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


def compare(
    problem: str | FileProblem,
    methods: tuple[str, ...],
    epsilons: tuple[float, ...],
    out: Path,
    delta: float = 1e-5,
    batch_size: int | None = None,
    steps: int = 1000,
    runs: int = 10,
    tuning_runs: int = 2,
    step_sizes: tuple[float, ...] = (*STEP_SIZES, 2.0),
    workers: int | None = None,
) -> list[Row]:
    """Rows sorted by epsilon and loss; writes compare.csv, compare.png and compare.svg."""
    loaded = load_problem(problem)
    rows = loaded.X.shape[0]
    size = round(max(math.sqrt(rows), rows / 100)) if batch_size is None else batch_size
    journal = out / "compare.journal.jsonl"
    grids = {
        (name, epsilon): tuning_bouts(
            name, problem, epsilon, delta, size, steps, step_sizes, tuning_runs
        )
        for name in methods
        for epsilon in (epsilons if CONTENDERS[name].private else (math.inf,))
    }
    tuned = run_tasks(run_trial, chain(*grids.values()), journal, "tuning", workers)
    finals = {
        key: final_bouts(best_of({b: tuned[b] for b in grid}), runs, looks=1)
        for key, grid in grids.items()
    }
    ran = run_tasks(run_trial, chain(*finals.values()), journal, "running", workers)
    optimum = loaded.optimum()
    table = []
    for (name, epsilon), bouts in finals.items():
        losses = np.concatenate([np.array(ran[bout]["losses"])[:, -1] for bout in bouts])
        loss, low, high = (float(value) for value in median_band(losses))
        table.append(
            Row(
                name,
                epsilon,
                loss,
                low,
                high,
                loss - optimum,
                ran[bouts[0]]["epsilon"],
                min(ran[bout]["seconds"] for bout in bouts),
                bouts[0].step_size,
                bouts[0].radius_factor,
            )
        )
    table.sort(key=lambda row: (row.epsilon, row.loss))
    _write(table, out / "compare.csv")
    _draw(table, out / "compare", loaded.name)
    return table


def _write(table: list[Row], path: Path) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(asdict(table[0])))
        writer.writeheader()
        writer.writerows(asdict(row) for row in table)


def _draw(table: list[Row], stem: Path, title: str) -> None:
    """A dot for every method and epsilon, best methods on top, excess loss across."""
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
            middle,
            heights,
            xerr=spread,
            fmt="o",
            color=colour,
            label=label,
            capsize=2,
            markersize=5,
        )
    axes.set_yticks(range(len(names)), names)
    axes.set(xscale="log", xlabel="excess loss over the best found without privacy", title=title)
    axes.legend(frameon=False)
    save(fig, stem)
