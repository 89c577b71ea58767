"""The optimizers of the methods that are compared, and AdaDPS for networks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, Optimizer

from privagrad.experiments.networks.settings import NetworkMethod
from privagrad.geometry.scales import SQUARE_MEMORY, WIDTH_FLOOR
from privagrad.torch.adam_bc import AdamBC
from privagrad.torch.adaptive_sgd import AdaptiveSGD
from privagrad.torch.filters import KalmanFilter, LowPassFilter


class DividedSGD(Optimizer):
    """x ← x - lr · g/A: the step of AdaDPS, with A by parameter in `divisors` (1 at first)."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})
        self.divisors: dict[nn.Parameter, Tensor] = {}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    divisor = self.divisors.get(parameter)
                    gradient = parameter.grad if divisor is None else parameter.grad / divisor
                    parameter.add_(gradient, alpha=-group["lr"])


def make_optimizer(method: NetworkMethod, parameters: Any) -> Any:
    """The optimizer on plain or private gradients; its step size is set before every step.

    Adam's second memory is 0.99 for scale-then-privatize, as for linear models, and for the
    non-private one, and 0.999 otherwise.
    """
    made: Optimizer
    if method.steps == "adam":
        follows = method.shape == "scale-then-privatize" or not method.private
        made = Adam(parameters, lr=1.0, betas=(0.9, SQUARE_MEMORY if follows else 0.999))
    elif method.steps == "adam-bc":
        made = AdamBC(parameters, lr=1.0)
    elif method.steps == "adagrad":
        made = Adagrad(parameters, lr=1.0)
    elif method.steps == "adaptive-sgd":
        made = AdaptiveSGD(parameters, lr=1.0)
    elif method.steps == "divided":
        made = DividedSGD(parameters, lr=1.0)
    else:
        made = SGD(parameters, lr=1.0, momentum=0.9 if method.steps == "momentum" else 0.0)
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
