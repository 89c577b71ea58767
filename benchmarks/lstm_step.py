"""The paper's language model: a private step with a general diagonal against a plain one.

Embedding 8000 to 120, two LSTM layers of 120, linear to 8000, 2,160,320 parameters; 250 sequences
of 35 tokens. "fused" has `LinearCrossEntropy` for the linear layer and the loss.
"""

from __future__ import annotations

import argparse

from benchmarks._torch_steps import CONTESTANTS, FUSED, compare, show


def run(arguments: list[str]) -> dict[str, object]:
    parser = argparse.ArgumentParser("python -m benchmarks lstm_step")
    parser.add_argument("--turns", type=int, default=3, help="processes of each contestant")
    parser.add_argument("--steps", type=int, default=7, help="timed steps of each process")
    options = parser.parse_args(arguments)
    contestants = (*CONTESTANTS[:2], *FUSED, *CONTESTANTS[2:])
    table = compare("language-model", contestants, options.turns, options.steps)
    show("the paper's LSTM, b = 250, 35 tokens", table)
    return {"table": table}
