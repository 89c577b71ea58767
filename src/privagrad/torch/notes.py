"""How a loss was computed from a module's outputs: a graph that can be run again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from privagrad.torch.layout import Layout

if TYPE_CHECKING:
    from privagrad.torch.watch import Watch


class Note:
    """How a value was computed: a function of other notes and of constants.

    Notes, not tensors, refer to each other: an operation in place gives its tensor a new note.
    """

    def __init__(self, watch: Watch, made: Any, result: int | None, modified: int | None) -> None:
        self.watch, self.made, self.result, self.modified = watch, made, result, modified

    def __str__(self) -> str:
        func, *arguments = self.made
        constants = [x for x in tree_flatten(arguments)[0] if not isinstance(x, (Note, Tensor))]
        return f"{func} {constants} {self.result} {self.modified}"

    @property
    def sources(self) -> list[Note]:
        return [x for x in tree_flatten(self.made[1:])[0] if isinstance(x, Note)]

    @property
    def keeps_rows(self) -> bool:
        """Whether it is another view of its source with the same last dimension."""
        return self.made[0] in (Tensor.view, Tensor.reshape, Tensor.flatten)

    @property
    def has_constants(self) -> bool:
        """Whether tensors from elsewhere are in it, such as masks, which change with the batch."""
        return any(isinstance(x, Tensor) for x in tree_flatten(self.made)[0])

    def again(self, values: dict[int, Tensor]) -> Tensor:
        """The value, computed from other values of its sources."""
        func, *arguments = self.made
        leaves, structure = tree_flatten(arguments)
        leaves = [values[id(x)] if isinstance(x, Note) else x for x in leaves]
        if self.modified is not None:
            leaves[self.modified] = leaves[self.modified].clone()
        args, kwargs = tree_unflatten(leaves, structure)
        result = func(*args, **kwargs)
        if self.modified is not None:
            modified: Tensor = leaves[self.modified]
            return modified
        assert self.result is not None
        found: Tensor = tree_flatten(result)[0][self.result]
        return found


class Output(Note):
    """An output of the module, and where the examples are in it."""

    def __init__(self, watch: Watch, values: Tensor, count: int, layout: Layout) -> None:
        super().__init__(watch, None, None, None)
        self.values, self.count, self.layout = values, count, layout

    def __str__(self) -> str:
        return "output"

    @property
    def sources(self) -> list[Note]:
        return []

    def rows(self, tensor: Tensor) -> Tensor:
        """`tensor`, which is like the output, as (examples, values of one example)."""
        return self.layout.arrange(tensor, self.count, 0)

    def numbers(self, shape: tuple[int, ...]) -> Tensor:
        """The number of the example at each place of a tensor that has the output's first sizes."""
        numbers = torch.empty(shape, dtype=torch.float32, device=self.values.device)
        view = self.layout.view(numbers, self.count)
        own = torch.arange(self.count, dtype=torch.float32, device=numbers.device)
        view.copy_(own.reshape(-1, *[1] * (view.dim() - 1)).expand(view.shape))
        return numbers

    def changed(self, examples: Tensor, noise: float) -> Tensor:
        """Other values for some examples: those of their neighbours, and noise."""
        changed = self.values.clone()
        view = self.layout.view(changed, self.count)
        other = self.layout.view(self.values, self.count).roll(1, 0)[examples]
        if noise:
            size = self.values.std() + self.values.abs().mean() + 1e-3
            other = other + noise * size * torch.randn_like(other)
        view[examples] = other
        return changed


def history(note: Note | None) -> list[Note]:
    """Everything a value was computed from and itself, sources first."""
    done: dict[int, Note] = {}
    waiting = [] if note is None else [(note, False)]
    while waiting:
        here, ready = waiting.pop()
        if ready:
            done[id(here)] = here
        elif id(here) not in done:
            waiting.append((here, True))
            waiting.extend((source, False) for source in here.sources if id(source) not in done)
    return list(done.values())


def run_again(steps: list[Note], values: dict[int, Tensor]) -> Tensor:
    """The last of `steps` computed again from other values of the module's outputs."""
    for step in steps:
        if id(step) not in values:
            values[id(step)] = step.again(values)
    return values[id(steps[-1])]


def rows_of(steps: list[Note], shape: tuple[int, ...]) -> Tensor | None:
    """The example of each row, where `steps` only flatten an output whose rows stay whole."""
    leaf, *others = steps
    if not isinstance(leaf, Output) or leaf.values.dim() < 2 or len(shape) != 2:
        return None
    if leaf.values.shape[-1] != shape[-1] or not all(step.keeps_rows for step in others):
        return None
    if leaf.layout.axis >= leaf.values.dim() - 1:
        return None
    return leaf.numbers(leaf.values.shape[:-1]).reshape(-1).long()
