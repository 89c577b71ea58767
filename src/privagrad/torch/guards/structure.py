"""What a value holds: tensors in tuples, lists, mappings, data classes, objects with attributes."""

from __future__ import annotations

import copy
import dataclasses
import enum
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.utils._pytree import SUPPORTED_NODES, tree_leaves, tree_map

_LEFT_ALONE = (
    int, float, complex, str, bytes, bytearray, np.ndarray, np.generic, enum.Enum, nn.Module, type,
    types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType,
)  # fmt: skip


_ATOMS = frozenset({int, bool, float, str, type(None)})
_CONTAINERS = frozenset({tuple, list, dict, OrderedDict})


def leaves_of(value: Any, whole: tuple[type, ...] = ()) -> list[Any]:
    """PyTorch's `tree_leaves`, several times as fast for ordinary containers.

    Queues of any kind are taken apart; what is of one of the types in `whole` is not.
    """
    found: list[Any] = []
    _gather_leaves(value, whole, found)
    return found


def _gather_leaves(value: Any, whole: tuple[type, ...], found: list[Any]) -> None:
    kind = type(value)
    if whole and isinstance(value, whole):
        found.append(value)
    elif kind is tuple or kind is list or isinstance(value, deque):
        _gather_parts(value, whole, found)
    elif kind is dict or kind is OrderedDict:
        _gather_parts(value.values(), whole, found)
    elif kind in SUPPORTED_NODES or isinstance(value, tuple):
        found += tree_leaves(value, is_leaf=lambda part: isinstance(part, whole))
    else:
        found.append(value)


def _gather_parts(parts: Iterable[Any], whole: tuple[type, ...], found: list[Any]) -> None:
    for part in parts:
        kind = type(part)
        # Most of what a module holds are numbers, names, and dictionaries of no hooks.
        if kind in _ATOMS:
            found.append(part)
        elif kind not in _CONTAINERS or part or whole:
            _gather_leaves(part, whole, found)


def map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    """PyTorch's `tree_map`, several times as fast for ordinary containers."""
    kind = type(value)
    if kind is tuple or kind is list:
        return kind([map_leaves(function, part) for part in value])
    if kind is dict:
        return {key: map_leaves(function, part) for key, part in value.items()}
    if kind in SUPPORTED_NODES or isinstance(value, tuple):
        return tree_map(function, value)
    return function(value)


def modules_of(module: nn.Module) -> list[nn.Module]:
    """The module and all modules in it, each once."""
    found: dict[int, nn.Module] = {}
    waiting: list[nn.Module | None] = [module]
    while waiting:
        part = waiting.pop()
        if part is not None and id(part) not in found:
            found[id(part)] = part
            waiting.extend(reversed(part._modules.values()))
    return list(found.values())


def tensors_of(value: Any) -> list[Tensor]:
    """All tensors in `value`, in order."""
    return list(_tensors(value, {}))


def map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """`value` with `function` of each of its tensors in their place.

    What holds tensors is copied; `value` stays as it was.
    """
    return _mapped(function, value, {})


def _tensors(value: Any, seen: dict[int, Any]) -> Iterator[Tensor]:
    for leaf in leaves_of(value):
        if isinstance(leaf, Tensor):
            yield leaf
        elif not isinstance(leaf, _LEFT_ALONE) and id(leaf) not in seen:
            # The object itself is kept: the id of one that is gone may be another's.
            seen[id(leaf)] = leaf
            for part in (*_attributes(leaf).values(), *_elements(leaf).values()):
                yield from _tensors(part, seen)


def _mapped(function: Callable[[Tensor], Tensor], value: Any, twins: dict[int, Any]) -> Any:
    def mapped(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return function(leaf)
        if isinstance(leaf, _LEFT_ALONE):
            return leaf
        if id(leaf) in twins:
            return twins[id(leaf)]
        # Only what holds tensors is copied: other objects may be large, or cannot be.
        if next(_tensors(leaf, {}), None) is None:
            return leaf
        return _twin(leaf, twins, lambda part: _mapped(function, part, twins))

    return map_leaves(mapped, value)


def _twin(leaf: Any, twins: dict[int, Any], mapped: Callable[[Any], Any]) -> Any:
    """A copy of an object with other parts; `twins` has it before its parts, which may need it."""
    attributes, elements = _attributes(leaf), _elements(leaf)
    if isinstance(leaf, tuple):
        # Attributes of a tuple come first, as they do in the order of `tensors_of`.
        changed = {name: mapped(part) for name, part in attributes.items()}
        twin: Any = tuple.__new__(type(leaf), map(mapped, elements.values()))
        twins[id(leaf)] = twin
        _set_attributes(twin, changed.items())
        return twin
    if elements and isinstance(leaf, Mapping) and not isinstance(leaf, MutableMapping):
        make: Any = type(leaf)
        return twins.setdefault(id(leaf), make({k: mapped(part) for k, part in elements.items()}))
    twin = twins[id(leaf)] = copy.copy(leaf)
    _set_attributes(twin, ((name, mapped(part)) for name, part in attributes.items()))
    for key, part in elements.items():
        _put(twin, key, mapped(part))
    return twin


def _put(twin: Any, key: Any, part: Any) -> None:
    # A method of its own may do more, or refuse.
    kind: Any = next((base for base in (dict, list) if isinstance(twin, base)), type(twin))
    kind.__setitem__(twin, key, part)


def _set_attributes(twin: Any, attributes: Iterable[tuple[str, Any]]) -> None:
    # Past frozen data classes, and classes that do more when an attribute is set.
    own = getattr(twin, "__dict__", {})
    for name, part in attributes:
        if name in own:
            own[name] = part
        else:
            object.__setattr__(twin, name, part)


def _attributes(leaf: Any) -> dict[str, Any]:
    """The attributes of an object by name: its dictionary, its slots, fields of a data class."""
    found = dict(getattr(leaf, "__dict__", {}))
    for kind in type(leaf).__mro__:
        for name, member in vars(kind).items() if "__slots__" in vars(kind) else ():
            if isinstance(member, types.MemberDescriptorType) and hasattr(leaf, name):
                found.setdefault(name, getattr(leaf, name))
    if dataclasses.is_dataclass(leaf):
        for field in dataclasses.fields(leaf):
            found.setdefault(field.name, getattr(leaf, field.name, None))
    return found


def _elements(leaf: Any) -> dict[Any, Any]:
    """The elements by key or place of containers that do not keep them in attributes."""
    if isinstance(leaf, dict):
        return dict(leaf)
    if isinstance(leaf, list | tuple):
        return dict(enumerate(leaf))
    if isinstance(leaf, Mapping) and not _attributes(leaf):
        return dict(leaf)
    return {}
