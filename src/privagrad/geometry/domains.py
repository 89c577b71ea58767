"""Convex sets to optimise over: one exact projection in any diagonal metric, and diameters."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike

from privagrad._internal import validate
from privagrad._internal.jit import kernel
from privagrad._internal.validate import Vector
from privagrad.geometry.ellipsoid import secular_root


class Domain(ABC):
    """A closed convex set X of R^d."""

    def project(
        self, x: ArrayLike, metric: ArrayLike | None = None, out: Vector | None = None
    ) -> Vector:
        """argmin over y in X of Σ_j metric_j (y_j - x_j)²; `metric` is positive, default ones.

        `out`, which may be `x` itself, receives the result when given.
        """
        point = validate.vector("x", x)
        weights = None
        if metric is not None:
            weights = validate.positive_vector("metric", metric, dim=point.size)
        if out is not None and out.shape != point.shape:
            raise ValueError(f"Expected out of shape {point.shape}, as x; found {out.shape}.")
        return self.project_into(np.empty_like(point) if out is None else out, point, weights)

    @abstractmethod
    def project_into(self, out: Vector, x: Vector, metric: Vector | None) -> Vector:
        """`project` without its checks: writes into `out`, which may be `x`, and returns it."""

    @abstractmethod
    def scaled_diameter(self, scale: ArrayLike) -> float:
        """sup over x, y in X of ‖x - y‖_{C⁻¹} = sqrt(Σ_j (x_j - y_j)²/scale_j)."""

    @abstractmethod
    def max_diameter(self, dim: int) -> float:
        """sup over x, y in X of ‖x - y‖_∞, the paper's diam_∞(X)."""

    def euclidean_diameter(self, dim: int) -> float:
        """sup over x, y in X of ‖x - y‖₂, the paper's diam_2(X)."""
        return self.scaled_diameter(np.ones(dim))


@dataclass(frozen=True)
class WholeSpace(Domain):
    """R^d."""

    def project_into(self, out: Vector, x: Vector, metric: Vector | None) -> Vector:
        if out is not x:
            np.copyto(out, x)
        return out

    def scaled_diameter(self, scale: ArrayLike) -> float:
        return math.inf

    def max_diameter(self, dim: int) -> float:
        return math.inf


@dataclass(frozen=True, eq=False)
class Box(Domain):
    """{x : low_j ≤ x_j ≤ high_j}; numbers for all coordinates or arrays, infinities allowed."""

    low: float | Vector
    high: float | Vector

    def __post_init__(self) -> None:
        low = np.asarray(self.low, dtype=np.float64)
        high = np.asarray(self.high, dtype=np.float64)
        if low.ndim > 1 or high.ndim > 1 or (low.ndim and high.ndim and low.shape != high.shape):
            raise ValueError(
                "Expected low and high to be numbers or vectors of one length, found shapes "
                f"{low.shape} and {high.shape}."
            )
        if not np.all(low <= high):
            raise ValueError("Expected low <= high in every coordinate; swap or correct them.")
        object.__setattr__(self, "low", low if low.ndim else float(low))
        object.__setattr__(self, "high", high if high.ndim else float(high))

    @cached_property
    def _edges(self) -> tuple[Vector, Vector]:
        return np.atleast_1d(self.low), np.atleast_1d(self.high)

    @cached_property
    def _size(self) -> int:
        return max(edge.size for edge in self._edges)

    def project_into(self, out: Vector, x: Vector, metric: Vector | None) -> Vector:
        if self._size not in (1, x.size):
            raise ValueError(
                f"Expected a point of {self._size} coordinates, as the box has; found {x.size}."
            )
        _clip(out, x, *self._edges)
        return out

    def scaled_diameter(self, scale: ArrayLike) -> float:
        weights = validate.positive_vector("scale", scale)
        width = np.broadcast_to(np.subtract(self.high, self.low), weights.shape)
        return float(np.linalg.norm(width / np.sqrt(weights)))

    def max_diameter(self, dim: int) -> float:
        return float(np.max(np.subtract(self.high, self.low)))


@kernel()
def _clip(out: Vector, x: Vector, low: Vector, high: Vector) -> None:
    low_stride, high_stride = min(low.size - 1, 1), min(high.size - 1, 1)
    for j in range(x.size):
        out[j] = min(max(x[j], low[j * low_stride]), high[j * high_stride])


@dataclass(frozen=True)
class L2Ball(Domain):
    """{x : ‖x‖₂ ≤ radius}."""

    radius: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "radius", validate.positive("radius", self.radius))

    def project_into(self, out: Vector, x: Vector, metric: Vector | None) -> Vector:
        # y_j = x_j / (1 + λ/metric_j): with the inverse metric as stretch, π_A's equation.
        norm = float(np.linalg.norm(x))
        if norm <= self.radius:
            return WholeSpace().project_into(out, x, None)
        if metric is None:
            return np.multiply(x, self.radius / norm, out=out)
        stretch: Vector = metric.min() / metric
        root, top = secular_root(x, stretch, self.radius)
        return np.divide(x, 1.0 + root * (stretch / top), out=out)

    def scaled_diameter(self, scale: ArrayLike) -> float:
        return 2 * self.radius / math.sqrt(validate.positive_vector("scale", scale).min())

    def max_diameter(self, dim: int) -> float:
        return 2 * self.radius


@dataclass(frozen=True)
class Simplex(Domain):
    """{x : x_j ≥ 0, Σ_j x_j = radius}."""

    radius: float = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "radius", validate.positive("radius", self.radius))

    def project_into(self, out: Vector, x: Vector, metric: Vector | None) -> Vector:
        # y_j = max(0, x_j - θ/metric_j): coordinates leave zero in the order of x_j metric_j.
        weights = np.ones_like(x) if metric is None else metric
        leaving = x * weights
        order = np.argsort(-leaving)
        inverse = 1.0 / weights
        theta = (np.cumsum(x[order]) - self.radius) / np.cumsum(inverse[order])
        last = np.flatnonzero(leaving[order] > theta)
        # The largest breakpoint always exceeds its θ; rounding alone can hide that.
        shift = theta[last[-1]] if last.size else theta[0]
        np.subtract(x, shift * inverse, out=out)
        return np.maximum(out, 0.0, out=out)

    def scaled_diameter(self, scale: ArrayLike) -> float:
        weights = np.sort(validate.positive_vector("scale", scale))
        return 0.0 if weights.size < 2 else self.radius * math.sqrt((1 / weights[:2]).sum())

    def max_diameter(self, dim: int) -> float:
        return 0.0 if dim < 2 else self.radius


@dataclass(frozen=True)
class L1Ball(Domain):
    """{x : Σ_j |x_j| ≤ radius}."""

    radius: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "radius", validate.positive("radius", self.radius))

    def project_into(self, out: Vector, x: Vector, metric: Vector | None) -> Vector:
        if np.abs(x).sum() <= self.radius:
            return WholeSpace().project_into(out, x, None)
        signs = np.sign(x)
        Simplex(self.radius).project_into(out, np.abs(x), metric)
        return np.multiply(out, signs, out=out)

    def scaled_diameter(self, scale: ArrayLike) -> float:
        return L2Ball(self.radius).scaled_diameter(scale)

    def max_diameter(self, dim: int) -> float:
        return 2 * self.radius
