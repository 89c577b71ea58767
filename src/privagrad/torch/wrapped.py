"""Optimizers around another optimizer, and what they may be told of the noise."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn, optim
from torch.optim import Optimizer

_ELEMENTWISE = (
    optim.SGD, optim.Adam, optim.AdamW, optim.NAdam, optim.RAdam, optim.Adamax, optim.Adagrad,
    optim.Adadelta, optim.RMSprop, optim.Rprop, optim.ASGD,
)  # fmt: skip
"""PyTorch's own optimizers that treat every coordinate by itself."""


class NoiseAware(Optimizer):
    """An optimizer that knows how noisy the private gradients are.

    `noise_variances` are those of the noise in every coordinate of the gradients: public numbers,
    which the private optimizer sets before each step. None: it has set none.
    """

    noise_variances: Mapping[nn.Parameter, Tensor] | None = None

    def noise_variance(self, parameter: nn.Parameter) -> Tensor:
        """That of one parameter's gradient."""
        if self.noise_variances is None:
            raise RuntimeError(
                f"Expected {type(self).__name__} in make_private, whose optimizer tells it the "
                "variance of the noise, found a step without: make it private first. It cannot be "
                "inside of a filter either."
            )
        return self.noise_variances[parameter].to(parameter.device, parameter.dtype)


def _of_original(name: str) -> Any:
    """An attribute of `original_optimizer`, read and written there."""

    def read(self: WrappedOptimizer) -> Any:
        return getattr(self.original_optimizer, name)

    def write(self: WrappedOptimizer, value: Any) -> None:
        setattr(self.original_optimizer, name, value)

    return property(read, write)


class WrappedOptimizer(Optimizer):
    """Does something to the gradients before the step of `original_optimizer`.

    Parameter groups, state and hooks are those of the original optimizer. `own_states` are what
    it keeps itself of each parameter.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.original_optimizer = optimizer

    @property
    def own_states(self) -> list[dict[Any, Any]]:
        return []

    param_groups: list[dict[str, Any]] = _of_original("param_groups")
    state: Any = _of_original("state")
    defaults: dict[str, Any] = _of_original("defaults")

    def register_step_pre_hook(self, hook: Callable[..., Any]) -> Any:
        return self.original_optimizer.register_step_pre_hook(hook)

    def register_step_post_hook(self, hook: Callable[..., Any]) -> Any:
        return self.original_optimizer.register_step_post_hook(hook)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.original_optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return self.original_optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.original_optimizer.load_state_dict(state_dict)

    def __getstate__(self) -> dict[str, Any]:
        return dict(vars(self))

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Not torch's, which would change `step` of the whole class."""
        vars(self).update(state)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.original_optimizer.add_param_group(param_group)


def states_of(optimizer: Optimizer) -> list[dict[Any, Any]]:
    """What the optimizer, and those inside of it, keep of each parameter."""
    if isinstance(optimizer, WrappedOptimizer):
        return [*optimizer.own_states, *states_of(optimizer.original_optimizer)]
    return [optimizer.state]


def is_elementwise(optimizer: Optimizer) -> bool:
    """Whether a coordinate's step is known to depend on that coordinate's gradients alone.

    So it is of PyTorch's own optimizers that work so, and of classes that say `elementwise = True`
    themselves; not of their subclasses, and not where hooks see the optimizer's parameters.
    """
    known = type(optimizer) in _ELEMENTWISE or vars(type(optimizer)).get("elementwise") is True
    if isinstance(optimizer, WrappedOptimizer):
        return known and is_elementwise(optimizer.original_optimizer)
    hooks = (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)
    return known and not any(hooks)
