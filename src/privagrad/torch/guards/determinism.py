"""Runs that can be compared: with fixed random numbers, and with nothing left behind."""

from __future__ import annotations

import functools
import math
import pickle
import random
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from privagrad.torch.guards.random_functions import Deterministic, RandomDraws

_CONSTANT_WORDS = 512
_DEEP, _MANY = 4, 100
_LEFT_ALONE = (torch.Tensor, torch.nn.Module, np.ndarray, types.ModuleType, type)


def generator_states() -> tuple[Any, Any]:
    """Of Python and of NumPy."""
    return random.getstate(), np.random.get_state()  # noqa: NPY002


def normals(shape: torch.Size) -> Tensor:
    """Normal numbers that are random also where random functions are deterministic."""
    return torch.from_numpy(np.random.default_rng().standard_normal(tuple(shape)))


@dataclass
class RunEffects:
    """What a run would have left behind: what it wrote into buffers, and whether it was random.

    `outside_torch` says that numbers were drawn from Python's or NumPy's generators.
    """

    written: dict[str, Tensor] = field(default_factory=dict)
    random: bool = False
    outside_torch: bool = False

    def note_draws(self, mode: Deterministic, start: tuple[Any, Any], of_torch: Tensor) -> None:
        """Compare the generators with their states at the start."""
        (python, numpy), (python_start, numpy_start) = generator_states(), start
        same_numpy = numpy[2] == numpy_start[2] and np.array_equal(numpy[1], numpy_start[1])
        self.outside_torch = not (python == python_start and same_numpy)
        moved = not torch.equal(torch.default_generator.get_state(), of_torch)
        self.random = mode.used or self.outside_torch or moved


@contextmanager
def random_state_kept() -> Iterator[None]:
    """Runs after which the random numbers of Python, NumPy and PyTorch go on as before."""
    before = generator_states()
    try:
        with torch.random.fork_rng():
            yield
    finally:
        _set_states(before)


@contextmanager
def attributes_kept(module: nn.Module) -> Iterator[None]:
    """Runs after which the attributes of all parts of the module are what they were before."""
    before = [(vars(part), dict(vars(part))) for part in module.modules()]
    try:
        yield
    finally:
        for now, kept in before:
            now.clear()
            now.update(kept)


def _set_states(states: tuple[Any, Any]) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])  # noqa: NPY002


def seed(states: tuple[Any, Any] | None = None) -> None:
    """The same random numbers from here on, within `random_state_kept`.

    Those of Python and NumPy are the ones that follow on `states`, if they are given.
    """
    if states is None or states is _SEEDED:
        # The same states, much faster than NumPy sets any.
        random.seed(0)
        np.random.seed(0)  # noqa: NPY002
    else:
        _set_states(states)
    # torch.manual_seed keeps a stack trace of every call for devices that were never used.
    torch.default_generator.manual_seed(0)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(0)


_SEEDED: tuple[Any, Any] = (random.Random(0).getstate(), np.random.RandomState(0).get_state())
_SEEDED_TORCH = torch.Generator().manual_seed(0).get_state()


@contextmanager
def every_draw_at(level: float, tail: int) -> Iterator[RunEffects]:
    """A run in which uniform random numbers are `level`; within `random_state_kept`.

    Python's and NumPy's global generators are constant for their first numbers only, and go on
    with random ones of the seed `tail`: loops that reject numbers must end.
    """
    rest = random.Random(tail).getstate()[1][_CONSTANT_WORDS:-1]
    words = (_word(level),) * _CONSTANT_WORDS + rest
    key = np.array(words, dtype=np.uint32)
    start = ((3, (*words, 0), None), ("MT19937", key, 0, 0, 0.0))
    _set_states(start)
    of_torch = torch.default_generator.manual_seed(tail).get_state()
    effects, mode = RunEffects(), Deterministic(level=level)
    with mode:
        yield effects
    effects.note_draws(mode, start, of_torch)


def _word(level: float) -> int:
    """The state of a Mersenne Twister whose output is floor(2³² level): its tempering undone."""
    y = math.floor(level * 2**32)
    y ^= y >> 18
    y ^= (y << 15) & 0xEFC60000
    x = y
    for _ in range(4):
        x = y ^ ((x << 7) & 0x9D2C5680)
    y = x
    for _ in range(2):
        x = y ^ (x >> 11)
    return x & 0xFFFFFFFF


@contextmanager
def undisturbed(
    module: nn.Module, drawn: RandomDraws | None = None, inside: Callable[[], bool] = lambda: False
) -> Iterator[RunEffects]:
    """A deterministic run, after which buffers are as before; within `random_state_kept`.

    It makes the decisions of the pass that has `drawn` its random numbers.
    """
    buffers = {name: (buffer, buffer.clone()) for name, buffer in module.named_buffers()}
    effects, mode = RunEffects(), Deterministic(drawn, inside)
    start = drawn.states if drawn and drawn.states else _SEEDED
    seed(start)
    try:
        with warnings.catch_warnings(), mode:
            warnings.simplefilter("ignore")
            yield effects
            effects.note_draws(mode, start, _SEEDED_TORCH)
    finally:
        if buffers:
            _restore(module, buffers, effects.written)


@torch.no_grad()
def _restore(
    module: nn.Module, buffers: dict[str, tuple[Tensor, Tensor]], written: dict[str, Tensor]
) -> None:
    """Put the buffers back, and note what was in them."""
    now = dict(module.named_buffers())
    for name, (buffer, before) in buffers.items():
        # Writing to a buffer that has not changed would break the graphs it is in.
        if now.get(name) is not buffer or not torch.equal(buffer, before):
            written[name] = now.get(name, before).clone()
            buffer.copy_(before)
        if now.get(name) is not buffer:
            owner, _, own = name.rpartition(".")
            module.get_submodule(owner)._buffers[own] = buffer


class BufferVersions:
    """The buffers of a module as they are now, to tell later which have been written to.

    One that is replaced by another of another shape is a cache that has grown.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._before = {name: (own, _version(own)) for name, own in module.named_buffers()}

    def written(self) -> frozenset[str]:
        return frozenset(
            name
            for name, now in self._module.named_buffers()
            if name in self._before and self._is_written(now, *self._before[name])
        )

    @staticmethod
    def _is_written(now: Tensor, before: Tensor, version: int) -> bool:
        return now.shape == before.shape and (now is not before or _version(now) != version)


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


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
