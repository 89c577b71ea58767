"""Seeded fits through the command line."""

from __future__ import annotations

import csv
import json
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from privagrad.models import load_model
from typer.testing import CliRunner

from privagrad.cli import app

Recorded = dict[str, Any]
ROWS = 1500
SCHEMA = """
target = "rich"
[[column]]
name = "age"
low = 17
high = 90
[[column]]
name = "hours"
[[column]]
name = "job"
kind = "category"
[[column]]
name = "rich"
kind = "category"
categories = ["no", "yes"]
"""


def command(*arguments: object) -> Any:
    """What a command answers with --json."""
    done = CliRunner().invoke(app, [*map(str, arguments), "--json"])
    if done.exit_code != 0:
        raise RuntimeError(f"Expected exit code 0, found {done.exit_code}: {done.output}")
    return json.loads(done.stdout)


def write_people(path: Path, rows: int = ROWS, seed: int = 30) -> None:
    rng = np.random.default_rng(seed)
    age, hours = rng.integers(17, 90, rows), rng.normal(40, 10, rows).round(2)
    job = rng.choice(["cook", "baker", "poet"], rows, p=[0.5, 0.3, 0.2])
    score = (age - 50) / 15 + (hours - 40) / 10 + 2.0 * (job == "poet")
    rich = np.where(score + rng.logistic(size=rows) > 0, "yes", "no")
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["age", "hours", "job", "rich"])
        writer.writerows(zip(age.tolist(), hours.tolist(), job, rich, strict=True))


def write_numbers(path: Path, rows: int = ROWS, seed: int = 31) -> None:
    rng = np.random.default_rng(seed)
    X = rng.standard_normal((rows, 3)) * [1.0, 10.0, 0.1] + [0.0, 50.0, 0.0]
    y = X[:, 0] + 0.1 * X[:, 1] + 10 * X[:, 2] + rng.normal(0, 0.5, rows)
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["a", "b", "c", "y"])
        writer.writerows(np.column_stack([X, y]).round(4).tolist())


def write_libsvm(path: Path, rows: int = ROWS, seed: int = 32) -> None:
    rng = np.random.default_rng(seed)
    with path.open("w", encoding="utf-8") as file:
        for row, keep in zip(rng.normal(size=(rows, 6)), rng.random((rows, 6)) < 0.4, strict=True):
            entries = [f"{j + 1}:{row[j]:.4f}" for j in range(6) if keep[j]]
            label = "+1" if row[0] * keep[0] - row[1] * keep[1] + 0.2 * rng.normal() > 0 else "-1"
            file.write(" ".join([label, *entries]) + "\n")


WRITERS = {"people.csv": write_people, "numbers.csv": write_numbers, "rows.libsvm": write_libsvm}


def fitted(name: str, *options: object) -> Recorded:
    """The model that `privagrad fit --seed` saves; ... among the options is the file of SCHEMA."""
    with tempfile.TemporaryDirectory() as folder:
        table, model = Path(folder) / name, Path(folder) / "a.model"
        WRITERS[name](table)
        schema = Path(folder) / "schema.toml"
        schema.write_text(SCHEMA, encoding="utf-8")
        given = [schema if option is ... else option for option in options]
        said = command("fit", table, *given, "-e", 2, "--seed", 33, "-o", model)
        command("predict", model, table, "-o", Path(folder) / "predictions.csv")
        predictions = (Path(folder) / "predictions.csv").read_text(encoding="utf-8").split()
        saved = load_model(model)
    figures = said["evaluation"]["figures"]
    arrays = ("coef", "intercept", "coef_noise", "intercept_noise", "centre", "unit", "scale")
    return {
        **{array: getattr(saved, array).tolist() for array in arrays},
        "features": saved.features,
        "classes": saved.classes,
        "loss": saved.loss,
        "epsilon": said["privacy"]["epsilon"],
        "delta": said["privacy"]["delta"],
        "relation": said["privacy"]["relation"],
        "score": (figures.get("accuracy") or figures["error"])["value"],
        "predictions": predictions[1:6],
    }


def schema_of(name: str, *options: object, task: str = "classification") -> Recorded:
    """The schema that `privagrad schema` finds, also when its template is read back."""
    with tempfile.TemporaryDirectory() as folder:
        table, out = Path(folder) / name, Path(folder) / "schema.toml"
        WRITERS[name](table)
        found = command("schema", table, *options, "-o", out)
        planned = command("fit", table, "--schema", out, "--task", task, "-e", 2, "--dry-run")
    return {"schema": found, "epsilon": planned["epsilon"], "events": planned["events"]}


def runs() -> Iterator[tuple[str, Callable[[], Recorded]]]:
    people = partial(fitted, "people.csv", "--schema", ...)
    yield "command/schema people", partial(schema_of, "people.csv", "--target", "rich")
    yield (
        "command/schema numbers",
        partial(schema_of, "numbers.csv", "--target", "y", task="regression"),
    )
    yield "command/fit people", people
    yield "command/fit people hinge", partial(people, "--loss", "hinge")
    numbers = partial(fitted, "numbers.csv", "--target", "y", "--task", "regression")
    yield "command/fit numbers", numbers
    yield "command/fit numbers quantile", partial(numbers, "--loss", "quantile")
    yield "command/fit numbers steps", partial(numbers, "--steps", 50)
    yield "command/fit libsvm", partial(fitted, "rows.libsvm", "--classes=-1,1")
