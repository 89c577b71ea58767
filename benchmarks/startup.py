"""What a process waits for before its first result: imports, kernels, calibration.

Whole processes are timed, from the start of the interpreter to its end, in turns with imports of
the libraries below privagrad. Ratios are to these imports in the same turn.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from benchmarks._timing import median_ratio, take_turns

IMPORTS = {
    "numpy": "import numpy",
    "numpy, scipy.special, numba": "import numpy, scipy.special, numba",
    "sklearn.linear_model": "import sklearn.linear_model",
}
FIT = """
import numpy as np
from privagrad import PrivateLogisticRegression
X = np.random.default_rng(0).standard_normal((1000, 10))
PrivateLogisticRegression(epsilon=1.0).fit(X, (X[:, 0] > 0).astype(int))
"""
MINIMIZE = """
import numpy as np
import privagrad as pg
X = np.random.default_rng(0).standard_normal((1000, 10))
pg.minimize(
    "logistic", X, np.sign(X[:, 0]), epsilon=1.0, delta=1e-5, ellipsoid=pg.Ellipsoid.ball(10, 1.0),
    domain=pg.Box(-1, 1), batch_size=100, steps=30,
)
"""
CALIBRATE = """
import time
from privagrad import GaussianEvent, PrivacyPlan
PrivacyPlan.calibrate(epsilon=2.0, delta=1e-6, n_examples=1000, batch_size=100, steps=10)
shape = {"n_examples": 10**6, "steps": 10**6}
for changed in (
    {"batch_size": 1000},
    {"batch_size": 1, "epsilon": 8.0},
    {"batch_size": 1000, "sampling": "with_replacement"},
    {"batch_size": 1000, "sampling": "without_replacement"},
    {"batch_size": 1000, "other_events": [GaussianEvent(20.0, purpose="moments")]},
):
    start = time.perf_counter()
    PrivacyPlan.calibrate(**{"epsilon": 1.0, "delta": 1e-7} | shape | changed)
    print(time.perf_counter() - start)
"""
SHAPES = ("poisson", "poisson, one row a step", "with replacement", "without replacement", "beside")


def run(arguments: list[str]) -> dict[str, object]:
    parser = argparse.ArgumentParser("python -m benchmarks startup")
    parser.add_argument("--turns", type=int, default=5)
    turns = parser.parse_args(arguments).turns
    with tempfile.TemporaryDirectory() as folder:
        contestants = {name: process("-c", code) for name, code in IMPORTS.items()}
        contestants |= {
            "import privagrad": process("-c", "import privagrad"),
            "second fit, estimator": process("-c", FIT),
            "second fit, minimize": process("-c", MINIMIZE),
            "second fit, command": command(Path(folder)),
        }
        seconds = take_turns(contestants, turns)
        first = take_turns(
            {"numpy, scipy.special, numba": contestants["numpy, scipy.special, numba"],
             "first fit ever, estimator": compiling(Path(folder), FIT)},
            max(1, turns // 2),
        )  # fmt: skip
    return {
        **{name: summary(values, seconds) for name, values in seconds.items()},
        "first fit ever, estimator": summary(first["first fit ever, estimator"], first),
        "calibration of a million steps, seconds": calibrations(max(1, turns // 2)),
    }


def process(*arguments: str, environment: dict[str, str] | None = None) -> Callable[[], float]:
    """Seconds of a whole process, which may keep bytecode: an installed package has it."""
    given = os.environ | (environment or {})
    given.pop("PYTHONDONTWRITEBYTECODE", None)

    def measure() -> float:
        start = time.perf_counter()
        subprocess.run([sys.executable, *arguments], check=True, capture_output=True, env=given)
        return time.perf_counter() - start

    return measure


def command(folder: Path) -> Callable[[], float]:
    """`privagrad fit` of a small table."""
    X = np.random.default_rng(0).standard_normal((1000, 10))
    table = np.column_stack([X, X[:, 0] > 0])
    names = ",".join([f"column{i}" for i in range(10)] + ["target"])
    np.savetxt(folder / "table.csv", table, delimiter=",", header=names, comments="", fmt="%.6g")
    measure = process(
        "-c", "from privagrad.cli import app; app()", "fit", str(folder / "table.csv"),
        "--target", "target", "--loss", "logistic", "--epsilon", "1",
        "-o", str(folder / "fitted.model"),
    )  # fmt: skip

    def fresh() -> float:
        for made in folder.glob("fitted*"):
            made.unlink()
        return measure()

    return fresh


def compiling(folder: Path, code: str) -> Callable[[], float]:
    """Each time with an empty cache of kernels."""

    def measure() -> float:
        with tempfile.TemporaryDirectory(dir=folder) as cache:
            return process("-c", code, environment={"NUMBA_CACHE_DIR": cache})()

    return measure


def calibrations(turns: int) -> dict[str, float]:
    """The least of some turns."""
    found = []
    for _ in range(turns):
        shown = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", CALIBRATE], check=True, capture_output=True
        )
        found.append([float(line) for line in shown.stdout.split()])
    least = [round(min(turns), 3) for turns in zip(*found, strict=True)]
    return dict(zip(SHAPES, least, strict=True))


def summary(values: list[float], seconds: dict[str, list[float]]) -> dict[str, object]:
    return {
        "least": round(min(values), 3),
        "median": round(statistics.median(values), 3),
        "over": {
            name: round(median_ratio(values, seconds[name]), 2)
            for name in IMPORTS
            if name in seconds
        },
    }
