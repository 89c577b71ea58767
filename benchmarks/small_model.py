"""A script that trains a small model, from the start of its process to its epsilon.

A convolutional classifier of scikit-learn's digits (8 x 8 images) on batches of about 100. Here
imports, checks and other fixed costs count as much as the steps.

`python -m benchmarks.small_model CONTESTANT STEPS` is such a script.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
import warnings
from typing import Any

from benchmarks._timing import median_ratio

CONTESTANTS = ("plain", "privagrad", "opacus-hooks", "opacus-ghost")
BATCH_SIZE = 100


def run(arguments: list[str]) -> dict[str, object]:
    parser = argparse.ArgumentParser("python -m benchmarks small_model")
    parser.add_argument("--turns", type=int, default=5, help="processes of each contestant")
    parser.add_argument("--steps", type=int, default=420, help="steps of each process")
    options = parser.parse_args(arguments)
    seconds: dict[str, list[float]] = {name: [] for name in CONTESTANTS}
    # Where no bytecode may be written, what runs from a source tree is compiled at every start,
    # and what was installed is not.
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    for turn in range(options.turns + 1):
        for name in CONTESTANTS:
            command = [sys.executable, "-m", "benchmarks.small_model", name, str(options.steps)]
            start = time.perf_counter()
            subprocess.run(command, check=True, capture_output=True, env=environment)
            # The first turn fills the caches: compiled kernels, files.
            if turn:
                seconds[name].append(time.perf_counter() - start)
    fastest = min(("opacus-hooks", "opacus-ghost"), key=lambda n: statistics.median(seconds[n]))
    table = {
        name: {
            "seconds": statistics.median(taken),
            "x_plain": median_ratio(taken, seconds["plain"]),
            "x_opacus": median_ratio(taken, seconds[fastest]),
        }
        for name, taken in seconds.items()
    }
    print(f"{'':16}{'seconds':>9}{'x plain':>9}{'x Opacus':>10}   (Opacus: {fastest})")
    for name, row in table.items():
        print(f"{name:16}{row['seconds']:9.2f}{row['x_plain']:9.2f}{row['x_opacus']:10.2f}")
    return {"steps": options.steps, "opacus_fastest": fastest, "table": table}


def train(contestant: str, steps: int) -> float | None:
    """The whole script; its epsilon, None for plain training."""
    import torch
    from sklearn.datasets import load_digits
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    images, targets = load_digits(return_X_y=True)
    x = torch.tensor(images / 16.0, dtype=torch.float32).reshape(-1, 1, 8, 8)
    dataset = TensorDataset(x, torch.tensor(targets))
    module: Any = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.ReLU(), nn.Flatten(), nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip
    optimizer: Any = torch.optim.SGD(module.parameters(), lr=0.5)
    loader: Any = DataLoader(dataset, batch_size=BATCH_SIZE, shuffle=contestant == "plain")
    criterion: Any = nn.CrossEntropyLoss()
    engine: Any = None
    if contestant != "plain":
        module, optimizer, loader, criterion, engine = _made_private(
            contestant, module, optimizer, loader, criterion
        )
    done = 0
    while done < steps:
        for inputs, labels in loader:
            optimizer.zero_grad()
            criterion(module(inputs), labels).backward()
            optimizer.step()
            done += 1
            if done == steps:
                break
    return None if engine is None else float(engine.get_epsilon(1e-5))


def _made_private(
    contestant: str, module: Any, optimizer: Any, loader: Any, criterion: Any
) -> tuple[Any, ...]:
    common = {
        "module": module, "optimizer": optimizer, "data_loader": loader, "noise_multiplier": 1.0,
        "max_grad_norm": 1.0,
    }  # fmt: skip
    if contestant == "privagrad":
        from privagrad.torch import PrivacyEngine

        engine: Any = PrivacyEngine()
        return *engine.make_private(**common), criterion, engine
    from opacus import PrivacyEngine as Opacus

    engine = Opacus()
    if contestant == "opacus-hooks":
        return *engine.make_private(**common), criterion, engine
    made = engine.make_private(**common, criterion=criterion, grad_sample_mode="ghost")
    module, optimizer, criterion, loader = made
    return module, optimizer, loader, criterion, engine


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    print(json.dumps({"epsilon": train(sys.argv[1], int(sys.argv[2]))}))
