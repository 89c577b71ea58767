"""Losses that a module returns: of each example that of the example alone, or refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from privagrad.torch.guards.refusals import UnverifiedError
from tests.torch.reference import assert_same, engine_sum, looped
from tests.torch.small import Run, private

GENERATOR = torch.Generator().manual_seed(5)
WORDS = torch.randint(1, 9, (8, 6), generator=GENERATOR)
WORDS[1::2, 3:] = 0
WORDS[2, 1:] = 0
NUMBERS = torch.randn(8, 6, generator=GENERATOR)
WEIGHTS = torch.rand(9, generator=GENERATOR) + 0.5


class Language(nn.Module):
    """Words, and a loss of them; 0 is padding."""

    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.table, self.mix, self.out = nn.Embedding(9, 5), nn.Linear(5, 5), nn.Linear(5, 9)
        self.loss = loss

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.out(self.mix(self.table(x)).tanh())
        return self.loss(logits, x.masked_fill(x == 0, -100)), logits


class Numbers(nn.Module):
    """Numbers, and a loss of them."""

    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.out, self.loss = nn.Linear(6, 4), loss

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return self.loss(self.out(x), x[:, :4]), None


def flat(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.view(-1, 9), labels.view(-1))


def shifted(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].reshape(-1, 9), labels[:, 1:].reshape(-1))


def weighted(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.CrossEntropyLoss(WEIGHTS)(logits.transpose(1, 2), labels)


def smoothed(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.transpose(1, 2), labels, label_smoothing=0.2)


def likelihood(logits: Tensor, labels: Tensor) -> Tensor:
    return F.nll_loss(logits.log_softmax(2).transpose(1, 2), labels)


def two(logits: Tensor, labels: Tensor) -> Tensor:
    first, last = logits[:, 0], logits[:, -1]
    both = F.cross_entropy(first, labels[:, 0]) + 3 * F.mse_loss(last, torch.zeros_like(last))
    return both / 2


def signs(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(
        outputs, (targets > 0).float(), pos_weight=WEIGHTS[:4]
    )


def column(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.MSELoss()(outputs[:, :1].squeeze(), targets[:, :1].squeeze())


def probabilities(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets.softmax(1))


CASES: dict[str, tuple[nn.Module, Tensor]] = {
    **{f.__name__: (Language(f), WORDS) for f in (flat, shifted, weighted, smoothed, likelihood)},
    "two": (Language(two), WORDS),
    **{f.__name__: (Numbers(f), NUMBERS) for f in (signs, column, probabilities)},
    "l1": (Numbers(F.l1_loss), NUMBERS),
    "smooth l1": (Numbers(F.smooth_l1_loss), NUMBERS),
    "huber": (Numbers(nn.HuberLoss(delta=0.5)), NUMBERS),
}


def first(outputs: tuple[Tensor, ...], _: Tensor) -> Tensor:
    return outputs[0]


@pytest.mark.parametrize("name", CASES)
def test_bounded_sum_equals_the_loop(name: str) -> None:
    module, inputs = CASES[name]
    expected = looped(module, first, inputs, torch.zeros(8), "ball", 0.3)
    found = engine_sum(module, first, inputs, torch.zeros(8), "ball", 0.3)
    assert_same(found, expected)


def test_sums_equal_the_loop() -> None:
    def summed(logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits.view(-1, 9), labels.view(-1), reduction="sum")

    module = Language(summed)
    expected = looped(module, first, WORDS, torch.zeros(8), "ball", 0.3)
    found = engine_sum(module, first, WORDS, torch.zeros(8), "ball", 0.3, loss_reduction="sum")
    assert_same(found, [8 * e for e in expected])


def test_an_example_of_which_nothing_counts_adds_nothing() -> None:
    words = WORDS.clone()
    words[3] = 0
    module = Language(flat)
    expected = looped(module, first, words[words.any(1)], torch.zeros(7), "ball", 0.3)
    found = engine_sum(module, first, words, torch.zeros(8), "ball", 0.3)
    assert_same(found, [e * 7 / 8 for e in expected])


@pytest.mark.parametrize("name", CASES)
def test_the_value_is_that_of_pytorch(name: str) -> None:
    module, inputs = CASES[name]
    run = private(module, TensorDataset(inputs), 8)
    for (x,) in run.loader:
        value = run.module(x)[0].item()
        with torch.no_grad():
            assert value == pytest.approx(float(module(inputs)[0]), rel=1e-6)


def test_an_empty_batch_is_a_step_of_noise() -> None:
    run = private(Language(flat), TensorDataset(WORDS), 8, noise_multiplier=1.0)
    run.module(WORDS[:0])[0].backward()
    run.optimizer.step()
    assert all(bool(g.isfinite().all()) and float(g.std()) > 0 for g in run.gradients)


def train(run: Run) -> None:
    for (x,) in run.loader:
        run.optimizer.zero_grad()
        run.module(x)[0].backward()
        run.optimizer.step()


def refused(module: nn.Module, inputs: Tensor, match: str) -> None:
    run = private(module, TensorDataset(inputs), 4, noise_multiplier=1.0)
    with pytest.raises((UnverifiedError, ValueError), match=match):
        train(run)
    assert run.optimizer.releases == 0


def of_the_batch(logits: Tensor, labels: Tensor) -> Tensor:
    own = F.cross_entropy(logits.view(-1, 9), labels.view(-1), reduction="sum")
    return own / (labels != -100).sum()


def own_mean(logits: Tensor, labels: Tensor) -> Tensor:
    return -logits.log_softmax(2)[..., 0].mean()


def with_statistics(logits: Tensor, labels: Tensor) -> Tensor:
    return flat(logits - logits.mean((0, 1)), labels)


def with_penalty(logits: Tensor, labels: Tensor) -> Tensor:
    return flat(logits, labels) + logits.mean(0).square().sum()


def penalty_in_place(logits: Tensor, labels: Tensor) -> Tensor:
    loss = flat(logits, labels)
    loss += logits.mean(0).square().sum()
    return loss


def times_another(logits: Tensor, labels: Tensor) -> Tensor:
    return flat(logits, labels) * flat(logits, labels.roll(1, 1))


def times_its_value(logits: Tensor, labels: Tensor) -> Tensor:
    return flat(logits, labels) * flat(logits, labels.roll(1, 1)).detach()


def times_a_count(logits: Tensor, labels: Tensor) -> Tensor:
    return flat(logits, labels) * float((labels != -100).sum())


def other_labels(logits: Tensor, labels: Tensor) -> Tensor:
    return flat(logits, labels.roll(1, 0))


def logarithm(logits: Tensor, labels: Tensor) -> Tensor:
    return flat(logits, labels).log()


@pytest.mark.parametrize(
    "loss",
    [of_the_batch, own_mean, with_statistics, with_penalty, penalty_in_place, times_another,
     times_its_value, times_a_count, other_labels, logarithm],
)  # fmt: skip
def test_losses_that_mix_examples_are_refused(loss: Callable[[Tensor, Tensor], Tensor]) -> None:
    refused(Language(loss), WORDS, "Expected")


def test_a_sum_where_a_mean_is_expected_is_refused() -> None:
    def summed(logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits.view(-1, 9), labels.view(-1), reduction="sum")

    refused(Language(summed), WORDS, "the reduction of loss_reduction")


class Later(nn.Module):
    """A loss that from a certain pass on is divided by a count of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.language = Language(flat)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        loss, logits = self.language(x)
        return loss * torch.where((x == 0).all(1).any(), 2.0, 1.0), logits


def test_a_factor_that_changes_with_rare_data_is_refused() -> None:
    """At a pass that is not due for verification otherwise."""
    words = WORDS[:1].repeat(24, 1)
    words[10] = 0
    run = private(Later(), TensorDataset(words), 4)
    with pytest.raises((UnverifiedError, ValueError), match="Expected"):
        train(run)
    assert run.optimizer.releases == 2
