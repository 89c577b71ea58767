"""Figure 1 of the paper: absolute regression at epsilon 0.1, 1 and 4.

The data are those of Section 5.1: one data set with n = 5000, d = 100, b = 70, and 500 more rows
from the same source as public rows, for PDP-SGD and the median gradient norm. The paper does not
state T and δ: here T = (n/b)² and δ = 1e-5. Batches are Poisson, accounted by PLD.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np

from privagrad._internal.validate import Vector
from privagrad.experiments import write_csv
from privagrad.experiments.arena import (
    PAPER_STEP_SIZES,
    RADIUS_FACTORS,
    VARIANTS,
    Conditions,
    ConvexComparison,
    recorded_steps,
)
from privagrad.experiments.plots import COLOURS, draw_band, figure, label_losses, save
from privagrad.experiments.problems import load_problem
from privagrad.experiments.ring import Result, median_band, tune_and_run

PROBLEM = "absolute-regression"
LABELS = {
    "adagrad": "AdaGrad (not private)",
    "pagan": "PAGAN, optimal diagonal",
    "pagan-identity": "PAGAN, A = I",
    "pasan-identity": "PASAN, A = I",
    "pdp-sgd-20": "PDP-SGD, rank 20",
    "pdp-sgd-50": "PDP-SGD, rank 50",
}
STYLES = dict(zip(LABELS, COLOURS, strict=False))
Results = dict[tuple[float, str], Result]
Curves = dict[tuple[float, str], tuple[Vector, Vector, Vector]]
"""Median, low and high at the recorded steps."""

FULL = Conditions(
    PROBLEM,
    epsilons=(0.1, 1.0, 4.0),
    batch_size=70,
    steps=round((5000 / 70) ** 2),
    step_sizes=PAPER_STEP_SIZES,
    tuning_runs=3,
    runs=30,
    points=80,
)
QUICK = replace(
    FULL, steps=1000, step_sizes=(0.05, 0.2, 0.5, 1.0), runs=8, tuning_runs=1, points=40
)


def run(out: Path, settings: Conditions = FULL, workers: int | None = None) -> dict[str, object]:
    """Tune, run, write CSV, plots and settings into `out`; returns what `figure1.json` holds."""
    found = tune_and_run(ConvexComparison(settings), LABELS, out / "figure1.journal.jsonl", workers)
    # Every panel shows methods without privacy too.
    results = {
        (epsilon, name): found[name, epsilon if VARIANTS[name].private else math.inf]
        for epsilon in settings.epsilons
        for name in LABELS
    }
    for stem, of in (("figure1", "the iterate"), ("figure1-average", "the averaged iterate")):
        curves = {
            key: median_band(result.losses if stem == "figure1" else result.averaged)
            for key, result in results.items()
        }
        _write_csv(out / f"{stem}.csv", results, curves, settings)
        _draw(out / stem, curves, settings, f"mean absolute error of {of}")
    summary = _summary(results, settings)
    (out / "figure1.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    return summary


def _write_csv(path: Path, results: Results, curves: Curves, settings: Conditions) -> None:
    iterations = recorded_steps(settings.steps, settings.points)
    columns = ("epsilon", "method", "step_size", "iteration", "median", "low", "high")
    rows = [
        (*key, results[key].step_size, iteration, *(f"{value:.6g}" for value in values))
        for key, curve in curves.items()
        for iteration, *values in zip(iterations, *curve, strict=True)
    ]
    write_csv(path, columns, rows)


def _draw(stem: Path, curves: Curves, settings: Conditions, label: str) -> None:
    panels = len(settings.epsilons)
    fig, grid = figure(panels, width=4.2 * panels, height=4.2)
    iterations = np.array(recorded_steps(settings.steps, settings.points))
    for axes, epsilon in zip(grid, settings.epsilons, strict=True):
        for name, method in LABELS.items():
            draw_band(axes, iterations, curves[epsilon, name], STYLES[name], method)
        axes.set(title=f"epsilon = {epsilon:g}", xlabel="iteration", yscale="log")
        axes.set_ylim(0.009, 1.0)
        label_losses(axes)
    grid[0].set_ylabel(label)
    grid[-1].legend(frameon=False, fontsize="small")
    fig.suptitle(
        f"Absolute regression, n = 5000, d = 100, b = {settings.batch_size}, T = {settings.steps}, "
        f"δ = {settings.delta:g}: median of {settings.runs} runs, 95 % band",
        fontsize="medium",
    )
    save(fig, stem)


def _summary(results: Results, settings: Conditions) -> dict[str, object]:
    optimum = load_problem(PROBLEM).optimum()
    rows = []
    for (epsilon, name), result in results.items():
        middle, low, high = (float(value) for value in median_band(result.losses[:, -1]))
        tuned = {"step_size": result.step_size, "radius_factor": result.radius_factor}
        band = {"loss": middle, "low": low, "high": high, "excess": middle - optimum}
        rows.append({"epsilon": epsilon, "method": name, **tuned, **band})
    ratios = [
        {"epsilon": epsilon, "over": other, **_ratio(results, epsilon, other, optimum)}
        for epsilon in settings.epsilons
        for other in ("pagan-identity", "pasan-identity")
    ]
    return {
        "settings": {**asdict(settings), "radius_factors": RADIUS_FACTORS},
        "optimum": optimum,
        "results": rows,
        "excess_ratio_of_pagan": ratios,
    }


def _ratio(results: Results, epsilon: float, other: str, optimum: float) -> dict[str, float]:
    """PAGAN's excess loss over that of another method: medians over runs, bootstrap interval."""
    rng = np.random.default_rng(0)
    above, below = (results[epsilon, name].losses[:, -1] for name in ("pagan", other))

    def resampled(losses: Vector) -> Vector:
        draws = rng.choice(losses, size=(2000, losses.size))
        excess: Vector = np.median(draws, axis=1) - optimum
        return excess

    low, high = np.quantile(resampled(above) / resampled(below), [0.025, 0.975])
    ratio = (np.median(above) - optimum) / (np.median(below) - optimum)
    return {"ratio": float(ratio), "low": float(low), "high": float(high)}
