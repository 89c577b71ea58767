"""What a forward pass does, as a value: when it does something new, it is verified again."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_QUIET = frozenset({"__get__", "size", "dim", "__len__", "numel", "_set_grad_enabled"})
_GATHER = frozenset({"index_select", "gather", "take_along_dim"})
_SCATTER = frozenset(
    {"scatter", "scatter_", "scatter_add", "scatter_add_", "scatter_reduce", "scatter_reduce_",
     "index_add", "index_add_", "index_copy", "index_copy_", "masked_select", "take", "put",
     "put_", "index_put", "index_put_", "nonzero", "unique", "where"}
)  # fmt: skip


class Recorder(TorchFunctionMode):
    """Notes every function called, the sizes of its results and its constants.

    `signature` is equal for passes that do the same with another number of examples. `volatile`
    says that rows are moved by numbers out of the data, so that the next pass with the same
    signature may put examples elsewhere.
    """

    def __init__(self, count: int, public: frozenset[int]) -> None:
        super().__init__()
        self.count, self.public = count, public
        self.volatile = False
        self._calls: list[Any] = []

    @property
    def signature(self) -> int:
        return hash(tuple(self._calls))

    def note(self, name: str, *values: Any) -> None:
        self._calls.append((name, *map(self._constant, values)))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "") or str(func)
        if name not in _QUIET:
            given = (*args, *kwargs.values()) if kwargs else args
            self._calls.append((name, *map(self._constant, given), self._constant(result)))
            if not self.volatile:
                self.volatile = self._moves(name, given)
        return result

    def _constant(self, value: Any) -> Any:
        """What a value tells of the computation: sizes and constants, relative to the batch."""
        if isinstance(value, Tensor):
            return tuple(self._size(n) for n in value.shape)
        if isinstance(value, bool | str) or value is None:
            return value
        if isinstance(value, int):
            return self._size(value)
        if isinstance(value, float):
            return value
        if isinstance(value, tuple | list):
            return tuple(self._constant(x) for x in value)
        return type(value).__name__

    def _size(self, n: int) -> Any:
        return ("of the batch", n // self.count) if n and n % self.count == 0 else n

    def _moves(self, name: str, given: Any) -> bool:
        """Whether a call may move examples to rows that depend on the data."""
        target = given[0] if given else None
        if not isinstance(target, Tensor) or id(target) in self.public or self.count < 2:
            return False
        if name in ("__getitem__", "__setitem__"):
            index = given[1] if isinstance(given[1], tuple) else (given[1],)
            tensors = [i for i in index if isinstance(i, Tensor)]
            if not tensors or any(self._is_own(i) for i in tensors):
                return False
            return any(id(i) not in self.public for i in tensors)
        if name in _GATHER:
            dim = next((x for x in given[1:] if isinstance(x, int)), 0)
            return target.dim() > 0 and target.shape[dim] % self.count == 0
        if name == "_pack_padded_sequence":
            return len(set(given[1].tolist())) > 1
        return name in _SCATTER and name != "where"

    def _is_own(self, index: Tensor) -> bool:
        """Whether an index takes every example from its own row."""
        own = index.reshape(-1)
        return len(own) == self.count and torch.equal(
            own.cpu(), torch.arange(self.count, dtype=own.dtype)
        )
