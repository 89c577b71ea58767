"""Runs of a module that can be compared: no random numbers, and nothing left behind."""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

GENERATORS = frozenset(
    {"rand", "randn", "rand_like", "randn_like", "randint", "randint_like", "normal", "normal_",
     "uniform_", "random_", "exponential_", "cauchy_", "geometric_", "log_normal_", "bernoulli",
     "bernoulli_", "poisson"}
)  # fmt: skip
"""Functions that return random numbers."""

DRAWS = GENERATORS | {"multinomial", "randperm"}
"""Functions on whose results Python may decide what to compute."""

_WITH_DROPOUT = frozenset(
    {"lstm", "gru", "rnn_tanh", "rnn_relu", "scaled_dot_product_attention",
     "multi_head_attention_forward"}
)  # fmt: skip
_CONSTANT = 0.5
_CONSTANT_WORDS = 512
_DROPOUT_OF_ATTENTION = 10


@dataclass
class Drawn:
    """The random numbers of a pass on which Python may have decided what to compute.

    `numbers` has one entry for every call of a random function outside of layers: its result where
    that is for the whole batch, None where examples have their own. `states` are those of Python's
    and NumPy's generators before the pass; None: not kept.
    """

    numbers: list[Tensor | None] = field(default_factory=list)
    states: tuple[Any, Any] | None = None

    @property
    def decisive(self) -> bool:
        return self.states is not None or any(number is not None for number in self.numbers)


def generator_states() -> tuple[Any, Any]:
    """Of Python and of NumPy."""
    return random.getstate(), np.random.get_state()  # noqa: NPY002


class Deterministic(TorchFunctionMode):
    """Random functions return the same for every example, whatever else is in the batch.

    Dropout keeps everything, random numbers are constants, permutations move everything by one.
    The constants are what is drawn where a uniform number is `level`. Those for the whole batch are
    of another pass, if `drawn` has them; `inside` tells whether a call is made inside of a layer.
    """

    used = False

    def __init__(
        self,
        drawn: Drawn | None = None,
        inside: Callable[[], bool] = lambda: False,
        level: float = _CONSTANT,
    ) -> None:
        super().__init__()
        self._numbers = iter(drawn.numbers if drawn else [])
        self._inside, self._level = inside, level

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if (replaced := _REPLACED.get(name)) is None:
            return func(*args, **kwargs)
        self.used = True
        if name in GENERATORS and self._level != _CONSTANT:
            return _at_level(self._level, func, args, kwargs)
        result = replaced(func, args, kwargs)
        if name in DRAWS and not self._inside():
            number = next(self._numbers, None)
            if number is not None and number.shape == result.shape:
                with torch.no_grad():
                    result.copy_(number)
        return result


def _unchanged(func: Any, args: Any, kwargs: Any) -> Any:
    return args[0] if args else kwargs["input"]


def _constant(func: Any, args: Any, kwargs: Any) -> Any:
    drawn = func(*args, **kwargs)
    with torch.no_grad():
        return drawn.fill_(_CONSTANT) if drawn.is_floating_point() else drawn.fill_(1)


def _at_level(level: float, func: Any, args: Any, kwargs: Any) -> Any:
    """What a function draws, up to its scale, where a uniform number is `level`."""
    drawn, name = func(*args, **kwargs), func.__name__
    value = level
    if name.startswith("bernoulli"):
        value = float(level < 0.5)
    elif name in ("randn", "randn_like", "normal", "normal_"):
        value = NormalDist().inv_cdf(level)
    elif name == "uniform_" or not drawn.is_floating_point():
        low, high = _range(args, kwargs) or (0, 1 if drawn.is_floating_point() else 2)
        value = low + level * (high - low)
    with torch.no_grad():
        return drawn.fill_(value if drawn.is_floating_point() else math.floor(value))


def _range(args: Any, kwargs: Any) -> tuple[float, float] | None:
    """What uniform numbers are drawn between: (high), (low, high), or by keyword."""
    given = [x for x in args if isinstance(x, int | float)]
    given += [kwargs[k] for k in ("low", "from", "high", "to") if kwargs.get(k) is not None]
    if not given:
        return None
    return (0, given[0]) if len(given) == 1 else (given[0], given[1])


def _by_one(func: Any, args: Any, kwargs: Any) -> Any:
    drawn = func(*args, **kwargs)
    return torch.arange(len(drawn), dtype=drawn.dtype, device=drawn.device).roll(1)


def _likeliest(func: Any, args: Any, kwargs: Any) -> Any:
    drawn = func(*args, **kwargs)
    probabilities = args[0] if args else kwargs["input"]
    return probabilities.argmax(-1, keepdim=True).expand_as(drawn).contiguous()


def _without_dropout(func: Any, args: Any, kwargs: Any) -> Any:
    """Fused recurrent layers and attention: their only number between 0 and 1 is the dropout."""
    if "dropout_p" in kwargs:
        kwargs = kwargs | {"dropout_p": 0.0}
    place = _DROPOUT_OF_ATTENTION if func is F.multi_head_attention_forward else None
    args = tuple(
        0.0 if isinstance(x, float) and place in (None, i) else x for i, x in enumerate(args)
    )
    return func(*args, **kwargs)


def _at_rest(func: Any, args: Any, kwargs: Any) -> Any:
    return F.leaky_relu(args[0] if args else kwargs["input"], 11 / 48)


def _softmax(func: Any, args: Any, kwargs: Any) -> Any:
    return (args[0] if args else kwargs["logits"]).softmax(kwargs.get("dim", -1))


_Replacement = Callable[[Any, Any, Any], Any]
_REPLACED: dict[str, _Replacement] = {
    **dict.fromkeys(
        ("dropout", "dropout_", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout",
         "alpha_dropout_", "feature_dropout", "feature_dropout_", "feature_alpha_dropout",
         "feature_alpha_dropout_", "native_dropout"),
        _unchanged,
    ),
    **dict.fromkeys(GENERATORS, _constant),
    "randperm": _by_one,
    "multinomial": _likeliest,
    **dict.fromkeys(_WITH_DROPOUT, _without_dropout),
    **dict.fromkeys(("rrelu", "rrelu_"), _at_rest),
    "gumbel_softmax": _softmax,
}  # fmt: skip


def normals(shape: torch.Size) -> Tensor:
    """Normal numbers that are random also where random functions are deterministic."""
    return torch.from_numpy(np.random.default_rng().standard_normal(tuple(shape)))


def is_random(name: str, constants: list[Any]) -> bool:
    """Whether a call draws random numbers, as far as its name and its constants tell."""
    if name in _WITH_DROPOUT:
        return any(isinstance(value, float) and 0 < value < 1 for value in constants)
    return name in _REPLACED


@dataclass
class Aftermath:
    """What a run would have left behind: what it wrote into buffers, and whether it was random.

    `outside_torch` says that numbers were drawn from Python's or NumPy's generators.
    """

    written: dict[str, Tensor] = field(default_factory=dict)
    random: bool = False
    outside_torch: bool = False


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
    _set_states(states or _SEEDED)
    # torch.manual_seed keeps a stack trace of every call for devices that were never used.
    torch.default_generator.manual_seed(0)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(0)


_SEEDED: tuple[Any, Any] = (
    random.Random(0).getstate(),
    np.random.RandomState(0).get_state(),
)
_SEEDED_TORCH = torch.Generator().manual_seed(0).get_state()


def _same_states(a: tuple[Any, Any], b: tuple[Any, Any]) -> bool:
    return a[0] == b[0] and a[1][2] == b[1][2] and np.array_equal(a[1][1], b[1][1])


@contextmanager
def every_draw_at(level: float, tail: int) -> Iterator[Aftermath]:
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
    aftermath, mode = Aftermath(), Deterministic(level=level)
    with mode:
        yield aftermath
    aftermath.outside_torch = not _same_states(generator_states(), start)
    moved = not torch.equal(torch.default_generator.get_state(), of_torch)
    aftermath.random = mode.used or aftermath.outside_torch or moved


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
    module: nn.Module, drawn: Drawn | None = None, inside: Callable[[], bool] = lambda: False
) -> Iterator[Aftermath]:
    """A deterministic run, after which buffers are as before; within `random_state_kept`.

    It makes the decisions of the pass that has `drawn` its random numbers.
    """
    buffers = {name: (buffer, buffer.clone()) for name, buffer in module.named_buffers()}
    aftermath, mode = Aftermath(), Deterministic(drawn, inside)
    start = drawn.states if drawn and drawn.states else _SEEDED
    seed(start)
    try:
        with warnings.catch_warnings(), mode:
            warnings.simplefilter("ignore")
            yield aftermath
            aftermath.outside_torch = not _same_states(generator_states(), start)
            moved = not torch.equal(torch.default_generator.get_state(), _SEEDED_TORCH)
            aftermath.random = mode.used or aftermath.outside_torch or moved
    finally:
        if buffers:
            _restore(module, buffers, aftermath.written)


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
