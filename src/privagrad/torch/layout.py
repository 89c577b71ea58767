"""Where the examples are in the tensors that a module hands to its layers.

Sizes alone do not tell: a batch of 35 sentences of 35 words is square. So the first batch is tried
twice, in part and in half of that part: the dimension that halves is the examples', and
what the common examples hold must be the same, or the module mixes examples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_flatten, tree_map

TRIED = 8
_CLOSE = 1e-3


@dataclass(frozen=True)
class Layout:
    """The examples' dimension; where it holds several rows an example, whether these lie together.

    >>> Layout(0).arrange(torch.zeros(6, 4), count=3, trailing=1).shape
    torch.Size([3, 2, 4])
    """

    axis: int
    together: bool = True

    def arrange(self, tensor: Tensor, count: int, trailing: int) -> Tensor:
        """`tensor` as (count, rows of an example, its last `trailing` dimensions)."""
        last = tensor.shape[tensor.dim() - trailing :]
        if count == 0:
            return tensor.reshape(0, 1, *last)
        return self.view(tensor, count).reshape(count, -1, *last)

    def view(self, tensor: Tensor, count: int) -> Tensor:
        """`tensor` with the examples first, in the same memory."""
        size = tensor.shape[self.axis]
        split = (count, size // count) if self.together else (size // count, count)
        unflat = tensor.unflatten(self.axis, split)
        return unflat.movedim(self.axis if self.together else self.axis + 1, 0)


@dataclass(frozen=True)
class Sighting:
    """A tensor on its way into a layer, or out of the module."""

    key: object
    name: str
    tensor: Tensor
    leading: int


def count_examples(args: Any, kwargs: Any, batch_first: bool) -> int:
    """The size of the examples' dimension of the first tensor among the arguments."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, PackedSequence):
            return int(value.batch_sizes[0])
        for leaf in tree_flatten(value)[0]:
            if isinstance(leaf, Tensor) and leaf.dim() > 0:
                return int(leaf.shape[0 if batch_first or leaf.dim() == 1 else 1])
    raise ValueError("Expected a tensor among the module's inputs, found none.")


def first_examples(inputs: Any, count: int, kept: int, batch_first: bool, all_of_them: bool) -> Any:
    """The inputs of the first `kept` of `count` examples; `all_of_them`, or the first alone."""
    axes = (0, 1) if batch_first else (1, 0)
    done = False

    def cut(leaf: Any) -> Any:
        nonlocal done
        if isinstance(leaf, Tensor) and (all_of_them or not done):
            for axis in axes:
                if leaf.dim() > axis and leaf.shape[axis] == count:
                    done = True
                    return leaf.narrow(axis, 0, kept)
        return leaf

    return tree_map(cut, inputs)


def find_layouts(
    run: Callable[[Any], list[Sighting]], inputs: Any, count: int, batch_first: bool
) -> dict[object, Layout]:
    """The layout of everything seen on the way of the first examples through a module.

    Raises
    ------
    ValueError
        Where what an example's rows hold depends on other examples, or where a layer with
        trainable parameters works on no example at all.
    """
    tried = min(count, TRIED)
    for all_of_them in (True, False):
        # A mask among the inputs may be as large as the batch without being of it.
        most = first_examples(inputs, count, tried, batch_first, all_of_them)
        some = first_examples(inputs, count, tried // 2, batch_first, all_of_them)
        try:
            whole, half = run(most), run(some)
            break
        except (RuntimeError, IndexError, ValueError, AssertionError):
            continue
    else:
        return {}
    if [s.key for s in whole] != [s.key for s in half]:
        return {}
    again: list[Sighting] | None = None
    layouts = {}
    for position, (a, b) in enumerate(zip(whole, half, strict=True)):
        layout = _compare(a, b, tried, same=True)
        if layout is None:
            again = again or run(most)
            if _same(a.tensor, again[position].tensor):
                raise ValueError(
                    f"Expected a module that treats every example by itself, found that {a.name} "
                    "sees other values for an example when other examples are beside it. "
                    "Statistics over the batch cannot be private: normalise each example by itself "
                    "(GroupNorm, LayerNorm)."
                )
            layout = _compare(a, b, tried, same=False)
        if layout is not None:
            layouts[a.key] = layout
    return layouts


def _compare(a: Sighting, b: Sighting, count: int, same: bool) -> Layout | None:
    half = count // 2
    differing = [
        axis
        for axis in range(min(a.leading, b.tensor.dim()))
        if a.tensor.shape[axis] != b.tensor.shape[axis]
    ]
    if not differing:
        if a.leading == 0:
            return Layout(0)
        raise ValueError(
            f"Expected {a.name} to work on the examples of the batch, found an input of shape "
            f"{tuple(a.tensor.shape)} that is the same for every batch: its gradient cannot be "
            "told apart by example. Repeat its input for every example, for instance with "
            "expand(batch_size, ...)."
        )
    axis = differing[0]
    if len(differing) > 1 or a.tensor.shape[axis] * half != b.tensor.shape[axis] * count:
        return None
    rows = a.tensor.shape[axis] // count
    for layout in (Layout(axis), Layout(axis, together=False))[: 2 if rows > 1 else 1]:
        trailing = a.tensor.dim() - a.leading
        kept = layout.arrange(a.tensor, count, trailing)[:half]
        if not same or _same(kept, layout.arrange(b.tensor, half, trailing)):
            return layout
    return None


def _same(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape:
        return False
    if not a.is_floating_point():
        return bool(torch.equal(a, b))
    a, b = a.double(), b.double()
    close = (a - b).abs() <= _CLOSE * a.abs().max() if a.numel() else a == b
    return bool((close | (a.isnan() & b.isnan()) | (a == b)).all())


@contextmanager
def undisturbed(module: nn.Module) -> Iterator[None]:
    """Evaluation mode, without gradients; flags, buffers and random numbers as they were after."""
    flags = [(m, m.training) for m in module.modules()]
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
    fast = torch.backends.mha.get_fastpath_enabled()
    try:
        with torch.random.fork_rng(), torch.no_grad():
            module.eval()
            torch.backends.mha.set_fastpath_enabled(False)
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        for m, training in flags:
            m.training = training
        for buffer, before in buffers:
            buffer.copy_(before)
