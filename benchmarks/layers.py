"""One private step of each kind of layer, with a general diagonal, against plain and Opacus."""

from __future__ import annotations

import argparse

from benchmarks._torch_steps import CONTESTANTS, compare, show

TASKS = {
    "linear": "Linear(256, 256), 64 x 64 tokens",
    "linear-rows": "Linear(1024, 1024), 512 rows",
    "conv": "Conv2d(32, 64, 3) on 64 images of 32 x 32",
    "embedding": "Embedding(8000, 120), 250 x 35 tokens",
    "lstm": "LSTM(120, 120), 250 x 35 tokens",
    "gru": "GRU(120, 120), 250 x 35 tokens",
    "mha": "MultiheadAttention(256, 8), 64 x 64 tokens",
    "transformer": "6-layer encoder, d = 256, 64 tokens, b = 64",
}


def run(arguments: list[str]) -> dict[str, object]:
    parser = argparse.ArgumentParser("python -m benchmarks layers")
    parser.add_argument("--turns", type=int, default=3, help="processes of each contestant")
    parser.add_argument("--steps", type=int, default=9, help="timed steps of each process")
    parser.add_argument("--only", nargs="*", choices=list(TASKS), default=list(TASKS))
    options = parser.parse_args(arguments)
    tables = {}
    for task in options.only:
        tables[task] = compare(task, CONTESTANTS, options.turns, options.steps)
        show(TASKS[task], tables[task])
    return {"tables": tables}
