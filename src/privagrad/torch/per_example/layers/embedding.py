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
    if index.dim() != 2 and offsets is None:
        raise ValueError(
            "Expected EmbeddingBag inputs of shape (examples, tokens), or tokens with offsets, "
            f"found shape {tuple(index.shape)} without. Give it a dimension of examples."
        )
    if offsets is not None:
        _refuse_uneven(index, offsets, tape.count)
    y = F.embedding_bag(
        index,
        module.weight.detach(),
        offsets,
        mode=module.mode,
        per_sample_weights=per_sample_weights,
        include_last_offset=module.include_last_offset,
        padding_idx=module.padding_idx,
    )
    examples, saved = tape.examples(module, y, 1), tape.save(index)

    def per_example(gradient: Tensor) -> Gradients:
        places = _places(index, offsets, module.include_last_offset)
        shares = _shares(module, saved(), places, per_sample_weights)
        of_tokens = examples(accurate(gradient), 1)[:, :, None] * examples(shares, 2)
        tokens = examples(saved().reshape(-1)[places.clamp_min(0)], 1)
        yield RowLookupGradient(
            module.weight, tokens.flatten(1), of_tokens.flatten(1, 2), module.padding_idx
        )  # fmt: skip

    return tape.tap(y, per_example)


def _refuse_uneven(index: Tensor, offsets: Tensor, count: int) -> None:
    """Refuse offsets that do not divide the tokens of each example in the same way."""
    if not count or not len(offsets):
        return
    bags, tokens = len(offsets) // count, len(index) // count
    starts = offsets[: count * bags].reshape(count, bags)
    own = starts - torch.arange(count, device=offsets.device)[:, None] * tokens
    even = len(index) == count * tokens and bool((own == own[:1]).all())
    if not even or bags * count < len(offsets) - 1 or not bags or int(own[0, 0]) != 0:
        raise ValueError(
            f"Expected offsets that give each of {count} examples equally many tokens and bags, "
            f"one example after the other, found {len(index)} tokens with {len(offsets)} offsets: "
            "the examples cannot be told apart. Give EmbeddingBag inputs of shape (examples, "
            "tokens), padded with padding_idx."
        )


def _places(index: Tensor, offsets: Tensor | None, ends: bool) -> Tensor:
    """Where the tokens of each bag are among all, (bags, tokens of the longest); -1: nowhere."""
    if offsets is None:
        return torch.arange(index.numel(), device=index.device).view(index.shape)
    last = offsets.new_tensor([len(index)])
    starts = offsets[:-1] if ends else offsets
    lengths = (offsets[1:] if ends else torch.cat([offsets[1:], last])) - starts
    longest = int(lengths.max()) if len(lengths) else 0
    steps = torch.arange(max(1, longest), device=index.device)
    return torch.where(steps < lengths[:, None], starts[:, None] + steps, -1)


def _shares(
    module: nn.EmbeddingBag, index: Tensor, places: Tensor, weights: Tensor | None
) -> Tensor:
    """How much of each coordinate of a bag comes from each token, (bags, tokens, n or 1)."""
    table, known = accurate(module.weight.detach()), places >= 0
    chosen = places.clamp_min(0)
    tokens = index.reshape(-1)[chosen]
    counted = known if module.padding_idx is None else known & (tokens != module.padding_idx)
    if module.mode == "max":
        rows = F.embedding(tokens, table).masked_fill(~counted[..., None], -torch.inf)
        largest = torch.zeros_like(rows).scatter_(1, rows.argmax(1, keepdim=True), 1.0)
        # Of an empty bag nothing is the largest.
        return largest * counted[..., None]
    if weights is not None:
        own = weights.detach().to(table.dtype).reshape(-1)[chosen]
        return (own * known)[..., None]
    shares = counted.to(table.dtype)
    if module.mode == "mean":
        shares /= shares.sum(1, keepdim=True).clamp_min(1.0)
    return shares[..., None]
