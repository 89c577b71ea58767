"""Random generators that a function can reach besides the global ones: their states are kept."""

from __future__ import annotations

import functools
import pickle
import random
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

_DEEP, _MANY = 4, 100
_LEFT_ALONE = (torch.Tensor, torch.nn.Module, np.ndarray, types.ModuleType, type)


class ReachableGenerators:
    """The generators that `function` may draw from, besides the global ones, and their states.

    They are looked for where a function can have them: in attributes, closures, defaults and the
    global names that it uses, and in those of the functions and objects found there.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        found: dict[int, Any] = {}
        _search(function, _DEEP, found, {})
        self._generators = list(found.values())
        self._states = [_state(generator) for generator in self._generators]

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Runs after which the generators go on as before."""
        try:
            yield
        finally:
            self.start()

    def start(self) -> None:
        for generator, state in zip(self._generators, self._states, strict=True):
            _set_state(generator, state)

    def have_drawn(self) -> bool:
        """Whether a number has been drawn since `start`."""
        return pickle.dumps(self._states) != pickle.dumps([_state(g) for g in self._generators])


def _search(value: Any, depth: int, found: dict[int, Any], seen: dict[int, Any]) -> None:
    if id(value) in seen or isinstance(value, _LEFT_ALONE):
        return
    seen[id(value)] = value
    if isinstance(value, random.SystemRandom):
        return
    kinds = (np.random.Generator, np.random.RandomState, random.Random, torch.Generator)
    if isinstance(value, kinds):
        found[id(value)] = value
    elif depth:
        for part in _parts(value):
            _search(part, depth - 1, found, seen)


def _parts(value: Any) -> list[Any]:
    """What a function, an object or a container refers to."""
    if isinstance(value, types.FunctionType):
        code, names = value.__code__, value.__globals__
        cells = [cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell)]
        given = [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
        return cells + given + [names[name] for name in _names(code) if name in names]
    if isinstance(value, types.MethodType | types.BuiltinMethodType):
        return [value.__self__, getattr(value, "__func__", None)]
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, dict | list | tuple):
        return list(value.values() if isinstance(value, dict) else value)[:_MANY]
    called = [vars(kind)["__call__"] for kind in type(value).__mro__ if "__call__" in vars(kind)]
    return [*getattr(value, "__dict__", {}).values(), *called]


def _names(code: types.CodeType) -> list[str]:
    """The global names in a function and in the functions within it."""
    inner = [c for c in code.co_consts if isinstance(c, types.CodeType)]
    return [*code.co_names, *(name for own in inner for name in _names(own))]


def _is_filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def _state(generator: Any) -> Any:
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    if isinstance(generator, torch.Generator):
        return generator.get_state().numpy().copy()
    if isinstance(generator, random.Random):
        return generator.getstate()
    return generator.get_state(legacy=False)


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, torch.Generator):
        generator.set_state(torch.from_numpy(state.copy()))
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.set_state(state)
