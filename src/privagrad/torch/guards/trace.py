"""How values were computed from the examples of a batch: a graph of functions and leaves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from privagrad.torch.guards.structure import leaves_of
from privagrad.torch.per_example.layout import Layout, RowOwners, row_layouts


class TraceNode:
    """How a value was computed: a function of other nodes and of constants.

    Nodes, not tensors, refer to each other: an operation in place gives its tensor a new node. A
    node whose batch has gone is `stale`.
    """

    after_read = after_write = False
    chosen: tuple[int, ...] | None = None
    """The shape of rows that the data have chosen."""

    sources: Sequence[TraceNode] = ()
    constants: Sequence[Any] = ()
    given: Sequence[Any] = ()
    """What the function was given: `sources` and `constants`."""

    def __init__(self, made: Any, place: int, written: bool, differentiable: bool) -> None:
        self.made, self.place, self.written = made, place, written
        self.differentiable = differentiable
        self.given = leaves_of(made[1:])
        self.sources = [x for x in self.given if isinstance(x, TraceNode)]
        self.constants = [x for x in self.given if not isinstance(x, TraceNode)]
        self.of_outputs: bool = any(source.of_outputs for source in self.sources)

    @property
    def stale(self) -> bool:
        return self.made is None

    def forget(self) -> None:
        self.made = None
        self.given = self.sources = self.constants = ()

    @property
    def name(self) -> str:
        return getattr(self.made[0], "__name__", str(self.made[0])) if self.made else ""


class Leaf(TraceNode):
    """Values that have an example in each of their rows; without a layout they have none.

    `unpadded` are those of some examples as if each was the batch, without padding to others'.
    """

    of_outputs = False

    def __init__(self, values: Tensor, count: int, layout: Layout | None, graded: bool) -> None:
        self.made, self.differentiable = (), graded
        self.values, self.count, self.layout = values, count, layout
        self.unpadded: dict[int, Tensor] = {}

    def rows(self, examples: Sequence[int]) -> Tensor:
        """The values of some examples, as if they were the batch."""
        if self.layout is None:
            return self.values.clone()
        index = torch.tensor(examples, device=self.values.device)
        return self.layout.join(self.layout.split(self.values, self.count)[index]).contiguous()


class Output(Leaf):
    """An output of the private module; of the examples that are `wanted` it keeps the gradients.

    `batch` is the number of the batch that it was computed from; None where that is unknown.
    `needed` is whether the backward pass needs the values.
    """

    of_outputs = True
    needed = True
    batch: int | None = None

    def __init__(self, values: Tensor, count: int, layout: Layout | None, graded: bool) -> None:
        super().__init__(values, count, layout, graded)
        self.wanted: frozenset[int] = frozenset()
        self._received: dict[int, Tensor] = {}

    def want(self, example: int) -> None:
        """Keep what the backward pass brings for an example."""
        self.wanted |= {example}

    def receive(self, example: int, gradient: Tensor) -> None:
        """A gradient of an example's values; those that come by several ways add up."""
        if example in self._received:
            gradient = self._received[example] + gradient
        self._received[example] = gradient

    def received(self, example: int) -> Tensor:
        assert self.layout is not None
        nothing = torch.zeros_like(self.layout.split(self.values, self.count)[example])
        return self._received.get(example, nothing)

    def let_go(self) -> None:
        """Forget the values, but for their shape: what is computed from them now is stale."""
        self.values = self.values.new_zeros(()).expand(self.values.shape)
        self.forget()


class SeparateLoss(Leaf):
    """A loss that was computed for each example by itself: nothing in it is left to check."""

    of_outputs = True

    def __init__(self, values: Tensor, count: int) -> None:
        super().__init__(values, count, None, True)


class BatchTensor(Leaf):
    """A tensor of a batch that the private data loader drew, by the number of the batch."""

    def __init__(self, values: Tensor, count: int, layout: Layout | None, number: int) -> None:
        super().__init__(values, count, layout, False)
        self.number = number


class Trace(list[TraceNode]):
    """Everything that a value was computed from, sources first, and the value itself at the end."""

    @property
    def leaves(self) -> list[Leaf]:
        return [step for step in self if isinstance(step, Leaf)]

    @property
    def n_examples(self) -> int:
        """How many examples the batch has; 0 without leaves."""
        return max((leaf.count for leaf in self.leaves), default=0)


def history(node: TraceNode | None) -> Trace:
    """The trace of a value; empty for None."""
    if node is None or not node.sources:
        return Trace([] if node is None else [node])
    done: dict[int, TraceNode] = {}
    waiting = [(node, False)]
    while waiting:
        here, ready = waiting.pop()
        if ready:
            done[id(here)] = here
        elif id(here) not in done:
            waiting.append((here, True))
            waiting.extend((source, False) for source in here.sources if id(source) not in done)
    return Trace(done.values())


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


def signature(
    steps: list[TraceNode], count: int, constants: bool = True, rows: bool = False
) -> int:
    """Equal for traces that do the same with another number of examples.

    With `constants` they also have the same constants; with `rows`, also those constants that have
    as many rows as there are examples.
    """
    numbers = {id(step): number for number, step in enumerate(steps)}

    def summary(x: Any) -> Any:
        if isinstance(x, TraceNode):
            return ("node", numbers[id(x)])
        if isinstance(x, Tensor):
            compared = constants and (rows or next(row_layouts(x.shape, count), None) is None)
            return ("tensor", x.dim(), digest(x) if compared else None)
        if isinstance(x, int | float) and not constants:
            return "number"
        if isinstance(x, int) and not isinstance(x, bool) and x and x % count == 0:
            return ("of the batch", x // count)
        return repr(x) if not isinstance(x, RowOwners) else "owners"

    parts: list[Any] = []
    for step in steps:
        if isinstance(step, Leaf):
            sizes = tuple(summary(n) for n in step.values.shape)
            parts.append((type(step).__name__, step.layout, sizes))
        else:
            given = tuple(map(summary, step.given))
            parts.append((step.name, given, step.place, step.written, step.chosen))
    return hash(tuple(parts))


def digest(value: Any) -> Any:
    """Something that tells constants with other values apart."""
    if not isinstance(value, Tensor):
        return repr(value)
    flat = value.detach().reshape(-1).double()
    weights = torch.arange(1, len(flat) + 1, dtype=torch.float64, device=flat.device).sqrt()
    return float(flat.nan_to_num(7.0) @ weights)
