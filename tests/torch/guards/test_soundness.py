"""Modules and losses that a private engine gets silently wrong: right here, or refused.

`agrees` is the property of all of them: the engine's bounded sum is that of the loop over
examples, or the step is refused before anything is released.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.data import DataLoader, TensorDataset

from privagrad.torch import PerExampleLoss, PrivacyEngine
from privagrad.torch.guards.refusals import UnverifiedError
from privagrad.torch.per_example.gradients import OuterProductGradient
from privagrad.torch.scales import Scale
from tests.torch.reference import assert_same, engine_sum, looped, squared
from tests.torch.small import Run, gradient_of, private, table

Loss = Callable[[Any, Tensor], Tensor]
ROWS, TOKENS = torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)
X = torch.randn(12, 5, generator=ROWS)
Y = torch.randint(0, 3, (12,), generator=ROWS)
SEQUENCES = torch.randn(12, 6, 5, generator=ROWS)
WORDS = torch.randint(0, 9, (12, 6), generator=TOKENS)
LABELS = torch.randint(0, 3, (12, 6), generator=TOKENS)
LABELS[0, 2:] = LABELS[3, 4:] = LABELS[7, 1:] = -100
NUMBERS = torch.linspace(-1, 1, 12)


def agrees(module: nn.Module, loss: Loss, x: Tensor, y: Tensor, radius: float = 0.5) -> None:
    torch.manual_seed(0)
    expected = looped(module, loss, x, y, "ball", radius)
    assert_same(engine_sum(module, loss, x, y, "ball", radius), expected)


def refused(module: nn.Module, loss: Loss, x: Tensor, y: Tensor, match: str | None = None) -> None:
    """Refused on every seed, before a release."""
    for seed in range(3):
        torch.manual_seed(seed)
        run = private(copy.deepcopy(module), TensorDataset(x, y), len(x), noise_multiplier=1.0)
        with pytest.raises((RuntimeError, ValueError), match=match):
            run.epoch(loss)
        assert run.optimizer.releases == 0


class FirstOf(nn.Module):
    """The first output of a layer."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        first: Tensor = self.layer(x)[0]
        return first


class InPlace(nn.Module):
    """Operations in place on outputs of layers, which are views for inputs of three dimensions."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.out = layer, nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        h = h[0] if isinstance(h, tuple) else h
        h[:, 0].mul_(2.0)
        h.view(-1).tanh_()
        return self.out(h)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.MultiheadAttention(5, 1, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.heads(x, x, x, need_weights=False)[0]


@pytest.mark.parametrize(
    "layer",
    [nn.Linear(5, 5), nn.LayerNorm(5), Attention(), nn.Conv1d(6, 6, 3, padding=1)],
    ids=lambda layer: type(layer).__name__,
)
def test_operations_in_place_on_outputs_that_are_views(layer: nn.Module) -> None:
    agrees(InPlace(layer), squared, SEQUENCES, NUMBERS)


class Gain(nn.Module):
    """A norm of one's own: no layer that the engine knows."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.linspace(0.5, 1.5, size))

    def forward(self, x: Tensor) -> Tensor:
        return x / (1 + x.norm(dim=-1, keepdim=True)) * self.gain


class Flattened(nn.Module):
    """All tokens of all examples in one dimension before some layer."""

    def __init__(self, layer: nn.Module, tokens_first: bool) -> None:
        super().__init__()
        self.first, self.layer, self.tokens_first = nn.Linear(5, 5), layer, tokens_first

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x.transpose(0, 1) if self.tokens_first else x)
        y = self.layer(h.reshape(-1, 5)).reshape(h.shape)
        return y.transpose(0, 1) if self.tokens_first else y


@pytest.mark.parametrize("tokens_first", [False, True])
@pytest.mark.parametrize("layer", [Gain(5), nn.PReLU(), nn.PReLU(5)], ids=["own", "one", "five"])
def test_own_modules_on_flattened_tokens(layer: nn.Module, tokens_first: bool) -> None:
    agrees(Flattened(layer, tokens_first), squared, SEQUENCES, NUMBERS)


class Positions(nn.Module):
    """Learned positions, and a mask: as many as there are examples in the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.positions, self.out = nn.Parameter(torch.randn(12, 5)), nn.Linear(5, 3)
        self.register_buffer("mask", torch.randn(12, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.add(x)) * self.mask

    def add(self, x: Tensor) -> Tensor:
        return x + self.positions


def test_positions_as_many_as_examples() -> None:
    generator = torch.Generator().manual_seed(3)
    agrees(Positions(), squared, torch.randn(12, 12, 5, generator=generator), NUMBERS)


class Tied(nn.Module):
    """One matrix twice: in one example's gradient both uses are one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 5)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh())


class TokensFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.gain = nn.Linear(5, 5), Gain(5)

    def forward(self, x: Tensor) -> Tensor:
        return self.gain(self.first(x).transpose(0, 1)).transpose(0, 1)


SQUARE = torch.randn(12, 12, 5, generator=ROWS)
VOUCHED = {
    "tied weights": (Tied, X),
    "in place": (lambda: InPlace(nn.Linear(5, 5)), SEQUENCES),
    "own module on flattened tokens": (lambda: Flattened(Gain(5), False), SEQUENCES),
    "as many tokens as examples, tokens first": (TokensFirst, SQUARE),
    "positions as many as examples": (Positions, SQUARE),
}


@pytest.mark.parametrize("name", VOUCHED)
def test_sums_are_exact_where_the_user_vouches(name: str) -> None:
    """Without verification, which would refuse what the engine gets wrong."""
    make, x = VOUCHED[name]
    torch.manual_seed(0)
    module = make()
    expected = looped(module, squared, x, NUMBERS, "ball", 0.5)
    assert_same(engine_sum(module, squared, x, NUMBERS, "ball", 0.5, verify=False), expected)


class OverTheBatch(nn.Module):
    """A graph convolution in which the examples of a batch are neighbours."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)
        self.register_buffer("edges", torch.rand(12, 12))

    def forward(self, x: Tensor) -> Tensor:
        return self.edges @ self.layer(x)


class Normalised(nn.Module):
    """Batch normalisation by hand, in training mode alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        return (h - h.mean(0)) / h.std(0) if self.training else h


class Tracked(nn.Module):
    """Statistics of the examples in a buffer that leaves with the module."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * h.detach().mean(0)
        return h


class Mixup(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            x = 0.7 * x + 0.3 * x[torch.randperm(len(x))]
        return self.layer(x)


class SortedInside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.out = nn.Linear(5, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        order = x[:, 0].argsort()
        return self.out(self.first(x)[order])[order.argsort()]


MIXING = {
    "graph convolution": OverTheBatch(),
    "batch normalisation by hand": Normalised(),
    "statistics in buffers": Tracked(),
    "mixup": Mixup(),
    "sorted inside": SortedInside(),
}


@pytest.mark.parametrize("name", MIXING)
def test_modules_that_mix_in_training_mode_are_refused(name: str) -> None:
    refused(MIXING[name], F.cross_entropy, X, Y)


class OtherForOne(nn.Module):
    """Two layers with the same weights, one of them for single examples."""

    def __init__(self) -> None:
        super().__init__()
        self.several, self.one = nn.Linear(5, 3), nn.Linear(5, 3)
        self.one.load_state_dict(self.several.state_dict())

    def forward(self, x: Tensor) -> Tensor:
        return self.one(x) if len(x) == 1 else self.several(x)


def test_other_layers_for_one_example_are_refused() -> None:
    refused(OtherForOne(), F.cross_entropy, X, Y, "calls other layers")


class Ramp:
    """A contrastive term whose weight is 0 at first."""

    def __init__(self) -> None:
        self.weight = 0.0

    def __call__(self, out: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(out, y) + self.weight * (out @ out.T).square().mean()
        self.weight += 0.1
        return loss


def test_a_contrastive_term_that_ramps_up_is_refused_when_it_begins() -> None:
    run = private(data=TensorDataset(X, Y), batch_size=4, noise_multiplier=1.0)
    ramp = Ramp()
    batches = list(run.loader)
    run.step(ramp, *batches[0])
    released = run.optimizer.releases
    with pytest.raises(UnverifiedError, match="alone"):
        run.step(ramp, *batches[1])
    assert run.optimizer.releases == released == 1


def test_a_second_loss_is_looked_at_too() -> None:
    run = private(data=TensorDataset(X, Y), batch_size=4)
    batches = list(run.loader)
    for batch in batches[:2]:
        run.step(F.cross_entropy, *batch)
    with pytest.raises(UnverifiedError):
        run.step(lambda out, y: out.logsumexp(0).sum(), *batches[2])


def over_the_batch(out: Tensor, y: Tensor) -> Tensor:
    return torch.logsumexp(out, 0).sum()


class WithAuxiliary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        out = self.layer(x)
        self.auxiliary = out.mean(0).square().sum()
        return out


class TestUnseenLosses:
    def test_through_autograd(self) -> None:
        run = private(data=TensorDataset(X, Y), noise_multiplier=1.0)
        for x, y in run.loader:
            with pytest.raises(RuntimeError, match="has not seen the loss"):
                torch.autograd.backward([F.cross_entropy(run.module(x), y)])
        assert run.optimizer.releases == 0

    def test_through_autograd_after_another_loss(self) -> None:
        run = private(data=TensorDataset(X, Y), batch_size=6)
        first, (x, y) = run.loader
        run.step(F.cross_entropy, *first)
        with pytest.raises(RuntimeError, match="has not seen the loss"):
            torch.autograd.backward([over_the_batch(run.module(x), y)])

    def test_scripted(self) -> None:
        with pytest.warns(DeprecationWarning, match="deprecated"):
            scripted = torch.jit.script(over_the_batch)
        refused(nn.Linear(5, 3), scripted, X, Y, "has not seen the loss")

    def test_kept_as_an_attribute(self) -> None:
        run = private(WithAuxiliary(), TensorDataset(X, Y), 12, noise_multiplier=1.0)
        for x, y in run.loader:
            out = run.module(x)
            loss = F.cross_entropy(out, y) + run.module.auxiliary
            with pytest.raises(UnverifiedError, match="an attribute of the module"):
                loss.backward()
            with pytest.raises(RuntimeError, match="has not seen the loss"):
                run.module.auxiliary.backward()

    def test_returned_by_the_module(self) -> None:
        class Whole(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer = nn.Linear(5, 3)

            def forward(self, x: Tensor) -> dict[str, Tensor]:
                out = self.layer(x)
                return {"loss": out.logsumexp(0).sum(), "logits": out}

        refused(Whole(), lambda out, y: out["loss"], X, Y, "return its own loss")
        agrees(Whole(), lambda out, y: F.cross_entropy(out["logits"], y), X, Y)


class Tagger(nn.Module):
    def __init__(self, outputs: Callable[[Tensor], Any] = lambda out: out) -> None:
        super().__init__()
        self.words, self.out, self.outputs = nn.Embedding(9, 4), nn.Linear(4, 3), outputs

    def forward(self, x: Tensor) -> Any:
        return self.outputs(self.out(self.words(x)))


@dataclass
class Answer:
    logits: Tensor


def masked(out: Tensor, y: Tensor) -> Tensor:
    mask = (y >= 0).float()
    losses = F.cross_entropy(out.transpose(1, 2), y, reduction="none")
    return (losses * mask).sum() / mask.sum()


def masked_by_item(out: Tensor, y: Tensor) -> Tensor:
    mask = (y >= 0).float()
    losses = F.cross_entropy(out.transpose(1, 2), y, reduction="none")
    return (losses * mask).sum() / mask.sum().item()


def weighted(out: Tensor, y: Tensor) -> Tensor:
    weights = 1.0 + y.float()
    return (weights * F.cross_entropy(out, y, reduction="none")).sum() / weights.sum()


def chosen(out: Tensor, y: Tensor) -> Tensor:
    losses = F.cross_entropy(out.transpose(1, 2), y, reduction="none")
    return losses[y >= 0].mean()


class TestNormalisers:
    @pytest.mark.parametrize("loss", [masked, masked_by_item, chosen])
    @pytest.mark.parametrize("padded", [True, False])
    def test_over_the_batch_are_refused(self, loss: Loss, padded: bool) -> None:
        """Also where the batch at hand has no padding, so that it would make no difference."""
        refused(Tagger(), loss, WORDS, LABELS if padded else LABELS.clamp(min=0))

    @pytest.mark.parametrize(
        ("number", "reason"),
        [(float, "a loss with the number"), (lambda t: t.item() / 7, "taken from the batch")],
        ids=["read", "computed"],
    )
    def test_that_python_has_are_refused(self, number: Any, reason: str) -> None:
        def read(out: Tensor, y: Tensor) -> Tensor:
            mask = (y >= 0).float()
            losses = F.cross_entropy(out.transpose(1, 2), y, reduction="none")
            return (losses * mask).sum() / number(mask.sum())

        run = private(Tagger(), TensorDataset(WORDS, LABELS), 12, loss_reduction="sum")
        with pytest.raises(UnverifiedError, match=reason):
            run.epoch(read)

    def test_by_sizes_of_chosen_rows_are_refused(self) -> None:
        def per_chosen(out: Tensor, y: Tensor) -> Tensor:
            losses = F.cross_entropy(out.transpose(1, 2), y, reduction="none")
            return losses.sum() / len(y[y >= 0])

        run = private(Tagger(), TensorDataset(WORDS, LABELS), 6, loss_reduction="sum")
        with pytest.raises(UnverifiedError, match=r"len\(\) of chosen rows"):
            run.epoch(per_chosen)

    def test_of_weights_are_refused(self) -> None:
        refused(nn.Linear(5, 3), weighted, X, Y, "keep examples apart")

    def test_of_unknown_origin_are_refused(self) -> None:
        """In a batch that did not come from the data loader nobody knows what a number counts."""
        run = private(Tagger(), TensorDataset(WORDS, LABELS))
        with pytest.raises(UnverifiedError, match="single numbers"):
            masked(run.module(WORDS), LABELS).backward()

    def test_in_data_classes_are_each_examples_own(self) -> None:
        agrees(
            Tagger(Answer),
            lambda out, y: F.cross_entropy(out.logits.reshape(-1, 3), y.reshape(-1)),
            WORDS, LABELS,
        )  # fmt: skip

    @pytest.mark.parametrize("loss", [masked, masked_by_item, chosen])
    def test_in_a_criterion_are_each_examples_own(self, loss: Loss) -> None:
        agrees(Tagger(), PerExampleLoss(loss), WORDS, LABELS)

    def test_that_are_constants_are_accepted(self) -> None:
        agrees(nn.Linear(5, 3), lambda out, y: F.cross_entropy(out, y) / 7.25, X, Y)

    def test_that_stay_when_the_batch_changes_are_not_its_size(self) -> None:
        """12 is the number of examples in the first batch, of their outputs in the second."""
        run = private(nn.Linear(5, 2), table(18), batch_size=12)
        with pytest.raises(UnverifiedError, match="put together by a sum"):
            run.epoch(lambda out, y: out.square().sum() / 12)
        assert run.optimizer.releases == 1

    def test_sums_called_means_are_refused(self) -> None:
        def summed(out: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(out, y, reduction="sum")

        refused(nn.Linear(5, 3), summed, X, Y, "by a sum, where loss_reduction is 'mean'")


class TestPerExampleLoss:
    def test_equals_the_criterion(self) -> None:
        out = torch.randn(4, 3)
        criterion = nn.CrossEntropyLoss()
        assert torch.allclose(PerExampleLoss(criterion)(out, Y[:4]), criterion(out, Y[:4]))
        total = PerExampleLoss(criterion, reduction="sum")(out, Y[:4])
        assert torch.allclose(total, 4 * criterion(out, Y[:4]))

    def test_functions_of_it_other_than_sums_are_refused(self) -> None:
        own = PerExampleLoss(nn.CrossEntropyLoss())
        agrees(nn.Linear(5, 3), lambda out, y: 2.0 * own(out, y) + out.square().mean(), X, Y)
        refused(nn.Linear(5, 3), lambda out, y: own(out, y) ** 2, X, Y)
        refused(nn.Linear(5, 3), lambda out, y: own(out - out.mean(0), y), X, Y)
        refused(nn.Linear(5, 3), lambda out, y: own(out, y.roll(1)), X, Y)

    def test_is_what_ghost_mode_returns(self) -> None:
        module = Tagger()
        private_module, optimizer, criterion, loader = PrivacyEngine().make_private(
            module=module,
            optimizer=torch.optim.SGD(module.parameters(), lr=0.0),
            data_loader=DataLoader(TensorDataset(WORDS, LABELS), batch_size=12),
            noise_multiplier=0.0,
            max_grad_norm=0.5,
            poisson_sampling=False,
            criterion=masked,
            grad_sample_mode="ghost",
        )
        expected = looped(copy.deepcopy(module), masked, WORDS, LABELS, "ball", 0.5)
        for x, y in loader:
            criterion(private_module(x), y).backward()
            optimizer.step()
        assert_same([gradient_of(p) for p in module.parameters()], expected)

    def test_rows_that_do_not_fit_are_refused(self) -> None:
        with pytest.raises(ValueError, match="4 and 12 rows"):
            PerExampleLoss(nn.CrossEntropyLoss())(torch.randn(4, 3), Y)
        flat = PerExampleLoss(nn.CrossEntropyLoss())
        refused(
            Tagger(),
            lambda out, y: flat(out.flatten(0, 1), y.flatten()),
            WORDS, LABELS, "of 12 examples, found 72 rows",
        )  # fmt: skip

    def test_an_empty_batch(self) -> None:
        run = private(data=TensorDataset(X, Y), noise_multiplier=1.0)
        PerExampleLoss(nn.CrossEntropyLoss())(run.module(X[:0]), Y[:0]).backward()
        run.optimizer.step()
        assert all(bool((g != 0).all()) for g in run.gradients)


class Packed(nn.Module):
    """Rows of packed sequences through a layer that sees a list of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.out = nn.Linear(5, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        lengths = 1 + (x[:, 0, 0] > 0).long() * 5 if self.uneven else torch.full((len(x),), 6)
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        hidden = packed._replace(data=self.layer(packed.data))
        padded, _ = pad_packed_sequence(hidden, batch_first=True, total_length=6)
        return self.out(padded)

    uneven = False


def test_a_later_batch_that_is_packed_otherwise_is_refused() -> None:
    module = Packed()
    run = private(module, TensorDataset(SEQUENCES, Y), 6, noise_multiplier=1.0)
    first, second = run.loader
    loss = PerExampleLoss(lambda out, y: out.square().mean())
    run.step(loss, *first)
    module.uneven = True
    with pytest.raises((RuntimeError, ValueError)):
        run.step(loss, *second)
    assert run.optimizer.releases == 1


class TestParametersThatNoLayerAccountsFor:
    def test_weight_norm(self) -> None:
        with pytest.warns(FutureWarning, match="deprecated"):
            module = nn.Sequential(nn.utils.weight_norm(nn.Linear(5, 3)))
        self.refused(module)

    def test_pruned(self) -> None:
        module = nn.Sequential(nn.Linear(5, 3))
        prune.l1_unstructured(module[0], "weight", 0.3)
        self.refused(module)

    def refused(self, module: nn.Module) -> None:
        run = private(module, TensorDataset(X, Y), 12, noise_multiplier=1.0)
        with pytest.raises((RuntimeError, ValueError), match="weight"):
            run.epoch()
        assert run.optimizer.releases == 0


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize(("columns", "steps"), [(64, 6), (8, 40)])
def test_norms_of_inputs_with_a_common_offset(
    columns: int, steps: int, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Terms 3000 times as large as their sum: norms by products of rows lose all their digits."""
    monkeypatch.setattr(OuterProductGradient, "affordable", lambda self: kept)
    torch.manual_seed(0)
    a, d = torch.randn(5, steps, columns) + 3000, torch.randn(5, steps, columns)
    d -= d.mean(1, keepdim=True)
    weight = torch.zeros(columns, columns)
    exact = torch.stack([(e.double().T @ i.double()).norm() for e, i in zip(d, a, strict=True)])
    found = OuterProductGradient(weight, a, d).squared_norms(Scale.ball(weight)).sqrt()
    assert torch.allclose(found.double(), exact, rtol=1e-3)


def test_inputs_changed_in_place_after_a_layer_are_refused() -> None:
    class Changed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(5, 5), nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            h = self.one(x)
            out = self.two(h)
            h += 1
            return out + h.sum(-1, keepdim=True)

    refused(Changed(), squared, X, NUMBERS, "changed in place")


@pytest.mark.parametrize(
    ("module", "x"),
    [
        (nn.Linear(5, 3), X),
        (nn.Linear(5, 3), SEQUENCES),
        (nn.Conv1d(6, 3, 3), SEQUENCES),
        (nn.Embedding(9, 3), WORDS),
        (FirstOf(nn.LSTM(5, 3, batch_first=True)), SEQUENCES),
        (FirstOf(nn.GRU(5, 3, batch_first=True)), SEQUENCES),
    ],
    ids=["linear", "sequences", "convolution", "embedding", "lstm", "gru"],
)
def test_inputs_changed_between_backward_and_step_are_refused(module: nn.Module, x: Tensor) -> None:
    """A loop that loads the next batch into the same memory."""
    run = private(copy.deepcopy(module), TensorDataset(x, NUMBERS), 12, noise_multiplier=1.0)
    for drawn, y in run.loader:
        squared(run.module(drawn), y).backward()
        drawn.copy_(drawn.flip(0))
        with pytest.raises(RuntimeError, match=r"changed in place"):
            run.optimizer.step()
    assert run.optimizer.releases == 0


def test_a_module_that_changes_its_inputs_is_refused() -> None:
    class Changing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            x -= 1
            return self.layer(x)

    refused(Changing(), squared, X, NUMBERS, "leaves its inputs as they are")


class TestLoops:
    def test_mixup_before_the_module_is_refused(self) -> None:
        run = private(data=TensorDataset(X, Y), noise_multiplier=1.0)
        for x, _ in run.loader:
            with pytest.raises(UnverifiedError, match="input of the module"):
                run.module(0.7 * x + 0.3 * x.flip(0))

    def test_other_work_on_the_batch_is_accepted(self) -> None:
        run = private(data=TensorDataset(X, Y), batch_size=12)
        for x, y in run.loader:
            noisy = x.clone() + 0.1 * torch.randn_like(x)
            run.step(F.cross_entropy, (noisy - 0.5).to(torch.float32), y)

    def test_what_was_computed_from_an_earlier_batch_is_refused(self) -> None:
        run = private(data=TensorDataset(X, Y), batch_size=4, noise_multiplier=1.0)
        earlier = [torch.zeros(3)]

        def centred(out: Tensor, y: Tensor) -> Tensor:
            loss = F.cross_entropy(out - earlier[-1], y)
            earlier.append(out.detach().mean(0))
            return loss

        with pytest.raises(UnverifiedError, match="an earlier batch"):
            run.epoch(centred)
        assert run.optimizer.releases == 1

    def test_inputs_computed_from_an_earlier_batch_are_refused(self) -> None:
        run = private(data=TensorDataset(X, Y), batch_size=4)
        batches = iter(run.loader)
        twice = 2 * next(batches)[0]
        next(batches)
        with pytest.raises(UnverifiedError, match="an earlier batch"):
            run.module(twice)

    def test_metrics_over_many_batches_are_accepted(self) -> None:
        run = private(data=TensorDataset(X, Y), batch_size=4)
        total, right = torch.zeros(()), torch.zeros(())
        for _ in range(3):
            for x, y in run.loader:
                out = run.module(x)
                loss = F.cross_entropy(out, y)
                loss.backward()
                run.optimizer.step()
                total += loss.detach()
                right += (out.argmax(1) == y).float().sum()
        assert float(total) > 0


class Holder(nn.Module):
    centre: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.frozen = nn.Linear(5, 3), nn.Parameter(torch.zeros(5), requires_grad=False)
        self.register_buffer("centre", torch.zeros(5))
        self.bank = [torch.zeros(5)]

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)

    def keep(self, where: str, mean: Tensor) -> None:
        kept = nn.Parameter(mean, requires_grad=False) if where == "frozen" else mean
        setattr(self, where, [mean] if where == "bank" else kept)

    def write(self, where: str, mean: Tensor) -> None:
        (self.bank[0] if where == "bank" else getattr(self, where)).copy_(mean)


@pytest.mark.parametrize("how", [Holder.keep, Holder.write], ids=["kept", "written"])
@pytest.mark.parametrize("where", ["bank", "centre", "frozen"])
def test_modules_that_hold_something_of_a_batch_are_refused(how: Any, where: str) -> None:
    module = Holder()
    run = private(module, TensorDataset(X, Y), 12)
    x, _ = next(iter(run.loader))
    how(module, where, x.mean(0))
    with pytest.raises(UnverifiedError, match=f"holds nothing of the batches.* in {where}:"):
        run.module(x)


class TestVerification:
    def count(self, run: Run, passes: int) -> int:
        for _ in range(passes):
            run.epoch()
        return run.module.guard.verifications

    def test_is_made_at_powers_of_two(self) -> None:
        run = private(data=table(16), batch_size=16)
        assert self.count(run, 1) == 1
        assert self.count(run, 7) == 4
        assert self.count(run, 92) == 7
        assert run.module.loss_guard.checks == 7

    def test_is_made_for_other_shapes(self) -> None:
        run = private(nn.Sequential(nn.Linear(5, 3)), TensorDataset(X, Y), 12)
        for length in (1, 2, 3, 4, 5):
            squared(run.module(SEQUENCES[:, :length]), NUMBERS).backward()
            run.optimizer.zero_grad()
        assert run.module.guard.verifications == 5

    def test_leaves_the_module_as_it_was(self) -> None:
        class Counting(nn.Module):
            calls: Tensor

            def __init__(self) -> None:
                super().__init__()
                self.layer, self.dropout = nn.Linear(5, 3), nn.Dropout(0.5)
                self.register_buffer("calls", torch.zeros(()))

            def forward(self, x: Tensor) -> Tensor:
                self.calls += 1
                return self.dropout(self.layer(x))

        module = Counting()
        run = private(module, TensorDataset(X, Y), 12)
        torch.manual_seed(5)
        expected = torch.rand(3)
        torch.manual_seed(5)
        run.module.guard.prepare(((X,), {}), 12, [False])
        assert torch.equal(torch.rand(3), expected)
        assert float(module.calls) == 0
        run.epoch()
        assert float(module.calls) == 1
        assert module.training

    def test_holds_norms_too(self, monkeypatch: pytest.MonkeyPatch) -> None:
        exact = OuterProductGradient.squared_norms
        monkeypatch.setattr(
            OuterProductGradient, "squared_norms", lambda *given: 0.9 * exact(*given)
        )
        run = private(data=TensorDataset(X, Y))
        with pytest.raises(UnverifiedError, match="to have the norm"):
            run.module(X)

    def test_can_be_left_to_the_user_who_then_vouches(self) -> None:
        run = private(Normalised(), TensorDataset(X, Y), 12, noise_multiplier=1.0, verify=False)
        run.epoch(lambda out, y: out.logsumexp(0).sum())
        assert run.optimizer.releases == 1
        assert not run.engine.report(1e-5).verified
        assert private(noise_multiplier=1.0).engine.report(1e-5).verified
