"""One private step of a linear model against Opacus, a plain copy of the rows, and the noise alone.

Everything a step does is timed: drawing the batch, bounding, summing, noise, the AdaGrad step,
the projection, the averages. One thread.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np
from scipy.sparse import csr_array

import privagrad as pg
from benchmarks._timing import median_ratio, repeated, take_turns
from benchmarks.noise import secure_noise

TURNS = 9


def run(arguments: list[str]) -> dict[str, object]:
    argparse.ArgumentParser("python -m benchmarks glm_step").parse_args(arguments)
    return {
        "small": small(),
        "large_dense": large_dense(),
        "wide_sparse": wide_sparse(),
        "noise_over_numpy": noise(),
        "import_seconds": import_seconds(),
        "import_loads_torch": import_loads_torch(),
    }


def private_steps(X: object, y: np.ndarray, batch_size: int, steps: int) -> Callable[[], float]:
    """Mean seconds of a step of PAGAN, from the second on."""
    dim = X.shape[1]  # type: ignore[attr-defined]
    ellipsoid = pg.Ellipsoid(np.linspace(1.0, 2.0, dim), 1.0)

    def measure() -> float:
        stamps = []
        pg.minimize(
            "absolute", X, y, method="pagan", epsilon=1.0, delta=1e-9, ellipsoid=ellipsoid,
            domain=pg.Box(-1, 1), batch_size=batch_size, steps=steps, step_size=0.1, threads=1,
            callback=lambda k, _: stamps.append(time.perf_counter()) if k in (1, steps) else None,
        )  # fmt: skip
        return (stamps[-1] - stamps[0]) / (steps - 1)

    return measure


def small() -> dict[str, object]:
    """n = 5,000, d = 100, b = 70: an Opacus step on nn.Linear with Adagrad, same work."""
    rng = np.random.default_rng(0)
    X, y = rng.standard_normal((5000, 100)), rng.standard_normal(5000)
    seconds = take_turns(
        {"privagrad": private_steps(X, y, 70, 2000), "opacus": opacus_steps(X, y, 70)}, TURNS
    )
    return summary(seconds, faster=median_ratio(seconds["opacus"], seconds["privagrad"]))


def opacus_steps(X: np.ndarray, y: np.ndarray, batch_size: int) -> Callable[[], float]:
    import torch
    from opacus import GradSampleModule
    from opacus.optimizers import DPOptimizer

    torch.set_num_threads(1)
    rows = torch.tensor(X, dtype=torch.float32)
    targets = torch.tensor(y[:, None], dtype=torch.float32)
    module = GradSampleModule(torch.nn.Linear(X.shape[1], 1, bias=False))
    optimizer = DPOptimizer(
        torch.optim.Adagrad(module.parameters(), lr=0.1),
        noise_multiplier=1.8,
        max_grad_norm=1.0,
        expected_batch_size=batch_size,
    )

    def step() -> None:
        batch = torch.randint(0, len(rows), (batch_size,))
        optimizer.zero_grad()
        (module(rows[batch]) - targets[batch]).abs().mean().backward()
        optimizer.step()

    return repeated(step, 200)


def large_dense() -> dict[str, object]:
    """n = 1,000,000, d = 100, b = 4,096, float32: NumPy's copy of the batch's rows."""
    rng = np.random.default_rng(0)
    X = rng.standard_normal((1_000_000, 100), dtype=np.float32)
    y = rng.standard_normal(1_000_000)
    chosen = [rng.choice(len(X), 4096, replace=False) for _ in range(20)]

    def copy() -> float:
        start = time.perf_counter()
        for rows in chosen:
            X[rows]
        return (time.perf_counter() - start) / len(chosen)

    seconds = take_turns({"privagrad": private_steps(X, y, 4096, 41), "copy": copy}, 5 * TURNS)
    return summary(seconds, over_copy=median_ratio(seconds["privagrad"], seconds["copy"]))


def wide_sparse() -> dict[str, object]:
    """CSR, d = 1,000,000, 100 non-zeros a row, b = 1,000: drawing d secure normals alone."""
    rng = np.random.default_rng(0)
    rows, dim = 20_000, 1_000_000
    columns = np.sort(rng.integers(dim, size=(rows, 100)), axis=1)
    X = csr_array(
        (rng.standard_normal(columns.size), columns.ravel(), np.arange(rows + 1) * 100),
        shape=(rows, dim),
    )
    y = rng.standard_normal(rows)
    seconds = take_turns(
        {
            "privagrad": private_steps(X, y, 1000, 11),
            "noise": repeated(secure_noise(np.zeros(dim)), 5),
        },
        TURNS,
    )
    return summary(seconds, over_noise=median_ratio(seconds["privagrad"], seconds["noise"]))


def noise() -> float:
    """Secure normals against NumPy's default generator."""
    default, out = np.random.default_rng(), np.empty(1_000_000)
    seconds = take_turns(
        {
            "secure": repeated(secure_noise(np.zeros(1_000_000)), 5),
            "numpy": repeated(lambda: default.standard_normal(out=out), 5),
        },
        TURNS,
    )
    return median_ratio(seconds["secure"], seconds["numpy"])


def import_seconds() -> float:
    code = "import time; s = time.perf_counter(); import privagrad; print(time.perf_counter() - s)"
    return min(float(_python(code)) for _ in range(5))


def import_loads_torch() -> bool:
    return _python("import privagrad, sys; print('torch' in sys.modules)") == "True"


def _python(code: str) -> str:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def summary(seconds: dict[str, list[float]], **ratios: float) -> dict[str, object]:
    medians = {f"{name}_us": statistics.median(times) * 1e6 for name, times in seconds.items()}
    return {**medians, **ratios}
