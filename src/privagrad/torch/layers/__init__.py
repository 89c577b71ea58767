"""One short file per layer: its forward pass, and how its parameters are used."""

from __future__ import annotations

from torch import nn

from privagrad.torch.layers import embedding, gru, linear, lstm, rnn
from privagrad.torch.layers._registry import LAYERS, Layer, layer
from privagrad.torch.layers.anything import anything

__all__ = ["LAYERS", "Layer", "embedding", "gru", "layer", "layer_of", "linear", "lstm", "rnn"]


def layer_of(module: nn.Module) -> Layer:
    """The private forward pass of a module: its own, or the one that fits anything."""
    return LAYERS.get(type(module), anything)
