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

from privagrad import _validate
from privagrad._validate import Vector
from privagrad.methods import sgd
from privagrad.methods._base import Oracle, Setting, Shape
from privagrad.methods._subspace import PublicSubspace
from privagrad.sampling import Rows

_SHARE = math.sqrt(0.5)  # of each part in the whole's norm of 1


@dataclass
class _State(sgd.State):
    subspace: PublicSubspace


@dataclass(frozen=True)
class GEP(sgd.SGD):
    """x ← x - α (V ẽ + r̃), with ẽ and r̃ the private means of embeddings and residuals.

    Parameters
    ----------
    rank : columns of V
    residual_ratio : S₂/S₁, with S₁ the ball's radius
    """

    rank: int = 20
    residual_ratio: float = 0.2
    name: ClassVar[str] = "gep"
    shape: ClassVar[Shape] = "ball"
    needs_public: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _validate.whole("rank", self.rank)
        _validate.positive("residual_ratio", self.residual_ratio)

    def start(self, setting: Setting) -> _State:
        return _State(setting, PublicSubspace.of(setting, self.rank))

    def gradient(self, state: Any, oracle: Oracle, x: Vector, batch: Rows) -> Vector:
        if state.setting.noise_multiplier == 0:
            return oracle.bounded(x, batch, None)
        basis, radius = state.subspace.at(x), state.setting.radius
        radii = (radius, self.residual_ratio * radius)
        dim = basis.shape[1] + x.size
        released = oracle.mapped(x, batch, lambda rows: split(rows, basis, radii), dim)
        return join(released, basis, radii)


def split(gradients: Vector, basis: Vector, radii: tuple[float, float]) -> Vector:
    """Rows [bound(Vᵀg)/(√2 S₁), bound(g - VVᵀg)/(√2 S₂)] with `radii` (S₁, S₂).

    Guarantees
    ----------
    Each part has norm ≤ 1/√2 and a row norm ≤ 1, up to a few ulps that the oracle takes away.
    """
    # At size 1 no product overflows; the parts get their sizes back when they are bounded.
    sizes = np.abs(gradients).max(axis=1, initial=0.0)
    units = gradients / np.where(sizes > 0, sizes, 1.0)[:, None]
    embeddings = units @ basis
    residuals = units - embeddings @ basis.T
    return np.hstack([_bounded(embeddings, sizes, radii[0]), _bounded(residuals, sizes, radii[1])])


def join(released: Vector, basis: Vector, radii: tuple[float, float]) -> Vector:
    """The gradient of which `released` is the split: V e + r."""
    rank = basis.shape[1]
    embedding, residual = (
        released[:rank] * (radii[0] / _SHARE),
        released[rank:] * (radii[1] / _SHARE),
    )
    gradient: Vector = basis @ embedding + residual
    return gradient


def _bounded(units: Vector, sizes: Vector, radius: float) -> Vector:
    """The rows sizes_i · units_i, bounded to norm `radius`, over √2 `radius`."""
    # Squares below the floor's underflow; flooring can only shrink such rows more.
    norms = np.maximum(np.linalg.norm(units, axis=1), 1e-150)
    kept = np.minimum(sizes, radius / norms) * (_SHARE / radius)
    return np.asarray(units * kept[:, None])
