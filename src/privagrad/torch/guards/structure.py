"""The tensors in what a module returns: in tuples, lists, dictionaries and data classes."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_map


def tensors_of(value: Any) -> list[Tensor]:
    """All tensors in `value`, in order."""
    found: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_tensors(keep, value)
    return found


def map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """`value` with `function` of each of its tensors in their place."""

    def mapped(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return function(leaf)
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            twin = copy.copy(leaf)
            for field in dataclasses.fields(leaf):
                inner = map_tensors(function, getattr(leaf, field.name))
                object.__setattr__(twin, field.name, inner)
            return twin
        return leaf

    return tree_map(mapped, value)
