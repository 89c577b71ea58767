"""How values were computed from the examples of a batch: a graph that can be run again.

It can be run for some of the examples alone, and with other values for some of them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from privagrad.torch.per_example.layout import Layout

Take = Callable[[Tensor], Tensor]

SHAPES = frozenset(
    {"view", "reshape", "expand", "repeat", "unflatten", "new_zeros", "new_ones", "new_full",
     "new_empty", "broadcast_to", "split", "chunk", "narrow", "as_strided"}
)  # fmt: skip


class Owners:
    """The example that each row of a table belongs to."""

    def __init__(self, rows: Tensor, count: int) -> None:
        self.rows, self.count = rows, count

    def take(self, examples: Sequence[int]) -> Owners:
        """Those of some examples alone, in their order, which are numbered anew."""
        size = len(examples)
        for layout in row_layouts(self.rows.shape, self.count):
            if torch.equal(self.rows.cpu(), layout.numbers(self.rows.shape, self.count)):
                shape = list(self.rows.shape)
                shape[layout.axis] = shape[layout.axis] // self.count * size
                return Owners(layout.numbers(shape, size).to(self.rows.device), size)
        # Rows in the order of the examples, as a mask leaves them.
        counts = torch.bincount(self.rows.reshape(-1), minlength=self.count)[list(examples)]
        numbers = torch.arange(size, device=self.rows.device)
        return Owners(numbers.repeat_interleave(counts), size)


class TraceNode:
    """How a value was computed: a function of other nodes and of constants.

    Nodes, not tensors, refer to each other: an operation in place gives its tensor a new node. A
    node whose batch has gone is `stale`.
    """

    after_read = after_write = False
    chosen: tuple[int, ...] | None = None
    """The shape of rows that the data have chosen."""

    def __init__(self, made: Any, place: int, written: bool, differentiable: bool) -> None:
        self.made, self.place, self.written = made, place, written
        self.differentiable = differentiable
        self.of_outputs: bool = any(source.of_outputs for source in self.sources)

    @property
    def stale(self) -> bool:
        return self.made is None

    def forget(self) -> None:
        self.made = None

    @property
    def sources(self) -> list[TraceNode]:
        if self.made is None:
            return []
        return [x for x in tree_flatten(self.made[1:])[0] if isinstance(x, TraceNode)]

    @property
    def name(self) -> str:
        return getattr(self.made[0], "__name__", str(self.made[0])) if self.made else ""

    @property
    def constants(self) -> list[Any]:
        if self.made is None:
            return []
        return [x for x in tree_flatten(self.made[1:])[0] if not isinstance(x, TraceNode)]

    def again(self, values: dict[int, Tensor], view: Replay) -> Tensor:
        """The value, computed from other values of its sources."""
        func, *arguments = self.made
        leaves, structure = tree_flatten(arguments)
        first = next((values[id(x)].numel() for x in leaves if isinstance(x, TraceNode)), 0)
        leaves = view.constants(leaves, self.name, first)
        leaves = [values[id(x)] if isinstance(x, TraceNode) else x for x in leaves]
        if self.written:
            leaves[self.place] = leaves[self.place].clone()
        args, kwargs = tree_unflatten(leaves, structure)
        result = func(*args, **kwargs)
        if self.written:
            changed: Tensor = leaves[self.place]
            return changed
        found: Tensor = tree_flatten(result)[0][self.place]
        return found


class Leaf(TraceNode):
    """Values that have an example in each of their rows; without a layout they have none.

    `unpadded` are those of some examples as if each was the batch, without padding to others'.
    """

    of_outputs = False

    def __init__(self, values: Tensor, count: int, layout: Layout | None, graded: bool) -> None:
        self.made, self.differentiable = (), graded
        self.values, self.count, self.layout = values, count, layout
        self.unpadded: dict[int, Tensor] = {}

    @property
    def sources(self) -> list[TraceNode]:
        return []

    @property
    def constants(self) -> list[Any]:
        return []

    def rows(self, examples: Sequence[int]) -> Tensor:
        """The values of some examples, as if they were the batch."""
        if self.layout is None:
            return self.values.clone()
        index = torch.tensor(examples, device=self.values.device)
        return self.layout.join(self.layout.split(self.values, self.count)[index]).contiguous()


class Output(Leaf):
    """An output of the private module; with `wanted`, it keeps the gradient that it receives.

    `batch` is the number of the batch that it was computed from; None where that is unknown.
    """

    of_outputs = True
    wanted = False
    received: Tensor | None = None
    batch: int | None = None


class SeparateLoss(Leaf):
    """A loss that was computed for each example by itself: nothing in it is left to check."""

    of_outputs = True

    def __init__(self, values: Tensor, count: int) -> None:
        super().__init__(values, count, None, True)


class FromBatch(Leaf):
    """A tensor of a batch that the private data loader drew, by the number of the batch."""

    def __init__(self, values: Tensor, count: int, layout: Layout | None, number: int) -> None:
        super().__init__(values, count, layout, False)
        self.number = number


@dataclass
class Replay:
    """A way to run a trace of `count` examples again for `examples` alone.

    Constants that have a row for each example are cut as `axes` says, by identity. Sizes that
    are those of the batch are replaced; so are numbers that a loss is multiplied with or divided
    by, as far as `scaled` says: multiples of the batch's size, or its inverse. `lengths` are sizes
    that the batch is padded to, with those in their place.
    """

    count: int
    examples: Sequence[int]
    axes: dict[int, Layout] = field(default_factory=dict)
    scaled: frozenset[str] = frozenset()
    lengths: dict[int, int] = field(default_factory=dict)

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
        size = len(self.examples)
        if isinstance(value, Owners):
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


def history(node: TraceNode | None) -> list[TraceNode]:
    """Everything a value was computed from and itself, sources first."""
    done: dict[int, TraceNode] = {}
    waiting = [] if node is None else [(node, False)]
    while waiting:
        here, ready = waiting.pop()
        if ready:
            done[id(here)] = here
        elif id(here) not in done:
            waiting.append((here, True))
            waiting.extend((source, False) for source in here.sources if id(source) not in done)
    return list(done.values())


def run_again(steps: list[TraceNode], values: dict[int, Tensor], view: Replay) -> Tensor:
    """The last of `steps` computed again from values of the leaves, by the leaves' identities."""
    for step in steps:
        if id(step) not in values:
            values[id(step)] = step.again(values, view)
    return values[id(steps[-1])]


def signature(
    steps: list[TraceNode], count: int, constants: bool = True, rows: bool = False
) -> int:
    """Equal for traces that do the same with another number of examples.

    With `constants` they also have the same constants; with `rows`, also those constants that have
    as many rows as there are examples.
    """
    numbers = {id(step): number for number, step in enumerate(steps)}

    def told(x: Any) -> Any:
        if isinstance(x, TraceNode):
            return ("node", numbers[id(x)])
        if isinstance(x, Tensor):
            told_of = constants and (rows or next(row_layouts(x.shape, count), None) is None)
            return ("tensor", x.dim(), digest(x) if told_of else None)
        if isinstance(x, int | float) and not constants:
            return "number"
        if isinstance(x, int) and not isinstance(x, bool) and x and x % count == 0:
            return ("of the batch", x // count)
        return repr(x) if not isinstance(x, Owners) else "owners"

    parts: list[Any] = []
    for step in steps:
        if isinstance(step, Leaf):
            sizes = tuple(told(n) for n in step.values.shape)
            parts.append((type(step).__name__, step.layout, sizes))
        else:
            given = tuple(told(x) for x in tree_flatten(step.made[1:])[0])
            parts.append((step.name, given, step.place, step.written, step.chosen))
    return hash(tuple(parts))


def row_layouts(shape: Sequence[int], count: int) -> Iterator[Layout]:
    """Where a tensor of this shape may have its examples."""
    if len(shape) and shape[0] == count:
        yield Layout(0)
    if len(shape) > 1 and shape[1] == count:
        yield Layout(1)
    if len(shape) and shape[0] > count and shape[0] % count == 0:
        yield Layout(0)
        yield Layout(0, together=False)


def rows_stay_whole(node: TraceNode, shape: Sequence[int]) -> bool:
    """Whether a table (rows, classes) is just another view of one output, with whole rows."""
    leaf, *others = history(node)
    return (
        isinstance(leaf, Output)
        and leaf.layout is not None
        and leaf.values.dim() >= 2
        and len(shape) == 2
        and leaf.values.shape[-1] == shape[-1]
        and leaf.layout.axis < leaf.values.dim() - 1
        and all(keeps_rows(step) for step in others)
    )


def keeps_rows(step: TraceNode) -> bool:
    """Whether it has the numbers of its source, with the same last dimension."""
    return bool(step.made) and step.made[0] in _SAME_ROWS


_SAME_ROWS = frozenset(
    {Tensor.view, Tensor.reshape, Tensor.flatten, Tensor.contiguous, Tensor.float, Tensor.double}
)


def chooses(step: TraceNode) -> bool:
    """Whether the data say how many rows a value has."""
    return step.name in ("nonzero", "unique", "masked_select", "bincount") or (
        step.name == "__getitem__" and len(step.sources) > 1
    )


def digest(value: Any) -> Any:
    """Something that tells constants with other values apart."""
    if not isinstance(value, Tensor):
        return repr(value)
    tensor = value
    flat = tensor.detach().reshape(-1).double()
    weights = torch.arange(1, len(flat) + 1, dtype=torch.float64, device=flat.device).sqrt()
    return float(flat.nan_to_num(7.0) @ weights)
