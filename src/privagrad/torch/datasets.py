"""Which rows the data sets of a data loader hold, and whether processes number them alike."""

from __future__ import annotations

import zlib
from collections.abc import Hashable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import ConcatDataset, Subset, TensorDataset

_LOOKED_AT = 2**25
"""About so many bytes of a tensor are compared between processes."""


class Beneath(NamedTuple):
    """Rows of a data set that a nest of Subset and ConcatDataset takes rows from.

    Rows of two data sets are the same where `memory` is and `first` + number is.
    """

    data: Any
    rows: NDArray[np.int64]
    memory: Hashable
    first: int


def numbering_of(data: Any, rows: NDArray[np.int64]) -> int:
    """A number that changes with which rows these are, and in which order.

    Seen are the numbers, those beneath Subset and ConcatDataset, and what tensors hold; not what
    other data sets hold.
    """
    found = zlib.crc32(rows.astype(np.int64).tobytes())
    for beneath in _rows_beneath(data, rows):
        found = zlib.crc32(beneath.rows.tobytes(), found)
        if type(beneath.data) is TensorDataset:
            for tensor in beneath.data.tensors:
                found = zlib.crc32(_some_bytes(tensor), found)
    return found


def _some_bytes(tensor: Tensor) -> bytes:
    """Those of a tensor; of a large one those of rows at equal distances."""
    if tensor.layout is not torch.strided:
        return b""
    step = max(1, tensor.numel() * tensor.element_size() // _LOOKED_AT)
    flat = tensor.detach()[::step].cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes()


def repeats_rows(data: Any) -> bool:
    """Whether a nest of Subset and ConcatDataset holds a row of a data set beneath it twice."""
    if not isinstance(data, Subset | ConcatDataset):
        return False
    found: dict[Hashable, list[NDArray[np.int64]]] = {}
    for beneath in _rows_beneath(data, np.arange(len(data))):
        found.setdefault(beneath.memory, []).append(beneath.first + beneath.rows)
    every = map(np.concatenate, found.values())
    return any(len(np.unique(rows)) < len(rows) for rows in every)


def _rows_beneath(data: Any, rows: NDArray[np.int64]) -> Iterator[Beneath]:
    """The data sets that rows of a nest come from, and which rows of each these are."""
    # Rows may be counted from the end.
    rows = np.where(rows < 0, rows + len(data), rows) if hasattr(data, "__len__") else rows
    if isinstance(data, Subset):
        yield from _rows_beneath(data.dataset, _integers(data.indices)[rows])
    elif isinstance(data, ConcatDataset):
        start = 0
        for part, end in zip(data.datasets, data.cumulative_sizes, strict=True):
            yield from _rows_beneath(part, rows[(rows >= start) & (rows < end)] - start)
            start = end
    else:
        yield Beneath(data, rows, *_memory_of(data))


def _memory_of(data: Any) -> tuple[Hashable, int]:
    """What tells rows of two data sets apart, and which row there a data set's first one is.

    Data sets of views of the same tensors hold the same rows.
    """
    tensors = data.tensors if isinstance(data, TensorDataset) else ()
    if not tensors or any(t.layout is not torch.strided for t in tensors):
        return id(data), 0
    step = tensors[0].stride(0)
    first = tensors[0].storage_offset() // step if step else 0
    memory = (
        (t.untyped_storage().data_ptr(), t.stride(), t.storage_offset() - first * t.stride(0))
        for t in tensors
    )
    return tuple(memory), first


def _integers(indices: Any) -> NDArray[np.int64]:
    found = np.asarray(indices)
    if np.issubdtype(found.dtype, np.integer):
        return found.astype(np.int64)
    return np.array([int(row) for row in indices], dtype=np.int64)
