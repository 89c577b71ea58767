"""What verification costs: the paper's LSTM step, and a small convolutional classifier of digits.

A run of 1,000 steps verifies at steps 1, 2, 4, ..., 512, and once for every pass that does
something new. Reported are the share of such a run that goes into verifying, what the first
verification costs in plain steps, and private steps that are not verified, with and without the
recorder that looks for something new, as a ratio.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

STEPS = 1000
VERIFIED = STEPS.bit_length()


def run(arguments: list[str]) -> dict[str, object]:
    parser = argparse.ArgumentParser("python -m benchmarks verification")
    parser.add_argument("--steps", type=int, default=16, help="timed steps of each contestant")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    table = {task: _measure(task, options.steps) for task in ("language-model", "digits")}
    print(f"{'':16}{'plain ms':>10}{'private':>10}{'recorded':>10}{'first':>8}{'of 1000':>9}")
    for task, row in table.items():
        print(
            f"{task:16}{1e3 * row['plain_seconds']:10.1f}{row['private_ratio']:9.2f}x"
            f"{row['recorder_ratio']:9.3f}x{row['first_in_plain_steps']:8.2f}"
            f"{row['share_of_1000_steps']:9.2%}"
        )
    return {"table": table}


def _measure(task: str, steps: int) -> dict[str, float]:
    spent: list[float] = []
    contestants = {
        "plain": _steps(task, None, spent),
        "trusted": _steps(task, False, []),
        "verified": _steps(task, True, spent),
    }
    first = sum(spent)
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    # Steps 3, 5, 6, 7, 9, ... are recorded and not verified.
    for number in range(steps):
        for name, step in contestants.items():
            spent.clear()
            start = time.perf_counter()
            step()
            taken = time.perf_counter() - start
            if not (name == "verified" and spent):
                seconds[name].append(taken)
            elif number > 0:
                again = sum(spent)
    medians = {name: statistics.median(found) for name, found in seconds.items()}
    ratios = [a / b for a, b in zip(seconds["verified"], seconds["trusted"], strict=False)]
    return {
        "plain_seconds": medians["plain"],
        "private_ratio": medians["verified"] / medians["plain"],
        "recorder_ratio": statistics.median(ratios),
        "first_in_plain_steps": first / medians["plain"],
        "share_of_1000_steps": (first + (VERIFIED - 1) * again) / (STEPS * medians["verified"]),
    }


def _steps(task: str, verify: bool | None, spent: list[float]) -> Callable[[], None]:
    """A training step, made once; `verify` is None for plain training."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    from privagrad.torch import PrivacyEngine

    module, x, y, criterion = _task(task)
    optimizer: Any = torch.optim.SGD(module.parameters(), lr=0.01)
    if verify is not None:
        module, optimizer, _ = PrivacyEngine().make_private(
            module=module,
            optimizer=optimizer,
            data_loader=DataLoader(TensorDataset(x, y), batch_size=len(x)),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            poisson_sampling=False,
            verify=verify,
        )
        _time(module.guard, "_learn", spent)
        _time(module.loss_guard, "_check_trace", spent)

    def step() -> None:
        optimizer.zero_grad()
        criterion(module(x), y).backward()
        optimizer.step()

    step()
    return step


def _task(task: str) -> tuple[Any, Any, Any, Callable[[Any, Any], Any]]:
    import torch
    import torch.nn.functional as F
    from torch import nn

    from benchmarks._torch_steps import build

    if task == "language-model":
        module, x, y, _ = build(task, "plain")
        return module, x, y, lambda out, y: F.cross_entropy(out.flatten(0, 1), y.flatten())
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Conv2d(1, 16, 8, 2, padding=3), nn.ReLU(), nn.MaxPool2d(2, 1),
        nn.Conv2d(16, 32, 4, 2), nn.ReLU(), nn.MaxPool2d(2, 1),
        nn.Flatten(), nn.Linear(512, 32), nn.ReLU(), nn.Linear(32, 10),
    )  # fmt: skip
    return module, torch.randn(256, 1, 28, 28), torch.randint(0, 10, (256,)), F.cross_entropy


def _time(guard: Any, name: str, spent: list[float]) -> None:
    """Note how long each call of a method takes."""
    method = getattr(guard, name)

    def timed(*args: Any, **options: Any) -> Any:
        start = time.perf_counter()
        try:
            return method(*args, **options)
        finally:
            spent.append(time.perf_counter() - start)

    setattr(guard, name, timed)
