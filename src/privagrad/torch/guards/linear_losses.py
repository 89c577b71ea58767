"""Cross-entropy of a view of a linear layer's output: the gradient goes to the layer directly.

The loss of the rows is computed with `per_example/cross_entropy`, which holds neither softmax nor
gradients of the logits. The logits stay what they are for everything else that uses them. Whether
the gradient may pass them by is decided in the backward pass: where someone looks at it (a hook,
`retain_grad`, `torch.autograd.grad`), it is computed in full and goes the ordinary way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from privagrad.torch.guards.refusals import ADVICE, UnverifiedError
from privagrad.torch.guards.trace import Output
from privagrad.torch.per_example.cross_entropy import (
    CrossEntropy,
    LinearCall,
    Logits,
    RowLosses,
    Rows,
    Sent,
    full_gradient,
    memory_of,
)
from privagrad.torch.per_example.tape import Tape

_VIEWS = frozenset(
    {"AliasBackward0", "ViewBackward0", "ReshapeAliasBackward0", "TransposeBackward0", "TBackward0",
     "PermuteBackward0", "UnsqueezeBackward0", "SqueezeBackward0", "SqueezeBackward1",
     "SqueezeBackward2", "SliceBackward0", "SelectBackward0"}
)  # fmt: skip


@dataclass(frozen=True)
class LinearOutput:
    """A view of the logits that a linear layer has returned, by way of an output of the module."""

    call: LinearCall
    leaf: Output
    tape: Tape
    rows: Tensor
    """The row of the layer's input that each row of the view belongs to."""

    @classmethod
    def seen_in(cls, view: Tensor, tape: Tape) -> LinearOutput | None:
        """None where a tensor is something else, or has been changed in place."""
        node: Any = view.grad_fn
        leaf: Output | None = None
        while not isinstance(call := getattr(node, "call", None), LinearCall):
            own = getattr(node, "leaf", None)
            if isinstance(own, Output):
                leaf = own
            elif node is None or node.name() not in _VIEWS:
                return None
            node = node.next_functions[0][0]
        if leaf is None or not call.returned(view):
            return None
        if _memory(view) in tape.watched or view.dim() < 2:
            return None
        classes = call.classes
        rows = call.x.shape[:-1].numel()
        numbers = row_numbers(view, 1, classes, rows)
        if numbers is None or _memory(leaf.values) != _memory(view):
            return None
        if row_numbers_of_leaf(leaf, classes, rows) is None:
            return None  # the gradients of single examples could not be compared
        return cls(call, leaf, tape, numbers)

    def cross_entropy(
        self,
        input: Tensor,
        target: Tensor,
        weight: Tensor | None = None,
        reduction: str = "mean",
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
    ) -> Tensor:
        """F.cross_entropy of the view."""
        rows = None
        if self._knows(weight) and 0.0 <= label_smoothing <= 1.0:
            # A copy: it is used again in step().
            own = None if weight is None else weight.detach().clone()
            criterion = CrossEntropy(own, ignore_index, label_smoothing)
            rows = self._rows(input, target, criterion)
        if rows is None:
            return F.cross_entropy(
                input, target, weight, None, ignore_index, None, reduction, label_smoothing
            )
        losses = self._losses(input, rows, criterion).view(target.shape)
        if reduction != "mean":
            return losses if reduction == "none" else losses.sum()
        counted = target != ignore_index
        weights = counted if weight is None else counted * weight[target * counted]
        return losses.sum() / weights.sum()

    def _knows(self, weight: Tensor | None) -> bool:
        """Whether classes have plain numbers as weights; PyTorch refuses those that are none."""
        layer = self.call.weight
        return weight is None or (
            type(weight) in (Tensor, nn.Parameter)
            and not weight.requires_grad
            and (weight.shape, weight.dtype) == (layer.shape[:1], layer.dtype)
        )

    def _losses(self, view: Tensor, rows: Rows, criterion: CrossEntropy) -> Tensor:
        """The losses of the view's rows, in their order."""
        layer, x = self.call.layer, self.call.x
        geometry = (tuple(view.shape), view.stride(), view.storage_offset())
        places = row_numbers_of_leaf(self.leaf, layer.classes, len(rows.inputs))

        def backward_of(factors: Tensor) -> Tensor | None:
            tape = self.tape
            if not tape.whole_backward or memory in tape.watched or self.call.watched:
                return full_gradient(layer, criterion, rows, factors).as_strided(*geometry)
            self._show(places, criterion, rows, factors)
            self.call.hand_over(criterion, rows, factors)
            return None

        memory = _memory(view)
        self.leaf.needed = False
        sent: Sent | None = [] if self.tape.guarded else None
        arriving = x if sent is None else Arrival.apply(x, sent)
        call = (layer, criterion, rows)
        losses: Tensor = RowLosses.apply(arriving, view, call, backward_of, sent)
        return losses[self.rows.reshape(-1)]

    def _rows(self, view: Tensor, target: Tensor, criterion: CrossEntropy) -> Rows | None:
        """All rows of the layer's input, with the targets of those that are used."""
        own = Rows.of(target[..., None], target.long(), criterion)
        inside = (own.targets >= 0) & (own.targets < self.call.classes)
        if self.rows.shape != target.shape or not bool(inside.all()):
            return None
        inputs = self.call.inputs
        every = Rows.of(inputs, own.targets.new_zeros(inputs.shape[:-1]), criterion)
        places = self.rows.reshape(-1)
        targets = torch.zeros_like(every.targets).index_put_((places,), own.targets)
        counted = torch.zeros_like(every.counted).index_put_((places,), own.counted)
        used = torch.zeros_like(every.counted).index_fill_(0, places, True)
        classes = self.call.classes
        table = view.detach().as_strided((len(used), classes), (classes, 1), 0)
        if bool(used.all()):
            return Rows(every.inputs, targets, counted, logits=Logits(table))
        kept = every.inputs.masked_fill(~used[:, None], 0.0)
        return Rows(kept, targets, counted, used, Logits(table))

    def _show(
        self,
        places: tuple[Tensor, int] | None,
        criterion: CrossEntropy,
        rows: Rows,
        factors: Tensor,
    ) -> None:
        """Give the output the gradients of the examples that it wants them of."""
        leaf, layer = self.leaf, self.call.layer
        for example in leaf.wanted:
            assert places is not None
            assert leaf.layout is not None
            numbers, dim = places
            own = leaf.layout.split(numbers, leaf.count)[example].movedim(dim, -1)
            flat = own.reshape(-1)
            few = Rows(rows.inputs[flat], rows.targets[flat], rows.counted[flat])
            gradient = full_gradient(layer, criterion, few, factors[flat])
            leaf.receive(example, gradient.view(*own.shape[:-1], -1).movedim(-1, dim))


class Arrival(torch.autograd.Function):
    """The identity, which refuses another gradient than `RowLosses` has `sent`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: Sent) -> Tensor:
        ctx.sent = sent
        ctx.set_materialize_grads(False)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Any:
        if gradient is not None and memory_of(gradient) not in ctx.sent:
            raise UnverifiedError(
                "Expected the gradient of the loss to reach the layer as it is, found another one: "
                f"a hook in the graph of the loss has changed it. {ADVICE}"
            )
        ctx.sent.clear()
        return gradient, None


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def row_numbers(view: Tensor, dim: int, classes: int, rows: int) -> Tensor | None:
    """Which row of a contiguous table (rows, classes) each row of a view is.

    `dim` is the view's dimension of the classes. None where it is not a view of whole rows.
    """
    if view.shape[dim] != classes or (view.stride(dim) != 1 and classes > 1):
        return None
    sizes = zip(view.shape, view.stride(), strict=True)
    steps = [own for place, own in enumerate(sizes) if place != dim]
    numbers = [*(s for n, s in steps if n > 1), view.storage_offset()]
    repeats = any(s == 0 for n, s in steps if n > 1)
    if repeats or any(s % classes for s in numbers):
        return None
    shape = [n for n, _ in steps]
    strides = [s // classes if n > 1 else 1 for n, s in steps]
    every = torch.arange(rows, device=view.device)
    return every.as_strided(shape, strides, view.storage_offset() // classes)


def row_numbers_of_leaf(leaf: Output, classes: int, rows: int) -> tuple[Tensor, int] | None:
    """Those of an output, with a dimension of size 1 in place of its classes; which one it is."""
    values = leaf.values
    for dim in range(values.dim()):
        numbers = row_numbers(values, dim, classes, rows)
        if numbers is not None:
            return numbers.unsqueeze(dim), dim
    return None
