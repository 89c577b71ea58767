"""Steps that go only a part of their way, and starts from word frequencies."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from privagrad.torch import (
    AdaptiveSGD,
    PrivacyEngine,
    damp_steps,
    start_from_counts,
    start_from_noise,
    word_shares,
)

SHARES = torch.tensor([0.0, 0.25, 1.0])[:, None]
OPTIMIZERS: list[Callable[[Any], torch.optim.Optimizer]] = [
    lambda p: torch.optim.SGD(p, lr=0.5),
    lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.9),
    lambda p: torch.optim.Adagrad(p, lr=0.5),
    lambda p: torch.optim.Adam(p, lr=0.5),
    lambda p: AdaptiveSGD(p, lr=0.5),
]


def private_step(make: Callable[[Any], torch.optim.Optimizer], damped: bool) -> tuple[Any, ...]:
    """How far one private step goes, the gradient it released, and the account."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    before = [p.detach().clone() for p in model.parameters()]
    inner = make(model.parameters())
    if damped:
        damp_steps(inner, {model.get_parameter("weight"): SHARES})
    data = TensorDataset(torch.randn(30, 4), torch.randint(3, (30,)))
    engine = PrivacyEngine()
    module, optimizer, loader = engine.make_private(
        module=model,
        optimizer=inner,
        data_loader=DataLoader(data, 10),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        random_state=0,
    )
    inputs, targets = next(iter(loader))
    nn.functional.cross_entropy(module(inputs), targets).backward()
    optimizer.step()
    moved = [(p - b).detach() for p, b in zip(model.parameters(), before, strict=True)]
    return moved, [p.grad for p in model.parameters()], engine.get_epsilon(1e-5)


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_rows_move_by_their_share_of_a_private_step(
    make: Callable[[Any], torch.optim.Optimizer],
) -> None:
    whole, gradients, cost = private_step(make, damped=False)
    damped, same_gradients, same_cost = private_step(make, damped=True)
    torch.testing.assert_close(damped[0], SHARES * whole[0])
    torch.testing.assert_close(damped[1], whole[1])
    # Damping comes after the release: noise and price are as they were.
    torch.testing.assert_close(same_gradients, gradients, rtol=0, atol=0)
    assert same_cost == cost


def test_every_step_is_damped_from_where_the_last_one_ended() -> None:
    weight = nn.Parameter(torch.zeros(3, 1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    damp_steps(optimizer, {weight: SHARES})
    for _ in range(4):
        weight.grad = -torch.ones(3, 1)
        optimizer.step()
    assert weight.flatten().tolist() == [0.0, 1.0, 4.0]


@pytest.mark.parametrize(
    ("share", "message"),
    [
        (torch.tensor([0.5, 0.5, 1.1])[:, None], "between 0 and 1"),
        (torch.tensor([0.5, 0.5, float("nan")])[:, None], "between 0 and 1"),
        (torch.ones(3), "broadcast"),
        (torch.ones(2, 3, 4), "broadcast"),
    ],
)
def test_shares_that_cannot_be(share: Tensor, message: str) -> None:
    weight = nn.Parameter(torch.zeros(3, 4))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    with pytest.raises(ValueError, match=message):
        damp_steps(optimizer, {weight: share})
    with pytest.raises(ValueError, match="does not have"):
        damp_steps(optimizer, {nn.Parameter(torch.zeros(3, 4)): torch.ones(3, 4)})


def test_words_of_mean_frequency_take_half_steps() -> None:
    counts = torch.tensor([0, 10, 20, 50])
    assert word_shares(counts).tolist() == pytest.approx([0, 1 / 3, 1 / 2, 5 / 7])
    assert word_shares(counts, damping=0.5).tolist() == pytest.approx([0, 1 / 2, 2 / 3, 5 / 6])


def test_a_model_starts_with_the_frequencies_of_words() -> None:
    decoder = nn.Linear(5, 4)
    start_from_counts(decoder, torch.tensor([0, 1, 3, 12]))
    assert decoder.bias.softmax(0).tolist() == pytest.approx([1 / 20, 2 / 20, 4 / 20, 13 / 20])
    with pytest.raises(ValueError, match="each of 4 words"):
        start_from_counts(decoder, torch.ones(3))
    with pytest.raises(ValueError, match="biases"):
        start_from_counts(nn.Linear(5, 4, bias=False), torch.ones(4))


def started(make: Callable[[Any], torch.optim.Optimizer], reduction: str) -> tuple[Any, Tensor]:
    """A private optimizer that starts from half of 40 steps' noise, and one release of noise."""
    model = nn.Linear(50, 40)
    data = TensorDataset(torch.zeros(30, 50))
    private, optimizer, loader = PrivacyEngine().make_private(
        module=model, optimizer=make(model.parameters()), data_loader=DataLoader(data, 10),
        noise_multiplier=1.5, max_grad_norm=0.3, loss_reduction=reduction, random_state=0,
        ellipsoid=[torch.full((40, 50), 4.0), torch.ones(40)],
    )  # fmt: skip
    start_from_noise(optimizer, steps=40, share=0.5)
    ahead = copy.deepcopy(optimizer.original_optimizer.state_dict())
    (inputs,) = next(iter(loader))
    loss = 0 * private(inputs).sum()
    (loss / max(len(inputs), 1) if reduction == "mean" else loss).backward()
    optimizer.step()
    gradient = model.get_parameter("weight").grad
    assert gradient is not None
    return ahead, gradient.square().mean()


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_sums_of_squares_start_from_the_noise_to_come(reduction: str) -> None:
    """2000 squares of one release: within 20 % of their mean but for 1e-9."""
    ahead, square = started(lambda p: torch.optim.Adagrad(p, lr=1e-3), reduction)
    sums = ahead["state"]
    assert torch.allclose(sums[0]["sum"], 20 * square.expand(40, 50), rtol=0.2)
    assert torch.allclose(sums[1]["sum"], 20 * 4 * square.expand(40), rtol=0.2)
    ahead, square = started(lambda p: AdaptiveSGD(p, lr=1e-3), reduction)
    (group,) = ahead["param_groups"]
    assert group["initial"] == pytest.approx(20 * (2000 + 4 * 40) * float(square), rel=0.2)


def test_only_sums_of_squares_start_from_noise() -> None:
    with pytest.raises(TypeError, match="found SGD"):
        started(lambda p: torch.optim.SGD(p, lr=0.1), "mean")
