"""DP-SGD with every advantage: facts of the rows for free, settings to choose afterwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from scipy import sparse
from scipy.sparse import linalg

import privagrad as pg
from privagrad.linear import default_delta

RADII = (0.1, 0.3, 1.0, 3.0)
"""Bounds on gradients, in true median norms of a row."""

STEP_SIZES = tuple(10.0 ** (k / 2) for k in range(-6, 5))
"""In inverse true median norms of a row."""

Fit = Callable[[float, float], np.ndarray]


def fits(X: Any, y: np.ndarray, X_test: Any, epsilon: float, regression: bool, seed: int) -> Fit:
    """Test margins as a function of radius and step size, by 300 steps of n/20 rows.

    The target of a regression is standardised by its true mean and deviation. Labels are -1 and 1.
    """
    X, X_test = _with_constant(X), _with_constant(X_test)
    centre, unit = (y.mean(), y.std()) if regression else (0.0, 1.0)
    loss = pg.Loss("quantile", 0.5) if regression else pg.Loss("logistic")
    norms = linalg.norm if isinstance(X, sparse.csr_array) else np.linalg.norm
    norm = float(np.median(norms(X, axis=1)))

    def margins(radius: float, step_size: float) -> np.ndarray:
        result = pg.minimize(
            loss, X, (y - centre) / unit, method="dp-sgd", epsilon=epsilon,
            delta=default_delta(y.size), ellipsoid=pg.Ellipsoid.ball(X.shape[1], radius * norm),
            batch_size=y.size // 20, steps=300, step_size=step_size / norm, random_state=seed,
            progress=False, threads=1,
        )  # fmt: skip
        return np.asarray(X_test @ result.x * unit + centre)

    return margins


def _with_constant(X: Any) -> Any:
    one = np.ones((X.shape[0], 1))
    if not isinstance(X, np.ndarray):
        blocks = [sparse.csr_array(part) for part in (X, one)]
        return sparse.hstack(blocks, format="csr", dtype=np.float32)
    return np.hstack([X, one], dtype=np.float32, casting="same_kind")
