"""Data loaders with the sampling that is accounted for."""

from __future__ import annotations

import math
import numbers
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    Sampler,
    Subset,
    TensorDataset,
    default_collate,
    get_worker_info,
)

from privagrad._internal import validate
from privagrad.torch.charging import BatchCharges, BatchPart
from privagrad.torch.guards.collation import UnpaddedRows, cut_from, refuse_mixing, size_of
from privagrad.torch.guards.refusals import UnverifiedError
from privagrad.torch.guards.structure import map_tensors, tensors_of
from privagrad.torch.samplers import order_of
from privagrad.torch.turns import CyclicBatches
from privagrad.torch.users import shares_of

_COPIED = (
    "num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn",
    "multiprocessing_context", "generator", "persistent_workers",
)  # fmt: skip
"""Options of a data loader that the private one has too."""


class SplitBatches(Sampler[list[int]]):
    """Batches in parts of at most `most` rows, each noted; a row counts once in a batch."""

    def __init__(self, batches: Any, most: int | None, notes: deque[BatchPart]) -> None:
        self.batches, self.most, self.notes = batches, most, notes

    def __len__(self) -> int:
        if self.most is None:
            return len(self.batches)
        expected = getattr(self.batches, "rate", 0.0) * len(getattr(self.batches, "share", ()))
        size = expected or getattr(self.batches, "batch_size", self.most)
        return len(self.batches) * max(1, math.ceil(size / self.most))

    def __iter__(self) -> Iterator[list[int]]:
        for drawn in self.batches:
            number = self.batches.number if isinstance(self.batches, CyclicBatches) else None
            # A sampler with replacement would let one row move the sum by several bounds.
            own = {row.item() if isinstance(row, Tensor) else row: row for row in drawn}
            if any(isinstance(row, numbers.Integral) and row < 0 for row in own):
                raise ValueError(
                    "Expected the sampler to give rows by their numbers from 0 on, found negative "
                    "ones: the last row is also -1, and would count twice under both numbers."
                )
            batch = list(own.values())
            most = self.most or max(1, len(batch))
            for start in range(0, max(1, len(batch)), most):
                part = batch[start : start + most]
                last, shares = start + most >= len(batch), shares_of(self.batches, part)
                self.notes.append(BatchPart(len(part), start == 0, last, shares, number))
                yield part


class PrivateLoader(DataLoader[Any]):
    """A data loader whose batches are charged and announced before the loop has them."""

    def __init__(
        self,
        loader: DataLoader[Any],
        batches: Any,
        charges: BatchCharges,
        most: int | None = None,
        verify: bool = True,
    ) -> None:
        if most is not None:
            validate.integer("max_physical_batch_size", most)
        self._notes: deque[BatchPart] = deque()
        self.original = original_loader(loader)
        self.batches, self.charges, self.verify = batches, charges, verify
        options: dict[str, Any] = {name: getattr(loader, name) for name in _COPIED}
        if loader.num_workers:
            options["prefetch_factor"] = loader.prefetch_factor
        options["batch_sampler"] = SplitBatches(batches, most, self._notes)
        collate = loader.collate_fn
        if isinstance(collate, CollateAny | RowsOnly):
            collate = collate.collate
        if not isinstance(loader.collate_fn, CollateAny):
            options["collate_fn"] = CollateAny(collate, loader.dataset, verify)
        # Whoever looks at the batch sampler draws batches of nobody's.
        shown = SplitBatches(batches, most, deque(maxlen=0))
        super().__init__(loader.dataset, **{**options, "batch_sampler": shown})
        # This loader shows the data set it was given; the rows come through another.
        options["worker_init_fn"] = partial(_start_worker, loader.worker_init_fn)
        plain = collate is default_collate and _is_of_plain_tensors(loader.dataset)
        if plain:
            options["collate_fn"] = _as_fetched
        rows = RowsOfTensors if plain else RowByRow
        self._fetching = DataLoader(rows(loader.dataset), **options)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        return self._handed_out(self.charges.begin())

    def _handed_out(self, iterator: int) -> Iterator[Any]:
        self.charges.check(iterator)
        self.charges.order(order_of(self.batches))
        self._notes.clear()
        for batch, unpadded in self._fetching:
            if self.verify and not tensors_of(batch):
                raise UnverifiedError(
                    "Expected tensors in a batch of the private data loader, found none in a "
                    f"{type(batch).__name__}: what the loop makes of such a batch cannot be "
                    "followed. Return tensors from collate_fn; or pass verify=False and vouch for "
                    "it."
                )
            self.charges.check(iterator)
            yield self.charges.hand_out(iterator, self._notes.popleft(), batch, unpadded)
            self.charges.check(iterator)


def original_loader(loader: DataLoader[Any]) -> DataLoader[Any]:
    """The data loader that a private one was made from."""
    return loader.original if isinstance(loader, PrivateLoader) else loader


def refuse_random_rows(rand_on_empty: bool) -> None:
    """Refuse what Opacus can put into batches without rows."""
    if rand_on_empty:
        raise ValueError(
            "Expected rand_on_empty=False, found True: a batch without rows has tensors of length "
            "0, and its step is one of noise."
        )


class RowByRow(Dataset[Any]):
    """A data set whose rows are fetched one at a time.

    `__getitems__` would see the rows of a whole batch, and could make something of several.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self._has_rows = _has_rows(dataset)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, row: Any) -> Any:
        if self._has_rows:
            return self.dataset[row]
        rows = self.dataset.__getitems__([row])
        if not isinstance(rows, list) or len(rows) != 1:
            raise TypeError(
                "Expected a data set with __getitem__, or with a __getitems__ that returns a list "
                f"with one item a row, found {type(rows).__name__} from __getitems__: rows are "
                "fetched one at a time. Write __getitem__."
            )
        return rows[0]


class RowsOfTensors(RowByRow):
    """The rows of plain tensors: PyTorch's own data set makes nothing of several at a time.

    Nor does its own way of collating them: a batch is one look-up in each tensor.
    """

    def __getitems__(self, rows: list[Any]) -> Collated:
        if any(type(row) is not int or row < 0 for row in rows):
            return Collated(default_collate([self[row] for row in rows]), {})
        index = torch.tensor(rows, dtype=torch.long)
        tensors = self.dataset.tensors
        return Collated([t.index_select(0, index.to(t.device)) for t in tensors], {})


def _is_of_plain_tensors(dataset: Any) -> bool:
    return type(dataset) is TensorDataset and all(
        type(tensor) is Tensor and tensor.layout is torch.strided for tensor in dataset.tensors
    )


def _has_rows(dataset: Any) -> bool:
    """Whether rows can be had by number, one at a time."""
    if isinstance(dataset, Subset):
        return _has_rows(dataset.dataset)
    own = getattr(type(dataset), "__getitem__", Dataset.__getitem__)
    return own is not Dataset.__getitem__ or not hasattr(dataset, "__getitems__")


def _start_worker(then: Callable[[int], None] | None, worker: int) -> None:
    """What a worker process does first: `get_worker_info().dataset` is the user's own data set."""
    info: Any = get_worker_info()
    # It can be read only, and the worker keeps what it fetches rows from elsewhere.
    object.__setattr__(info, "dataset", info.dataset.dataset)
    if then is not None:
        then(worker)


class Collated(NamedTuple):
    """A batch, and some of its padded rows as they are without padding."""

    batch: Any
    unpadded: UnpaddedRows


def _as_fetched(batch: Collated) -> Collated:
    return batch


class CollateAny:
    """Collates batches of any size: without rows, tensors of length 0 like the first row's.

    With `verify` a collate function that mixes rows is refused.
    """

    def __init__(
        self, collate: Callable[[list[Any]], Any], dataset: Any, verify: bool = True
    ) -> None:
        self.collate, self.dataset = collate, dataset
        self.verify = verify and collate is not default_collate
        self.batches = 0
        self._padding_seen = False

    def __call__(self, rows: list[Any]) -> Collated:
        if not rows:
            template = self.collate([RowByRow(self.dataset)[0]])
            return Collated(map_tensors(lambda t: t[:0] if t.dim() else t, template), {})
        unpadded = refuse_mixing(self.collate, rows) if self._is_due(rows) else {}
        self._padding_seen |= bool(unpadded)
        batch = self.collate(rows)
        return Collated(batch, cut_from(batch, unpadded, len(rows)) if unpadded else {})

    def _is_due(self, rows: list[Any]) -> bool:
        """At batches 1, 2, 4, 8, ..., and where rows of different lengths are new."""
        if not self.verify or len(rows) < 2:
            return False
        self.batches += 1
        if not self.batches & (self.batches - 1):
            return True
        return not self._padding_seen and len(set(map(size_of, rows))) > 1


class RowsOnly:
    """What `CollateAny` makes of the rows, without what it notes of their padding."""

    def __init__(self, collate: CollateAny) -> None:
        self.collate_any, self.collate = collate, collate.collate

    def __call__(self, rows: list[Any]) -> Any:
        return self.collate_any(rows).batch


class BatchMemoryManager:
    """Batches in parts that fit into memory; call `optimizer.step()` after each part.

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
        batches, charges, verify = data_loader.batches, data_loader.charges, data_loader.verify
        self.parts = PrivateLoader(data_loader, batches, charges, max_physical_batch_size, verify)

    def __enter__(self) -> DataLoader[Any]:
        return self.parts

    def __exit__(self, *_: object) -> None:
        self.parts.charges.leave()
