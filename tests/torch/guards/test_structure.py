"""What a value holds: the leaves that PyTorch finds, and every module once."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict, deque, namedtuple
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils._pytree import tree_leaves

from privagrad.torch.guards.structure import leaves_of, modules_of

Pair = namedtuple("Pair", ["a", "b"])
x, y = torch.zeros(2), torch.ones(3)


class Listed(list[Any]):
    """A list that PyTorch does not take apart."""


VALUES: list[Any] = [
    x, None, 1, "a", {}, [], (), [x, [y, (1, None)]], {"b": x, "a": [y]}, Pair(x, {"c": y}),
    OrderedDict(b=x, a=y), defaultdict(list, a=[x]), deque([x, (y, 1)]), UserDict(a=x),
    Listed([x]), {1, 2}, [Pair(deque([x]), defaultdict(int, a=1)), nn.Linear(2, 2)],
    torch.max(torch.ones(2, 2), 0), torch.Size([1, 2]), slice(1, 2), x.numpy(),
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_leaves_are_those_of_pytorch(value: Any) -> None:
    found, expected = leaves_of(value), tree_leaves(value)
    assert [id(leaf) for leaf in found] == [id(leaf) for leaf in expected]


def test_queues_of_any_kind_are_taken_apart() -> None:
    class Queue(deque[Any]):
        pass

    assert [id(leaf) for leaf in leaves_of([Queue([x, [y]])])] == [id(x), id(y)]


def test_what_is_whole_is_not_taken_apart() -> None:
    packed = pack_sequence([torch.ones(2), torch.ones(1)])
    values: list[Any] = [packed, [packed], Pair(packed, 1), defaultdict(None, a=packed)]
    for value in values:
        assert leaves_of(value, (PackedSequence,))[0] is packed


def test_every_module_once() -> None:
    shared = nn.Linear(2, 2)
    module = nn.Sequential(shared, nn.Sequential(nn.ReLU(), shared), nn.ModuleDict({"a": shared}))
    module.register_module("nothing", None)
    found = modules_of(module)
    assert {id(m) for m in found} == {id(m) for m in module.modules()}
    assert len(found) == len(list(module.modules()))
