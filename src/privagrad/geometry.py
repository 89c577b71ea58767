"""Ellipsoids: the shape that gradients are bounded to and that the noise takes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from privagrad import _validate
from privagrad._numba import kernel
from privagrad._validate import Vector

Projection = Literal["radial", "euclidean", "rows"]
PROJECTIONS: tuple[Projection, ...] = ("radial", "euclidean", "rows")
_NEWTON_STEPS = 200


@kernel()
def secular_root(v: Vector, stretch: Vector, target: float) -> float:
    """The λ ≥ 0 with Σ v_j² / (1 + λ stretch_j)² = target², or 0 where ‖v‖ ≤ target.

    Newton's method on λ ↦ 1/‖v(λ)‖, which increases and is concave, so that the iterates rise
    to the root from the left; the bracket ‖v‖/target = 1 + λ min(stretch) guards the last ulps.
    `stretch` must be positive with maximum of the order of 1.
    """
    largest = 0.0
    least_stretch = math.inf
    for j in range(v.size):
        largest = max(largest, abs(v[j]))
        least_stretch = min(least_stretch, stretch[j])
    if largest == 0.0:
        return 0.0
    goal = target / largest
    root = 0.0
    for _ in range(_NEWTON_STEPS):
        squares = 0.0
        slope = 0.0
        for j in range(v.size):
            shrink = 1.0 / (1.0 + root * stretch[j])
            part = v[j] / largest * shrink
            part *= part
            squares += part
            slope += part * stretch[j] * shrink
        norm = math.sqrt(squares)
        if root == 0.0:
            upper = (norm / goal - 1.0) / least_stretch
        if norm <= goal:
            break
        following = min(root + (squares / slope) * (norm / goal - 1.0), upper)
        if not following > root:
            break
        root = following
    return root


@kernel()
def _project_rows_euclidean(whitened: np.ndarray, stretch: Vector) -> None:
    for i in range(whitened.shape[0]):
        row = whitened[i]
        root = secular_root(row, stretch, 1.0)
        if root > 0.0:
            for j in range(row.size):
                row[j] /= 1.0 + root * stretch[j]


@dataclass(frozen=True, eq=False)
class Ellipsoid:
    """The set {g : Σ_j scale_j g_j² ≤ radius²}, the paper's E_A with A = diag(scale)/radius².

    Parameters
    ----------
    scale : array of shape (d,)
        The positive diagonal of C. Public, or the outcome of an earlier private release.
    radius : float
        B > 0.

    Guarantees
    ----------
    In the coordinates ``whiten(g) = sqrt(scale) g / radius`` the ellipsoid is the unit ball and
    the noise N(0, A⁻¹) is isotropic, so that any ellipsoid costs the same privacy as a ball.
    """

    scale: Vector
    radius: float

    def __post_init__(self) -> None:
        scale = _validate.positive_vector("scale", self.scale).copy()
        radius = _validate.positive("radius", self.radius)
        scale.setflags(write=False)
        object.__setattr__(self, "scale", scale)
        object.__setattr__(self, "radius", radius)
        # Beyond these a bounded gradient in units of the grid could overflow.
        if not ((self.whitening > 1e-280) & (self.whitening < 1e280)).all():
            raise ValueError(
                "Expected sqrt(scale)/radius from 1e-280 to 1e280 in every coordinate, "
                f"found scale from {scale.min():g} to {scale.max():g} at radius {radius:g}. "
                "Rescale the columns of the data first."
            )

    @classmethod
    def ball(cls, dim: int, radius: float) -> Ellipsoid:
        """The Euclidean ball {g ∈ R^dim : ‖g‖₂ ≤ radius}."""
        return cls(np.ones(_validate.whole("dim", dim)), radius)

    @property
    def dim(self) -> int:
        return self.scale.size

    @cached_property
    def whitening(self) -> Vector:
        """sqrt(scale)/radius, the diagonal of A^{1/2}."""
        return np.sqrt(self.scale) / self.radius

    @cached_property
    def noise_std(self) -> Vector:
        """radius/sqrt(scale), the diagonal of A^{-1/2}: the noise at noise multiplier 1."""
        return self.radius / np.sqrt(self.scale)

    @cached_property
    def stretch(self) -> Vector:
        """scale/max(scale): how fast each coordinate gives way under π_A."""
        stretch: Vector = self.scale / self.scale.max()
        return stretch

    def norm(self, G: ArrayLike) -> Vector | float:
        """sqrt(Σ_j scale_j g_j²) of each row of G, of shape (m, d) or (d,)."""
        return _row_norms(self._rows(G) * np.sqrt(self.scale))

    def whiten(self, G: ArrayLike) -> Vector:
        """A^{1/2} g for each row of G."""
        return self._rows(G) * self.whitening

    def unwhiten(self, U: ArrayLike) -> Vector:
        """A^{-1/2} u for each row of U."""
        return self._rows(U) * self.noise_std

    def project(self, G: ArrayLike, how: Projection = "radial") -> Vector:
        """Each row of G brought into the ellipsoid; rows inside stay as they are.

        ``"radial"``: argmin over y in the ellipsoid of ‖y - g‖_C, which is g · min(1, B/‖g‖_C).
        ``"euclidean"``: argmin over y in the ellipsoid of ‖y - g‖₂, the paper's π_A, which is
        g_j / (1 + λ scale_j) with the λ that puts y on the surface.
        """
        _validate.choice("how", how, PROJECTIONS[:2])
        rows = self._rows(G)
        if how == "radial":
            norms = np.asarray(_row_norms(rows * self.whitening))
            inside: Vector = rows / np.maximum(norms, 1.0)[..., None]
            return inside
        whitened = np.atleast_2d(rows * self.whitening)
        outside = np.asarray(_row_norms(whitened)) > 1.0
        moved = np.ascontiguousarray(whitened[outside])
        _project_rows_euclidean(moved, self.stretch)
        result = np.atleast_2d(rows).copy()
        result[outside] = moved * self.noise_std
        return result.reshape(rows.shape)

    def _rows(self, G: ArrayLike) -> Vector:
        rows = np.asarray(G, dtype=np.float64)
        if rows.ndim not in (1, 2) or rows.shape[-1] != self.dim:
            raise ValueError(
                f"Expected G of shape (m, {self.dim}) or ({self.dim},), found shape {rows.shape}."
            )
        return rows


def _row_norms(rows: Vector) -> Vector | float:
    """Euclidean norms over the last axis, free of overflow and underflow."""
    largest = np.abs(rows).max(axis=-1, initial=0.0, keepdims=True)
    safe = np.where((largest > 0) & np.isfinite(largest), largest, 1.0)
    norms: Vector | float = safe[..., 0] * np.sqrt(np.square(rows / safe).sum(axis=-1))
    return norms if rows.ndim == 2 else float(norms)
