"""Which example each row of a table belongs to that was computed from a module's output."""

from __future__ import annotations

import torch
from torch import Tensor

from privagrad.torch.guards.replay import Replay, run_again
from privagrad.torch.guards.trace import Leaf, Output, TraceNode

_CLOSE = 1e-3


def owners_of(steps: list[TraceNode], leaf: Output) -> Tensor | None:
    """The example that each row of the last of `steps` (rows, classes, ...) belongs to.

    Row r moves by J_r v with the outputs. Let v' be v times each example's number: of example i
    alone a row moves by i times as much.
    """
    assert leaf.layout is not None
    v = torch.randn(leaf.values.shape, generator=torch.Generator().manual_seed(0)).to(leaf.values)
    view = Replay(leaf.count, range(leaf.count))
    with torch._C.DisableTorchFunctionSubclass(), torch.enable_grad():
        root = leaf.values.clone().requires_grad_()
        values = {id(s): s.values for s in steps if isinstance(s, Leaf)} | {id(leaf): root}
        rows = run_again(steps, values, view)
        u = torch.zeros_like(rows, requires_grad=True)
        # J v is the derivative of uᵀ J in u.
        (back,) = torch.autograd.grad(rows, root, u, create_graph=True)
        numbers = leaf.layout.numbers(leaf.values.shape, leaf.count).to(v)
        moves = [
            torch.autograd.grad(back, u, tangent, retain_graph=True)[0].double()
            for tangent in (v, v * numbers)
        ]
    once, often = moves
    largest, place = once.abs().max(1, keepdim=True)
    owners = (often.gather(1, place) / once.gather(1, place)).squeeze(1).round()
    error = (often - owners.unsqueeze(1) * once).abs()
    if not bool((error <= _CLOSE * largest * owners.unsqueeze(1).clamp(min=1.0)).all()):
        return None
    known = (largest > 0).all() & (owners >= 0).all() & (owners < leaf.count).all()
    return owners.long() if bool(known) else None
