"""The batch and the outputs of a private module, followed to where they are used."""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import torch
from torch import Tensor

from privagrad.torch.guards.replay import Replay, run_again
from privagrad.torch.guards.structure import map_tensors
from privagrad.torch.guards.trace import (
    BatchTensor,
    Leaf,
    Output,
    SeparateLoss,
    TraceNode,
    history,
    rows_stay_whole,
    signature,
)
from privagrad.torch.guards.traced import TracedTensor
from privagrad.torch.per_example.layout import (
    CLOSE,
    Layout,
    RowOwners,
    in_single,
    row_layouts,
    without_autocast,
)
from privagrad.torch.per_example.tape import ForwardPass

_NUMBERS = itertools.count(1)
"""Of batches, over all trainings: the batch of one is none of another's."""


class BatchTracer:
    """Traces the tensors of batches and outputs, and notes what leaves the trace."""

    def __init__(self, verify: bool) -> None:
        self.verify = verify
        self._reads = self._writes = self._ever_read = False
        self._of_outputs: list[TraceNode] = []
        self._of_batch: list[TraceNode] = []
        self._numbers: dict[float, TraceNode] = {}
        self._lost: list[weakref.ref[Tensor]] = []
        self._owners: dict[tuple[int, int], RowOwners] = {}
        self._number = 0
        self._batch_of_inputs: int | None = None

    def batch(self, batch: Any, count: int, alone: dict[int, list[Tensor]] | None = None) -> Any:
        """The tensors of a batch of `count` examples, traced.

        `alone` are those of some examples that are padded, by their places, collated alone.
        """
        for node in self._of_batch:
            node.forget()
        self._of_batch.clear()
        self._numbers.clear()
        self._reads = self._writes = False
        self._number = number = next(_NUMBERS)
        if not self.verify:
            return batch
        places = itertools.count()

        def traced(tensor: Tensor) -> Tensor:
            layout = next(row_layouts(tensor.shape, count), None) if count else Layout(0)
            node, place = BatchTensor(tensor, count, layout, number), next(places)
            node.unpadded = {e: own[place].to(tensor) for e, own in (alone or {}).items()}
            return TracedTensor.of(tensor, node, self)

        return map_tensors(traced, batch)

    def outputs(
        self, outputs: Any, current: ForwardPass, alone: dict[int, list[Tensor]] | None = None
    ) -> Any:
        """The module's outputs, traced; `alone` are those of some examples without padding."""
        places = itertools.count()
        losses = [loss() for loss, _ in current.losses]

        def traced(tensor: Tensor) -> Tensor:
            place = next(places)
            values = tensor.detach()
            if any(tensor is loss for loss in losses):
                node: Leaf = SeparateLoss(values, current.count)
            else:
                layout = current.layouts.get(("output", place), Layout(0))
                if tensor.dim() == 0 or (layout and not _fits(tensor, layout, current.count)):
                    layout = None
                node = Output(values, current.count, layout, tensor.requires_grad)
                node.batch = self._batch_of_inputs
                node.unpadded = {e: own[place] for e, own in (alone or {}).items()}
                if tensor.requires_grad:
                    tensor = _Receipt.apply(tensor, node)
            return TracedTensor.of(tensor, node, self)

        return map_tensors(traced, outputs)

    def separate_loss(self, loss: Tensor, count: int) -> Tensor:
        """A loss that was computed example by example, traced."""
        return TracedTensor.of(loss, SeparateLoss(loss.detach(), count), self)

    def node(self, made: Any, place: int, written: bool, graded: bool) -> TraceNode:
        """A new node, which lives as long as the batch it was computed from."""
        node = TraceNode(made, place, written, graded)
        node.after_read, node.after_write = self._reads, self._writes
        if any(source.stale for source in node.sources):
            node.forget()
        else:
            (self._of_outputs if node.of_outputs else self._of_batch).append(node)
        return node

    def escaped(self, number: Any, node: TraceNode | None) -> None:
        """A number of the batch that Python knows now."""
        self.read()
        if isinstance(number, int | float) and not isinstance(number, bool) and node is not None:
            self._numbers[float(number)] = node

    def read(self) -> None:
        """Numbers of the batch have gone where they cannot be followed."""
        self._reads = self._ever_read = True

    def lost(self, tensor: Tensor) -> None:
        """A tensor into which something of the batch was written."""
        self.read()
        self._writes = True
        self._lost = [old for old in self._lost if old() is not None]
        self._lost.append(weakref.ref(tensor))

    def changed_elsewhere(self) -> TraceNode:
        """What a tensor holds that was changed in place through another view of its memory."""
        node = self.node((), 0, False, True)
        node.forget()
        return node

    def step_done(self) -> None:
        """A step has been made: what was computed from its outputs is of an earlier model."""
        for node in self._of_outputs:
            node.forget()
        self._of_outputs.clear()

    def owners(self, node: TraceNode, table: Tensor) -> RowOwners | None:
        """Of which example each row of `table` (rows, classes, ...) is; None if it is unclear."""
        steps = history(node)
        leaves = [step for step in steps if isinstance(step, Output)]
        if len(leaves) != 1 or leaves[0].layout is None:
            return None
        leaf, layout = leaves[0], leaves[0].layout
        if rows_stay_whole(node, table.shape):
            numbers = layout.numbers(leaf.values.shape[:-1], leaf.count).reshape(-1)
            return RowOwners(numbers.to(table.device), leaf.count)
        # Masks change with the batch, and with them the rows.
        fixed = not any(isinstance(s, BatchTensor) for s in steps) and not any(
            isinstance(c, Tensor) for s in steps for c in s.constants
        )
        key = (signature(steps, leaf.count), leaf.count)
        if not fixed or key not in self._owners:
            found = _owners_of(steps, leaf)
            if found is None:
                return None
            self._owners[key] = RowOwners(found, leaf.count)
        return self._owners[key] if fixed else self._owners.pop(key)

    def was_written(self, value: Any) -> bool:
        """Whether something of a batch was written into the memory of a tensor."""
        if not self._lost or not isinstance(value, Tensor) or not value.numel():
            return False
        lost = (tensor for reference in self._lost if (tensor := reference()) is not None)
        memory = value.untyped_storage().data_ptr()
        return any(tensor.untyped_storage().data_ptr() == memory for tensor in lost)


class _Receipt(torch.autograd.Function):
    """The identity, which keeps the gradient of an output where it is wanted."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, leaf: Output) -> Tensor:
        ctx.leaf = leaf
        ctx.set_materialize_grads(False)
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, None]:
        leaf = ctx.leaf
        if gradient is not None and leaf.wanted and leaf.layout is not None:
            parts = leaf.layout.split(gradient.detach(), leaf.count)
            for example in leaf.wanted:
                leaf.receive(example, parts[example].clone())
        return gradient, None


def _fits(tensor: Tensor, layout: Layout, count: int) -> bool:
    return tensor.dim() > layout.axis and (not count or tensor.shape[layout.axis] % count == 0)


def _owners_of(steps: list[TraceNode], leaf: Output) -> Tensor | None:
    """The example that each row of the last of `steps` (rows, classes, ...) belongs to.

    Row r moves by J_r v with the outputs. Let v' be v times each example's number: of example i
    alone a row moves by i times as much.
    """
    assert leaf.layout is not None
    own = in_single(leaf.values)
    v = torch.randn(own.shape, generator=torch.Generator().manual_seed(0)).to(own)
    view = Replay(leaf.count, range(leaf.count), single=True)
    with torch._C.DisableTorchFunctionSubclass(), torch.enable_grad(), without_autocast():
        root = own.clone().requires_grad_()
        values = {id(s): in_single(s.values) for s in steps if isinstance(s, Leaf)}
        values[id(leaf)] = root
        rows = run_again(steps, values, view)
        u = torch.zeros_like(rows, requires_grad=True)
        # J v is the derivative of uᵀ J in u.
        (back,) = torch.autograd.grad(rows, root, u, create_graph=True)
        numbers = leaf.layout.numbers(leaf.values.shape, leaf.count).to(v)
        moves = [
            torch.autograd.grad(back, u, tangent, retain_graph=True)[0].double()
            for tangent in (v, v * numbers)
        ]
    once, often = moves
    largest, place = once.abs().max(1, keepdim=True)
    owners = (often.gather(1, place) / once.gather(1, place)).squeeze(1).round()
    error = (often - owners.unsqueeze(1) * once).abs()
    if not bool((error <= CLOSE * largest * owners.unsqueeze(1).clamp(min=1.0)).all()):
        return None
    known = (largest > 0).all() & (owners >= 0).all() & (owners < leaf.count).all()
    return owners.long() if bool(known) else None
