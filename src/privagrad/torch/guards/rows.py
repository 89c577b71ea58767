"""Which rows of a tensor belong to which example of the batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from privagrad.torch.per_example.layout import Layout


def row_layouts(shape: Sequence[int], count: int) -> Iterator[Layout]:
    """Where a tensor of this shape may have its examples."""
    if len(shape) and shape[0] == count:
        yield Layout(0)
    if len(shape) > 1 and shape[1] == count:
        yield Layout(1)
    if len(shape) and shape[0] > count and shape[0] % count == 0:
        yield Layout(0)
        yield Layout(0, together=False)


class RowOwners:
    """The example that each row of a table belongs to."""

    def __init__(self, rows: Tensor, count: int) -> None:
        self.rows, self.count = rows, count

    def take(self, examples: Sequence[int]) -> RowOwners:
        """Those of some examples alone, in their order, which are numbered anew."""
        size = len(examples)
        for layout in row_layouts(self.rows.shape, self.count):
            if torch.equal(self.rows.cpu(), layout.numbers(self.rows.shape, self.count)):
                shape = list(self.rows.shape)
                shape[layout.axis] = shape[layout.axis] // self.count * size
                return RowOwners(layout.numbers(shape, size).to(self.rows.device), size)
        # Rows in the order of the examples, as a mask leaves them.
        counts = torch.bincount(self.rows.reshape(-1), minlength=self.count)[list(examples)]
        numbers = torch.arange(size, device=self.rows.device)
        return RowOwners(numbers.repeat_interleave(counts), size)
