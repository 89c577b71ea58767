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

from privagrad._internal.jit import kernel
from privagrad._internal.validate import Integers, Vector
from privagrad.geometry.ellipsoid import euclidean_norm
from privagrad.glm.gradients import GlmGradients
from privagrad.glm.kernels import FlatRows
from privagrad.glm.losses import slope
from privagrad.privacy.grid import ULP

_MOST_STEPS = 200_000
_LEAST_SHRINK = 1e-290
_INFINITY = math.inf


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
        limit = self._longest * (1 - 1e-9)
        return _shrinks(self.gradients.rows.flat, self.gradients.targets, limit)

    @property
    def _longest(self) -> float:
        """How long a row may be."""
        return self.bound / self.gradients.loss.lipschitz

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
            return self._longest**2
        matrix: Any = self.gradients.rows.matrix[self._shrink > 0].astype(np.float64)
        v = np.random.default_rng(0).standard_normal(self.gradients.rows.shape[1])
        value = 0.0
        for _ in range(30):
            v /= max(float(np.linalg.norm(v)), 1e-300)
            v = matrix.T @ (matrix @ v) / self._shrink.size
            value = float(np.linalg.norm(v))
        return 1.2 * value

    def gradient(self, x: Vector) -> Vector:
        """∇J(x)."""
        gradients, total = self.gradients, np.zeros(x.size)
        width = 0.0 if math.isfinite(gradients.loss.smoothness) else self.smoothing
        _add_slopes(
            gradients.rows.flat, self._shrink, gradients.targets, gradients.point(x),
            *gradients.loss.key, width, total, np.zeros(x.size),
        )  # fmt: skip
        result: Vector = total / self._shrink.size + self.ridge * x + self.tilt
        return result

    def rounding(self, tolerance: float, longest: float = 0.0) -> float:
        """How far `gradient` may be from ∇J, rounding errors added up, where it is ≤ tolerance.

        A margin is off by (d + 3) ulps of ‖a‖‖x‖, a slope by the curvature times that; sums over
        rows are compensated. Where ‖∇J‖ ≤ 2 tolerance, ridge ‖x‖ ≤ bound + ‖tilt‖ + 2 tolerance;
        `longest` is a public bound on ‖tilt‖, which is secret.
        """
        pull = self.bound + longest + 2 * tolerance
        bend = self.curvature * self._longest**2 * pull / self.ridge
        columns = self.gradients.rows.shape[1]
        return ULP * ((columns + 8) * (bend + tolerance) + 16 * (self.bound + pull))

    def solve(self, tolerance: float) -> Vector:
        """An x whose `gradient` is ≤ tolerance, by accelerated gradients, or an error.

        J is `ridge`-strongly convex, so x lies within (tolerance + rounding)/ridge of the
        minimiser.
        """
        smooth = self.curvature * self._largest + self.ridge
        root = math.sqrt(self.ridge / smooth)
        if math.isfinite(self.bound):
            self._require_enough_steps(smooth, root, tolerance)
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

    def _require_enough_steps(self, smooth: float, root: float, tolerance: float) -> None:
        """Refuse from public numbers alone: an error after reading rows would reveal them.

        The gradient, at first at most bound + ‖tilt‖, falls by 1 - root in two steps.
        """
        start = self.bound + float(np.linalg.norm(self.tilt))
        if 2 * math.log(max(start / tolerance * smooth / self.ridge, 1.0)) > root * _MOST_STEPS:
            raise ArithmeticError(
                f"Expected a problem that {_MOST_STEPS} steps can solve, found a curvature of "
                f"{smooth / self.ridge:.2g} times the ridge. Take a smaller step_size (more "
                "ridge), a smaller radius, or more smoothing."
            )


@kernel()
def _shrinks(table: FlatRows, targets: Vector, limit: float) -> Vector:
    """min(1, limit/‖a‖) of each row; 0 where row, norm or target is not finite or too long."""
    data, _, starts, _ = table
    shrinks = np.zeros(starts.size - 1)
    for i in range(shrinks.size):
        norm = euclidean_norm(data[starts[i] : starts[i + 1]])
        if math.isfinite(norm) and math.isfinite(targets[i]):
            shrink = limit / norm if norm > limit else 1.0
            # Smaller ones have too few digits.
            shrinks[i] = shrink if shrink > _LEAST_SHRINK else 0.0
    return shrinks


@kernel()
def _add_slopes(
    table: FlatRows, shrinks: Vector, targets: Vector, x: Vector, code: int, parameter: float,
    width: float, total: Vector, lost: Vector,
) -> None:  # fmt: skip
    """total += Σ_i ℓ_h'(⟨s_i a_i, x⟩) s_i a_i over rows shrunk by s_i, with compensated sums."""
    data, indices, starts, dense = table
    shrunk = np.empty(x.size)
    for i in range(shrinks.size):
        if shrinks[i] == 0.0:
            continue
        values = data[starts[i] : starts[i + 1]]
        columns = indices[: x.size] if dense else indices[starts[i] : starts[i + 1]]
        for k in range(values.size):
            shrunk[k] = np.float64(values[k]) * shrinks[i]
        margin = _product(shrunk[: values.size], columns, dense, x)
        if width == 0.0:
            steep = slope(code, parameter, margin, targets[i])
        else:
            # Each bends once, at m = y. Differences of values would lose the bound for huge y.
            down = slope(code, parameter, -_INFINITY, targets[i])
            up = slope(code, parameter, _INFINITY, targets[i])
            part = (margin - targets[i] + width) / (2.0 * width)
            steep = down + (up - down) * min(max(part, 0.0), 1.0)
        for k in range(values.size):
            j = k if dense else columns[k]
            added = steep * shrunk[k] - lost[j]
            after = total[j] + added
            lost[j] = (after - total[j]) - added
            total[j] = after


@kernel(reorder=True)
def _product(values: Vector, columns: Integers, dense: bool, x: Vector) -> float:
    product = 0.0
    if dense:
        for j in range(values.size):
            product += values[j] * x[j]
    else:
        for k in range(values.size):
            product += values[k] * x[columns[k]]
    return product


def curvature(smoothness: float, lipschitz: float, smoothing: float) -> float:
    """The largest second derivative: the loss's own, or of the loss averaged over ±smoothing."""
    return smoothness if math.isfinite(smoothness) else lipschitz / smoothing
