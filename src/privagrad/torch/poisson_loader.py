"""A data loader of Poisson batches, under Opacus's name."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, default_collate

from privagrad.privacy.noise import random_source
from privagrad.torch.loaders import CollateAny, RowsOnly, original_loader, refuse_random_rows
from privagrad.torch.processes import Processes
from privagrad.torch.samplers import PoissonBatches, rows_of, sampled_rows


class DPDataLoader(DataLoader[Any]):
    """Batches that hold each row independently with probability `sample_rate`.

    By itself nothing is charged for its batches: give it to `make_private`, which draws new ones
    at the same rate.

    Parameters
    ----------
    dataset : Dataset
        With a length and rows by number.
    sample_rate : float
        Between 0 and 1. The expected batch size, the rate times the number of rows, is rounded to
        a whole number; `sample_rate` is then the rate that is used and accounted for.
    collate_fn : callable, optional
    drop_last : bool
        Without effect: there is no last batch.
    distributed : bool
        Whether each process of `torch.distributed` draws from its own share of the rows.
    **options : Any
        Of a DataLoader.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        *,
        sample_rate: float,
        collate_fn: Any = None,
        drop_last: bool = False,
        distributed: bool = False,
        **options: Any,
    ) -> None:
        _refuse(options)
        if not 0 < sample_rate <= 1:
            raise ValueError(
                f"Expected sample_rate above 0 and at most 1, found sample_rate={sample_rate!r}."
            )
        rows = rows_of(DataLoader(dataset))
        size = max(1, round(Fraction(sample_rate) * rows))
        self.sample_rate, self.distributed = size / rows, distributed
        processes = (
            Processes(dist.get_rank(), dist.get_world_size()) if distributed else Processes()
        )
        batches = PoissonBatches(
            range(rows), size, -(-rows // size), random_source().sampler, processes
        )
        collate = RowsOnly(CollateAny(collate_fn or default_collate, dataset, verify=False))
        super().__init__(dataset, batch_sampler=batches, collate_fn=collate, **options)

    @classmethod
    def from_data_loader(
        cls, data_loader: DataLoader[Any], *, distributed: bool = False, **options: Any
    ) -> DPDataLoader:
        """The same rows in Poisson batches, of the loader's batch size in expectation."""
        loader = original_loader(data_loader)
        if isinstance(loader, cls):
            return loader
        if loader.batch_size is None:
            raise ValueError("Expected a data loader with a batch_size, found none.")
        kept = {name: getattr(loader, name) for name in ("num_workers", "pin_memory", "timeout")}
        rows = rows_of(loader)
        if len(sampled_rows(loader, Processes())) != rows:
            raise ValueError(
                "Expected a data loader that chooses from all rows of its data set, found one that "
                "leaves some out: give make_private that loader itself, or a Subset of the data."
            )
        rate = min(1.0, loader.batch_size / rows)
        return cls(
            loader.dataset, sample_rate=rate, collate_fn=loader.collate_fn,
            distributed=distributed, **kept, **options,
        )  # fmt: skip


def _refuse(options: dict[str, Any]) -> None:
    if options.pop("generator", None) is not None:
        raise ValueError(
            "Expected no generator, found one: batches are drawn from a secure source. For tests "
            "give make_private a random_state or noise_generator."
        )
    refuse_random_rows(options.pop("rand_on_empty", False))
    if not options.pop("batch_first", True):
        raise ValueError(
            "Expected batch_first=True, found False: give make_private batch_first=False instead."
        )
