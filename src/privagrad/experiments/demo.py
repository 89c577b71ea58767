"""`python -m privagrad.experiments.demo`: five optimizers compared, and a model with its report.

The problem is the absolute regression of Section 5.1 at epsilon = 1. The radius and the step size
of each method were tuned on other data (seed 1): the best of a few radii and the paper's step sizes
for the last iterate. The loss curves are computed from the training rows and are not private.
"""

from __future__ import annotations

import argparse
import csv
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np

from privagrad import Box, Ellipsoid, PrivacyReport, fitting, minimize
from privagrad._internal.validate import Vector
from privagrad.data.models import SavedModel
from privagrad.data.schema import Column, Schema
from privagrad.experiments import DELTA
from privagrad.experiments.arena import LossRecorder
from privagrad.experiments.plots import COLOURS, draw_band, figure, label_losses, save
from privagrad.experiments.problems import Regression, absolute_regression
from privagrad.methods import METHODS
from privagrad.privacy.ledger import Ledger
from privagrad.report.fit import write_fit_report

EPSILON, BATCH_SIZE, STEPS = 1.0, 70, 1000
RECORDED = range(10, STEPS + 1, 10)
_JOBS = ("clerk", "cook", "driver", "farmer", "nurse", "seller", "teacher", "")
_EFFECTS = np.array([0.0, -0.9, -0.4, -1.2, 0.3, 0.1, 0.8, -0.5])


class Entry(NamedTuple):
    """A method as the demonstration runs it."""

    method: str
    label: str
    radius: float
    step_size: float


ENTRIES = (
    Entry("adagrad", "AdaGrad, not private", 1.0, 0.1),
    Entry("pagan", "PAGAN, noise shaped by σ^(-4/3)", 2.0, 0.2),
    Entry("dp-adagrad", "DP-AdaGrad, isotropic noise", 0.5, 0.5),
    Entry("dp-sgd", "DP-SGD, isotropic noise", 0.5, 1.0),
    Entry("pasan", "PASAN, noise shaped by 1/σ", 0.5, 1.0),
)


class Outcome(NamedTuple):
    """Loss curves (runs × recorded steps), and the time of the fastest run."""

    entry: Entry
    curves: Vector
    privacy: PrivacyReport
    seconds: float


def run_entry(entry: Entry, problem: Regression, runs: int) -> Outcome:
    """Run a method `runs` times with secure noise."""
    curves, seconds = [], []
    for _ in range(runs):
        recorder = LossRecorder(
            lambda x: float(np.abs(problem.X @ x - problem.y).mean()), problem.sigma.size, RECORDED
        )
        start = time.perf_counter()
        result = minimize(
            "absolute",
            problem.X,
            problem.y,
            method=entry.method,
            epsilon=None if entry.method == "adagrad" else EPSILON,
            delta=DELTA,
            ellipsoid=Ellipsoid(problem.sigma ** METHODS[entry.method].scale_power, entry.radius),
            domain=Box(-1, 1),
            batch_size=BATCH_SIZE,
            steps=STEPS,
            step_size=entry.step_size,
            callback=recorder,
        )
        seconds.append(time.perf_counter() - start - recorder.seconds)
        curves.append(recorder.losses)
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
        cost = (f"{outcome.privacy.epsilon:.4g}", f"{outcome.seconds:.3f}")
        table.add_row(outcome.entry.label, f"{loss:.4f}", f"{loss - floor:.4f}", *cost)
    console = Console()
    console.print(table)
    console.print(
        "loss: mean absolute error of the last iterate, median over the runs",
        "excess: loss minus the least loss in this table",
        f"privacy of PAGAN: {outcomes[1].privacy}",
        sep="\n",
        highlight=False,
    )


def draw(outcomes: list[Outcome], out: Path) -> list[Path]:
    """Median loss against the step, with the band between the quartiles."""
    fig, (axes,) = figure(1, width=8.0, height=4.6)
    steps = np.array(RECORDED)
    for outcome, colour in zip(outcomes, COLOURS, strict=False):
        low, middle, high = np.quantile(outcome.curves, [0.25, 0.5, 0.75], axis=0)
        draw_band(axes, steps, (middle, low, high), colour, outcome.entry.label)
    axes.set(
        yscale="log",
        xlabel="step",
        ylabel="mean absolute error (log scale)",
        title=f"Absolute regression at epsilon = {EPSILON:g}: median and quartiles of the runs",
    )
    label_losses(axes)
    axes.legend(frameon=False)
    return save(fig, out / "demo")


def write_people(path: Path, rows: int, seed: int) -> None:
    """Write a CSV file: age, hours, savings, rooms, job, and whether a person is insured."""
    rng = np.random.default_rng(seed)
    age = rng.integers(18, 90, rows)
    hours = np.clip(rng.normal(38, 11, rows), 0, 90)
    savings = np.where(rng.random(rows) < 0.3, 0.0, rng.lognormal(9, 1.5, rows))
    rooms = rng.integers(1, 8, rows)
    job = rng.choice(len(_JOBS), rows, p=[0.2, 0.1, 0.15, 0.05, 0.15, 0.2, 0.12, 0.03])
    score = 0.04 * (age - 50) + 0.03 * (hours - 38) + 0.25 * np.log1p(savings) - 1.5
    chance = score + _EFFECTS[job] + 0.1 * rooms + rng.logistic(size=rows)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["age", "hours", "savings", "rooms", "job", "insured"])
        for i in range(rows):
            numbers = age[i], f"{hours[i]:.1f}", f"{savings[i]:.2f}", rooms[i]
            writer.writerow([*numbers, _JOBS[job[i]], "yes" if chance[i] > 0 else "no"])


SCHEMA = Schema(
    (
        Column("age", low=18, high=90),
        Column("hours", low=0, high=90),
        Column("savings"),
        Column("rooms", low=1, high=10),
        Column("job", "category"),
        Column("insured", "category", categories=("no", "yes")),
    ),
    "insured",
)


def fit_people(out: Path, rows: int = 20_000) -> tuple[SavedModel, Path]:
    """Fit at epsilon 1 from a budget of 2, as `privagrad fit` does: the model and its report."""
    out.mkdir(parents=True, exist_ok=True)
    table, test = out / "people.csv", out / "people-test.csv"
    write_people(table, rows, seed=0)
    write_people(test, rows // 4, seed=1)
    for old in out.glob("ledger.db*"):
        old.unlink()
    ledger = Ledger(out / "ledger.db")
    ledger.create("people", epsilon=2.0, delta=1e-6)
    request = fitting.FitRequest(
        table, None, epsilon=1.0, schema=SCHEMA, dataset="people", ledger=ledger, test=test
    )
    model = fitting.run(fitting.prepare(request), out / "people.model")
    report = out / "people-report.html"
    write_fit_report(report, model, ledger.account("people"))
    return model, report


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
    print("\nA model of a synthetic table of people at epsilon 1: raw columns, no tuning.")
    found, test = model.evaluation, model.evaluation["test"]
    print(f"  training rows (private): {found['verdict']}")
    print(f"  test rows (exact): {test['verdict']}")
    print(f"Open the report in a browser: {report}")


if __name__ == "__main__":
    main()
