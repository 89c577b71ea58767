"""What training scripts do every day works, and means what it means without privacy."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.utils.data import TensorDataset

from privagrad.torch import PrivateModule
from tests.torch.reference import assert_same, engine_sum, looped
from tests.torch.small import private, table

Loss = Callable[[Any, Tensor], Tensor]
FEATURES, LABELS = table(8).tensors
WEIGHTS = torch.tensor([0.5, 1.0, 3.0])


def one_hot(labels: Tensor) -> Tensor:
    return F.one_hot(labels, 3).float()


def soft_labels(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out, one_hot(y) * 0.8 + 0.1)


def focal(out: Tensor, y: Tensor) -> Tensor:
    losses = F.cross_entropy(out, y, reduction="none")
    return ((1 - torch.exp(-losses)) ** 2 * losses).mean()


def written_in_place(out: Tensor, y: Tensor) -> Tensor:
    shifted = out - out.max(1, keepdim=True)[0].detach()
    shifted *= 0.5
    return F.cross_entropy(shifted, y)


MEANS: dict[str, Loss] = {
    "cross-entropy": nn.CrossEntropyLoss(),
    "label smoothing": nn.CrossEntropyLoss(label_smoothing=0.1),
    "soft labels": soft_labels,
    "log-likelihood": lambda out, y: nn.NLLLoss()(out.log_softmax(1), y),
    "squared error": lambda out, y: nn.MSELoss()(out, one_hot(y)),
    "absolute error": lambda out, y: nn.L1Loss()(out, one_hot(y)),
    "smooth absolute error": lambda out, y: nn.SmoothL1Loss()(out, one_hot(y)),
    "binary": lambda out, y: nn.BCEWithLogitsLoss(pos_weight=WEIGHTS)(out, one_hot(y)),
    "probabilities": lambda out, y: nn.BCELoss()(out.sigmoid(), one_hot(y)),
    "divergence": lambda out, y: F.kl_div(
        out.log_softmax(1), one_hot(y) * 0.7 + 0.1, reduction="batchmean"
    ),
    "counts": lambda out, y: nn.PoissonNLLLoss()(out, one_hot(y)),
    "margin": lambda out, y: F.multi_margin_loss(out, y),
    "scaled": lambda out, y: 7.0 * F.cross_entropy(out, y) / 3,
    "penalty on outputs": lambda out, y: F.cross_entropy(out, y) + 0.1 * out.square().mean(),
    "focal": focal,
    "in place": written_in_place,
}


@pytest.mark.parametrize("name", MEANS)
def test_means_over_examples_equal_the_loop(name: str) -> None:
    torch.manual_seed(0)
    module = nn.Linear(5, 3)
    expected = looped(module, MEANS[name], FEATURES, LABELS, "general", 0.5)
    assert_same(engine_sum(module, MEANS[name], FEATURES, LABELS, "general", 0.5), expected, 1e-4)


@pytest.mark.parametrize("loss", [F.cross_entropy, F.multi_margin_loss])
def test_sums_over_examples_equal_the_loop(loss: Callable[..., Tensor]) -> None:
    torch.manual_seed(0)
    module = nn.Linear(5, 3)

    def summed(out: Tensor, y: Tensor) -> Tensor:
        return loss(out, y, reduction="sum")

    expected = looped(module, summed, FEATURES, LABELS, "ball", 0.5)
    found = engine_sum(module, summed, FEATURES, LABELS, "ball", 0.5, loss_reduction="sum")
    assert_same(found, [8 * e for e in expected])


class Tagger(nn.Module):
    """A label for every word."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(9, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.words(x))


def flat(out: Tensor, y: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(out.reshape(-1, 3), y.reshape(-1), **options)


def log_likelihood(out: Tensor, y: Tensor) -> Tensor:
    return F.nll_loss((out / 2.0).log_softmax(-1).view(-1, 3), y.view(-1), ignore_index=-1)


PADDED: dict[str, Loss] = {
    "flat": lambda out, y: flat(out, y, ignore_index=-1),
    "transposed": lambda out, y: F.cross_entropy(out.transpose(1, 2), y, ignore_index=-1),
    "times first": lambda out, y: flat(out.transpose(0, 1), y.T, ignore_index=-1),
    "log-likelihood": log_likelihood,
    "shifted": lambda out, y: flat(out[:, :-1], y[:, 1:], ignore_index=-1),
    "masked": lambda out, y: F.cross_entropy(out[y >= 0], y[y >= 0]),
}


@pytest.mark.parametrize("name", PADDED)
def test_padding_of_an_example_is_its_own_affair(name: str) -> None:
    """An example's tokens are averaged over that example's tokens, not over the batch's."""
    torch.manual_seed(0)
    module, words = Tagger(), torch.randint(0, 9, (6, 5))
    labels = torch.randint(0, 3, (6, 5))
    labels[0, 3:] = labels[2, 2:] = labels[3, 4:] = -1
    expected = looped(module, PADDED[name], words, labels, "ball", 0.4)
    assert_same(engine_sum(module, PADDED[name], words, labels, "ball", 0.4), expected)


def test_paths_from_outputs_to_losses_may_change() -> None:
    """The same shapes, other rows: with as many words as sentences a table of owners is square."""
    torch.manual_seed(0)
    module, words = Tagger(), torch.randint(0, 9, (6, 6))
    labels = torch.randint(0, 3, (6, 6))
    labels[0, 3:] = labels[2, 2:] = -1

    def both(out: Tensor, y: Tensor) -> Tensor:
        return PADDED["flat"](out, y) + 2 * PADDED["times first"](out, y)

    def own(out: Tensor, y: Tensor) -> Tensor:
        return 3 * PADDED["flat"](out, y)

    expected = looped(module, own, words, labels, "ball", 0.4)
    assert_same(engine_sum(module, both, words, labels, "ball", 0.4), expected)


def test_masks_that_change_from_batch_to_batch() -> None:
    """As many words in both batches, of other sentences."""
    torch.manual_seed(0)
    module, words = Tagger(), torch.randint(0, 9, (6, 5))
    labels = torch.randint(0, 3, (6, 5))
    labels[0, 1:] = labels[4, 1:] = -1
    expected = engine_sum(module, PADDED["masked"], words[3:], labels[3:], "ball", 0.4)
    run = private(
        module, TensorDataset(words, labels), 3, max_grad_norm=0.4,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0),
    )  # fmt: skip
    run.epoch(PADDED["masked"])
    assert_same(run.gradients, expected)


def test_padding_is_shown_as_pytorch_shows_it() -> None:
    module, words = Tagger(), torch.randint(0, 9, (6, 5))
    labels = torch.randint(0, 3, (6, 5))
    labels[0, 1:] = -1
    expected = flat(module(words), labels, ignore_index=-1).item()
    run = private(module, TensorDataset(words, labels), 6)
    for x, y in run.loader:
        loss = flat(run.module(x), y, ignore_index=-1)
        assert loss.item() == pytest.approx(expected)
        loss.backward()


@pytest.mark.parametrize("loss", [F.cross_entropy, F.nll_loss])
def test_class_weights_are_factors(loss: Callable[..., Tensor]) -> None:
    torch.manual_seed(0)
    module = nn.Linear(5, 3)

    def factors(out: Tensor, y: Tensor) -> Tensor:
        return loss(out.log_softmax(1), y, weight=WEIGHTS, reduction="none").mean()

    def weighted(out: Tensor, y: Tensor) -> Tensor:
        return loss(out.log_softmax(1), y, weight=WEIGHTS)

    expected = looped(module, factors, FEATURES, LABELS, "ball", 1e3)
    assert_same(engine_sum(module, weighted, FEATURES, LABELS, "ball", 1e3), expected)


def test_class_weights_of_rows_that_cannot_be_followed_are_refused() -> None:
    run = private(Heads(tuple))
    x, y = next(iter(run.loader))
    first, second = run.module(x)
    with pytest.raises(RuntimeError, match="whose rows belong to one example each"):
        F.cross_entropy(torch.cat([first, second.expand(-1, 3)]), y.repeat(2), weight=WEIGHTS)


class Heads(nn.Module):
    def __init__(self, outputs: type) -> None:
        super().__init__()
        self.body, self.outputs = nn.Linear(5, 4), outputs
        self.first, self.second = nn.Linear(4, 3), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Any:
        hidden = self.body(x).tanh()
        names = ("first", "second")
        return self.outputs(
            zip(names, (self.first(hidden), self.second(hidden)), strict=True)
            if self.outputs is dict
            else (self.first(hidden), self.second(hidden))
        )


@pytest.mark.parametrize("outputs", [tuple, list, dict])
def test_heads(outputs: type) -> None:
    torch.manual_seed(0)
    module = Heads(outputs)

    def loss(out: Any, y: Tensor) -> Tensor:
        first, second = out.values() if outputs is dict else out
        return F.cross_entropy(first, y) + 0.3 * F.mse_loss(second[:, 0], y.float())

    expected = looped(module, loss, FEATURES, LABELS, "ball", 0.5)
    assert_same(engine_sum(module, loss, FEATURES, LABELS, "ball", 0.5), expected)


@pytest.mark.parametrize("moment", ["before forward", "before backward", "module", "after step"])
def test_gradients_may_be_cleared_at_any_moment(moment: str) -> None:
    torch.manual_seed(0)
    module = nn.Linear(5, 3)
    expected = looped(module, F.cross_entropy, FEATURES, LABELS, "ball", 0.5)
    run = private(
        copy.deepcopy(module), TensorDataset(FEATURES, LABELS), 8, max_grad_norm=0.5,
        optimizer=lambda p: torch.optim.SGD(p, lr=1.0),
    )  # fmt: skip
    for _ in range(2 if moment != "after step" else 1):
        run.module.load_state_dict(PrivateModule(module, run.module._tape).state_dict())
        for x, y in run.loader:
            if moment == "before forward":
                run.optimizer.zero_grad()
            loss = F.cross_entropy(run.module(x), y)
            if moment == "before backward":
                run.optimizer.zero_grad(set_to_none=False)
            if moment == "module":
                run.module.zero_grad()
            loss.backward()
            run.optimizer.step()
            assert_same(run.gradients, expected)
            if moment == "after step":
                run.optimizer.zero_grad()
                assert [p.grad for p in run.optimizer.params] == [None, None]


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "groups": lambda p: torch.optim.SGD([{"params": p[:1]}, {"params": p[1:], "lr": 0.5}], lr=0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_any_optimizer_steps_on_the_private_gradients(name: str) -> None:
    """Nothing is shrunk by a huge bound: the training is the one without privacy."""
    torch.manual_seed(0)
    plain = nn.Linear(5, 3)
    run = private(copy.deepcopy(plain), optimizer=OPTIMIZERS[name], max_grad_norm=1e6)
    optimizer = OPTIMIZERS[name](list(plain.parameters()))
    for _ in range(3):
        run.epoch()
        for x, y in torch.utils.data.DataLoader(table(), 16):
            optimizer.zero_grad()
            F.cross_entropy(plain(x), y).backward()
            optimizer.step()
    for a, b in zip(run.optimizer.params, plain.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-5)
    state = run.optimizer.state_dict()
    assert state.keys() == optimizer.state_dict().keys()
    run.optimizer.load_state_dict(optimizer.state_dict())
    run.epoch()


@pytest.mark.parametrize(
    "schedule",
    [
        lambda o: lr_scheduler.StepLR(o, 1, 0.5),
        lambda o: lr_scheduler.CosineAnnealingLR(o, 10),
        lambda o: lr_scheduler.OneCycleLR(o, max_lr=1.0, total_steps=20),
        lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
        lambda o: lr_scheduler.SequentialLR(
            o, [lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.5)], [2]
        ),
    ],
    ids=["step", "cosine", "one cycle", "lambda", "sequential"],
)
def test_schedules_set_the_rates(schedule: Callable[[Any], Any]) -> None:
    run = private(optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9))
    plain = torch.optim.SGD(nn.Linear(5, 3).parameters(), lr=0.1, momentum=0.9)
    ours, theirs = schedule(run.optimizer), schedule(plain)
    rates = set()
    for _ in range(4):
        run.epoch()
        plain.step()
        ours.step()
        theirs.step()
        rates.add(run.optimizer.param_groups[0]["lr"])
        assert ours.get_last_lr() == theirs.get_last_lr()
        assert run.optimizer.original_optimizer.param_groups[0]["lr"] == ours.get_last_lr()[0]
    assert len(rates) > 1


def test_a_closure() -> None:
    run = private(noise_multiplier=1.0)
    for x, y in run.loader:

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            run.optimizer.zero_grad()
            loss = F.cross_entropy(run.module(x), y)
            loss.backward()
            return loss

        assert run.optimizer.step(closure).item() > 0
    assert run.engine.accountant.events[0].count == 1


def test_evaluation_is_the_module_itself() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(5, 4), nn.Dropout(0.5), nn.Linear(4, 3))
    plain = copy.deepcopy(module).eval()
    run = private(module)
    with torch.no_grad():
        assert type(run.module(FEATURES)) is Tensor
    run.module.eval()
    assert torch.equal(run.module(FEATURES), plain(FEATURES))
    run.module(FEATURES).sum().backward()
    with torch.inference_mode():
        assert torch.equal(run.module(FEATURES), plain(FEATURES))
    run.module.train()
    run.epoch()


def test_metrics_of_training_outputs() -> None:
    run = private()
    kept, total = [], torch.zeros(())
    for x, y in run.loader:
        run.optimizer.zero_grad()
        out = run.module(x)
        loss = F.cross_entropy(out, y)
        accuracy = (out.argmax(1) == y).float().mean().item()
        loss.backward()
        run.optimizer.step()
        kept.append(out.detach().softmax(1).numpy())
        total += loss.detach()
        assert 0 <= accuracy <= 1
        assert f"{loss:.3f}" == f"{loss.item():.3f}"
        assert repr(loss).startswith("tensor(")
    assert len(kept) == 4
    assert float(total) > 0


def test_copies_of_outputs_are_plain_tensors() -> None:
    run = private()
    for x, _ in run.loader:
        out = run.module(x)
        file = io.BytesIO()
        torch.save(out, file)
        file.seek(0)
        for twin in (
            pickle.loads(pickle.dumps(out.detach())),
            torch.load(file, weights_only=True),
        ):
            assert type(twin) is Tensor
            assert torch.equal(twin, out)


def test_attributes_are_the_modules() -> None:
    module = nn.Sequential(nn.Linear(5, 3))
    vars(module)["version"] = 3
    run = private(module)
    assert run.module.version == 3
    with pytest.raises(AttributeError):
        _ = run.module.missing


def test_states_go_round() -> None:
    run = private()
    run.epoch()
    state = run.module.state_dict()
    fresh = private()
    fresh.module.load_state_dict(state)
    assert torch.equal(*(m.get_parameter("_module.weight") for m in (fresh.module, run.module)))
    plain = nn.Linear(5, 3)
    plain.load_state_dict(run.module._module.state_dict())
    plain.load_state_dict({name.removeprefix("_module."): t for name, t in state.items()})


def test_copies_are_plain_modules() -> None:
    run = private(noise_multiplier=1.0)
    twin = copy.deepcopy(run.module)
    loss = F.cross_entropy(twin(FEATURES), LABELS)
    assert type(loss) is Tensor
    loss.backward()
    assert all(p.grad is not None for p in twin.parameters())
    assert all(p.grad is None for p in run.optimizer.params)
    run.epoch()
    assert not torch.equal(*(m.get_parameter("_module.weight") for m in (twin, run.module)))


def test_frozen_parts_stay() -> None:
    frozen = nn.Linear(5, 4).requires_grad_(False)
    before = frozen.weight.clone()
    run = private(nn.Sequential(frozen, nn.Linear(4, 3)), noise_multiplier=1.0)
    run.epoch()
    assert torch.equal(frozen.weight, before)
    assert frozen.weight.grad is None


def test_one_hot_targets_written_into_zeros() -> None:
    def own(out: Tensor, y: Tensor) -> Tensor:
        return (out - torch.zeros(len(y), 3).scatter_(1, y[:, None], 1.0)).square().mean()

    torch.manual_seed(0)
    module, x, y = nn.Linear(5, 3), torch.randn(12, 5), torch.randint(0, 3, (12,))
    expected = looped(module, own, x, y, "ball", 0.4)
    assert_same(engine_sum(module, own, x, y, "ball", 0.4), expected)


def test_losses_of_detached_outputs_may_be_looked_at() -> None:
    def own(out: Tensor, y: Tensor) -> Tensor:
        assert float(F.cross_entropy(out.detach(), y)) > 0
        return F.cross_entropy(out, y)

    torch.manual_seed(0)
    module, x, y = nn.Linear(5, 3), torch.randn(12, 5), torch.randint(0, 3, (12,))
    expected = looped(module, own, x, y, "ball", 0.4)
    assert_same(engine_sum(module, own, x, y, "ball", 0.4), expected)
