"""Modules that no layer knows: mapped over the examples, looped over them, or refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from privagrad.torch.guards.refusals import UnverifiedError
from tests.torch.reference import SCALES, check
from tests.torch.small import private, table


class Scaled(nn.Module):
    """A module with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.linspace(0.5, 1.5, 5))


class Branches(Scaled):
    """What is done to an example depends on its values, which vmap cannot take."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([row * self.gain if row.sum() > 0 else row - self.gain for row in x])


class Squeezed(Scaled):
    """One number an example, and none of its dimensions where the example is alone."""

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.gain).sum(1).squeeze()


class WithText(Scaled):
    """An output beside the tensors."""

    def forward(self, x: Tensor, *, factor: float = 1.0) -> tuple[Tensor, str]:
        return factor * x * self.gain, "text"


class Words(nn.Module):
    """An embedding whose padding is not trained, inside a module with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.gain = nn.Embedding(7, 4, padding_idx=0), nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.words(x) * self.gain


class Called(nn.Module):
    def __init__(self, part: nn.Module, **options: Any) -> None:
        super().__init__()
        self.part, self.options = part, options

    def forward(self, x: Tensor) -> Tensor:
        outputs = self.part(x, **self.options)
        return outputs[0] if isinstance(outputs, tuple) else outputs


class Column(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = Squeezed()

    def forward(self, x: Tensor) -> Tensor:
        return self.part(x).reshape(len(x), 1)


torch.manual_seed(0)
ROWS = torch.randn(6, 5)
CASES: dict[str, tuple[nn.Module, Tensor]] = {
    "branches": (Branches(), ROWS),
    "squeezed": (Column(), ROWS),
    "text": (Called(WithText(), factor=2.0), ROWS),
    "padding": (Words(), torch.tensor([[0, 1, 2], [0, 0, 3], [4, 5, 6], [6, 0, 1]])),
}


@pytest.mark.parametrize("kind", SCALES)
@pytest.mark.parametrize("name", CASES)
def test_bounded_sum_equals_the_loop(name: str, kind: str) -> None:
    check(*CASES[name], kind)


def test_the_padding_of_an_embedding_is_not_trained() -> None:
    module, data = Words(), TensorDataset(CASES["padding"][1], torch.zeros(4))
    run = private(module, data, 4)
    run.epoch(lambda out, y: out.square().sum((1, 2)).mean())
    words, gain = run.gradients[1], run.gradients[0]
    assert not words[0].any()
    assert words[1:].any(1).all()
    assert gain.any()


class Alone(Scaled):
    """It never sees the examples."""

    def forward(self, ones: Tensor) -> Tensor:
        return ones * self.gain


class Beside(nn.Module):
    def __init__(self, part: nn.Module, ones: Tensor) -> None:
        super().__init__()
        self.part, self.ones = part, ones

    def forward(self, x: Tensor) -> Tensor:
        return x + self.part(self.ones)


def test_inputs_that_are_the_same_for_every_batch_are_refused() -> None:
    run = private(Beside(Alone(), torch.ones(5)), table(32, 5, 5))
    with pytest.raises(ValueError, match="found inputs that are the same for every batch"):
        run.epoch()


class Constant(Scaled):
    """One output that belongs to the examples, and one that does not."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x * self.gain, self.gain.square()


class Penalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = Constant()

    def forward(self, x: Tensor) -> Tensor:
        y, penalty = self.part(x)
        return y + penalty.mean()


def test_outputs_that_are_the_same_for_all_examples_are_refused() -> None:
    run = private(Penalised(), table(32, 5, 5))
    with pytest.raises(UnverifiedError, match="found one that is the same for all"):
        run.epoch()
