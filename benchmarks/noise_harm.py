"""How much can noise of another shape gain? Measured with a trained language model on public text.

For every tensor: m, the mean squared per-example gradient of a coordinate, which is what a larger
C costs in the norm; and a, how much the loss rises with the variance of noise in a coordinate,
which is what a larger C saves. With Σ m C fixed the harm Σ a/C is least for C ~ sqrt(a/m), and then
it is (Σ sqrt(a m))² / (Σ a Σ m) of what a ball's noise does.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Subset

from privagrad.experiments.language.corpus import Sequences, collate, read_texts
from privagrad.experiments.language.model import LanguageModel, perplexity
from privagrad.torch.moments import second_moments

NOISE = 0.07
WORDS = 20_000
EXAMPLES = 1000


def run(arguments: list[str]) -> dict[str, object]:
    parser = argparse.ArgumentParser("python -m benchmarks noise_harm")
    parser.add_argument("--data-dir", type=Path, required=True, help="WikiText-2")
    parser.add_argument("--public-dir", type=Path, required=True, help="public text")
    parser.add_argument("--run", type=Path, required=True, help="a run of `reproduce table1`")
    options = parser.parse_args(arguments)
    texts = read_texts(options.data_dir, options.public_dir)
    assert texts.public is not None
    model = LanguageModel(len(texts.vocabulary))
    state = torch.load(options.run / "state.pt", weights_only=True)["module_state_dict"]
    model.load_state_dict({name.removeprefix("_module."): value for name, value in state.items()})
    examples = Subset(Sequences(texts.public), range(EXAMPLES))
    batches = ((*batch, batch[1]) for batch in DataLoader(examples, 50, collate_fn=collate))
    moments = second_moments(model, batches, lambda loss, _: loss, per="tensor", floor=1e-9)
    rows = {}
    before = math.log(perplexity(model, texts.public, False, WORDS))
    for name, parameter in model.named_parameters():
        kept = parameter.detach().clone()
        rises = []
        for seed in range(3):
            noise = torch.randn(kept.shape, generator=torch.Generator().manual_seed(seed))
            parameter.data.copy_(kept + NOISE * noise)
            rises.append(math.log(perplexity(model, texts.public, False, WORDS)) - before)
            parameter.data.copy_(kept)
        rise = max(sum(rises) / len(rises), 0.0)
        m = float(moments[name].mean())
        rows[name] = (parameter.numel(), m, rise / (parameter.numel() * NOISE**2))
    print(f"{'tensor':20s} {'size':>8s} {'m':>9s} {'a':>9s} {'sqrt(a/m)':>10s}")
    for name, (size, m, a) in rows.items():
        print(f"{name:20s} {size:8d} {m:9.2g} {a:9.2g} {math.sqrt(a / m):10.2g}")
    harm = sum(size * a for size, _, a in rows.values())
    energy = sum(size * m for size, m, _ in rows.values())
    least = sum(size * math.sqrt(a * m) for size, m, a in rows.values()) ** 2 / (harm * energy)
    print(f"noise of the best shape per tensor does {least:.2f} of the harm of a ball's")
    return {"tensors": rows, "least": least}
