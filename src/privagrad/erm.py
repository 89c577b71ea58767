"""Regularised empirical risk minimisation to a certified tolerance, rows bounded beforehand.

    J(x) = (1/n) Σ_i ℓ_h(⟨a_i, x⟩; y_i) + ridge/2 ‖x‖² + ⟨tilt, x⟩

with every row shrunk to ‖a_i‖ ≤ bound / max|ℓ'|, so that no example's gradient exceeds `bound`, and
ℓ_h the loss averaged over [m - h, m + h] where it bends: ℓ_h'(m) = (ℓ(m + h) - ℓ(m - h))/(2h).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from privagrad import kernels
from privagrad._validate import Vector
from privagrad.glm import GlmGradients

_MOST_STEPS = 200_000


@dataclass(frozen=True)
class RegularizedRisk:
    """J for the examples of `gradients`; `bound` infinite leaves the rows as they are."""

    gradients: GlmGradients
    bound: float
    ridge: float
    smoothing: float
    tilt: Vector | float = 0.0

    @cached_property
    def curvature(self) -> float:
        """The largest ℓ_h''."""
        return curvature(
            self.gradients.loss.smoothness, self.gradients.loss.lipschitz, self.smoothing
        )

    @cached_property
    def _shrink(self) -> Vector:
        """What brings each row within the bound; 0 for rows that are not finite."""
        matrix = self.gradients.rows.matrix.astype(np.float64)
        with np.errstate(over="ignore"):
            squares = matrix.multiply(matrix) if hasattr(matrix, "multiply") else np.square(matrix)
        norms = np.sqrt(np.asarray(squares.sum(axis=1))).ravel()
        finite = np.isfinite(norms) & np.isfinite(self.gradients.targets)
        limit = self.bound / self.gradients.loss.lipschitz * (1 - 1e-9)
        shrink = np.minimum(1.0, limit / np.where(finite, np.maximum(norms, 1e-300), 1.0))
        return np.where(finite, shrink, 0.0)

    @property
    def shrunk(self) -> int:
        """How many rows were longer than the bound allows. Not private."""
        return int(((self._shrink < 1) & (self._shrink > 0)).sum())

    @property
    def left_out(self) -> int:
        """How many rows are not finite. Not private."""
        return int((self._shrink == 0).sum())

    @cached_property
    def _largest(self) -> float:
        """A bound on the rows' second moment in any direction; public where rows are bounded."""
        if math.isfinite(self.bound):
            return (self.bound / self.gradients.loss.lipschitz) ** 2
        v = np.random.default_rng(0).standard_normal(self.gradients.rows.shape[1])
        value = 0.0
        for _ in range(30):
            v /= max(float(np.linalg.norm(v)), 1e-300)
            v = self._transposed(self._margins(v)) / self._shrink.size
            value = float(np.linalg.norm(v))
        return 1.2 * value

    def _margins(self, x: Vector) -> Vector:
        with np.errstate(invalid="ignore", over="ignore"):
            margins = np.asarray(self.gradients.rows.matrix @ x, dtype=np.float64) * self._shrink
        return np.where(self._shrink > 0, margins, 0.0)

    def _transposed(self, weights: Vector) -> Vector:
        matrix: Any = self.gradients.rows.matrix
        kept = self._shrink > 0
        if not kept.all():
            matrix, weights = matrix[kept], weights[kept]
        shrink = self._shrink[kept] if not kept.all() else self._shrink
        return np.asarray(matrix.T @ (weights * shrink), dtype=np.float64)

    def gradient(self, x: Vector) -> Vector:
        """∇J(x)."""
        loss, h = self.gradients.loss, self.smoothing
        margins = self._margins(x)
        targets = np.where(self._shrink > 0, self.gradients.targets, 1.0)
        if math.isfinite(loss.smoothness):
            slopes = kernels.slopes(*loss.key, margins, targets)
        else:
            # Each bends once, at m = y. Differences of values would lose the bound for huge y.
            down = kernels.slopes(*loss.key, np.full_like(margins, -np.inf), targets)
            up = kernels.slopes(*loss.key, np.full_like(margins, np.inf), targets)
            slopes = down + (up - down) * np.clip((margins - targets + h) / (2 * h), 0.0, 1.0)
        result: Vector = self._transposed(slopes) / self._shrink.size + self.ridge * x + self.tilt
        return result

    def solve(self, tolerance: float) -> Vector:
        """An x with ‖∇J(x)‖ ≤ tolerance, by accelerated gradients; raises if it cannot be had.

        J is `ridge`-strongly convex, so x lies within tolerance/ridge of the minimiser.
        """
        smooth = self.curvature * self._largest + self.ridge
        root = math.sqrt(self.ridge / smooth)
        momentum = (1 - root) / (1 + root)
        x = np.zeros(self.gradients.rows.shape[1])
        ahead = x
        for _ in range(_MOST_STEPS):
            slope = self.gradient(ahead)
            if np.linalg.norm(slope) <= tolerance:
                return ahead
            following = ahead - slope / smooth
            if slope @ (following - x) > 0:  # going uphill: forget the momentum
                ahead = following
            else:
                ahead = following + momentum * (following - x)
            x = following
        raise ArithmeticError(
            f"No solution to tolerance {tolerance:g} within {_MOST_STEPS} steps. Take a smaller "
            "step_size (more ridge) or a smaller radius."
        )


def curvature(smoothness: float, lipschitz: float, smoothing: float) -> float:
    """The largest second derivative: the loss's own, or of the loss averaged over ±smoothing."""
    return smoothness if math.isfinite(smoothness) else lipschitz / smoothing
