"""Multi-head attention: four projections, and what happens between them."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from privagrad.torch.per_example.gradients import ALL, DenseGradient, Gradients
from privagrad.torch.per_example.layers._registry import layer
from privagrad.torch.per_example.layers.linear import projected
from privagrad.torch.per_example.tape import Tape
from privagrad.torch.scales import accurate


@layer(nn.MultiheadAttention)
def attention(
    tape: Tape,
    module: nn.MultiheadAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    if query.dim() != 3:
        raise ValueError(
            f"Expected a query of shape (examples, tokens, {module.embed_dim}) or (tokens, "
            f"examples, {module.embed_dim}), found {tuple(query.shape)}: give it a dimension of "
            "examples."
        )
    if is_causal and attn_mask is None:
        raise ValueError("Expected attn_mask with is_causal=True, found none.")
    q, k, v = _projections(tape, module, query, key, value)
    added = int(module.bias_k is not None) + int(module.add_zero_attn)
    if module.bias_k is not None and module.bias_v is not None:
        # One more token, the same for every example.
        more_k, more_v = (
            _biased(tape, module, bias.detach().expand(len(k), -1, -1).clone(), bias)
            for bias in (module.bias_k, module.bias_v)
        )
        k, v = torch.cat([k, more_k], 1), torch.cat([v, more_v], 1)
    if module.add_zero_attn:
        k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
    q, k, v = (t.unflatten(2, (module.num_heads, -1)).transpose(1, 2) for t in (q, k, v))
    # As PyTorch does: a causal mask is taken at its word where nothing else is asked.
    causal = is_causal and key_padding_mask is None and not need_weights
    mask = None if causal else _merged(attn_mask, key_padding_mask, q, added)
    dropout = module.dropout if module.training else 0.0
    weights = None
    if need_weights:
        products = (q * math.sqrt(1.0 / q.shape[-1])) @ k.transpose(2, 3)
        weights = torch.softmax(products if mask is None else products + mask, 3)
        weights = F.dropout(weights, dropout)
        y = weights @ v
    else:
        y = F.scaled_dot_product_attention(q, k, v, mask, dropout, causal)
    y = y.transpose(1, 2).flatten(2)
    y = projected(tape, module, y, module.out_proj.weight, module.out_proj.bias)
    if weights is not None and average_attn_weights:
        weights = weights.mean(1)
    return (y if module.batch_first else y.transpose(0, 1)), weights


def _projections(
    tape: Tape, module: nn.MultiheadAttention, query: Tensor, key: Tensor, value: Tensor
) -> Iterator[Tensor]:
    """Queries, keys and values, (examples, tokens, embed_dim)."""
    size, bias = module.embed_dim, module.in_proj_bias

    def first(x: Tensor) -> Tensor:
        return x if module.batch_first else x.transpose(0, 1)

    if module.in_proj_weight is None:
        separate = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
        for i, (x, w) in enumerate(zip((query, key, value), separate, strict=True)):
            y = projected(tape, module, first(x), w, None)
            part = slice(i * size, (i + 1) * size)
            yield y if bias is None else _biased(tape, module, y + bias.detach()[part], bias, part)
        return
    # Inputs that are the same are multiplied at once.
    if query is key and key is value:
        groups = [(query, 3)]
    else:
        groups = [(query, 1), (key, 2)] if key is value else [(query, 1), (key, 1), (value, 1)]
    start = 0
    for x, number in groups:
        part = slice(start, start + number * size)
        y = projected(tape, module, first(x), module.in_proj_weight, bias, part)
        yield from y.chunk(number, 2)
        start = part.stop


def _biased(tape: Tape, module: nn.Module, y: Tensor, bias: Tensor, part: slice = ALL) -> Tensor:
    """`y`, to every token of which some entries of a bias were added."""
    examples = tape.examples(module, y)

    def per_example(gradient: Tensor) -> Gradients:
        yield DenseGradient(bias, accurate(examples(gradient, 1)).sum(1), part)

    return tape.tap(y, per_example)


def _merged(
    attn_mask: Tensor | None, key_padding_mask: Tensor | None, q: Tensor, added: int
) -> Tensor | None:
    """What is added to the products (examples, heads, queries, keys); all see the `added` keys."""
    merged = None
    if attn_mask is not None:
        merged = F.pad(_additive(attn_mask, q.dtype), (0, added))
        if merged.dim() == 3:
            merged = merged.unflatten(0, q.shape[:2])
    if key_padding_mask is not None:
        padding = F.pad(_additive(key_padding_mask, q.dtype), (0, added))[:, None, None]
        merged = padding if merged is None else merged + padding
    return merged


def _additive(mask: Tensor, kind: torch.dtype) -> Tensor:
    if mask.dtype != torch.bool:
        return mask.to(kind)
    return torch.zeros_like(mask, dtype=kind).masked_fill_(mask, -torch.inf)
