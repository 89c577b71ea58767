"""Small private trainings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset, TensorDataset

from privagrad.torch import PrivacyEngine, PrivateModule, PrivateOptimizer


class Run(NamedTuple):
    engine: PrivacyEngine
    module: PrivateModule
    optimizer: PrivateOptimizer
    loader: DataLoader[Any]

    def step(self, loss: Callable[[Any, Tensor], Tensor], x: Tensor, y: Tensor) -> None:
        self.optimizer.zero_grad()
        loss(self.module(x), y).backward()
        self.optimizer.step()

    def epoch(self, loss: Callable[[Any, Tensor], Tensor] = F.cross_entropy) -> None:
        for x, y in self.loader:
            self.step(loss, x, y)

    @property
    def gradients(self) -> list[Tensor]:
        return [gradient_of(p) for p in self.optimizer.params]


def gradient_of(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def table(rows: int = 64, features: int = 5, classes: int = 3) -> TensorDataset:
    generator = torch.Generator().manual_seed(rows)
    inputs = torch.randn(rows, features, generator=generator)
    return TensorDataset(inputs, torch.randint(0, classes, (rows,), generator=generator))


def sgd(parameters: Any) -> Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def private(
    module: nn.Module | None = None,
    data: Dataset[Any] | None = None,
    batch_size: int = 16,
    optimizer: Callable[[Any], Optimizer] = sgd,
    engine: PrivacyEngine | None = None,
    **options: Any,
) -> Run:
    """A private training: the data loader's own order and no noise, unless told otherwise."""
    module = module or nn.Linear(5, 3)
    engine = engine or PrivacyEngine()
    options = {
        "noise_multiplier": 0.0,
        "max_grad_norm": 1.0,
        "poisson_sampling": False,
    } | options
    return Run(
        engine,
        *engine.make_private(
            module=module,
            optimizer=optimizer([p for p in module.parameters() if p.requires_grad]),
            data_loader=DataLoader(data or table(), batch_size=batch_size),
            **options,
        ),
    )
