"""DP-GD and DP-SGD with every advantage: facts of the rows for free, settings chosen afterwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from scipy import sparse
from scipy.sparse import linalg

import privagrad as pg

RADII = (0.1, 0.3, 1.0)
"""Bounds on gradients, in true median norms of a row."""

STEP_SIZES = {
    "DP-GD": tuple(10.0 ** (k / 2) for k in range(-1, 6)),
    "DP-SGD": tuple(10.0 ** (k / 2) for k in range(-6, 5)),
}
"""In inverse true median norms of a row, for DP-GD of its square."""

_HOW: dict[str, dict[str, Any]] = {
    "DP-GD": {"steps": 100, "schedule": "linear"},
    "DP-SGD": {"steps": 300},
}
Fit = Callable[[float, float], np.ndarray]


def fits(
    who: str, X: Any, y: np.ndarray, X_test: Any, epsilon: float, delta: float, regression: bool,
    seed: int,
) -> Fit:  # fmt: skip
    """Predictions for test rows as a function of radius and step size.

    DP-GD takes 100 steps of all rows with a step size that falls to 0, DP-SGD 300 steps of n/20
    rows. The target of a regression is standardised by its true mean and deviation.
    """
    X, X_test = _with_constant(X), _with_constant(X_test)
    centre, unit = (y.mean(), y.std()) if regression else (0.0, 1.0)
    classes = 0 if regression else int(y.max()) + 1
    names = {0: "quantile", 2: "logistic"}
    loss = pg.Loss(names.get(classes, "softmax"))
    norms = linalg.norm if isinstance(X, sparse.csr_array) else np.linalg.norm
    norm = float(np.median(norms(X, axis=1)))
    size, power = (y.size, 2) if who == "DP-GD" else (max(y.size // 20, 1), 1)

    def predicted(radius: float, step_size: float) -> np.ndarray:
        dim = X.shape[1] * (classes if classes > 2 else 1)
        result = pg.minimize(
            loss, X, (y - centre) / unit, method="dp-sgd", epsilon=epsilon, delta=delta,
            ellipsoid=pg.Ellipsoid.ball(dim, radius * norm), batch_size=size,
            step_size=step_size / norm**power, random_state=seed, progress=False, **_HOW[who],
        )  # fmt: skip
        if classes > 2:
            return np.asarray((X_test @ result.x.reshape(classes, -1).T).argmax(axis=1))
        margins = np.asarray(X_test @ result.x)
        return (margins > 0).astype(int) if classes else margins * unit + centre

    return predicted


def _with_constant(X: Any) -> Any:
    one = np.ones((X.shape[0], 1))
    if not isinstance(X, np.ndarray):
        blocks = [sparse.csr_array(part) for part in (X, one)]
        return sparse.hstack(blocks, format="csr", dtype=np.float32)
    return np.hstack([X, one], dtype=np.float32, casting="same_kind")
