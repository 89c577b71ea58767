"""PAGAN whose ellipsoid is learned from the private gradients seen so far."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from privagrad._internal.validate import Vector
from privagrad.geometry.ellipsoid import Ellipsoid
from privagrad.geometry.scales import GradientHistory, visible_size
from privagrad.methods import adagrad
from privagrad.methods._base import Oracle, Setting
from privagrad.methods.pagan import PAGAN
from privagrad.privacy.sampling import Rows


@dataclass
class _State(adagrad.State):
    ellipsoid: Ellipsoid | None
    history: GradientHistory[Vector] | None = field(default_factory=GradientHistory)


class HistoryPAGAN(PAGAN):
    """PAGAN that starts from the given ellipsoid and learns another from its first gradients.

    `GradientHistory` estimates the gradients' variance at each coordinate; batch_size times it
    estimates the moment of one example's gradient, at least what noise hides. Only private
    gradients are used, so it costs no privacy, and A_k depends on earlier releases alone, as the
    mechanism requires. The ellipsoid is learned once, at the first estimate.
    """

    name: ClassVar[str] = "pagan-history"

    def start(self, setting: Setting) -> _State:
        dim = setting.dim
        return _State(
            setting,
            squares=np.zeros(dim),
            metric=np.empty(dim),
            ellipsoid=setting.ellipsoid if isinstance(setting.ellipsoid, Ellipsoid) else None,
        )

    def gradient(self, state: _State, oracle: Oracle, x: Vector, batch: Rows) -> Vector:
        gradient = oracle.bounded(x, batch, state.ellipsoid)
        if state.ellipsoid is not None and state.setting.noise_multiplier > 0:
            self._learn(state, state.ellipsoid, gradient)
        return gradient

    def _learn(self, state: _State, ellipsoid: Ellipsoid, gradient: Vector) -> None:
        setting, history = state.setting, state.history
        batch_size = setting.batches.expected_size
        noise = np.square(setting.noise_multiplier / batch_size * ellipsoid.noise_std)
        if history is None or not history.add(gradient.copy(), noise):
            return
        variance, hidden = history.variance(), history.hidden()
        scale: Vector = (batch_size * np.maximum(variance, hidden)) ** (self.scale_power / 2)
        weighted = scale * hidden
        size = visible_size(float(scale @ variance), float(weighted @ weighted))
        state.ellipsoid = Ellipsoid(scale, 0.5 * math.sqrt(batch_size * size))
        state.history = None
