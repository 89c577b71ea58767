"""y = x Wᵀ + b."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from privagrad.torch.per_example import cross_entropy
from privagrad.torch.per_example.cross_entropy import LinearCall
from privagrad.torch.per_example.gradients import (
    ALL,
    DenseGradient,
    Gradients,
    OuterProductGradient,
)
from privagrad.torch.per_example.layers._registry import layer
from privagrad.torch.per_example.tape import Tape


@layer(nn.Linear)
def linear(tape: Tape, module: nn.Linear, x: Tensor) -> Tensor:
    return projected(tape, module, x, module.weight, module.bias)


def projected(
    tape: Tape, module: nn.Module, x: Tensor, weight: Tensor, bias: Tensor | None, part: slice = ALL
) -> Tensor:
    """x Wᵀ + b with some rows of W and b."""
    y = F.linear(x, weight.detach()[part], None if bias is None else bias.detach()[part])
    examples, saved = tape.examples(module, x), tape.save(x)

    def per_example(gradient: Tensor) -> Gradients:
        d = examples(gradient, 1)
        if tape.trains(weight):
            yield OuterProductGradient(weight, examples(saved(), 1), d, part)
        if bias is not None and tape.trains(bias):
            yield DenseGradient(bias, d.sum(1), part)

    whole = part == ALL and y.is_contiguous() and y.numel() >= cross_entropy.SMALLEST
    call = LinearCall(tape, weight, bias, x, examples).returning(y) if whole else None
    return tape.tap(y, per_example, call)
