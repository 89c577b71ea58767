"""LSTMCell, GRUCell, RNNCell in loops of one's own: exact, and mixing is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from tests.torch.reference import SCALES, check
from tests.torch.small import private

SEQUENCES = torch.randn(7, 6, 4, generator=torch.Generator().manual_seed(1))
CELLS: dict[str, tuple[Any, dict[str, Any]]] = {
    "lstm": (nn.LSTMCell, {}),
    "lstm without bias": (nn.LSTMCell, {"bias": False}),
    "gru": (nn.GRUCell, {}),
    "gru without bias": (nn.GRUCell, {"bias": False}),
    "rnn": (nn.RNNCell, {}),
    "rnn with relu": (nn.RNNCell, {"nonlinearity": "relu"}),
}


class Loop(nn.Module):
    """A cell over all times, from zeros or from a state of the first input."""

    def __init__(self, name: str, given: bool = False, mixes: bool = False) -> None:
        super().__init__()
        kind, options = CELLS[name]
        self.cell, self.start, self.out = kind(4, 3, **options), nn.Linear(4, 3), nn.Linear(3, 2)
        self.given, self.mixes = given, mixes

    def forward(self, x: Tensor) -> Tensor:
        state: Any = None
        if self.given:
            h = self.start(x[:, 0]).tanh()
            state = (h, h * 0.5) if isinstance(self.cell, nn.LSTMCell) else h
        for t in range(x.shape[1]):
            state = self.cell(x[:, t], state)
            if self.mixes and t == 2:
                state = tuple(s - s.mean(0) for s in state)
        return self.out(state[0] if isinstance(state, tuple) else state)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("name", CELLS)
def test_bounded_sum_equals_the_loop(name: str, given: bool, scale: str) -> None:
    check(Loop(name, given), SEQUENCES, scale)


@pytest.mark.parametrize("name", ["lstm", "gru", "rnn"])
def test_outputs_are_pytorchs(name: str) -> None:
    torch.manual_seed(0)
    module = Loop(name, given=True)
    expected = module(SEQUENCES).detach()
    run = private(module, TensorDataset(SEQUENCES), 7)
    assert torch.allclose(run.module(SEQUENCES).detach(), expected, atol=1e-6)


def test_a_statistic_of_the_batch_between_times_is_refused() -> None:
    data = TensorDataset(SEQUENCES, torch.zeros(7).long())
    run = private(Loop("lstm", mixes=True), data, 7)
    with pytest.raises(ValueError, match="treats every example by itself"):
        run.epoch(F.cross_entropy)


def test_a_single_example_without_its_dimension_is_refused() -> None:
    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.GRUCell(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return torch.stack([self.cell(row) for row in x])

    run = private(Flat(), TensorDataset(SEQUENCES[:, 0], torch.zeros(7).long()), 7)
    with pytest.raises((RuntimeError, ValueError), match="give them a dimension of examples"):
        run.epoch(F.cross_entropy)
