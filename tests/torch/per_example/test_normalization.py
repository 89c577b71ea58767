"""Normalisations with every option: bounded sums equal the loop."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.torch.reference import SCALES, check, engine_sum, squared


class Swapped(nn.Module):
    """A layer that sees (tokens, examples, features)."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.transpose(0, 1)).transpose(0, 1)


def build() -> dict[str, tuple[nn.Module, Tensor]]:
    torch.manual_seed(0)
    rows, words = torch.randn(6, 8), torch.randn(6, 5, 8)
    line, image, block = torch.randn(6, 4, 7), torch.randn(6, 4, 5, 3), torch.randn(6, 4, 3, 2, 3)
    cases: dict[str, tuple[nn.Module, Tensor]] = {
        "layer": (nn.LayerNorm(8), rows),
        "layer-sequence": (nn.LayerNorm(8), words),
        "layer-two-dimensions": (nn.LayerNorm((5, 8)), words),
        "layer-no-shift": (nn.LayerNorm(8, bias=False), words),
        "layer-tokens-first": (Swapped(nn.LayerNorm(8)), words),
        "layer-square": (Swapped(nn.LayerNorm(8)), torch.randn(6, 6, 8)),
        "layer-fixed": (
            nn.Sequential(nn.LayerNorm(8, elementwise_affine=False), nn.Linear(8, 3)),
            words,
        ),
        "rms": (nn.RMSNorm(8), words),
        "rms-two-dimensions": (nn.RMSNorm((5, 8), eps=1e-3), words),
        "group": (nn.GroupNorm(2, 4), image),
        "group-rows": (nn.GroupNorm(2, 8), rows),
        "group-line": (nn.GroupNorm(4, 4), line),
        "group-block": (nn.GroupNorm(1, 4), block),
        "instance-1d": (nn.InstanceNorm1d(4, affine=True), line),
        "instance-2d": (nn.InstanceNorm2d(4, affine=True), image),
        "instance-3d": (nn.InstanceNorm3d(4, affine=True), block),
    }
    for module, _ in cases.values():
        for parameter in module.parameters():
            nn.init.normal_(parameter, 1.0, 0.3)
    return cases


CASES = build()


@pytest.mark.parametrize("kind", SCALES)
@pytest.mark.parametrize("name", CASES)
def test_bounded_sum_equals_the_loop(name: str, kind: str) -> None:
    check(*CASES[name], kind)


def test_inputs_without_examples_are_refused() -> None:
    with pytest.raises(ValueError, match="dimension of examples"):
        engine_sum(
            nn.InstanceNorm2d(4, affine=True),
            squared,
            torch.randn(4, 5, 5),
            torch.zeros(4),
            "ball",
            1.0,
        )
