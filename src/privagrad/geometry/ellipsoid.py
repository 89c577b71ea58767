"""Ellipsoids: the shape that gradients are bounded to and that the noise takes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike

from privagrad._internal import validate
from privagrad._internal.jit import kernel
from privagrad._internal.validate import Vector

Projection = Literal["radial", "euclidean", "rows"]
PROJECTIONS: tuple[Projection, ...] = ("radial", "euclidean", "rows")
_NEWTON_STEPS = 200
_LARGEST_ROOT = 1e308
_FAR = 64


@kernel()
def euclidean_norm(v: Any) -> float:
    """‖v‖₂ in one fixed order, free of overflow and underflow; inf or NaN where v is not finite."""
    largest = 0.0
    for j in range(v.size):
        size = abs(v[j])
        if math.isnan(size):
            return math.nan
        largest = max(largest, size)
    if largest == 0.0 or not math.isfinite(largest):
        return largest
    squares = 0.0
    for j in range(v.size):
        part = v[j] / largest
        squares += part * part
    return largest * math.sqrt(squares)


@kernel()
def secular_root(v: Any, scale: Any, target: float) -> tuple[float, float]:
    """(λ, top) with Σ v_j² / (1 + λ scale_j/top)² = target², or λ = 0 where ‖v‖ ≤ target.

    Newton's method on λ ↦ 1/‖v(λ)‖, which increases and is concave, so that the iterates rise
    to the root from the left; the bracket ‖v‖/target = 1 + λ min(scale)/top guards the last ulps.
    `top` is the largest scale of a coordinate that is not 0. Where scales are so spread that
    their ratios or λ are beyond the range of doubles, λ is too small: callers check the norm.
    """
    largest = top = 0.0
    for j in range(v.size):
        largest = max(largest, abs(v[j]))
        if v[j] != 0.0:
            top = max(top, scale[j])
    if largest == 0.0:
        return 0.0, 1.0
    sizes, stretch = np.empty(v.size), np.empty(v.size)
    least = math.inf
    for j in range(v.size):
        sizes[j] = v[j] / largest
        stretch[j] = scale[j] / top if v[j] != 0.0 else 1.0
        least = min(least, stretch[j])
    goal = target / largest
    root, upper = 0.0, _LARGEST_ROOT
    for step in range(_NEWTON_STEPS):
        squares = 0.0
        slope = 0.0
        for j in range(v.size):
            shrink = 1.0 / (1.0 + root * stretch[j])
            part = sizes[j] * shrink
            part *= part
            squares += part
            slope += part * stretch[j] * shrink
        norm = math.sqrt(squares)
        if norm <= goal:
            break
        excess = norm / goal - 1.0
        if step == 0:
            upper = min(excess / least, _LARGEST_ROOT)
        following = upper if slope == 0.0 else min(root + (squares / slope) * excess, upper)
        if not following > root:
            break
        root = following
    return root, top


@kernel()
def _weighted_norm(row: Any, weights: Any, weighted: Any) -> float:
    """‖weights · row‖₂; the products stay in `weighted`."""
    for j in range(row.size):
        weighted[j] = row[j] * weights[j]
    return euclidean_norm(weighted)


@kernel()
def _row_norms(rows: Any, weights: Any) -> Any:
    """‖weights · row‖₂ of each row: the same whatever other rows there are."""
    norms = np.empty(rows.shape[0])
    weighted = np.empty(rows.shape[1])
    for i in range(rows.shape[0]):
        norms[i] = _weighted_norm(rows[i], weights, weighted)
    return norms


@kernel()
def _project_rows(rows: Any, scale: Any, roots: Any, radius: float, euclidean: bool) -> None:
    """Each row, in place, to norm ≤ radius as `_row_norms` computes it; not finite ones to 0."""
    weighted = np.empty(scale.size)
    for i in range(rows.shape[0]):
        row = rows[i]
        if not np.isfinite(row).all():
            row[:] = 0.0
            continue
        norm = _weighted_norm(row, roots, weighted)
        if norm <= radius:
            continue
        # Where the norm overflows, all is brought down first: the root depends on ratios alone.
        target = radius
        while not norm < math.inf:
            target = math.ldexp(target, -_FAR)
            for j in range(row.size):
                row[j] = math.ldexp(row[j], -_FAR)
            norm = _weighted_norm(row, roots, weighted)
        if euclidean:
            root, top = secular_root(weighted, scale, target)
            if root > 0.0:
                for j in range(row.size):
                    row[j] /= 1.0 + root * (scale[j] / top)
            norm = _weighted_norm(row, roots, weighted)
        # Both projections end on the surface.
        for j in range(row.size):
            row[j] = row[j] / norm * radius
        ulps = 2.0**-53
        while not _weighted_norm(row, roots, weighted) <= radius:
            for j in range(row.size):
                row[j] *= 1.0 - ulps
            ulps *= 2.0


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
        scale = validate.positive_vector("scale", self.scale).copy()
        radius = validate.positive("radius", self.radius)
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
        return cls(np.ones(validate.integer("dim", dim)), radius)

    @property
    def dim(self) -> int:
        return self.scale.size

    @cached_property
    def whitening(self) -> Vector:
        """sqrt(scale)/radius, the diagonal of A^{1/2}."""
        with np.errstate(over="ignore", under="ignore"):
            return np.asarray(np.sqrt(self.scale) / self.radius)

    @cached_property
    def noise_std(self) -> Vector:
        """radius/sqrt(scale), the diagonal of A^{-1/2}: the noise at noise multiplier 1."""
        return self.radius / np.sqrt(self.scale)

    def norm(self, G: ArrayLike) -> Vector | float:
        """sqrt(Σ_j scale_j g_j²) of each row of G, of shape (m, d) or (d,)."""
        rows = self._rows(G)
        norms: Vector = _row_norms(np.atleast_2d(rows), self._roots)
        return norms if rows.ndim == 2 else float(norms[0])

    @cached_property
    def _roots(self) -> Vector:
        return np.sqrt(self.scale)

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

        Guarantees
        ----------
        `norm` of the result is ≤ radius to the last bit. Rows that are not finite become 0.
        """
        validate.choice("how", how, PROJECTIONS[:2])
        rows = self._rows(G)
        inside = np.array(np.atleast_2d(rows), dtype=np.float64, order="C")
        _project_rows(inside, self.scale, self._roots, self.radius, how == "euclidean")
        return inside.reshape(rows.shape)

    def _rows(self, G: ArrayLike) -> Vector:
        rows = np.asarray(G, dtype=np.float64)
        if rows.ndim not in (1, 2) or rows.shape[-1] != self.dim:
            raise ValueError(
                f"Expected G of shape (m, {self.dim}) or ({self.dim},), found shape {rows.shape}."
            )
        return rows
