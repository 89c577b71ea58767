"""What a forward pass does, as a value: when it does something new, it is verified again."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from privagrad.torch.guards.random_functions import DRAWS, RandomDraws
from privagrad.torch.guards.structure import modules_of
from privagrad.torch.guards.traced import WATCHES

_QUIET = frozenset({"__get__", "size", "dim", "__len__", "numel", "_set_grad_enabled"})
_READS = frozenset({"item", "tolist", "__bool__", "__float__", "__int__", "__index__", "numpy"})
_BY_DIMENSION = frozenset(
    {"index_select", "gather", "take_along_dim", "scatter", "scatter_", "scatter_add",
     "scatter_add_", "scatter_reduce", "scatter_reduce_", "index_add", "index_add_", "index_copy",
     "index_copy_", "repeat_interleave"}
)  # fmt: skip
_LOOK_UPS = frozenset({"embedding", "embedding_bag"})
_BY_MASK = frozenset(
    {"masked_select", "take", "put", "put_", "index_put", "index_put_", "nonzero", "unique",
     "masked_scatter", "masked_scatter_", "bincount"}
)  # fmt: skip


class RowMove(NamedTuple):
    """A call that may put rows elsewhere: the sizes it indexes, and whether rows stay in place."""

    name: str
    sizes: tuple[int, ...]
    in_place: bool


class Recorder(TorchFunctionMode):
    """Notes every function called, the sizes of its results and its constants.

    `signature` is equal for passes that do the same with another number of examples. `moves` are
    the calls in which numbers out of the data say which row goes where; `packed` are the lengths of
    packed sequences, whose rows cannot be told apart by example; `reads` says that Python has seen
    numbers out of the data, on which it may decide what to compute; `drawn` are random numbers, on
    which it may decide as well; `watched` is the memory of tensors whose gradient someone looks at.
    What happens inside of a layer is not noted; with `quiet`, no other
    function mode sees it either.
    """

    def __init__(self, count: int, public: frozenset[int], quiet: bool = True) -> None:
        super().__init__()
        self.count, self.public, self.quiet = count, public, quiet
        self.moves: list[RowMove] = []
        self.packed: set[int] = set()
        self.reads = False
        self.watched: set[int] = set()
        self.drawn = RandomDraws()
        self._calls: list[Any] = []
        self._inside = self._sorted = False

    @property
    def signature(self) -> int:
        return hash(tuple(self._calls))

    @contextmanager
    def layer(self, module: nn.Module, *given: Any) -> Iterator[None]:
        """A call of a layer."""
        self._calls.append((id(module), *map(self._constant, given)))
        # Masks and the like come later.
        first = given[0] if given and not isinstance(module, nn.RNNBase) else None
        if isinstance(first, Tensor) and first.dim() and first.shape[0] in self.packed:
            raise ValueError(
                f"Expected the examples in a dimension of the input of {type(module).__name__}, "
                "found the rows of packed sequences of different lengths: they cannot be told "
                "apart by example. Pad the sequences before this layer (pad_packed_sequence)."
            )
        if self.quiet:
            with torch._C.DisableTorchFunction():
                yield
            return
        self._inside = True
        try:
            yield
        finally:
            self._inside = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in WATCHES:
            self.watched.add(args[0].untyped_storage().data_ptr())
        name = getattr(func, "__name__", "") or str(func)
        if name not in _QUIET and not self._inside:
            given = (*args, *kwargs.values()) if kwargs else args
            self._calls.append((name, *map(self._constant, given), self._constant(result)))
            self._note_move(name, given)
            if name in DRAWS:
                self.drawn.numbers.append(self._for_the_batch(result))
            self.reads = self.reads or (name in _READS and id(given[0]) not in self.public)
        return result

    def _for_the_batch(self, result: Any) -> Tensor | None:
        """Random numbers that no dimension of the batch belongs to."""
        if not isinstance(result, Tensor):
            return None
        own = any(size and size % self.count == 0 for size in result.shape)
        return None if own else result.detach().clone()

    def _constant(self, value: Any) -> Any:
        """What a value tells of the computation: sizes and constants, relative to the batch."""
        if isinstance(value, Tensor):
            return tuple(self._size(n) for n in value.shape)
        if isinstance(value, bool | str | float) or value is None:
            return value
        if isinstance(value, int):
            return self._size(value)
        if isinstance(value, tuple | list):
            return tuple(self._constant(x) for x in value)
        return type(value).__name__

    def _size(self, n: int) -> Any:
        return ("of the batch", n // self.count) if n and n % self.count == 0 else n

    def _note_move(self, name: str, given: Any) -> None:
        target = given[0] if given else None
        if name in _LOOK_UPS and len(given) > 1:
            # The rows are looked up in the second one.
            target = given[1]
            if isinstance(target, Tensor) and id(target) not in self.public:
                stays = self._is_own(given[0])
                self.moves.append(RowMove(name, (target.shape[0],), stays))
            return
        if not isinstance(target, Tensor) or id(target) in self.public:
            return
        if caller := _packing(3):
            # Sorted by length and back: layers of packed sequences know of it.
            if name == "index_select" and caller == "pack_padded_sequence":
                self._sorted = not self._is_own(given[2])
            elif name == "_pack_padded_sequence":
                lengths = given[1].tolist()
                if self._sorted or len(set(lengths)) > 1:
                    self.packed.add(sum(lengths))
                self._sorted = False
        elif name in ("__getitem__", "__setitem__"):
            # A number written where a mask says stays in its row.
            if name == "__getitem__" or isinstance(given[2], Tensor):
                self._note_index(name, target, given[1])
        elif name in _BY_DIMENSION and target.dim():
            dim = next((x for x in given[1:] if type(x) is int), -1)
            dim = dim if -target.dim() <= dim < target.dim() else -1
            index = next((x for x in given[1:] if isinstance(x, Tensor)), None)
            stays = index is not None and index.dim() == 1 and self._is_own(index)
            self.moves.append(RowMove(name, (target.shape[dim],), stays))
        elif name in _BY_MASK:
            self.moves.append(RowMove(name, tuple(target.shape), False))

    def _note_index(self, name: str, target: Tensor, index: Any) -> None:
        """target[index]: which of its sizes are indexed by tensors."""
        parts = list(index) if isinstance(index, tuple) else [index]
        used = sum(x.dim() if _is_mask(x) else 1 for x in parts if x is not None and x is not ...)
        sizes: list[int] = []
        stays = False
        dim = 0
        for part in parts:
            if part is ...:
                dim += target.dim() - used
            elif isinstance(part, Tensor | list | np.ndarray):
                width = part.dim() if isinstance(part, Tensor) and _is_mask(part) else 1
                if not (isinstance(part, Tensor) and id(part) in self.public):
                    sizes += target.shape[dim : dim + width]
                stays = stays or (isinstance(part, Tensor) and self._is_own(part))
                dim += width
            elif part is not None:
                dim += 1
        if sizes:
            self.moves.append(RowMove(name, tuple(sizes), stays))

    def _is_own(self, index: Tensor) -> bool:
        """Whether an index takes every example from its own row."""
        own = index.reshape(-1)
        return (
            own.dtype != torch.bool
            and len(own) == self.count
            and torch.equal(own.cpu().long(), torch.arange(self.count))
        )


def _packing(depth: int) -> str:
    """The function of PyTorch that packs or pads sequences in the frame that far up, if any."""
    frame = sys._getframe(depth)
    packs = frame.f_globals.get("__name__") == "torch.nn.utils.rnn"
    return frame.f_code.co_name if packs else ""


def _is_mask(part: Any) -> bool:
    return isinstance(part, Tensor) and part.dtype == torch.bool


def public_tensors(module: nn.Module) -> frozenset[int]:
    """The module's own tensors, which hold nothing of the batch."""
    own = (kept for m in modules_of(module) for kept in (m._parameters, m._buffers))
    return frozenset(id(x) for kept in own for x in kept.values() if x is not None)
