"""A synthetic table of people with raw columns, and a private model of it with its report."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np

from privagrad import fitting
from privagrad.data.models import SavedModel
from privagrad.data.schema import Column, Schema
from privagrad.privacy.ledger import Ledger
from privagrad.report.fit import write_fit_report

_JOBS = ("clerk", "cook", "driver", "farmer", "nurse", "seller", "teacher", "unknown")
_EFFECTS = np.array([0.0, -0.9, -0.4, -1.2, 0.3, 0.1, 0.8, -0.5])


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
            job_name = "" if _JOBS[job[i]] == "unknown" else _JOBS[job[i]]
            insured = "yes" if chance[i] > 0 else "no"
            writer.writerow(
                [age[i], f"{hours[i]:.1f}", f"{savings[i]:.2f}", rooms[i], job_name, insured]
            )


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
