"""How examples meet parameters: norms, weighted sums and squares of per-example gradients.

A use knows the gradient of every example with respect to one parameter without holding it:
a parameter is a matrix of m rows (its first dimension) and n columns, the gradients are (b, m, n).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from privagrad.torch.scales import Scale, accurate, as_matrix

_CACHED = 2**20
"""Numbers that stay close to the processor: examples are taken in chunks of about that size."""

_DOUBTFUL = 2.0**-12
"""Squared norms below this part of what they could be have lost digits: they are taken again."""

_CANCELLED = 2.0**-15
"""Norms are taken to be at least this part of what they could be, so that what rounding leaves in
float32 of terms that cancel is bounded as well."""

ALL = slice(None)


class PerExampleGradient(ABC):
    """The gradients of b examples with respect to `part`, some rows of a parameter."""

    def __init__(self, parameter: Tensor, examples: int, part: slice = ALL) -> None:
        self.parameter, self.count, self.part = parameter, examples, part

    @abstractmethod
    def examples(self, start: int, stop: int) -> Tensor:
        """The gradients of some examples, (stop - start, m, n), in memory of their own."""

    @abstractmethod
    def total(self, weights: Tensor) -> Tensor:
        """Σ_i weights_i g_i, (m, n)."""

    @abstractmethod
    def keep(self, examples: Tensor) -> None:
        """Set the gradients of all other examples to 0, whatever they hold."""

    def squares(self, scale: Scale) -> Tensor:
        """Σ_jk C_jk g_ijk² for each example, (b,)."""
        parts = [scale.squared_norms(g) for g in self.chunks()]
        return torch.cat(parts)

    def moments(self) -> Tensor:
        """Σ_i g_i², (m, n)."""
        total: Tensor | None = None
        for g in self.chunks():
            part = g.square_().sum(0)
            total = part if total is None else total.add_(part)
        assert total is not None
        return total

    def row_moments(self) -> Tensor:
        """Σ_i Σ_k g_ijk² of every row j, (m,)."""
        return self.moments().sum(1)

    def settled(self, sums: Sequence[tuple[Tensor, Tensor]], scale: Scale) -> Tensor:
        """Squared norms out of `sums_of_products`, with those taken again in which terms cancel."""
        squares, largest = (torch.cat(each) for each in zip(*sums, strict=True))
        for i in (squares < _DOUBTFUL * largest).nonzero()[:, 0].tolist():
            squares[i] = scale.double().squared_norms(self.exact_example(i))[0]
        return torch.maximum(squares, _CANCELLED**2 * largest)

    def exact_example(self, i: int) -> Tensor:
        """The gradient of one example, (1, m, n), in double precision."""
        return self.examples(i, i + 1).double()

    def chunks(self) -> Iterator[Tensor]:
        size = max(1, _CACHED // max(1, self.width))
        for start in range(0, self.count, size):
            yield self.examples(start, min(start + size, self.count))

    @property
    def width(self) -> int:
        """How many numbers one example's gradient has."""
        return as_matrix(self.parameter)[self.part].numel()


class Direct(PerExampleGradient):
    """Gradients that are there: of biases, gains, and whatever no layer of ours knows."""

    def __init__(self, parameter: Tensor, gradients: Tensor, part: slice = ALL) -> None:
        super().__init__(parameter, gradients.shape[0], part)
        matrix = as_matrix(parameter)[part]
        self.gradients = accurate(gradients).reshape(gradients.shape[0], *matrix.shape)

    def examples(self, start: int, stop: int) -> Tensor:
        return self.gradients[start:stop].clone()

    def total(self, weights: Tensor) -> Tensor:
        return torch.tensordot(weights.to(self.gradients.dtype), self.gradients, 1)

    def keep(self, examples: Tensor) -> None:
        self.gradients = self.gradients.masked_fill(~examples[:, None, None], 0.0)


class Outer(PerExampleGradient):
    """Σ_t d_it a_itᵀ: of a matrix with inputs a (b, T, n) and output gradients d (b, T, m)."""

    def __init__(
        self, parameter: Tensor, inputs: Tensor, gradients: Tensor, part: slice = ALL
    ) -> None:
        super().__init__(parameter, inputs.shape[0], part)
        kind = torch.promote_types(accurate(inputs).dtype, accurate(gradients).dtype)
        self.inputs, self.gradients = inputs.to(kind), gradients.to(kind)

    @classmethod
    def joined(cls, uses: Sequence[Outer]) -> Outer:
        """Several uses of the same rows by the same examples: one after the other."""
        first = uses[0]
        return cls(
            first.parameter,
            torch.cat([use.inputs for use in uses], 1),
            torch.cat([use.gradients for use in uses], 1),
            first.part,
        )

    def examples(self, start: int, stop: int) -> Tensor:
        return torch.bmm(self.gradients[start:stop].transpose(1, 2), self.inputs[start:stop])

    def exact_example(self, i: int) -> Tensor:
        return (self.gradients[i].double().T @ self.inputs[i].double())[None]

    def squares(self, scale: Scale) -> Tensor:
        _, steps, m = self.gradients.shape
        n = self.inputs.shape[2]
        if steps == 1:
            return self._squares_of_single_rows(scale)
        if scale.entries is None and steps * (m + n) < m * n:
            return self._squares_by_gram_matrices(scale)
        return self._squares_in_cache(scale)

    def _squares_of_single_rows(self, scale: Scale) -> Tensor:
        a, d = self.inputs[:, 0].square(), self.gradients[:, 0].square()
        if scale.entries is None:
            return torch.mv(a, scale.columns) * torch.mv(d, scale.rows)
        return (torch.mm(d, scale.entries) * a).sum(1)

    def _squares_by_gram_matrices(self, scale: Scale) -> Tensor:
        """‖Σ_t d_t a_tᵀ‖² = Σ_tt' ⟨d_t, d_t'⟩ ⟨a_t, a_t'⟩, in coordinates where C is 1."""
        _, steps, m = self.gradients.shape
        size = max(1, _CACHED // (steps * (m + self.inputs.shape[2])))
        parts = []
        for start in range(0, self.count, size):
            a, d = self.inputs[start : start + size], self.gradients[start : start + size]
            products = torch.bmm(a * scale.columns, a.transpose(1, 2))
            products *= torch.bmm(d * scale.rows, d.transpose(1, 2))
            parts.append(sums_of_products(products))
        return self.settled(parts, scale)

    def _squares_in_cache(self, scale: Scale) -> Tensor:
        m, n = self.gradients.shape[2], self.inputs.shape[2]
        size = max(1, _CACHED // (m * n))
        buffer = self.inputs.new_empty(min(size, self.count), m, n)
        squares = self.inputs.new_empty(self.count)
        for start in range(0, self.count, size):
            stop = min(start + size, self.count)
            g = buffer[: stop - start]
            d, a = self.gradients[start:stop].transpose(1, 2), self.inputs[start:stop]
            if size == 1:
                torch.mm(d[0], a[0], out=g[0])
            else:
                torch.bmm(d, a, out=g)
            squares[start:stop] = scale.squared_norms(g)
        if scale.entries is not None:
            return squares
        a, d = self.inputs.square() @ scale.columns, self.gradients.square() @ scale.rows
        return torch.maximum(squares, _CANCELLED**2 * (a * d).sqrt_().sum(1).square_())

    def moments(self) -> Tensor:
        if self.inputs.shape[1] == 1:
            return self.gradients[:, 0].square().T @ self.inputs[:, 0].square()
        return super().moments()

    def row_moments(self) -> Tensor:
        """Σ_tt' d_tj d_t'j ⟨a_t, a_t'⟩: no gradient is formed."""
        total = self.gradients.new_zeros(self.gradients.shape[2])
        for a, d in zip(self.inputs, self.gradients, strict=True):
            total += (torch.mm(torch.mm(a, a.T), d) * d).sum(0)
        # Rounding may leave a sum of squares below 0.
        return total.clamp_min_(0.0)

    def total(self, weights: Tensor) -> Tensor:
        a, d = self.inputs, self.gradients
        w = weights.to(d.dtype)[:, None, None]
        if not d.is_contiguous() and d.transpose(0, 1).is_contiguous():
            a, d, w = a.transpose(0, 1), d.transpose(0, 1), w.transpose(0, 1)
        # The smaller one is copied.
        a, d = (a * w, d) if a.shape[2] <= d.shape[2] else (a, d * w)
        return d.reshape(-1, d.shape[2]).T @ a.reshape(-1, a.shape[2])

    def keep(self, examples: Tensor) -> None:
        others = ~examples[:, None, None]
        self.inputs = self.inputs.masked_fill(others, 0.0)
        self.gradients = self.gradients.masked_fill(others, 0.0)


class Rows(PerExampleGradient):
    """Rows looked up by `index` (b, T), with gradients d (b, T, n); repeated rows are summed."""

    def __init__(
        self,
        parameter: Tensor,
        index: Tensor,
        gradients: Tensor,
        ignored: int | None = None,
    ) -> None:
        super().__init__(parameter, index.shape[0])
        rows = parameter.shape[0]
        owners = torch.arange(index.shape[0], device=index.device)[:, None]
        keys = (owners * rows + index).reshape(-1)
        flat = accurate(gradients).reshape(-1, gradients.shape[-1])
        if ignored is not None:
            kept = index.reshape(-1) != ignored
            keys, flat = keys[kept], flat[kept]
        pairs, inverse = torch.unique(keys, return_inverse=True)
        self.owners, self.rows = pairs // rows, pairs % rows
        self.gradients = flat.new_zeros(len(pairs), flat.shape[1]).index_add_(0, inverse, flat)

    def squares(self, scale: Scale) -> Tensor:
        squares = self.gradients.square()
        if scale.entries is None:
            each = torch.mv(squares, scale.columns) * scale.rows[self.rows]
        else:
            each = (squares * scale.entries[self.rows]).sum(1)
        return each.new_zeros(self.count).index_add_(0, self.owners, each)

    def total(self, weights: Tensor) -> Tensor:
        weighted = self.gradients * weights.to(self.gradients.dtype)[self.owners, None]
        return self._sum(weighted)

    def moments(self) -> Tensor:
        return self._sum(self.gradients.square())

    def _sum(self, values: Tensor) -> Tensor:
        return values.new_zeros(self.parameter.shape).index_add_(0, self.rows, values)

    def examples(self, start: int, stop: int) -> Tensor:
        chosen = (self.owners >= start) & (self.owners < stop)
        dense = self.gradients.new_zeros(stop - start, *self.parameter.shape)
        dense[self.owners[chosen] - start, self.rows[chosen]] = self.gradients[chosen]
        return dense

    def keep(self, examples: Tensor) -> None:
        self.gradients = self.gradients.masked_fill(~examples[self.owners, None], 0.0)


class Several(PerExampleGradient):
    """The sum of several uses of one parameter by the same examples: tied weights."""

    def __init__(self, uses: Sequence[PerExampleGradient]) -> None:
        super().__init__(uses[0].parameter, uses[0].count)
        self.uses = uses

    def examples(self, start: int, stop: int) -> Tensor:
        matrix = as_matrix(self.parameter)
        first = self.uses[0].examples(start, stop)
        dense = first.new_zeros(stop - start, *matrix.shape)
        dense[:, self.uses[0].part] = first
        for use in self.uses[1:]:
            dense[:, use.part] += use.examples(start, stop)
        return dense

    def total(self, weights: Tensor) -> Tensor:
        parts = [use.total(weights) for use in self.uses]
        dense = parts[0].new_zeros(as_matrix(self.parameter).shape)
        for use, part in zip(self.uses, parts, strict=True):
            dense[use.part] += part
        return dense

    def keep(self, examples: Tensor) -> None:
        for use in self.uses:
            use.keep(examples)


def sums_of_products(products: Tensor) -> tuple[Tensor, Tensor]:
    """‖Σ_t g_t‖² of the products ⟨g_t, g_t'⟩ (b, T, T), and (Σ_t ‖g_t‖)²."""
    norms = products.diagonal(dim1=1, dim2=2).clamp_min(0.0).sqrt()
    return products.sum((1, 2)), norms.sum(1).square_()


def separate(uses: Sequence[PerExampleGradient]) -> list[PerExampleGradient]:
    """Uses of one parameter by the same examples, as uses of rows that do not overlap."""
    if len(uses) == 1:
        return list(uses)
    parts = [range(*use.part.indices(as_matrix(use.parameter).shape[0])) for use in uses]
    ordered = sorted(parts, key=lambda part: part.start)
    if all(a.stop <= b.start for a, b in pairwise(ordered)):
        return list(uses)
    outers = [use for use in uses if type(use) is Outer]
    if len(outers) == len(uses) and len(set(parts)) == 1:
        return [Outer.joined(outers)]
    return [Several(uses)]
