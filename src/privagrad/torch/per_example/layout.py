"""Where the examples are in the tensors that a module hands to its layers.

Sizes alone do not tell: a batch of 35 sentences of 35 words is square. So the layout of a tensor
is learned by comparing it for a few examples with the same tensor for one of them alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence
from torch.utils._pytree import tree_flatten, tree_unflatten

from privagrad.torch.guards.structure import leaves_of

INPUTS = (PackedSequence,)
"""What is an input as a whole, though it has parts."""

CLOSE = 1e-3
"""How far two computations of the same number may differ, relative to the largest of its tensor."""


_AUTOCAST_DEVICES = ("cpu", "cuda", "mps", "xpu")

ROUNDING = 64.0
"""What activations that cancel may differ by, in units of their type's precision."""


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
        return self.split(tensor, count).reshape(count, -1, *last)

    def split(self, tensor: Tensor, count: int) -> Tensor:
        """(count, *shape of the tensor for one example), in the same memory."""
        size = tensor.shape[self.axis]
        if size % count:
            raise ValueError(
                f"Expected as many rows for each of {count} examples, found {size} rows in "
                f"dimension {self.axis} of shape {tuple(tensor.shape)}. Pad the examples to one "
                "length, and mask what was padded."
            )
        parts = (count, size // count) if self.together else (size // count, count)
        unflat = tensor.unflatten(self.axis, parts)
        return unflat.movedim(self.axis if self.together else self.axis + 1, 0)

    def join(self, parts: Tensor) -> Tensor:
        """The inverse of `split`."""
        moved = parts.movedim(0, self.axis if self.together else self.axis + 1)
        return moved.flatten(self.axis, self.axis + 1)

    def numbers(self, shape: Sequence[int], count: int) -> Tensor:
        """The number of the example at each place of a tensor of this shape."""
        if tuple(shape) == (count,):
            return torch.arange(count)
        numbers = torch.empty(tuple(shape), dtype=torch.long)
        parts = self.split(numbers, count)
        own = torch.arange(count).reshape(-1, *[1] * (parts.dim() - 1))
        parts.copy_(own.expand(parts.shape))
        return numbers


def row_layouts(shape: Sequence[int], count: int) -> Iterator[Layout]:
    """Where a tensor of this shape may have its examples."""
    if len(shape) and shape[0] == count:
        yield Layout(0)
    if len(shape) > 1 and shape[1] == count:
        yield Layout(1)
    if len(shape) and shape[0] > count and shape[0] % count == 0:
        yield Layout(0)
        yield Layout(0, together=False)


class RowOwners:
    """The example that each row of a table belongs to."""

    def __init__(self, rows: Tensor, count: int) -> None:
        self.rows, self.count = rows, count

    def take(self, examples: Sequence[int]) -> RowOwners:
        """Those of some examples alone, in their order, which are numbered anew."""
        size = len(examples)
        for layout in row_layouts(self.rows.shape, self.count):
            if torch.equal(self.rows.cpu(), layout.numbers(self.rows.shape, self.count)):
                shape = list(self.rows.shape)
                shape[layout.axis] = shape[layout.axis] // self.count * size
                return RowOwners(layout.numbers(shape, size).to(self.rows.device), size)
        # Rows in the order of the examples, as a mask leaves them.
        counts = torch.bincount(self.rows.reshape(-1), minlength=self.count)[list(examples)]
        numbers = torch.arange(size, device=self.rows.device)
        return RowOwners(numbers.repeat_interleave(counts), size)


@dataclass(frozen=True)
class ObservedTensor:
    """A tensor on its way into a layer, or out of the module; it has `leading` dimensions in
    which the examples may be. `axis` is where they must be, for layers that cannot have them
    elsewhere; `shared` tensors may be the same for all examples, and `constant` ones must then
    have the same values whatever the examples are."""

    key: object
    name: str
    tensor: Tensor
    leading: int
    axis: int | None = None
    shared: bool = False
    constant: bool = False


class MixedExamplesError(ValueError):
    """What a module computes for an example depends on the other examples of the batch."""


def learned_layout(
    several: ObservedTensor, alone: Sequence[tuple[int, ObservedTensor]], count: int
) -> Layout | None:
    """The layout of a tensor seen for `count` examples, and for some of them alone by position.

    None where it is the same for any number of examples.
    """
    single = alone[0][1].tensor
    batch = several.tensor
    sizes = list(zip(batch.shape, single.shape, strict=False))
    differing = [axis for axis, (a, b) in enumerate(sizes) if a != b]
    if batch.dim() == single.dim() and not differing:
        return None
    axis = differing[0] if differing else -1
    if len(differing) == 1 and axis < several.leading and sizes[axis][0] == count * sizes[axis][1]:
        rows = sizes[axis][1]
        for layout in (Layout(axis), Layout(axis, together=False))[: 2 if rows > 1 else 1]:
            parts = layout.split(batch, count)
            if all(same(parts[position], one.tensor, ROUNDING) for position, one in alone):
                return layout
    # A squeeze() may have taken the dimension of the single example away.
    squeezed = batch.dim() == single.dim() + 1 and batch.shape[0] == count
    if squeezed and all(same(batch[position], one.tensor, ROUNDING) for position, one in alone):
        return Layout(0)
    raise mixed(several.name)


def mixed(name: str) -> MixedExamplesError:
    return MixedExamplesError(
        f"Expected a module that treats every example by itself, found that {name} "
        "sees other values for an example when other examples are beside it. Statistics over the "
        "batch cannot be private: normalise each example by itself (GroupNorm, LayerNorm), keep "
        "the examples in their order, and pad them to one length."
    )


def same(a: Tensor, b: Tensor, rounding: float = 0.0, scale: Tensor | None = None) -> bool:
    """Equal up to rounding, relative to the largest number, or to `scale` at each place.

    `rounding`, in units of the type's precision, is what numbers of size 1 that have cancelled may
    leave.
    """
    if a.shape != b.shape:
        return False
    if not (a.is_floating_point() or a.is_complex()):
        return bool(torch.equal(a, b))
    if not a.numel():
        return True
    if a.dtype == b.dtype and torch.equal(a, b):
        return True
    precision = max(torch.finfo(a.dtype).eps, autocast_precision(a.device.type))
    tolerance = CLOSE if precision < 1e-4 else 0.1
    noise = rounding * precision
    a, b = a.double(), b.double()
    largest = magnitudes(a).max() if scale is None else scale
    close = (a - b).abs() <= tolerance * largest + noise
    return bool((close | (a.isnan() & b.isnan()) | (a == b)).all())


def autocast_precision(device: str) -> float:
    """The relative precision of what autocast computes; 0 without."""
    if not torch.is_autocast_enabled(device):
        return 0.0
    return torch.finfo(torch.get_autocast_dtype(device)).eps


@contextmanager
def without_autocast() -> Iterator[None]:
    """What is computed here is computed in the precision of its operands."""
    with ExitStack() as stack:
        for device in _AUTOCAST_DEVICES:
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


def autocasts() -> bool:
    """Whether autocast is on for any kind of device."""
    return any(torch.is_autocast_enabled(device) for device in _AUTOCAST_DEVICES)


def in_single(value: Any) -> Any:
    """Tensors of half precision in float32, all else as it is."""
    half = isinstance(value, Tensor) and value.dtype in (torch.float16, torch.bfloat16)
    return value.float() if half else value


def magnitudes(tensor: Tensor) -> Tensor:
    """Absolute values; 0 where there is no finite number."""
    return tensor.masked_fill(~tensor.isfinite(), 0.0).abs()


def count_examples(inputs: Any, batch_first: bool) -> int:
    """The size of the examples' dimension of the first tensor among the inputs."""
    for leaf in leaves_of(inputs, INPUTS):
        if isinstance(leaf, PackedSequence):
            return int(leaf.batch_sizes[0])
        if isinstance(leaf, Tensor) and leaf.dim() > 0:
            return int(leaf.shape[0 if batch_first or leaf.dim() == 1 else 1])
    raise ValueError("Expected a tensor among the module's inputs, found none.")


def input_leaves(inputs: Any) -> tuple[list[Any], Any]:
    """The tensors and packed sequences among `inputs`, and the structure they stand in."""
    return tree_flatten(inputs, is_leaf=lambda x: isinstance(x, INPUTS))


def possible_axes(
    leaves: list[Any], count: int, batch_first: bool, of_batch: Sequence[bool]
) -> list[tuple[int | None, ...]]:
    """Where the examples may be in each leaf, the likeliest first; None: nowhere.

    The first leaf with a dimension of `count` examples has them for sure, and so have those that
    are computed from the batch. Of the others, a mask may be as large as the batch without being
    of it.
    """
    order = (0, 1) if batch_first else (1, 0)
    choices: list[list[int | None]] = []
    sure = False
    for leaf, known in zip_longest(leaves, of_batch, fillvalue=False):
        if isinstance(leaf, PackedSequence):
            fits: list[int | None] = [0]
        elif isinstance(leaf, Tensor):
            fits = [a for a in order if a < leaf.dim() and leaf.shape[a] == count]
        else:
            fits = []
        if fits and not sure:
            choices.append(fits[:1])
        else:
            choices.append(fits if fits and known else [*fits, None])
        sure = sure or bool(fits)
    first = tuple(options[0] for options in choices)
    guesses = [first]
    for place, options in enumerate(choices):
        guesses += [(*first[:place], option, *first[place + 1 :]) for option in options[1:]]
    # All leaves together have their second choice, such as states of layers.
    second = [options[1] if len(options) > 1 else options[0] for options in choices]
    guesses.append(tuple(second))
    # No other leaf belongs to the examples.
    alone = [options[0] if len(options) == 1 else None for options in choices]
    return list(dict.fromkeys([*guesses, tuple(alone)]))


def take(inputs: Any, axes: Sequence[int | None], examples: Sequence[int]) -> Any:
    """The inputs of some examples alone."""
    leaves, structure = input_leaves(inputs)
    chosen = [
        leaf if axis is None else _take(leaf, axis, examples)
        for leaf, axis in zip(leaves, axes, strict=True)
    ]
    return tree_unflatten(chosen, structure)


def _take(leaf: Any, axis: int, examples: Sequence[int]) -> Any:
    if isinstance(leaf, PackedSequence):
        padded, lengths = pad_packed_sequence(leaf, batch_first=True)
        rows, own = padded[list(examples)], lengths[list(examples)]
        rows = rows[:, : int(own.max())]
        sorts = leaf.sorted_indices is not None
        return pack_padded_sequence(rows, own, batch_first=True, enforce_sorted=not sorts)
    index = torch.tensor(examples, device=leaf.device)
    return leaf.detach().index_select(axis, index)


def with_unusual(inputs: Any, axes: Sequence[int | None], values: Sequence[float | None]) -> Any:
    """One example several times, each time with another of `values` in every second place.

    The value None changes nothing. Returns None where nothing can have one of the values.
    """
    leaves, structure = input_leaves(take(inputs, axes, [0] * len(values)))
    changed: set[int] = set()
    for leaf, axis in zip(leaves, axes, strict=True):
        if not isinstance(leaf, Tensor) or axis is None or leaf.dtype == torch.bool:
            continue
        rows = leaf.movedim(axis, 0)
        for row, value in enumerate(values):
            if value is None or not (leaf.is_floating_point() or value in (-1.0, 0.0)):
                continue
            # Whole numbers are words or classes: 1 is one of them, -1 is none.
            own = value if leaf.is_floating_point() else 1 + int(value)
            rows[row : row + 1][..., ::2] = own
            changed.add(row)
    if len(changed) < len(values) - values.count(None):
        return None
    return tree_unflatten(leaves, structure)
