"""Biased SGD and biased AdaGrad, Algorithms 4 and 5 of the paper, on any gradients of the user's.

Nothing here adds noise or is private: the gradients may be biased and noisy as they are. The
bounds of Theorems 6 and 7 are `privagrad.theory.biased_sgd_bound` and `biased_adagrad_bound`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import numpy as np
from numpy.typing import ArrayLike

from privagrad._internal import validate
from privagrad._internal.validate import Vector
from privagrad.geometry.domains import Domain
from privagrad.geometry.ellipsoid import Ellipsoid
from privagrad.methods import METHODS, Oracle, Setting
from privagrad.methods.loop import descend
from privagrad.privacy.sampling import Batches, Rows

Gradient = Callable[[Vector, int], ArrayLike]


@dataclass(frozen=True, eq=False)
class Descent:
    """The points a run of Algorithm 4 or 5 returns.

    Attributes
    ----------
    last : array of shape (d,)
        The last iterate x_T.
    average : array of shape (d,)
        The mean of x_1 ... x_T, which the algorithms return.
    suffix_average : array of shape (d,)
        The mean of the last half of x_1 ... x_T.
    queried_average : array of shape (d,)
        The mean of x_0 ... x_{T-1}, where the gradients were taken. Theorems 6 and 7 hold for
        this average: their proofs add up f(x_0) ... f(x_{T-1}) and shift the index by mistake.
    """

    last: Vector
    average: Vector
    suffix_average: Vector
    queried_average: Vector


def biased_sgd(
    gradient: Gradient,
    x0: ArrayLike,
    *,
    domain: Domain,
    steps: int,
    step_size: ArrayLike,
    adaptive: bool = False,
) -> Descent:
    """Algorithm 4: x_{k+1} is the Euclidean projection of x_k - α_k ĝ_k onto the domain.

    Parameters
    ----------
    gradient : callable
        ``gradient(x, k)`` returns ĝ_k, an array of shape (d,), at x = x_k for k = 0 ... T-1.
    x0 : array of shape (d,)
        The start, projected onto the domain if it is outside.
    domain : Domain
        The convex set to minimise over.
    steps : int
        T.
    step_size : float or array of shape (steps,)
        α_k, the same for all steps or one for each. Theorem 6 needs them not to increase.
    adaptive : bool
        Whether α_k is `step_size` / sqrt(Σ_{i ≤ k} ‖ĝ_i‖²), as in Algorithm 1. `step_size` is
        then one number.

    Returns
    -------
    Descent
        The last iterate and the averages.
    """
    count = validate.integer("steps", steps)
    if adaptive:
        return _run("pasan", gradient, x0, domain, count, validate.positive("step_size", step_size))
    given = np.full(count, step_size) if np.ndim(step_size) == 0 else step_size
    sizes = validate.positive_vector("step_size", given, dim=count)

    def scaled_gradient(x: Vector, k: int) -> Vector:
        scaled: Vector = sizes[k] * np.asarray(gradient(x, k))
        return scaled

    return _run("sgd", scaled_gradient, x0, domain, count, 1.0)


def biased_adagrad(
    gradient: Gradient,
    x0: ArrayLike,
    *,
    domain: Domain,
    steps: int,
    step_size: float | None = None,
) -> Descent:
    """Algorithm 5: x_{k+1} is the projection of x_k - H_k⁻¹ ĝ_k onto the domain in ‖·‖_{H_k}.

    H_k = diag(Σ_{i ≤ k} ĝ_i ĝ_iᵀ)^{1/2} / α, and 0/0 is 0. The sum begins at i = 0 as in Algorithm
    2: with i = 1, as printed, H_0 would be 0.

    Parameters
    ----------
    gradient, x0, domain, steps
        As for `biased_sgd`.
    step_size : float, optional
        α, by default diam_∞ of the domain as in the paper.

    Returns
    -------
    Descent
        The last iterate and the averages.
    """
    if step_size is None:
        step_size = domain.max_diameter(np.size(x0))
        if not 0 < step_size < math.inf:
            raise ValueError(
                f"Expected a step_size, or a bounded domain whose diameter it can be; found "
                f"{domain!r}. Give for example step_size=0.1."
            )
    alpha = validate.positive("step_size", step_size)
    return _run("adagrad", gradient, x0, domain, validate.integer("steps", steps), alpha)


@dataclass(frozen=True)
class _Queries:
    """The user's gradients as an oracle; the batch of step k is the single row k."""

    gradient: Gradient

    def bounded(self, x: Vector, batch: Rows, ellipsoid: Ellipsoid | None) -> Vector:
        k = int(batch[0])
        found = validate.vector("gradient(x, k)", self.gradient(x.copy(), k), dim=x.size)
        if not np.isfinite(found).all():
            raise ValueError(
                f"Expected finite numbers from gradient(x, k), found {found} at k={k}. Bound the "
                "gradients before you return them."
            )
        return found


def _run(
    method: str, gradient: Gradient, x0: ArrayLike, domain: Domain, steps: int, step_size: float
) -> Descent:
    start = domain.project(validate.vector("x0", x0))
    last = start.copy()
    setting = Setting(start.size, Batches(steps, 1, steps), domain, step_size=step_size)
    # SGD, PASAN and AdaGrad ask an oracle for `bounded` alone.
    oracle = cast("Oracle", _Queries(gradient))
    average, suffix_average = descend(
        METHODS[method], oracle, iter(np.arange(steps)[:, None]), last, setting
    )
    return Descent(last, average, suffix_average, average + (start - last) / steps)
