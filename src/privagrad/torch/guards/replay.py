"""A trace that is run again: for some of the examples alone, or with other values for some."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from privagrad.torch.guards.trace import Leaf, TraceNode
from privagrad.torch.per_example.layout import Layout, RowOwners, in_single

SHAPES = frozenset(
    {"view", "reshape", "expand", "repeat", "unflatten", "new_zeros", "new_ones", "new_full",
     "new_empty", "broadcast_to", "split", "chunk", "narrow", "as_strided"}
)  # fmt: skip
"""Functions whose whole numbers are sizes."""


@dataclass
class Replay:
    """A way to run a trace of `count` examples again for `examples` alone.

    Constants that have a row for each example are cut as `axes` says, by identity. Sizes that
    are those of the batch are replaced; so are numbers that a loss is multiplied with or divided
    by, as far as `scaled` says: multiples of the batch's size, or its inverse. `lengths` are sizes
    that the batch is padded to, with those in their place. With `single`, what is of half
    precision is computed in float32, where small differences show.
    """

    count: int
    examples: Sequence[int]
    axes: dict[int, Layout] = field(default_factory=dict)
    scaled: frozenset[str] = frozenset()
    lengths: dict[int, int] = field(default_factory=dict)
    single: bool = False

    def constants(self, given: Sequence[Any], name: str, numel: int) -> list[Any]:
        """The constants of a call; of its sizes those that are the batch's are replaced."""
        sizes = {i: x for i, x in enumerate(given) if type(x) is int} if name in SHAPES else {}
        own = self._own_sizes(sizes, name, numel)
        return [
            own[i] if i in own
            else x if isinstance(x, TraceNode)
            else self.constant(x, name)
            for i, x in enumerate(given)
        ]  # fmt: skip

    def _own_sizes(self, sizes: dict[int, int], name: str, numel: int) -> dict[int, int]:
        """The sizes of a call for these examples; `numel` tells which are the batch's, if any."""
        shorter = {i: self.lengths.get(x, x) for i, x in sizes.items()}
        reshapes = name in ("view", "reshape")
        for known in (sizes, shorter) if reshapes else (shorter,):
            places = [i for i, x in known.items() if is_multiple(x, self.count)]
            for chosen in _choices(known, places):
                replaced = {i: known[i] // self.count * len(self.examples) for i in chosen}
                found = known | replaced
                product = math.prod(x for x in found.values() if x != -1)
                rest = -1 in found.values() and product and numel % product == 0
                if not reshapes or product == numel or rest:
                    return found
        return shorter

    def constant(self, value: Any, name: str) -> Any:
        own = self._of_examples(value, name)
        if not self.single:
            return own
        half = isinstance(own, torch.dtype) and own in (torch.float16, torch.bfloat16)
        return torch.float32 if half else in_single(own)

    def _of_examples(self, value: Any, name: str) -> Any:
        size = len(self.examples)
        if isinstance(value, RowOwners):
            return value.take(self.examples)
        if isinstance(value, Tensor):
            layout = self.axes.get(id(value))
            value = self.shortened(value)
            if layout is None:
                return value
            if value.dim() == 1 and torch.equal(
                value.cpu(), torch.arange(self.count).to(value.dtype)
            ):
                return torch.arange(size, dtype=value.dtype, device=value.device)
            index = torch.tensor(self.examples, device=value.device)
            return layout.join(layout.split(value, self.count)[index])
        if isinstance(value, slice) and value.stop == self.count:
            return slice(value.start, size, value.step)
        if "multiple" in self.scaled and is_factor(name) and is_multiple(value, self.count):
            return value / self.count * size
        if "inverse" in self.scaled and is_factor(name) and value == 1 / self.count:
            return 1 / size
        return value

    def shortened(self, tensor: Tensor) -> Tensor:
        """A tensor without the padding of `lengths`."""
        for dim, size in enumerate(tensor.shape):
            if size in self.lengths:
                tensor = tensor.narrow(dim, 0, self.lengths[size])
        return tensor


def run_again(steps: list[TraceNode], values: dict[int, Tensor], view: Replay) -> Tensor:
    """The last of `steps` computed again from values of the leaves, by the leaves' identities."""
    for step in steps:
        if id(step) not in values:
            values[id(step)] = _run(step, values, view)
    return values[id(steps[-1])]


def _run(node: TraceNode, values: dict[int, Tensor], view: Replay) -> Tensor:
    """The value of a node, computed from other values of its sources."""
    func, *arguments = node.made
    if view.single and func in (Tensor.bfloat16, Tensor.half):
        func = Tensor.float
    leaves, structure = tree_flatten(arguments)
    first = next((values[id(x)].numel() for x in leaves if isinstance(x, TraceNode)), 0)
    leaves = view.constants(leaves, node.name, first)
    leaves = [values[id(x)] if isinstance(x, TraceNode) else x for x in leaves]
    if node.written:
        leaves[node.place] = leaves[node.place].clone()
    args, kwargs = tree_unflatten(leaves, structure)
    result = func(*args, **kwargs)
    if node.written:
        changed: Tensor = leaves[node.place]
        return changed
    found: Tensor = tree_flatten(result)[0][node.place]
    return found


def is_multiple(value: Any, count: int) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and value > 0 and value % count == 0


def is_factor(name: str) -> bool:
    return "div" in name or "mul" in name


def _choices(sizes: dict[int, int], places: list[int]) -> list[list[int]]:
    """Which of a call's sizes may be the batch's, the likeliest first."""
    if not places:
        return [[]]
    first = min(sizes)
    likely = [[], places[:1]] if sizes[first] == -1 else [places[:1], places[-1:]]
    return [*likely, places, []]


def example_sizes(leaves: Sequence[Leaf]) -> set[int]:
    """How many numbers an example may have in outputs and targets: products of their sizes."""
    sizes = {1}
    for leaf in leaves:
        if leaf.layout is not None and leaf.count:
            own = leaf.layout.split(leaf.values, leaf.count).shape[1:]
            for chosen in itertools.product((0, 1), repeat=min(len(own), 6)):
                sizes.add(math.prod(n for n, keep in zip(own, chosen, strict=False) if keep))
    return sizes


def batch_factors(steps: Sequence[TraceNode], count: int) -> list[tuple[int, float]]:
    """The numbers that a loss is scaled with and that may stand for the size of the batch."""
    return [
        (place, float(value))
        for place, step in enumerate(steps)
        if is_factor(step.name)
        for value in step.constants
        if is_multiple(value, count)
    ]
