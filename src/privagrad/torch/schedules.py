"""Schedules of the noise multiplier and of the bound, under Opacus's names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from privagrad._internal import validate
from privagrad.torch.optimizer import PrivateOptimizer

Factor = Callable[[int], float]


class Schedule:
    """Multiplies one number of a private optimizer by `factor(k)` after the k-th `step()`.

    As with PyTorch's schedules, call `step()` after an epoch, or after each `optimizer.step()`.

    Guarantees
    ----------
    Every release is charged with the noise that it is made with, so the report states what was
    composed. Composition holds for factors that are fixed before the training: do not choose
    them by looking at the data or at the training's results.
    """

    attribute: str
    restarts = False
    """Whether a schedule that continues from `last_epoch` finds the first value in the optimizer,
    or the one that it had left there."""

    def __init__(self, optimizer: PrivateOptimizer, factor: Factor, last_epoch: int = -1) -> None:
        if not isinstance(optimizer, PrivateOptimizer):
            raise TypeError(
                "Expected the optimizer that make_private returned, found "
                f"{type(optimizer).__name__}."
            )
        self.optimizer, self.factor, self.last_epoch = optimizer, factor, last_epoch
        self.base = getattr(optimizer, self.attribute)
        if last_epoch >= 0 and not self.restarts:
            self.base /= factor(last_epoch)
        self.step()

    def step(self) -> None:
        """Set the next value."""
        self.last_epoch += 1
        self._apply()

    def _apply(self) -> None:
        setattr(self.optimizer, self.attribute, self.base * self.factor(self.last_epoch))

    def state_dict(self) -> dict[str, Any]:
        return {"base": self.base, "last_epoch": self.last_epoch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from there; the optimizer gets the value that it had then."""
        self.base, self.last_epoch = state_dict["base"], state_dict["last_epoch"]
        self._apply()


class StepNoise(Schedule):
    """The noise multiplier times `gamma` every `step_size` steps."""

    attribute = "noise_multiplier"

    def __init__(
        self, optimizer: PrivateOptimizer, *, step_size: int, gamma: float, last_epoch: int = -1
    ) -> None:
        size, ratio = validate.integer("step_size", step_size), validate.positive("gamma", gamma)
        super().__init__(optimizer, lambda step: ratio ** (step // size), last_epoch)


class ExponentialNoise(StepNoise):
    """The noise multiplier times `gamma` every step."""

    def __init__(self, optimizer: PrivateOptimizer, *, gamma: float, last_epoch: int = -1) -> None:
        super().__init__(optimizer, step_size=1, gamma=gamma, last_epoch=last_epoch)


class LambdaNoise(Schedule):
    """The first noise multiplier times `noise_lambda(step)`."""

    attribute, restarts = "noise_multiplier", True

    def __init__(
        self, optimizer: PrivateOptimizer, *, noise_lambda: Factor, last_epoch: int = -1
    ) -> None:
        super().__init__(optimizer, noise_lambda, last_epoch)


class StepGradClip(StepNoise):
    """`max_grad_norm` times `gamma` every `step_size` steps."""

    attribute = "max_grad_norm"


class ExponentialGradClip(ExponentialNoise):
    """`max_grad_norm` times `gamma` every step."""

    attribute = "max_grad_norm"


class LambdaGradClip(Schedule):
    """The first `max_grad_norm` times `scheduler_function(step)`."""

    attribute, restarts = "max_grad_norm", True

    def __init__(
        self, optimizer: PrivateOptimizer, *, scheduler_function: Factor, last_epoch: int = -1
    ) -> None:
        super().__init__(optimizer, scheduler_function, last_epoch)
