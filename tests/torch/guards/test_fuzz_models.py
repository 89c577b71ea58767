"""Random models and losses: the engine has the gradient of each example alone, or refuses.

PRIVAGRAD_FUZZ_EXAMPLES multiplies the number of models, with random seeds, and prints counts:

    PRIVAGRAD_FUZZ_EXAMPLES=20 python -m pytest -s tests/torch/guards/test_fuzz_models.py
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.torch.guards import fuzz_losses, fuzz_modules
from tests.torch.guards.fuzz_modules import FORMS, POOLS, Model
from tests.torch.guards.fuzz_runs import CLOSE, MIXED, Training, verdict

TIMES = int(os.environ.get("PRIVAGRAD_FUZZ_EXAMPLES", "1"))
ROWS, CLASSES = 16, 7
COUNTS: Counter[str] = Counter()
ANY_PARTS = [*fuzz_modules.ORDINARY, *fuzz_modules.ODD, *fuzz_modules.MIXING]
ANY_LOSSES = [*fuzz_losses.ORDINARY, *fuzz_losses.MIXING]


def fuzzed(examples: int) -> settings:
    return settings(
        max_examples=examples * TIMES,
        deadline=None,
        derandomize=TIMES == 1,
        database=None,
        # Failures are small already, and told in words.
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )


@pytest.fixture(scope="module", autouse=True)
def counted() -> Iterator[None]:
    yield
    if TIMES > 1:
        print("\n" + ", ".join(f"{kind}: {count}" for kind, count in sorted(COUNTS.items())))


def rows(seed: int, words: bool, tokens: int) -> tuple[Tensor, ...]:
    """Inputs, labels (some ignored), weights, masks and numbers of examples."""
    generator = torch.Generator().manual_seed(seed)
    shape = (ROWS, tokens)
    x = (
        torch.randint(0, CLASSES, shape, generator=generator)
        if words
        else torch.randn(*shape, 3, generator=generator)
    )
    labels = torch.randint(0, CLASSES, shape, generator=generator)
    ignored = torch.rand(shape, generator=generator) < 0.2
    ignored[:, 0] = False
    weights = torch.rand(ROWS, generator=generator) * 2
    mask = (torch.rand(shape, generator=generator) < 0.6).float()
    mask[:, -1] = 1
    labels = labels.masked_fill(ignored, fuzz_losses.IGNORED)
    return x, labels, weights, mask, torch.arange(ROWS)


@st.composite
def trainings(
    draw: Any, special: list[str], programs: list[str], size: int = 2, odd: bool = True
) -> Training:
    """Ordinary parts, with one of `special` among them, a loss of `programs`, and a loop."""
    known = fuzz_modules.ORDINARY | fuzz_modules.ODD | fuzz_modules.MIXING | fuzz_modules.RANDOM
    names = draw(st.lists(st.sampled_from(sorted(fuzz_modules.ORDINARY)), max_size=size))
    names.insert(draw(st.integers(0, len(names))), draw(st.sampled_from(special)))
    torch.manual_seed(draw(st.integers(0, 99)))
    made = [known[name]() for name in names]
    if draw(st.booleans()) and len(made) > 1 and names[0] in fuzz_modules.ORDINARY:
        made.append(made[0])  # a shared part
        names.append("shared " + names[0])
    words, pooled = draw(st.booleans()), draw(st.booleans())
    tokens = draw(st.sampled_from([2, 3, 4]))
    pool = draw(st.sampled_from(sorted(POOLS))) if pooled else None
    form = draw(st.sampled_from(sorted(FORMS)))
    tied = draw(st.booleans())
    model: nn.Module = Model(words, made, pool, form, CLASSES, tied)
    name = draw(st.sampled_from(programs))
    sizes = draw(st.lists(st.sampled_from([4, 3, 5, 7, 1, 2, 8, *([0] if odd else [])]),
                          min_size=1, max_size=4))  # fmt: skip
    numbers = iter(draw(st.permutations(range(ROWS))) * 3)
    batches = [[next(numbers) for _ in range(n)] for n in sizes]
    batches = [list(dict.fromkeys(batch)) for batch in batches]
    route = draw(
        st.sampled_from(["loader", "loader", "raw", "poisson"] if odd else ["loader", "poisson"])
    )
    if name in fuzz_losses.OF_KNOWN_ROWS and route == "raw":
        route = "loader"
    options: dict[str, Any] = {}
    if route != "raw" and draw(st.integers(0, 3)) == 0:
        options["max_physical_batch_size"] = draw(st.sampled_from([1, 2, 3]))
    rate = draw(st.sampled_from([0.0, 0.05]))
    program = (fuzz_losses.ORDINARY | fuzz_losses.MIXING)[name]
    mixing = {*names, name} & {*fuzz_modules.MIXING, *fuzz_losses.MIXING}
    tolerance = MIXED if mixing else CLOSE
    tolerance = torch.inf if name in fuzz_losses.OF_SOME_SIZE else tolerance
    told = (f"{names}, {name}, words={words}, {tokens} tokens, {pool}, tied={tied}, {form}, "
            f"batches={batches}, {route}, {options}, rate={rate}")  # fmt: skip
    return Training(
        model, program, rows(draw(st.integers(0, 99)), words, tokens), batches, route, rate,
        options, pooled, tolerance, told=told,
    )  # fmt: skip


def alone(part: str, program: str, seed: int, pooled: bool = False) -> Training:
    """A part with a loss, in batches of several sizes, from the private loader."""
    torch.manual_seed(seed)
    known = fuzz_modules.ORDINARY | fuzz_modules.ODD | fuzz_modules.MIXING
    model = Model(False, [known[part]()], "mean" if pooled else None, "tensor", CLASSES)
    losses = fuzz_losses.ORDINARY | fuzz_losses.MIXING
    # As many as classes, tokens, one, and more than are verified.
    batches = [[0, 1, 2, 3], [4, 5, 6, 7, 8, 9, 10], [11, 12, 13], [14], list(range(8))]
    compared = program not in fuzz_losses.OF_SOME_SIZE
    return Training(
        model, losses[program], rows(seed, False, 3), batches, pooled=pooled,
        tolerance=CLOSE if compared else torch.inf,
    )  # fmt: skip


@pytest.mark.parametrize("name", ANY_PARTS)
def test_each_part(name: str) -> None:
    found = verdict(alone(name, "cross-entropy", 0))
    assert found == "accepted" or name not in fuzz_modules.ORDINARY


@pytest.mark.parametrize("pooled", [True, False], ids=["of examples", "of tokens"])
@pytest.mark.parametrize("name", fuzz_losses.ORDINARY)
def test_each_ordinary_loss(name: str, pooled: bool) -> None:
    training = alone("linear, tanh", name, 1, pooled)
    assert verdict(training) == "accepted", training.refusal


@pytest.mark.parametrize("name", fuzz_losses.MIXING)
def test_each_mixing_loss(name: str) -> None:
    verdict(alone("linear, tanh", name, 1))


@fuzzed(120)
@given(trainings(ANY_PARTS, [*fuzz_losses.ORDINARY]))
def test_any_module_is_computed_exactly_or_refused(training: Training) -> None:
    COUNTS["any module, " + verdict(training)] += 1


@fuzzed(140)
@given(trainings([*fuzz_modules.ORDINARY], ANY_LOSSES, size=1))
def test_any_loss_is_computed_exactly_or_refused(training: Training) -> None:
    COUNTS["any loss, " + verdict(training)] += 1


@fuzzed(40)
@given(trainings([*fuzz_modules.ORDINARY], [*fuzz_losses.ORDINARY], odd=False))
def test_ordinary_trainings_are_accepted(training: Training) -> None:
    found = verdict(training)
    COUNTS["ordinary, " + found] += 1
    assert found != "refused", training.refusal


@fuzzed(20)
@given(trainings([*fuzz_modules.RANDOM], [*fuzz_losses.ORDINARY], odd=False))
def test_random_layers_are_accepted(training: Training) -> None:
    """Their gradients are of numbers that were drawn, and are not compared."""
    found = verdict(training, compared=False)
    COUNTS["random, " + found] += 1
    assert found != "refused", training.refusal
