"""Least squares from a private matrix of second moments: how it is bounded and solved."""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from privagrad._internal.validate import Vector
from privagrad.glm.examples import Examples, PartitionedExamples, in_memory
from privagrad.glm.losses import Loss
from privagrad.linear.uncertainty import solution_covariance
from privagrad.privacy.releases import Releases
from privagrad.privacy.users import UserRows
from privagrad.queries.second_moments import (
    SecondMoments,
    exact_second_moments,
    private_second_moments,
)

Solver = Literal["auto", "moments", "gradients"]
BY_GRADIENTS = Loss("huber")
"""What gradients minimise instead of squares, whose gradients have no bound."""

_SMALL = 0.004
"""Noise multiplier times d/n up to which second moments do better than gradients, or little worse:
`docs/estimators.md` shows where they cross."""

_RADIUS, _LEAST_RADIUS = 1.5, 0.7
"""Bound on a row with its target, in units of the median norm of such rows: up to _SMALL noise, and
where it is large. Rows beyond it count less."""

_MOST_COLUMNS = 1000
_ROUNDS = 20
_LEAST_GAIN = 1e-3
_EXACT = 1e-12


def moments_are_better(n: int, dim: int, noise_multiplier: float) -> bool:
    """Whether second moments with this noise give better weights than gradients would."""
    return dim <= _MOST_COLUMNS and noise_multiplier * dim <= _SMALL * n


def fit_squares(
    examples: Examples | PartitionedExamples,
    norm: float,
    releases: Releases,
    users: UserRows | None = None,
) -> tuple[Vector, NDArray[np.float64]]:
    """The weights of standardised columns and the covariance that noise gives them.

    Without privacy the weights are those of least squares, without noise.

    Parameters
    ----------
    examples : Examples or PartitionedExamples
        Standardised rows, with a column of ones where there is an intercept, and targets.
    norm : float
        The median norm of the rows, from an earlier release.
    releases : Releases
        What pays for the second moments.
    users : UserRows, optional
        Whose rows they are: each user then counts once, by the average over the user's rows.
    """
    if releases.plan.unprotected:
        known = in_memory(examples, "epsilon=inf")
        exact = _solved(exact_second_moments(known.rows.matrix, known.targets, users))
        return exact, np.zeros((exact.size, exact.size))
    n, columns = examples.shape
    n = n if users is None else users.count
    noise = releases.plan.noise_multiplier * columns / n
    factor = max(_LEAST_RADIUS, _RADIUS * math.sqrt(min(1.0, _SMALL / noise)))
    radius = factor * math.hypot(norm, 1.0)
    found = private_second_moments(examples, radius, releases, users=users)
    return shrunk_solution(found)


def shrunk_solution(found: SecondMoments) -> tuple[Vector, NDArray[np.float64]]:
    """Weights of the noisy normal equations A w = b, shrunk where noise hides them.

    With them comes their covariance over other noise.

    With E the noise in A and e that in b, A w - b has the noise E w - e, of the same variance
    noise² (1 + ‖w‖²) in every direction, whatever A is. For weights of mean square τ² in every
    direction, the best linear estimate along an eigenvector of eigenvalue λ is λ b/(λ² + ρ²),
    with ρ² = noise² (1 + ‖w‖²)/τ². The norm of the weights, and τ² = ‖w‖²/d with it, are those of
    the estimate: a few rounds find both.
    """
    values, vectors = np.linalg.eigh(found.matrix)
    positive = (vectors * np.maximum(values, 0.0)) @ vectors.T
    values, vectors = np.linalg.eigh(positive[:-1, :-1])
    along = vectors.T @ positive[:-1, -1]
    squares, size = 1.0, values.size
    weights, shrinkage = np.zeros(size), 0.0
    for _ in range(_ROUNDS):
        shrinkage = found.noise**2 * size * (1 + squares) / squares
        weights = values * along / (np.square(values) + shrinkage)
        squares = max(float(weights @ weights), _LEAST_GAIN)
    # The noise in an eigenvalue may hide the one that lets through most.
    doubt = found.noise * math.sqrt(size)
    worst = np.clip(math.sqrt(shrinkage), np.maximum(values - doubt, 0.0), values + doubt)
    inverse = (vectors * (worst / (np.square(worst) + shrinkage))) @ vectors.T
    solution = np.asarray(vectors @ weights)
    return solution, solution_covariance(found, solution, inverse)


def _solved(moments: NDArray[np.float64]) -> Vector:
    """The shortest solution of the normal equations."""
    matrix, right = moments[:-1, :-1], moments[:-1, -1]
    return np.asarray(np.linalg.lstsq(matrix, right, rcond=_EXACT)[0])
