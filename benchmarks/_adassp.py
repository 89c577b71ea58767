"""AdaSSP (Wang 2018, "Revisiting differentially private linear regression", Algorithm 2)."""

from __future__ import annotations

import math

import numpy as np

_FAILURE = 0.05


def adassp(
    X: np.ndarray, y: np.ndarray, quantile: float, epsilon: float, delta: float,
    rng: np.random.Generator,
) -> np.ndarray:  # fmt: skip
    """Weights of perturbed sufficient statistics, with the ridge penalty that the paper adapts.

    The largest norms of a row and of a target, which the paper takes to be public, are these
    quantiles of the true ones, 1 being the largest: more than a user may know. Longer rows are
    shrunk together with their targets.
    """
    dim = X.shape[1]
    norms = np.sqrt(np.square(X).sum(axis=1))
    row, target = float(np.quantile(norms, quantile)), float(np.quantile(np.abs(y), quantile))
    shrink = np.minimum(1.0, row / np.maximum(norms, row * 1e-12))
    X, y = X * shrink[:, None], np.clip(y * shrink, -target, target)
    part, log = epsilon / 3, math.log(6 / delta)
    noise = math.sqrt(log) / part
    gram = X.T @ X
    least = float(np.linalg.eigvalsh(gram)[0])
    least += row**2 * (noise * rng.standard_normal() - log / part)
    wanted = math.sqrt(dim * log * math.log(2 * dim**2 / _FAILURE)) * row**2 / part
    penalty = max(0.0, wanted - max(least, 0.0))
    upper = np.triu(rng.standard_normal((dim, dim)))
    gram += noise * row**2 * (upper + np.triu(upper, 1).T)
    right = X.T @ y + noise * row * target * rng.standard_normal(dim)
    return np.linalg.solve(gram + penalty * np.eye(dim), right)
