"""A model of what a step costs, checked against measurements, and what it says of large clusters.

The constants are measured at one small size each. The model then predicts other sizes, which are
measured too; docs/scale.md has the formulas and what they say where nothing can be measured here.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.sparse import csr_array

import privagrad as pg

_BYTES_A_NUMBER = 8


@dataclass(frozen=True)
class Constants:
    """Seconds: of a step, of a row, of an entry of a row that is read, of a coordinate of x."""

    step: float
    row: float
    entry: float
    coordinate: float


@dataclass(frozen=True)
class Setting:
    """A step: rows and entries of each, coordinates; workers, and seconds a byte takes to them."""

    rows: float
    entries: float
    dim: float
    workers: int = 1
    fan_out: int = 8
    byte: float = 0.0
    message: float = 0.0

    @property
    def levels(self) -> int:
        """How many hops lead from the centre to the last worker."""
        if self.workers == 1:
            return 0
        levels, reached = 1, self.fan_out
        while reached < self.workers:
            levels, reached = levels + 1, reached + self.fan_out ** (levels + 1)
        return levels

    @property
    def entries_a_worker(self) -> float:
        return self.rows * self.entries / self.workers

    @property
    def bytes_at_the_centre(self) -> float:
        """Out and back: x to each worker of the first level, and the sums of these."""
        first = min(self.fan_out, self.workers) if self.workers > 1 else 0
        return 2 * first * self.dim * _BYTES_A_NUMBER

    def seconds_of_work(self, constants: Constants) -> float:
        """Of a worker on its rows."""
        return constants.entry * self.entries_a_worker + constants.row * self.rows / self.workers

    def seconds(self, constants: Constants) -> float:
        work = self.seconds_of_work(constants)
        centre = constants.coordinate * self.dim + constants.step
        travel = self.levels * (self.message + self.bytes_at_the_centre * self.byte)
        return work + centre + travel


_FITTED = {
    "dense": [
        Setting(1, 10, 10), Setting(50_000, 5, 5), Setting(10_000, 400, 400),
        Setting(1, 200_000, 200_000),
    ],
    "CSR": [
        Setting(1, 10, 10), Setting(50_000, 5, 1000), Setting(10_000, 400, 1000),
        Setting(100, 50, 200_000),
    ],
}  # fmt: skip
"""The sizes that the constants come from."""

_CHECKED = {
    "dense": [
        Setting(5000, 50, 50), Setting(20_000, 200, 200), Setting(100_000, 20, 20),
        Setting(500, 2000, 2000), Setting(5, 100_000, 100_000),
    ],
    "CSR": [
        Setting(5000, 50, 2000), Setting(20_000, 200, 2000), Setting(100_000, 20, 500),
        Setting(10_000, 50, 100_000), Setting(2000, 100, 500_000),
    ],
}  # fmt: skip
"""The sizes that they predict."""


def run(arguments: list[str]) -> dict[str, Any]:
    parser = argparse.ArgumentParser(prog="python -m benchmarks cost", description=__doc__)
    parser.add_argument("--turns", type=int, default=5, help="how often each size is timed")
    turns = parser.parse_args(arguments).turns
    warnings.simplefilter("ignore")
    found: dict[str, Any] = {}
    for name, table in (("dense", _dense), ("CSR", _sparse)):
        constants = _constants(table, _FITTED[name], turns)
        checked = _checked(table, _CHECKED[name], constants, turns)
        found[name] = {"constants": vars(constants), "checked": checked}
        print(name, constants, *found[name]["checked"], sep="\n", file=sys.stderr)
    sparse = Constants(**found["CSR"]["constants"])
    # 10 Gb/s and 2 ms a message, which are assumed.
    large = Setting(0.2 * 1e9, 100, 1e6, workers=1000, byte=0.8e-9, message=2e-3)
    found["1e9 rows, 1e6 columns, 1000 workers"] = {
        "entries a worker": large.entries_a_worker,
        "seconds of work": large.seconds_of_work(sparse),
        "seconds at the centre": sparse.coordinate * large.dim,
        "bytes at the centre": large.bytes_at_the_centre,
        "levels": large.levels,
        "seconds a step": large.seconds(sparse),
    }
    return found


def _constants(table: Callable[..., Any], sizes: Sequence[Setting], turns: int) -> Constants:
    """From four sizes: next to nothing, many rows, many entries, many coordinates."""
    terms = [[1.0, size.rows, size.entries_a_worker, size.dim] for size in sizes]
    seconds = [_measured(table, size, turns) for size in sizes]
    return Constants(*np.linalg.solve(terms, seconds).tolist())


def _checked(
    table: Callable[..., Any], sizes: Sequence[Setting], constants: Constants, turns: int
) -> list[dict[str, float]]:
    found = []
    for size in sizes:
        seconds = _measured(table, size, turns)
        predicted = size.seconds(constants)
        shown = {"rows": size.rows, "entries": size.entries, "dim": size.dim}
        found.append({**shown, "seconds": seconds, "predicted": predicted,
                      "ratio": predicted / seconds})  # fmt: skip
    return found


def _measured(table: Callable[..., Any], size: Setting, turns: int) -> float:
    """Median seconds of a step of DP-SGD on so many sampled rows."""
    X, dim = table(int(size.rows), int(size.entries), int(size.dim)), int(size.dim)
    steps = max(6, int(0.2 / (size.rows * size.entries * 3e-9 + dim * 2e-8 + 1e-5)))
    marks: list[float] = []
    found = []
    for _ in range(turns):
        marks.clear()
        pg.minimize(
            "linear", X, epsilon=1.0, delta=1e-9, method="dp-sgd", batch_size=int(size.rows),
            steps=steps, ellipsoid=pg.Ellipsoid.ball(dim, 1.0), domain=pg.Box(-1, 1),
            step_size=0.1, threads=1,
            callback=lambda k, x: marks.append(time.perf_counter()),
        )  # fmt: skip
        found.append(statistics.median(np.diff(marks[2:]).tolist()))
    return statistics.median(found)


def _dense(rows: int, entries: int, dim: int) -> Any:
    """Twice as many rows as a step takes; they have as many entries as there are columns."""
    return np.random.default_rng(0).standard_normal((2 * rows, dim))


def _sparse(rows: int, entries: int, dim: int) -> Any:
    rng, n = np.random.default_rng(0), 2 * rows
    step = max(dim // entries, 1)
    columns = np.arange(entries) * step % dim + rng.integers(step, size=(n, entries))
    starts = np.arange(n + 1) * entries
    data = rng.standard_normal(n * entries)
    return csr_array((data, np.sort(columns, axis=1).ravel(), starts), shape=(n, dim))
