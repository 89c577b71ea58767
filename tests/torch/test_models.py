"""Whole models, small: bounded sums equal the loop over examples, in one piece or in several."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from privagrad.torch import PrivacyEngine
from privagrad.torch.module import PrivateModule
from privagrad.torch.per_example.tape import Tape
from tests.torch.reference import (
    SCALES,
    Listed,
    assert_same,
    check,
    engine_sum,
    looped,
    middle_radius,
    squared,
)


class Words(nn.Module):
    """Embedded words, their mean, classes."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.out = nn.Embedding(11, 6, padding_idx=0), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        kept = (x != 0).to(self.out.weight.dtype)[..., None]
        return self.out((self.emb(x) * kept).sum(1) / kept.sum(1).clamp_min(1))


class Tied(nn.Module):
    """A language model whose decoder is its table of words."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.mix, self.dec = nn.Embedding(11, 6), nn.Linear(6, 6), nn.Linear(6, 11)
        self.dec.weight = self.emb.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.dec(self.mix(self.emb(x)).tanh())


class Flat(nn.Module):
    """All rows of all examples before the decoder, as old language models do."""

    def __init__(self, tokens_first: bool) -> None:
        super().__init__()
        self.emb, self.norm, self.dec = nn.Embedding(11, 6), nn.LayerNorm(6), nn.Linear(6, 4)
        self.tokens_first = tokens_first

    def forward(self, x: Tensor) -> Tensor:
        x = x.T if self.tokens_first else x
        h = self.norm(self.emb(x))
        y = self.dec(h.reshape(-1, h.shape[2])).reshape(*x.shape, -1)
        return y.transpose(0, 1) if self.tokens_first else y


class Attentive(nn.Module):
    """A transformer's encoder, in either layout, and classes."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.emb, self.place = nn.Embedding(11, 8), nn.Embedding(7, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 12, 0.0, batch_first=batch_first)
        self.out, self.batch_first = nn.Linear(8, 3), batch_first

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1]).expand(x.shape)
        h = self.emb(x) + self.place(places)
        if self.batch_first:
            return self.out(self.layer(h, src_key_padding_mask=x == 0).mean(1))
        return self.out(self.layer(h.transpose(0, 1)).mean(0))


class Patches(nn.Module):
    """A small vision transformer: patches, a class token, attention."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.token = nn.Conv2d(2, 8, 3, 3), Token(8)
        self.norm, self.heads = nn.LayerNorm(8), nn.MultiheadAttention(8, 2, batch_first=True)
        self.out = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.token(self.patch(x).flatten(2).transpose(1, 2)))
        return self.out((h + self.heads(h, h, h, need_weights=False)[0])[:, 0])


class Token(nn.Module):
    """One more token, with parameters of its own that no layer knows."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.token, self.gain = nn.Parameter(torch.randn(1, 1, size)), nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.gain * torch.cat([self.token.expand(len(x), -1, -1), x], 1)


class Twice(nn.Module):
    """Layers that are used twice, on other inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.mix = nn.Conv1d(5, 5, 3, padding=1), nn.Linear(7, 7)

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(self.conv(self.mix(self.conv(x).tanh())).tanh())


class Siamese(nn.Module):
    """Both halves of an example through the same layers, and their difference."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x[:, :4]) - self.body(x[:, 4:])


class Residual(nn.Module):
    """Activations in place, sums in place."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.out = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu_(self.one(x))
        h = F.relu(self.two(h), inplace=True) + h
        h += x
        return self.out(h)


class Sometimes(nn.Module):
    """A layer that only some batches use, and one that none does."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.unused = nn.Linear(8, 3), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.one(x)


class OwnAndOthers(nn.Module):
    """Parameters of its own beside modules that have some: a class token, places, a gain."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.places = (
            nn.Parameter(torch.randn(1, 1, 4)),
            nn.Parameter(torch.randn(5, 4)),
        )
        self.gain, self.out = nn.Parameter(torch.ones(())), nn.Linear(4, 2)
        self.layer = nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.cat([self.token.expand(len(x), -1, -1), x + self.places], 1)
        return self.out(self.layer(h)[:, 0]) * self.gain


class LearnedStart(nn.Module):
    """An LSTM that starts from parameters of the module around it."""

    def __init__(self) -> None:
        super().__init__()
        self.h, self.c = nn.Parameter(torch.randn(1, 1, 3)), nn.Parameter(torch.randn(1, 1, 3))
        self.lstm, self.out = nn.LSTM(4, 3, batch_first=True), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        before = tuple(s.expand(-1, len(x), -1).contiguous() for s in (self.h, self.c))
        return self.out(self.lstm(x, before)[0][:, -1])


class TimesFirst(nn.Module):
    """Times before examples within, and a parameter of its own at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.gru, self.mix, self.out = nn.GRU(4, 3), nn.Linear(4, 4), Scaled(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.gru(self.mix(x.transpose(0, 1)))[0])[-1]


class Scaled(nn.Module):
    """Numbers, each times a parameter."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, size))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class Causal(nn.Module):
    """Attention that sees what is before, and no padding."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.heads, self.out = nn.MultiheadAttention(4, 2, **options), nn.Linear(4, 2)
        self.batch_first = self.heads.batch_first

    def forward(self, x: Tensor) -> Tensor:
        padded, size = x.abs().sum(2) == 0, x.shape[1]
        before = torch.ones(size, size, dtype=torch.bool).triu(1)
        h = x if self.batch_first else x.transpose(0, 1)
        y = self.heads(h, h, h, key_padding_mask=padded, attn_mask=before)[0]
        return self.out(y).mean(1 if self.batch_first else 0)


def build() -> dict[str, tuple[nn.Module, Tensor]]:
    torch.manual_seed(0)
    words = torch.randint(1, 11, (7, 5))
    words[1::2, 3:] = 0
    image, rows = torch.randn(7, 2, 9, 9), torch.randn(7, 8)
    cnn = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1, bias=False), nn.GroupNorm(2, 4), nn.ReLU(inplace=True),
        nn.MaxPool2d(2), nn.Conv2d(4, 6, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(6, 3),
    )  # fmt: skip
    body, head = nn.Sequential(nn.Linear(8, 6), nn.LayerNorm(6), nn.Tanh()), nn.Linear(6, 3)
    body[0].weight.requires_grad_(False)
    body[1].bias.requires_grad_(False)
    sequences = torch.randn(7, 5, 4)
    sequences[1::2, 3:] = 0
    return {
        "own-parameters-and-others": (OwnAndOthers(), sequences),
        "learned-start": (LearnedStart(), sequences),
        "times-first": (TimesFirst(), sequences),
        "causal": (Causal(batch_first=True), sequences),
        "causal-times-first": (Causal(bias=False, add_zero_attn=True), sequences),
        "cnn": (cnn, image),
        "words": (Words(), words),
        "tied": (Tied(), words),
        "flat": (Flat(False), words),
        "flat-tokens-first": (Flat(True), words),
        "attentive": (Attentive(True), words),
        "attentive-tokens-first": (Attentive(False), words),
        "patches": (Patches(), image),
        "twice": (Twice(), torch.randn(7, 5, 7)),
        "siamese": (Siamese(), rows),
        "residual": (Residual(), rows),
        "frozen": (nn.Sequential(body, head), rows),
        "unused": (Sometimes(), rows),
        "own-parameters": (Token(4), torch.randn(7, 2, 4)),
        "dropout-off": (nn.Sequential(nn.Linear(8, 5), nn.Dropout(0.0), nn.Linear(5, 2)), rows),
    }


CASES = build()


@pytest.mark.parametrize("kind", SCALES)
@pytest.mark.parametrize("name", CASES)
def test_bounded_sum_equals_the_loop(name: str, kind: str) -> None:
    check(*CASES[name], kind)


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("name", CASES)
def test_accumulated_parts_equal_the_whole(name: str, size: int) -> None:
    check(*CASES[name], "general", max_physical_batch_size=size)


@pytest.mark.parametrize("name", CASES)
def test_double_precision(name: str) -> None:
    module, inputs = CASES[name]
    if inputs.is_floating_point():
        inputs = inputs.double()
    check(copy.deepcopy(module).double(), inputs, "general", tolerance=1e-11)


@pytest.mark.parametrize("name", ["cnn", "words", "tied", "attentive", "residual", "frozen"])
def test_half_precision(name: str) -> None:
    """Bounds hold of the gradients as they are, so a loop in bfloat16 differs by its rounding."""
    module, inputs = CASES[name]
    if inputs.is_floating_point():
        inputs = inputs.bfloat16()
    targets = torch.linspace(-1, 1, len(inputs)).bfloat16()
    module = copy.deepcopy(module).bfloat16()
    expected = looped(copy.deepcopy(module).float(), squared, _float(inputs), targets.float(),
                      "ball", 1.0)  # fmt: skip
    found = engine_sum(module, squared, inputs, targets, "ball", 1.0)
    assert all(f.dtype is torch.bfloat16 for f in found)
    assert_same(found, expected, tolerance=0.1)


def _float(inputs: Tensor) -> Tensor:
    return inputs.float() if inputs.is_floating_point() else inputs


def test_parameter_groups_share_one_bound() -> None:
    module, inputs = CASES["siamese"]
    targets = torch.linspace(-1, 1, len(inputs))
    radius = middle_radius(module, squared, inputs, targets, "ball")
    expected = looped(module, squared, inputs, targets, "ball", radius)
    module = copy.deepcopy(module)
    first, last = module.get_submodule("body.0"), module.get_submodule("body.2")
    groups: list[dict[str, Any]] = [
        {"params": last.parameters(), "lr": 0.5},
        {"params": first.parameters(), "lr": 0.25},
    ]
    before = [p.detach().clone() for p in module.parameters()]
    private, optimizer, loader = PrivacyEngine().make_private(
        module=module,
        optimizer=torch.optim.SGD(groups),
        data_loader=DataLoader(Listed(inputs, targets), batch_size=len(targets)),
        noise_multiplier=0.0,
        max_grad_norm=radius,
        poisson_sampling=False,
    )
    for x, y in loader:
        squared(private(x), y).backward()
        optimizer.step()
    moved = [b - p.detach() for b, p in zip(before, module.parameters(), strict=True)]
    rates = [0.25, 0.25, 0.5, 0.5]
    assert_same([m / rate for m, rate in zip(moved, rates, strict=True)], expected)


def test_a_mask_as_large_as_the_batch_is_not_cut() -> None:
    torch.manual_seed(0)
    module = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    x = torch.randn(5, 5, 8)
    mask = nn.Transformer.generate_square_subsequent_mask(5)
    tape = Tape(dict(module.named_parameters()))
    expected = module(x, src_mask=mask)
    assert torch.allclose(PrivateModule(module, tape)(x, src_mask=mask), expected, atol=1e-6)


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_a_compiled_module_trains_as_the_module_itself() -> None:
    """Gradients, to the last bit, are those of the module before torch.compile."""
    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(12, 4), torch.arange(12) % 3)
    plain = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    copied = copy.deepcopy(plain)
    compiled: Any = torch.compile(copied)
    found = []
    for module in (plain, compiled):
        options: dict[str, Any] = {
            "module": module,
            "optimizer": torch.optim.SGD(module.parameters(), lr=0.5),
            "data_loader": DataLoader(data, batch_size=6),
            "noise_multiplier": 1.0,
            "max_grad_norm": 0.1,
            "random_state": 3,
        }
        if module is compiled:
            with pytest.raises(ValueError, match="is compiled"):
                PrivacyEngine().make_private(**options, wrap_model=False)
            with pytest.warns(UserWarning, match="without torch.compile"):
                private, optimizer, loader = PrivacyEngine().make_private(**options)
        else:
            private, optimizer, loader = PrivacyEngine().make_private(**options)
        for inputs, targets in loader:
            optimizer.zero_grad()
            F.cross_entropy(private(inputs), targets).backward()
            optimizer.step()
        found.append([p.detach().clone() for p in private.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
