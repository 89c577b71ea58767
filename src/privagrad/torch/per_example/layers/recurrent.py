"""RNN, LSTM and GRU: layers, directions, packed sequences, one autograd function."""

from __future__ import annotations

from copy import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from privagrad.torch.guards.structure import map_leaves
from privagrad.torch.per_example.gradients import DenseGradient, Gradients, OuterProductGradient
from privagrad.torch.per_example.layers._registry import layer
from privagrad.torch.per_example.layers.cells import CELLS, Cell, Weights
from privagrad.torch.per_example.layout import Layout
from privagrad.torch.per_example.tape import Tape


@layer(nn.RNN, nn.LSTM, nn.GRU)
def recurrent(tape: Tape, module: nn.RNNBase, inputs: Any, before: Any = None) -> Any:
    kind = CELLS[module.mode]
    packed = inputs if isinstance(inputs, PackedSequence) else None
    lengths: Tensor | None = None
    if packed is not None:
        inputs, lengths = pad_packed_sequence(packed, batch_first=module.batch_first)
    if inputs.dim() != 3:
        raise ValueError(
            f"Expected inputs of {type(module).__name__} with three dimensions, found shape "
            f"{tuple(inputs.shape)}: give a single sequence a batch dimension of 1."
        )
    kept = module.weight_ih_l0.dtype
    if torch.is_autocast_enabled(inputs.device.type):
        # Recurrent layers compute in the precision of their weights.
        inputs = inputs.to(kept)
        before = map_leaves(lambda state: state.to(kept), before) if before is not None else None
    own = Layout(0 if module.batch_first else 1)
    # Packed sequences have lengths of their own: what is padded depends on the longest.
    if packed is None:
        tape.examples(module, inputs, own=own)
    x = inputs.transpose(0, 1) if module.batch_first else inputs
    before = _states(module, kind, x, before)
    both = ("", "_reverse") if module.bidirectional else ("",)
    ends: list[list[Tensor]] = []
    for number in range(module.num_layers):
        outputs = []
        for suffix in both:
            start = tuple(state[len(ends)] for state in before)
            weights = Weights(module, number, suffix)
            y, end = _direction(tape, kind(weights, start), x, start, lengths, bool(suffix))
            outputs.append(y)
            ends.append(end)
        x = torch.cat(outputs, 2) if len(outputs) > 1 else outputs[0]
        if module.dropout and module.training and number < module.num_layers - 1:
            x = F.dropout(x, module.dropout)
    result: Any = x.transpose(0, 1) if module.batch_first else x
    after = [torch.stack(parts) for parts in zip(*ends, strict=True)]
    if packed is not None and lengths is not None:
        result = pack_padded_sequence(
            result, lengths, batch_first=module.batch_first, enforce_sorted=False
        )
        result = PackedSequence(
            result.data, packed.batch_sizes, packed.sorted_indices, packed.unsorted_indices
        )
    return result, after[0] if kind.states == 1 else tuple(after)


def _states(module: nn.RNNBase, kind: type[Cell], x: Tensor, given: Any) -> tuple[Tensor, ...]:
    """The states before the first time, (layers · directions, b, ·) each."""
    if given is not None:
        return (given,) if isinstance(given, Tensor) else tuple(given)
    count = module.num_layers * (2 if module.bidirectional else 1)
    sizes = (module.proj_size or module.hidden_size, module.hidden_size)[: kind.states]
    return tuple(x.new_zeros(count, x.shape[1], size) for size in sizes)


def _direction(
    tape: Tape,
    cell: Cell,
    x: Tensor,
    before: tuple[Tensor, ...],
    lengths: Tensor | None,
    reverse: bool,
) -> tuple[Tensor, list[Tensor]]:
    """The outputs of one direction, and its last states."""
    turned = _turn(x, lengths) if reverse else x
    root = torch.ones((), requires_grad=torch.is_grad_enabled())
    states: tuple[Tensor, ...] = _Run.apply(tape, cell, root, turned, *before)
    if lengths is None:
        end = [state[-1] for state in states]
    else:
        last = (lengths - 1).to(x.device)
        end = [state[last, torch.arange(len(last), device=x.device)] for state in states]
    return _turn(states[0], lengths) if reverse else states[0], end


def _turn(x: Tensor, lengths: Tensor | None) -> Tensor:
    """Each sequence from its last time to its first."""
    if lengths is None:
        return x.flip(0)
    times = torch.arange(len(x))[:, None]
    turned = torch.where(times < lengths, lengths - 1 - times, times).to(x.device)
    return x[turned, torch.arange(x.shape[1], device=x.device)]


class _Run(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tape: Tape, cell: Cell, root: Tensor, x: Tensor, *before: Tensor
    ) -> tuple[Tensor, ...]:
        w = cell.weights
        bias = None if w.input_bias is None else w.input_bias.detach()
        if bias is not None and not cell.separate_biases:
            bias = bias + w.hidden_bias.detach()
        with torch.autocast(x.device.type, enabled=False):
            gates = F.linear(x.to(w.input.dtype), w.input.detach(), bias)
            states = cell.forward(gates)
        ctx.tape, ctx.cell, ctx.of = tape, cell, tape.current
        ctx.saved = tape.save(x)
        ctx.set_materialize_grads(False)
        # PyTorch lets go of them after the backward pass, whoever still has the loss.
        ctx.save_for_backward(*cell.activations.values())
        ctx.names, cell.activations = tuple(cell.activations), {}
        return states

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, *others: Tensor | None) -> Any:
        cell: Cell = copy(ctx.cell)
        cell.activations = dict(zip(ctx.names, ctx.saved_tensors, strict=True))
        x = ctx.saved()
        dy = torch.zeros_like(cell.hiddens) if dy is None else dy
        with torch.autocast(dy.device.type, enabled=False):
            into, through, start = cell.backward(dy, *others)

        def per_example(_: Tensor) -> Gradients:
            w, tape = cell.weights, ctx.tape
            d, dh = into.transpose(0, 1), through.transpose(0, 1)
            if tape.trains(w.input):
                yield OuterProductGradient(w.input, x.transpose(0, 1), d)
            if tape.trains(w.hidden):
                yield OuterProductGradient(w.hidden, cell.earlier.transpose(0, 1), dh)
            if tape.trains(w.input_bias):
                yield DenseGradient(w.input_bias, into.sum(0))
            if tape.trains(w.hidden_bias):
                yield DenseGradient(w.hidden_bias, through.sum(0))
            yield from cell.other_gradients()

        ctx.tape.receive(ctx.of, per_example, into)
        dx = into @ cell.weights.input.detach() if ctx.needs_input_grad[3] else None
        return None, None, None, dx, *start
