"""Optimizers around another optimizer, and what they may be told of the noise."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer


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

    Parameter groups, state and hooks are those of the original optimizer.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.original_optimizer = optimizer

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
