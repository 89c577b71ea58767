"""PDP-SGD: the noisy gradient projected onto a public subspace (Zhou, Wu, Banerjee 2020).

Bypassing the ambient dimension: private SGD with gradient subspace identification. The second
moment of public gradients is taken at the current point; where the original does so at every step,
we do so once an epoch, and clip and add noise as DP-SGD does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from privagrad._internal import validate
from privagrad._internal.validate import Vector
from privagrad.methods import sgd
from privagrad.methods._base import Oracle, Setting, Shape
from privagrad.methods._subspace import PublicSubspace
from privagrad.privacy.sampling import Rows


@dataclass
class _State(sgd.State):
    subspace: PublicSubspace


@dataclass(frozen=True)
class PDPSGD(sgd.SGD):
    """x ← x - α V Vᵀ ĝ, with V the top `rank` eigenvectors of the public second moment."""

    rank: int = 20
    name: ClassVar[str] = "pdp-sgd"
    shape: ClassVar[Shape] = "ball"
    needs_public: ClassVar[bool] = True

    def __post_init__(self) -> None:
        validate.integer("rank", self.rank)

    def start(self, setting: Setting) -> _State:
        return _State(setting, PublicSubspace.of(setting, self.rank))

    def gradient(self, state: _State, oracle: Oracle, x: Vector, batch: Rows) -> Vector:
        basis = state.subspace.at(x)
        projected: Vector = basis @ (oracle.bounded(x, batch, state.setting.ellipsoid) @ basis)
        return projected
