"""Tables larger than memory: resident memory, and time of a step against n, d and the batch.

A Parquet data set of numbers is written to `--data-dir` once, and fitted by a process of its own,
whose largest resident memory is what the system says. Then steps of `minimize` over mapped files
are timed, each setting in a process of its own, and exponents are fitted to time and memory.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from privagrad._internal.progress import track

DIM = 50
_ROWS_A_FILE = 250_000
# Not ru_maxrss, which begins at the memory of the process that starts this one.
PEAK = """
import pathlib, re
def peak():
    status = pathlib.Path("/proc/self/status").read_text()
    return 1024 * int(re.search(r"VmHWM:\\s+(\\d+) kB", status)[1])
"""
FIT = """
import json, sys, time
import privagrad as pg
folder, steps = sys.argv[1], int(sys.argv[2])
model = pg.PrivateLogisticRegression(epsilon=1.0, classes=[0, 1], steps=steps, verbose=True)
start = time.perf_counter()
model.fit(folder, "y")
seconds = time.perf_counter() - start
print(json.dumps({"seconds": seconds, "peak": peak(), "rows": model.model_.made["rows"],
                  "epsilon": model.privacy_.epsilon}))
"""
STEPS = """
import json, sys, time, warnings
import numpy as np
import privagrad as pg
warnings.simplefilter("ignore")
path, n, d, b, steps = sys.argv[1], *map(int, sys.argv[2:6])
X = np.memmap(path, np.float64, mode="r", shape=(n, d))
y = np.ones(n)
marks = []
pg.minimize(
    "logistic", X, y, epsilon=1.0, delta=1e-9, method="dp-sgd", batch_size=b, steps=steps,
    ellipsoid=pg.Ellipsoid.ball(d, 1.0), domain=pg.Box(-1, 1), step_size=0.1,
    callback=lambda k, x: marks.append(time.perf_counter()) and False,
)
steps = np.diff(marks[min(3, steps // 3):])
print(json.dumps({"seconds": float(np.median(steps)), "peak": peak() - y.nbytes}))
"""


def run(arguments: list[str]) -> dict[str, Any]:
    parser = argparse.ArgumentParser(prog="python -m benchmarks scale", description=__doc__)
    parser.add_argument("--data-dir", type=Path, default=Path("build/scale"), help="for the files")
    parser.add_argument("--gigabytes", type=float, default=10.0, help="of the Parquet data set")
    parser.add_argument("--steps", type=int, default=20, help="of the fit of the data set")
    parser.add_argument("--turns", type=int, default=3, help="how often steps are timed")
    options = parser.parse_args(arguments)
    options.data_dir.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {"gigabytes": options.gigabytes}
    if options.gigabytes:
        folder = options.data_dir / f"numbers-{options.gigabytes:g}"
        write_parquet(folder, options.gigabytes)
        found["fit"] = child(FIT, folder, options.steps)
        print(f"fit: {found['fit']}", file=sys.stderr)
    numbers = options.data_dir / "numbers.f8"
    write_numbers(numbers, 8_000_000 * DIM)
    found |= steps_of(numbers, options.turns)
    return found


def steps_of(numbers: Path, turns: int) -> dict[str, Any]:
    """Time and memory of steps, and the exponents of n, d and the batch in them."""
    sizes = [1_000_000, 2_000_000, 4_000_000, 8_000_000]
    sampled = {n: (n, DIM, 2000, 40) for n in sizes}
    batches = {b: (8_000_000, DIM, b, 20) for b in (500, 2000, 8000, 32_000)}
    widths = {d: (8_000_000 * DIM // d, d, 4000, 30) for d in (25, 50, 100, 200)}
    whole = {n: (n, DIM, n, 8) for n in sizes}
    settings = {"n": sampled, "batch": batches, "d": widths, "all rows": whole}
    seconds: dict[str, Any] = {}
    peaks: dict[str, Any] = {}
    for name, points in settings.items():
        times: dict[int, list[float]] = {at: [] for at in points}
        peak: dict[int, float] = dict.fromkeys(points, 0.0)
        for _ in range(turns):
            for at, (n, d, b, steps) in points.items():
                one = child(STEPS, numbers, n, d, b, steps)
                times[at].append(one["seconds"])
                peak[at] = max(peak[at], one["peak"])
        seconds[name] = {at: statistics.median(found) for at, found in times.items()}
        peaks[name] = peak
        print(f"{name}: {seconds[name]} {peak}", file=sys.stderr)
    rates = [n / s for n, s in seconds["all rows"].items()]
    return {
        "seconds": seconds,
        "peak": peaks,
        "exponents of time": {name: exponent(found) for name, found in seconds.items()},
        "exponents of memory": {name: exponent(found) for name, found in peaks.items()},
        "rows a second": {n: n / s for n, s in seconds["all rows"].items()},
        "spread of rows a second": max(rates) / min(rates) - 1,
    }


def exponent(found: dict[int, float]) -> float:
    """The slope of a line through the logarithms."""
    x, y = np.log(list(found)), np.log(list(found.values()))
    return float(np.polyfit(x, y, 1)[0])


def child(code: str, *arguments: object) -> Any:
    """What a process of its own prints at last."""
    command = [sys.executable, "-W", "ignore", "-c", PEAK + code, *map(str, arguments)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def write_parquet(folder: Path, gigabytes: float) -> None:
    """Rows of DIM normal columns and a label, in files of some 100 MB."""
    import polars as pl

    folder.mkdir(exist_ok=True)
    rows = round(gigabytes * 1e9 / 8 / DIM)
    rng = np.random.default_rng(0)
    weights = rng.normal(size=DIM) / 5
    files = math.ceil(rows / _ROWS_A_FILE)
    for k in track(range(files), files, f"writing {gigabytes:g} GB"):
        path = folder / f"part-{k:05d}.parquet"
        if path.exists():
            continue
        count = min(_ROWS_A_FILE, rows - k * _ROWS_A_FILE)
        X = np.random.default_rng([1, k]).standard_normal((count, DIM))
        chance = 1 / (1 + np.exp(-X @ weights))
        labels = pl.Series("y", (np.random.default_rng([2, k]).random(count) < chance)).cast(
            pl.Int8
        )
        frame = pl.DataFrame(X, schema=[f"x{j}" for j in range(DIM)]).with_columns(labels)
        begun = folder / f"_part-{k:05d}"
        frame.write_parquet(begun, compression="uncompressed")
        begun.rename(path)


def write_numbers(path: Path, count: int) -> None:
    """So many normal numbers."""
    if path.exists() and path.stat().st_size == 8 * count:
        return
    start, piece = time.perf_counter(), 10_000_000
    with path.open("wb") as file:
        for k in range(0, count, piece):
            size = min(piece, count - k)
            np.random.default_rng(k).standard_normal(size).tofile(file)
    print(f"wrote {path.name} in {time.perf_counter() - start:.0f} s", file=sys.stderr)
