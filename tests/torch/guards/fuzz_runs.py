"""Random trainings through the engine without noise, held to the loop over examples."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Sampler

from privagrad.torch import PrivacyEngine
from tests.torch.guards.fuzz_losses import Program, Step
from tests.torch.guards.fuzz_modules import logits_of
from tests.torch.reference import Listed

CLOSE, MOVED = 1e-4, 1e-3
MIXED = 3e-3
"""How far mixtures of examples may be off that no comparison in float32 can see."""
Batch = list[Tensor]
Gradients = list[Tensor]


class Fixed(Sampler[list[int]]):
    """Batches that were decided beforehand."""

    def __init__(self, batches: list[list[int]], size: int) -> None:
        self.batches, self.batch_size = batches, size

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches)


@dataclass
class Training:
    """A module, a program of its backward passes, rows, and the batches of a loop over them.

    `route` is where batches come from: the private loader in a given order ("loader"), rows taken
    past it ("raw"), or the loader's own Poisson sampling ("poisson").
    """

    module: nn.Module
    program: Program
    data: tuple[Tensor, ...]
    batches: list[list[int]]
    route: str = "loader"
    rate: float = 0.0
    options: dict[str, Any] = field(default_factory=dict)
    pooled: bool = True
    tolerance: float = CLOSE
    collate: Callable[[list[Any]], Any] | None = None
    told: str = ""
    refusal: Exception | None = None

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """How Hypothesis shows it."""
        printer.text(self.told)

    def step(self, model: Any, batch: Any, number: int, memory: dict[str, Any]) -> None:
        x, labels, weights, mask, _ = batch
        outputs = logits_of(model(x))
        labels = labels[:, 0] if self.pooled else labels
        self.program(Step(x, outputs, labels, weights, mask, number, model, memory))


@dataclass
class Result:
    """Gradients (not divided) and rows of each step that was made; the refusal that ended them."""

    gradients: list[Gradients]
    rows: list[list[int]]
    refusal: Exception | None = None
    states: list[dict[str, Tensor]] = field(default_factory=list)


def through_the_engine(training: Training, radius: float) -> Result:
    """The gradients that the engine hands to the optimizer, until it refuses something."""
    result = Result([], [])
    module = copy.deepcopy(training.module)
    parameters = [p for p in module.parameters() if p.requires_grad]
    size = max(1, max(map(len, training.batches)))
    poisson = training.route == "poisson"
    rows = Listed(*training.data)
    loader: DataLoader[Any] = (
        DataLoader(rows, batch_size=size, collate_fn=training.collate)
        if poisson
        else DataLoader(
            rows, batch_sampler=Fixed(training.batches, len(rows)), collate_fn=training.collate
        )
    )
    taken: list[int] = []
    memory: dict[str, Any] = {}
    try:
        private, optimizer, loader = PrivacyEngine().make_private(
            module=module,
            optimizer=torch.optim.SGD(parameters, lr=training.rate),
            data_loader=loader,
            noise_multiplier=0.0,
            max_grad_norm=radius,
            poisson_sampling=poisson,
            **training.options,
        )
        source: Iterable[Any] = loader
        if training.route == "raw":
            source = ([t[rows] for t in training.data] for rows in training.batches)
        before = _state(module)
        for batch in source:
            taken += [int(i) for i in batch[-1].numpy()]
            optimizer.zero_grad()
            training.step(private, batch, len(result.rows), memory)
            optimizer.step()
            if optimizer.last_chunk:
                expected = optimizer.expected_batch_size
                result.states.append(before)
                result.gradients.append([_grad(p) * expected for p in parameters])
                result.rows.append(taken)
                taken, before = [], _state(module)
    except Exception as error:
        result.refusal = error
        result.rows.append(taken)
    return result


def _grad(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad.detach().clone()


def _state(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def one_by_one(
    training: Training, state: dict[str, Tensor], rows: list[int], number: int
) -> Iterator[Gradients]:
    """The gradient of each of `rows` alone, in a plain module."""
    module = copy.deepcopy(training.module)
    parameters = [p for p in module.parameters() if p.requires_grad]
    for row in rows:
        module.load_state_dict(state)
        module.zero_grad()
        training.step(module, [t[row : row + 1] for t in training.data], number, {})
        yield [torch.zeros_like(p) if p.grad is None else _grad(p) for p in parameters]


def norm(gradients: Gradients) -> float:
    return float(sum(g.double().square().sum() for g in gradients)) ** 0.5


def distance(a: Gradients, b: Gradients) -> float:
    return norm([x.double() - y.double() for x, y in zip(a, b, strict=True)])


def bounded_sum(gradients: Iterable[Gradients], like: Gradients, radius: float) -> Gradients:
    total = [torch.zeros_like(p) for p in like]
    for own in gradients:
        size = norm(own)
        if size == size and size != float("inf"):
            for t, g in zip(total, own, strict=True):
                t += g * min(1.0, radius / max(size, 1e-30))
    return total


def middle(training: Training) -> float:
    """A radius that bounds some examples of the batches and leaves others as they are."""
    rows = sorted({row for rows in training.batches for row in rows})
    found = one_by_one(training, _state(training.module), rows, 0)
    norms = sorted(size for own in found if 0 < (size := norm(own)) < float("inf"))
    return norms[len(norms) // 2] if norms else 1.0


def verdict(training: Training, compared: bool = True) -> str:
    """ "accepted" or "refused"; an AssertionError where the engine is wrong.

    Every step that was made has the bounded sum of the examples' own gradients; without one of its
    examples the sum moves by no more than the bound, and no other step moves at all.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        radius = _tried(lambda: middle(training)) or 1.0
        found = through_the_engine(training, radius)
        training.refusal = found.refusal
        ended = "accepted" if found.refusal is None else _ended(training, found)
        if compared:
            for number, gradients in enumerate(found.gradients):
                _assert_equal(training, found, number, gradients, radius)
            _assert_bounded(training, found, radius)
    return ended


def _tried(function: Callable[[], float]) -> float | None:
    try:
        return function()
    except Exception:  # a program that does not run on an example alone
        return None


def _ended(training: Training, found: Result) -> str:
    """A refusal says what was expected, unless plain PyTorch fails in the same place."""
    state = found.states[-1] if found.states else None
    module = copy.deepcopy(training.module)
    if state is not None:
        module.load_state_dict(state)
    rows = found.rows[-1]
    try:
        training.step(module, [t[rows] for t in training.data], len(found.rows) - 1, {})
    except Exception:
        return "failed"
    if str(found.refusal).startswith("Expected "):
        return "refused"
    raise AssertionError("a crash instead of a refusal") from found.refusal


def _assert_equal(
    training: Training, found: Result, number: int, gradients: Gradients, radius: float
) -> None:
    rows = found.rows[number]
    own = list(one_by_one(training, found.states[number], rows, number))
    expected = bounded_sum(own, gradients, radius)
    size = max(norm(expected), 1e-2 * radius)
    error = distance(gradients, expected) / size
    assert error <= training.tolerance, (
        f"step {number}: off by {error:.1e} of the loop over {len(rows)} examples"
    )


def _assert_bounded(training: Training, found: Result, radius: float) -> None:
    if training.route == "poisson" or "max_physical_batch_size" in training.options:
        return
    made = len(found.gradients)
    sizes = [len(rows) for rows in found.rows[:made]]
    if not made or max(sizes) == 0:
        return
    step = max(range(made), key=lambda t: (sizes[t], t))
    batches = [list(rows) for rows in training.batches]
    del batches[step][0]
    other = copy.copy(training)
    other.batches = batches
    without = through_the_engine(other, radius)
    for number, gradients in enumerate(without.gradients[:made]):
        moved = distance(gradients, found.gradients[number]) / radius
        if number == step:
            assert moved <= 1 + MOVED, f"one example moves step {step} by {moved:.3f} bounds"
        elif number < step or training.rate == 0:
            assert moved <= MOVED, f"an example of step {step} moves step {number} by {moved:.3f}"
