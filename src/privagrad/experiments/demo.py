"""`python -m privagrad.experiments.demo`: five optimizers, a table, a plot; a model and its report.

Section 5.1's absolute regression at epsilon = 1. Radius and step size of each method are the best
of a few radii and the paper's step sizes for the last iterate, found beforehand on other data
(seed 1). The loss curves are computed from the training rows: for looking at, not private.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from privagrad import Box, Ellipsoid, PrivacyReport, minimize
from privagrad._internal.validate import Vector
from privagrad.experiments.people import fit_people
from privagrad.experiments.plots import COLOURS, band, figure, save
from privagrad.experiments.problems import Regression, absolute_regression

EPSILON, DELTA, BATCH_SIZE, STEPS = 1.0, 1e-5, 70, 1000
LOOK_EVERY = 10


@dataclass(frozen=True)
class Entry:
    """A method as the demonstration runs it; scale σ^power."""

    method: str
    label: str
    power: float
    radius: float
    step_size: float


ENTRIES = (
    Entry("adagrad", "AdaGrad, not private", 0.0, 1.0, 0.1),
    Entry("pagan", "PAGAN, noise shaped by σ^(-4/3)", -4 / 3, 2.0, 0.2),
    Entry("dp-adagrad", "DP-AdaGrad, round noise", 0.0, 0.5, 0.5),
    Entry("dp-sgd", "DP-SGD, round noise", 0.0, 0.5, 1.0),
    Entry("pasan", "PASAN, noise shaped by 1/σ", -1.0, 0.5, 1.0),
)


@dataclass(frozen=True)
class Outcome:
    entry: Entry
    curves: Vector  # runs × looks
    privacy: PrivacyReport
    seconds: float  # of one run, without looking


def run_entry(entry: Entry, problem: Regression, runs: int) -> Outcome:
    """`runs` runs with fresh secure noise each."""
    curves, seconds = [], []
    for _ in range(runs):
        losses: list[float] = []
        looking = 0.0

        def look(step: int, x: Vector, losses: list[float] = losses) -> None:
            nonlocal looking
            if step % LOOK_EVERY == 0:
                start = time.perf_counter()
                losses.append(float(np.abs(problem.X @ x - problem.y).mean()))
                looking += time.perf_counter() - start

        start = time.perf_counter()
        result = minimize(
            "absolute",
            problem.X,
            problem.y,
            method=entry.method,
            epsilon=None if entry.method == "adagrad" else EPSILON,
            delta=DELTA,
            ellipsoid=Ellipsoid(problem.sigma**entry.power, entry.radius),
            domain=Box(-1, 1),
            batch_size=BATCH_SIZE,
            steps=STEPS,
            step_size=entry.step_size,
            callback=look,
        )
        seconds.append(time.perf_counter() - start - looking)
        curves.append(losses)
    return Outcome(entry, np.array(curves), result.privacy, min(seconds))


def print_table(outcomes: list[Outcome], problem: Regression) -> None:
    from rich.console import Console
    from rich.table import Table

    n, dim = problem.X.shape
    floor = min(float(np.median(o.curves[:, -1])) for o in outcomes)
    table = Table(title=f"{STEPS} steps of {BATCH_SIZE} out of {n:,} rows, {dim} columns")
    for name in ("method", "loss", "excess", "epsilon", "seconds"):
        table.add_column(name, justify="left" if name == "method" else "right", no_wrap=True)
    for outcome in outcomes:
        loss = float(np.median(outcome.curves[:, -1]))
        table.add_row(
            outcome.entry.label,
            f"{loss:.4f}",
            f"{loss - floor:.4f}",
            f"{outcome.privacy.epsilon:.4g}",
            f"{outcome.seconds:.3f}",
        )
    console = Console()
    console.print(table)
    console.print(
        "loss: the last iterate's mean absolute error, median over runs; excess: over the best.",
        f"PAGAN's privacy: {outcomes[1].privacy}.",
        sep="\n",
        highlight=False,
    )


def draw(outcomes: list[Outcome], out: Path) -> list[Path]:
    """Median loss against the step, with the band between the quartiles."""
    fig, (axes,) = figure(1, width=8.0, height=4.6)
    steps = np.arange(1, outcomes[0].curves.shape[1] + 1) * LOOK_EVERY
    for outcome, colour in zip(outcomes, COLOURS, strict=False):
        low, middle, high = np.quantile(outcome.curves, [0.25, 0.5, 0.75], axis=0)
        band(axes, steps, middle, low, high, colour, outcome.entry.label)
    axes.set(
        yscale="log",
        xlabel="step",
        ylabel="mean absolute error (log scale)",
        title=f"The same privacy, epsilon = {EPSILON:g}: noise that follows the gradients' shape",
    )
    axes.set_yticks([0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0], minor=False)
    axes.set_yticklabels(["0.01", "0.02", "0.05", "0.1", "0.2", "0.5", "1"])
    axes.minorticks_off()
    axes.legend(frameon=False)
    return save(fig, out / "demo")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m privagrad.experiments.demo",
        description="Train five optimizers on the paper's synthetic regression at epsilon = 1.",
    )
    parser.add_argument("--out", type=Path, default=Path("demo-output"), help="folder for the plot")
    parser.add_argument("--runs", type=int, default=9, help="runs of each method (default 9)")
    options = parser.parse_args()
    problem = absolute_regression()
    outcomes = [run_entry(entry, problem, max(1, options.runs)) for entry in ENTRIES]
    print_table(outcomes, problem)
    for path in draw(outcomes, options.out):
        print(f"wrote {path}")
    model, report = fit_people(options.out)
    print("\nA table of made-up people, raw columns, no tuning, epsilon 1 out of a budget of 2:")
    found, test = model.evaluation, model.evaluation["test"]
    print(
        f"  accuracy {found['score']:.3f} ± {2 * found['score_noise']:.3f} on its own rows, private"
    )
    print(f"  accuracy {test['accuracy']:.3f} on test rows (majority rule {test['majority']:.3f})")
    print(f"Open the report in a browser: {report}")


if __name__ == "__main__":
    main()
