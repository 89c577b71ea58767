"""Data loaders with the sampling that is accounted for."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from numpy.random import Generator
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
)

from privagrad import _validate
from privagrad.sampling import poisson_batches
from privagrad.torch.charging import Draws, Part
from privagrad.torch.processes import Processes

_NO_BATCH_SIZE = (
    "Expected a data loader with a batch_size, found none: make_private needs it for the sampling "
    "rate."
)


class PoissonBatches(Sampler[list[int]]):
    """Batches that hold each row of this process's share independently with the same probability.

    `batch_size` is what all processes together expect; a pass has `steps` batches.
    """

    def __init__(
        self,
        rows: Sequence[int],
        batch_size: int,
        steps: int,
        generator: Generator,
        processes: Processes,
    ) -> None:
        self.rate = batch_size / len(rows)
        self.steps = steps
        self.share = rows[processes.rank :: processes.count]
        self._generator = generator

    def __len__(self) -> int:
        return self.steps

    def __deepcopy__(self, memo: Any) -> PoissonBatches:
        """A copy of a loader draws on: with a copy of the generator it would repeat batches."""
        return self

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


class PrivateLoader(DataLoader[Any]):
    """A data loader whose batches are charged and announced before the loop has them."""

    def __init__(
        self, loader: DataLoader[Any], batches: Any, draws: Draws, most: int | None = None
    ) -> None:
        if most is not None:
            _validate.whole("max_physical_batch_size", most)
        self._notes: deque[Part] = deque()
        self.batches, self.draws = batches, draws
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
        return self._handed_out(self.draws.begin())

    def _handed_out(self, iterator: int) -> Iterator[Any]:
        self.draws.check(iterator)
        self._notes.clear()
        for batch in super().__iter__():
            self.draws.hand_out(iterator, self._notes.popleft())
            yield batch
            self.draws.check(iterator)


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
    """How many rows the loader's data set has; refuses a stream, and one that repeats rows."""
    if isinstance(loader, PrivateLoader):
        raise ValueError(
            "Expected a data loader that is not private yet, found one that make_private "
            "returned: give make_private the data loader that it was made from."
        )
    data = loader.dataset
    if isinstance(data, IterableDataset):
        raise TypeError(
            "Expected a data set with a length and rows by number, found an IterableDataset: rows "
            "of a stream cannot be sampled independently. Load it into a list or a table."
        )
    if _repeats_rows(data):
        raise ValueError(
            "Expected a data set that holds each row once, found a Subset or ConcatDataset that "
            "repeats some: a row that is in a batch twice moves the sum by twice the bound. Take "
            "out the repeats."
        )
    return len(data)  # type: ignore[arg-type]


def _repeats_rows(data: Any) -> bool:
    if isinstance(data, Subset):
        different = len({int(row) for row in data.indices})
        return different < len(data.indices) or _repeats_rows(data.dataset)
    if isinstance(data, ConcatDataset):
        different = len({id(part) for part in data.datasets})
        return different < len(data.datasets) or any(map(_repeats_rows, data.datasets))
    return False


def sampler_of(loader: DataLoader[Any]) -> Any:
    """What chooses the rows: of a loader with a batch sampler, the sampler inside it."""
    if loader.batch_sampler is None:
        raise ValueError(_NO_BATCH_SIZE)
    if type(loader.batch_sampler) is BatchSampler:
        return loader.batch_sampler.sampler
    return loader.batch_sampler


def sampled_rows(loader: DataLoader[Any], processes: Processes) -> Sequence[int]:
    """The rows that the loader's sampler chooses from, for Poisson batches of exactly these.

    Guarantees
    ----------
    Rows that the sampler leaves out are never drawn. Which rows it chooses from must be public.
    """
    rows, sampler = rows_of(loader), sampler_of(loader)
    kind = type(sampler)
    if kind is SubsetRandomSampler:
        chosen = [int(row) for row in sampler.indices]
        if len(set(chosen)) < len(chosen) or not all(0 <= row < rows for row in chosen):
            raise ValueError(
                f"Expected a SubsetRandomSampler of different rows between 0 and {rows - 1} with "
                "poisson_sampling=True, found repeated rows or others."
            )
        return chosen
    if kind in (SequentialSampler, RandomSampler) and len(sampler.data_source) == rows:
        return range(rows)
    if kind is DistributedSampler and len(sampler.dataset) == rows:
        if (sampler.num_replicas, sampler.rank) == (processes.count, processes.rank):
            return range(rows)
        raise ValueError(
            f"Expected a DistributedSampler for rank {processes.rank} of {processes.count} "
            "processes, those of the module, with poisson_sampling=True, found one for rank "
            f"{sampler.rank} of {sampler.num_replicas}."
        )
    raise ValueError(
        "Expected a data loader that chooses from all rows of its data set (in order, shuffled or "
        "by DistributedSampler) or from those of a SubsetRandomSampler, found a "
        f"{kind.__name__}: poisson_sampling=True would draw other rows, or the same rows with "
        "other probabilities. Use one of those, or say poisson_sampling=False."
    )


def steps_of(loader: DataLoader[Any], rows: Sequence[int] | None, batch_size: int) -> int:
    """How many batches a pass has: Poisson batches from `rows`, or for None the loader's own."""
    if rows is None:
        return len(loader)
    sampler = sampler_of(loader)
    taken = sampler.num_samples if isinstance(sampler, RandomSampler) else len(rows)
    return math.ceil(taken / batch_size)


def batch_size_of(loader: DataLoader[Any], rows: Sequence[int] | None, processes: Processes) -> int:
    """How many rows all processes together take in one step."""
    most = rows_of(loader) if rows is None else len(rows)
    size = loader.batch_size
    if size is None:
        size = getattr(loader.batch_sampler, "batch_size", None)
    if size is None:
        raise ValueError(_NO_BATCH_SIZE)
    shared = isinstance(sampler_of(loader), DistributedSampler)
    return min(int(size) * (processes.count if shared else 1), most)


def refuse_repeats(loader: DataLoader[Any], processes: Processes) -> None:
    """Refuse samplers that hand the same row to two processes."""
    sampler = sampler_of(loader)
    shared = isinstance(sampler, DistributedSampler)
    if processes.count > 1 and not (
        shared and (sampler.num_replicas, sampler.rank) == (processes.count, processes.rank)
    ):
        raise ValueError(
            f"Expected a DistributedSampler for {processes.count} processes with "
            f"poisson_sampling=False, found {type(sampler).__name__}: two processes could take the "
            "same row in one step, which moves the sum by twice the bound."
        )
    if shared and not sampler.drop_last and rows_of(loader) % sampler.num_replicas:
        raise ValueError(
            f"Expected a DistributedSampler that repeats no rows, found one that fills up "
            f"{rows_of(loader)} rows for {sampler.num_replicas} processes: set drop_last=True, or "
            "poisson_sampling=True."
        )


def takes_each_row_once(loader: DataLoader[Any]) -> bool:
    """Whether one pass of the loader holds no row twice."""
    sampler = sampler_of(loader)
    if type(sampler) is RandomSampler:
        return not sampler.replacement and sampler.num_samples <= len(sampler.data_source)
    if type(sampler) is SubsetRandomSampler:
        return len({int(row) for row in sampler.indices}) == len(sampler.indices)
    return type(sampler) in (SequentialSampler, DistributedSampler)


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
            data_loader, data_loader.batches, data_loader.draws, max_physical_batch_size
        )

    def __enter__(self) -> DataLoader[Any]:
        return self.parts

    def __exit__(self, *_: object) -> None:
        self.parts.draws.leave()
