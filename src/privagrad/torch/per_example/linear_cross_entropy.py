"""Decoder and softmax cross-entropy in one module, a few rows at a time."""

from __future__ import annotations

import math
import weakref
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from privagrad._internal import validate
from privagrad.torch.per_example.cross_entropy import (
    CrossEntropy,
    Linear,
    LinearCall,
    RowLosses,
    Rows,
    shares_of,
)
from privagrad.torch.per_example.layers._registry import layer
from privagrad.torch.per_example.layers.linear import projected
from privagrad.torch.per_example.tape import Tape
from privagrad.torch.scales import accurate


class LinearCrossEntropy(nn.Module):
    """nn.Linear followed by nn.CrossEntropyLoss, without ever holding all logits.

    ``forward(x, targets)`` is the loss, ``forward(x)`` the logits. For a large vocabulary most of a
    language model's memory goes into logits, their softmax and its gradient: here they exist for a
    few rows at a time.

    Parameters
    ----------
    in_features : int
    classes : int
    bias : bool
    ignore_index : int
        Targets that do not count.
    reduction : {"mean", "sum"}
        The mean over all targets that count; in private training the mean over examples
        of the means over each example's own targets, so that one example's padding does not
        change another's gradient.
    """

    def __init__(
        self,
        in_features: int,
        classes: int,
        bias: bool = True,
        ignore_index: int = -100,
        reduction: str = "mean",
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        self.in_features, self.classes = in_features, classes
        self.ignore_index = ignore_index
        self.reduction = validate.choice("reduction", reduction, ("mean", "sum"))
        options = {"device": device, "dtype": dtype}
        self.weight = nn.Parameter(torch.empty(classes, in_features, **options))
        self.bias = nn.Parameter(torch.empty(classes, **options)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        bound = 1 / math.sqrt(self.in_features)
        nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            nn.init.uniform_(self.bias, -bound, bound)

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        if targets is None:
            return F.linear(x, self.weight, self.bias)
        criterion = CrossEntropy(ignore_index=self.ignore_index)
        rows = Rows.of(x, targets, criterion)
        shares = rows.counted.to(x.dtype)
        if self.reduction == "mean":
            shares = shares / shares.sum()
        loss: Tensor = PlainLoss.apply(x, self.weight, self.bias, (criterion, rows), shares)
        return loss

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, classes={self.classes}"


class PlainLoss(torch.autograd.Function):
    """Σ_t share_t loss_t of rows; gradients of everything are formed in the forward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        call: tuple[CrossEntropy, Rows],
        shares: Tensor,
    ) -> Tensor:
        (criterion, rows), layer = call, Linear(weight, bias)
        wanted = ctx.needs_input_grad
        dx = torch.empty_like(rows.inputs) if wanted[0] else None
        dw = torch.zeros_like(weight) if wanted[1] else None
        db = torch.zeros_like(bias) if bias is not None and wanted[2] else None
        loss = accurate(shares).new_zeros(())
        for part, memory in layer.chunks(len(shares)):
            z = layer.logits(rows.inputs[part])
            p, own = shares_of(z, rows.targets[part], memory)
            losses, factors = criterion.losses(z, rows.targets[part], own), shares[part]
            loss += (losses * factors).where(rows.counted[part], 0.0).sum()
            d = criterion.gradient(p, rows.targets[part]).to(x.dtype)
            if dx is not None:
                torch.mm(d, weight, out=dx[part]).mul_(factors[:, None])
            if dw is not None:
                dw.addmm_(d.T, rows.inputs[part] * factors[:, None])
            if db is not None:
                db += d.T @ factors
        ctx.gradients = (None if dx is None else dx.view(x.shape), dw, db)
        return loss.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return *(None if g is None else g * gradient for g in ctx.gradients), None, None


@layer(LinearCrossEntropy)
def linear_cross_entropy(
    tape: Tape, module: LinearCrossEntropy, x: Tensor, targets: Tensor | None = None
) -> Tensor:
    if targets is None:
        return projected(tape, module, x, module.weight, module.bias)
    examples = tape.examples(module, x)
    criterion = CrossEntropy(ignore_index=module.ignore_index)
    call = LinearCall(tape, module.weight, module.bias, x, examples)
    rows = Rows.of(call.inputs, targets, criterion)
    root = torch.zeros((), requires_grad=torch.is_grad_enabled())

    def backward_of(factors: Tensor) -> None:
        call.hand_over(criterion, rows, factors)

    losses = RowLosses.apply(call.x, root, (call.layer, criterion, rows), backward_of)
    counted = examples(rows.counted.view(targets.shape), 0)
    if module.reduction == "sum":
        loss = losses.sum()
    else:
        # The mean of each example's own mean; shown is the mean over all targets.
        own = counted.sum(1, keepdim=True)
        shares = torch.where(counted, 1.0 / (len(own) * own.clamp(min=1)), 0.0).to(losses.dtype)
        loss = (examples(losses.view(targets.shape), 0) * shares).sum()
        loss = loss + (losses.detach().sum() / counted.sum() - loss.detach())
    tape.current.losses.append((weakref.ref(loss), module.reduction))
    return loss
