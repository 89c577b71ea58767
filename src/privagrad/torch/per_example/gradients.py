"""Per-example gradients: their norms, weighted sums and sums of squares.

A `PerExampleGradient` has the gradients of all examples with respect to one parameter, mostly
without holding them: a parameter is a matrix of m rows (its first dimension) and n columns, the
gradients of b examples are (b, m, n).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from privagrad.torch.scales import Scale, accurate, matrix_shape

_CACHED = 2**20
"""Numbers that fit into a processor's cache: examples are taken in chunks of about that size."""

_DOUBTFUL = 2.0**-12
"""Squared norms below this part of what they could be have lost digits: they are recomputed."""

_CANCELLED = 2.0**-15
"""Norms are taken to be at least this part of what they could be, so that what rounding leaves in
float32 of terms that cancel is bounded as well."""

_SMALL = 2**20
"""Numbers that may be kept from norms to sums without a thought."""

ALL = slice(None)


class PerExampleGradient(ABC):
    """The gradients of b examples with respect to `part`, some rows of a parameter.

    Guarantees
    ----------
    What `weighted_sum` adds of an example is what `squared_norms` was taken of, or the norm is at
    least `_CANCELLED` of what it would be if nothing cancelled.
    """

    def __init__(self, parameter: Tensor, examples: int, part: slice = ALL) -> None:
        self.parameter, self.count, self.part = parameter, examples, part

    @abstractmethod
    def examples(self, start: int, stop: int) -> Tensor:
        """The gradients of some examples, (stop - start, m, n): to read, not to write to."""

    @abstractmethod
    def weighted_sum(self, weights: Tensor) -> Tensor:
        """Σ_i weights_i g_i, (m, n)."""

    def add_weighted_sum(self, weights: Tensor, total: Tensor) -> None:
        """Add Σ_i weights_i g_i to `total`, (m, n)."""
        total += self.weighted_sum(weights)

    @abstractmethod
    def keep_only(self, examples: Tensor) -> None:
        """Set the gradients of all other examples to 0, whatever they hold."""

    def squared_norms(self, scale: Scale) -> Tensor:
        """Σ_jk C_jk g_ijk² for each example, (b,)."""
        return torch.cat([scale.squared_norms(g) for g in self.chunks()])

    def sum_of_squares(self) -> Tensor:
        """Σ_i g_i², (m, n)."""
        total: Tensor | None = None
        for g in self.chunks():
            part = g.square().sum(0)
            total = part if total is None else total.add_(part)
        assert total is not None
        return total

    def row_sums_of_squares(self) -> Tensor:
        """Σ_i Σ_k g_ijk² of every row j, (m,)."""
        return self.sum_of_squares().sum(1)

    def with_exact_small_norms(self, sums: Sequence[tuple[Tensor, Tensor]], scale: Scale) -> Tensor:
        """Squared norms out of `sums_of_products`; recomputed for examples whose terms cancel."""
        squares, largest = (torch.cat(parts) for parts in zip(*sums, strict=True))
        for i in (squares < _DOUBTFUL * largest).nonzero()[:, 0].tolist():
            squares[i] = scale.double().squared_norms(self.exact_example(i))[0]
        return torch.maximum(squares, _CANCELLED**2 * largest)

    def exact_example(self, i: int) -> Tensor:
        """The gradient of one example, (1, m, n), in double precision."""
        return self.examples(i, i + 1).double()

    def chunks(self) -> Iterator[Tensor]:
        for start, stop in self.spans():
            yield self.examples(start, stop)

    def spans(self) -> Iterator[tuple[int, int]]:
        """Which examples are taken together so that their gradients stay in the cache."""
        size = max(1, _CACHED // max(1, self.width))
        for start in range(0, self.count, size):
            yield start, min(start + size, self.count)

    @property
    def width(self) -> int:
        """How many numbers one example's gradient has."""
        rows, columns = self.shape
        return rows * columns

    @cached_property
    def shape(self) -> tuple[int, int]:
        """(m, n), of the part."""
        rows, columns = matrix_shape(self.parameter)
        return len(range(rows)[self.part]), columns


Gradients = Iterator[PerExampleGradient]
"""What the backward pass of a layer yields."""


class DenseGradient(PerExampleGradient):
    """Gradients that are held: of biases, gains, and modules without a layer of their own."""

    def __init__(self, parameter: Tensor, gradients: Tensor, part: slice = ALL) -> None:
        super().__init__(parameter, gradients.shape[0], part)
        self.gradients = accurate(gradients).reshape(gradients.shape[0], *self.shape)

    def examples(self, start: int, stop: int) -> Tensor:
        return self.gradients[start:stop]

    def weighted_sum(self, weights: Tensor) -> Tensor:
        return summed(self.gradients, weights)

    def add_weighted_sum(self, weights: Tensor, total: Tensor) -> None:
        flat = self.gradients.flatten(1)
        total.view(-1).addmv_(flat.T, weights.to(flat.dtype))

    def keep_only(self, examples: Tensor) -> None:
        self.gradients = self.gradients.masked_fill(~examples[:, None, None], 0.0)


class FormedGradient(PerExampleGradient):
    """Gradients that are formed out of inputs a (b, ...) and output gradients d (b, ...).

    Those of all examples are kept from their norms to their sum, in the place of inputs and output
    gradients, where they take about as much memory. Otherwise they are formed a few at a time.
    """

    def __init__(
        self, parameter: Tensor, inputs: Tensor, gradients: Tensor, part: slice = ALL
    ) -> None:
        super().__init__(parameter, inputs.shape[0], part)
        kind = torch.promote_types(accurate(inputs).dtype, accurate(gradients).dtype)
        self.inputs, self.gradients = inputs.to(kind), gradients.to(kind)
        self.kept: Tensor | None = None

    @abstractmethod
    def form(self, found: Tensor, start: int) -> None:
        """Write the gradients of the examples from `start` on into `found` (c, m, n)."""

    @abstractmethod
    def forms_for_norms(self, scale: Scale) -> bool:
        """Whether norms are taken of the gradients themselves where not all of them are kept."""

    @abstractmethod
    def squared_norms_unkept(self, scale: Scale) -> Tensor:
        """Squared norms where not all gradients may be held at once."""

    @abstractmethod
    def weighted_sum_unkept(self, weights: Tensor) -> Tensor:
        """The weighted sum without forming any gradient."""

    def examples(self, start: int, stop: int) -> Tensor:
        if self.kept is not None:
            return self.kept[start:stop]
        found = self.new_empty(stop - start)
        self.form(found, start)
        return found

    def new_empty(self, count: int) -> Tensor:
        """Memory for the gradients of so many examples."""
        return self.gradients.new_empty(count, *self.shape)

    def is_formed(self, scale: Scale) -> bool:
        """Whether each example's gradient is formed for its norm."""
        return self.kept is None and (self.affordable() or self.forms_for_norms(scale))

    def affordable(self) -> bool:
        """Whether the gradients of all examples may be kept."""
        held = self.inputs.numel() + self.gradients.numel()
        return self.count * self.width <= max(_SMALL, 2 * held)

    def squared_norms(self, scale: Scale) -> Tensor:
        if self.kept is not None:
            return super().squared_norms(scale)
        if not self.affordable():
            return self.squared_norms_unkept(scale)
        kept, squares = self.new_empty(self.count), []
        for start, stop in self.spans():
            self.form(kept[start:stop], start)
            squares.append(scale.squared_norms(kept[start:stop]))
        self.kept = kept
        self.inputs = self.gradients = kept[:0]
        return torch.cat(squares)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        if self.kept is not None:
            return summed(self.kept, weights)
        return self.weighted_sum_unkept(weights.to(self.gradients.dtype))

    def keep_only(self, examples: Tensor) -> None:
        if self.kept is not None:
            self.kept = self.kept.masked_fill(~examples[:, None, None], 0.0)
            return
        others = ~examples.reshape(-1, *[1] * (self.inputs.dim() - 1))
        self.inputs = self.inputs.masked_fill(others, 0.0)
        self.gradients = self.gradients.masked_fill(others, 0.0)


class OuterProductGradient(FormedGradient):
    """Σ_t d_it a_itᵀ: of a matrix with inputs a (b, T, n) and output gradients d (b, T, m)."""

    def form(self, found: Tensor, start: int) -> None:
        place = slice(start, start + len(found))
        # Rows of one example together: products of rows that are far apart are slow.
        d, a = self.gradients[place].contiguous(), self.inputs[place].contiguous()
        d = d.transpose(1, 2)
        if len(found) == 1:
            torch.mm(d[0], a[0], out=found[0])
        else:
            torch.bmm(d, a, out=found)

    def exact_example(self, i: int) -> Tensor:
        return (self.gradients[i].double().T @ self.inputs[i].double())[None]

    def is_formed(self, scale: Scale) -> bool:
        return self.inputs.shape[1] > 1 and super().is_formed(scale)

    def forms_for_norms(self, scale: Scale) -> bool:
        _, steps, m = self.gradients.shape
        n = self.inputs.shape[2]
        return scale.entries is not None or steps * (m + n) >= m * n

    def squared_norms(self, scale: Scale) -> Tensor:
        if self.kept is None and self.inputs.shape[1] == 1:
            return self._squared_norms_of_single_rows(scale)
        return super().squared_norms(scale)

    def squared_norms_unkept(self, scale: Scale) -> Tensor:
        if self.forms_for_norms(scale):
            return self._squared_norms_in_cache(scale)
        return self._squared_norms_by_gram_matrices(scale)

    def _squared_norms_of_single_rows(self, scale: Scale) -> Tensor:
        a, d = self.inputs[:, 0].square(), self.gradients[:, 0].square()
        if scale.entries is None:
            return torch.mv(a, scale.columns) * torch.mv(d, scale.rows)
        return torch.mm(d, scale.entries).mul_(a).sum(1)

    def _squared_norms_by_gram_matrices(self, scale: Scale) -> Tensor:
        """‖Σ_t d_t a_tᵀ‖² = Σ_tt' ⟨d_t, d_t'⟩ ⟨a_t, a_t'⟩, in coordinates where C is 1."""
        _, steps, m = self.gradients.shape
        size = max(1, _CACHED // (steps * (m + self.inputs.shape[2])))
        parts = []
        for start in range(0, self.count, size):
            a, d = self.inputs[start : start + size], self.gradients[start : start + size]
            products = torch.bmm(a * scale.columns, a.transpose(1, 2))
            products *= torch.bmm(d * scale.rows, d.transpose(1, 2))
            parts.append(sums_of_products(products))
        return self.with_exact_small_norms(parts, scale)

    def _squared_norms_in_cache(self, scale: Scale) -> Tensor:
        buffer: Tensor | None = None
        squares = self.inputs.new_empty(self.count)
        for start, stop in self.spans():
            buffer = self.new_empty(stop - start) if buffer is None else buffer
            g = buffer[: stop - start]
            self.form(g, start)
            squares[start:stop] = scale.squared_norms(g)
        if scale.entries is not None:
            return squares
        a, d = self.inputs.square() @ scale.columns, self.gradients.square() @ scale.rows
        return torch.maximum(squares, _CANCELLED**2 * (a * d).sqrt_().sum(1).square_())

    def sum_of_squares(self) -> Tensor:
        if self.kept is None and self.inputs.shape[1] == 1:
            return self.gradients[:, 0].square().T @ self.inputs[:, 0].square()
        return super().sum_of_squares()

    def row_sums_of_squares(self) -> Tensor:
        """Σ_tt' d_tj d_t'j ⟨a_t, a_t'⟩: no gradient is formed."""
        if self.kept is not None:
            return super().row_sums_of_squares()
        total = self.gradients.new_zeros(self.gradients.shape[2])
        for a, d in zip(self.inputs, self.gradients, strict=True):
            total += (torch.mm(torch.mm(a, a.T), d) * d).sum(0)
        # Rounding may leave a sum of squares below 0.
        return total.clamp_min_(0.0)

    def weighted_sum_unkept(self, weights: Tensor) -> Tensor:
        a, d = self._weighted_factors(weights)
        return d.T @ a

    def add_weighted_sum(self, weights: Tensor, total: Tensor) -> None:
        if self.kept is not None:
            super().add_weighted_sum(weights, total)
            return
        a, d = self._weighted_factors(weights.to(self.gradients.dtype))
        total.addmm_(d.T, a)

    def _weighted_factors(self, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs and output gradients of all rows, one of them weighted: dᵀ a is the sum."""
        a, d, w = self.inputs, self.gradients, weights[:, None, None]
        if not d.is_contiguous() and d.transpose(0, 1).is_contiguous():
            a, d, w = a.transpose(0, 1), d.transpose(0, 1), w.transpose(0, 1)
        # The smaller one is copied.
        a, d = (a * w, d) if a.shape[2] <= d.shape[2] else (a, d * w)
        return a.reshape(-1, a.shape[2]), d.reshape(-1, d.shape[2])


class SummedGradient(PerExampleGradient):
    """The sum of several gradients of one parameter and the same examples: tied weights."""

    def __init__(self, terms: Sequence[PerExampleGradient]) -> None:
        super().__init__(terms[0].parameter, terms[0].count)
        self.terms = terms

    def examples(self, start: int, stop: int) -> Tensor:
        first = self.terms[0].examples(start, stop)
        dense = first.new_zeros(stop - start, *self.shape)
        dense[:, self.terms[0].part] = first
        for term in self.terms[1:]:
            dense[:, term.part] += term.examples(start, stop)
        return dense

    def weighted_sum(self, weights: Tensor) -> Tensor:
        # What the norms were taken of, not the terms' own sums: where terms cancel in an example,
        # these would leave what rounding leaves of the terms, which no norm has seen.
        total: Tensor | None = None
        for start, stop in self.spans():
            part = summed(self.examples(start, stop), weights[start:stop])
            total = part if total is None else total.add_(part)
        assert total is not None
        return total

    def keep_only(self, examples: Tensor) -> None:
        for term in self.terms:
            term.keep_only(examples)


def summed(gradients: Tensor, weights: Tensor) -> Tensor:
    """Σ_i weights_i g_i of gradients (b, m, n)."""
    return torch.mv(gradients.flatten(1).T, weights.to(gradients.dtype)).view(gradients.shape[1:])


def sums_of_products(products: Tensor) -> tuple[Tensor, Tensor]:
    """‖Σ_t g_t‖² of the products ⟨g_t, g_t'⟩ (b, T, T), and (Σ_t ‖g_t‖)²."""
    norms = products.diagonal(dim1=1, dim2=2).clamp_min(0.0).sqrt()
    return products.sum((1, 2)), norms.sum(1).square_()


def without_overlap(gradients: Sequence[PerExampleGradient]) -> list[PerExampleGradient]:
    """Gradients of one parameter and the same examples, summed where their rows overlap."""
    if len(gradients) == 1:
        return list(gradients)
    parts = [range(matrix_shape(own.parameter)[0])[own.part] for own in gradients]
    ordered = sorted(parts, key=lambda part: part.start)
    if all(a.stop <= b.start for a, b in pairwise(ordered)):
        return list(gradients)
    outers = [own for own in gradients if type(own) is OuterProductGradient]
    if len(outers) == len(gradients) and len(set(parts)) == 1:
        # Their terms one after the other.
        inputs = torch.cat([own.inputs for own in outers], 1)
        joined = torch.cat([own.gradients for own in outers], 1)
        return [OuterProductGradient(outers[0].parameter, inputs, joined, outers[0].part)]
    return [SummedGradient(gradients)]
