"""LSTMCell, GRUCell and RNNCell: two linear maps, and what happens between them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from privagrad.torch.per_example.layers._registry import layer
from privagrad.torch.per_example.layers.linear import projected
from privagrad.torch.per_example.tape import Tape

OneCell = nn.LSTMCell | nn.GRUCell | nn.RNNCell


@layer(nn.LSTMCell)
def lstm_cell(
    tape: Tape, module: nn.LSTMCell, x: Tensor, before: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    h, c = before if before is not None else (_zeros(module, x), _zeros(module, x))
    of_x, of_h = _gates(tape, module, x, h)
    i, f, g, o = (of_x + of_h).chunk(4, 1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


@layer(nn.GRUCell)
def gru_cell(tape: Tape, module: nn.GRUCell, x: Tensor, before: Tensor | None = None) -> Tensor:
    h = _zeros(module, x) if before is None else before
    of_x, of_h = (gates.chunk(3, 1) for gates in _gates(tape, module, x, h))
    r, z = ((a + b).sigmoid() for a, b in zip(of_x[:2], of_h[:2], strict=True))
    n = (of_x[2] + r * of_h[2]).tanh()
    return n + z * (h - n)


@layer(nn.RNNCell)
def rnn_cell(tape: Tape, module: nn.RNNCell, x: Tensor, before: Tensor | None = None) -> Tensor:
    h = _zeros(module, x) if before is None else before
    of_x, of_h = _gates(tape, module, x, h)
    gates = of_x + of_h
    return gates.tanh() if module.nonlinearity == "tanh" else torch.relu(gates)


def _gates(tape: Tape, module: OneCell, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    """What the input and the hidden state contribute to the gates."""
    if x.dim() != 2 or h.dim() != 2:
        raise ValueError(
            f"Expected inputs and states of {type(module).__name__} of shape (examples, numbers), "
            f"found {tuple(x.shape)} and {tuple(h.shape)}: give them a dimension of examples."
        )
    return (
        projected(tape, module, x, module.weight_ih, module.bias_ih),
        projected(tape, module, h, module.weight_hh, module.bias_hh),
    )


def _zeros(module: OneCell, x: Tensor) -> Tensor:
    return x.new_zeros(len(x), module.hidden_size)
