"""Bags of rows: bounded sums equal the loop."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.torch.reference import SCALES, check


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


def test_offsets_are_refused() -> None:
    class Listed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bag = nn.EmbeddingBag(9, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.bag(x.flatten(), torch.arange(len(x)) * x.shape[1])

    with pytest.raises(ValueError, match="cannot be told apart"):
        check(Listed(), torch.zeros(6, 3, dtype=torch.long), "ball")
