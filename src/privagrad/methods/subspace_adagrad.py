"""AdaGrad with a full matrix inside a public subspace (Kairouz, Ribero, Rush, Thakurta 2021).

(Nearly) dimension independent private ERM with AdaGrad rates via publicly estimated subspaces. The
noisy gradient, DP-SGD's own, is projected onto the subspace that public gradients fill, where
AdaGrad can afford a full matrix: its noise and its matrix are of the subspace's dimension.

What we chose: the subspace is taken once, at the starting point, so that the matrix keeps one
system of coordinates. The bound of the gradients is constant, where the theory wants an envelope
that falls with them. The domain's projection is Euclidean, not in the matrix's metric. Directions
in which no gradient was ever seen stay still (0/0 is 0) unless there is a ridge.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from privagrad._internal import validate
from privagrad._internal.validate import Vector
from privagrad.geometry.domains import Domain
from privagrad.methods._base import Method, Oracle, Setting, Shape
from privagrad.methods._subspace import PublicSubspace
from privagrad.privacy.sampling import Rows


@dataclass
class _State:
    setting: Setting
    moments: Vector  # M = Σ u uᵀ, rank × rank
    basis: Vector  # d × rank, empty before the first step


@dataclass(frozen=True)
class SubspaceAdaGrad(Method):
    """x ← x - α V (ridge I + Σ_{i ≤ k} u_i u_iᵀ)^{-1/2} u_k with u = Vᵀĝ.

    Parameters
    ----------
    rank : int
        The number of columns of V.
    ridge : float
        Added to the eigenvalues, for shorter first steps.
    """

    rank: int = 20
    ridge: float = 0.0
    name: ClassVar[str] = "subspace-adagrad"
    shape: ClassVar[Shape] = "ball"
    needs_public: ClassVar[bool] = True

    def __post_init__(self) -> None:
        validate.integer("rank", self.rank)
        if self.ridge != 0:
            validate.positive("ridge", self.ridge)

    def default_step_size(self, domain: Domain, dim: int) -> float:
        return domain.euclidean_diameter(dim)  # full-matrix AdaGrad's (Duchi, Hazan, Singer 2011)

    def start(self, setting: Setting) -> _State:
        rank = min(self.rank, setting.dim)
        return _State(setting, np.zeros((rank, rank)), np.empty((setting.dim, 0)))

    def gradient(self, state: _State, oracle: Oracle, x: Vector, batch: Rows) -> Vector:
        if not state.basis.size:
            state.basis = PublicSubspace.of(state.setting, self.rank).at(x)
        return super().gradient(state, oracle, x, batch)

    def step(self, state: _State, x: Vector, gradient: Vector, step_size: float) -> None:
        inside = gradient @ state.basis
        state.moments += np.outer(inside, inside)
        x -= step_size * (state.basis @ _root_solve(state.moments, inside, self.ridge))


def _root_solve(moments: Vector, vector: Vector, ridge: float) -> Vector:
    """(M + ridge I)^{-1/2} v; eigenvalues that are 0 up to rounding count as 0, and 1/0 as 0."""
    values, vectors = np.linalg.eigh(moments)
    values += ridge
    seen = values > values[-1] * values.size * np.finfo(float).eps
    parts = np.where(seen, vector @ vectors, 0.0) / np.sqrt(np.where(seen, values, 1.0))
    return np.asarray(vectors @ parts)
