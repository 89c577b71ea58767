"""Embeddings that are the same for all examples: exact wherever they meet the examples."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from privagrad.torch.guards.refusals import UnverifiedError
from tests.torch.reference import SCALES, check
from tests.torch.small import private

WORDS = torch.randint(0, 9, (7, 6), generator=torch.Generator().manual_seed(2))
SQUARE = torch.randint(0, 9, (6, 6), generator=torch.Generator().manual_seed(3))

Meet = Callable[["Places", Tensor, Tensor], Tensor]


class Places(nn.Module):
    """Words and places, which meet in `meet`."""

    def __init__(self, meet: Meet, index: Callable[[int], Tensor] = torch.arange) -> None:
        super().__init__()
        self.table, self.places = nn.Embedding(9, 4), nn.Embedding(12, 4, padding_idx=3)
        self.mix, self.norm, self.out = nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 3)
        self.meet, self.index = meet, index

    def forward(self, x: Tensor) -> Tensor:
        h = self.meet(self, self.table(x), self.places(self.index(x.shape[1])))
        return self.out(h.tanh())


def row(size: int) -> Tensor:
    return torch.arange(size)[None]


def distances(size: int) -> Tensor:
    return (torch.arange(size)[:, None] - torch.arange(size)).abs()


def added_in_place(m: Places, h: Tensor, p: Tensor) -> Tensor:
    h = h * 1.0
    h += p
    return h


def tokens_first(m: Places, h: Tensor, p: Tensor) -> Tensor:
    return (h.transpose(0, 1) + p[:, None]).transpose(0, 1)


def expanded(m: Places, h: Tensor, p: Tensor) -> Tensor:
    return torch.cat([h, p.expand(len(h), -1, -1)], 1)


def biases(m: Places, h: Tensor, p: Tensor) -> Tensor:
    """As of relative positions: (T, T, heads) is added to products, beside a constant mask."""
    mask = torch.zeros(h.shape[1], h.shape[1]).fill_diagonal_(-2.0)
    bias = p.permute(2, 0, 1).unsqueeze(0) + mask
    q = h.unflatten(2, (4, 1)).transpose(1, 2)
    products = q @ q.transpose(2, 3)
    products += bias
    y = F.scaled_dot_product_attention(q, q, q, attn_mask=bias) + products.softmax(-1) @ q
    return y.transpose(1, 2).flatten(2)


CASES: dict[str, nn.Module] = {
    "added": Places(lambda m, h, p: h + p),
    "added by a row": Places(lambda m, h, p: h + p, row),
    "added first": Places(lambda m, h, p: p + h, row),
    "added in place": Places(added_in_place, row),
    "multiplied": Places(lambda m, h, p: h * p.sigmoid() - p),
    "tokens first": Places(tokens_first),
    "expanded": Places(expanded, row),
    "through a layer": Places(lambda m, h, p: h + m.norm(m.mix(p)), row),
    "through a layer without examples": Places(lambda m, h, p: h + m.norm(m.mix(p))),
    "sliced, turned and scaled": Places(lambda m, h, p: h + 2 * p.flip(1)[:, :6] / 3, row),
    "biases": Places(biases, distances),
    "with a constant": Places(lambda m, h, p: h + (p + torch.ones(6, 4)), row),
    "used twice": Places(lambda m, h, p: (h + p).tanh() * p, row),
    "of one place": Places(lambda m, h, p: h + p, lambda size: torch.tensor(5)),
}


@pytest.mark.parametrize("kind", SCALES)
@pytest.mark.parametrize("name", CASES)
def test_bounded_sum_equals_the_loop(name: str, kind: str) -> None:
    check(CASES[name], WORDS, kind)


@pytest.mark.parametrize("name", CASES)
def test_as_many_places_as_examples(name: str) -> None:
    check(CASES[name], SQUARE, "ball")
    check(CASES[name], SQUARE, "ball", max_physical_batch_size=4)


def of_the_batch(m: Places, h: Tensor, p: Tensor) -> Tensor:
    return h + p * h.mean()


def a_mean(m: Places, h: Tensor, p: Tensor) -> Tensor:
    return h + (p + h.mean(0))


def a_product(m: Places, h: Tensor, p: Tensor) -> Tensor:
    return F.linear(h, p[:4])


def chosen(m: Places, h: Tensor, p: Tensor) -> Tensor:
    return h + p[(h[:, :, 0] > 0).long()]


@pytest.mark.parametrize("meet", [of_the_batch, a_mean, a_product, chosen])
def test_meetings_that_cannot_be_followed_are_refused(meet: Meet) -> None:
    run = private(Places(meet), TensorDataset(WORDS, WORDS[:, 0] % 3), 7, noise_multiplier=1.0)
    with pytest.raises((UnverifiedError, ValueError), match="Expected"):
        run.epoch(lambda y, t: F.cross_entropy(y[:, 0], t))
    assert run.optimizer.releases == 0


class OfTheBatch(nn.Module):
    """One embedding for all examples, of what the batch is."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(9, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.table(x).mean(1) + self.table(x.max()))


def test_an_index_of_the_batch_is_refused() -> None:
    run = private(OfTheBatch(), TensorDataset(WORDS, WORDS[:, 0] % 3), 7, noise_multiplier=1.0)
    with pytest.raises((UnverifiedError, ValueError), match="Expected"):
        run.epoch(F.cross_entropy)
    assert run.optimizer.releases == 0


class Rarely(OfTheBatch):
    """The same, where a word is in the batch that few have."""

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.table(x).mean(1) + self.table((x == 8).any().long()))


def test_an_index_that_changes_with_rare_data_is_refused() -> None:
    """At a pass that is not due for verification otherwise."""
    words = (WORDS[:1] % 8).repeat(24, 1)
    words[10] = 8
    run = private(Rarely(), TensorDataset(words, words[:, 0] % 3), 4, noise_multiplier=1.0)
    with pytest.raises((UnverifiedError, ValueError), match="Expected"):
        run.epoch(F.cross_entropy)
    assert run.optimizer.releases == 2
