"""Rows of a table, looked up by number."""

from __future__ import annotations

from collections.abc import Iterator

import torch.nn.functional as F
from torch import Tensor, nn

from privagrad.torch.per_example.gradients import PerExampleGradient, RowLookupGradient
from privagrad.torch.per_example.layers._registry import layer
from privagrad.torch.per_example.tape import SavedInput, Tape


@layer(nn.Embedding)
def embedding(tape: Tape, module: nn.Embedding, index: Tensor) -> Tensor:
    y = F.embedding(index, module.weight.detach(), module.padding_idx)
    examples, saved = tape.examples(module, index, 0), SavedInput(index)

    def per_example(gradient: Tensor) -> Iterator[PerExampleGradient]:
        yield RowLookupGradient(
            module.weight, examples(saved(), 0), examples(gradient, 1), module.padding_idx
        )

    return tape.tap(y, per_example)
