"""Bags of rows: bounded sums equal the loop."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from tests.torch.reference import SCALES, check
from tests.torch.small import private


class Weighted(nn.Module):
    """Tokens with weights of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(9, 4, mode="sum", padding_idx=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.bag(x, per_sample_weights=(1.0 + x.to(self.bag.weight.dtype)) / 5)


class Several(nn.Module):
    """Two bags an example."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(9, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.bag(x.reshape(-1, x.shape[1] // 2)).reshape(len(x), -1)


def build() -> dict[str, tuple[nn.Module, Tensor]]:
    torch.manual_seed(0)
    words = torch.randint(0, 9, (6, 8))
    words[:, 3] = words[:, 1]
    words[0] = 2
    cases: dict[str, tuple[nn.Module, Tensor]] = {
        mode + ("-padding" if padding else ""): (
            nn.EmbeddingBag(9, 4, mode=mode, padding_idx=padding),
            words,
        )
        for mode in ("sum", "mean", "max")
        for padding in (None, 2)
    }
    return cases | {"weights": (Weighted(), words), "several": (Several(), words)}


CASES = build()


@pytest.mark.parametrize("kind", SCALES)
@pytest.mark.parametrize("name", CASES)
def test_bounded_sum_equals_the_loop(name: str, kind: str) -> None:
    check(*CASES[name], kind)


class Listed(nn.Module):
    """All tokens one after the other, in bags that begin at offsets."""

    def __init__(self, starts: list[int], mode: str = "mean", ends: bool = False) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(9, 4, mode=mode, include_last_offset=ends, padding_idx=0)
        self.starts, self.ends = torch.tensor(starts), ends

    def forward(self, x: Tensor) -> Tensor:
        offsets = (torch.arange(len(x))[:, None] * x.shape[1] + self.starts).flatten()
        if self.ends:
            offsets = torch.cat([offsets, torch.tensor([x.numel()])])
        return self.bag(x.flatten(), offsets).reshape(len(x), len(self.starts), 4).flatten(1)


@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize("starts", [[0], [0, 2], [0, 1, 1, 4]])
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_offsets(mode: str, starts: list[int], ends: bool) -> None:
    words = torch.randint(0, 9, (7, 5), generator=torch.Generator().manual_seed(1))
    check(Listed(starts, mode, ends), words, "general")


class Uneven(nn.Module):
    """Bags that begin where the data say."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(9, 4)

    def forward(self, x: Tensor) -> Tensor:
        starts = torch.arange(len(x)) * x.shape[1]
        return self.bag(x.flatten(), starts + (x[:, 0] == 8))


def test_offsets_of_the_data_are_refused() -> None:
    words = torch.arange(21).reshape(7, 3) % 8
    words[5, 0] = 8
    run = private(Uneven(), TensorDataset(words, torch.zeros(7)), 7)
    with pytest.raises((RuntimeError, ValueError), match="cannot be told apart"):
        run.epoch(lambda y, _: y.square().sum(1).mean())


def test_a_list_of_tokens_is_refused() -> None:
    class All(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bag = nn.EmbeddingBag(9, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.bag(x.flatten(), torch.tensor([0, 3]))

    run = private(All(), TensorDataset(torch.ones(7, 5).long(), torch.zeros(7)), 7)
    with pytest.raises((RuntimeError, ValueError), match="cannot be told apart"):
        run.epoch(lambda y, _: y.square().sum(1).mean())
