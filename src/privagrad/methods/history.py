"""PAGAN whose ellipsoid follows the gradients: A_k from the private gradients seen so far."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from privagrad._internal.validate import Vector
from privagrad.geometry.ellipsoid import Ellipsoid
from privagrad.methods import adagrad
from privagrad.methods._base import Oracle, Setting
from privagrad.methods.pagan import PAGAN
from privagrad.privacy.sampling import Rows

_FIRST = 16


@dataclass
class _State(adagrad.State):
    differences: Vector
    noise: Vector
    fourths: Vector
    ellipsoid: Ellipsoid | None
    before: Vector | None = None
    count: int = 0


class HistoryPAGAN(PAGAN):
    """PAGAN that starts from the given ellipsoid and learns a new one at steps 16, 32, 64, ...

    Half the squared difference of consecutive gradients has the mean Var(g_j)/b + s_j², s_j the
    noise's own deviation: b times what exceeds s_j² estimates the moment of one example's gradient.
    What noise hides is a floor. Only private gradients are used, so that it costs nothing; and
    A_k depends on earlier releases alone, as the mechanism needs.
    """

    name: ClassVar[str] = "pagan-history"

    def start(self, setting: Setting) -> _State:
        dim = setting.dim
        return _State(
            setting,
            squares=np.zeros(dim),
            metric=np.empty(dim),
            differences=np.zeros(dim),
            noise=np.zeros(dim),
            fourths=np.zeros(dim),
            ellipsoid=setting.ellipsoid if isinstance(setting.ellipsoid, Ellipsoid) else None,
        )

    def gradient(self, state: _State, oracle: Oracle, x: Vector, batch: Rows) -> Vector:
        gradient = oracle.bounded(x, batch, state.ellipsoid)
        if state.ellipsoid is not None and state.setting.noise_multiplier > 0:
            self._learn(state, state.ellipsoid, gradient)
        return gradient

    def _learn(self, state: _State, ellipsoid: Ellipsoid, gradient: Vector) -> None:
        setting = state.setting
        noise = np.square(
            setting.noise_multiplier / setting.batches.batch_size * ellipsoid.noise_std
        )
        if state.before is not None:
            state.differences += np.square(gradient - state.before) / 2
            state.noise += noise
            state.fourths += np.square(noise)
            state.count += 1
        state.before = gradient.copy()
        count = state.count
        if count < _FIRST or count & (count - 1):
            return
        variance = (state.differences - state.noise) / count
        hidden = np.sqrt(2 * state.fourths) / count
        moments = setting.batches.batch_size * np.maximum(variance, hidden)
        scale: Vector = moments ** (self.scale_power / 2)
        # Of the sum over coordinates noise hides less than of each.
        size = max(float(scale @ variance), float(np.linalg.norm(scale * hidden)))
        state.ellipsoid = Ellipsoid(scale, 0.5 * math.sqrt(setting.batches.batch_size * size))
        state.before = None
