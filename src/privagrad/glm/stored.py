"""Rows in files larger than memory, as partitions that are read one after the other."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from privagrad._internal.validate import Vector
from privagrad.glm.examples import (
    Examples,
    PartitionedExamples,
    Partitions,
    RowMap,
    Sample,
    Sums,
)
from privagrad.glm.rows import DenseRows, SparseRows
from privagrad.glm.standardize import offsets_like

LEAST_BYTES = 2**28
"""From so many bytes on, mapped rows are read part by part. The result does not depend on it."""

_PART_BYTES = 2**25
_PAGE, _TOGETHER = 4096, 64
"""Bytes of a page; how many single rows are read before their pages are let go of, with each of
which the system may map megabytes around it."""


@dataclass(frozen=True)
class StoredPartitions:
    """Rows in memory-mapped files, in memory only while they are used.

    Parts are of some 32 MB each, and the next one is read while the present one is used. Of a small
    sample its rows alone are read.

    Attributes
    ----------
    rows : DenseRows or SparseRows
        All rows, in memory-mapped arrays.
    targets : array of shape (n,)
        In memory or mapped.
    """

    rows: DenseRows | SparseRows
    targets: Vector

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows.shape

    @property
    def sparse(self) -> bool:
        return self.rows.sparse

    def total(self, function: Callable[..., Sums], *arguments: Any, sample: Sample | None) -> Sums:
        if sample is not None and sample[0].batches.sampling is None:
            sample = None
        if sample is not None and self._is_small(sample):
            samples, number = sample
            return self._of_rows(samples.of_step(number), function, arguments)
        sums: Sums | None = None
        for first, part in self._parts():
            if sample is not None:
                samples, number = sample
                rows = samples.of_step(number, first, first + part.shape[0])
                part = part.take(np.sort(rows) - first)
            found = function(part, *arguments)
            sums = found if sums is None else added(sums, found)
            del part
        if sums is None:
            raise ValueError("Expected rows in the files, found none.")
        return sums

    def kept(self, maps: Sequence[RowMap]) -> Partitions | None:
        """Mapping a part takes less time than reading a second file would."""
        return None

    def _is_small(self, sample: Sample) -> bool:
        """Whether a step's rows fit into a part, each with the page that it is in."""
        n, dim = self.shape
        entries = self.rows.entries_per_row if self.sparse else dim
        size = 8 * entries + _PAGE
        expected = n / sample[0].batches.epoch
        return expected * size <= _PART_BYTES

    def _of_rows(
        self, rows: NDArray[np.int64], function: Callable[..., Sums], arguments: tuple[Any, ...]
    ) -> Sums:
        self._require_whole()
        rows, whole = np.sort(rows), Examples(self.rows, self.targets)
        found = []
        for first in range(0, max(rows.size, 1), _TOGETHER):
            some = rows[first : first + _TOGETHER]
            found.append(whole.take(some))
            if some.size:
                self._forget(int(some[0]), int(some[-1]) + 1)
        return function(joined(found), *arguments)

    def _parts(self) -> Iterator[tuple[int, Examples]]:
        """The number of each part's first row, and the part, read ahead."""
        n, dim = self.shape
        entries = self.rows.entries_per_row if self.sparse else dim
        count = 2 ** max(int(_PART_BYTES / (8 * max(entries, 1.0))).bit_length() - 1, 0)
        places = [(first, min(first + count, n)) for first in range(0, n, count)]
        with ThreadPoolExecutor(1) as reader:
            coming: Future[None] | None = None
            for (first, stop), after in zip(places, [*places[1:], None], strict=True):
                self._require_whole()
                if coming is not None:
                    coming.result()
                coming = None if after is None else reader.submit(self._read, *after)
                yield first, Examples(self.rows.part(first, stop), self.targets[first:stop])
                self._forget(first, stop)

    def _require_whole(self) -> None:
        """Refuse files that were cut off since they were mapped: reading on would end the process.

        Between this look and the reading they may still be.
        """
        rows = self.rows
        arrays = [rows.array] if isinstance(rows, DenseRows) else [rows.data, rows.indices]
        for mapped in map(_map_of, [*arrays, self.targets]):
            if mapped is not None and mapped.size() < len(mapped):
                raise RuntimeError(
                    f"Expected a mapped file of {len(mapped)} bytes or more, found one that was "
                    f"cut off to {mapped.size()}: what was released stays charged; start again "
                    "with files that stay as they are."
                )

    def _forget(self, first: int, stop: int) -> None:
        for array in self._within(first, stop):
            forget(array)

    def _within(self, first: int, stop: int) -> Iterator[NDArray[Any]]:
        """The pieces of the files that some rows are in."""
        part = self.rows.part(first, stop)
        if isinstance(part, DenseRows):
            yield part.array
        else:
            yield from (part.data, part.indices)
        yield self.targets[first:stop]

    def _read(self, first: int, stop: int) -> None:
        """Touch every page, so that it is in memory when it is asked for."""
        for array in self._within(first, stop):
            flat = array.reshape(-1)
            flat[:: max(_PAGE // flat.itemsize, 1)].max(initial=0)


def joined(parts: Sequence[Examples]) -> Examples:
    """The rows of all parts, one after the other."""
    if len(parts) == 1:
        return parts[0]
    rows = [part.rows for part in parts]
    targets = np.concatenate([part.targets for part in parts])
    dense = [one.array for one in rows if isinstance(one, DenseRows)]
    if dense:
        return Examples(DenseRows(np.concatenate(dense)), targets)
    sparse = [one for one in rows if isinstance(one, SparseRows)]
    counts = np.concatenate([np.diff(one.indptr) for one in sparse])
    starts = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
    data = np.concatenate([one.data for one in sparse])
    indices = np.concatenate([one.indices for one in sparse])
    starts = offsets_like(sparse[0].indptr, starts)
    return Examples(SparseRows(data, indices, starts, sparse[0].dim), targets)


def stored_or_not(rows: DenseRows | SparseRows, targets: Vector) -> Examples | PartitionedExamples:
    """The rows with their targets; where they are large and in mapped files, part by part."""
    if is_stored(rows.array if isinstance(rows, DenseRows) else rows.data):
        return PartitionedExamples.of(StoredPartitions(rows, targets))
    return Examples(rows, targets)


def is_stored(array: Any) -> bool:
    """Whether an array is in a file, and too large to be kept in memory."""
    return (
        isinstance(array, np.ndarray) and array.nbytes >= LEAST_BYTES and _map_of(array) is not None
    )


def added(sums: Sums, found: Sums) -> Sums:
    """The sums of two results, in the first one's memory."""
    for total, more in zip(sums, found, strict=True):
        total += more
    return sums


def forget(array: NDArray[Any]) -> None:
    """Let go of the memory that a mapped array's pages take; they are read again when needed."""
    mapped = _map_of(array)
    if mapped is None or not array.size or not hasattr(mmap, "MADV_DONTNEED"):
        return
    whole = np.frombuffer(mapped, np.uint8)
    start = array.__array_interface__["data"][0] - whole.__array_interface__["data"][0]
    low = start // mmap.PAGESIZE * mmap.PAGESIZE
    mapped.madvise(mmap.MADV_DONTNEED, low, start + array.nbytes - low)


def _map_of(array: NDArray[Any]) -> mmap.mmap | None:
    """The shared mapping of a file that an array is a view of; None if it is none.

    Of a private one (mode "c"), and of what may be one, pages cannot be let go of: what was written
    to them is in memory alone.
    """
    base: Any = array
    shared = False
    while isinstance(base, np.ndarray):
        shared |= isinstance(base, np.memmap) and base.mode in ("r", "r+", "w+")
        base = base.base
    return base if shared and isinstance(base, mmap.mmap) else None
