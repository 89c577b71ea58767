"""Decoder and softmax cross-entropy in one module, a few rows at a time."""

from __future__ import annotations

import math
import weakref
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from privagrad._internal import validate
from privagrad.torch.per_example.gradients import DenseGradient, Gradients, OuterProductGradient
from privagrad.torch.per_example.layers._registry import layer
from privagrad.torch.per_example.layers.linear import projected
from privagrad.torch.per_example.tape import Tape

_CACHED = 2**20
_TINY = 1e-30
"""Shares below this have lost digits: their logarithms are taken from the logits."""


class LinearCrossEntropy(nn.Module):
    """nn.Linear followed by nn.CrossEntropyLoss, without ever holding all logits more than once.

    ``forward(x, targets)`` is the loss, ``forward(x)`` the logits. For a large vocabulary most of a
    language model's step goes into logits, their softmax and its gradient: here one buffer
    becomes one after the other.

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
        rows, aims = x.reshape(1, -1, x.shape[-1]), targets.reshape(1, -1)
        loss: Tensor = _Fused.apply(None, self, rows, aims, self.weight, self.bias)
        return loss

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, classes={self.classes}"


@layer(LinearCrossEntropy)
def linear_cross_entropy(
    tape: Tape, module: LinearCrossEntropy, x: Tensor, targets: Tensor | None = None
) -> Tensor:
    if targets is None:
        return projected(tape, module, x, module.weight, module.bias)
    examples = tape.examples(module, x)
    root = torch.ones((), requires_grad=torch.is_grad_enabled())
    rows, aims = examples(x, 1), examples(targets, 0)
    loss: Tensor = _Fused.apply(tape, module, rows, aims, root, None)
    tape.current.losses.append((loss, module.reduction))
    return loss


class _Fused(torch.autograd.Function):
    """The loss of rows (b, T, n) and targets (b, T); plain where there is no tape, with b = 1."""

    @staticmethod
    def forward(
        ctx: Any,
        tape: Tape | None,
        module: LinearCrossEntropy,
        x: Tensor,
        targets: Tensor,
        weight: Tensor,
        bias: Tensor | None,
    ) -> Tensor:
        flat, aims = x.reshape(-1, x.shape[-1]), targets.reshape(-1)
        counts = aims != module.ignore_index
        borrowed = _BorrowedBuffer(module, len(flat), x.dtype)
        losses = _differences(module, flat, aims, counts, borrowed.rows)
        own = counts.view(targets.shape).sum(1)
        total = losses.sum()
        ctx.tape, ctx.module, ctx.borrowed = tape, module, borrowed
        ctx.count = 0 if tape is None else tape.count
        if module.reduction == "sum":
            ctx.shares = torch.ones(len(own), dtype=x.dtype, device=x.device)
        else:
            ctx.shares = torch.where(own > 0, 1.0 / (len(own) * own.clamp(min=1)), 0.0).to(x.dtype)
            total = total / counts.sum()
        ctx.save_for_backward(x)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        module, tape, borrowed = ctx.module, ctx.tape, ctx.borrowed
        shares = (ctx.shares * gradient)[:, None, None]
        d = borrowed.rows.view(*x.shape[:2], module.classes)
        inputs = x * shares
        dx = None
        if ctx.needs_input_grad[2]:
            dx = (borrowed.rows @ module.weight.detach()).view(x.shape).mul_(shares)
        if tape is None:
            dw = borrowed.rows.T @ inputs.reshape(-1, x.shape[-1])
            db = None if module.bias is None else (d.sum(1) * shares[:, 0]).sum(0)
            return None, None, dx, None, dw, db

        def per_example(_: Tensor) -> Gradients:
            outer = OuterProductGradient(module.weight, inputs, d)
            outer.buffer = borrowed
            yield outer
            if module.bias is not None:
                yield DenseGradient(module.bias, d.sum(1) * shares[:, 0])

        tape.receive(ctx.count, per_example, gradient)
        return None, None, dx, None, None, None


def _differences(
    module: LinearCrossEntropy, x: Tensor, aims: Tensor, counts: Tensor, out: Tensor
) -> Tensor:
    """The losses of all rows; into `out` softmax minus one-hot, 0 for rows that do not count."""
    weight = module.weight.detach().T
    bias = None if module.bias is None else module.bias.detach()
    losses = x.new_empty(len(x))
    aims = torch.where(counts, aims, 0)
    size = max(1, _CACHED // module.classes)
    logits = x.new_empty(min(size, len(x)), module.classes)
    for start in range(0, len(x), size):
        rows = slice(start, min(start + size, len(x)))
        part, aim = logits[: rows.stop - start], aims[rows, None]
        if bias is None:
            torch.mm(x[rows], weight, out=part)
        else:
            torch.addmm(bias, x[rows], weight, out=part)
        share = torch.softmax(part, 1, out=out[rows]).gather(1, aim)[:, 0]
        losses[rows] = -share.log()
        lost = (share < _TINY).nonzero()[:, 0]
        if len(lost):
            losses[start + lost] = F.cross_entropy(part[lost], aim[lost, 0], reduction="none")
        out[rows].scatter_add_(1, aim, part.new_full(aim.shape, -1.0))
    if not bool(counts.all()):
        out[~counts] = 0.0
        losses = torch.where(counts, losses, 0.0)
    return losses


class _BorrowedBuffer:
    """A buffer of rows that its module uses again when nothing refers to it any more.

    Fresh memory of that size costs more than what is computed in it.
    """

    def __init__(self, module: LinearCrossEntropy, rows: int, dtype: torch.dtype) -> None:
        free = _FREE_BUFFERS.setdefault(module, [])
        buffer = free.pop() if free else None
        if buffer is None or len(buffer) < rows or buffer.dtype != dtype:
            buffer = torch.empty(rows, module.classes, dtype=dtype, device=module.weight.device)
        self.rows = buffer[:rows]
        weakref.finalize(self, free.append, buffer)


_FREE_BUFFERS: weakref.WeakKeyDictionary[nn.Module, list[Tensor]] = weakref.WeakKeyDictionary()
