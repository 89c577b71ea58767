"""Problems made of random numbers, with everything about them known."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from privagrad._validate import Vector


class Regression(NamedTuple):
    X: Vector
    y: Vector
    sigma: Vector


def absolute_regression(
    n: int = 5000, dim: int = 100, tau: float = 0.01, decay: float = 1.5, seed: int = 0
) -> Regression:
    """Section 5.1: a ~ N(0, diag(σ)²) with σ_j = j^-decay, y = ⟨a, x*⟩ + Laplace(tau).

    x* is uniform on {-1, 1}^dim. Where the paper draws new data is not said; here a seed is one
    data set.
    """
    rng = np.random.default_rng(seed)
    sigma: Vector = np.arange(1, dim + 1, dtype=np.float64) ** -decay
    X = rng.standard_normal((n, dim)) * sigma
    best = rng.choice([-1.0, 1.0], dim)
    return Regression(X, X @ best + rng.laplace(0, tau, n), sigma)
