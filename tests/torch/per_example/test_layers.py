"""Every layer: bounded sums equal the dumbest loop over examples."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from privagrad.torch.per_example import chunked
from privagrad.torch.per_example.gradients import FormedGradient, OuterProductGradient
from privagrad.torch.scales import Scale
from tests.torch.reference import (
    SCALES,
    assert_same,
    engine_sum,
    looped,
    middle_radius,
    squared,
)


def build() -> dict[str, tuple[nn.Module, Tensor]]:
    torch.manual_seed(0)
    words = torch.randint(0, 9, (6, 7))
    words[:, 3] = words[:, 1]  # repeated tokens
    cases: dict[str, tuple[nn.Module, Tensor]] = {
        "linear": (nn.Linear(5, 4), torch.randn(6, 5)),
        "linear-no-bias": (nn.Linear(5, 4, bias=False), torch.randn(6, 5)),
        "linear-sequence": (nn.Linear(5, 4), torch.randn(6, 7, 5)),
        "linear-long-sequence": (nn.Linear(5, 4), torch.randn(6, 30, 5)),
        "linear-wide-sequence": (nn.Linear(40, 30), torch.randn(6, 3, 40)),
        "linear-large-sequence": (nn.Linear(90, 80), torch.randn(6, 3, 90)),
        "linear-grid": (nn.Linear(5, 4), torch.randn(6, 2, 3, 5)),
        "embedding": (nn.Embedding(9, 4), words),
        "embedding-padding": (nn.Embedding(9, 4, padding_idx=int(words[0, 0])), words),
    }
    return cases


CASES = build()


@pytest.mark.parametrize("kind", SCALES)
@pytest.mark.parametrize("name", CASES)
def test_bounded_sum_equals_the_loop(name: str, kind: str) -> None:
    module, inputs = CASES[name]
    targets = torch.linspace(-1, 1, len(inputs))
    radius = middle_radius(module, squared, inputs, targets, kind)
    expected = looped(module, squared, inputs, targets, kind, radius)
    assert_same(engine_sum(module, squared, inputs, targets, kind, radius), expected)


WAYS = {
    "kept": (0, True),
    "not kept": (0, False),
    "in chunks": (50, False),
    "in other chunks": (10_000, True),
}
"""How many numbers of an example are formed together, and whether those of all may be kept."""


@pytest.fixture(params=list(WAYS))
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    room, affordable = WAYS[request.param]
    monkeypatch.setattr(chunked, "_CACHED", room)
    monkeypatch.setattr(FormedGradient, "affordable", lambda self: affordable)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("kind", SCALES)
@pytest.mark.parametrize("name", [name for name in CASES if "sequence" in name or "grid" in name])
def test_gradients_that_are_kept_and_not(name: str, kind: str) -> None:
    test_bounded_sum_equals_the_loop(name, kind)


class SeveralKinds(nn.Module):
    """Layers whose gradients are formed, beside others."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(9, 4)
        self.windows = nn.Conv1d(4, 5, 3, padding=1)
        self.states = nn.LSTM(5, 3, batch_first=True)
        self.out = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.windows(self.words(x).transpose(1, 2)).transpose(1, 2)
        out: Tensor = self.out(self.states(h)[0])
        return out


@pytest.mark.parametrize("affordable", [True, False])
@pytest.mark.parametrize("room", [0, 6, 60, 70, 110, 200, 2**20])
@pytest.mark.parametrize("kind", SCALES)
def test_any_part_of_a_model_in_one_pass(
    room: int, kind: str, affordable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunked, "_CACHED", room)
    monkeypatch.setattr(FormedGradient, "affordable", lambda self: affordable)
    torch.manual_seed(0)
    module, inputs = SeveralKinds(), torch.randint(0, 9, (7, 6))
    targets = torch.linspace(-1, 1, 7)
    radius = middle_radius(module, squared, inputs, targets, kind)
    expected = looped(module, squared, inputs, targets, kind, radius)
    assert_same(engine_sum(module, squared, inputs, targets, kind, radius), expected)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("kind", SCALES)
def test_examples_that_are_not_finite_count_as_zero(kind: str) -> None:
    module, inputs = CASES["linear-sequence"]
    targets, others = torch.linspace(-1, 1, 6), [0, 1, 3, 4, 5]
    bad = inputs.clone()
    bad[2, 3, 1] = torch.inf
    found = engine_sum(module, squared, bad, targets, kind, 1.0)
    expected = looped(module, squared, inputs[others], targets[others], kind, 1.0)
    assert_same(found, [5 / 6 * e for e in expected])


@pytest.mark.parametrize("affordable", [True, False])
def test_sums_of_squares_before_and_after_norms(
    affordable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FormedGradient, "affordable", lambda self: affordable)
    torch.manual_seed(0)
    a, d, weight = torch.randn(3, 4, 5), torch.randn(3, 4, 6), torch.zeros(6, 5)
    gradient, exact = OuterProductGradient(weight, a, d), torch.bmm(d.transpose(1, 2), a)
    for _ in range(2):
        assert torch.allclose(gradient.examples(0, 3), exact, atol=1e-5)
        assert torch.allclose(gradient.sum_of_squares(), exact.square().sum(0), rtol=1e-4)
        assert torch.allclose(gradient.row_sums_of_squares(), exact.square().sum((0, 2)), rtol=1e-4)
        gradient.squared_norms(Scale.ball(weight))


@pytest.mark.parametrize("name", CASES)
def test_accumulated_parts_equal_the_whole(name: str) -> None:
    module, inputs = CASES[name]
    targets = torch.linspace(-1, 1, len(inputs))
    radius = middle_radius(module, squared, inputs, targets, "general")
    whole = looped(module, squared, inputs, targets, "general", radius)
    parts = engine_sum(
        module, squared, inputs, targets, "general", radius, max_physical_batch_size=4
    )
    assert_same(parts, whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1, 4095, 4096, 4097, 30_000])
def test_norms_of_long_gradients_miss_nothing(size: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(size)
    g = torch.randn(3, size, 1, generator=generator, dtype=dtype)
    entries = torch.rand(size, 1, generator=generator, dtype=dtype) + 0.1
    expected = (g.double().square() * entries.double()).sum((1, 2))
    found = Scale(entries[:, 0], entries[0], entries).squared_norms(g.clone()).double()
    assert torch.allclose(found, expected, rtol=1e-6)
