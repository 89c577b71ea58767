"""Parts of random modules: maps of (examples, tokens, WIDTH) to the same shape.

`ORDINARY` parts treat every example by itself, in a way that users write; `ODD` parts do so too,
but may be refused; `RANDOM` ones draw numbers; `MIXING` parts let examples see each other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

WIDTH = 4


class Apply(nn.Module):
    """A function of the input and of some layers, which are its children."""

    def __init__(self, function: Callable[..., Tensor], *layers: nn.Module) -> None:
        super().__init__()
        self.function, self.layers = function, nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, *self.layers)


class Own(nn.Module):
    """A function of the input and of parameters of its own."""

    def __init__(self, function: Callable[..., Tensor], *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.function = function
        self.own = nn.ParameterList([nn.Parameter(torch.randn(shape)) for shape in shapes])
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.gain * self.function(x, *self.own)


class Remembering(nn.Module):
    """Statistics of the examples it has seen, in a buffer or in an attribute."""

    mean: Tensor

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        if kind == "buffer":
            self.register_buffer("mean", torch.zeros(WIDTH))
        else:
            self.mean = torch.zeros(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = x - self.mean.clone()
        if self.training and len(x):
            self.mean = 0.7 * self.mean + 0.3 * x.detach().mean((0, 1))
        return y


class Scaled(nn.Linear):
    """A layer of PyTorch with another forward pass."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight - self.weight.mean(1, keepdim=True), self.bias)


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


def _in_place(x: Tensor, layer: nn.Module) -> Tensor:
    h: Tensor = layer(x)
    h[:, 0] += 1
    h.mul_(0.5).add_(x)
    return F.relu_(h.view(-1, WIDTH)).view(x.shape) + 0.1 * h


def _view_in_place(x: Tensor, layer: nn.Module) -> Tensor:
    h: Tensor = layer(x)
    half = h[..., : WIDTH // 2]
    half.tanh_()
    return h


def _twice(x: Tensor, layer: nn.Module) -> Tensor:
    y: Tensor = layer(layer(x).tanh())
    return y + x


def _transposed(x: Tensor, layer: nn.Module) -> Tensor:
    y: Tensor = layer(x.transpose(1, 2))
    return y.transpose(1, 2)


def _tokens_first(x: Tensor, layer: nn.Module) -> Tensor:
    y: Tensor = layer(x.transpose(0, 1).contiguous())
    return y.transpose(0, 1)


def _flat(x: Tensor, layer: nn.Module) -> Tensor:
    y: Tensor = layer(x.reshape(-1, x.shape[2]))
    return y.reshape(x.shape)


def _flat_tokens_first(x: Tensor, layer: nn.Module) -> Tensor:
    y: Tensor = layer(x.transpose(0, 1).reshape(-1, x.shape[2]))
    return y.reshape(x.shape[1], x.shape[0], WIDTH).transpose(0, 1)


def _recurrent(x: Tensor, layer: nn.Module) -> Tensor:
    y: Tensor = layer(x)[0]
    return y


def _recurrent_tokens_first(x: Tensor, layer: nn.Module) -> Tensor:
    y: Tensor = layer(x.transpose(0, 1))[0]
    return y.transpose(0, 1)


def _lengths(x: Tensor) -> Tensor:
    """How many tokens of each example count: a function of the data."""
    return (x.detach()[..., 0] > 0).sum(1).clamp(min=1)


def _packed(x: Tensor, layer: nn.Module) -> Tensor:
    packed = pack_padded_sequence(x, _lengths(x).cpu(), batch_first=True, enforce_sorted=False)
    y, _ = pad_packed_sequence(layer(packed)[0], batch_first=True, total_length=x.shape[1])
    return y + x


def _packed_linear(x: Tensor, layer: nn.Module) -> Tensor:
    packed = pack_padded_sequence(x, _lengths(x).cpu(), batch_first=True, enforce_sorted=False)
    y, _ = pad_packed_sequence(
        packed._replace(data=layer(packed.data)), batch_first=True, total_length=x.shape[1]
    )
    return y + x


def _attention(x: Tensor, layer: nn.Module) -> Tensor:
    y: Tensor = layer(x, x, x, need_weights=False)[0]
    return x + y


def _causal(x: Tensor, layer: nn.Module) -> Tensor:
    mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
    y: Tensor = layer(x, x, x, attn_mask=mask, need_weights=False)[0]
    return x + y


def _padded(x: Tensor, layer: nn.Module) -> Tensor:
    ignored = torch.arange(x.shape[1])[None] >= _lengths(x)[:, None]
    y: Tensor = layer(x, x, x, key_padding_mask=ignored, need_weights=False)[0]
    return x + y


def _places(x: Tensor, layer: nn.Module) -> Tensor:
    y: Tensor = layer(torch.arange(x.shape[1]).expand(x.shape[:2]))
    return x + y


def _fixed_places(x: Tensor, layer: nn.Module) -> Tensor:
    y: Tensor = layer(torch.arange(x.shape[1]))
    return x + y


def _masked(x: Tensor, layer: nn.Module) -> Tensor:
    kept = torch.arange(x.shape[1])[None] < _lengths(x)[:, None]
    return torch.where(kept[..., None], layer(x), 0.0)


def _two(x: Tensor, first: nn.Module, last: nn.Module) -> Tensor:
    y: Tensor = last(first(x).tanh())
    return y


def _branches(x: Tensor, first: nn.Module, last: nn.Module) -> Tensor:
    a, b = first(x).chunk(2, -1)
    y: Tensor = torch.cat([a * b.sigmoid(), last(x)[..., : WIDTH // 2]], -1)
    return y


def _sorted(x: Tensor, first: nn.Module, last: nn.Module) -> Tensor:
    order = _lengths(x).argsort(stable=True)
    y: Tensor = last(first(x).tanh()[order])[order.argsort()]
    return y


def _sorted_by_list(x: Tensor, first: nn.Module, last: nn.Module) -> Tensor:
    order = _lengths(x).argsort(stable=True)
    y: Tensor = last(first(x).tanh()[order.tolist()])[order.argsort().tolist()]
    return y


def _sorted_by_matrix(x: Tensor, first: nn.Module, last: nn.Module) -> Tensor:
    order = F.one_hot(_lengths(x).argsort(stable=True), len(x)).to(x.dtype)
    moved = last((order @ first(x).tanh().flatten(1)).reshape(x.shape))
    y: Tensor = (order.T @ moved.flatten(1)).reshape(x.shape)
    return y


def _experts(x: Tensor, first: nn.Module, last: nn.Module) -> Tensor:
    chosen = x.detach()[..., 0] > 0
    y = torch.zeros_like(x)
    y[chosen] = first(x[chosen])
    y[~chosen] = last(x[~chosen])
    return y + x


def _repeated(x: Tensor, first: nn.Module, last: nn.Module) -> Tensor:
    lengths = _lengths(x)
    rows = torch.arange(len(x)).repeat_interleave(lengths)
    back = F.one_hot(rows, len(x)).to(x.dtype).T
    moved = last(first(x).tanh().repeat_interleave(lengths, 0))
    return (back @ moved.flatten(1)).reshape(x.shape)


def _sometimes(x: Tensor, first: nn.Module, last: nn.Module) -> Tensor:
    y: Tensor = first(x) if bool((x.detach() > 1).any()) else last(x)
    return y


def _checkpointed(x: Tensor, layer: nn.Module) -> Tensor:
    y: Tensor = checkpoint(layer, x, use_reentrant=False)
    return y


def _own_norm(x: Tensor, gain: Tensor) -> Tensor:
    flat = x.reshape(-1, x.shape[2])
    return (flat / (flat.square().mean(1, keepdim=True) + 0.1).sqrt() * gain).reshape(x.shape)


def _own_positions(x: Tensor, places: Tensor) -> Tensor:
    return x + places[: x.shape[1]]


def _own_query(x: Tensor, query: Tensor) -> Tensor:
    return x * (x @ query).softmax(1)[..., None]


class RoundTrip(torch.autograd.Function):
    """The identity, with a backward pass that centres gradients over the batch."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient - gradient.mean(0)


def _hooked(x: Tensor, layer: nn.Module) -> Tensor:
    h: Tensor = layer(x) * 1.0
    if h.requires_grad:
        h.register_hook(lambda g: g - g.mean(0))
    return h


def _batch_norm(x: Tensor, gain: Tensor) -> Tensor:
    return (x - x.mean(0)) / (x.var(0, unbiased=False) + 0.1).sqrt() * gain


def _imputed(x: Tensor) -> Tensor:
    return torch.where(x > 1.5, x.mean(0), x)


def _graph(x: Tensor, layer: nn.Module) -> Tensor:
    flat = x.flatten(1)
    near = (flat @ flat.T).softmax(1)
    y: Tensor = layer((near @ flat).reshape(x.shape))
    return y


def _mixup(x: Tensor) -> Tensor:
    return 0.7 * x + 0.3 * x[torch.randperm(len(x))]


def _straight_through(x: Tensor) -> Tensor:
    mean = x.mean(0)
    return x + mean - mean.detach()


def _ghost_batches(x: Tensor) -> Tensor:
    """Each four examples of the batch are centred, as ghost batch normalisation does."""
    parts = [part - part.mean(0) if len(part) == 4 else part for part in x.split(4)]
    return torch.cat(parts)


def _capacity(x: Tensor, layer: nn.Module) -> Tensor:
    """A layer for the first three examples that ask for it, as experts of limited capacity."""
    asks = x.detach()[:, 0, 0] > 0
    served = asks & (asks.cumsum(0) <= 3)
    return x + layer(x) * served[:, None, None]


Part = Callable[[], nn.Module]

ORDINARY: dict[str, Part] = {
    "linear": linear,
    "linear, tanh": lambda: nn.Sequential(linear(), nn.Tanh()),
    "linear, relu in place": lambda: nn.Sequential(linear(), nn.ReLU(inplace=True)),
    "in place": lambda: Apply(_in_place, linear()),
    "view in place": lambda: Apply(_view_in_place, linear()),
    "twice": lambda: Apply(_twice, linear()),
    "two": lambda: Apply(_two, linear(), linear()),
    "branches": lambda: Apply(_branches, linear(), linear()),
    "layer norm": lambda: nn.LayerNorm(WIDTH),
    "group norm": lambda: Apply(_transposed, nn.GroupNorm(2, WIDTH)),
    "instance norm": lambda: Apply(_transposed, nn.InstanceNorm1d(WIDTH, eps=0.1, affine=True)),
    "convolution": lambda: Apply(_transposed, nn.Conv1d(WIDTH, WIDTH, 3, padding=1)),
    "grouped convolution": lambda: Apply(
        _transposed, nn.Conv1d(WIDTH, WIDTH, 1, groups=2, bias=False)
    ),
    "prelu": lambda: nn.PReLU(),
    "tokens first": lambda: Apply(_tokens_first, linear()),
    "flat": lambda: Apply(_flat, linear()),
    "flat, tokens first": lambda: Apply(_flat_tokens_first, linear()),
    "flat norm": lambda: Apply(_flat, nn.LayerNorm(WIDTH)),
    "lstm": lambda: Apply(_recurrent, nn.LSTM(WIDTH, WIDTH, batch_first=True)),
    "gru": lambda: Apply(
        _recurrent, nn.GRU(WIDTH, WIDTH // 2, bidirectional=True, batch_first=True)
    ),
    "rnn, tokens first": lambda: Apply(_recurrent_tokens_first, nn.RNN(WIDTH, WIDTH)),
    "packed lstm": lambda: Apply(_packed, nn.LSTM(WIDTH, WIDTH, batch_first=True)),
    "attention": lambda: Apply(_attention, nn.MultiheadAttention(WIDTH, 2, batch_first=True)),
    "causal attention": lambda: Apply(_causal, nn.MultiheadAttention(WIDTH, 2, batch_first=True)),
    "padded attention": lambda: Apply(_padded, nn.MultiheadAttention(WIDTH, 2, batch_first=True)),
    "encoder": lambda: nn.TransformerEncoderLayer(WIDTH, 2, 6, 0.0, batch_first=True),
    "places": lambda: Apply(_places, nn.Embedding(9, WIDTH)),
    "masked": lambda: Apply(_masked, linear()),
    "own norm": lambda: Own(_own_norm, (WIDTH,)),
    "own positions": lambda: Own(_own_positions, (9, WIDTH)),
    "own query": lambda: Own(_own_query, (WIDTH,)),
    "own forward": lambda: Scaled(WIDTH, WIDTH),
    "frozen": lambda: linear().requires_grad_(False),
}  # fmt: skip

ODD: dict[str, Part] = {
    "sorted": lambda: Apply(_sorted, linear(), linear()),
    "sorted by a list": lambda: Apply(_sorted_by_list, linear(), linear()),
    "sorted by a matrix": lambda: Apply(_sorted_by_matrix, linear(), linear()),
    "experts": lambda: Apply(_experts, linear(), linear()),
    "repeated": lambda: Apply(_repeated, linear(), linear()),
    "packed linear": lambda: Apply(_packed_linear, linear()),
    "fixed places": lambda: Apply(_fixed_places, nn.Embedding(9, WIDTH)),
    "sometimes": lambda: Apply(_sometimes, linear(), linear()),
    "checkpointed": lambda: Apply(_checkpointed, linear()),
}

RANDOM: dict[str, Part] = {
    "dropout": lambda: nn.Sequential(linear(), nn.Dropout(0.5)),
    "encoder with dropout": lambda: nn.TransformerEncoderLayer(WIDTH, 2, 6, 0.3, batch_first=True),
    "lstm with dropout": lambda: Apply(
        _recurrent, nn.LSTM(WIDTH, WIDTH, 2, batch_first=True, dropout=0.5)
    ),
}

MIXING: dict[str, Part] = {
    "own batch norm": lambda: Own(_batch_norm, (WIDTH,)),
    "batch norm": lambda: Apply(lambda x: x - x.mean((0, 1))),
    "detached batch norm": lambda: Apply(lambda x: x / (1 + x.detach().square().mean(0))),
    "largest of the batch": lambda: Apply(lambda x: x / x.abs().max().clamp(min=2.0)),
    "imputed": lambda: Apply(_imputed),
    "graph": lambda: Apply(_graph, linear()),
    "mixup": lambda: Apply(_mixup),
    "shift": lambda: Apply(lambda x: x + 0.5 * x.roll(1, 0)),
    "first example": lambda: Apply(lambda x: x - x[:1]),
    "softmax over the batch": lambda: Apply(lambda x: x.softmax(0)),
    "running statistics": lambda: Remembering("buffer"),
    "hidden statistics": lambda: Remembering("attribute"),
    "straight through": lambda: Apply(_straight_through),
    "hook": lambda: Apply(_hooked, linear()),
    "own backward": lambda: Apply(lambda x, layer: RoundTrip.apply(layer(x)), linear()),
    "attention over the batch": lambda: Apply(_attention, nn.MultiheadAttention(WIDTH, 2)),
    "ghost batches": lambda: Apply(_ghost_batches),
    "capacity": lambda: Apply(_capacity, linear()),
    "many examples": lambda: Apply(lambda x: x - float(len(x) > 4) * x.mean(0)),
    "lstm over the batch": lambda: Apply(_recurrent, nn.LSTM(WIDTH, WIDTH)),
}  # fmt: skip


def _last(h: Tensor) -> Tensor:
    return h[:, -1]


POOLS: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda h: h.mean(1),
    "max": lambda h: h.amax(1),
    "last": _last,
    "sum of squares": lambda h: h.square().sum(1) * 0.3,
}


class Model(nn.Module):
    """Tokens or vectors, parts one after the other, classes; in one of several forms."""

    def __init__(
        self,
        words: bool,
        parts: list[nn.Module],
        pool: str | None,
        form: str,
        classes: int,
        tied: bool = False,
    ) -> None:
        super().__init__()
        self.enter: nn.Module = nn.Embedding(classes, WIDTH) if words else nn.Linear(3, WIDTH)
        self.parts, self.pool, self.form = nn.Sequential(*parts), pool, form
        self.leave = nn.Linear(WIDTH, classes)
        if tied and words:
            self.leave.weight = self.enter.weight
        self.extra: Tensor | None = None

    def forward(self, x: Tensor) -> Any:
        h = self.parts(self.enter(x))
        self.extra = h.square().mean()
        y: Tensor = self.leave(POOLS[self.pool](h) if self.pool else h)
        return FORMS[self.form](y)


FORMS: dict[str, Callable[[Tensor], Any]] = {
    "tensor": lambda y: y,
    "tuple": lambda y: (y, 2 * y),
    "dictionary": lambda y: {"logits": y, "size": y.shape[0]},
    "list": lambda y: [y],
}


def logits_of(outputs: Any) -> Tensor:
    if isinstance(outputs, dict):
        outputs = outputs["logits"]
    found: Tensor = outputs if isinstance(outputs, Tensor) else outputs[0]
    return found
