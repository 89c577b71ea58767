"""One short file per layer: its forward pass, and the per-example gradients it leaves."""

from __future__ import annotations

from torch import nn

from privagrad.torch.per_example.layers import (
    attention,
    convolution,
    embedding,
    embedding_bag,
    gru,
    linear,
    lstm,
    normalization,
    rnn,
)
from privagrad.torch.per_example.layers._registry import LAYERS, Layer, layer
from privagrad.torch.per_example.layers.anything import anything

__all__ = [
    "LAYERS",
    "Layer",
    "attention",
    "convolution",
    "embedding",
    "embedding_bag",
    "gru",
    "layer",
    "layer_of",
    "linear",
    "lstm",
    "normalization",
    "rnn",
]


def layer_of(module: nn.Module) -> Layer:
    """The private forward pass of a module: its own, or the one that fits anything."""
    return LAYERS.get(type(module), anything)
