"""DiSK: a simplified Kalman filter on private gradients (Zhang, Bu, Balle, Hong et al. 2024).

DiSK: differentially private optimizer with simplified Kalman filter for noise reduction. The filter
predicts the gradient at the new point from the last estimate and corrects it by what is released:
the estimate is a running mean whose gradients are taken at points ahead, so that it lags less than
momentum while the noise averages out.

The original bounds, for each example, the combination c ∇F(x + γ(x - x⁻)) + (1 - c) ∇F(x) with
c = (1 - κ)/(κγ). We take its own special case γ = (1 - κ)/κ, where c = 1: one gradient at one
point, at DP-SGD's cost, bounded and released as always. Other γ need gradients of every example at
two points, and are left out: the published code bounds their combination to the radius and divides
the noise multiplier by √(c² + (1 - c)²), which for γ < (1 - κ)/κ is too little for that bound.
The point ahead is projected onto the domain, which the original does not have.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from privagrad._internal import validate
from privagrad._internal.validate import Vector
from privagrad.methods import sgd
from privagrad.methods._base import Oracle, Setting, Shape
from privagrad.privacy.sampling import Rows


@dataclass
class _State(sgd.State):
    before: Vector | None = None  # the point of the last step
    estimate: Vector | None = None  # of the gradient


@dataclass(frozen=True)
class DiSK(sgd.SGD):
    """x ← x - α m, m ← (1 - κ) m + κ ĝ, with ĝ taken at x + (1 - κ)/κ (x - x⁻).

    Parameters
    ----------
    gain : float
        κ in (0, 1]; with 1 it is DP-SGD.
    """

    gain: float = 0.7
    name: ClassVar[str] = "disk"
    shape: ClassVar[Shape] = "ball"

    def __post_init__(self) -> None:
        if validate.positive("gain", self.gain) > 1:
            raise ValueError(f"Expected gain in (0, 1], found gain={self.gain!r}.")

    def start(self, setting: Setting) -> _State:
        return _State(setting)

    def gradient(self, state: _State, oracle: Oracle, x: Vector, batch: Rows) -> Vector:
        setting, point = state.setting, x
        if state.before is not None and self.gain < 1:
            ahead = (1 - self.gain) / self.gain * (x - state.before)
            point = setting.domain.project(x + ahead)
        state.before = x.copy()
        gradient = oracle.bounded(point, batch, setting.ellipsoid)
        before = gradient if state.estimate is None else state.estimate
        state.estimate = (1 - self.gain) * before + self.gain * gradient
        return state.estimate
