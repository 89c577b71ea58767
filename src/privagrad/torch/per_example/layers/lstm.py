"""Long short-term memory, with projections."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from privagrad.torch.per_example.gradients import OuterProductGradient, PerExampleGradient
from privagrad.torch.per_example.layers._registry import layer
from privagrad.torch.per_example.layers.recurrent import Cell, recurrent
from privagrad.torch.per_example.tape import Tape


@layer(nn.LSTM)
def lstm(tape: Tape, module: nn.LSTM, inputs: Any, before: Any = None) -> Any:
    return recurrent(tape, module, LSTMCell, inputs, before)


class LSTMCell(Cell):
    """i, f, o = σ(·), g = tanh(·) of the gates; c ← f c + i g; h ← o tanh(c), or P o tanh(c)."""

    states = 2

    def forward(self, gates: Tensor) -> tuple[Tensor, ...]:
        h, c = self.before
        steps, count, size = len(gates), gates.shape[1], c.shape[1]
        w = self.weights.hidden.detach().T
        project = self.weights.projection
        shape = (steps, count, size)
        self.gates = gates
        self.cells, self.tanhs = gates.new_empty(shape), gates.new_empty(shape)
        self.outputs = gates.new_empty(shape)
        hidden = self.outputs if project is None else gates.new_empty(steps, *h.shape)
        for t in range(steps):
            gate = gates[t].addmm_(h, w)
            gate[:, : 2 * size].sigmoid_()
            gate[:, 2 * size : 3 * size].tanh_()
            gate[:, 3 * size :].sigmoid_()
            i, f, g, o = gate.chunk(4, 1)
            c = torch.mul(f, c, out=self.cells[t]).addcmul_(i, g)
            torch.mul(o, torch.tanh(c, out=self.tanhs[t]), out=self.outputs[t])
            if project is not None:
                torch.mm(self.outputs[t], project.detach().T, out=hidden[t])
            h = hidden[t]
        self.hiddens = hidden
        return hidden.clone(), self.cells.clone()

    def backward(self, gradients: list[Tensor]) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        dy, dcells = gradients
        w, project = self.weights.hidden.detach(), self.weights.projection
        size = dcells.shape[2]
        i, f, g, o = self.gates.chunk(4, 2)
        earlier = torch.cat([self.before[1][None], self.cells[:-1]])
        # Everything that does not wait for later times, at once.
        slopes = torch.empty_like(self.gates)
        parts = slopes.chunk(4, 2)
        torch.mul(g, i * (1 - i), out=parts[0])
        torch.mul(earlier, f * (1 - f), out=parts[1])
        torch.mul(i, 1 - g * g, out=parts[2])
        torch.mul(self.tanhs, o * (1 - o), out=parts[3])
        through = o * (1 - self.tanhs.square())
        dgates = slopes.unflatten(2, (4, size))
        dh = torch.zeros_like(dy[0])
        dc = torch.zeros_like(dcells[0])
        if project is not None:
            self.dprojected = torch.empty_like(dy)
        for t in range(len(dy) - 1, -1, -1):
            dh += dy[t]
            dout = dh
            if project is not None:
                self.dprojected[t] = dh
                dout = dh @ project.detach()
            dc += dcells[t]
            dc.addcmul_(dout, through[t])
            dgates[t, :, :3] *= dc[:, None]
            dgates[t, :, 3] *= dout
            dc *= f[t]
            dh = torch.mm(slopes[t], w)
        return slopes, slopes, (dh, dc)

    def other_gradients(self) -> Iterator[PerExampleGradient]:
        if self.weights.projection is not None:
            yield OuterProductGradient(
                self.weights.projection,
                self.outputs.transpose(0, 1),
                self.dprojected.transpose(0, 1),
            )
