"""Which rows a data loader chooses from, and how batches are drawn from them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.random import Generator
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
)

from privagrad.privacy.events import GaussianEvent
from privagrad.privacy.noise import RandomSource
from privagrad.privacy.sampling import poisson_batches
from privagrad.privacy.users import Users
from privagrad.torch.datasets import numbering_of, repeats_rows
from privagrad.torch.processes import Processes
from privagrad.torch.turns import CyclicBatches
from privagrad.torch.users import Grouping, user_batches

_NO_BATCH_SIZE = (
    "Expected a data loader with a batch_size, found none: make_private needs it for the sampling "
    "rate."
)


@dataclass(frozen=True)
class Sampling:
    """How the batches of a training are drawn from the rows of a data loader.

    `rows` are those of Poisson batches; None: batches in the loader's own order. `batch_size` rows
    are taken by all processes together in one step; for Poisson batches, expected to be. With
    `users` batches are drawn of these, and `batch_size` counts them; `most` rows of one count.
    Where noise is correlated over several `bands`, as many groups of rows take turns.
    """

    loader: DataLoader[Any]
    processes: Processes
    rows: Sequence[int] | None
    batch_size: int
    users: Users | None = None
    most: int = 1
    bands: int = 1

    @classmethod
    def of(
        cls,
        loader: DataLoader[Any],
        processes: Processes,
        poisson: bool,
        grouping: Grouping | None = None,
    ) -> Sampling:
        """Poisson batches of the rows that the loader chooses from, or the loader's own batches."""
        rows = sampled_rows(loader, processes) if poisson else None
        if grouping is None or rows is None:
            return cls(loader, processes, rows, _batch_size(loader, rows, processes))
        users = grouping.users(rows_of(loader), rows, processes)
        size = _users_a_batch(loader, users, processes)
        return cls(loader, processes, rows, size, users, grouping.most)

    @property
    def n_examples(self) -> int:
        """How many rows there are, or users."""
        if self.users is not None:
            return self.users.count
        return rows_of(self.loader) if self.rows is None else len(self.rows)

    @property
    def event(self) -> GaussianEvent:
        """The release of one step, at noise multiplier 1; of as many as there are bands."""
        if self.rows is None:
            return GaussianEvent(1.0, purpose="gradients", under="replace-one")
        if self.bands > 1:
            return GaussianEvent(
                1.0, self.bands, "cyclic_poisson", self.n_examples, self.batch_size, "gradients",
                bands=self.bands,
            )  # fmt: skip
        return GaussianEvent(
            1.0, 1, "poisson", self.n_examples, self.batch_size, "gradients",
            unit="row" if self.users is None else "user",
        )  # fmt: skip

    @property
    def numbering(self) -> object:
        """What all processes must have alike for a row to be in the share of one alone."""
        if self.processes.count == 1:
            return None
        if self.rows is not None:
            return numbering_of(self.loader.dataset, np.asarray(self.rows))
        rows = np.arange(rows_of(self.loader))
        return numbering_of(self.loader.dataset, rows), order_of(self.loader.batch_sampler)

    @property
    def takes_each_row_once(self) -> bool:
        """Whether a pass in the loader's own order holds no row twice."""
        if self.rows is not None:
            return False
        sampler = sampler_of(self.loader)
        if type(sampler) is RandomSampler:
            return not sampler.replacement and sampler.num_samples <= len(sampler.data_source)
        if type(sampler) is SubsetRandomSampler:
            return len({int(row) for row in sampler.indices}) == len(sampler.indices)
        return type(sampler) in (SequentialSampler, DistributedSampler)

    @property
    def steps(self) -> int:
        """How many batches a pass has."""
        if self.rows is None:
            return len(self.loader)
        if self.users is not None:
            return math.ceil(self.users.count / self.batch_size)
        sampler = sampler_of(self.loader)
        taken = sampler.num_samples if isinstance(sampler, RandomSampler) else len(self.rows)
        return math.ceil(taken / self.batch_size)

    def batches(self, source: RandomSource) -> Any:
        """The batches of a pass, lists of row numbers."""
        if self.rows is None:
            if isinstance(self.loader.batch_sampler, PoissonBatches):
                raise ValueError(
                    "Expected poisson_sampling=True with a data loader of Poisson batches, found "
                    "False: each batch would be charged as if it held all rows."
                )
            refuse_repeats(self.loader, self.processes)
            return self.loader.batch_sampler
        if self.bands > 1:
            return CyclicBatches(self.rows, self.batch_size, self.steps, self.bands, source.sampler)
        drawn = range(self.n_examples) if self.users is not None else self.rows
        batches = PoissonBatches(drawn, self.batch_size, self.steps, source.sampler, self.processes)
        if self.users is None:
            return batches
        return user_batches(
            batches, self.rows, rows_of(self.loader), self.users, self.most,
            source.another_generator(),
        )  # fmt: skip


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
        self.rows, self.batch_size, self.steps = rows, batch_size, steps
        self.share = rows[processes.rank :: processes.count]
        self._generator = generator

    def __len__(self) -> int:
        return self.steps

    def __deepcopy__(self, memo: Any) -> PoissonBatches:
        """A copy of a loader draws on: with a copy of the generator it would repeat batches."""
        return self

    def __iter__(self) -> Iterator[list[int]]:
        share = self.share
        for batch in poisson_batches(len(share), self.rate, self.steps, self._generator):
            yield [share[row] for row in batch.tolist()]


def rows_of(loader: DataLoader[Any]) -> int:
    """How many rows the loader's data set has; refuses a stream, and one that repeats rows."""
    data = loader.dataset
    if isinstance(data, IterableDataset):
        raise TypeError(
            "Expected a data set with a length and rows by number, found an IterableDataset: rows "
            "of a stream cannot be sampled independently. Load it into a list or a table."
        )
    if repeats_rows(data):
        raise ValueError(
            "Expected a data set that holds each row once, found a Subset or ConcatDataset that "
            "repeats some: a row that is in a batch twice moves the sum by twice the bound. Take "
            "out the repeats."
        )
    return len(data)  # type: ignore[arg-type]


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
    if kind is PoissonBatches:
        return range(rows)
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
        "other probabilities. Use one of those, or set poisson_sampling=False."
    )


def _batch_size(loader: DataLoader[Any], rows: Sequence[int] | None, processes: Processes) -> int:
    """How many rows all processes together take in one step."""
    most = rows_of(loader) if rows is None else len(rows)
    size = loader.batch_size
    if size is None:
        size = getattr(loader.batch_sampler, "batch_size", None)
    if size is None:
        raise ValueError(_NO_BATCH_SIZE)
    shared = isinstance(sampler_of(loader), DistributedSampler)
    return min(int(size) * (processes.count if shared else 1), most)


def _users_a_batch(loader: DataLoader[Any], users: Users, processes: Processes) -> int:
    """How many users all processes together expect in one step, from public numbers alone."""
    sampler = sampler_of(loader)
    if isinstance(sampler, PoissonBatches):
        # Its rate is what was asked for; its size counts rows.
        return max(1, round(Fraction(sampler.rate) * users.count))
    if isinstance(sampler, RandomSampler) and sampler.num_samples != len(sampler.data_source):
        raise ValueError(
            "Expected a RandomSampler without num_samples with groups=, found one with it: it "
            "counts rows, and a pass is one over users. Leave num_samples out."
        )
    return _batch_size(loader, range(users.count), processes)


def order_of(batches: Any) -> object:
    """The settings of a DistributedSampler: with other ones two processes could take one row."""
    sampler = batches.sampler if type(batches) is BatchSampler else batches
    if not isinstance(sampler, DistributedSampler):
        return None
    return sampler.num_replicas, sampler.shuffle, sampler.seed, sampler.epoch, sampler.drop_last


def refuse_repeats(loader: DataLoader[Any], processes: Processes) -> None:
    """Refuse samplers that hand the same row to two processes."""
    sampler = sampler_of(loader)
    shared = isinstance(sampler, DistributedSampler)
    if processes.count > 1 and not (
        # A subclass may take rows in a way of its own.
        type(sampler) is DistributedSampler
        and (sampler.num_replicas, sampler.rank) == (processes.count, processes.rank)
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
