"""Random functions of PyTorch made deterministic, so that runs of a module can be compared."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
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
_DROPOUT_OF_ATTENTION = 10


@dataclass
class RandomDraws:
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


class Deterministic(TorchFunctionMode):
    """Random functions return the same for every example, whatever else is in the batch.

    Dropout keeps everything, random numbers are constants, permutations move everything by one.
    The constants are what is drawn where a uniform number is `level`. Those for the whole batch are
    of another pass, if `drawn` has them; `inside` tells whether a call is made inside of a layer.
    """

    used = False

    def __init__(
        self,
        drawn: RandomDraws | None = None,
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


_REPLACED: dict[str, Callable[[Any, Any, Any], Any]] = {
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


def is_random(name: str, constants: Sequence[Any]) -> bool:
    """Whether a call draws random numbers, as far as its name and its constants tell."""
    if name in _WITH_DROPOUT:
        return any(isinstance(value, float) and 0 < value < 1 for value in constants)
    return name in _REPLACED
