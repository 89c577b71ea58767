"""`privagrad fit` on large tables and on twelve classes, and the whole of Figure 1.

Every command is timed as a process of its own, from start to end, and stands beside what the
machine needs for the least work, in turns: Polars reads the same file (`read_csv`), and NumPy
multiplies as many encoded rows, without their zeros left out, with weights and residuals as the
training reads (`products`, the best of some tries). `over_limit` is the command's time over both.

Figure 1 takes minutes and runs once, with --figure1. Its limit is the products of all batches.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from benchmarks._timing import median_ratio, take_turns
from privagrad.data.models import load_model
from privagrad.experiments.arena import RADIUS_FACTORS, VARIANTS
from privagrad.experiments.figure1 import FULL, LABELS

ROWS, TURNS = 2_000_000, 2
_TRIES = 9
_NUMBERS = 9
_SCALES = np.array([1.0, 10.0, 100.0, 0.1, 1.0, 5.0, 1.0, 30.0, 2.0])
_ADULT = (
    "age,workclass,fnlwgt,education,education-num,marital-status,occupation,relationship,race,sex,"
    "capital-gain,capital-loss,hours-per-week,native-country,income"
)
_COMMAND = [sys.executable, "-c", "from privagrad.cli import app; app()"]


@dataclass
class Fit:
    """One command, the table that it fits, and what was seen of it."""

    table: Path
    options: list[str]
    peak_mb: float = 0.0
    made: dict[str, Any] = field(default_factory=dict)
    shape: tuple[int, int, int] = (0, 0, 0)

    def run(self, folder: Path) -> float:
        """Seconds of the whole process."""
        out = folder / "fitted.model"
        command = ["fit", str(self.table), *self.options, "-e", "1", "-o", str(out), "--overwrite"]
        seconds, self.peak_mb = _run(command)
        model = load_model(out)
        self.made = model.made
        self.shape = (model.made["rows"], *model.coef.shape)
        return seconds

    def products(self) -> float:
        """Seconds of X W and Gᵀ X in float32, for as many rows as the training reads."""
        rows, outputs, columns = self.shape
        size = min(rows, 200_000)
        X = np.ones((size, columns), dtype=np.float32)
        weights = np.ones((columns, outputs), dtype=np.float32)
        once = math.inf
        for _ in range(_TRIES):
            start = time.perf_counter()
            (X @ weights).T @ X
            once = min(once, time.perf_counter() - start)
        return once * float(self.made["steps"] * self.made["batch_size"]) / size


def run(arguments: list[str]) -> dict[str, object]:
    parser = argparse.ArgumentParser("python -m benchmarks tables")
    parser.add_argument("--rows", type=int, default=ROWS, help="rows of the generated tables")
    parser.add_argument("--turns", type=int, default=TURNS, help="how often each is timed")
    parser.add_argument("--data-dir", type=Path, help="a folder with adult/adult.data")
    parser.add_argument("--figure1", action="store_true", help="run the whole of Figure 1 too")
    options = parser.parse_args(arguments)
    result: dict[str, object] = {"rows": options.rows, "processors": os.cpu_count()}
    with tempfile.TemporaryDirectory(prefix="privagrad-tables-") as name:
        folder = Path(name)
        for kind in ("numbers", "mixed", "many_categories"):
            fit = generated(kind, options.rows, folder)
            result[kind] = timed(fit, folder, options.turns)
            fit.table.unlink()
        result["twelve_classes"] = twelve_classes(options.data_dir, folder, options.turns)
        result["figure1"] = figure1(folder) if options.figure1 else "skipped: give --figure1"
    return result


def timed(fit: Fit, folder: Path, turns: int) -> dict[str, object]:
    """Medians of the command and its limits, which take turns."""
    contestants: dict[str, Callable[[], float]] = {
        "fit": partial(fit.run, folder),
        "read_csv": partial(_read, fit.table),
        "products": fit.products,
    }
    seconds = take_turns(contestants, turns)
    limit = [a + b for a, b in zip(seconds["read_csv"], seconds["products"], strict=True)]
    medians = {f"{name}_seconds": statistics.median(times) for name, times in seconds.items()}
    shown = {**medians, "over_limit": median_ratio(seconds["fit"], limit), "peak_mb": fit.peak_mb}
    print(fit.table.name, json.dumps(shown))
    return {**shown, "file_mb": fit.table.stat().st_size / 2**20}


def generated(kind: str, rows: int, folder: Path) -> Fit:
    """A seeded table: numbers alone, with two columns of text, or with many categories."""
    rng = np.random.default_rng(0)
    X = rng.standard_normal((rows, _NUMBERS)) * _SCALES
    X[:, 1:3] += 5 * _SCALES[1:3]
    target = (X[:, 0] + X[:, 1] / 10 - 5 + rng.logistic(size=rows) > 0).astype(int)
    columns: dict[str, Any] = {f"x{j}": X[:, j].round(4) for j in range(_NUMBERS)}
    if kind == "numbers":
        columns |= {"x9": rng.integers(0, 100, rows), "x10": rng.random(rows).round(5)}
    else:
        for name, count in (("city", 12 if kind == "mixed" else 60), ("job", 8)):
            texts = np.array([f"{name}{k}" for k in range(count)])
            columns[name] = texts[rng.integers(count, size=rows)]
    table = folder / f"{kind}.csv"
    pl.DataFrame(columns | {"y": target}).write_csv(table)
    schema = folder / f"{kind}.toml"
    _run(["schema", str(table), "--target", "y", "-o", str(schema)])
    return Fit(table, ["--schema", str(schema), "--loss", "logistic", "--classes", "0,1"])


def twelve_classes(data: Path | None, folder: Path, turns: int) -> dict[str, object] | str:
    """The occupation in the Adult table: 15 labels, of which 12 are frequent enough to be found."""
    if data is None or not (data / "adult" / "adult.data").is_file():
        return "skipped: give --data-dir DIR, a folder with adult/adult.data"
    table, schema = data / "adult" / "adult.data", folder / "adult.toml"
    names = ["--no-header", "--names", _ADULT, "--target", "occupation", "-o", str(schema)]
    _run(["schema", str(table), *names])
    text = schema.read_text(encoding="utf-8")
    schema.write_text(text.replace('blanks = [""]', 'blanks = ["", "?"]'), encoding="utf-8")
    fit = Fit(table, ["--schema", str(schema)])
    return {**timed(fit, folder, turns), "classes": fit.shape[1]}


def figure1(folder: Path) -> dict[str, object]:
    """The whole figure, beside the products of all its batches on all processors."""
    seconds, peak = _run(["reproduce", "figure1", "--out", str(folder / "figure1")])
    settings = FULL
    grid = len(settings.step_sizes) * settings.tuning_runs
    runs = 0
    for name in LABELS:
        private = VARIANTS[name].private
        tuned = grid * (len(RADIUS_FACTORS) if private else 1)
        runs += (tuned + settings.runs) * (len(settings.epsilons) if private else 1)
    X = np.random.default_rng(0).standard_normal((5000, 100))
    batch, x, tries = np.arange(settings.batch_size or 1), np.ones(100), 2000
    start = time.perf_counter()
    for _ in range(tries):
        rows = X[batch]
        np.sign(rows @ x) @ rows
    step = (time.perf_counter() - start) / tries
    limit = step * runs * settings.steps / (os.cpu_count() or 1)
    shown = {"seconds": seconds, "runs": runs, "products_seconds": limit, "peak_mb": peak}
    print("figure1", json.dumps(shown))
    return {**shown, "over_limit": seconds / limit}


def _read(table: Path) -> float:
    start = time.perf_counter()
    pl.read_csv(table, has_header=table.suffix == ".csv")
    return time.perf_counter() - start


def _run(command: list[str]) -> tuple[float, float]:
    """Seconds and peak memory in MB of a command of privagrad."""
    start = time.perf_counter()
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen([*_COMMAND, *command], stdout=said, stderr=said)
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - start
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            said.seek(0)
            raise RuntimeError(f"Expected {command} to succeed, found: {said.read().decode()}")
    return seconds, usage.ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)


if __name__ == "__main__":
    print(json.dumps(run(sys.argv[1:])))
