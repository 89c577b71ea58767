"""Cross-entropy of a linear layer's output, chunk by chunk, is PyTorch's in everything."""

from __future__ import annotations

import copy
import gc
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from privagrad.torch import PrivacyEngine
from privagrad.torch.guards import linear_losses
from privagrad.torch.guards.refusals import UnverifiedError
from privagrad.torch.per_example import cross_entropy
from privagrad.torch.per_example.cross_entropy import CrossEntropy, shares_of
from tests.torch.reference import SCALES, Listed, assert_same, engine_sum, looped, middle_radius
from tests.torch.small import gradient_of

WORDS, WIDTH, LENGTH, BATCH = 11, 5, 7, 6
WEIGHT = torch.linspace(0.2, 2.0, WORDS)


class Model(nn.Module):
    """Words to the logits of words."""

    def __init__(self, bias: bool = True, tied: bool = False, view: Any = None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.hidden = nn.Linear(WIDTH, WIDTH)
        self.decoder = nn.Linear(WIDTH, WORDS, bias)
        if tied:
            self.decoder.weight = self.embedding.weight
        self.view = view

    def forward(self, words: Tensor) -> Tensor:
        logits: Tensor = self.decoder(torch.tanh(self.hidden(self.embedding(words))))
        return logits if self.view is None else self.view(logits)


def words(ignored: bool = False) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    x = torch.randint(0, WORDS, (BATCH, LENGTH), generator=generator)
    y = torch.randint(0, WORDS, (BATCH, LENGTH), generator=generator)
    if ignored:
        y[0, 3:] = -100
        y[2] = -100
        y[5, ::2] = -100
    return x, y


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """All losses are computed two rows at a time; lists the ways that their gradients went."""
    ways: list[str] = []
    backward, full = cross_entropy.LinearCall.hand_over, cross_entropy.full_gradient

    def hand_over(*given: Any) -> None:
        ways.append("chunks")
        backward(*given)

    def full_gradient(layer: Any, criterion: Any, rows: Any, factors: Tensor) -> Tensor:
        if len(rows.inputs) > LENGTH:
            ways.append("full")
        return full(layer, criterion, rows, factors)

    monkeypatch.setattr(cross_entropy, "SMALLEST", 0)
    monkeypatch.setattr(cross_entropy, "_CACHED", 2 * WORDS)
    monkeypatch.setattr(cross_entropy.LinearCall, "hand_over", hand_over)
    monkeypatch.setattr(linear_losses, "full_gradient", full_gradient)
    return ways


def mean_of_own(logits: Tensor, targets: Tensor, **options: Any) -> Tensor:
    """The loss of one example: the mean over its targets that count; class weights are factors."""
    losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none", **options)
    return losses.sum() / (targets != -100).sum().clamp(min=1)


def flat(**options: Any) -> Callable[[Tensor, Tensor], Tensor]:
    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), **options)

    return loss


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_losses_and_gradients_of_rows_are_those_of_pytorch(
    dtype: torch.dtype, weighted: bool, smoothing: float
) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = WEIGHT.to(dtype) if weighted else None
    for size in (0.1, 3.0, 300.0):
        logits = size * torch.randn(9, WORDS, generator=generator, dtype=dtype)
        logits.requires_grad_()
        targets = torch.randint(0, WORDS, (9,), generator=generator)
        expected = F.cross_entropy(
            logits, targets, weight, reduction="none", label_smoothing=smoothing
        )
        (exact,) = torch.autograd.grad(expected.sum(), logits)
        criterion = CrossEntropy(weight, label_smoothing=smoothing)
        shares, own = shares_of(logits.detach(), targets)
        losses = criterion.losses(logits.detach(), targets, own)
        gradient = criterion.gradient(shares, targets)
        tolerance = 2e-6 if dtype == torch.float32 else 1e-13
        assert torch.allclose(losses, expected, rtol=tolerance, atol=tolerance * size)
        assert torch.allclose(gradient, exact, rtol=tolerance, atol=tolerance)


CASES = list(itertools.product([False, True], [False, True], [0.0, 0.3]))


@pytest.mark.parametrize(("ignored", "weighted", "smoothing"), CASES)
@pytest.mark.parametrize("kind", SCALES)
@pytest.mark.parametrize("bias", [True, False])
def test_bounded_means_are_those_of_the_loop(
    fused: list[str], bias: bool, kind: str, ignored: bool, weighted: bool, smoothing: float
) -> None:
    torch.manual_seed(0)
    module, (x, y) = Model(bias), words(ignored)
    options = {"weight": WEIGHT if weighted else None, "label_smoothing": smoothing}

    def alone(logits: Tensor, targets: Tensor) -> Tensor:
        return mean_of_own(logits, targets, **options)

    radius = middle_radius(module, alone, x, y, kind)
    expected = looped(module, alone, x, y, kind, radius)
    assert_same(engine_sum(module, flat(**options), x, y, kind, radius), expected)
    assert fused == ["chunks"]
    parts = engine_sum(module, flat(**options), x, y, kind, radius, max_physical_batch_size=4)
    assert_same(parts, expected)
    assert len(fused) == 3


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_sums_and_rows(fused: list[str], reduction: str, tied: bool) -> None:
    torch.manual_seed(0)
    module, (x, y) = Model(tied=tied), words(ignored=True)

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        losses = F.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), WEIGHT, reduction=reduction
        )
        return losses if reduction == "sum" else (losses.view(targets.shape) ** 2).sum()

    expected = [BATCH * g for g in looped(module, loss, x, y, "general", 1.0)]
    found = engine_sum(module, loss, x, y, "general", 1.0, loss_reduction="sum")
    assert_same(found, expected)
    assert fused == ["chunks"]


VIEWS: dict[str, tuple[Any, Callable[[Tensor, Tensor], Tensor]]] = {
    "classes second": (None, lambda z, y: F.cross_entropy(z.transpose(1, 2), y)),
    "permuted inside": (lambda z: z.permute(0, 2, 1), F.cross_entropy),
    "next word": (
        None,
        lambda z, y: F.cross_entropy(z[:, :-1].transpose(1, 2), y[:, 1:]),
    ),
    "last word": (None, lambda z, y: F.cross_entropy(z[:, -1], y[:, -1])),
    "many dimensions": (
        None,
        lambda z, y: F.cross_entropy(z.transpose(1, 2).unsqueeze(2), y.unsqueeze(1)),
    ),
    "flat inside": (
        lambda z: z.view(-1, WORDS),
        lambda z, y: F.cross_entropy(z, y.flatten()),
    ),
}


@pytest.mark.parametrize("name", VIEWS)
def test_views_of_the_output(fused: list[str], name: str) -> None:
    torch.manual_seed(0)
    view, loss = VIEWS[name]
    module, (x, y) = Model(view=view), words()
    expected = looped(module, loss, x, y, "general", 0.1)
    assert_same(engine_sum(module, loss, x, y, "general", 0.1), expected)
    assert fused == ["chunks"]


def test_time_first(fused: list[str]) -> None:
    torch.manual_seed(0)
    module, (x, y) = Model(), words(ignored=True)
    expected = looped(module, mean_of_own, x, y, "general", 0.1)

    class TimeFirst(Model):
        def forward(self, words: Tensor) -> Tensor:
            return super().forward(words.T)

    other = TimeFirst()
    other.load_state_dict(module.state_dict())

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        assert logits.shape[:2] == (LENGTH, BATCH)
        return F.cross_entropy(logits.flatten(0, 1), targets.T.flatten())

    assert_same(engine_sum(other, loss, x, y, "general", 0.1), expected)
    assert fused == ["chunks"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_types(fused: list[str], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    module, (x, y) = Model().to(dtype), words()
    expected = looped(module, mean_of_own, x, y, "ball", 0.1)
    tolerance = 1e-9 if dtype == torch.float64 else 0.03
    assert_same(engine_sum(module, flat(), x, y, "ball", 0.1), expected, tolerance)
    assert fused == ["chunks"]


@pytest.mark.parametrize("frozen", ["weight", "bias", "everything before"])
def test_frozen_parameters(fused: list[str], frozen: str) -> None:
    torch.manual_seed(0)
    module, (x, y) = Model(), words()
    for part in (module.embedding, module.hidden):
        part.requires_grad_(frozen != "everything before")
    module.decoder.weight.requires_grad_(frozen != "weight")
    if module.decoder.bias is not None:
        module.decoder.bias.requires_grad_(frozen != "bias")
    expected = looped(module, mean_of_own, x, y, "general", 0.1)
    assert_same(engine_sum(module, flat(), x, y, "general", 0.1), expected)
    assert fused == ["chunks"]


def private(module: nn.Module, radius: float = 1e9, **options: Any) -> tuple[Any, Any, Any]:
    x, y = words()
    given = {"noise_multiplier": 0.0, "poisson_sampling": False, **options}
    return PrivacyEngine().make_private(
        module=module,
        optimizer=torch.optim.SGD(module.parameters(), lr=0.0),
        data_loader=DataLoader(Listed(x, y), batch_size=BATCH),
        max_grad_norm=radius,
        **given,
    )


def plain_gradients(module: nn.Module, loss: Callable[[nn.Module], Tensor]) -> list[Tensor]:
    twin = copy.deepcopy(module)
    return list(torch.autograd.grad(loss(twin), list(twin.parameters())))


def test_logits_are_there_for_everyone_and_other_losses_of_them_count(fused: list[str]) -> None:
    torch.manual_seed(0)
    module = Model()

    def loss(logits: Tensor, y: Tensor) -> Tensor:
        return flat()(logits, y) + 0.1 * logits.square().mean() + flat(weight=WEIGHT)(logits, y)

    x, y = words()
    exact = looped(module, lambda z, y: flat()(z, y) + 0.1 * z.square().mean()
                   + mean_of_own(z, y, weight=WEIGHT), x, y, "general", 0.1)  # fmt: skip
    assert_same(engine_sum(module, loss, x, y, "general", 0.1), exact)
    assert fused == ["chunks", "chunks"]
    model, _, loader = private(module)
    for words_, targets in loader:
        logits = model(words_)
        flat()(logits, targets).backward()
        assert torch.equal(logits.detach().argmax(-1), module.eval()(words_).argmax(-1))


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("how", ["retain_grad", "register_hook", "a view's hook", "grad_fn"])
def test_someone_who_looks_at_the_gradient_sees_all_of_it(
    fused: list[str], when: str, how: str
) -> None:
    torch.manual_seed(0)
    module = Model()
    x, y = words()
    logits = module(x).detach().requires_grad_()
    (exact,) = torch.autograd.grad(flat()(logits, y), logits)
    expected = plain_gradients(module, lambda m: flat()(m(x), y))
    model, optimizer, loader = private(module)
    for a, b in loader:
        seen: list[Tensor] = []
        optimizer.zero_grad()
        output = model(a)
        view = output.flatten(0, 1)

        def look(output: Tensor = output, view: Tensor = view, seen: Any = seen) -> None:
            if how == "retain_grad":
                output.retain_grad()
            elif how == "register_hook":
                output.register_hook(lambda g: seen.append(g))
            elif how == "a view's hook":
                view.register_hook(lambda g: seen.append(g))
            else:
                output.grad_fn.register_prehook(lambda g: seen.append(g[0]))  # type: ignore[union-attr]

        if when == "before":
            look()
        loss = F.cross_entropy(view, b.flatten())
        if when == "after":
            look()
        loss.backward()
        found = output.grad if how == "retain_grad" else seen[0]
        assert found is not None
        assert torch.allclose(found.reshape(exact.shape), exact, atol=1e-7)
        optimizer.step()
        assert_same([gradient_of(p) for p in module.parameters()], expected)
    assert fused == ([] if when == "before" else ["full"])


def test_a_hook_inside_the_module_is_part_of_it(fused: list[str]) -> None:
    torch.manual_seed(0)

    def halved(logits: Tensor) -> Tensor:
        if logits.requires_grad:
            logits.register_hook(lambda g: 0.5 * g)
        return logits.view(-1, WORDS)

    module, (x, y) = Model(view=halved), words()

    def loss(z: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(z, y.flatten())

    expected = looped(module, loss, x, y, "general", 0.1)
    assert_same(engine_sum(module, loss, x, y, "general", 0.1), expected)
    assert fused == []


def test_a_hook_that_changes_gradients_is_refused(fused: list[str]) -> None:
    model, _, loader = private(Model())
    for when in ("before", "after", "of the loss"):
        for x, y in loader:
            logits = model(x)
            if when == "before":
                logits.register_hook(lambda g: g.roll(1, 0))
            losses = F.cross_entropy(logits.transpose(1, 2), y, reduction="none")
            if when == "after":
                logits.register_hook(lambda g: g.roll(1, 0))
            elif when == "of the loss":
                losses.register_hook(lambda g: g * torch.linspace(0, 1, BATCH)[:, None])
            with pytest.raises(UnverifiedError, match="gradient of each example's outputs"):
                losses.mean().backward()


@pytest.mark.parametrize("change", ["in place", "without notice", "data", "a function's own"])
def test_changed_logits_go_the_ordinary_way(fused: list[str], change: str) -> None:
    torch.manual_seed(0)
    module, (x, y) = Model(), words()

    class Reversed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, z: Tensor) -> Tensor:
            return z.view_as(z)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return -gradient

    def loss(z: Tensor, y: Tensor) -> Tensor:
        if change == "in place":
            z = z.mul_(2.0)
        elif change == "without notice":
            with torch.no_grad():
                z[..., 0] = -3.0
        elif change == "data":
            z.data[..., 0] = -3.0
        else:
            z = Reversed.apply(z)
        return F.cross_entropy(z.flatten(0, 1), y.flatten())

    expected = looped(module, loss, x, y, "general", 0.1)
    assert_same(engine_sum(module, loss, x, y, "general", 0.1, verify=False), expected)
    assert fused == []


def test_what_is_not_a_whole_row_of_the_output_goes_the_ordinary_way(fused: list[str]) -> None:
    torch.manual_seed(0)
    module, (x, y) = Model(), words()
    losses: list[Callable[[Tensor, Tensor], Tensor]] = [
        lambda z, y: F.cross_entropy(z[..., :-1].flatten(0, 1), y.flatten() % (WORDS - 1)),
        lambda z, y: F.cross_entropy(z.tanh().flatten(0, 1), y.flatten()),
        lambda z, y: F.cross_entropy(z.flatten(0, 1), F.one_hot(y.flatten(), WORDS).to(z.dtype)),
        lambda z, y: F.cross_entropy(z.transpose(0, 1).reshape(-1, WORDS), y.T.flatten()),
    ]
    for loss in losses:
        expected = looped(module, loss, x, y, "general", 0.1)
        assert_same(engine_sum(module, loss, x, y, "general", 0.1), expected)
    assert fused == []


def test_two_passes_before_a_backward(fused: list[str]) -> None:
    torch.manual_seed(0)
    module = Model()
    x, y = words()
    both = plain_gradients(module, lambda m: flat()(m(x), y) + flat()(m(y), x))
    model, optimizer, loader = private(module)
    for a, b in loader:
        (flat()(model(a), b) + flat()(model(b), a)).backward()
        optimizer.step()
        assert_same([gradient_of(p) for p in module.parameters()], both)
    assert fused == ["chunks", "chunks"]


@pytest.mark.parametrize("kind", SCALES)
def test_examples_that_are_not_finite_count_as_zero(fused: list[str], kind: str) -> None:
    torch.manual_seed(0)
    module, (x, y) = Model(), words()
    with torch.no_grad():
        module.embedding.weight[3] = torch.nan
    finite = ~(x == 3).any(1)
    assert 0 < int(finite.sum()) < BATCH
    expected = looped(module, mean_of_own, x[finite], y[finite], kind, 0.1)
    found = engine_sum(module, flat(), x, y, kind, 0.1, verify=False)
    assert_same(found, [g * int(finite.sum()) / BATCH for g in expected])


def test_weights_that_are_not_finite_leave_nothing(fused: list[str]) -> None:
    module, (x, y) = Model(), words()
    with torch.no_grad():
        module.decoder.weight[3] = torch.inf
    for g in engine_sum(module, flat(), x, y, "ball", 0.1, verify=False):
        assert not bool(g.any())


def test_an_empty_batch_leaves_noise_alone(fused: list[str]) -> None:
    module = Model()
    model, optimizer, _ = private(module, 1.0, noise_multiplier=1.0)
    x, y = words()
    flat()(model(x[:0]), y[:0]).backward()
    optimizer.step()
    gradients = torch.cat([gradient_of(p).flatten() for p in module.parameters()])
    assert bool(gradients.isfinite().all())
    assert bool((gradients != 0).all())


def test_weights_may_change_before_the_step(fused: list[str]) -> None:
    """Gradients are those of the weights that the loss was computed with."""

    def gradients(change: bool) -> list[Tensor]:
        torch.manual_seed(0)
        module = Model()
        model, optimizer, loader = private(module)
        for x, y in loader:
            flat()(model(x), y).backward()
            if change:
                module.decoder.weight.data.mul_(0.5)
            optimizer.step()
        return [gradient_of(p) for p in optimizer.params]

    for a, b in zip(gradients(True), gradients(False), strict=True):
        assert torch.equal(a, b)
    assert fused == ["chunks"] * 2


def test_losses_of_other_examples_are_still_refused(fused: list[str]) -> None:
    model, _, loader = private(Model())
    for x, y in loader:
        rows = F.cross_entropy(model(x).transpose(1, 2), y, reduction="none")
        with pytest.raises(UnverifiedError):
            (rows.mean() ** 2).backward()
        with pytest.raises(UnverifiedError):
            flat(reduction="sum")(model(x), y).backward()


@pytest.mark.parametrize("kind", SCALES)
def test_norms_and_sums_of_one_pass_are_those_of_two(
    fused: list[str], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks of one example and chunks of several give the same."""
    torch.manual_seed(0)
    module, (x, y) = Model(), words()
    few = engine_sum(module, flat(), x, y, kind, 0.1)
    monkeypatch.setattr(cross_entropy, "_CACHED", 4 * WORDS * LENGTH)
    assert_same(engine_sum(module, flat(), x, y, kind, 0.1), few, 1e-6)


def test_the_logits_are_kept_until_the_step(fused: list[str]) -> None:
    """Nothing but the user's own references keeps them longer."""
    model, optimizer, loader = private(Model())
    for x, y in loader:
        flat()(model(x), y).backward()
        assert _logits_are_held()
        optimizer.step()
        assert not _logits_are_held()


@pytest.mark.parametrize("verify", [True, False])
def test_a_loss_that_is_kept_holds_nothing_after_the_step(fused: list[str], verify: bool) -> None:
    model, optimizer, loader = private(Model(), verify=verify)
    for x, y in loader:
        loss = flat()(model(x), y)
        loss.backward(retain_graph=True)
        optimizer.step()
        assert not _logits_are_held()
        with pytest.raises(RuntimeError, match="earlier batch" if verify else "loss again"):
            loss.backward()


def _logits_are_held() -> bool:
    gc.collect()
    tensors = [x for x in gc.get_objects() if issubclass(type(x), Tensor)]
    logits = [t for t in tensors if t.shape[-1:] == (WORDS,) and t.dim() > 1]
    return any(t.untyped_storage().nbytes() == 4 * BATCH * LENGTH * WORDS for t in logits)
