"""Data loaders with the sampling that is accounted for."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from numpy.random import Generator
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
)

from privagrad.sampling import poisson_batches
from privagrad.torch.processes import Processes

Announce = Callable[["Part", Any], Any]


@dataclass(frozen=True)
class Part:
    """What is announced before it is used: a batch, or a part of one."""

    size: int
    first: bool
    last: bool


class PoissonBatches(Sampler[list[int]]):
    """Batches that hold each row of this process's share independently with the same probability.

    `batch_size` is what all processes together expect.
    """

    def __init__(
        self, rows: int, batch_size: int, generator: Generator, processes: Processes
    ) -> None:
        self.rate = batch_size / rows
        self.steps = math.ceil(rows / batch_size)
        self.share = range(processes.rank, rows, processes.count)
        self._generator = generator

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[list[int]]:
        for batch in poisson_batches(len(self.share), self.rate, self.steps, self._generator):
            yield [self.share[int(row)] for row in batch]


class SplitBatches(Sampler[list[int]]):
    """Batches in parts of at most `most` rows, each noted; a row counts once in a batch."""

    def __init__(self, batches: Any, most: int | None, notes: deque[Part]) -> None:
        self.batches, self.most, self.notes = batches, most, notes

    def __len__(self) -> int:
        if self.most is None:
            return len(self.batches)
        expected = getattr(self.batches, "rate", 0.0) * len(getattr(self.batches, "share", ()))
        size = expected or getattr(self.batches, "batch_size", self.most)
        return len(self.batches) * max(1, math.ceil(size / self.most))

    def __iter__(self) -> Iterator[list[int]]:
        for drawn in self.batches:
            # A sampler with replacement would let one row move the sum by several bounds.
            own = {row.item() if isinstance(row, Tensor) else row: row for row in drawn}
            batch = list(own.values())
            most = self.most or max(1, len(batch))
            for start in range(0, max(1, len(batch)), most):
                part = batch[start : start + most]
                self.notes.append(Part(len(part), start == 0, start + most >= len(batch)))
                yield part


@dataclass
class Passes:
    """How often a loader was started over, the last pass that has been paid for, and whether its
    last batch still waits for a step."""

    begun: int = 0
    charged: int = 0
    fresh: bool = False


class PrivateLoader(DataLoader[Any]):
    """A data loader that announces every batch before it is used, and counts its passes."""

    def __init__(
        self,
        loader: DataLoader[Any],
        batches: Any,
        announce: Announce,
        passes: Passes,
        most: int | None = None,
    ) -> None:
        self._notes: deque[Part] = deque()
        self.announce, self.batches, self.passes = announce, batches, passes
        options: dict[str, Any] = {
            "num_workers": loader.num_workers,
            "pin_memory": loader.pin_memory,
            "timeout": loader.timeout,
            "worker_init_fn": loader.worker_init_fn,
            "multiprocessing_context": loader.multiprocessing_context,
            "generator": loader.generator,
            "persistent_workers": loader.persistent_workers,
        }
        if loader.num_workers:
            options["prefetch_factor"] = loader.prefetch_factor
        collate = loader.collate_fn
        if not isinstance(collate, CollateAny):
            collate = CollateAny(collate, loader.dataset)
        super().__init__(
            loader.dataset,
            batch_sampler=SplitBatches(batches, most, self._notes),
            collate_fn=collate,
            **options,
        )

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        self._notes.clear()
        self.passes.begun += 1
        for batch in super().__iter__():
            part = self._notes.popleft()
            self.passes.fresh = True
            yield self.announce(part, batch)


class CollateAny:
    """Collates batches of any size: without rows, tensors of length 0 like the first row's."""

    def __init__(self, collate: Callable[[list[Any]], Any], dataset: Any) -> None:
        self.collate, self.dataset = collate, dataset

    def __call__(self, rows: list[Any]) -> Any:
        if rows:
            return self.collate(rows)
        return tree_map(
            lambda leaf: leaf[:0] if isinstance(leaf, Tensor) and leaf.dim() else leaf,
            self.collate([self.dataset[0]]),
        )


def rows_of(loader: DataLoader[Any]) -> int:
    """How many rows the loader's data set has; refuses one that is a stream."""
    if isinstance(loader.dataset, IterableDataset):
        raise TypeError(
            "Expected a data set with a length and rows by number, found an IterableDataset: rows "
            "of a stream cannot be sampled independently. Load it into a list or a table."
        )
    return len(loader.dataset)  # type: ignore[arg-type]


def batch_size_of(loader: DataLoader[Any], processes: Processes) -> int:
    """How many rows all processes together take in one step."""
    size = loader.batch_size
    if size is None:
        size = getattr(loader.batch_sampler, "batch_size", None)
    if size is None:
        raise ValueError(
            "Expected a data loader with a batch_size, found none: make_private needs it for the "
            "sampling rate."
        )
    sampler = loader.sampler
    shared = isinstance(sampler, DistributedSampler)
    return min(int(size) * (processes.count if shared else 1), rows_of(loader))


def refuse_repeats(loader: DataLoader[Any], poisson: bool) -> None:
    """Refuse a sampler that hands the same row to two processes to fill up their shares."""
    sampler = loader.sampler
    if (
        not poisson
        and isinstance(sampler, DistributedSampler)
        and not sampler.drop_last
        and rows_of(loader) % sampler.num_replicas
    ):
        raise ValueError(
            f"Expected a DistributedSampler that repeats no rows, found one that fills up "
            f"{rows_of(loader)} rows for {sampler.num_replicas} processes: set drop_last=True, or "
            "poisson_sampling=True."
        )


def takes_each_row_once(loader: DataLoader[Any]) -> bool:
    """Whether one pass of the loader holds no row twice."""
    sampler = loader.sampler
    plain = type(loader.batch_sampler) is BatchSampler
    if isinstance(sampler, RandomSampler):
        return plain and not sampler.replacement and sampler.num_samples <= rows_of(loader)
    return plain and isinstance(sampler, (SequentialSampler, DistributedSampler))


class BatchMemoryManager:
    """Batches in parts that fit into memory; `optimizer.step()` after each part, as ever.

    >>> with BatchMemoryManager(
    ...     data_loader=loader, max_physical_batch_size=64, optimizer=optimizer
    ... ) as parts:  # doctest: +SKIP
    ...     for inputs, targets in parts:
    ...         ...
    """

    def __init__(
        self, *, data_loader: DataLoader[Any], max_physical_batch_size: int, optimizer: Any
    ) -> None:
        if not isinstance(data_loader, PrivateLoader):
            raise TypeError("Expected the data loader that make_private returned, found another.")
        self.optimizer = optimizer
        self.parts = PrivateLoader(
            data_loader,
            data_loader.batches,
            data_loader.announce,
            data_loader.passes,
            max_physical_batch_size,
        )

    def __enter__(self) -> DataLoader[Any]:
        return self.parts

    def __exit__(self, *_: object) -> None:
        self.optimizer.last_chunk = True
