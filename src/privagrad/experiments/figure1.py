"""Figure 1 of the paper: absolute regression at epsilon 0.1, 1 and 4.

Section 5.1's data (one data set, 500 further rows of the same source as public split for PDP-SGD
and the median gradient norm), n = 5000, d = 100, b = 70. The paper does not state T and δ: we take
T = (n/b)² and δ = 1e-5. Batches are Poisson, accounted by PLD.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path

import numpy as np

from privagrad._internal.validate import Vector
from privagrad.experiments.arena import (
    RADIUS_FACTORS,
    STEP_SIZES,
    Trial,
    best_of,
    final_bouts,
    look_at,
    median_band,
    run_trial,
    tuning_bouts,
)
from privagrad.experiments.plots import COLOURS, band, figure, save
from privagrad.experiments.problems import load_problem
from privagrad.experiments.tasks import run_tasks

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


@dataclass(frozen=True)
class Settings:
    """What the figure depends on."""

    epsilons: tuple[float, ...] = (0.1, 1.0, 4.0)
    delta: float = 1e-5
    batch_size: int = 70
    steps: int = round((5000 / 70) ** 2)
    step_sizes: tuple[float, ...] = STEP_SIZES
    runs: int = 30
    tuning_runs: int = 3
    looks: int = 80


FULL = Settings()
QUICK = Settings(steps=1000, step_sizes=(0.05, 0.2, 0.5, 1.0), runs=8, tuning_runs=1, looks=40)


def run(out: Path, settings: Settings = FULL, workers: int | None = None) -> dict[str, object]:
    """Tune, run, write CSV, plots and settings into `out`; returns what `figure1.json` holds."""
    journal = out / "figure1.journal.jsonl"
    grids = {
        (epsilon, name): tuning_bouts(
            name, PROBLEM, epsilon, settings.delta, settings.batch_size, settings.steps,
            settings.step_sizes, settings.tuning_runs,
        )
        for epsilon in settings.epsilons
        for name in LABELS
        if name != "adagrad" or epsilon == settings.epsilons[0]
    }  # fmt: skip
    tuned = run_tasks(run_trial, chain(*grids.values()), journal, "tuning", workers)
    finals = {
        key: final_bouts(best_of({b: tuned[b] for b in grid}), settings.runs, settings.looks)
        for key, grid in grids.items()
    }
    ran = run_tasks(run_trial, chain(*finals.values()), journal, "running", workers)
    # Without privacy there is nothing to tell the panels apart.
    for epsilon in settings.epsilons:
        finals.setdefault((epsilon, "adagrad"), finals[settings.epsilons[0], "adagrad"])
    curves = {
        kind: {
            key: np.concatenate([np.array(ran[bout][kind]) for bout in parts])
            for key, parts in finals.items()
        }
        for kind in ("losses", "averaged")
    }
    chosen = {key: parts[0] for key, parts in finals.items()}
    for kind, stem in (("losses", "figure1"), ("averaged", "figure1-average")):
        _write_csv(out / f"{stem}.csv", curves[kind], chosen, settings)
        _draw(out / stem, curves[kind], settings, kind)
    summary = _summary(curves["losses"], chosen, settings)
    (out / "figure1.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    return summary


Key = tuple[float, str]


def _write_csv(
    path: Path, curves: dict[Key, Vector], chosen: dict[Key, Trial], settings: Settings
) -> None:
    iterations = look_at(settings.steps, settings.looks)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["epsilon", "method", "step_size", "iteration", "median", "low", "high"])
        for epsilon, name in _ordered(curves):
            rows = zip(iterations, *median_band(curves[epsilon, name]), strict=True)
            for iteration, *values in rows:
                step_size = chosen[epsilon, name].step_size
                numbers = (f"{value:.6g}" for value in values)
                writer.writerow([epsilon, name, step_size, iteration, *numbers])


def _draw(stem: Path, curves: dict[Key, Vector], settings: Settings, kind: str) -> None:
    panels = len(settings.epsilons)
    fig, grid = figure(panels, width=4.2 * panels, height=4.2)
    iterations = np.array(look_at(settings.steps, settings.looks))
    for axes, epsilon in zip(grid, settings.epsilons, strict=True):
        for name, label in LABELS.items():
            middle, low, high = median_band(curves[epsilon, name])
            band(axes, iterations, middle, low, high, STYLES[name], label)
        axes.set(title=f"epsilon = {epsilon:g}", xlabel="iteration", yscale="log")
        axes.set_ylim(0.009, 1.0)
        axes.set_yticks([0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0])
        axes.set_yticklabels(["0.01", "0.02", "0.05", "0.1", "0.2", "0.5", "1"])
        axes.minorticks_off()
    of = "the iterate" if kind == "losses" else "the averaged iterate"
    grid[0].set_ylabel(f"mean absolute error of {of}")
    grid[-1].legend(frameon=False, fontsize="small")
    fig.suptitle(
        f"Absolute regression, n = 5000, d = 100, b = {settings.batch_size}, T = {settings.steps}, "
        f"δ = {settings.delta:g}: median of {settings.runs} runs, 95 % band",
        fontsize="medium",
    )
    save(fig, stem)


def _summary(
    curves: dict[Key, Vector], chosen: dict[Key, Trial], settings: Settings
) -> dict[str, object]:
    optimum = load_problem(PROBLEM).optimum()
    results = []
    for epsilon, name in _ordered(curves):
        middle, low, high = (float(v[-1]) for v in median_band(curves[epsilon, name]))
        bout = chosen[epsilon, name]
        results.append(
            {
                "epsilon": epsilon,
                "method": name,
                "step_size": bout.step_size,
                "radius_factor": bout.radius_factor,
                "loss": middle,
                "low": low,
                "high": high,
                "excess": middle - optimum,
            }
        )
    ratios = [
        {"epsilon": epsilon, "over": other, **_ratio(curves, epsilon, other, optimum)}
        for epsilon in settings.epsilons
        for other in ("pagan-identity", "pasan-identity")
    ]
    return {
        "settings": {**asdict(settings), "radius_factors": RADIUS_FACTORS},
        "optimum": optimum,
        "results": results,
        "excess_ratio_of_pagan": ratios,
    }


def _ratio(
    curves: dict[Key, Vector], epsilon: float, other: str, optimum: float
) -> dict[str, float]:
    """Excess loss of PAGAN over another method's, medians over runs, bootstrap interval."""
    rng = np.random.default_rng(0)
    above, below = (curves[epsilon, name][:, -1] for name in ("pagan", other))

    def resampled(losses: Vector) -> Vector:
        draws = rng.choice(losses, size=(2000, losses.size))
        excess: Vector = np.median(draws, axis=1) - optimum
        return excess

    low, high = np.quantile(resampled(above) / resampled(below), [0.025, 0.975])
    ratio = (np.median(above) - optimum) / (np.median(below) - optimum)
    return {"ratio": float(ratio), "low": float(low), "high": float(high)}


def _ordered(keys: Iterable[Key]) -> list[Key]:
    names = list(LABELS)
    return sorted(keys, key=lambda key: (key[0], names.index(key[1])))
