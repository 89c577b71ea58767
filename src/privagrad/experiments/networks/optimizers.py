"""The optimizers of the methods that are compared, and AdaDPS for networks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, Optimizer

from privagrad.experiments.networks.settings import NetworkMethod
from privagrad.geometry.scales import SQUARE_MEMORY, WIDTH_FLOOR
from privagrad.torch.adam_bc import AdamBC
from privagrad.torch.adaptive_sgd import AdaptiveSGD
from privagrad.torch.filters import KalmanFilter, LowPassFilter
from privagrad.torch.wrapped import WrappedOptimizer


class ScaledSteps(WrappedOptimizer):
    """`optimizer` on gradients that are divided by `widths`, which are 1 at first.

    AdaDPS divides gradients alone: with SGD, x ← x - lr · g/w. With `steps` the steps are divided
    by the widths too: then it is `optimizer` in the coordinates w x, in which the ellipsoid of
    widths w is a ball. With SGD that is x ← x - lr · g/w².
    """

    elementwise = True

    def __init__(self, optimizer: Optimizer, steps: bool) -> None:
        super().__init__(optimizer)
        self.divides_steps = steps
        self.widths: dict[Any, Tensor] = {}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None if closure is None else closure()
        before = {parameter: parameter.clone() for parameter in self.widths}
        for parameter, width in self.widths.items():
            if parameter.grad is not None:
                parameter.grad = parameter.grad / width
        self.original_optimizer.step()
        if self.divides_steps:
            for parameter, width in self.widths.items():
                parameter.sub_(before[parameter]).div_(width).add_(before[parameter])
        return loss


def make_optimizer(method: NetworkMethod, parameters: Any) -> Any:
    """The optimizer on plain or private gradients; its step size is set before every step.

    Adam's second memory is 0.99 for all, which scale-then-privatize needs; DP-AdamBC has its own
    0.999, because it subtracts the noise from a long mean.
    """
    made: Optimizer
    if method.steps in ("adam", "adam-whitened"):
        made = Adam(parameters, lr=1.0, betas=(0.9, SQUARE_MEMORY))
    elif method.steps == "adam-bc":
        made = AdamBC(parameters, lr=1.0)
    elif method.steps == "adagrad":
        made = Adagrad(parameters, lr=1.0)
    elif method.steps == "adaptive-sgd":
        made = AdaptiveSGD(parameters, lr=1.0)
    else:
        made = SGD(parameters, lr=1.0, momentum=0.9 if method.steps == "momentum" else 0.0)
    if method.scaled:
        return ScaledSteps(made, steps=method.steps != "divided")
    if method.filter == "low-pass":
        return LowPassFilter(made)
    return KalmanFilter(made) if method.filter == "kalman" else made


def widths_of_moments(moments: dict[str, Tensor]) -> tuple[dict[str, Tensor], float]:
    """AdaDPS's A, from E[g²] of public rows, with root mean square 1; and what that was.

    As `privagrad.methods._widths.widths_of`, over all parameters of a network.
    """
    total = sum(float(moment.double().sum()) for moment in moments.values())
    count = sum(moment.numel() for moment in moments.values())
    typical = (total / count) ** 0.5
    roots = {name: moment.sqrt() / typical + WIDTH_FLOOR for name, moment in moments.items()}
    squares = sum(float(root.double().square().sum()) for root in roots.values())
    size = (squares / count) ** 0.5
    return {name: (root / size).float() for name, root in roots.items()}, typical
