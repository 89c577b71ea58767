"""GEP: a small noise in a public subspace, a smaller bound outside (Yu, Zhang, Chen, Liu 2021).

Do not let privacy overbill utility: gradient embedding perturbation for private learning. With V
an orthonormal basis of the subspace that public gradients fill, a gradient g is its embedding
Vᵀg, of few coordinates, and its residual g - VVᵀg, which is short where the subspace fits. Each
part is bounded by a radius of its own and gets noise of that radius.

The original accounts for two Gaussian mechanisms, one for each part. We release both as one:
every example contributes the vector [embedding/(√2 S₁), residual/(√2 S₂)], whose parts have norm
at most 1/√2 each, so that together they have norm at most 1 whatever the gradient. Noise of z in
every coordinate is then a single Gaussian mechanism of noise multiplier z, the very one of DP-SGD.
It is the same privacy: two releases of multiplier √2 z compose to one of multiplier z.

The original finds V by a power iteration at every step, from public rows with random labels; we
take the exact eigenvectors, once an epoch, with the labels given. The published code bounds the
residual to 2/5 of S₁; which share is right depends on how well the subspace fits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from privagrad._internal import validate
from privagrad._internal.jit import kernel
from privagrad._internal.validate import Vector
from privagrad.geometry.ellipsoid import euclidean_norm
from privagrad.methods import sgd
from privagrad.methods._base import Oracle, Setting, Shape
from privagrad.methods._subspace import PublicSubspace
from privagrad.privacy.sampling import Rows

_SHARE = math.sqrt(0.5)  # of each part in the whole's norm of 1


@dataclass
class _State(sgd.State):
    subspace: PublicSubspace


@dataclass(frozen=True)
class GEP(sgd.SGD):
    """x ← x - α (V ẽ + r̃), with ẽ and r̃ the private means of embeddings and residuals.

    Parameters
    ----------
    rank : int
        The number of columns of V.
    residual_ratio : float
        S₂/S₁, with S₁ the ball's radius.
    """

    rank: int = 20
    residual_ratio: float = 0.2
    name: ClassVar[str] = "gep"
    shape: ClassVar[Shape] = "ball"
    needs_public: ClassVar[bool] = True

    def __post_init__(self) -> None:
        validate.integer("rank", self.rank)
        validate.positive("residual_ratio", self.residual_ratio)

    def start(self, setting: Setting) -> _State:
        return _State(setting, PublicSubspace.of(setting, self.rank))

    def gradient(self, state: _State, oracle: Oracle, x: Vector, batch: Rows) -> Vector:
        if state.setting.noise_multiplier == 0:
            return oracle.bounded(x, batch, None)
        basis, radius = state.subspace.at(x), state.setting.radius
        radii = (radius, self.residual_ratio * radius)
        dim = basis.shape[1] + x.size
        released = oracle.private_mean_of(x, batch, lambda rows: split(rows, basis, radii), dim)
        return join(released, basis, radii)


def split(gradients: Vector, basis: Vector, radii: tuple[float, float]) -> Vector:
    """Rows [bound(Vᵀg)/(√2 S₁), bound(g - VVᵀg)/(√2 S₂)] with `radii` (S₁, S₂).

    Guarantees
    ----------
    Each part has norm ≤ 1/√2 and a row norm ≤ 1, up to a few ulps that the oracle takes away.
    """
    rank = basis.shape[1]
    parts = np.empty((len(gradients), rank + len(basis)))
    _split_rows(gradients, basis, *radii, parts)
    return parts


@kernel()
def _split_rows(
    gradients: Any, basis: Any, first_radius: float, second_radius: float, parts: Any
) -> None:
    """Row by row in one fixed order: products of matrices round by a row's place among others."""
    dim, rank = basis.shape
    for i in range(gradients.shape[0]):
        embedding, residual = parts[i, :rank], parts[i, rank:]
        # At size 1 no product overflows; the parts get their sizes back when they are bounded.
        size = np.abs(gradients[i]).max()
        for j in range(dim):
            residual[j] = gradients[i, j] / size if size > 0.0 else 0.0
        embedding[:] = 0.0
        for j in range(dim):
            for k in range(rank):
                embedding[k] += residual[j] * basis[j, k]
        for j in range(dim):
            inside = 0.0
            for k in range(rank):
                inside += embedding[k] * basis[j, k]
            residual[j] -= inside
        _bound(embedding, size, first_radius)
        _bound(residual, size, second_radius)


@kernel()
def _bound(unit: Any, size: float, radius: float) -> None:
    """unit ← size · unit, bounded to norm `radius`, over √2 `radius`."""
    norm = euclidean_norm(unit)
    if norm == 0.0:
        return
    if size <= radius / norm:
        for k in range(unit.size):
            unit[k] *= size
            unit[k] *= _SHARE / radius
        return
    largest = np.abs(unit).max()
    for k in range(unit.size):
        unit[k] /= largest
    norm = euclidean_norm(unit)
    for k in range(unit.size):
        unit[k] *= _SHARE / norm


def join(released: Vector, basis: Vector, radii: tuple[float, float]) -> Vector:
    """The gradient of which `released` is the split: V e + r."""
    rank = basis.shape[1]
    embedding, residual = (
        released[:rank] * (radii[0] / _SHARE),
        released[rank:] * (radii[1] / _SHARE),
    )
    gradient: Vector = basis @ embedding + residual
    return gradient
