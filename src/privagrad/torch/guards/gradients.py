"""Per-example gradients as the engine has them, and as PyTorch has those of an example alone."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from privagrad.torch.guards.determinism import normals
from privagrad.torch.guards.observed import Layouts
from privagrad.torch.guards.structure import tensors_of
from privagrad.torch.per_example.gradients import PerExampleGradient
from privagrad.torch.per_example.layout import Layout
from privagrad.torch.per_example.tape import Tape
from privagrad.torch.scales import Scale, accurate, as_matrix

_RELATIVE, _OF_ALL = 1e-3, 1e-5
_COARSE = 100.0

Weight = Callable[[int, Tensor], Tensor]


def backward_from(tape: Tape, outputs: Any, count: int, layouts: Layouts) -> list[Weight | None]:
    """Send random gradients back from the outputs; those of each example alone, by output.

    None for outputs without a gradient, and for those that are not of examples.
    """
    weights: list[Weight | None] = []
    roots, drawn = [], []
    for place, leaf in enumerate(tensors_of(outputs)):
        layout = layouts.get(("output", place), Layout(0)) if leaf.dim() else None
        gradient = _uneven(normals(leaf.shape).to(leaf), layout, count)
        weight = _weight(leaf, gradient, layout, tape) if leaf.requires_grad else None
        weights.append(weight)
        if weight is not None:
            roots.append(leaf)
            drawn.append(gradient)
    grads = {p: p.grad for p in tape.parameters.values()}
    try:
        if roots:
            torch.autograd.backward(roots, drawn)
    finally:
        for p, grad in grads.items():
            p.grad = grad
    return weights


def _uneven(gradient: Tensor, layout: Layout | None, count: int) -> Tensor:
    """Gradients of very different sizes: what bounds them together treats them otherwise."""
    if layout is None or count < 2 or not gradient.numel():
        return gradient
    parts = layout.split(gradient, count).clone()
    spread = 1.0 if gradient.dtype in (torch.float16, torch.bfloat16) else 3.0
    sizes = 10.0 ** (spread * torch.linspace(-1, 1, count).roll(random.Random().randrange(count)))
    parts *= sizes.to(parts).reshape(-1, *[1] * (parts.dim() - 1))
    return layout.join(parts).contiguous()


def _weight(leaf: Tensor, drawn: Tensor, layout: Layout | None, tape: Tape) -> Weight | None:
    """What an example alone has of the gradient of an output."""
    count = tape.count
    if layout is not None:
        return lambda position, like: layout.split(drawn, count)[position].reshape(like.shape)
    for loss, reduction in tape.current.losses:
        if loss is leaf:
            share = drawn / count if reduction == "mean" else drawn
            return lambda position, like: share
    return None


def gradients_alone(value: Any, parameters: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    tensors = list(parameters.values())
    if not isinstance(value, Tensor):
        return {name: torch.zeros_like(p) for name, p in parameters.items()}
    found = torch.autograd.grad(value, tensors, allow_unused=True)
    return {
        name: torch.zeros_like(p) if g is None else _dense(g.detach())
        for (name, p), g in zip(parameters.items(), found, strict=True)
    }


def _dense(gradient: Tensor) -> Tensor:
    return gradient.to_dense() if gradient.is_sparse else gradient


@torch.no_grad()
def squares_of(gradients: list[PerExampleGradient]) -> list[float]:
    """The squared norm of each example's gradient of a parameter, as the engine has it."""
    scales = [Scale.ball(as_matrix(own.parameter)[own.part]) for own in gradients]
    squares = [
        own.squared_norms(scale).double() for own, scale in zip(gradients, scales, strict=True)
    ]
    return [max(float(square), 0.0) for square in torch.stack(squares).sum(0)]


@torch.no_grad()
def differences(
    gradients: dict[str, list[PerExampleGradient]],
    squares: dict[str, list[float]],
    expected: dict[str, Tensor],
    position: int,
) -> list[tuple[str, str]]:
    """The parameters whose gradient or norm the engine has wrong, with what was found."""
    exact = {name: as_matrix(accurate(g)).double() for name, g in expected.items()}
    sizes = {name: float(g.norm()) for name, g in exact.items()}
    whole = math.hypot(*sizes.values())
    if not math.isfinite(whole):
        return []
    wrong = []
    for name, g in exact.items():
        rough = _COARSE if expected[name].dtype in (torch.float16, torch.bfloat16) else 1.0
        tolerance = rough * (_RELATIVE * sizes[name] + _OF_ALL * whole)
        difference, norm = g, 0.0
        for own in gradients.get(name, []):
            difference[own.part] -= own.examples(position, position + 1)[0]
            norm = squares[name][position] ** 0.5
        off = float(difference.norm())
        if off > tolerance:
            share = f"{off / sizes[name]:.1%}" if sizes[name] else "all"
            wrong.append((name, f"off by {share} of it"))
        # A norm that is too large bounds more than it must; one too large for its type counts as
        # not finite, and nothing is released of it.
        elif norm < sizes[name] - 3 * tolerance:
            wrong.append((name, f"to have the norm {norm:.3g} instead of {sizes[name]:.3g}"))
    return wrong
