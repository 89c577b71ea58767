"""Per-example gradients of public rows: the sizes of radii and steps, and ellipsoids."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from privagrad.experiments.networks.settings import NetworkMethod
from privagrad.torch.optimizer import PrivateOptimizer

_MEASURED = 400
"""Public rows whose gradients are formed one by one."""


def loss_of(outputs: Tensor, targets: Tensor) -> Tensor:
    """The mean absolute error for targets that are numbers, cross-entropy for classes."""
    if targets.is_floating_point():
        return F.l1_loss(outputs, targets)
    return F.cross_entropy(outputs, targets)


class GradientSizes(NamedTuple):
    """Medians over public rows, at the initial weights; norms in the method's own ellipsoid."""

    own_norm: float
    squared_norm: float
    absolute_sum: float
    divided: float
    """Of Σ g²/w, with the ellipsoid's widths w = C^(-1/2)."""
    whitened_sum: float
    """Of Σ |g|/w."""


def gradient_sizes(
    model: nn.Module, X: Tensor, y: Tensor, scales: Mapping[str, Tensor]
) -> GradientSizes:
    """The sizes of the gradients of the first public rows; `scales` is diag(C) by name."""
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss_at(parameters: dict[str, Tensor], x: Tensor, target: Tensor) -> Tensor:
        return loss_of(functional_call(model, parameters, (x[None],)), target[None])

    rows: Any = vmap(grad(loss_at), in_dims=(None, 0, 0))
    gradients = rows(parameters, X[:_MEASURED], y[:_MEASURED])
    flat = torch.cat([gradients[name].flatten(1) for name in parameters], dim=1)
    scale = torch.cat([scales[name].flatten() for name in parameters])
    squares = flat.square()
    sizes = (
        (squares * scale).sum(1).sqrt(), squares.sum(1), flat.abs().sum(1),
        (squares * scale.sqrt()).sum(1), (flat.abs() * scale.sqrt()).sum(1),
    )  # fmt: skip
    return GradientSizes(*(float(size.median()) for size in sizes))


def scales_of(optimizer: PrivateOptimizer) -> dict[str, Tensor]:
    """diag(C) of every parameter, in its shape."""
    return {
        name: optimizer.scales[name].full.reshape(parameter.shape)
        for name, parameter in optimizer.tape.parameters.items()
    }


def first_step_size(method: NetworkMethod, sizes: GradientSizes, radius_factor: float) -> float:
    """The step size whose first step changes the loss of a typical public example by about 1.

    To first order, without noise, for a step along the example's own gradient.
    """
    kept = min(1.0, radius_factor)  # what the bound leaves of a typical gradient
    if method.steps in ("adam", "adam-bc", "adagrad"):
        return 1 / sizes.absolute_sum
    if method.steps == "adaptive-sgd":
        return 1 / math.sqrt(sizes.squared_norm)
    if method.steps == "adam-whitened":
        return 1 / sizes.whitened_sum
    if method.steps == "whitened":
        return 1 / (kept * sizes.own_norm**2)
    if method.steps == "divided":
        return 1 / (kept * sizes.divided)
    momentum = 0.1 if method.steps == "momentum" else 1.0
    return momentum / (kept * sizes.squared_norm)
