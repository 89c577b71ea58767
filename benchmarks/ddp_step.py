"""The paper's language model: two processes under DistributedDataParallel against one.

All have one thread each and the same batch, of 250 sequences of 35 tokens, and take private steps
of Adagrad with a general diagonal. "two" has half of the private gradient and of the optimizer's
state in each process. "two, whole" has whole ones, because its optimizer has a step hook.
Contestants take turns, and ratios are taken within a turn. Ratios of time mean something only where
two processors are idle; those of processor time, of one process, change less with other work.

Memory is what one process holds from one step to the next, and the buffers of the exchange.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from typing import Any

CONTESTANTS = ("one", "two", "two, whole")


def run(arguments: list[str]) -> dict[str, object]:
    parser = argparse.ArgumentParser("python -m benchmarks ddp_step")
    parser.add_argument("--turns", type=int, default=5, help="runs of each contestant")
    parser.add_argument("--steps", type=int, default=7, help="timed steps of each run")
    options = parser.parse_args(arguments)
    found: dict[str, list[dict[str, float]]] = {name: [] for name in CONTESTANTS}
    for _ in range(options.turns):
        for name in CONTESTANTS:
            found[name].append(_measured(name, options.steps))
    table = {name: _row(own, found["one"]) for name, own in found.items()}
    print(
        f"\n{'':12}{'samples/s':>11}{'x one':>7}{'x processor':>13}{'state MB':>10}"
        f"{'gradient MB':>13}{'buffers MB':>12}"
    )
    for name, row in table.items():
        print(
            f"{name:12}{row['samples_per_second']:11.0f}{row['speed_ratio']:7.2f}"
            f"{row['processor_ratio']:13.2f}{row['state_mb']:10.2f}{row['gradient_mb']:13.2f}"
            f"{row['buffers_mb']:12.2f}"
        )
    held = {name: row["state_mb"] + row["gradient_mb"] for name, row in table.items()}
    return {"table": table, "memory_ratio": held["two"] / held["one"]}


_KEPT = ("state", "gradient", "buffers")


def _row(own: list[dict[str, float]], one: list[dict[str, float]]) -> dict[str, Any]:
    ratios = [b["seconds"] / a["seconds"] for a, b in zip(own, one, strict=True)]
    pairs = zip(own, one, strict=True)
    processor = [b["processor_seconds"] / a["processor_seconds"] for a, b in pairs]
    return {
        "samples_per_second": 250 / statistics.median(r["seconds"] for r in own),
        "speed_ratio": statistics.median(ratios),
        "speed_ratios": [round(ratio, 3) for ratio in ratios],
        "processor_ratio": statistics.median(processor),
        "processor_ratios": [round(ratio, 3) for ratio in processor],
        **{f"{kept}_mb": max(r[f"{kept}_mb"] for r in own) for kept in _KEPT},
    }


def _measured(name: str, steps: int) -> dict[str, float]:
    """One run of a contestant: the figures of its first process."""
    count = 1 if name == "one" else 2
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks._ddp_process"]
        processes = [
            subprocess.Popen(
                [*command, name, str(rank), str(count), f"{folder}/meet", str(steps)],
                env=environment, stdout=subprocess.PIPE, text=True,
            )
            for rank in range(count)
        ]  # fmt: skip
        shown = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        raise RuntimeError(f"Expected {name} to run, found an error in one of its processes.")
    figures: dict[str, float] = json.loads(shown[0].strip().splitlines()[-1])
    return figures
