"""The registry of layers.

A layer is a function of the tape, the module and the module's inputs, that returns the module's
outputs. Parameters enter detached: their gradients come from the tape alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor, nn

Layer = Callable[..., Any]
F = TypeVar("F", bound=Layer)
LAYERS: dict[type[nn.Module], Layer] = {}


def layer(*kinds: type[nn.Module]) -> Callable[[F], F]:
    """Register a function as the private forward pass of these modules."""

    def register(function: F) -> F:
        LAYERS.update(dict.fromkeys(kinds, function))
        return function

    return register


def frozen(parameter: Tensor | None) -> Tensor | None:
    return None if parameter is None else parameter.detach()
