"""Secure normals against NumPy's, randomgen's and PyTorch's; whole releases; discrete noise.

One thread, one process; contestants take turns. Nanoseconds are per normal.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable

import numpy as np

from benchmarks._timing import median_ratio, repeated, take_turns
from privagrad._internal.validate import Vector
from privagrad.privacy.discrete import add_discrete
from privagrad.privacy.mechanism import GaussianSum
from privagrad.privacy.noise import BUFFER, KeyStream, random_source, secure_generator
from privagrad.privacy.normals import add_normals

COUNT = 2**20


def run(arguments: list[str]) -> dict[str, object]:
    parser = argparse.ArgumentParser("python -m benchmarks noise")
    parser.add_argument("--turns", type=int, default=25)
    turns = parser.parse_args(arguments).turns
    seconds = take_turns({name: repeated(call, 2) for name, call in contestants().items()}, turns)
    table: dict[str, dict[str, float]] = {}
    print(f"{'':34}{'ns':>8}{'x NumPy':>9}")
    for name, found in seconds.items():
        per_normal = 1e9 * statistics.median(found) / COUNT
        ratio = median_ratio(found, seconds["numpy PCG64"])
        table[name] = {"ns": per_normal, "over_numpy": ratio}
        print(f"{name:34}{per_normal:8.2f}{ratio:9.2f}")
    return {"table": table}


def secure_noise(out: Vector) -> Callable[[], None]:
    """Adds secure noise to `out`, block by block."""
    stream = KeyStream()

    def add() -> None:
        for start in range(0, out.size, BUFFER):
            add_normals(out[start : start + BUFFER], stream, 1e6)

    return add


def contestants() -> dict[str, Callable[[], object]]:
    import torch

    torch.set_num_threads(1)
    out, tensor = np.empty(COUNT), torch.empty(COUNT)
    default, aes, stream = np.random.default_rng(), secure_generator(), KeyStream()
    mechanism, gaussian = GaussianSum(COUNT, 1.0, 1.0), random_source()

    def words() -> None:
        for _ in range(0, COUNT, BUFFER):
            stream.words(BUFFER)

    return {
        "numpy PCG64": lambda: default.standard_normal(out=out),
        "randomgen AES, ziggurat": lambda: aes.standard_normal(out=out),
        "torch normal, float32": lambda: tensor.normal_(),
        "privagrad, random words alone": words,
        "privagrad, noise added to units": secure_noise(out),
        "privagrad, whole release": lambda: mechanism.release(mechanism.sum(out=out), gaussian),
        "privagrad, discrete noise": lambda: add_discrete(out, stream, mechanism.deviation),
    }
