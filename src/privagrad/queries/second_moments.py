"""The second moments of all rows together, E[v vᵀ] or E[F ⊗ v vᵀ], in one private query."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from privagrad._internal.jit import kernel
from privagrad._internal.threads import add_parts, pool_of
from privagrad._internal.validate import Vector
from privagrad.glm.examples import Examples
from privagrad.glm.kernels import FlatRows
from privagrad.privacy.mechanism import GaussianSum
from privagrad.privacy.releases import Releases
from privagrad.privacy.users import UserRows
from privagrad.queries.columns import Table

PURPOSE = "second moments"
_SQRT2 = math.sqrt(2)
_PARTS, _SPLIT_FROM, _ROWS_PER_SUM = 4, 20_000_000, 8
"""Into how many parts rows are cut for threads, and from how many products on; rows a part has."""


@dataclass(frozen=True)
class SecondMoments:
    """A noisy mean of outer products.

    Attributes
    ----------
    matrix : array of shape (k, k)
        E[v vᵀ] plus noise, symmetric. It may have negative eigenvalues.
    noise : float
        The standard deviation of the noise in an entry off the diagonal; on the diagonal it is
        sqrt(2) times that. The noise has no preferred direction: it is the same in any
        orthonormal basis.
    """

    matrix: NDArray[np.float64]
    noise: float


class Factors(NamedTuple):
    """The matrices F of rows: ``of(examples, *arguments)`` of shape (n, size, size), symmetric.

    F of a row depends on that row and earlier releases alone.
    """

    of: Callable[..., Vector]
    arguments: tuple[Any, ...]
    size: int


def private_second_moments(
    examples: Table, radius: float, releases: Releases, purpose: str = PURPOSE,
    factors: Factors | None = None, users: UserRows | None = None,
) -> SecondMoments:  # fmt: skip
    """E[v vᵀ] of v = (a, y), the row and its target, shrunk to norm at most `radius`.

    A row that is shrunk counts with the weight (radius/‖v‖)². Rows that are not finite, or whose
    target is not, count as zeros. With `factors` it is E[F ⊗ a aᵀ], and ‖F‖ ‖a‖² is shrunk to at
    most radius².

    Parameters
    ----------
    examples : Examples or PartitionedExamples
        The rows and targets.
    radius : float
        The bound on the norm of v. It must be public or come from earlier releases.
    releases : Releases
        What pays for the query.
    purpose : str
        The event of the plan.
    factors : Factors, optional
        A matrix for each row.
    users : UserRows, optional
        Whose rows they are: it is then the mean over users of the means over each user's rows.

    Guarantees
    ----------
    One Gaussian release for the purpose. A row gives the upper triangle of F ⊗ v vᵀ/radius²,
    entries off the diagonal times sqrt(2), so that its Euclidean norm is that of the matrix,
    ‖F‖ ‖v‖²/radius², at most 1. A user gives the average of what the user's rows give.
    """
    n, dim = examples.shape
    size = dim + 1 if factors is None else factors.size * dim
    n = n if users is None else users.count
    mechanism = GaussianSum(size * (size + 1) // 2, releases.noise_for(purpose), n)
    total = mechanism.sum()
    averages = total.averages()
    for count, some in _by_count(examples, users):
        some.add_to(averages.of(count), _add_moments, factors, size, 1.0 / radius)
    averages.add()
    released = mechanism.release(total, releases.source)
    matrix = np.empty((size, size))
    upper = np.triu_indices(size)
    matrix[upper] = np.where(upper[0] == upper[1], released, released / _SQRT2)
    matrix.T[upper] = matrix[upper]
    noise = mechanism.noise_multiplier / (_SQRT2 * n)
    return SecondMoments(radius**2 * matrix, radius**2 * noise)


def _by_count(examples: Table, users: UserRows | None) -> Iterator[tuple[int, Table]]:
    """All rows; with users, those of users with equally many together."""
    if users is None:
        yield 1, examples
        return
    if not isinstance(examples, Examples):
        raise TypeError(f"Expected rows in memory with users, found {type(examples).__name__}.")
    for count, chosen in users.by_count(np.arange(users.count)):
        yield count, examples.take(chosen)


def exact_second_moments(
    matrix: Any, targets: Vector, users: UserRows | None = None
) -> NDArray[np.float64]:
    """The same of rows that need no protection; `matrix` is an array or a CSR matrix."""
    if users is not None:
        found = users.by_count(np.arange(users.count))
        parts = [(exact_second_moments(matrix[at], targets[at]), at.size / k) for k, at in found]
        return np.asarray(sum(part * weight for part, weight in parts) / users.count)
    products = matrix.T @ matrix
    dense = products.toarray() if hasattr(products, "toarray") else products
    cross = np.asarray(matrix.T @ targets)
    whole = np.block([[dense, cross[:, None]], [cross[None], targets @ targets]])
    return np.asarray(whole / targets.size, dtype=np.float64)


def _add_moments(
    units: Vector, per_unit: float, limit: float, examples: Examples, factors: Factors | None,
    size: int, scale: float,
) -> tuple[int, int]:  # fmt: skip
    data, indices, starts, dense = examples.rows.flat
    count = starts.size - 1
    if factors is None:
        targets = np.ascontiguousarray(examples.targets, dtype=np.float64)
        given = np.ones((count, 1, 1))
    else:
        targets = np.empty(0)
        given = np.ascontiguousarray(factors.of(examples, *factors.arguments))

    def add_part(partial: Vector, edges: tuple[int, int]) -> tuple[int, int]:
        low, high = edges
        rows = FlatRows(data, indices, starts[low : high + 1], dense)
        part = targets[low:high], given[low:high]
        return _add_outer(partial, per_unit, limit, rows, *part, size, scale)

    if count * units.size < _SPLIT_FROM or count < _ROWS_PER_SUM * _PARTS:
        return add_part(units, (0, count))
    with pool_of() as pool:
        return add_parts(units, add_part, _cuts(count), pool)


def _cuts(count: int) -> Iterator[tuple[int, int]]:
    return pairwise(np.linspace(0, count, _PARTS + 1).astype(int).tolist())


@kernel()
def _add_outer(
    total: Vector, per_unit: float, limit: float, table: FlatRows, targets: Vector,
    factors: Vector, size: int, scale: float,
) -> tuple[int, int]:  # fmt: skip
    data, indices, starts, dense = table
    outputs = factors.shape[1]
    width = size // outputs
    values, places = np.empty(width), np.empty(width, np.int64)
    clipped = nonfinite = 0
    for i in range(starts.size - 1):
        first = starts[i] if dense else 0
        count = 0
        squares = 0.0
        for k in range(starts[i], starts[i + 1]):
            value = np.float64(data[k]) * scale
            if value != 0.0:
                values[count], places[count] = value, indices[k - first]
                squares += value * value
                count += 1
        if targets.size > 0:
            value = targets[i] * scale
            values[count], places[count] = value, width - 1
            squares += value * value
            count += 1
        largest, weight = 0.0, 0.0
        for c in range(outputs):
            for e in range(outputs):
                largest = max(largest, abs(factors[i, c, e]))
        for c in range(outputs if largest > 0.0 else 0):
            for e in range(outputs):
                weight += (factors[i, c, e] / largest) ** 2  # squares of tiny factors lose digits
        squares *= largest * math.sqrt(weight)
        if not math.isfinite(squares):
            nonfinite += 1
            continue
        if squares == 0.0:
            continue
        clipped += squares > limit
        shrink = per_unit if squares <= limit else per_unit * limit / squares
        for c in range(outputs):
            for p in range(count):
                j = c * width + places[p]
                # The place of (j, j) in the upper triangle, row by row.
                start = j * size - j * (j - 1) // 2 - j
                value = values[p] * shrink * factors[i, c, c]
                total[start + j] += np.rint(value * values[p])
                value *= _SQRT2
                for q in range(p + 1, count):
                    total[start + c * width + places[q]] += np.rint(value * values[q])
                for e in range(c + 1, outputs):
                    value = values[p] * shrink * factors[i, c, e] * _SQRT2
                    for q in range(count):
                        total[start + e * width + places[q]] += np.rint(value * values[q])
    return clipped, nonfinite
