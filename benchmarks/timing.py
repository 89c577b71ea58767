"""Which durations depend on private values: the same work on two tables, in turns.

Both tables of a pair have the same public facts: rows, columns, bounds, plan. A ratio away from 1,
beyond what the machine varies by (the quartiles of the ratios), is something that a stopwatch sees.
One thread. The table of docs/audit.md is from here.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from scipy.sparse import csr_array

import privagrad as pg
from benchmarks._timing import median_ratio, repeated, take_turns
from privagrad.privacy.mechanism import GaussianSum
from privagrad.privacy.noise import Noise, random_source

ROWS, COLUMNS = 2000, 100
Pair = tuple[Callable[[], float], Callable[[], float]]


def run(arguments: list[str]) -> dict[str, object]:
    parser = argparse.ArgumentParser("python -m benchmarks timing")
    parser.add_argument("--turns", type=int, default=25)
    turns = parser.parse_args(arguments).turns
    table: dict[str, dict[str, float]] = {}
    print(f"{'the second table over the first':62}{'ratio':>7}{'quartiles':>15}")
    for name, (first, second) in pairs().items():
        seconds = take_turns({"first": first, "second": second}, turns)
        ratio = median_ratio(seconds["second"], seconds["first"])
        ratios = [b / a for a, b in zip(seconds["first"], seconds["second"], strict=True)]
        low, _, high = statistics.quantiles(ratios)
        table[name] = {"ratio": ratio, "low": low, "high": high}
        print(f"{name:62}{ratio:7.2f}{low:8.2f}{high:7.2f}", flush=True)
    return {"table": table}


def pairs() -> dict[str, Pair]:
    rng = np.random.default_rng(0)
    short = rng.standard_normal((ROWS, COLUMNS)) / 100
    broken = short.copy()
    broken[:, 0] = np.nan
    one = short.copy()
    one[0] = 1e6
    targets = rng.standard_normal(ROWS)
    return {
        "Gaussian noise: a sum of zeros, a large one": noise_of("gaussian"),
        "discrete noise: a sum of zeros, a large one": noise_of("discrete"),
        "bounding rows: none too long, all": bounding(short, 1000 * short),
        "bounding rows: all finite, none": bounding(short, broken),
        "bounding rows: usual numbers, subnormal ones": bounding(short, short * 1e-310),
        "bounding rows: 60 in the batch, 80": bounding(short[:60], short[:80]),
        "Euclidean projection of rows: all inside, all far outside": projecting(
            short, 1000 * short
        ),
        "dense fit: two tables that differ in one row": (
            fitting(short, targets),
            fitting(one, targets),
        ),
        "dense fit: no rows too long, all": (
            fitting(short, targets),
            fitting(1000 * short, targets),
        ),
        "sparse fit: 5 entries a row, 20": (
            fitting(sparse(5, rng), targets),
            fitting(sparse(20, rng), targets),
        ),
    }


def noise_of(noise: Noise) -> Pair:
    mechanism, source = GaussianSum(2**14, 1.0, 1000.0), random_source(None, noise)
    out = np.empty(2**14)

    def release(value: float) -> Callable[[], None]:
        def call() -> None:
            total = mechanism.sum(out=out)
            total.memory.fill(value)
            mechanism.release(total, source)

        return call

    return repeated(release(0.0), 5), repeated(release(2.0**40 + 1), 5)


def bounding(first: np.ndarray, second: np.ndarray) -> Pair:
    mechanism = GaussianSum(COLUMNS, 1.0, 1000.0)

    def add(rows: np.ndarray) -> Callable[[], None]:
        return lambda: mechanism.sum().add(rows)

    return repeated(add(first), 20), repeated(add(second), 20)


def projecting(first: np.ndarray, second: np.ndarray) -> Pair:
    ellipsoid = pg.Ellipsoid(np.geomspace(0.1, 10, COLUMNS), 10.0)

    def project(rows: np.ndarray) -> Callable[[], object]:
        return lambda: ellipsoid.project(rows, "euclidean")

    return repeated(project(first), 3), repeated(project(second), 3)


def sparse(entries: int, rng: np.random.Generator) -> Any:
    dense = np.zeros((ROWS, COLUMNS))
    for row in dense:
        row[rng.choice(COLUMNS, entries, replace=False)] = 0.01
    return csr_array(dense)


def fitting(X: Any, y: np.ndarray) -> Callable[[], float]:
    """Seconds of 500 steps of PAGAN, from the second on."""
    ellipsoid = pg.Ellipsoid(np.linspace(1.0, 2.0, COLUMNS), 1.0)

    def measure() -> float:
        stamps: list[float] = []
        pg.minimize(
            "absolute", X, y, method="pagan", epsilon=1.0, delta=1e-6, ellipsoid=ellipsoid,
            domain=pg.Box(-1, 1), batch_size=200, steps=500, step_size=0.1, threads=1,
            callback=lambda k, _: stamps.append(time.perf_counter()) if k in (1, 500) else None,
        )  # fmt: skip
        return stamps[-1] - stamps[0]

    return measure
