"""Whether a loss keeps examples apart, and which example each of its rows belongs to."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from privagrad.torch.notes import Note, Output, run_again

_CLOSE = 1e-3
_LARGE = 2**22
_CHANGES = (0.0, 1.0, 10.0)
"""Noise on other examples' outputs, over their size: a hinge shows only where it bends."""


def refuse_mixing(steps: list[Note], leaves: list[Output]) -> bool:
    """Refuse a loss whose gradient in one example's outputs depends on other examples'.

    Returns whether that could be told: a loss that cannot be computed again is let through.
    """
    with torch.random.fork_rng():
        seed = torch.initial_seed() % 2**63
        before = _gradients(steps, leaves, [leaf.values for leaf in leaves], seed)
        if before is None or not all(bool(g.isfinite().all()) for g in before):
            return False
        trials = list(itertools.product(_halves(leaves[0].count), _CHANGES))
        if sum(leaf.values.numel() for leaf in leaves) > _LARGE:
            trials = trials[1:2]
        for kept, change in trials:
            others = [leaf.changed(~kept, change) for leaf in leaves]
            after = _gradients(steps, leaves, others, seed)
            for leaf, a, b in zip(leaves, before, after or before, strict=True):
                if not _close(leaf.rows(a)[kept], leaf.rows(b)[kept]):
                    raise RuntimeError(
                        "Expected a loss that is a sum or a mean over examples, found one in "
                        "which the gradient of an example changes with the outputs of others: "
                        "no bound on one example's influence would hold. Compute the loss of "
                        "each example by itself and take the mean or the sum."
                    )
    return True


def owners_of(steps: list[Note], leaf: Output) -> Tensor | None:
    """The example that each row of the last of `steps` (rows, classes, ...) belongs to.

    Row r moves by J_r v with the outputs. Let v' be v times each example's number: of example i
    alone a row moves by i times as much.
    """
    v = torch.randn(leaf.values.shape, generator=torch.Generator().manual_seed(0)).to(leaf.values)
    with torch._C.DisableTorchFunctionSubclass(), torch.enable_grad():
        root = leaf.values.clone().requires_grad_()
        rows = run_again(steps, {id(leaf): root})
        u = torch.zeros_like(rows, requires_grad=True)
        # J v is the derivative of uᵀ J in u.
        (back,) = torch.autograd.grad(rows, root, u, create_graph=True)
        moves = [
            torch.autograd.grad(back, u, tangent, retain_graph=True)[0].double()
            for tangent in (v, v * leaf.numbers(leaf.values.shape).to(v))
        ]
    once, often = moves
    largest, place = once.abs().max(1, keepdim=True)
    owners = (often.gather(1, place) / once.gather(1, place)).squeeze(1).round()
    error = (often - owners.unsqueeze(1) * once).abs()
    if not bool((error <= _CLOSE * largest * owners.unsqueeze(1).clamp(min=1.0)).all()):
        return None
    known = (largest > 0).all() & (owners >= 0).all() & (owners < leaf.count).all()
    return owners.long() if bool(known) else None


def _gradients(
    steps: list[Note], leaves: list[Output], values: list[Tensor], seed: int
) -> list[Tensor] | None:
    """Of the loss in the module's outputs; None where it cannot be computed again."""
    torch.manual_seed(seed)
    with torch._C.DisableTorchFunctionSubclass(), torch.enable_grad():
        roots = [value.clone().requires_grad_() for value in values]
        try:
            again = run_again(steps, {id(a): b for a, b in zip(leaves, roots, strict=True)})
            found = torch.autograd.grad(again, roots, allow_unused=True)
        except RuntimeError:
            # Such as probabilities that noise has made larger than 1.
            return None
    return [torch.zeros_like(r) if g is None else g for r, g in zip(roots, found, strict=True)]


def _halves(count: int) -> Iterator[Tensor]:
    """Halves of the examples: what depends on any other example differs for one of them."""
    numbers = torch.arange(count)
    for half in (numbers < count // 2, numbers % 2 == 0):
        yield half
        yield ~half


def _close(a: Tensor, b: Tensor) -> bool:
    return not a.numel() or bool(((a - b).abs() <= _CLOSE * a.abs().max() + 1e-12).all())
