"""Scale-then-privatize: bound and add noise in Adam's own scaling (Ganesh, McMahan, Thakurta 2025).

On design principles for private adaptive optimizers, Algorithm 8; JAX-Privacy has it under this
name. Adam divides by √v. Here every gradient is divided by it before it is bounded, and the noisy
mean is multiplied by it again: the gradients are bounded to an ellipsoid with noise of its shape,
which follows from the earlier private gradients alone. v is not corrected for the noise: as the
noise is proportional to √v, it adds the same part to every coordinate, and what remains in the long
run is proportional to the squares of the gradients.

What we chose: the original bounds g/(√v + ε) by an absolute constant. We scale the ellipsoid so
that its noise has the variance of a ball of the given radius, summed over coordinates; so the
radius means what it means in DP-SGD. The original starts at v = 0, so that the second ellipsoid
follows from a single noisy gradient; we start at the variance of the ball's noise, the first
ellipsoid is the ball, and the first steps change it little. Adam's own v starts at 0. The floor of
the widths (the original's ε of the scaling, to be tuned) is a part of their mean. β₂ is 0.99: over
1000 steps Adam's 0.999 never forgets the first ellipsoid, and was worse in trials.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from privagrad._internal.validate import Vector
from privagrad.geometry.ellipsoid import Ellipsoid
from privagrad.geometry.scales import SQUARE_MEMORY
from privagrad.methods import adam
from privagrad.methods._base import Oracle, Setting
from privagrad.methods._widths import FLOOR, checked_floor, ellipsoid_of, widths_of
from privagrad.privacy.sampling import Rows


@dataclass(frozen=True)
class ScaleThenPrivatize(adam.DPAdam):
    """Adam on gradients that are bounded, and made noisy, divided by the √v of earlier steps.

    Parameters
    ----------
    mean_memory, square_memory, eps : float
        As of `Adam`.
    floor : float
        Added to √v, as a part of its root mean square, for the ellipsoid alone.
    """

    square_memory: float = SQUARE_MEMORY
    floor: float = FLOOR
    name: ClassVar[str] = "scale-then-privatize"

    def __post_init__(self) -> None:
        super().__post_init__()
        checked_floor(self.floor)

    def gradient(self, state: adam.State, oracle: Oracle, x: Vector, batch: Rows) -> Vector:
        if state.setting.noise_multiplier == 0:
            return oracle.bounded(x, batch, None)
        return oracle.bounded(x, batch, self.ellipsoid_at(state))

    def ellipsoid_at(self, state: adam.State) -> Ellipsoid:
        """The ellipsoid of the next step, from the private gradients of the steps before."""
        setting: Setting = state.setting
        start = self.square_memory**state.steps * np.square(setting.noise_std)
        return ellipsoid_of(widths_of(state.squares + start, self.floor), setting.radius)
