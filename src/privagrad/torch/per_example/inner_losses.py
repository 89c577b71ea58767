"""Losses that a module computes itself: PyTorch's mean losses as means over examples.

PyTorch's mean divides by how many numbers of the whole batch count. Here each example's numbers are
averaged over that example's own, as they are for the example alone; what is shown stays PyTorch's.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn._reduction import legacy_get_string
from torch.overrides import TorchFunctionMode

from privagrad.torch.guards.structure import tensors_of
from privagrad.torch.per_example.layout import Layout
from privagrad.torch.per_example.tape import ForwardPass, Tape

_ELEMENTWISE = frozenset(
    {F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy,
     F.binary_cross_entropy_with_logits}
)  # fmt: skip
_OF_CLASSES = frozenset({F.cross_entropy, F.nll_loss})
_LINEAR = frozenset(
    {"AddBackward0", "SubBackward0", "RsubBackward1", "MulBackward0", "DivBackward0",
     "NegBackward0", "ToCopyBackward0", "StackBackward0", "SumBackward0", "MeanBackward0",
     "ViewBackward0", "SqueezeBackward0", "UnsqueezeBackward0", "AliasBackward0",
     "CloneBackward0"}
)  # fmt: skip
"""Functions by whose gradients sums of losses, times numbers, are known."""

_signature = cache(inspect.signature)


class InnerLoss(nn.Module):
    """A loss inside of a module, for the tape and in messages."""


_LOSS = InnerLoss()


class InnerLosses(TorchFunctionMode):
    """Within a private pass, losses outside of layers are the mean of each example's own loss.

    Guarantees
    ----------
    What is backpropagated of an example's own loss does not depend on how many numbers of other
    examples count. Where the examples are in the loss is learned like that of a layer's input.
    """

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self.tape = tape

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in _OF_CLASSES | _ELEMENTWISE or self.tape.layers_entered:
            return func(*args, **kwargs)
        given = dict(_signature(func).bind(*args, **kwargs).arguments)
        averages, reduces = given.pop("size_average", None), given.pop("reduce", None)
        reduction = given.pop("reduction", "mean")
        if averages is not None or reduces is not None:
            reduction = legacy_get_string(averages, reduces)
        if reduction != self.tape.loss_reduction:
            return func(*args, **kwargs)
        rows = func(**given, reduction="none")
        factors = _class_factors(rows, given) if func in _OF_CLASSES else torch.ones_like(rows)
        return self._loss(rows, factors)

    def _loss(self, rows: Tensor, factors: Tensor) -> Tensor:
        """The loss of rows, of which the mean divides by the sum of `factors`."""
        tape = self.tape
        if rows.dim() == 0:
            # A squeeze() has taken the dimension of the single example away.
            rows, factors = rows.reshape(1), factors.reshape(1)
        if not tape.count:
            # No example has a part in it, not even one that stands in for an empty batch.
            tape.current.own_losses.append(rows.new_zeros(0))
            loss = rows.sum() * 0.0
            return self._noted(loss)
        arranged = tape.examples(_LOSS, rows, 0)
        own, shown = arranged(rows, 0).sum(1), rows.detach().sum()
        if tape.loss_reduction == "mean":
            counts = arranged(factors, 0).sum(1)
            own = torch.where(counts > 0, own / torch.where(counts > 0, counts, 1), 0.0)
            shown = shown / factors.sum()
        tape.current.own_losses.append(own.detach())
        loss = own.mean() if tape.loss_reduction == "mean" else own.sum()
        return self._noted(loss + (shown - loss).detach())

    def _noted(self, loss: Tensor) -> Tensor:
        if loss.requires_grad:
            self.tape.current.inner.append(get_gradient_edge(loss))
        return loss


def _class_factors(rows: Tensor, given: dict[str, Any]) -> Tensor:
    """What the mean of a loss of classes divides by, for each row."""
    target, weight = given["target"], given.get("weight")
    if target.is_floating_point():
        return torch.ones_like(rows)
    counted = target != given.get("ignore_index", -100)
    factors = counted.to(rows.dtype)
    return factors if weight is None else factors * weight[target * counted]


@contextmanager
def private_pass(
    tape: Tape, count: int, layouts: dict[object, Layout | None] | None = None, recorder: Any = None
) -> Iterator[ForwardPass]:
    """A pass of the tape in which the module's own losses are those of its examples."""
    with InnerLosses(tape), tape.passing(count, layouts, recorder) as current:
        yield current


def note_losses(tape: Tape, outputs: Any) -> None:
    """Note which outputs are losses of examples, with their reduction; within the pass.

    An output may be a sum of inner losses, each times a number; `factors` are these numbers.
    """
    current = tape.current
    inner, current.inner = current.inner, []
    factors: list[float] = []
    if inner and torch.is_grad_enabled():
        for leaf in tensors_of(outputs):
            found = _factors_of(leaf, inner)
            if found is not None:
                current.losses.append((weakref.ref(leaf), tape.loss_reduction))
                factors += found
    current.factors = tuple(factors)


def _factors_of(leaf: Tensor, inner: list[GradientEdge]) -> list[float] | None:
    """The factors of inner losses in `leaf`; None where it is no sum of these alone."""
    if leaf.numel() != 1 or leaf.grad_fn is None:
        return None
    losses = {edge.node for edge in inner}
    if leaf.grad_fn in losses:
        return [float(leaf.grad_fn is edge.node) for edge in inner]
    if not all(node in losses or _is_linear(node) for node in _nodes(leaf.grad_fn, losses)):
        return None
    ones = torch.ones_like(leaf)
    found = torch.autograd.grad(leaf, inner, ones, retain_graph=True, allow_unused=True)
    return [0.0 if factor is None else float(factor) for factor in found]


def _nodes(start: Any, ends: set[Any]) -> Iterator[Any]:
    seen, waiting = {start}, [start]
    while waiting:
        yield (node := waiting.pop())
        for source, _ in node.next_functions if node not in ends else ():
            if source is not None and source not in seen:
                seen.add(source)
                waiting.append(source)


def _is_linear(node: Any) -> bool:
    if node.name() not in _LINEAR:
        return False
    of_both = sum(source is not None for source, _ in node.next_functions) > 1
    return not (of_both and node.name() in ("MulBackward0", "DivBackward0"))
