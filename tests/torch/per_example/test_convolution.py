"""Convolutions with every option: bounded sums equal the loop, kept or not, in one piece or not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from privagrad.torch.per_example import chunked
from privagrad.torch.per_example.layers import convolution
from privagrad.torch.per_example.layers.convolution import ConvolutionGradient
from tests.torch.reference import SCALES, assert_same, check, engine_sum, looped, squared


def build() -> dict[str, tuple[nn.Module, Tensor]]:
    torch.manual_seed(0)
    image, line, block = torch.randn(6, 4, 9, 8), torch.randn(6, 4, 11), torch.randn(6, 2, 5, 6, 4)
    options: dict[str, dict[str, Any]] = {
        "plain": {},
        "no-bias": {"bias": False},
        "stride-with-leftover": {"stride": 2},
        "uneven": {"stride": (3, 2), "padding": (1, 0), "dilation": (1, 2)},
        "same": {"padding": "same", "dilation": 2},
        "valid": {"padding": "valid"},
        "groups": {"groups": 2, "stride": 2, "padding": 2, "dilation": 2},
        "depthwise": {"groups": 4, "padding": 1},
        "reflect": {"padding": 1, "padding_mode": "reflect"},
        "circular": {"padding": (2, 1), "padding_mode": "circular", "groups": 2},
        "replicate": {"padding": "same", "padding_mode": "replicate"},
    }
    cases: dict[str, tuple[nn.Module, Tensor]] = {
        f"2d-{name}": (nn.Conv2d(4, 8, 3, **chosen), image) for name, chosen in options.items()
    }
    cases |= {
        "2d-same-even": (nn.Conv2d(4, 8, (2, 4), padding="same"), image),
        "2d-one-by-one": (nn.Conv2d(4, 8, 1), image),
        "2d-one-by-one-stride": (nn.Conv2d(4, 8, 1, stride=2, groups=2), image),
        "2d-deep": (nn.Conv2d(16, 16, 3, padding=1), torch.randn(6, 16, 2, 2)),
        "2d-channels-last": (
            nn.Conv2d(4, 8, 3, padding=1),
            image.to(memory_format=torch.channels_last),
        ),
        "1d": (nn.Conv1d(4, 6, 3, padding=1, stride=2, groups=2), line),
        "1d-circular": (nn.Conv1d(4, 6, 3, padding=2, padding_mode="circular"), line),
        "3d": (nn.Conv3d(2, 4, (2, 3, 2), padding=1, stride=(1, 2, 1), groups=2), block),
        "3d-same": (nn.Conv3d(2, 4, 3, padding="same"), block),
        "transposed-1d": (nn.ConvTranspose1d(4, 6, 3, stride=2, padding=1, groups=2), line),
        "transposed-2d": (
            nn.ConvTranspose2d(4, 6, 3, stride=2, output_padding=1, dilation=2),
            image,
        ),
        "transposed-3d": (nn.ConvTranspose3d(2, 4, 2, stride=2, bias=False), block),
        "frames": (Frames(), torch.randn(6, 3, 2, 5, 5)),
    }
    return cases


class Frames(nn.Module):
    """Several images an example."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=1, groups=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x.flatten(0, 1)).unflatten(0, x.shape[:2])


CASES = build()


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("kind", SCALES)
@pytest.mark.parametrize("name", CASES)
def test_bounded_sum_equals_the_loop(name: str, kind: str) -> None:
    check(*CASES[name], kind)


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("kind", SCALES)
@pytest.mark.parametrize("name", CASES)
def test_gradients_that_are_not_kept(name: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked, "_CACHED", 0)
    monkeypatch.setattr(ConvolutionGradient, "affordable", lambda self: False)
    check(*CASES[name], kind)


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("windows", [1, 400])
@pytest.mark.parametrize("short", [0, 16])
@pytest.mark.parametrize("name", CASES)
def test_images_larger_than_the_cache(
    name: str, short: int, windows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convolution, "_SHORT", short)
    monkeypatch.setattr(convolution, "_WINDOWS", windows)
    check(*CASES[name], "general")


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("name", CASES)
def test_windows_that_are_gathered_are_those_that_are_copied(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sums = []
    module, inputs = CASES[name]
    targets = torch.linspace(-1, 1, len(inputs))
    for short in (0, 16):
        monkeypatch.setattr(convolution, "_SHORT", short)
        sums.append(engine_sum(module, squared, inputs, targets, "general", 1.0))
    assert all(torch.equal(a, b) for a, b in zip(*sums, strict=True))


@pytest.mark.parametrize("room", [0, 110, 2**20])
@pytest.mark.parametrize("affordable", [True, False])
@pytest.mark.parametrize("kind", SCALES)
def test_examples_that_are_not_finite_count_as_zero(
    kind: str, affordable: bool, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunked, "_CACHED", room)
    monkeypatch.setattr(ConvolutionGradient, "affordable", lambda self: affordable)
    inputs = torch.randn(5, 3, 6, 6)
    module = nn.Conv2d(3, 4, 3)
    inputs[2, 0, 0, 0] = torch.inf
    targets = torch.linspace(-1, 1, 5)
    found = engine_sum(module, squared, inputs, targets, kind, 1.0)
    others = [0, 1, 3, 4]
    expected = looped(module, squared, inputs[others], targets[others], kind, 1.0)
    assert_same(found, [0.8 * e for e in expected])
