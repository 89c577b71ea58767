"""Rows of a table, looked up by number; sums, means and maxima of them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from privagrad.torch.per_example.gradients import Gradients
from privagrad.torch.per_example.layers._registry import layer
from privagrad.torch.per_example.row_lookups import RowLookupGradient
from privagrad.torch.per_example.shared import SharedTensor
from privagrad.torch.per_example.tape import Tape
from privagrad.torch.scales import accurate


@layer(nn.Embedding)
def embedding(tape: Tape, module: nn.Embedding, index: Tensor) -> Tensor:
    weight, padding = module.weight, module.padding_idx
    y = F.embedding(index, weight.detach(), padding)
    examples, saved = tape.examples(module, index, 0, constant=True), tape.save(index)

    def per_example(gradient: Tensor) -> Gradients:
        yield RowLookupGradient(weight, examples(saved(), 0), examples(gradient, 1), padding)

    def per_example_of_shared(gradient: Tensor) -> Gradients:
        rows = saved().reshape(1, -1).expand(len(gradient), -1)
        yield RowLookupGradient(
            weight, rows, gradient.reshape(len(rows), -1, weight.shape[1]), padding
        )

    if tape.is_shared(module):
        return SharedTensor.of(tape, module, y, per_example_of_shared)
    return tape.tap(y, per_example)


@layer(nn.EmbeddingBag)
def embedding_bag(
    tape: Tape,
    module: nn.EmbeddingBag,
    index: Tensor,
    offsets: Tensor | None = None,
    per_sample_weights: Tensor | None = None,
) -> Tensor:
    if index.dim() != 2 or offsets is not None:
        raise ValueError(
            "Expected EmbeddingBag inputs of shape (examples, tokens), found one list of tokens "
            "with offsets: the examples cannot be told apart. Pad the bags with padding_idx."
        )
    y = F.embedding_bag(
        index,
        module.weight.detach(),
        mode=module.mode,
        per_sample_weights=per_sample_weights,
        padding_idx=module.padding_idx,
    )
    examples, saved = tape.examples(module, index, 1), tape.save(index)

    def per_example(gradient: Tensor) -> Gradients:
        shares = _shares(module, saved(), per_sample_weights)
        of_tokens = examples(accurate(gradient), 1)[:, :, None] * examples(shares, 2)
        tokens = examples(saved(), 1)
        yield RowLookupGradient(
            module.weight, tokens.flatten(1), of_tokens.flatten(1, 2), module.padding_idx
        )  # fmt: skip

    return tape.tap(y, per_example)


def _shares(module: nn.EmbeddingBag, index: Tensor, weights: Tensor | None) -> Tensor:
    """How much of each coordinate of a bag comes from each token, (bags, tokens, n or 1)."""
    table = accurate(module.weight.detach())
    counted = torch.ones_like(index, dtype=torch.bool)
    if module.padding_idx is not None:
        counted = index != module.padding_idx
    if module.mode == "max":
        rows = F.embedding(index, table).masked_fill(~counted[..., None], -torch.inf)
        return torch.zeros_like(rows).scatter_(1, rows.argmax(1, keepdim=True), 1.0)
    if weights is not None:
        return weights.detach().to(table.dtype)[..., None]
    shares = counted.to(table.dtype)
    if module.mode == "mean":
        shares /= shares.sum(1, keepdim=True).clamp_min(1.0)
    return shares[..., None]
