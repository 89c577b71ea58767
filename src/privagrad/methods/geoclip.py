"""GeoClip: bound gradients in the directions of their covariance (Gilani et al. 2025).

Gilani, Tasnim, Sankar, Kosut: GeoClip, geometry-aware clipping for differentially private SGD
(arXiv 2506.06549). A gradient g becomes w = M (g - m), w is bounded to norm 1 and released with
isotropic noise, and the gradient is g̃ = M⁻¹ w̃ + m. The running mean m and covariance Σ of the
gradients are learned from the g̃ alone, at no privacy cost. Among all M with E‖w‖² ≤ γ the noise
Tr (MᵀM)⁻¹ is least for M = sqrt(γ/Σ_i √λ_i) U Λ^{-1/4} Uᵀ, where Σ = U Λ Uᵀ: an ellipsoid with axes
of any direction. `adaclip` is the same with the coordinates as axes.

What we chose where the original is silent or needs tuning by hand:

- Only the g̃ of whole batches are seen: their covariance is Σ/batch_size plus the noise's, which we
  take away, and a batch's worth of what remains estimates Σ.
- The original clamps eigenvalues between two numbers that the user sets. We start where g is
  bounded to the ball of `radius`, so that the first step is DP-SGD's, and clamp √λ to a factor
  `spread` around that start.
- With γ = 1 some two in five normal gradients are clipped, look smaller for it, and make Σ smaller
  again. We take γ = 1/multiple² = 1/4.
- M may be multiplied by any rotation from the left. We take the symmetric one.
- There is a low-rank version for models of many parameters, which is not here: we refuse them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from privagrad._internal import validate
from privagrad._internal.jit import kernel
from privagrad._internal.validate import Vector
from privagrad.methods import sgd
from privagrad.methods._base import Oracle, Setting, Shape
from privagrad.privacy.sampling import Rows

_MOST = 1000


@dataclass
class _State(sgd.State):
    first: float  # √λ at the start, the same in every direction
    mean: Vector = field(init=False)  # m
    covariance: Vector = field(init=False)  # the running estimate of Σ, not clamped
    forward: Vector = field(init=False)  # M
    back: Vector = field(init=False)  # M⁻¹

    def __post_init__(self) -> None:
        super().__post_init__()
        dim, radius = self.setting.dim, self.setting.radius
        self.mean = np.zeros(dim)
        self.covariance = self.first**2 * np.eye(dim)
        self.forward, self.back = np.eye(dim) / radius, radius * np.eye(dim)


@dataclass(frozen=True)
class GeoClip(sgd.SGD):
    """x ← x - α (M⁻¹ w̃ + m), with w̃ the private mean of M (g - m) bounded to norm 1.

    Parameters
    ----------
    mean_memory : float
        The part of m that a step keeps; 1 leaves m at 0.
    covariance_memory : float
        The part of Σ that a step keeps.
    multiple : float
        1/√γ: a larger one clips less and adds more noise.
    spread : float
        How many times larger or smaller than at the start √λ may be; 1 leaves a ball of `radius`.
    """

    mean_memory: float = 0.99
    covariance_memory: float = 0.99
    multiple: float = 2.0
    spread: float = 10.0
    name: ClassVar[str] = "geoclip"
    shape: ClassVar[Shape] = "ball"

    def __post_init__(self) -> None:
        validate.positive("multiple", self.multiple)
        if validate.positive("spread", self.spread) < 1:
            raise ValueError(f"Expected spread >= 1, found spread={self.spread!r}.")
        for name in ("mean_memory", "covariance_memory"):
            if validate.positive(name, getattr(self, name)) > 1:
                raise ValueError(f"Expected {name} in (0, 1], found {getattr(self, name)!r}.")

    def start(self, setting: Setting) -> _State:
        if setting.dim > _MOST:
            raise ValueError(
                f"Expected at most {_MOST} parameters for 'geoclip', found {setting.dim}: it keeps "
                "their covariance. Use 'adaclip', which keeps their variances."
            )
        return _State(setting, setting.radius / (self.multiple * math.sqrt(setting.dim)))

    def gradient(self, state: _State, oracle: Oracle, x: Vector, batch: Rows) -> Vector:
        if state.setting.noise_multiplier == 0:
            return oracle.bounded(x, batch, None)
        mean, forward = state.mean, state.forward
        released = oracle.private_mean_of(
            x, batch, lambda rows: turned(rows, mean, forward), x.size
        )
        gradient: Vector = state.back @ released + mean
        self._learn(state, gradient)
        return gradient

    def _learn(self, state: _State, gradient: Vector) -> None:
        setting, kept = state.setting, self.covariance_memory
        off = gradient - state.mean
        batch_size = setting.batches.expected_size
        noise = (setting.noise_multiplier / batch_size) ** 2 * state.back @ state.back.T
        seen = batch_size * (np.outer(off, off) - noise)
        state.covariance = kept * state.covariance + (1 - kept) * seen
        state.mean = state.mean + (1 - self.mean_memory) * off
        values, vectors = np.linalg.eigh(state.covariance)
        least, most = state.first / self.spread, state.first * self.spread
        deviations = np.sqrt(np.clip(values, least**2, most**2))
        widths = self.multiple * np.sqrt(deviations * deviations.sum())
        state.forward = (vectors / widths) @ vectors.T
        state.back = (vectors * widths) @ vectors.T


def turned(gradients: Vector, mean: Vector, matrix: Vector) -> Vector:
    """The rows M (g - m).

    Guarantees
    ----------
    A row depends on its gradient alone, to the last bit.
    """
    vectors = np.empty_like(gradients)
    _turn(gradients, mean, np.ascontiguousarray(matrix.T), vectors)
    return vectors


@kernel()
def _turn(gradients: Any, mean: Any, columns: Any, vectors: Any) -> None:
    """Row by row in one fixed order: products of matrices round by a row's place among others."""
    dim = mean.size
    for i in range(gradients.shape[0]):
        vectors[i, :] = 0.0
        for j in range(dim):
            off = gradients[i, j] - mean[j]
            for k in range(dim):
                vectors[i, k] += off * columns[j, k]
