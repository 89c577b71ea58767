"""One process, or many under DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from privagrad.torch.parallel import refuse_spread_modules


@dataclass(frozen=True)
class Processes:
    """The processes that share a training: each has its own part of the rows."""

    rank: int = 0
    count: int = 1
    group: Any = None

    @classmethod
    def of(cls, module: nn.Module) -> Processes:
        """Those of a DistributedDataParallel module; refuses to run many apart from each other."""
        refuse_spread_modules(module)
        if isinstance(module, DistributedDataParallel):
            group = module.process_group
            return cls(dist.get_rank(group), dist.get_world_size(group), group)
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            raise ValueError(
                f"Expected a DistributedDataParallel module in a group of {dist.get_world_size()} "
                "processes, found a plain one: every process would release a model of its own. "
                "Wrap the module in DistributedDataParallel before make_private."
            )
        return cls()

    @property
    def first(self) -> bool:
        """Whether this process writes files, and has the numbers that count for all."""
        return self.rank == 0

    @property
    def device(self) -> torch.device:
        """Where tensors have to be that processes exchange."""
        if self.count > 1 and dist.get_backend(self.group) == "nccl":
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cpu")

    def exchange(self, rows: Tensor) -> Tensor:
        """Row r of (count, n) goes to process r; the rows that came, by the process they are of."""
        received = torch.empty_like(rows)
        dist.all_to_all_single(received, rows, group=self.group)
        return received

    def gather(self, row: Tensor) -> Tensor:
        """Every process's row (n,), as (count, n)."""
        received = row.new_empty(self.count, len(row))
        dist.all_gather(list(received), row, group=self.group)
        return received

    def gathered(self, numbers: Sequence[float]) -> list[list[float]]:
        """Every process's numbers, by process."""
        if self.count == 1:
            return [list(numbers)]
        row = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        found: list[list[float]] = self.gather(row).tolist()
        return found

    def gathered_objects(self, own: Any) -> list[Any]:
        """Every process's object, by process."""
        found: list[Any] = [None] * self.count
        dist.all_gather_object(found, own, group=self.group)
        return found

    def agree(self, values: Tensor) -> None:
        """Take the first process's `values`, in place."""
        if self.count > 1:
            moved = values.to(self.device)
            dist.broadcast(moved, dist.get_global_rank(self.group, 0), group=self.group)
            values.copy_(moved)

    def agreed(self, numbers: Sequence[float]) -> list[float]:
        """The first process's `numbers`."""
        return self.gathered(numbers)[0]
