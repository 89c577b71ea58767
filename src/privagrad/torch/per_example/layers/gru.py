"""Gated recurrent units."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from privagrad.torch.per_example.layers._registry import layer
from privagrad.torch.per_example.layers.recurrent import Cell, recurrent
from privagrad.torch.per_example.tape import Tape


@layer(nn.GRU)
def gru(tape: Tape, module: nn.GRU, inputs: Any, before: Any = None) -> Any:
    return recurrent(tape, module, GRUCell, inputs, before)


class GRUCell(Cell):
    """r, z = σ(·); n = tanh(x's part + r · h's part); h ← n + z (h - n)."""

    separate_biases = True

    def forward(self, gates: Tensor) -> tuple[Tensor, ...]:
        (h,) = self.before
        size = h.shape[1]
        w, bias = self.weights.hidden.detach().T, self.weights.hidden_bias
        self.gates = gates
        self.parts = gates.new_empty(len(gates), *h.shape)
        self.hiddens = torch.empty_like(self.parts)
        for t, gate in enumerate(gates):
            other = h @ w if bias is None else torch.addmm(bias.detach(), h, w)
            gate[:, : 2 * size].add_(other[:, : 2 * size]).sigmoid_()
            r, z, n = gate.chunk(3, 1)
            self.parts[t] = other[:, 2 * size :]
            n.addcmul_(r, self.parts[t]).tanh_()
            h = torch.lerp(n, h, z, out=self.hiddens[t])
        return (self.hiddens.clone(),)

    def backward(self, gradients: list[Tensor]) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        (dy,) = gradients
        w = self.weights.hidden.detach()
        size = dy.shape[2]
        r, z, n = self.gates.chunk(3, 2)
        earlier = self.earlier
        # Everything that does not wait for later times, at once: of r and z, and of n.
        into = torch.empty_like(self.gates)
        dr, dz, dn = into.chunk(3, 2)
        torch.mul(1 - z, 1 - n * n, out=dn)
        torch.mul(dn * self.parts, r * (1 - r), out=dr)
        torch.mul(earlier - n, z * (1 - z), out=dz)
        through = torch.empty_like(into)
        slopes = into.unflatten(2, (3, size))
        dh = torch.zeros_like(dy[0])
        for t in range(len(dy) - 1, -1, -1):
            dh += dy[t]
            slopes[t] *= dh[:, None]
            through[t, :, : 2 * size] = into[t, :, : 2 * size]
            torch.mul(dn[t], r[t], out=through[t, :, 2 * size :])
            dh = torch.addmm(dh * z[t], through[t], w)
        return into, through, (dh,)
