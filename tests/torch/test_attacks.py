"""Trainings in which it is hard to see that examples see each other: exact, or refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import default_collate

from tests.torch.fuzz_modules import Apply
from tests.torch.fuzz_runs import Training, verdict

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
        self.own(model, batch, memory).backward()  # type: ignore[no-untyped-call]


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


def _chosen(rows: list[int], value: float) -> Tensor:
    """X, with `value` in the last column of some rows and 1 in that of all others."""
    x = X.clone()
    x[:, 4] = 1.0
    x[rows, 4] = value
    return x


class Moved(nn.Module):
    """Rows in the order of their last column, between two layers."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.first, self.last, self.how = nn.Linear(5, 6), nn.Linear(6, 3), how

    def forward(self, x: Tensor) -> Tensor:
        order = x[:, 4].argsort(stable=True, descending=True)
        back, h = order.argsort(), self.first(x).tanh()
        if self.how == "list":
            y: Tensor = self.last(h[order.tolist()])[back.tolist()]
        elif self.how == "embedding":
            y = F.embedding(back, self.last(F.embedding(order, h)))
        elif self.how == "matrix":
            matrix = F.one_hot(order, len(x)).to(h.dtype)
            y = matrix.T @ self.last(matrix @ h)
        else:
            y = self.last(h[order])[back]
        return y


@pytest.mark.parametrize("how", ["index", "list", "embedding", "matrix"])
def test_few_examples_are_out_of_order(how: str) -> None:
    """Of 32 examples one is moved to the end, and with it all others by one place."""
    attack(Moved(how), batches=MANY[:1], x=_chosen([0], 0.0))
    attack(Moved(how), x=_chosen([8, 10], 2.0))


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
    F.cross_entropy(model(x), batch[1]).backward()  # type: ignore[no-untyped-call]
    assert x.grad is not None
    model.zero_grad()
    return F.cross_entropy(model(batch[0] + x.grad / x.grad.norm()), batch[1])


PROGRAMS: dict[str, Own] = {
    "view of the input in place": _view_of_input,
    "centred by numpy": _by_numpy,
    "hook on the outputs": _hooked,
    "hook on the module": _hooked_module,
    "the last batch once more": _once_more,
    "two halves": _halves,
    "another order": _other_order,
    "centred": _centred,
    "adversarial": _adversarial,
}


UNSEEN = {
    "loader": {"centred by numpy", "adversarial"},
    "raw": {
        "view of the input in place", "centred by numpy", "the last batch once more", "two halves",
        "another order", "centred", "adversarial",
    },
}  # fmt: skip
"""Rows of which nobody knows where they come from: see the docs' limits."""


@pytest.mark.parametrize(
    ("route", "name"),
    [(route, name) for route in UNSEEN for name in PROGRAMS if name not in UNSEEN[route]],
)
def test_programs(name: str, route: str) -> None:
    attack(own=PROGRAMS[name], route=route)


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
