"""The cells of RNN, GRU and LSTM: one layer in one direction."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from privagrad.torch.per_example.gradients import Gradients, OuterProductGradient


class Weights:
    """The parameters of one layer in one direction."""

    def __init__(self, module: nn.RNNBase, layer: int, suffix: str) -> None:
        def get(name: str) -> Any:
            return getattr(module, f"{name}_l{layer}{suffix}", None)

        self.input, self.hidden = get("weight_ih"), get("weight_hh")
        self.input_bias, self.hidden_bias = get("bias_ih"), get("bias_hh")
        self.projection = get("weight_hr")


class Cell(ABC):
    """One layer in one direction over all times.

    `forward` goes from the inputs' part of the gates, (T, b, gates), to the states after each time,
    and keeps the hidden ones as `hiddens`; `backward` from their gradients to those of the gates,
    as the inputs and as the hidden state enter them, and of the states before.
    """

    states: ClassVar[int] = 1
    separate_biases: ClassVar[bool] = False

    hiddens: Tensor

    def __init__(self, weights: Weights, before: tuple[Tensor, ...]) -> None:
        self.weights = weights
        self.before = tuple(state.detach() for state in before)

    @property
    def activations(self) -> dict[str, Tensor]:
        """What the forward pass has kept for the backward pass, by name."""
        return {name: own for name, own in vars(self).items() if isinstance(own, Tensor)}

    @activations.setter
    def activations(self, kept: dict[str, Tensor]) -> None:
        for name in self.activations:
            delattr(self, name)
        vars(self).update(kept)

    @property
    def earlier(self) -> Tensor:
        """The hidden states before each time, (T, b, ·)."""
        return torch.cat([self.before[0][None], self.hiddens[:-1]])

    @abstractmethod
    def forward(self, gates: Tensor) -> tuple[Tensor, ...]:
        """The states after each time."""

    @abstractmethod
    def backward(
        self, dy: Tensor, dcells: Tensor | None = None
    ) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """The gradients of the gates, twice, and of the states before.

        `dcells` are the gradients of the second state; None where nothing depends on it.
        """

    def other_gradients(self) -> Gradients:
        """Per-example gradients of parameters other than the two weights and biases."""
        return iter(())


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

    def backward(
        self, dy: Tensor, dcells: Tensor | None = None
    ) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
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

    def backward(
        self, dy: Tensor, dcells: Tensor | None = None
    ) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        w = self.weights.hidden.detach()
        size = dy.shape[2]
        r, z, n = self.gates.chunk(3, 2)
        earlier = self.earlier
        # Everything that does not wait for later times, at once: of r and z, and of n.
        into = torch.empty_like(self.gates)
        dr, dz, dn = into.chunk(3, 2)
        _tanh_slopes(1 - z, n, out=dn)
        _sigmoid_slopes(dn * self.parts, r, out=dr)
        _sigmoid_slopes(earlier - n, z, out=dz)
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


class LSTMCell(Cell):
    """i, f, o = σ(·), g = tanh(·) of the gates; c ← f c + i g; h ← o tanh(c), or P o tanh(c)."""

    states = 2

    def forward(self, gates: Tensor) -> tuple[Tensor, ...]:
        h, c = self.before
        steps, size = len(gates), c.shape[1]
        w = self.weights.hidden.detach().T
        project = self.weights.projection
        self.gates = gates
        self.cells, self.outputs = (gates.new_empty(steps, *c.shape) for _ in range(2))
        hidden = self.outputs if project is None else gates.new_empty(steps, *h.shape)
        for t in range(steps):
            gate = gates[t].addmm_(h, w)
            gate[:, : 2 * size].sigmoid_()
            gate[:, 2 * size : 3 * size].tanh_()
            gate[:, 3 * size :].sigmoid_()
            i, f, g, o = gate.chunk(4, 1)
            c = torch.mul(f, c, out=self.cells[t]).addcmul_(i, g)
            torch.tanh(c, out=self.outputs[t]).mul_(o)
            if project is not None:
                torch.mm(self.outputs[t], project.detach().T, out=hidden[t])
            h = hidden[t]
        self.hiddens = hidden
        return hidden.clone(), self.cells.clone()

    def backward(
        self, dy: Tensor, dcells: Tensor | None = None
    ) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        w, project = self.weights.hidden.detach(), self.weights.projection
        size = self.cells.shape[2]
        i, f, g, o = self.gates.chunk(4, 2)
        # Everything that does not wait for later times, at once, in the place of the gates.
        tanhs, forgotten = self.cells.tanh(), f.clone()
        through = _tanh_slopes(o, tanhs, out=torch.empty_like(tanhs))
        _sigmoid_slopes(tanhs, o, out=o)
        entered = _sigmoid_slopes(g, i, out=tanhs)
        _tanh_slopes(i, g, out=g)
        i.copy_(entered)
        _sigmoid_slopes(torch.cat([self.before[1][None], self.cells[:-1]]), f, out=f)
        del tanhs, entered
        slopes = self.gates
        dgates = slopes.unflatten(2, (4, size))
        dh = torch.zeros_like(dy[0])
        dc = torch.zeros_like(self.cells[0])
        if project is not None:
            self.dprojected = torch.empty_like(dy)
        for t in range(len(dy) - 1, -1, -1):
            dh += dy[t]
            dout = dh
            if project is not None:
                self.dprojected[t] = dh
                dout = dh @ project.detach()
            if dcells is not None:
                dc += dcells[t]
            dc.addcmul_(dout, through[t])
            dgates[t, :, :3] *= dc[:, None]
            dgates[t, :, 3] *= dout
            dc *= forgotten[t]
            dh = torch.mm(slopes[t], w)
        return slopes, slopes, (dh, dc)

    def other_gradients(self) -> Gradients:
        if self.weights.projection is not None:
            yield OuterProductGradient(
                self.weights.projection,
                self.outputs.transpose(0, 1),
                self.dprojected.transpose(0, 1),
            )


def _sigmoid_slopes(factor: Tensor, y: Tensor, out: Tensor) -> Tensor:
    """factor · σ' where σ is y."""
    return torch.ops.aten.sigmoid_backward.grad_input(factor, y, grad_input=out)


def _tanh_slopes(factor: Tensor, y: Tensor, out: Tensor) -> Tensor:
    """factor · tanh' where tanh is y."""
    return torch.ops.aten.tanh_backward.grad_input(factor, y, grad_input=out)


CELLS: dict[str, type[Cell]] = {
    "RNN_TANH": TanhCell, "RNN_RELU": ReluCell, "GRU": GRUCell, "LSTM": LSTMCell,
}  # fmt: skip
"""By the mode of a module."""
