"""One process, or many under DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from privagrad._internal.validate import Vector


@dataclass(frozen=True)
class Processes:
    """The processes that share a training: each has its own part of the rows."""

    rank: int = 0
    count: int = 1
    group: Any = None

    @classmethod
    def of(cls, module: nn.Module) -> Processes:
        """Those of a DistributedDataParallel module; refuses to run many apart from each other."""
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
        """Whether this process adds the noise."""
        return self.rank == 0

    def sum(self, values: Tensor) -> None:
        """Add up `values` over all processes, in place."""
        if self.count > 1:
            moved = self._to_device(values)
            dist.all_reduce(moved, group=self.group)
            values.copy_(moved)

    def sum_array(self, values: Vector) -> None:
        """`sum` of an array."""
        self.sum(torch.from_numpy(values))

    def agree(self, values: Tensor) -> None:
        """Take the first process's `values`, in place."""
        if self.count > 1:
            moved = self._to_device(values)
            dist.broadcast(moved, dist.get_global_rank(self.group, 0), group=self.group)
            values.copy_(moved)

    def agreed(self, numbers: Sequence[float]) -> list[float]:
        """The first process's `numbers`."""
        values = torch.tensor(numbers, dtype=torch.float64)
        self.agree(values)
        return [float(value) for value in values]

    def _to_device(self, values: Tensor) -> Tensor:
        if dist.get_backend(self.group) == "nccl":
            return values.to(torch.device("cuda", torch.cuda.current_device()))
        return values
