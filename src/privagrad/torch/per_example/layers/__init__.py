"""One short file per kind of layer: its forward pass, and the per-example gradients it leaves."""

from __future__ import annotations

from torch import nn

from privagrad.torch.per_example.layers import (
    attention,
    convolution,
    embedding,
    linear,
    normalization,
    recurrent,
    single_cells,
)
from privagrad.torch.per_example.layers._registry import LAYERS, Layer
from privagrad.torch.per_example.layers.anything import anything

__all__ = [
    "attention",
    "convolution",
    "embedding",
    "layer_of",
    "linear",
    "normalization",
    "recurrent",
    "single_cells",
]


def layer_of(module: nn.Module) -> Layer:
    """The private forward pass of a module: its own, or the one that fits anything."""
    return LAYERS.get(type(module), anything)
