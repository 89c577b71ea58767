"""LinearCrossEntropy is nn.Linear and nn.CrossEntropyLoss, plain and private."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from privagrad.torch import LinearCrossEntropy, PrivacyEngine
from tests.torch.reference import SCALES, assert_same, looped, scales_of
from tests.torch.small import gradient_of, table


class Model(nn.Module):
    """Words to words; the loss inside or outside."""

    def __init__(self, bias: bool = True, inside: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 5)
        self.decoder = LinearCrossEntropy(5, 11, bias)
        self.inside = inside

    def forward(self, words: Tensor, targets: Tensor | None = None) -> Tensor:
        return self.decoder(torch.tanh(self.embedding(words)), targets)


def words(ignored: bool = False) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    x = torch.randint(0, 11, (6, 7), generator=generator)
    y = torch.randint(0, 11, (6, 7), generator=generator)
    if ignored:
        y[0, 3:] = -100
        y[2] = -100
        y[5, ::2] = -100
    return x, y


def outside(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), y.flatten())


@pytest.mark.parametrize("ignored", [False, True])
@pytest.mark.parametrize("bias", [True, False])
def test_plain_loss_and_gradients(bias: bool, ignored: bool) -> None:
    torch.manual_seed(0)
    one = Model(bias)
    other = copy.deepcopy(one)
    x, y = words(ignored)
    loss, expected = one(x, y), outside(other(x), y)
    assert torch.allclose(loss, expected, rtol=1e-6)
    (2 * loss).backward()
    (2 * expected).backward()
    found = [gradient_of(p) for p in one.parameters()]
    assert_same(found, [gradient_of(p) for p in other.parameters()], 1e-6)


def private_sum(
    module: nn.Module, kind: str, radius: float, ignored: bool, **options: Any
) -> list[Tensor]:
    x, y = words(ignored)
    module = copy.deepcopy(module)
    data = torch.utils.data.TensorDataset(x, y)
    private, optimizer, loader = PrivacyEngine().make_private(
        module=module,
        optimizer=torch.optim.SGD(module.parameters(), lr=0.0),
        data_loader=torch.utils.data.DataLoader(data, batch_size=6),
        noise_multiplier=0.0,
        max_grad_norm=radius,
        ellipsoid=scales_of(module, kind),
        poisson_sampling=False,
        **options,
    )
    for a, b in loader:
        optimizer.zero_grad()
        private(a, b).backward()
        optimizer.step()
    return [gradient_of(p) for p in module.parameters()]


@pytest.mark.parametrize("ignored", [False, True])
@pytest.mark.parametrize("kind", SCALES)
def test_bounded_sum_equals_the_loop(kind: str, ignored: bool) -> None:
    torch.manual_seed(0)
    module = Model()
    x, y = words(ignored)

    def loss(logits: Tensor, target: Tensor) -> Tensor:
        value = outside(logits, target)
        return torch.where(value.isnan(), 0.0 * logits.sum(), value)

    expected = looped(module, loss, x, y, kind, 0.5)
    assert_same(private_sum(module, kind, 0.5, ignored), expected)
    assert_same(private_sum(module, kind, 0.5, ignored, max_physical_batch_size=4), expected)


def made_private(module: nn.Module, noise_multiplier: float, radius: float) -> tuple[Any, Any]:
    private, optimizer, _ = PrivacyEngine().make_private(
        module=module,
        optimizer=torch.optim.SGD(module.parameters(), lr=0.0),
        data_loader=torch.utils.data.DataLoader(table(6), batch_size=6),
        noise_multiplier=noise_multiplier,
        max_grad_norm=radius,
        poisson_sampling=False,
    )
    return private, optimizer


def test_two_passes_before_a_backward_do_not_share_their_memory() -> None:
    torch.manual_seed(0)
    module = Model()
    x, y = words()
    expected = torch.autograd.grad(module(x, y) + module(y, x), list(module.parameters()))
    private, optimizer = made_private(module, 0.0, 1e9)
    for _ in range(2):
        optimizer.zero_grad()
        (private(x, y) + private(y, x)).backward()
        optimizer.step()
        assert_same([gradient_of(p) for p in module.parameters()], list(expected))


def test_huge_logits_do_not_overflow() -> None:
    layer = LinearCrossEntropy(2, 3, bias=False)
    nn.init.constant_(layer.weight, 1.0)
    x = torch.tensor([[1e4, 1e4], [-1e4, 3.0]])
    y = torch.tensor([0, 2])
    assert torch.allclose(layer(x, y), F.cross_entropy(layer(x), y))


def test_an_empty_batch_leaves_noise_alone() -> None:
    module = Model()
    private, optimizer = made_private(module, 1.0, 1.0)
    x, y = words()
    private(x[:0], y[:0]).backward()
    optimizer.step()
    gradients = torch.cat([gradient_of(p).flatten() for p in module.parameters()])
    assert bool(gradients.isfinite().all())
    assert bool((gradients != 0).all())
