"""The paper's PASAN as a torch optimizer: one adaptive step size for all coordinates."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from privagrad._internal import validate


class AdaptiveSGD(Optimizer):
    """x ← x - lr · g / sqrt(Σ_k ‖g_k‖²): Algorithm 1 of the paper, each group by itself.

    Parameters
    ----------
    params : iterable
        As of any torch optimizer.
    lr : float
        The theorem's choice is the diameter of the set that x moves in.
    initial : float
        What the sum of squares starts from: keeps the first steps small.
    """

    def __init__(self, params: Any, lr: float = 1.0, initial: float = 0.0) -> None:
        validate.positive("lr", lr)
        if initial < 0:
            raise ValueError(f"Expected initial >= 0, found initial={initial!r}.")
        super().__init__(params, {"lr": lr, "initial": initial, "squares": 0.0})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            group["squares"] += sum(float(p.grad.double().square().sum()) for p in parameters)
            size = math.sqrt(group["initial"] + group["squares"])
            for parameter in parameters:
                parameter.add_(parameter.grad, alpha=-group["lr"] / size if size else 0.0)
        return loss
