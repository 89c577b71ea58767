"""Objective perturbation (Chaudhuri, Monteleoni, Sarwate 2011): noise inside the objective.

The minimiser of Σ ℓ + Λ/2 ‖x‖² + ⟨b, x⟩ with Gaussian b is private by itself (`ObjectiveEvent`). A
solver only comes near it, so, after Iyengar et al. (2019), the answer gets a little noise that
covers the certified tolerance: an event of its own. Ours: a fifth of epsilon may go to the change
of volume, which fixes the least Λ; losses that bend are averaged over ±smoothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from privagrad._internal.validate import Vector
from privagrad.glm.losses import Loss
from privagrad.glm.minimizers import curvature
from privagrad.methods._base import Oracle, Setting
from privagrad.methods.output_perturbation import _PLAIN_RIDGE, OutputPerturbation
from privagrad.privacy.events import GaussianEvent, ObjectiveEvent, Release
from privagrad.privacy.sampling import Rows, Sampling

_VOLUME_SHARE = 0.2
_COVER = 200.0


@dataclass(frozen=True)
class ObjectivePerturbation(OutputPerturbation):
    """x ← argmin Σ ℓ + Λ/2 ‖x‖² + ⟨b, x⟩, b ~ N(0, (z bound)² I), projected onto the domain."""

    name: ClassVar[str] = "objective-perturbation"

    def events(
        self, epsilon: float, n: int, batch_size: int, steps: int, sampling: Sampling | None
    ) -> tuple[Release, ...]:
        cover = GaussianEvent(_COVER, purpose="solver tolerance")
        return cover, ObjectiveEvent(1.0, _VOLUME_SHARE * epsilon)

    def gradient(self, state: Any, oracle: Oracle, x: Vector, batch: Rows) -> Vector:
        setting: Setting = state.setting
        return oracle.minimum(self.ridge_for(setting, oracle.loss), self.smoothing, _COVER)

    def ridge_for(self, setting: Setting, loss: Loss) -> float:
        """Λ/n: enough for the volume, and for noise b a solution of the size `step_size`."""
        if setting.noise_multiplier == 0:
            return _PLAIN_RIDGE
        row = setting.radius / loss.lipschitz
        bend = curvature(loss.smoothness, loss.lipschitz, self.smoothing)
        volume = bend * row**2 / math.expm1(_VOLUME_SHARE * setting.epsilon)
        useful = setting.noise_multiplier * setting.radius / setting.step_size
        return max(volume, useful) / setting.n_examples
