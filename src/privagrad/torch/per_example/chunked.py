"""Gradients that are computed a few examples at a time, and the sums of bounded gradients.

The records of most layers take less memory than the gradients of all examples. These gradients are
then formed for a few examples, used while they are in cache, and dropped.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from privagrad.torch.per_example.gradients import (
    ALL,
    DenseGradient,
    FormedGradient,
    OuterProductGradient,
    PerExampleGradient,
)
from privagrad.torch.scales import Scale

Named = tuple[str, PerExampleGradient]

_CACHED = 2**20
"""Numbers in the gradients of one example that are formed together."""

_UNDERFLOW = 1e-30
"""Squared norms below this may have lost terms that are too small for float32."""


def spans(count: int, size: int) -> Iterator[slice]:
    """Examples, so many at a time."""
    for start in range(0, count, size):
        yield slice(start, min(start + size, count))


class ChunkedGradients(ABC):
    """The gradients of b examples with respect to several parameters, or rows of these.

    They are computed for some examples at a time.
    """

    def __init__(
        self, parameters: Sequence[tuple[Tensor, slice]], examples: int, chunk_size: int
    ) -> None:
        self.parameters, self.count, self.chunk_size = parameters, examples, chunk_size

    @abstractmethod
    def chunk(self, examples: slice) -> list[PerExampleGradient]:
        """The gradients of some examples, one for each of the parameters."""

    @abstractmethod
    def keep_only(self, examples: Tensor) -> None:
        """Set the gradients of all other examples to 0, whatever they hold."""

    def chunks(self) -> Iterator[tuple[slice, list[PerExampleGradient]]]:
        for examples in spans(self.count, self.chunk_size):
            yield examples, self.chunk(examples)

    def gradients(self) -> Iterator[ChunkedGradient]:
        """The gradients of each parameter by itself."""
        for place, (parameter, part) in enumerate(self.parameters):
            yield ChunkedGradient(parameter, self, place, part)


class ChunkedGradient(PerExampleGradient):
    """One parameter's part of `source`."""

    def __init__(
        self, parameter: Tensor, source: ChunkedGradients, place: int, part: slice = ALL
    ) -> None:
        super().__init__(parameter, source.count, part)
        self.source, self.place = source, place

    def _parts(self) -> Iterator[tuple[slice, PerExampleGradient]]:
        for examples, gradients in self.source.chunks():
            yield examples, gradients[self.place]

    def examples(self, start: int, stop: int) -> Tensor:
        return self.source.chunk(slice(start, stop))[self.place].examples(0, stop - start)

    def exact_example(self, i: int) -> Tensor:
        return self.source.chunk(slice(i, i + 1))[self.place].exact_example(0)

    def squared_norms(self, scale: Scale) -> Tensor:
        return torch.cat([part.squared_norms(scale) for _, part in self._parts()])

    def weighted_sum(self, weights: Tensor) -> Tensor:
        parts = self._parts()
        examples, first = next(parts)
        total = first.weighted_sum(weights[examples])
        for examples, part in parts:
            part.add_weighted_sum(weights[examples], total)
        return total

    def sum_of_squares(self) -> Tensor:
        return _total(part.sum_of_squares() for _, part in self._parts())

    def row_sums_of_squares(self) -> Tensor:
        return _total(part.row_sums_of_squares() for _, part in self._parts())

    def keep_only(self, examples: Tensor) -> None:
        self.source.keep_only(examples)


def _total(parts: Iterator[Tensor]) -> Tensor:
    total = next(parts)
    for part in parts:
        total += part
    return total


@dataclass(frozen=True)
class Bound:
    """Gradients are bounded to norm `radius` after multiplication with `factor`.

    Those of norm n are multiplied with min(1, radius/n), or where there is a `gamma` > 0 with
    radius/(n + gamma). Where there are `shares`, each example's bounded gradient is then multiplied
    with its own.
    """

    radius: float
    factor: float
    gamma: float = 0.0
    shares: Tensor | None = None

    def of(self, examples: slice) -> Bound:
        """The bound of some examples."""
        return self if self.shares is None else replace(self, shares=self.shares[examples])

    def weights(self, squares: Tensor) -> tuple[Tensor, Tensor]:
        """What gradients of these squared norms are multiplied with, and which norms are finite.

        The weights of the others are 0.
        """
        norms = self.factor * squares.sqrt()
        finite = norms.isfinite()
        if self.gamma:
            # A gradient whose squares underflow is longer than it seems: it counts as 0.
            shrunk = torch.where(squares > _UNDERFLOW, self.radius / (norms + self.gamma), 0.0)
        else:
            shrunk = (self.radius / norms).clamp(max=1.0)
        weights = torch.where(finite, self.factor * shrunk, 0.0)
        return weights if self.shares is None else weights * self.shares.to(weights), finite


class BoundedGradients(NamedTuple):
    """Sums Σ_i w_i g_i by name and part, the weights w_i, and which examples have finite norms."""

    totals: list[tuple[str, slice, Tensor]]
    weights: Tensor
    finite: Tensor


class FormedChunks(ChunkedGradients):
    """Gradients that their norms are taken of, formed in the same memory for each chunk."""

    def __init__(self, formed: Sequence[FormedGradient]) -> None:
        width = max(1, sum(gradient.width for gradient in formed))
        # One example would leave processors idle.
        count = formed[0].count
        size = min(count, max(2, _CACHED // width))
        super().__init__([(g.parameter, g.part) for g in formed], count, size)
        self.formed = formed
        self._memory: list[Tensor] | None = None

    def chunk(self, examples: slice) -> list[PerExampleGradient]:
        count = examples.stop - examples.start
        if self._memory is None:
            self._memory = [gradient.new_empty(count) for gradient in self.formed]
        found: list[PerExampleGradient] = []
        for gradient, memory in zip(self.formed, self._memory, strict=True):
            gradient.form(memory[:count], examples.start)
            found.append(DenseGradient(gradient.parameter, memory[:count], gradient.part))
        return found

    def keep_only(self, examples: Tensor) -> None:
        for gradient in self.formed:
            gradient.keep_only(examples)


def bounded_sums(
    gradients: Sequence[Named], scales: dict[str, Scale], bound: Bound
) -> BoundedGradients:
    """Σ_i w_i g_i of each of the gradients, those of an example bounded together.

    An example's norm is that of all its gradients together, so all norms come before all sums.
    Gradients that are formed for a few examples at a time are the exception: once all other norms
    are known, the weights of a chunk's examples follow from the chunk itself, and one pass gives
    norms and sums.
    """
    together, others = _in_one_pass(gradients, scales)
    squares = torch.zeros(())
    for name, gradient in others:
        squares = squares + gradient.squared_norms(scales[name].part(gradient.part))
    totals: list[tuple[str, slice, Tensor]] = []
    if not together:
        weights, finite = bound.weights(squares)
    else:
        sources = list(dict.fromkeys(g.source for _, g in together))
        count, size = sources[0].count, min(source.chunk_size for source in sources)
        squares = squares.expand(count)
        own_scales = [scales[name].part(g.part) for name, g in together]
        parts: list[tuple[Tensor, Tensor]] = []
        sums: dict[int, Tensor] = {}
        for examples in spans(count, size):
            chunks = {source: source.chunk(examples) for source in sources}
            own = [chunks[g.source][g.place] for _, g in together]
            paired = list(zip(own_scales, own, strict=True))
            parts.append(_add_chunk(paired, squares[examples], bound.of(examples), sums))
        weights, finite = (torch.cat(part) for part in zip(*parts, strict=True))
        totals += [(name, g.part, sums[place]) for place, (name, g) in enumerate(together)]
    if not bool(finite.all()):
        for _, gradient in others:
            gradient.keep_only(finite)
    totals += [(name, g.part, g.weighted_sum(weights)) for name, g in others]
    return BoundedGradients(totals, weights, finite)


def _in_one_pass(
    gradients: Sequence[Named], scales: dict[str, Scale]
) -> tuple[list[tuple[str, ChunkedGradient]], list[Named]]:
    """The gradients whose norms and sums are taken in one pass, and the others."""
    last = next((g.source for _, g in reversed(gradients) if isinstance(g, ChunkedGradient)), None)
    formed: list[tuple[str, FormedGradient]] = []
    joint: list[tuple[str, ChunkedGradient]] = []
    others: list[Named] = []
    room = _CACHED
    for name, g in sorted(gradients, key=lambda named: -named[1].width):
        if isinstance(g, ChunkedGradient) and g.source is last:
            joint.append((name, g))
        elif (
            isinstance(g, FormedGradient)
            and g.width <= room
            and g.is_formed(scales[name].part(g.part))
        ):
            formed.append((name, g))
            room -= g.width
        else:
            others.append((name, g))
    if formed:
        chunks = FormedChunks([g for _, g in formed]).gradients()
        joint = [(name, g) for (name, _), g in zip(formed, chunks, strict=True)] + joint
    return joint, others


def _add_chunk(
    gradients: Sequence[tuple[Scale, PerExampleGradient]],
    others: Tensor,
    bound: Bound,
    sums: dict[int, Tensor],
) -> tuple[Tensor, Tensor]:
    """Add the bounded gradients of a chunk to `sums`, by place; returns `Bound.weights`.

    `others` are the squared norms of the examples' other gradients.
    """
    formed = [place for place, own in enumerate(gradients) if _is_formed(*own)][-1:]
    squares = others
    for place, (scale, gradient) in enumerate(gradients):
        if place not in formed:
            squares = squares + gradient.squared_norms(scale)
    weights, finite = bound.weights(squares)
    for place in formed:
        scale, gradient = gradients[place]
        assert isinstance(gradient, OuterProductGradient)
        if place not in sums:
            sums[place] = torch.zeros_like(gradient.parameter, dtype=gradient.inputs.dtype)
        weights, finite = _add_formed(gradient, scale, squares, bound, sums[place])
    for place, (_, gradient) in enumerate(gradients):
        if place in formed:
            continue
        if not bool(finite.all()):
            gradient.keep_only(finite)
        if place in sums:
            gradient.add_weighted_sum(weights, sums[place])
        else:
            sums[place] = gradient.weighted_sum(weights)
    return weights, finite


def _is_formed(scale: Scale, gradient: PerExampleGradient) -> bool:
    """Whether the norm needs the gradient itself, which then may as well be added."""
    return (
        isinstance(gradient, OuterProductGradient)
        and scale.entries is not None
        and scale.entries.dtype == gradient.inputs.dtype
        and gradient.inputs.device.type == "cpu"
        and gradient.inputs.shape[1] > 1
    )


def _add_formed(
    gradient: OuterProductGradient, scale: Scale, others: Tensor, bound: Bound, total: Tensor
) -> tuple[Tensor, Tensor]:
    """Form the gradients one by one, in cache, and add each of them, bounded, to `total`."""
    g = torch.empty_like(total)
    found = []
    for i in range(gradient.count):
        torch.mm(gradient.gradients[i].T, gradient.inputs[i], out=g)
        one = slice(i, i + 1)
        weight, finite = bound.of(one).weights(others[one] + scale.squared_norms(g[None]))
        if bool(finite):
            total.add_(g, alpha=float(weight))
        found.append((weight, finite))
    weights, finite = (torch.cat(part) for part in zip(*found, strict=True))
    return weights, finite
