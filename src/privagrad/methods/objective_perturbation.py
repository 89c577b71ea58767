"""Objective perturbation (Chaudhuri, Monteleoni, Sarwate 2011): noise inside the objective.

The minimiser of Σ ℓ + Λ/2 ‖x‖² + ⟨b, x⟩ is private by itself (`ObjectiveEvent`). Of its later forms
this one has:

- Gaussian b (Kifer, Smith, Thakurta 2012), with a privacy loss that uses that the gradient of a
  linear model has a fixed direction, which is the improvement of Redberg, Koskela, Wang (2023). It
  is composed numerically, where they state a privacy profile. Rows are shrunk so that gradients of
  any loss are bounded, as by their clipping.
- Approximate minima (Iyengar, Near, Song, Thakkar, Thakurta, Wang 2019, "AMP"): a solver only comes
  near the minimiser, so that the answer gets a little noise that covers the certified tolerance, an
  event of its own. They split epsilon by hand; here one accountant composes both.

Ours: a fifth of epsilon may go to the change of volume, which fixes the least Λ; losses that bend
are averaged over ±smoothing. There is no search for Λ on the rows, which would cost epsilon.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from privagrad._internal.validate import Vector
from privagrad.glm.losses import Loss
from privagrad.glm.minimizers import curvature
from privagrad.methods import sgd
from privagrad.methods._base import Oracle, Setting
from privagrad.methods.output_perturbation import _PLAIN_RIDGE, OutputPerturbation
from privagrad.privacy.events import SOLVER_TOLERANCE, GaussianEvent, ObjectiveEvent, Release
from privagrad.privacy.sampling import Batches, Rows

_VOLUME_SHARE = 0.2
_COVER = 200.0


@dataclass(frozen=True)
class ObjectivePerturbation(OutputPerturbation):
    """x ← argmin Σ ℓ + Λ/2 ‖x‖² + ⟨b, x⟩, b ~ N(0, (z bound)² I), projected onto the domain."""

    name: ClassVar[str] = "objective-perturbation"

    def training(self, batches: Batches, epsilon: float) -> Release:
        return ObjectiveEvent(1.0, _VOLUME_SHARE * epsilon)

    def other_events(self) -> tuple[Release, ...]:
        return (GaussianEvent(_COVER, purpose=SOLVER_TOLERANCE),)

    def gradient(self, state: sgd.State, oracle: Oracle, x: Vector, batch: Rows) -> Vector:
        ridge = self.ridge_for(state.setting, oracle.loss)
        return oracle.perturbed_minimum(ridge, self.smoothing)

    def ridge_for(self, setting: Setting, loss: Loss) -> float:
        """Λ/n: enough for the volume, and for noise b a solution of the size `step_size`."""
        if setting.plan.unprotected:
            return _PLAIN_RIDGE
        event = setting.plan[setting.plan.training]
        if not isinstance(event, ObjectiveEvent):
            raise TypeError(f"Expected noise in the objective, found {event}.")
        row = setting.radius / loss.lipschitz
        bend = curvature(loss.smoothness, loss.lipschitz, self.smoothing)
        volume = bend * row**2 / math.expm1(event.log_volume)
        useful = event.noise_multiplier * setting.radius / setting.step_size
        return max(volume, useful) / setting.batches.n_examples
