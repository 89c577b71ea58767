"""The dumbest correct loop over examples, and the engine's sum beside it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from privagrad.torch import PrivacyEngine
from tests.torch.small import gradient_of

SCALES = ("ball", "general", "rank-one")
Loss = Callable[[Any, Tensor], Tensor]


class Listed(Dataset[tuple[Tensor, ...]]):
    """The rows of some tensors, as tuples."""

    def __init__(self, *tensors: Tensor) -> None:
        self.tensors = tensors

    def __len__(self) -> int:
        return len(self.tensors[0])

    def __getitem__(self, row: int) -> tuple[Tensor, ...]:
        return tuple(tensor[row] for tensor in self.tensors)


def scales_of(module: nn.Module, kind: str) -> list[Tensor] | None:
    """Positive tensors like the trainable parameters."""
    generator = torch.Generator().manual_seed(7)
    if kind == "ball":
        return None
    scales = []
    for p in (p for p in module.parameters() if p.requires_grad):
        if kind == "general" or p.dim() < 2:
            scale = torch.rand(p.shape, generator=generator, dtype=torch.float64) + 0.1
        else:
            rows = torch.rand(p.shape[0], generator=generator, dtype=torch.float64) + 0.1
            rest = torch.rand(p[0].numel(), generator=generator, dtype=torch.float64) + 0.1
            scale = torch.outer(rows, rest).reshape(p.shape)
        scales.append(scale.to(p.dtype))
    return scales


def looped(
    module: nn.Module,
    loss: Loss,
    inputs: Tensor,
    targets: Tensor,
    kind: str,
    radius: float,
    example: Callable[[Tensor, int], Tensor] = lambda t, i: t[i : i + 1],
) -> list[Tensor]:
    """Σ_i g_i min(1, B/‖g_i‖_C) / b, one backward pass per example."""
    totals = [torch.zeros_like(p) for p in module.parameters() if p.requires_grad]
    for norm, gradients in one_by_one(module, loss, inputs, targets, kind, example):
        for total, g in zip(totals, gradients, strict=True):
            total += g * min(1.0, radius / max(norm, 1e-30))
    return [total / len(targets) for total in totals]


def one_by_one(
    module: nn.Module,
    loss: Loss,
    inputs: Tensor,
    targets: Tensor,
    kind: str,
    example: Callable[[Tensor, int], Tensor] = lambda t, i: t[i : i + 1],
) -> Iterator[tuple[float, list[Tensor]]]:
    """The norm in the ellipsoid and the gradients of each example."""
    parameters = [p for p in module.parameters() if p.requires_grad]
    scales = scales_of(module, kind) or [torch.ones_like(p) for p in parameters]
    for i in range(len(targets)):
        value = loss(module(example(inputs, i)), targets[i : i + 1])
        found = torch.autograd.grad(value, parameters, allow_unused=True)
        gradients = [
            torch.zeros_like(p) if g is None else g for p, g in zip(parameters, found, strict=True)
        ]
        squares = [(c * g * g).sum() for c, g in zip(scales, gradients, strict=True)]
        yield float(torch.stack(squares).sum().sqrt()), gradients


def engine_sum(
    module: nn.Module,
    loss: Loss,
    inputs: Tensor,
    targets: Tensor,
    kind: str,
    radius: float,
    **options: Any,
) -> list[Tensor]:
    """The same through the engine without noise: the gradients it hands to the optimizer."""
    module = copy.deepcopy(module)
    private, optimizer, loader = PrivacyEngine().make_private(
        module=module,
        optimizer=torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.0),
        data_loader=DataLoader(Listed(inputs, targets), batch_size=len(targets)),
        noise_multiplier=0.0,
        max_grad_norm=radius,
        ellipsoid=scales_of(module, kind),
        poisson_sampling=False,
        **options,
    )
    for x, y in loader:
        optimizer.zero_grad()
        loss(private(x), y).backward()
        optimizer.step()
    return [gradient_of(p) for p in module.parameters() if p.requires_grad]


def assert_same(found: list[Tensor], expected: list[Tensor], tolerance: float = 1e-5) -> None:
    """Equal to `tolerance`, relative to each tensor, or to the whole where the tensor is tiny.

    A tensor whose gradient is zero but for rounding may differ by one rounding of the whole.
    """
    size = float(torch.cat([e.double().flatten() for e in expected]).norm())
    assert size > 0
    for f, e in zip(found, expected, strict=True):
        error = float((f.double() - e.double()).norm())
        rounding = torch.finfo(e.dtype).eps * size
        allowed = max(tolerance * float(e.norm()), tolerance * 1e-3 * size, rounding)
        assert error <= allowed, (error, float(e.norm()))


def middle_radius(
    module: nn.Module, loss: Loss, inputs: Tensor, targets: Tensor, kind: str
) -> float:
    """A radius that bounds some examples and leaves others as they are."""
    norms = [norm for norm, _ in one_by_one(module, loss, inputs, targets, kind)]
    return sorted(norms)[len(norms) // 2]


def squared(output: Tensor, target: Tensor) -> Tensor:
    """A loss in which every output of an example counts, each with another weight."""
    output = output[0] if isinstance(output, tuple) else output
    weights = torch.linspace(0.5, 1.5, output[0].numel(), dtype=output.dtype)
    flat = output.reshape(output.shape[0], -1) * weights
    return (flat - target[:, None].to(output.dtype)).square().sum(1).mean()


def check(
    module: nn.Module,
    inputs: Tensor,
    kind: str,
    tolerance: float = 1e-5,
    loss: Loss | None = None,
    **options: Any,
) -> None:
    """The contract of every layer: the engine's bounded sum is that of the loop."""
    loss = loss or squared
    targets = torch.linspace(-1, 1, len(inputs))
    threads = torch.get_num_threads()
    # On tensors this small threads only wait for each other.
    torch.set_num_threads(1)
    try:
        radius = middle_radius(module, loss, inputs, targets, kind)
        expected = looped(module, loss, inputs, targets, kind, radius)
        found = engine_sum(module, loss, inputs, targets, kind, radius, **options)
    finally:
        torch.set_num_threads(threads)
    assert_same(found, expected, tolerance)
