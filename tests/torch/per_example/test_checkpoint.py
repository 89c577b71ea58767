"""Activation checkpoints: as the loop over examples; whatever mixes examples in them is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

from tests.torch.reference import SCALES, check
from tests.torch.small import private

SEQUENCES = torch.randn(7, 6, 4, generator=torch.Generator().manual_seed(1))
CLASSES = torch.zeros(7).long()


class Scale(nn.Module):
    """A layer that the engine does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class Checkpointed(nn.Module):
    """A block in a checkpoint, one or more times, and a recurrent layer in another one."""

    def __init__(self, block: nn.Module, times: int = 1, reentrant: bool = False) -> None:
        super().__init__()
        self.first, self.block, self.times = nn.Linear(4, 4), block, times
        self.lstm, self.out = nn.LSTM(4, 4, batch_first=True), nn.Linear(4, 2)
        self.reentrant = reentrant

    def run(self, function: Any, x: Tensor) -> Tensor:
        result: Tensor = checkpoint(function, x, use_reentrant=self.reentrant)
        return result

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        for _ in range(self.times):
            h = self.run(lambda y: self.block(y).tanh(), h)
        return self.out(self.run(lambda y: self.lstm(y.sin())[0], h)[:, -1])


def linears() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4), nn.LayerNorm(4))


@pytest.mark.parametrize("scale", SCALES)
def test_bounded_sum_equals_the_loop(scale: str) -> None:
    check(Checkpointed(linears()), SEQUENCES, scale)
    check(Checkpointed(linears(), 2), SEQUENCES, scale)
    check(Checkpointed(nn.Sequential(Scale(), nn.Linear(4, 4))), SEQUENCES, scale)


def test_times_first_with_a_layer_that_is_not_known() -> None:
    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = Scale()

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.scale(x.transpose(0, 1))
            return y.transpose(0, 1)

    check(Checkpointed(Turned()), SEQUENCES, "general")
    check(Checkpointed(Turned()), SEQUENCES[:6], "general")


def test_a_layer_that_is_not_known_called_twice_is_refused() -> None:
    refused(Checkpointed(Scale(), 2), "called once")


def test_reentrant_checkpoints_are_refused() -> None:
    refused(Checkpointed(linears(), reentrant=True), "use_reentrant=False")


def test_dropout_draws_the_same_numbers_again() -> None:
    block = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    run = private(Checkpointed(block), TensorDataset(SEQUENCES, CLASSES), 7)
    run.epoch(F.cross_entropy)
    assert run.optimizer.releases == 1


class Centred(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


class CentredAgain(nn.Module):
    """Mixes examples only when it is computed again in a backward pass."""

    def forward(self, x: Tensor) -> Tensor:
        again = torch._C._current_graph_task_id() != -1
        return x - x.mean(0) if again else x - 0.0


@pytest.mark.parametrize("mixing", [Centred(), CentredAgain()])
def test_a_statistic_of_the_batch_is_refused(mixing: nn.Module) -> None:
    refused(Checkpointed(nn.Sequential(nn.Linear(4, 4), mixing, nn.Linear(4, 4))), "Expected")


def refused(module: nn.Module, match: str) -> None:
    run = private(module, TensorDataset(SEQUENCES, CLASSES), 7, noise_multiplier=1.0)
    with pytest.raises((RuntimeError, ValueError), match=match):
        run.epoch(F.cross_entropy)
    assert run.optimizer.releases == 0
