"""Second moments of inputs and of gradients of outputs, layer by layer, on public batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from privagrad._internal.progress import track
from privagrad.torch.kronecker_layers import padded
from privagrad.torch.moments import loss_of
from privagrad.torch.per_example.linear_cross_entropy import LinearCrossEntropy


@dataclass
class Factors:
    """Sums of a aᵀ and δ δᵀ at one layer, for A = E[a aᵀ] and S = E[δ δᵀ]; None: left out.

    a is the layer's input, or a window of it, with a 1 behind where the layer has a bias; δ is
    the gradient of the output there. `count` and `outputs` are how many there were.
    """

    inputs: Tensor | None
    gradients: Tensor | None
    count: int = 0
    outputs: int = 0
    path: str = ""

    def add_inputs(self, rows: Tensor) -> None:
        if self.inputs is not None:
            self.inputs += rows.T @ rows
        self.count += len(rows)

    def add_gradients(self, rows: Tensor) -> None:
        if self.gradients is not None:
            self.gradients += rows.T @ rows
        self.outputs += len(rows)

    def roots(self, power: float, damping: float) -> tuple[Tensor | None, Tensor | None]:
        """L = S^(-power/2) and R = A^(-power/2), damped."""
        right = self._root("inputs", self.inputs, self.count, power, damping)
        of_outputs = "gradients of the outputs"
        return self._root(of_outputs, self.gradients, self.outputs, power, damping), right

    def _root(
        self, what: str, total: Tensor | None, count: int, power: float, damping: float
    ) -> Tensor | None:
        if total is None:
            return None
        size = float(total.trace()) / max(count, 1)
        if not (size > 0 and math.isfinite(size)):
            raise ValueError(
                f"Expected {what} of layer {self.path} with a finite mean square above 0 on the "
                f"public batches, found {size:g}: check the public data and the loss, give "
                "layers after it weights other than 0, or freeze the layer with "
                "requires_grad_(False)."
            )
        values, vectors = torch.linalg.eigh(total / total.trace())
        # Rounding may leave eigenvalues below 0.
        powers = (values.clamp(min=0.0) / values[-1] + damping) ** (-power / 2)
        return (vectors * powers) @ vectors.T


def kronecker_factors(
    module: nn.Module,
    layers: Mapping[str, nn.Module],
    batches: Iterable[Any],
    criterion: Callable[[Any, Any], Tensor] | None,
    *,
    sides: str,
    largest: int,
    loss_reduction: str,
    batch_first: bool,
) -> dict[str, Factors]:
    """The factors of these `layers` of `module`, which is left with hooks and gradients."""
    found = {path: _empty(path, layer, sides, largest) for path, layer in layers.items()}
    examples = [1]
    for path, layer in layers.items():
        layer.register_forward_hook(_noting(found[path], examples), with_kwargs=True)
    for batch in track(batches, 0, "public factors"):
        if loss_reduction == "mean":
            # δ of an example's own loss.
            examples[0] = int(batch[0].shape[0 if batch_first else 1])
        loss_of(module, batch, criterion).backward()
    return found


def _empty(path: str, layer: nn.Module, sides: str, largest: int) -> Factors:
    weight = cast(Tensor, layer.weight)
    inputs = weight[0].numel() + (layer.bias is not None)
    without = sides == "inputs" or isinstance(layer, LinearCrossEntropy)
    outputs = math.inf if without else len(weight)

    def zeros(size: float) -> Tensor | None:
        if size > largest:
            return None
        return torch.zeros(int(size), int(size), dtype=torch.float64, device=weight.device)

    return Factors(zeros(inputs), zeros(outputs), path=path)


def _noting(factors: Factors, examples: list[int]) -> Callable[..., None]:
    def note(
        layer: nn.Module, inputs: tuple[Tensor, ...], named: dict[str, Tensor], output: Tensor
    ) -> None:
        given = inputs[0] if inputs else next(iter(named.values()))
        rows = _rows(layer, given.detach()).double()
        if layer.bias is not None:
            rows = F.pad(rows, (0, 1), value=1.0)
        factors.add_inputs(rows)
        if factors.gradients is not None and output.requires_grad:
            output.register_hook(lambda d: factors.add_gradients(_outputs(layer, d) * examples[0]))

    return note


def _rows(layer: nn.Module, x: Tensor) -> Tensor:
    """What the layer's weight is multiplied with, one row each."""
    if not isinstance(layer, nn.Conv2d):
        return x.reshape(-1, x.shape[-1])
    x = padded(x, list(layer._reversed_padding_repeated_twice), layer.padding_mode)
    windows = F.unfold(x, layer.kernel_size, layer.dilation, 0, layer.stride)
    return windows.movedim(-2, -1).reshape(-1, layer.weight[0].numel())


def _outputs(layer: nn.Module, gradient: Tensor) -> Tensor:
    d = gradient.detach().double()
    if isinstance(layer, nn.Conv2d):
        d = d.movedim(-3, -1)
    return d.reshape(-1, d.shape[-1])
