"""Rows on a Dask cluster of this machine: what a step costs beyond its work, speed, killed workers.

`python -m benchmarks cluster` measures all; `--kills 20` alone kills workers as often during one
run, and compares its result with that of one process.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from distributed import Client, LocalCluster

import privagrad as pg
from benchmarks._timing import median_ratio, take_turns
from privagrad.distributed import ClusterPartitions
from privagrad.glm.examples import Examples, PartitionedExamples
from privagrad.glm.rows import DenseRows

TURNS, STEPS = 5, 200
SMALL = (20_000, 20)
LARGE = (2**21, 100)
"""A partition, of four, is two of the blocks that samples are drawn by: see `privacy.sampling`."""


def run(arguments: list[str]) -> dict[str, object]:
    parser = argparse.ArgumentParser("python -m benchmarks cluster")
    parser.add_argument("--kills", type=int, default=None, help="only kill workers so often")
    kills = parser.parse_args(arguments).kills
    if kills is not None:
        return {"kills": killed(kills)}
    return {"overhead": overhead(), "throughput": throughput(), "kills": killed(20)}


@dataclass(frozen=True)
class Made:
    """Rows that a worker makes when it loads a partition."""

    part: int
    rows: int
    dim: int

    def __call__(self) -> Examples:
        rng = np.random.default_rng(self.part)
        X = rng.standard_normal((self.rows, self.dim), dtype=np.float32)
        return Examples(DenseRows(X), np.sign(X[:, 0] + rng.standard_normal(self.rows)))


def made(shape: tuple[int, int], parts: int) -> list[Made]:
    return [Made(part, shape[0] // parts, shape[1]) for part in range(parts)]


@contextmanager
def cluster(workers: int) -> Iterator[tuple[Client, LocalCluster]]:
    """Processes of one thread each, on the loopback interface."""
    with (
        LocalCluster(
            n_workers=workers, threads_per_worker=1, memory_limit=0, host="127.0.0.1",
            dashboard_address="127.0.0.1:0", silence_logs=logging.CRITICAL,
        ) as found,
        Client(found) as client,
    ):  # fmt: skip
        yield client, found


def in_memory(loaders: list[Made]) -> tuple[Any, Any]:
    parts = [load() for load in loaders]
    arrays = [part.rows.matrix for part in parts]
    return np.concatenate(arrays), np.concatenate([part.targets for part in parts])


def descent(rows: tuple[Any, Any], batch_size: int, steps: int) -> Any:
    """A run, and the median seconds of a step from the second on."""
    stamps: list[float] = []
    result = pg.minimize(
        "logistic", *rows, epsilon=1.0, delta=1e-7, batch_size=batch_size, steps=steps,
        step_size=0.1, random_state=1, threads=1,
        ellipsoid=pg.Ellipsoid.ball(rows[0].shape[1], 1.0),
        callback=lambda *_: stamps.append(time.perf_counter()),
    )  # fmt: skip
    return result, statistics.median(np.diff(stamps))


def step_of(rows: tuple[Any, Any], batch_size: int, steps: int) -> Callable[[], float]:
    return lambda: float(descent(rows, batch_size, steps)[1])


def overhead() -> dict[str, object]:
    """Milliseconds of a step on 200 of 20,000 rows of 20 columns, less those of one process."""
    found: dict[str, object] = {}
    for workers in (1, 2, 4):
        loaders = made(SMALL, workers)
        with cluster(workers) as (client, _):
            rows = PartitionedExamples.of(ClusterPartitions.load(client, loaders))
            turns = take_turns(
                {
                    "cluster": step_of((rows, None), 200, STEPS),
                    "process": step_of(in_memory(loaders), 200, STEPS),
                },
                TURNS,
            )
        more = [a - b for a, b in zip(turns["cluster"], turns["process"], strict=True)]
        found[f"{workers}_workers_ms"] = round(1e3 * statistics.median(more), 2)
    return found


def throughput() -> dict[str, object]:
    """Rows a second of steps on a quarter of 2,097,152 rows of 100 columns: 2 workers against 1."""
    loaders, batch_size = made(LARGE, 4), LARGE[0] // 4
    with cluster(1) as (one, _), cluster(2) as (two, _):
        turns = take_turns(
            {
                name: step_of(
                    (PartitionedExamples.of(ClusterPartitions.load(client, loaders)), None),
                    batch_size, 15,
                )
                for name, client in (("one", one), ("two", two))
            },
            TURNS,
        )  # fmt: skip
    rows = {name: batch_size / statistics.median(found) for name, found in turns.items()}
    return {
        "rows_per_second_1_worker": round(rows["one"]),
        "rows_per_second_2_workers": round(rows["two"]),
        "speedup": round(median_ratio(turns["one"], turns["two"]), 2),
        "load_average": round(os.getloadavg()[0], 1),
    }


def killed(times: int) -> dict[str, object]:
    """A run during which workers are killed: it ends, and with the result of one process."""
    loaders = made(SMALL, 6)
    steps = 200
    with cluster(2) as (client, found):
        rows = PartitionedExamples.of(ClusterPartitions.load(client, loaders))
        done: list[int] = []
        start = time.perf_counter()

        def callback(step: int, x: object) -> None:
            if step % (steps // (times + 1)) == 0 and len(done) < times:
                wait_for_all(client, found)
                threading.Timer(random.uniform(0.0, 0.005), kill, (found, done)).start()

        given: dict[str, Any] = {
            "epsilon": 1.0, "delta": 1e-7, "batch_size": 200, "steps": steps, "step_size": 0.1,
            "ellipsoid": pg.Ellipsoid.ball(SMALL[1], 1.0), "random_state": 1,
        }  # fmt: skip
        result = pg.minimize("logistic", rows, callback=callback, **given)
        seconds = time.perf_counter() - start
    plain = pg.minimize("logistic", *in_memory(loaders), **given)
    return {
        "killed": len(done),
        "seconds": round(seconds, 1),
        "identical": bool(np.array_equal(result.last, plain.last)),
        "charged_once": result.privacy == plain.privacy,
    }


def kill(found: LocalCluster, done: list[int]) -> None:
    nanny: Any = random.choice(list(found.workers.values()))
    os.kill(nanny.pid, signal.SIGKILL)
    done.append(nanny.pid)


def wait_for_all(client: Client, found: LocalCluster) -> None:
    """Until both workers are there: else nothing would be left to kill."""
    while True:
        try:
            nannies: list[Any] = list(found.workers.values())
            if set(client.run(os.getpid).values()) == {nanny.pid for nanny in nannies}:
                return
        except OSError:
            pass
        time.sleep(0.02)
