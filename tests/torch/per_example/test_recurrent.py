"""LSTM, GRU and RNN: PyTorch's own outputs, and bounded sums equal to the loop over examples."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence
from torch.utils.data import DataLoader

from privagrad.torch import PrivacyEngine
from privagrad.torch.module import PrivateModule
from privagrad.torch.per_example.layout import count_examples, possible_axes, take
from privagrad.torch.per_example.tape import Tape
from tests.torch.reference import SCALES, Listed, assert_same, engine_sum, looped, middle_radius
from tests.torch.small import gradient_of

KINDS = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn": nn.RNN}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "two-layers": {"num_layers": 2},
    "no-bias": {"bias": False},
    "both-ways": {"bidirectional": True},
    "deep-both-ways": {"num_layers": 2, "bidirectional": True},
}
CASES = [(kind, option) for kind in KINDS for option in OPTIONS]


class Sequences(nn.Module):
    """A recurrent layer over (b, T, n); its outputs and last states all count."""

    def __init__(self, layer: nn.RNNBase, lengths: Tensor | None = None) -> None:
        super().__init__()
        self.layer, self.lengths = layer, lengths

    def forward(self, x: Tensor) -> Tensor:
        b = len(x)
        inputs: Tensor | PackedSequence = x if self.layer.batch_first else x.transpose(0, 1)
        if self.lengths is not None:
            sizes = (x[:, :, 0] != 0).sum(1)
            inputs = pack_padded_sequence(
                x if self.layer.batch_first else x.transpose(0, 1),
                sizes,
                batch_first=self.layer.batch_first,
                enforce_sorted=False,
            )
        y, states = self.layer(inputs)
        if self.lengths is not None:
            y, _ = pad_packed_sequence(
                y, batch_first=self.layer.batch_first, total_length=x.shape[1]
            )
        y = y if self.layer.batch_first else y.transpose(0, 1)
        states = states if isinstance(states, tuple) else (states,)
        last = [state.transpose(0, 1).reshape(b, -1) for state in states]
        return torch.cat([y.reshape(b, -1), *last], 1)


def loss(output: Tensor, target: Tensor) -> Tensor:
    weights = torch.linspace(0.5, 1.5, output.shape[1])
    return (output * weights - target[:, None]).square().sum(1).mean()


def made(kind: str, option: str, **more: Any) -> nn.RNNBase:
    torch.manual_seed(1)
    return KINDS[kind](4, 3, **OPTIONS.get(option, {}), **more)


def check(module: nn.Module, inputs: Tensor, kind: str) -> None:
    targets = torch.linspace(-1, 1, len(inputs))
    radius = middle_radius(module, loss, inputs, targets, kind)
    expected = looped(module, loss, inputs, targets, kind, radius)
    assert_same(engine_sum(module, loss, inputs, targets, kind, radius), expected)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize(("kind", "option"), CASES)
def test_outputs_and_input_gradients_are_pytorchs(
    kind: str, option: str, batch_first: bool
) -> None:
    module = Sequences(made(kind, option, batch_first=batch_first))
    x = torch.randn(5, 6, 4)
    plain, private = x.clone().requires_grad_(), x.clone().requires_grad_()
    expected = module(plain)
    loss(expected, torch.ones(5)).backward()
    tape = Tape(dict(module.named_parameters()))
    found = PrivateModule(module, tape)(private)
    loss(found, torch.ones(5)).backward()
    assert torch.allclose(found, expected, atol=1e-6)
    assert private.grad is not None
    assert plain.grad is not None
    assert torch.allclose(private.grad, plain.grad, atol=1e-5)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize(("kind", "option"), CASES)
def test_bounded_sum_equals_the_loop(kind: str, option: str, scale: str) -> None:
    check(Sequences(made(kind, option, batch_first=True)), torch.randn(5, 6, 4), scale)


@pytest.mark.parametrize("kind", KINDS)
def test_time_first(kind: str) -> None:
    check(Sequences(made(kind, "two-layers")), torch.randn(6, 6, 4), "general")


@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize("option", ["plain", "deep-both-ways"])
def test_projections(option: str) -> None:
    check(Sequences(made("lstm", option, proj_size=2)), torch.randn(5, 6, 4), "general")


def test_relu() -> None:
    check(Sequences(made("rnn", "plain", nonlinearity="relu")), torch.randn(5, 6, 4), "general")


@pytest.mark.parametrize("option", ["two-layers", "deep-both-ways"])
@pytest.mark.parametrize("kind", KINDS)
def test_packed_sequences(kind: str, option: str) -> None:
    x = torch.randn(5, 6, 4)
    for row, length in enumerate([6, 2, 4, 1, 6]):
        x[row, length:] = 0
    module = Sequences(made(kind, option, batch_first=True), torch.tensor(1))
    check(module, x, "general")


def test_given_states_get_their_gradients() -> None:
    layer = made("lstm", "two-layers", batch_first=True)
    x = torch.randn(5, 6, 4)

    def gradients(module: nn.Module) -> list[Tensor]:
        states = [torch.full((2, 5, 3), 0.1, requires_grad=True) for _ in range(2)]
        y, _ = module(x, tuple(states))
        y.square().sum().backward()
        return [state.grad for state in states if state.grad is not None]

    expected = gradients(layer)
    assert len(expected) == 2
    tape = Tape(dict(layer.named_parameters()), loss_reduction="sum")
    found = gradients(PrivateModule(layer, tape))
    for a, b in zip(found, expected, strict=True):
        assert torch.allclose(a, b, atol=1e-6)


def test_dropout_between_layers_is_active_in_training() -> None:
    layer = made("lstm", "two-layers", batch_first=True, dropout=0.5)
    private = PrivateModule(layer, Tape(dict(layer.named_parameters())))
    x = torch.randn(5, 6, 4)
    assert not torch.equal(private(x)[0], private(x)[0])
    private.eval()
    assert torch.equal(private(x)[0], private(x)[0])


def test_examples_along_time_are_refused() -> None:
    layer = made("lstm", "plain")
    private = PrivateModule(layer, Tape(dict(layer.named_parameters())))
    with pytest.raises(ValueError, match="batch_first"):
        private(torch.randn(5, 6, 4))


class Packed(nn.Module):
    """A module that is given packed sequences themselves."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer = made(kind, "both-ways")

    def forward(self, x: PackedSequence) -> Tensor:
        y, _ = self.layer(x)
        return pad_packed_sequence(y, batch_first=True, total_length=6)[0].flatten(1)


LENGTHS = {"sorted": [6, 5, 3, 2, 1], "unsorted": [6, 2, 4, 1, 6]}


def packed(x: Tensor, lengths: list[int], order: str) -> PackedSequence:
    return pack_padded_sequence(x, torch.tensor(lengths), True, enforce_sorted=order == "sorted")


def packed_run(module: nn.Module, order: str, verify: bool) -> list[Tensor]:
    """One step over packed sequences, and the same by the loop over examples."""
    lengths, x, y = LENGTHS[order], torch.randn(5, 6, 4), torch.arange(5.0)

    def example(t: Tensor, i: int) -> Any:
        return packed(t[i : i + 1], lengths[i : i + 1], "sorted")

    def collate(rows: list[tuple[Tensor, Tensor]]) -> Any:
        sequences, numbers = map(torch.stack, zip(*rows, strict=True))
        return packed(sequences, [lengths[int(number)] for number in numbers], order), numbers

    expected = looped(copy.deepcopy(module), loss, x, y, "ball", 0.5, example)
    private, optimizer, loader = PrivacyEngine().make_private(
        module=module,
        optimizer=torch.optim.SGD(module.parameters(), lr=0.0),
        data_loader=DataLoader(Listed(x, y), batch_size=5, collate_fn=collate),
        noise_multiplier=0.0,
        max_grad_norm=0.5,
        poisson_sampling=False,
        verify=verify,
    )
    for sequences, numbers in loader:
        loss(private(sequences), numbers).backward()
        optimizer.step()
    return expected


@pytest.mark.parametrize("order", LENGTHS)
@pytest.mark.parametrize("kind", KINDS)
def test_packed_inputs(kind: str, order: str) -> None:
    """Packed before they reach the module, rows lie among each other: the user vouches for them."""
    module = Packed(kind)
    expected = packed_run(module, order, verify=False)
    assert_same([gradient_of(p) for p in module.parameters()], expected)
    with pytest.raises(ValueError, match="keeps each row by itself"):
        packed_run(module, order, verify=True)


@pytest.mark.parametrize("order", LENGTHS)
def test_examples_are_taken_out_of_packed_sequences(order: str) -> None:
    x, lengths = torch.randn(5, 6, 4), LENGTHS[order]
    whole = packed(x, lengths, order)
    assert count_examples(((whole,), {}), True) == 5
    assert possible_axes([whole], 5, True, [True]) == [(0,)]
    for chosen in ([0], [2, 3], [1, 3, 4]):
        taken = take(whole, [0], chosen)
        rows, own = pad_packed_sequence(taken, batch_first=True)
        assert own.tolist() == [lengths[i] for i in chosen]
        for row, i in zip(rows, chosen, strict=True):
            assert torch.equal(row[: lengths[i]], x[i, : lengths[i]])
            assert not row[lengths[i] :].any()


def test_inputs_without_a_tensor_are_refused() -> None:
    with pytest.raises(ValueError, match="a tensor among the module's inputs, found none"):
        count_examples((("text", 3), {}), True)


@pytest.mark.parametrize("kind", KINDS)
def test_a_loss_that_is_kept_does_not_hold_what_its_backward_pass_needed(kind: str) -> None:
    steps, batch, size = 7, 5, 3
    module = Sequences(KINDS[kind](2, size, batch_first=True))
    model, optimizer, loader = PrivacyEngine().make_private(
        module=module, optimizer=torch.optim.SGD(module.parameters(), lr=0.0),
        data_loader=DataLoader(Listed(torch.randn(batch, steps, 2), torch.randn(batch))),
        noise_multiplier=0.0, max_grad_norm=1.0, poisson_sampling=False,
    )  # fmt: skip

    def held() -> bool:
        gc.collect()
        tensors = [t for t in gc.get_objects() if issubclass(type(t), Tensor)]
        return any(t.shape[:2] == (steps, 1) and t.shape[2] % size == 0 for t in tensors)

    for x, y in loader:
        loss = (model(x).flatten(1).mean(1) - y).square().mean()
        loss.backward()
        optimizer.step()
        assert not held()
        break
    assert loss.isfinite()
