"""Seeded trainings of small PyTorch models through the engine."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from privagrad.torch import AdaptiveSGD, PrivacyEngine

Recorded = dict[str, Any]
ROWS, CLASSES, WORDS = 64, 3, 11


class Reader(nn.Module):
    """Words in, a class out."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 4)
        self.memory = nn.LSTM(4, 5, batch_first=True)
        self.head = nn.Linear(5, CLASSES)

    def forward(self, words: Tensor) -> Tensor:
        states, _ = self.memory(self.words(words))
        scores: Tensor = self.head(states[:, -1])
        return scores


def mlp() -> tuple[nn.Module, Tensor]:
    model = nn.Sequential(
        nn.Linear(5, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, CLASSES)
    )  # fmt: skip
    return model, torch.randn(ROWS, 5)


def cnn() -> tuple[nn.Module, Tensor]:
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(), nn.Conv2d(4, 4, 3, stride=2),
        nn.ReLU(), nn.Flatten(), nn.Linear(16, CLASSES),
    )  # fmt: skip
    return model, torch.randn(ROWS, 2, 6, 6)


def lstm() -> tuple[nn.Module, Tensor]:
    return Reader(), torch.randint(0, WORDS, (ROWS, 6))


def adagrad(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(parameters, lr=0.1)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """One thread, and a random state of its own: both are put back."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            yield
    finally:
        torch.set_num_threads(threads)


def train(module: Any, optimizer: Any, loader: Any, epochs: int = 1) -> None:
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(module(x), y).backward()
            optimizer.step()


def trained(
    make: Callable[[], tuple[nn.Module, Tensor]],
    optimizer: Callable[[Any], torch.optim.Optimizer] = adagrad,
    epochs: int = 5,
    **options: Any,
) -> Recorded:
    with seeded(20):
        model, inputs = make()
        data = TensorDataset(inputs, torch.randint(0, CLASSES, (ROWS,)))
        engine = PrivacyEngine()
        settings = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "random_state": 21} | options
        private, steps, loader = engine.make_private(
            module=model,
            optimizer=optimizer(model.parameters()),
            data_loader=DataLoader(data, batch_size=16),
            **settings,
        )
        train(private, steps, loader, epochs)
        found = {name: summary(p) for name, p in model.named_parameters()}
    return {
        "parameters": found,
        "epsilon": engine.get_epsilon(1e-5),
        "text": str(engine.report(1e-5)),
    }


def with_epsilon() -> Recorded:
    with seeded(22):
        model, inputs = mlp()
        data = TensorDataset(inputs, torch.randint(0, CLASSES, (ROWS,)))
        engine = PrivacyEngine()
        private, steps, loader = engine.make_private_with_epsilon(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=DataLoader(data, batch_size=16),
            target_epsilon=3.0,
            target_delta=1e-5,
            epochs=2,
            max_grad_norm=1.0,
            random_state=23,
        )
        train(private, steps, loader, 2)
        found = {name: summary(p) for name, p in model.named_parameters()}
    return {
        "parameters": found,
        "noise_multiplier": steps.noise_multiplier,
        "epsilon": engine.get_epsilon(1e-5),
    }


def summary(tensor: Tensor) -> Recorded:
    values = tensor.detach().contiguous()
    return {
        "sha256": hashlib.sha256(values.numpy().tobytes()).hexdigest(),
        "sum": float(values.double().sum()),
        "norm": float(values.double().norm()),
        "first": values.flatten()[:5].tolist(),
    }


def runs() -> Iterator[tuple[str, Callable[[], Recorded]]]:
    for make in (mlp, cnn, lstm):
        for ellipsoid in (None, "pagan"):
            name = f"torch/{make.__name__}/{ellipsoid or 'ball'}"
            yield name, partial(trained, make, ellipsoid=ellipsoid)
    pasan = partial(AdaptiveSGD, lr=0.1)
    yield "torch/mlp/pasan", partial(trained, mlp, pasan, ellipsoid="pasan")
    own = partial(trained, mlp, epochs=1)
    yield "torch/mlp/own order", partial(own, poisson_sampling=False)
    yield "torch/mlp/parts", partial(own, max_physical_batch_size=5)
    yield "torch/mlp/no noise", partial(own, noise_multiplier=0.0)
    yield "torch/mlp/with epsilon", with_epsilon
