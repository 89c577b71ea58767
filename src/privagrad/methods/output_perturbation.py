"""Output perturbation (Chaudhuri, Monteleoni, Sarwate 2011): noise on the regularised minimiser.

The minimiser of (1/n) Σ ℓ + ridge/2 ‖x‖² moves by at most bound/(n ridge) when an example comes or
goes (n public); a solver's answer with ‖∇J‖ ≤ τ lies within τ/ridge of it, which is counted in the
sensitivity, so that the tolerance breaks nothing. Ours: Gaussian noise; losses that bend are
averaged over ±smoothing; ridge by the rule that balances its bias against the noise for a solution
whose coordinates are of the size `step_size`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from privagrad._internal import validate
from privagrad._internal.validate import Vector
from privagrad.geometry.domains import Domain
from privagrad.methods import sgd
from privagrad.methods._base import Method, Oracle, Setting, Shape
from privagrad.privacy.events import GaussianEvent, Release
from privagrad.privacy.sampling import Batches, Rows

_PLAIN_RIDGE = 1e-4


@dataclass(frozen=True)
class OutputPerturbation(Method):
    """x ← argmin J + N(0, (z Δ)² I), Δ = (bound/n + 2 τ)/ridge, projected onto the domain."""

    smoothing: float = 0.1
    name: ClassVar[str] = "output-perturbation"
    shape: ClassVar[Shape] = "ball"
    one_shot: ClassVar[bool] = True

    def __post_init__(self) -> None:
        validate.positive("smoothing", self.smoothing)

    def training(self, batches: Batches, epsilon: float) -> Release:
        return GaussianEvent(1.0, purpose="minimiser")

    def default_step_size(self, domain: Domain, dim: int) -> float:
        return domain.max_diameter(dim) / 2

    def start(self, setting: Setting) -> sgd.State:
        return sgd.State(setting)

    def gradient(self, state: sgd.State, oracle: Oracle, x: Vector, batch: Rows) -> Vector:
        # The release is the point itself; `step` moves there.
        return oracle.minimum(self.ridge(state.setting), self.smoothing)

    def ridge(self, setting: Setting) -> float:
        """Balances ridge D²/2 against bound · sqrt(d) z bound/(n ridge), D = size · sqrt(d)."""
        if setting.noise_multiplier == 0:
            return _PLAIN_RIDGE
        n = setting.batches.n_examples
        noise = math.sqrt(2 * math.sqrt(setting.dim) * setting.noise_multiplier / n)
        return setting.radius * noise / (setting.step_size * math.sqrt(setting.dim))

    def step(self, state: sgd.State, x: Vector, gradient: Vector, step_size: float) -> None:
        np.copyto(x, gradient)
