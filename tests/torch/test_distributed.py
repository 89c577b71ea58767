"""Two processes on gloo: the same sums, the same noise, the same account as one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from tests.statistics import assert_scale

WORKER = "tests.torch.distributed_worker"
ROOT = Path(__file__).parents[2]
HANGS = 1800
"""Seconds after which a process is taken to hang: far beyond what a busy machine needs."""


def start(task: str, processes: int, folder: Path) -> list[subprocess.Popen[str]]:
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    return [
        subprocess.Popen(
            [
                sys.executable,
                "-m",
                WORKER,
                task,
                str(rank),
                str(processes),
                str(folder),
            ],
            cwd=ROOT,
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(processes)
    ]


def run(task: str, processes: int, folder: Path) -> list[dict[str, Any]]:
    for process in start(task, processes, folder):
        _, errors = process.communicate(timeout=HANGS)
        assert process.returncode == 0, errors
    return [torch.load(folder / f"{task}-{processes}-{rank}.pt") for rank in range(processes)]


def test_the_sum_is_that_of_one_process(tmp_path: Path) -> None:
    (alone,) = run("sum", 1, tmp_path)
    first, second = run("sum", 2, tmp_path)
    assert torch.equal(first["gradients"], second["gradients"])
    assert torch.allclose(first["gradients"], alone["gradients"], rtol=1e-5, atol=1e-8)
    assert first["expected"] == alone["expected"] == 32
    # The examples within the bound are counted over all processes.
    assert first["bound"] == second["bound"] == alone["bound"] != 0.2


def test_users_stay_whole(tmp_path: Path) -> None:
    (alone,) = run("users", 1, tmp_path)
    first, second = run("users", 2, tmp_path)
    assert torch.equal(first["gradients"], second["gradients"])
    assert torch.allclose(first["gradients"], alone["gradients"], rtol=1e-5, atol=1e-8)
    assert first["sizes"][0] + second["sizes"][0] == alone["sizes"][0] == 32
    assert first["expected"] == 12


def test_noise_ellipsoid_and_epsilon_are_those_of_one_process(tmp_path: Path) -> None:
    first, second = run("noise", 2, tmp_path)
    (alone,) = run("noise", 1, tmp_path)
    assert torch.equal(first["gradients"], second["gradients"])
    assert all(torch.equal(a, b) for a, b in zip(first["scales"], second["scales"], strict=True))
    assert first["epsilon"] == second["epsilon"] == alone["epsilon"]
    for result in (first, alone):
        scale = torch.cat([s.flatten() for s in result["scales"]])
        centred = result["gradients"] - result["gradients"].mean(0)
        normal = (centred * scale.sqrt()).numpy()
        # The bounded gradients themselves add about 0.2/8 · sqrt(8)/sqrt(58) a coordinate.
        signal = 0.2 * 8**0.5 / 58**0.5
        assert_scale(normal, (1 - 1 / 200) ** 0.5 * ((1.5 * 0.2) ** 2 + signal**2) ** 0.5 / 8)
    # Each has drawn from its own half of the 40 rows, at the rate 8/40.
    assert abs(sum(first["sizes"]) / len(first["sizes"]) - 4) < 1
    assert abs(sum(second["sizes"]) / len(second["sizes"]) - 4) < 1


def test_processes_without_rows_keep_step(tmp_path: Path) -> None:
    first, second = run("empty", 2, tmp_path)
    assert 0 in first["sizes"]
    assert 0 in second["sizes"]
    assert len(first["sizes"]) == len(second["sizes"]) == 60
    assert torch.equal(first["parameters"], second["parameters"])
    assert first["bound"] == second["bound"] != 0.2


def test_a_killed_process_ends_the_run(tmp_path: Path) -> None:
    """The one that is left ends with an error; it does not go on alone."""
    first, second = start("kill", 2, tmp_path)
    _, errors = first.communicate(timeout=HANGS)
    second.communicate(timeout=HANGS)
    assert second.returncode == -9
    assert first.returncode > 0
    assert "Error" in errors
