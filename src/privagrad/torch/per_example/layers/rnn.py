"""Plain recurrent networks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from privagrad.torch.per_example.layers._registry import layer
from privagrad.torch.per_example.layers.recurrent import Cell, recurrent
from privagrad.torch.per_example.tape import Tape


@layer(nn.RNN)
def rnn(tape: Tape, module: nn.RNN, inputs: Any, before: Any = None) -> Any:
    kind = ReluCell if module.nonlinearity == "relu" else TanhCell
    return recurrent(tape, module, kind, inputs, before)


class TanhCell(Cell):
    """h ← tanh(gates)."""

    def forward(self, gates: Tensor) -> tuple[Tensor, ...]:
        (h,) = self.before
        w = self.weights.hidden.detach().T
        for gate in gates:
            h = self.activate(gate.addmm_(h, w))
        self.hiddens = gates
        return (gates.clone(),)

    def activate(self, gate: Tensor) -> Tensor:
        return gate.tanh_()

    def slopes(self) -> Tensor:
        return 1 - self.hiddens.square()

    def backward(self, gradients: list[Tensor]) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        (dy,) = gradients
        w, d = self.weights.hidden.detach(), self.slopes()
        dh = torch.zeros_like(dy[0])
        for t in range(len(dy) - 1, -1, -1):
            dh += dy[t]
            d[t] *= dh
            dh = d[t] @ w
        return d, d, (dh,)


class ReluCell(TanhCell):
    """h ← max(gates, 0)."""

    def activate(self, gate: Tensor) -> Tensor:
        return gate.relu_()

    def slopes(self) -> Tensor:
        return (self.hiddens > 0).to(self.hiddens.dtype)
