"""Cross-entropy of the outputs of a linear layer, a few rows at a time.

For one row with input a, logits z = W a + b, target y and p = softmax(z), with class weights w and
smoothing s over m classes,

    loss = - B log p_y - Σ_c u_c log p_c,    ∂loss/∂z = (B + Σ_c u_c) p - B e_y - u,
    B = (1 - s) w_y,    u_c = s w_c / m.

The gradients of all logits take as much memory as the logits, their softmax as much again. Here
they are formed for a few rows, used while they are in cache, and dropped: once for the losses and
the gradients of the inputs, and once more, from logits or inputs, for those of the weights.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from privagrad.torch.per_example.chunked import ChunkedGradients, spans
from privagrad.torch.per_example.gradients import (
    ALL,
    DenseGradient,
    Gradients,
    OuterProductGradient,
    PerExampleGradient,
)
from privagrad.torch.per_example.tape import Arrange, SavedInput, Tape
from privagrad.torch.scales import accurate

_CACHED = 2**20
"""Logits that are formed at a time."""

SMALLEST = 2**20
"""Fewer logits than this fit into cache, with their gradients: PyTorch's own way is faster."""

Sent = list[tuple[int, int]]
"""Where gradients are that a backward pass has sent, and their versions."""

_TINY = 1e-30
"""Shares below this have lost digits: their logarithms are taken from the logits."""


class Linear:
    """W and b of a layer, and a copy of their values when the loss is computed.

    Gradients are formed again until `step()`, whatever happens to the layer meanwhile.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight, self.bias = weight, bias
        self.values = weight.detach().clone()
        self.offsets = None if bias is None else bias.detach().clone()

    @property
    def classes(self) -> int:
        return int(self.weight.shape[0])

    def logits(self, rows: Tensor) -> Tensor:
        return F.linear(rows, self.values, self.offsets)

    def chunks(self, rows: int) -> Iterator[tuple[slice, Tensor]]:
        """Rows whose logits fit into cache, and memory for their shares, the same for all."""
        size = min(rows, max(1, _CACHED // self.classes))
        memory = accurate(self.values[:0]).new_empty(size, self.classes)
        for part in spans(rows, max(1, size)):
            yield part, memory[: part.stop - part.start]


@dataclass(frozen=True)
class CrossEntropy:
    """The loss of a row of logits; `weight` are the classes' weights."""

    weight: Tensor | None = None
    ignore_index: int = -100
    label_smoothing: float = 0.0

    def losses(self, logits: Tensor, targets: Tensor, own: Tensor) -> Tensor:
        """The loss of each row, from its logits and p_y; targets are classes."""
        logits, logs = accurate(logits), own.log()
        lost = (own < _TINY).nonzero()[:, 0]
        if len(lost):
            logs[lost] = -F.cross_entropy(logits[lost], targets[lost], reduction="none")
        losses = -self._factors(targets, logits) * logs
        if self.label_smoothing:
            spread = self._spread(logits)
            normaliser = logits.gather(1, targets[:, None])[:, 0] - logs
            losses += spread.sum() * normaliser - logits @ spread
        return losses

    def gradient(self, shares: Tensor, targets: Tensor) -> Tensor:
        """∂loss/∂z of each row, in the memory of p."""
        factors = self._factors(targets, shares)
        if self.weight is not None:
            shares *= (factors + self._spread(shares).sum())[:, None]
        shares.scatter_add_(1, targets[:, None], -factors[:, None])
        if self.label_smoothing:
            shares -= self._spread(shares)
        return shares

    def _factors(self, targets: Tensor, like: Tensor) -> Tensor:
        """B of each row."""
        own = 1.0 - self.label_smoothing
        if self.weight is None:
            return like.new_full((len(targets),), own)
        return own * self.weight.to(like.dtype)[targets]

    def _spread(self, like: Tensor) -> Tensor:
        """u."""
        classes = like.shape[1]
        weight = like.new_ones(classes) if self.weight is None else self.weight.to(like.dtype)
        return weight * (self.label_smoothing / classes)


def shares_of(
    logits: Tensor, targets: Tensor, memory: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """p of each row, in `memory` or new memory, and p_y."""
    shares = torch.softmax(accurate(logits), 1, out=memory)
    return shares, shares.gather(1, targets[:, None])[:, 0]


class Logits:
    """What a layer has returned for its rows, (rows, classes): used again unless it has changed.

    PyTorch counts changes in place, but not those by way of `.data` or NumPy. They show in p_y,
    which is kept of the time when the loss was computed.
    """

    def __init__(self, table: Tensor) -> None:
        self.table, self._version = table, table._version
        self.own = torch.empty(len(table), dtype=accurate(table[:0]).dtype, device=table.device)

    def shares(self, rows: slice | Tensor, targets: Tensor, memory: Tensor) -> Tensor | None:
        """p of some rows, in `memory`, if it is what it was."""
        if self.table._version != self._version:
            return None
        shares, own = shares_of(self.table[rows], targets, memory)
        return shares if torch.equal(own, self.own[rows]) else None


@dataclass(frozen=True)
class Rows:
    """Rows that enter a linear layer, (rows, n), and the classes they are compared with, (rows,).

    Those that are not `counted` have the loss 0, and any class; those that are not `used` are not
    part of the loss at all, and their inputs are 0. `logits` are there for layers that return them.
    """

    inputs: Tensor
    targets: Tensor
    counted: Tensor
    used: Tensor | None = None
    logits: Logits | None = None

    @classmethod
    def of(cls, x: Tensor, targets: Tensor, criterion: CrossEntropy) -> Rows:
        inputs, targets = x.detach().reshape(-1, x.shape[-1]), targets.reshape(-1)
        counted = targets != criterion.ignore_index
        return cls(inputs, torch.where(counted, targets, 0), counted)


class CrossEntropyGradients(ChunkedGradients):
    """Of W, and b, from inputs (b, T, n), targets (b, T) and each row's factor in the loss (b, T).

    ∂loss/∂z is that of the row's own loss: its factor goes to the input, which is smaller.
    `numbers` are the rows' places in `logits`, (b, T), where these exist.
    """

    def __init__(
        self,
        layer: Linear,
        criterion: CrossEntropy,
        inputs: Tensor,
        targets: Tensor,
        factors: Tensor,
        trains: Callable[[Tensor | None], bool],
        logits: Logits | None,
        numbers: Tensor,
    ) -> None:
        trained = [(p, ALL) for p in (layer.weight, layer.bias) if p is not None and trains(p)]
        size = max(1, _CACHED // max(1, inputs.shape[1] * layer.classes))
        super().__init__(trained, inputs.shape[0], size)
        self.layer, self.criterion = layer, criterion
        self.inputs, self.targets = inputs, targets
        self.factors = accurate(factors)
        self.logits, self.numbers = logits, numbers
        self._dropped: Tensor | None = None
        self._memory: Tensor | None = None

    def chunk(self, examples: slice) -> list[PerExampleGradient]:
        inputs, factors = self.inputs[examples], self.factors[examples]
        targets = self.targets[examples].reshape(-1)
        memory = self._memory_of(len(targets))
        shares = self._kept_shares(examples, targets, memory)
        if shares is None:
            logits = self.layer.logits(inputs.reshape(-1, inputs.shape[2]))
            shares, _ = shares_of(logits, targets, memory)
        d = self.criterion.gradient(shares, targets).view(*inputs.shape[:2], -1)
        if self._dropped is not None:
            d = d.masked_fill(self._dropped[examples, None, None], 0.0)
        gradients: list[PerExampleGradient] = []
        for parameter, _ in self.parameters:
            if parameter is self.layer.weight:
                scaled = accurate(inputs) * factors[:, :, None]
                gradients.append(OuterProductGradient(parameter, scaled, d))
            else:
                sums = torch.bmm(factors[:, None].to(d.dtype), d)
                gradients.append(DenseGradient(parameter, sums[:, 0]))
        return gradients

    def _memory_of(self, rows: int) -> Tensor:
        """Memory for the shares of so many rows, the same for each chunk."""
        if self._memory is None or len(self._memory) < rows:
            self._memory = self.factors.new_empty(rows, self.layer.classes)
        return self._memory[:rows]

    def _kept_shares(self, examples: slice, targets: Tensor, memory: Tensor) -> Tensor | None:
        if self.logits is None or not len(targets):
            return None
        numbers = self.numbers[examples].reshape(-1)
        first, last = int(numbers[0]), int(numbers[-1])
        together = bool((numbers.diff() == 1).all())
        rows = slice(first, last + 1) if together else numbers
        return self.logits.shares(rows, targets, memory)

    def keep_only(self, examples: Tensor) -> None:
        others = ~examples
        self._dropped = others if self._dropped is None else others | self._dropped
        self.inputs = self.inputs.masked_fill(others[:, None, None], 0.0)
        self.factors = self.factors.masked_fill(others[:, None], 0.0)


class RowLosses(torch.autograd.Function):
    """The losses of rows, (rows,), with their gradients in the inputs `x` of the layer.

    `logits` are the layer's outputs, in any view, where they exist. `backward_of` is given the
    gradient of each row's loss in the backward pass. Where it returns a gradient of `logits`, that
    one goes back in place of the gradient of `x`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        logits: Tensor | None,
        call: tuple[Linear, CrossEntropy, Rows],
        backward_of: Callable[[Tensor], Tensor | None],
        sent: Sent | None = None,
    ) -> Tensor:
        layer, criterion, rows = call
        losses = accurate(rows.inputs).new_empty(len(rows.inputs))
        dx = torch.empty_like(rows.inputs) if ctx.needs_input_grad[0] else None
        for part, memory in layer.chunks(len(losses)):
            kept, targets = rows.logits, rows.targets[part]
            z = layer.logits(rows.inputs[part]) if kept is None else kept.table[part]
            shares, own = shares_of(z, targets, memory)
            losses[part] = criterion.losses(z, targets, own)
            if kept is not None:
                kept.own[part] = own
            if dx is not None:
                d = criterion.gradient(shares, targets)
                torch.mm(d.to(dx.dtype), layer.values, out=dx[part])
        if dx is not None and rows.used is not None:
            dx[~rows.used] = 0.0
        ctx.dx, ctx.shape, ctx.counted, ctx.backward_of = dx, x.shape, rows.counted, backward_of
        ctx.sent = sent
        return losses.where(rows.counted, 0.0).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, factors: Tensor) -> Any:
        if ctx.backward_of is None:
            raise RuntimeError(
                "Expected one backward() of the cross-entropy of a linear layer, found a second "
                "one: what it is computed from is not kept. Compute the loss again."
            )
        factors = factors.where(ctx.counted, 0.0)
        ordinary = ctx.backward_of(factors)
        if ordinary is not None:
            return None, ordinary, None, None, None
        dx = None if ctx.dx is None else ctx.dx.mul_(factors[:, None]).view(ctx.shape)
        if dx is not None and ctx.sent is not None:
            ctx.sent.append(memory_of(dx))
        # The loss may be kept for long, and the logits with it.
        ctx.dx = ctx.backward_of = None
        return dx, None, None, None, None


class LinearCall:
    """One call of a linear layer in a private forward pass; `returned` once it has returned.

    What a loss needs of it is copied when that loss is computed: most outputs go elsewhere.
    """

    def __init__(
        self, tape: Tape, weight: Tensor, bias: Tensor | None, x: Tensor, examples: Arrange
    ) -> None:
        # A view: whatever the module does to x afterwards, gradients go the way of the layer's own.
        self.x, self.weight, self.bias = x.view_as(x), weight, bias
        self._tape, self._of = tape, tape.current
        self._examples, self._saved = examples, SavedInput(x)
        self._used = [self._saved, *(SavedInput(p) for p in (weight, bias) if p is not None)]
        self._logits: tuple[int, int] | None = None
        self._tapped: weakref.ref[Tensor] | None = None

    @cached_property
    def layer(self) -> Linear:
        return Linear(self.weight, self.bias)

    @cached_property
    def inputs(self) -> Tensor:
        return self.x.detach().clone()

    @property
    def classes(self) -> int:
        return int(self.weight.shape[0])

    def returning(self, logits: Tensor) -> LinearCall:
        """The call that has made `logits`."""
        self._logits = memory_of(logits)
        return self

    def tapped(self, logits: Tensor) -> None:
        """Note the tensor that the module sees."""
        self._tapped = weakref.ref(logits)

    @property
    def watched(self) -> bool:
        """Whether someone wants the gradient of the logits, from wherever they have them."""
        logits = None if self._tapped is None else self._tapped()
        return logits is not None and bool(logits._backward_hooks or logits.retains_grad)

    def returned(self, view: Tensor) -> bool:
        """Whether `view` is in the memory of the logits, and nothing has been changed since."""
        return memory_of(view) == self._logits and all(own.unchanged for own in self._used)

    def hand_over(self, criterion: CrossEntropy, rows: Rows, factors: Tensor) -> None:
        """Tell the tape of the gradients of the layer's parameters."""

        def per_example(factors: Tensor) -> Gradients:
            self._saved()
            shape = self.x.shape
            numbers = torch.arange(len(rows.inputs)).view(shape[:-1])
            source = CrossEntropyGradients(
                self.layer,
                criterion,
                self._examples(rows.inputs.view(shape), 1),
                self._examples(rows.targets.view(shape[:-1]), 0),
                self._examples(factors.view(shape[:-1]), 0),
                self._tape.trains,
                rows.logits,
                self._examples(numbers, 0),
            )
            return source.gradients()

        self._tape.receive(self._of, per_example, factors)


def memory_of(tensor: Tensor) -> tuple[int, int]:
    """Where a tensor is, and how often that has been changed in place."""
    return tensor.untyped_storage().data_ptr(), tensor._version


def full_gradient(layer: Linear, criterion: CrossEntropy, rows: Rows, factors: Tensor) -> Tensor:
    """The gradient of all logits, (rows, classes)."""
    full = rows.inputs.new_empty(len(rows.inputs), layer.classes)
    for part, memory in layer.chunks(len(full)):
        targets = rows.targets[part]
        shares, _ = shares_of(layer.logits(rows.inputs[part]), targets, memory)
        d = criterion.gradient(shares, targets)
        full[part] = d.mul_(factors[part, None])
    return full
