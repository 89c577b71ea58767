"""Gradients of tables whose rows are looked up by number."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from privagrad._internal.jit import kernel
from privagrad.torch.per_example.gradients import PerExampleGradient
from privagrad.torch.scales import Scale, accurate

_NONE = -1
"""The number of no row."""


class RowLookupGradient(PerExampleGradient):
    """Rows looked up by `index` (b, T), with gradients d (b, T, n); repeated rows are summed.

    A row that several examples, or one example several times, have looked up gets the sum of their
    gradients; `ignored` gets none. Norms and sums take the sum of an example's own first: what is
    added is what the norm was taken of.
    """

    def __init__(
        self, parameter: Tensor, index: Tensor, gradients: Tensor, ignored: int | None = None
    ) -> None:
        super().__init__(parameter, index.shape[0])
        self.ignored = _NONE if ignored is None else ignored
        self.index = index.long()
        d = accurate(gradients)
        places = torch.arange(index.numel(), device=index.device)
        if d.is_contiguous() or not d.transpose(0, 1).is_contiguous():
            self.places = places.view(index.shape)
        else:
            # Tokens come first in memory, as layers of sequences have them.
            d, self.places = d.transpose(0, 1), places.view(index.shape[::-1]).T
        self.gradients = d.reshape(-1, d.shape[2])

    @cached_property
    def _sorted(self) -> tuple[Tensor, Tensor]:
        """The rows of each example in their order, (b, T), and the place of their gradients."""
        rows, order = self.index.sort(1)
        return rows, self.places.gather(1, order)

    @cached_property
    def _summed(self) -> tuple[Tensor, Tensor, Tensor]:
        """Each row of each example once: the examples, the rows, the summed gradients."""
        rows, places = self._sorted
        kept = rows != self.ignored
        owners = torch.arange(self.count, device=rows.device)[:, None].expand_as(rows)[kept]
        rows, values = rows[kept], self.gradients[places[kept]]
        new = torch.ones_like(rows, dtype=torch.bool)
        new[1:] = (rows[1:] != rows[:-1]) | (owners[1:] != owners[:-1])
        total = values.new_zeros(int(new.sum()), values.shape[1])
        return owners[new], rows[new], total.index_add_(0, new.cumsum(0) - 1, values)

    def squared_norms(self, scale: Scale) -> Tensor:
        factors, weights = scale.factors
        if self._by_kernel(weights):
            rows, places = self._sorted
            norms = self.gradients.new_empty(self.count)
            arrays = (self.gradients, rows, places, factors, weights, norms)
            _squared_norms(self.ignored, *(x.numpy() for x in arrays))
            return norms
        owners, rows, g = self._summed
        weights = weights if len(weights) == 1 else weights[rows]
        factors = factors if len(factors) == 1 else factors[rows]
        of_rows = (g.square() * weights).sum(1) * factors
        return of_rows.new_zeros(self.count).index_add_(0, owners, of_rows)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        weights = weights.to(self.gradients.dtype)
        total = self.gradients.new_zeros(self.parameter.shape)
        if self._by_kernel(weights):
            rows, places = self._sorted
            arrays = (self.gradients, rows, places, weights, total)
            _add_rows(self.ignored, *(x.numpy() for x in arrays))
        else:
            owners, rows, g = self._summed
            total.index_add_(0, rows, g * weights[owners, None])
        return total

    def _by_kernel(self, other: Tensor) -> bool:
        return self.gradients.device.type == "cpu" and self.gradients.dtype == other.dtype

    def sum_of_squares(self) -> Tensor:
        _, rows, g = self._summed
        return g.new_zeros(self.parameter.shape).index_add_(0, rows, g.square())

    def examples(self, start: int, stop: int) -> Tensor:
        owners, rows, g = self._summed
        chosen = (owners >= start) & (owners < stop)
        dense = g.new_zeros(stop - start, *self.parameter.shape)
        dense[owners[chosen] - start, rows[chosen]] = g[chosen]
        return dense

    def keep_only(self, examples: Tensor) -> None:
        self.gradients = self.gradients.clone()
        self.gradients[self.places[~examples].reshape(-1)] = 0.0
        self.__dict__.pop("_summed", None)


@kernel(reorder=True)
def _sum_equal(g: Any, rows: Any, places: Any, first: int, summed: Any) -> int:
    """Sum the gradients of all rows equal to that at `first`; returns where the next one starts."""
    summed[:] = g[places[first]]
    last = first + 1
    while last < rows.size and rows[last] == rows[first]:
        other = g[places[last]]
        for k in range(summed.size):
            summed[k] += other[k]
        last += 1
    return last


@kernel(reorder=True)
def _squared_norms(
    ignored: int, g: Any, rows: Any, places: Any, factors: Any, weights: Any, norms: Any
) -> None:
    """Σ_rk factors_r weights_rk g_rk² of each example; `rows` are sorted, equal ones are one."""
    # One factor, or the weights of one row, are those of all rows.
    own_factor, own_weights = min(1, len(factors) - 1), min(1, len(weights) - 1)
    summed = np.empty(g.shape[1], g.dtype)
    for i in range(norms.size):
        total = 0.0
        first = 0
        while first < rows.shape[1]:
            row = rows[i, first]
            first = _sum_equal(g, rows[i], places[i], first, summed)
            if row != ignored:
                own = weights[row * own_weights]
                part = own[0] - own[0]  # 0 of the right kind
                for k in range(summed.size):
                    part += summed[k] * summed[k] * own[k]
                total += part * factors[row * own_factor]
        norms[i] = total


@kernel(reorder=True)
def _add_rows(ignored: int, g: Any, rows: Any, places: Any, weights: Any, total: Any) -> None:
    """Add each example's rows, weighted; `rows` are sorted, equal ones are one."""
    summed = np.empty(g.shape[1], g.dtype)
    for i in range(rows.shape[0]):
        first = 0
        while first < rows.shape[1]:
            row = rows[i, first]
            first = _sum_equal(g, rows[i], places[i], first, summed)
            if row != ignored:
                sums = total[row]
                for k in range(summed.size):
                    sums[k] += weights[i] * summed[k]
