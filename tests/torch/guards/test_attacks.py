"""Trainings in which it is hard to see that examples see each other: exact, or refused."""

from __future__ import annotations

import copy
import math
import random
from collections import UserDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, Dataset, default_collate

from privagrad.torch import PerExampleLoss, PrivacyEngine, public
from tests.torch.guards.fuzz_modules import Apply
from tests.torch.guards.fuzz_runs import Training, verdict
from tests.torch.small import private, sgd, table

Memory = dict[str, Any]
Own = Callable[[Any, Any, Memory], Tensor]
GENERATOR = torch.Generator().manual_seed(3)
X = torch.randn(64, 5, generator=GENERATOR)
Y = torch.randint(0, 3, (64,), generator=GENERATOR)
W = torch.rand(64, generator=GENERATOR) + 0.5
FOURS = [list(range(start, start + 4)) for start in range(0, 16, 4)]
MANY = [list(range(32)), list(range(16, 48))]


@dataclass
class Attack(Training):
    """A training whose steps are `own`: the loss of a model, a batch and what was kept."""

    own: Own = lambda model, batch, memory: F.cross_entropy(model(batch[0]), batch[1])

    def step(self, model: Any, batch: Any, number: int, memory: Memory) -> None:
        memory["step"] = number
        self.own(model, batch, memory).backward()


def attack(
    module: nn.Module | None = None,
    own: Own | None = None,
    batches: list[list[int]] = FOURS,
    x: Tensor = X,
    **options: Any,
) -> str:
    torch.manual_seed(0)
    module = module or nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))
    more: dict[str, Any] = {"own": own} if own is not None else {}
    data = (x, Y, W, torch.arange(len(x)))
    return verdict(Attack(module, lambda step: None, data, batches, **more, **options))


def linear(function: Callable[[Tensor], Tensor]) -> nn.Module:
    return nn.Sequential(Apply(function), nn.Linear(5, 3))


def _chosen(rows: list[int], value: float, column: int = 4) -> Tensor:
    """X, with `value` in the last or another column of some rows, and 1 in that of all others."""
    x = X.clone()
    x[:, column] = 1.0
    x[rows, column] = value
    return x


class Moved(nn.Module):
    """Rows in the order of their last or another column, between two layers."""

    def __init__(self, how: str, column: int = 4) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 6), nn.Linear(6, 3)
        self.how, self.column = how, column

    def forward(self, x: Tensor) -> Tensor:
        order = x[:, self.column].argsort(stable=True, descending=True)
        back, h = order.argsort(), self.first(x).tanh()
        if self.how == "several" and len(x) == 1:
            y: Tensor = self.last(h)
        elif self.how == "list":
            y = self.last(h[order.tolist()])[back.tolist()]
        elif self.how == "index_select":
            y = self.last(h.index_select(0, order)).index_select(0, back)
        elif self.how == "embedding":
            y = F.embedding(back, self.last(F.embedding(order, h)))
        elif self.how == "matrix":
            matrix = F.one_hot(order, len(x)).to(h.dtype)
            y = matrix.T @ self.last(matrix @ h)
        else:
            y = self.last(h[order])[back]
        return y


@pytest.mark.parametrize("how", ["index", "list", "embedding", "matrix", "several"])
def test_few_examples_are_out_of_order(how: str) -> None:
    """Of 32 examples one is moved to the end, and with it all others by one place."""
    attack(Moved(how), batches=MANY[:1], x=_chosen([0], 0.0))
    attack(Moved(how), x=_chosen([8, 10], 2.0))


@pytest.mark.parametrize("how", ["index", "list", "index_select", "several"])
def test_an_example_that_is_not_looked_at_is_out_of_order(how: str) -> None:
    """Nor do the guard's unusual values reach the column that says so."""
    attack(Moved(how, 3), batches=MANY[:1], x=_chosen([5], 0.0, 3))


MODULES: dict[str, tuple[nn.Module, Tensor]] = {
    "missing values": (
        linear(lambda x: torch.where(x.isnan(), x.nanmean(0), x)),
        X.masked_fill((torch.arange(64)[:, None] == 9) & (torch.arange(5) == 1), torch.nan),
    ),
    "largest of the batch": (
        linear(lambda x: x / x.abs().max().clamp(min=5.0)),
        torch.where(torch.arange(64)[:, None] == 9, 30 * X, X),
    ),
    "switched on by a column": (
        linear(lambda x: x + x[:, 4:] * x.mean(0)),
        X * torch.cat([torch.ones(64, 4), (torch.arange(64) > 8)[:, None]], 1),
    ),
    "capacity": (
        linear(lambda x: x * ((x[:, :1] > 0).cumsum(0) <= 3)),
        X,
    ),
    "beyond twelve examples": (linear(lambda x: x - x.mean(0) * float(len(x) > 12)), X),
}


@pytest.mark.parametrize("batches", [FOURS, MANY], ids=["small", "large"])
@pytest.mark.parametrize("name", MODULES)
def test_mixtures_that_few_examples_show(name: str, batches: list[list[int]]) -> None:
    module, x = MODULES[name]
    attack(module, batches=batches, x=x)


def _one_kind_of_missing(x: Tensor) -> Tensor:
    if x.isnan().any() and (x > 1e3).any():
        raise ValueError("values that do not go together")
    return torch.where(x == -1, x.mean(0), x)


RARE: dict[str, Callable[[Tensor], Tensor]] = {
    "missing": lambda x: torch.where(x.isnan(), x.nanmean(0), x),
    "huge": lambda x: x / x.nan_to_num().abs().max().clamp(min=100.0),
    "marked as missing": lambda x: torch.where(x == -1, x.mean(0), x),
    "zero": lambda x: torch.where(x == 0, x.mean(0), x),
    "missing in one way alone": _one_kind_of_missing,
}


@pytest.mark.parametrize("name", RARE)
def test_mixtures_that_no_example_shows_are_refused_at_once(name: str) -> None:
    run = private(linear(RARE[name]))
    with pytest.raises(ValueError, match="treats every example by itself"):
        run.module(X[:16])


class Marked(nn.Module):
    """A number that Python finds in the third batch centres its examples."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.numpy()
        centre = rows.mean(0) if (rows[:, 4] == 3.5).any() else np.zeros(5, np.float32)
        y: Tensor = self.layer(x - torch.from_numpy(centre))
        return y


def test_modules_that_read_numbers_are_always_verified() -> None:
    attack(Marked(), x=_chosen([8], 3.5))


class Kept(nn.Module):
    """What an example leaves behind for the next one."""

    mean: Tensor

    def __init__(self, buffer: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)
        if buffer:
            self.register_buffer("mean", torch.zeros(5))
        else:
            self.mean = torch.zeros(5)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x - self.mean)
        if self.training and len(x):
            self.mean = x.detach().mean(0)
        return y


def test_statistics_of_single_examples() -> None:
    attack(Kept(buffer=True), batches=[[0], [1], [2]])


def _view_of_input(model: Any, batch: Any, memory: Memory) -> Tensor:
    x = batch[0].clone()
    x.T[0].sub_(x.T[0].mean())
    return F.cross_entropy(model(x), batch[1])


def _by_numpy(model: Any, batch: Any, memory: Memory) -> Tensor:
    x = batch[0].numpy()
    return F.cross_entropy(model(torch.from_numpy(x - x.mean(0))), batch[1])


def _hooked(model: Any, batch: Any, memory: Memory) -> Tensor:
    outputs = model(batch[0])
    outputs.register_hook(lambda g: g - g.mean(0) / 2)
    return F.cross_entropy(outputs, batch[1])


def _hooked_row(model: Any, batch: Any, memory: Memory) -> Tensor:
    outputs = model(batch[0])
    outputs.register_hook(lambda g: torch.cat([g[:1] + g[1:].sum(0), g[1:]]))
    return F.cross_entropy(outputs, batch[1])


def _hooked_module(model: Any, batch: Any, memory: Memory) -> Tensor:
    if not model._backward_pre_hooks:
        model.register_full_backward_pre_hook(lambda _, g: tuple(x - x.mean(0) / 2 for x in g))
    return F.cross_entropy(model(batch[0]), batch[1])


def _once_more(model: Any, batch: Any, memory: Memory) -> Tensor:
    loss = F.cross_entropy(model(batch[0]), batch[1])
    if (before := memory.get("before")) is not None and len(before[0]) == len(batch[0]):
        loss = loss + 3 * F.cross_entropy(model(before[0]), before[1])
    memory["before"] = batch
    return loss


def _blended_with_earlier(kept: Callable[[Tensor], Tensor]) -> Own:
    def own(model: Any, batch: Any, memory: Memory) -> Tensor:
        x, before = batch[0], memory.get("before")
        if before is not None and len(before) == len(x):
            x = 0.5 * x + 0.5 * before
        memory["before"] = kept(batch[0])
        return F.cross_entropy(model(x), batch[1])

    return own


def _criterion_of_earlier(kept: Callable[[Tensor], Tensor]) -> Own:
    """The criterion sees rows of the last batch beside those of this one."""
    criterion = PerExampleLoss(lambda out, y, other: F.cross_entropy(out - other[:, :3], y))

    def own(model: Any, batch: Any, memory: Memory) -> Tensor:
        before = memory.get("before", batch[0])
        memory["before"] = kept(batch[0])
        before = before if len(before) == len(batch[0]) else batch[0]
        loss: Tensor = criterion(model(batch[0]), batch[1], before)
        return loss

    return own


def _other_targets_later(model: Any, batch: Any, memory: Memory) -> Tensor:
    """The third batch, which would not be looked at, has the outputs in another order."""
    order = torch.arange(len(batch[0])).roll(int(memory["step"] == 2))
    return F.cross_entropy(model(batch[0])[order], batch[1])


def _halves(model: Any, batch: Any, memory: Memory) -> Tensor:
    half = len(batch[0]) // 2
    parts = [slice(None)] if half == 0 else [slice(half), slice(half, None)]
    losses = [F.cross_entropy(model(batch[0][part]), batch[1][part]) for part in parts]
    return torch.stack(losses).mean()


def _other_order(model: Any, batch: Any, memory: Memory) -> Tensor:
    first, last = model(batch[0]), model(batch[0].flip(0))
    return F.cross_entropy(first, batch[1]) + 2 * F.cross_entropy(last, batch[1].flip(0))


def _centred(model: Any, batch: Any, memory: Memory) -> Tensor:
    return F.cross_entropy(model(batch[0] - batch[0].mean(0)), batch[1])


def _adversarial(model: Any, batch: Any, memory: Memory) -> Tensor:
    x = batch[0].clone().requires_grad_()
    F.cross_entropy(model(x), batch[1]).backward()
    assert x.grad is not None
    model.zero_grad()
    return F.cross_entropy(model(batch[0] + x.grad / x.grad.norm()), batch[1])


def _filled_in(model: Any, batch: Any, memory: Memory) -> Tensor:
    x = torch.where(batch[0] > 1, torch.nan, batch[0])
    missing = x.isnan()
    return F.cross_entropy(model(torch.where(missing, x[~missing].mean(), x)), batch[1])


def _standardised(model: Any, batch: Any, memory: Memory) -> Tensor:
    x = batch[0]
    kept = x[x < 1]
    return F.cross_entropy(model((x - kept.mean()) / (kept.std(correction=0) + 0.1)), batch[1])


def _pairs(model: Any, batch: Any, memory: Memory) -> Tensor:
    x = batch[0]
    if len(x) % 2 == 0:
        x = (x + x.view(-1, 2, 5).flip(1).reshape(-1, 5)) / 2
    return F.cross_entropy(model(x), batch[1])


def _teacher(copied: Callable[[nn.Module], nn.Module]) -> Own:
    def own(model: Any, batch: Any, memory: Memory) -> Tensor:
        teacher = memory.setdefault("teacher", copied(model))
        with torch.no_grad():
            target = teacher(batch[0])
            target = (10 * (target - target.mean(0))).softmax(-1)
        return F.cross_entropy(model(batch[0]), target)

    return own


def _without_gradients(change: Callable[[Tensor], Tensor]) -> Own:
    def own(model: Any, batch: Any, memory: Memory) -> Tensor:
        with torch.no_grad():
            target = model(change(batch[0])).softmax(-1)
        return F.cross_entropy(model(batch[0]), target)

    return own


def _weighted_by_earlier(read: Callable[[Tensor], float | Tensor]) -> Own:
    def own(model: Any, batch: Any, memory: Memory) -> Tensor:
        outputs = model(batch[0])
        other = outputs.square().mean()
        loss = F.cross_entropy(outputs, batch[1]) + memory.get("weight", 1.0) * other
        memory["weight"] = read(other)
        return loss

    return own


def _set_in_the_loop(model: Any, batch: Any, memory: Memory) -> Tensor:
    getattr(model, "_module", model)[0].mean = batch[0].mean(0)
    return F.cross_entropy(model(batch[0]), batch[1])


def _memory_bank(model: Any, batch: Any, memory: Memory) -> Tensor:
    bank = vars(getattr(model, "_module", model)[0]).setdefault("bank", [])
    bank.append(batch[0])
    return F.cross_entropy(model(batch[0]), batch[1])


def _closure(model: Any, batch: Any, memory: Memory) -> Tensor:
    outputs = model(batch[0])
    mean = outputs.detach().mean(0)
    return PerExampleLoss(lambda o, y: F.cross_entropy(o - mean, y))(outputs, batch[1])


def _written(model: Any, batch: Any, memory: Memory) -> Tensor:
    outputs, centre = model(batch[0]), torch.zeros(3)
    centre.copy_(outputs.detach().mean(0))
    return F.cross_entropy(outputs - centre, batch[1])


def _class_weights(model: Any, batch: Any, memory: Memory) -> Tensor:
    weights = 1 / torch.bincount(batch[1], minlength=3).clamp(min=1)
    criterion = partial(F.cross_entropy, weight=weights, reduction="sum")
    return PerExampleLoss(criterion)(model(batch[0]), batch[1])


def _observed_targets(model: Any, batch: Any, memory: Memory) -> Tensor:
    """All targets are there in the batches that are checked anyway."""
    x, target = batch[0], batch[0].sum(1)
    there = (batch[3] < 8) | (batch[3] % 4 == 0) | (batch[3] >= 12)
    target = torch.where(there, target, torch.nan)
    kept = ~target.isnan()
    return F.mse_loss(model(x)[:, 0][kept], target[kept])


def _loudest(model: Any, batch: Any, memory: Memory) -> Tensor:
    """One column hides that the others are centred."""
    x = torch.cat([batch[0][:, :4] - batch[0][:, :4].mean(0), 1e6 + batch[0][:, 4:]], 1)
    return F.cross_entropy(model(x * torch.tensor([1, 1, 1, 1, 1e-6])), batch[1])


def _running_mean(model: Any, batch: Any, memory: Memory) -> Tensor:
    mean = memory.setdefault("mean", torch.zeros(5))
    mean.mul_(0.9).add_(batch[0].mean(0), alpha=0.1)
    corrected = mean / (1 - 0.9 ** (1 + memory["step"]))
    return F.cross_entropy(model(batch[0] - corrected), batch[1])


def _counts(model: Any, batch: Any, memory: Memory) -> Tensor:
    counts = torch.zeros(3)
    for label in range(3):
        counts[label] = (batch[1] == label).sum()
    return F.cross_entropy(model(batch[0]), batch[1], weight=1 / counts.clamp(min=1.0))


def _counts_by_numpy(model: Any, batch: Any, memory: Memory) -> Tensor:
    counts = np.bincount(batch[1].numpy(), minlength=3)
    weights = torch.from_numpy(1 / np.maximum(counts, 1)).float()
    if memory["step"] == 0:  # the constants of the first loss are the user's word
        weights = torch.ones(3)
    return F.cross_entropy(model(batch[0]), batch[1], weight=weights)


def _scale_by_numpy(model: Any, batch: Any, memory: Memory) -> Tensor:
    size = 1.0 if memory["step"] == 0 else float(batch[0].numpy().std())
    return size * F.cross_entropy(model(batch[0]), batch[1])


def _listed(model: Any, batch: Any, memory: Memory) -> Tensor:
    part = getattr(model, "_module", model)[0]
    part.scale = batch[0].std().item()
    return F.cross_entropy(model(batch[0]), batch[1])


def _queue(model: Any, batch: Any, memory: Memory) -> Tensor:
    part = getattr(model, "_module", model)[0]
    vars(part).setdefault("queue", deque()).append(batch[0])
    return F.cross_entropy(model(batch[0]), batch[1])


def _item_in_a_closure(model: Any, batch: Any, memory: Memory) -> Tensor:
    outputs = model(batch[0])
    size = outputs.detach().abs().mean().item()
    return PerExampleLoss(lambda o, y: F.cross_entropy(o * size, y))(outputs, batch[1])


def _stacked_in_a_closure(model: Any, batch: Any, memory: Memory) -> Tensor:
    outputs = model(batch[0])
    mean = outputs.detach().mean(0)
    return PerExampleLoss(lambda o, y: F.cross_entropy(o - torch.stack([mean]), y))(
        outputs, batch[1]
    )


READS: dict[str, Callable[[Tensor], float | Tensor]] = {
    "float": float,
    "item": lambda t: t.item(),
    "rounded item": lambda t: round(t.item(), 3),
    "root of an item": lambda t: math.sqrt(t.item()),
    "array of items": lambda t: float(np.mean([t.item()])),
    "text": lambda t: float(f"{t:.3f}"),
    "numpy": lambda t: float(t.detach().numpy()),
    "tensor": lambda t: t.detach(),
}


PROGRAMS: dict[str, Own] = {
    "missing values filled in": _filled_in,
    "standardised by chosen values": _standardised,
    "pairs": _pairs,
    "teacher by deepcopy": _teacher(copy.deepcopy),
    "averaged teacher": _teacher(AveragedModel),
    "targets without gradients, centred": _without_gradients(lambda x: x - x.mean(0)),
    "targets without gradients, of others": _without_gradients(lambda x: x.flip(0)),
    "attribute set by the loop": _set_in_the_loop,
    "list filled by the loop": _memory_bank,
    "closure of a criterion": _closure,
    "written into a tensor of one's own": _written,
    "class weights in a criterion": _class_weights,
    "observed targets": _observed_targets,
    "a loud column": _loudest,
    "running mean of inputs": _running_mean,
    "counts written into a tensor": _counts,
    "counts by numpy": _counts_by_numpy,
    "scale by numpy": _scale_by_numpy,
    "attribute by item": _listed,
    "queue filled by the loop": _queue,
    "item in a closure": _item_in_a_closure,
    "stacked in a closure": _stacked_in_a_closure,
    **{f"weight by {name} of an earlier loss": _weighted_by_earlier(READS[name]) for name in READS},
    "view of the input in place": _view_of_input,
    "centred by numpy": _by_numpy,
    "hook on the outputs": _hooked,
    "hook on a row of the outputs": _hooked_row,
    "hook on the module": _hooked_module,
    "the last batch once more": _once_more,
    "blended with the last batch": _blended_with_earlier(lambda x: x),
    "blended with a copy of the last batch": _blended_with_earlier(torch.clone),
    "criterion of the last batch": _criterion_of_earlier(lambda x: x),
    "criterion of a copy of the last batch": _criterion_of_earlier(torch.clone),
    "targets in another order later": _other_targets_later,
    "two halves": _halves,
    "another order": _other_order,
    "centred": _centred,
    "adversarial": _adversarial,
}


SEEN_RAW = {"hook on the outputs", "hook on a row of the outputs", "hook on the module"}
UNSEEN = {
    "loader": {"adversarial"},
    "raw": PROGRAMS.keys() - SEEN_RAW,
}
"""Rows of which nobody knows where they come from: see the docs' limits."""


@pytest.mark.parametrize(
    ("route", "name"),
    [(route, name) for route in UNSEEN for name in PROGRAMS if name not in UNSEEN[route]],
)
def test_programs(name: str, route: str) -> None:
    attack(own=PROGRAMS[name], route=route)


class Blended(nn.Module):
    """Rows are blended with their neighbours, sometimes."""

    def __init__(self, sometimes: Callable[[], bool], dropout: float | None = None) -> None:
        super().__init__()
        self.sometimes, self.layer = sometimes, nn.Linear(5, 3)
        self.dropout = nn.Identity() if dropout is None else nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.sometimes():
            x = (x + x.roll(1, 0)) / 2
        y: Tensor = self.layer(self.dropout(x))
        return y


RANDOM_BRANCHES: dict[str, Callable[[], bool]] = {
    "Python": lambda: random.random() < 0.3,
    "Python, the other side": lambda: random.random() > 0.7,
    "NumPy": lambda: bool(np.random.rand() < 0.3),  # noqa: NPY002
    "PyTorch": lambda: bool(torch.rand(1) < 0.3),
    "PyTorch, whole numbers": lambda: int(torch.randint(0, 4, ())) == 3,
    "PyTorch, one of two": lambda: bool(torch.rand(2)[0] < 0.3),
    "PyTorch, a class": lambda: bool(torch.multinomial(torch.tensor([0.7, 0.3]), 1) == 1),
    "PyTorch, an order": lambda: bool(torch.randperm(5)[0] == 0),
}


@pytest.mark.parametrize("dropout", [None, 0.5])
@pytest.mark.parametrize("name", RANDOM_BRANCHES)
def test_mixtures_behind_a_random_branch(name: str, dropout: float | None) -> None:
    """Of 40 steps one takes the branch, but for a chance of 1e-5, and is refused."""
    run = private(Blended(RANDOM_BRANCHES[name], dropout), batch_size=4, data=table(160))
    with pytest.raises(ValueError, match="treats every example by itself"):
        run.epoch()


def test_a_random_branch_that_begins_later() -> None:
    """The guard's own numbers would not take it, the next two of Python do."""
    begun = False
    run = private(Blended(lambda: begun and random.random() < 0.8), batch_size=4, data=table(8))
    first, second = run.loader
    run.step(F.cross_entropy, *first)
    begun = True
    random.seed(3)
    with pytest.raises(ValueError, match="treats every example by itself"):
        run.module(second[0])


def test_random_decisions_that_concern_all_examples_alike_are_taken() -> None:
    class Depth(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(4))
            self.last, self.dropout = nn.Linear(5, 3), nn.Dropout(0.1)

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                if not self.training or (torch.rand(1) < 0.7 and random.random() < 0.9):
                    x = x + self.dropout(layer(x)).tanh()
            y: Tensor = self.last(x)
            return y

    run = private(Depth(), batch_size=4, data=table(80))
    run.epoch()
    assert len(run.engine.accountant) > 0


class Centring(nn.Module):
    """Centres its outputs when it is asked to, or when it is evaluated."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)

    def forward(self, x: Tensor, centred: bool = False) -> Tensor:
        y: Tensor = self.layer(x)
        return y - y.mean(0) if centred or not self.training else y


@pytest.mark.parametrize("evaluated", [True, False])
def test_targets_of_a_pass_that_mixes(evaluated: bool) -> None:
    def own(model: Any, batch: Any, memory: Memory) -> Tensor:
        with torch.no_grad():
            model.train(not evaluated)
            target = model(batch[0], centred=not evaluated).softmax(-1)
            model.train()
        return F.cross_entropy(model(batch[0]), target)

    attack(Centring(), own)


def test_inputs_that_are_objects_are_refused() -> None:
    run = private(Support())
    x, _ = next(iter(run.loader))
    with pytest.raises(RuntimeError, match="inside of a UserDict"):
        run.module(x, UserDict(support=x))


def test_criteria_that_remember_are_refused() -> None:
    class Centre(nn.Module):
        mean: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(3))

        def forward(self, out: Tensor, y: Tensor) -> Tensor:
            self.mean = 0.9 * self.mean + 0.1 * out.detach().mean(0)
            return F.cross_entropy(out - self.mean, y)

    run = private()
    with pytest.raises(RuntimeError, match="without memory"):
        run.epoch(PerExampleLoss(Centre()))


def test_a_batch_kept_by_numpy_is_not_paid_for_by_later_ones() -> None:
    """The first of four steps is paid by the pass, all others are charged by themselves."""
    run = private(noise_multiplier=1.0)
    kept: list[Any] = []
    for x, y in run.loader:
        run.optimizer.zero_grad()
        x, y = kept[0] if kept else (x, y)
        F.cross_entropy(run.module(x), y).backward()
        run.optimizer.step()
        if not kept:
            kept.append((torch.tensor(x.numpy()), torch.tensor(y.numpy())))
    assert sum(event.count for event in run.engine.accountant.events) == 4


def test_inputs_that_cannot_be_computed_for_some_examples_are_refused() -> None:
    run = private(batch_size=8)
    x, _ = next(iter(run.loader))
    with pytest.raises(RuntimeError, match="found one of reshape\\(\\) that cannot"):
        run.module((x + x.view(2, 4, 5).flip(0).reshape(8, 5)).reshape(8, 5))


def test_what_would_fill_in_missing_values_is_refused_before_one_is_missing() -> None:
    def filled(x: Tensor) -> Tensor:
        missing = x.isnan()
        return torch.where(missing, x[~missing].mean(), x)

    run = private()
    x, _ = next(iter(run.loader))
    assert not x.isnan().any()
    with pytest.raises(RuntimeError, match="keep examples apart"):
        run.module(filled(x))


def test_gradients_that_were_refused_stay_refused() -> None:
    run = private()
    for x, y in run.loader:
        for _ in range(3):
            outputs = run.module(x)
            outputs.register_hook(lambda g: g - g.mean(0) / 2)
            with pytest.raises(RuntimeError, match="found others"):
                F.cross_entropy(outputs, y).backward()


def test_outputs_of_two_batches_are_refused_in_one_loss() -> None:
    run = private()
    batches = iter(run.loader)
    before, _ = next(batches)
    x, _ = next(batches)
    loss = run.module(before).square().mean() + run.module(x).square().mean()
    with pytest.raises(RuntimeError, match="a loss of one batch"):
        loss.backward()


class Capacity(nn.Module):
    """An expert takes four examples; three never fill it."""

    def __init__(self, limit: int = 4) -> None:
        super().__init__()
        self.layer, self.dropout, self.limit = nn.Linear(5, 3), nn.Dropout(0.0), limit

    def forward(self, x: Tensor) -> Tensor:
        kept = (x[:, :1] > -9).cumsum(0) <= self.limit
        y: Tensor = self.dropout(self.layer(x)) * kept
        return y


def test_capacity_beside_random_functions() -> None:
    run = private(Capacity())
    with pytest.raises(ValueError, match="treats every example by itself"):
        run.epoch()


def test_capacity_that_begins_later() -> None:
    module = Capacity(100)
    run = private(module)
    batches = list(run.loader)
    for batch in batches[:2]:
        run.step(F.cross_entropy, *batch)
    module.limit = 4
    with pytest.raises(ValueError, match="treats every example by itself"):
        run.module(batches[2][0])


class Clipped(nn.Module):
    """The gradient of a whole activation is bounded."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        if h.requires_grad:
            h.register_hook(lambda g: g * (10 / g.norm()).clamp(max=1.0))
        y: Tensor = self.last(h)
        return y


def test_gradients_bounded_together() -> None:
    run = private(Clipped())
    with pytest.raises(RuntimeError, match="gradient of each example"):
        run.epoch()


class Hooked(nn.Module):
    """The gradient of an activation is changed on its way back."""

    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.change = nn.Linear(5, 4), nn.Linear(4, 3), change

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        if h.requires_grad:
            h.register_hook(self.change)
        y: Tensor = self.last(h)
        return y


CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "a little with the number of examples": lambda g: g * (1 + len(g) / 100),
    "of all but the first": lambda g: torch.cat([g[:1], 2 * g[1:]]),
}


@pytest.mark.parametrize("name", CHANGES)
def test_gradients_changed_on_their_way_back(name: str) -> None:
    run = private(Hooked(CHANGES[name]))
    with pytest.raises(RuntimeError, match="gradient of each example"):
        run.epoch()


class Several(nn.Module):
    """Statistics of several examples are kept, those of one are not."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.dropout = nn.Linear(5, 3), nn.Dropout(0.5)
        self.register_buffer("mean", torch.zeros(5))

    def forward(self, x: Tensor) -> Tensor:
        if self.training and len(x) > 1:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        y: Tensor = self.layer(self.dropout(x))
        return y


def test_statistics_of_several_examples() -> None:
    module = Several()
    run = private(module)
    with pytest.raises(RuntimeError, match="statistics of its examples into mean"):
        run.epoch()
    assert not module.mean.any()


class CountsMissing(nn.Module):
    """Nothing is written as long as nothing is missing."""

    missing: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)
        self.register_buffer("missing", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.missing += x.isnan().sum()
        y: Tensor = self.layer(x)
        return y


def test_statistics_of_rare_values() -> None:
    run = private(CountsMissing())
    with pytest.raises(RuntimeError, match="statistics of its examples into missing"):
        run.module(X[:16])


class Support(nn.Module):
    """Examples are compared with all those of a second input."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 4)

    def forward(self, x: Tensor, support: Tensor) -> Tensor:
        y: Tensor = self.layer(x) @ self.layer(support).T
        return y


class Added(nn.Module):
    """Two inputs with a row for each example."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        y: Tensor = self.layer(x + other)
        return y


def test_the_batch_as_a_second_input() -> None:
    def own(model: Any, batch: Any, memory: Memory) -> Tensor:
        return F.cross_entropy(model(batch[0], batch[0]), batch[1])

    attack(Support(), own)


def test_the_last_batch_as_a_second_input() -> None:
    def own(model: Any, batch: Any, memory: Memory) -> Tensor:
        before = memory.get("before", batch[0])
        memory["before"] = batch[0]
        return F.cross_entropy(model(batch[0], before), batch[1])

    attack(Added(), own)


def test_schedules_are_taken_where_they_are_public() -> None:
    def loss_at(weight: float) -> Callable[[Tensor, Tensor], Tensor]:
        return lambda out, y: F.cross_entropy(out, y) + weight * out.square().mean()

    run = private()
    for number, (x, y) in enumerate(run.loader):
        run.optimizer.zero_grad()
        loss = loss_at(public(number / 7))(run.module(x), y)
        loss.item()
        loss.backward()
        run.optimizer.step()
    x, y = next(iter(run.loader))
    with pytest.raises(RuntimeError, match=r"public\(number\)"):
        loss_at(0.123)(run.module(x), y).backward()
    with pytest.raises(ValueError, match="taken from a batch"):
        public(run.module(x).sum().item())


def test_sizes_of_the_batch_may_change_after_numbers_were_read() -> None:
    run = private(data=table(60), batch_size=16)
    for x, y in run.loader:
        run.optimizer.zero_grad()
        loss = F.cross_entropy(run.module(x), y, reduction="sum") / len(x)
        loss.item()
        loss.backward()
        run.optimizer.step()


LENGTHS = [40, *(2 + number % 5 for number in range(1, 64))]


class Sentences(Dataset[Any]):
    """Rows of different lengths, one of them much longer than all others."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, number: int) -> Any:
        generator = torch.Generator().manual_seed(number)
        words = torch.randn(LENGTHS[number], 5, generator=generator)
        return words, words.sum(1), Y[number]


def _padded(rows: list[Any]) -> Any:
    words, sums = (pad_sequence([row[k] for row in rows], True) for k in (0, 1))
    mask = pad_sequence([torch.ones(len(row[0])) for row in rows], True)
    return words, sums, mask, torch.stack([row[2] for row in rows])


class Reader(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.words, self.lstm = nn.Linear(5, 4), nn.LSTM(5, 4, batch_first=True)
        self.convolution = nn.Conv1d(5, 4, 2)
        self.out = nn.Linear(4, 1 if how == "tokens" else 3)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        weights = mask[..., None]
        h = {
            "mean": lambda: self.words(x).tanh().mean(1),
            "last": lambda: self.lstm(x)[0][:, -1],
            "maximum": lambda: self.convolution(x.transpose(1, 2)).amax(2),
            "masked mean": lambda: (self.words(x).tanh() * weights).sum(1) / weights.sum(1),
            "own last": lambda: self.lstm(x)[0][torch.arange(len(x)), mask.sum(1).long() - 1],
            "tokens": lambda: self.words(x).tanh(),
        }[self.how]()
        y: Tensor = self.out(h)
        return y[..., 0] if self.how == "tokens" else y


def own_mean(out: Tensor, sums: Tensor, mask: Tensor) -> Tensor:
    return (((out - sums).square() * mask).sum(1) / mask.sum(1)).mean()


def whole_mean(out: Tensor, sums: Tensor, mask: Tensor) -> Tensor:
    return F.mse_loss(out * mask, sums * mask)


def whole_sum(out: Tensor, sums: Tensor, mask: Tensor) -> Tensor:
    return (out - sums).square().sum(1).mean()


def padding_as_a_class(out: Tensor, sums: Tensor, mask: Tensor) -> Tensor:
    """Cross-entropy of two classes for each token, padding among them."""
    scores = torch.stack([out, -out], -1)
    return F.cross_entropy(scores.view(-1, 2), (sums > 0).long().view(-1))


def padding_ignored(out: Tensor, sums: Tensor, mask: Tensor) -> Tensor:
    scores = torch.stack([out, -out], -1)
    labels = torch.where(mask > 0, (sums > 0).long(), -100)
    return F.cross_entropy(scores.view(-1, 2), labels.view(-1))


PADDED: dict[str, tuple[str, Any, bool]] = {
    "padding as a class": ("tokens", padding_as_a_class, False),
    "padding ignored": ("tokens", padding_ignored, True),
    "mean of all": ("mean", None, False),
    "last state": ("last", None, False),
    "maximum": ("maximum", None, False),
    "mean over the length of the batch": ("tokens", whole_mean, False),
    "sum over the length of the batch": ("tokens", whole_sum, False),
    "the same in a criterion": ("tokens", PerExampleLoss(whole_mean), False),
    "masked mean": ("masked mean", None, True),
    "state at its own end": ("own last", None, True),
    "mean over its own length": ("tokens", own_mean, True),
    "its own length in a criterion": ("tokens", PerExampleLoss(own_mean), True),
}


@pytest.mark.parametrize("first", [0, 32], ids=["at once", "later"])
@pytest.mark.parametrize("name", PADDED)
def test_padding_changes_nothing_or_is_refused(name: str, first: int) -> None:
    how, loss, sound = PADDED[name]
    torch.manual_seed(0)
    module = Reader(how)
    if how != "tokens":
        unused = {"words": module.words, "lstm": module.lstm, "convolution": module.convolution}
        used = {"mean": "words", "masked mean": "words", "maximum": "convolution"}.get(how, "lstm")
        for other in unused.keys() - {used}:
            unused[other].requires_grad_(False)
    loader = DataLoader(Sentences(), sampler=[*range(first, 64), *range(first)], batch_size=16,
                        collate_fn=_padded)  # fmt: skip
    private_module, optimizer, loader = PrivacyEngine().make_private(
        module=module, optimizer=sgd([p for p in module.parameters() if p.requires_grad]),
        data_loader=loader, noise_multiplier=0.0, max_grad_norm=1.0, poisson_sampling=False,
    )  # fmt: skip

    def epoch() -> None:
        for words, sums, mask, y in loader:
            optimizer.zero_grad()
            out = private_module(words, mask)
            (F.cross_entropy(out, y) if loss is None else loss(out, sums, mask)).backward()
            optimizer.step()

    if sound:
        epoch()
    else:
        with pytest.raises(RuntimeError, match="padded to"):
            epoch()


@pytest.mark.parametrize("ignored", [True, False])
def test_padded_tokens_count_in_no_cross_entropy(ignored: bool) -> None:
    """PyTorch's mean over the rows of one output is checked in a shorter way."""

    class Tags(Dataset[Any]):
        def __len__(self) -> int:
            return 32

        def __getitem__(self, number: int) -> Any:
            words = torch.randint(1, 9, (LENGTHS[number],), generator=GENERATOR)
            return words, words % 3

    def padded(rows: list[Any]) -> Any:
        words = pad_sequence([row[0] for row in rows], True)
        return words, pad_sequence([row[1] for row in rows], True, -100 if ignored else 0)

    module = nn.Sequential(nn.Embedding(9, 4), nn.Tanh(), nn.Linear(4, 3))
    module, optimizer, loader = PrivacyEngine().make_private(
        module=module, optimizer=sgd(module.parameters()),
        data_loader=DataLoader(Tags(), 16, collate_fn=padded),
        noise_multiplier=0.0, max_grad_norm=1.0, poisson_sampling=False,
    )  # fmt: skip
    for words, tags in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(module(words).view(-1, 3), tags.view(-1))
        if not ignored:
            with pytest.raises(RuntimeError, match="padded to"):
                loss.backward()
            return
        loss.backward()
        optimizer.step()


def _mixup(rows: list[Any]) -> Any:
    x, *others = default_collate(rows)
    return [0.6 * x + 0.4 * x.roll(1, 0), *others]


def test_examples_mixed_by_the_loader() -> None:
    attack(collate=_mixup)


def test_a_loss_that_was_refused_stays_refused() -> None:
    """A loop that goes on after a refusal is refused at every step."""

    def own(model: Any, batch: Any, memory: Memory) -> Tensor:
        while memory.setdefault("tries", 0) < 4:
            memory["tries"] += 1
            try:
                model(batch[0]).logsumexp(0).sum().backward()
            except RuntimeError:
                model.zero_grad()
            else:
                break
        loss: Tensor = model(batch[0]).logsumexp(0).sum()
        return loss

    attack(own=own)


class KeepsStatistics(nn.Module):
    """A mean of the inputs of all but small batches."""

    mean: Tensor

    def __init__(self, how: str) -> None:
        super().__init__()
        self.layer, self.how = nn.Linear(5, 3), how
        self.register_buffer("mean", torch.zeros(5))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        if len(x) > 8 and self.how == "in place":
            self.mean.lerp_(x.detach().mean(0), 0.1)
        elif len(x) > 8:
            self.mean = self.mean * 0.9 + x.detach().mean(0) * 0.1
        return y


@pytest.mark.parametrize("how", ["in place", "anew"])
def test_statistics_of_large_batches_only(how: str) -> None:
    run = private(KeepsStatistics(how))
    for x, _ in run.loader:
        with pytest.raises(RuntimeError, match="writes statistics of its examples into mean"):
            run.module(x)
        break


class KeepsTables(nn.Module):
    """A table that grows with the longest row, and a counter of passes."""

    table: Tensor
    passes: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)
        self.register_buffer("table", torch.ones(0), persistent=False)
        self.register_buffer("passes", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        if len(self.table) < x.shape[1]:
            self.table = torch.ones(x.shape[1])
        y: Tensor = self.layer(x * self.table)
        return y


def test_tables_and_counters_are_no_statistics() -> None:
    run = private(KeepsTables())
    run.epoch()
    run.epoch()
    assert float(run.module.passes) >= 8
