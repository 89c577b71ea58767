"""AdaDPS: scale by public second moments before bounding (Li, Zaheer, Reddi, Smith 2022).

Private adaptive optimization with side information. A gradient is divided by A, the root of the
second moment of public gradients, then bounded and made noisy with isotropic noise, and the step is
taken with that: x ← x - α (g/A)~. In the gradients' own coordinates the bound and the noise have
the shape of an ellipsoid that public rows determine.

What we chose: the original estimates A² by a running mean over the gradients of public minibatches
(RMSProp); we take the mean of the squares of all public rows' gradients at the current point, once
an epoch, and no memory. Bounding g/A by an absolute constant would give radii another meaning than
DP-SGD's: we scale the ellipsoid so that its noise has the variance of a ball of the given radius,
summed over coordinates. The step does divide by A itself. Coordinates in which public gradients are
0 get a floor, a part of A's root mean square, and that is at least a hundredth of what it was at
first: where few public rows are fitted, steps would be as long as their gradients are short. The
domain's projection is in the metric A.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from privagrad._internal.validate import Vector
from privagrad.geometry.domains import Domain
from privagrad.methods._base import Method, Oracle, Setting, Shape
from privagrad.methods._widths import FLOOR, checked_floor, ellipsoid_of, widths_of
from privagrad.privacy.sampling import Rows

_LEAST = 0.01


@dataclass
class _State:
    setting: Setting
    widths: Vector = field(init=False)  # A over `size`
    size: float = 1.0  # the root mean square of A
    first: float = 0.0  # the same at first
    steps: int = 0

    def __post_init__(self) -> None:
        self.widths = np.ones(self.setting.dim)


@dataclass(frozen=True)
class AdaDPS(Method):
    """x ← x - α ĝ/A, with A_j² the mean of the squares of public gradients at coordinate j.

    Parameters
    ----------
    floor : float
        Added to A, as a part of its root mean square.
    """

    floor: float = FLOOR
    name: ClassVar[str] = "adadps"
    shape: ClassVar[Shape] = "ball"
    needs_public: ClassVar[bool] = True

    def __post_init__(self) -> None:
        checked_floor(self.floor)

    def default_step_size(self, domain: Domain, dim: int) -> float:
        # No theorem gives a constant step without knowing the gradients' size.
        return math.inf

    def start(self, setting: Setting) -> _State:
        if setting.public is None:
            raise ValueError("Expected public rows in the setting, found None.")
        return _State(setting)

    def gradient(self, state: _State, oracle: Oracle, x: Vector, batch: Rows) -> Vector:
        setting = state.setting
        if state.steps % setting.batches.epoch == 0:
            self._look(state, x)
        state.steps += 1
        if setting.noise_multiplier == 0:
            return oracle.bounded(x, batch, None)
        return oracle.bounded(x, batch, ellipsoid_of(state.widths, setting.radius))

    def _look(self, state: _State, x: Vector) -> None:
        public = state.setting.public
        if public is None:
            return
        gradients = public.per_example(x, np.arange(public.n_examples))
        moments = np.mean(gradients**2, axis=0) if len(gradients) else np.zeros(x.size)
        size = math.sqrt(float(np.mean(moments)))
        if not 0 < size < math.inf:
            return  # the public rows tell nothing at this point
        state.first = state.first or size
        state.widths, state.size = widths_of(moments, self.floor), max(size, _LEAST * state.first)

    def step(self, state: _State, x: Vector, gradient: Vector, step_size: float) -> Vector:
        x -= (step_size / state.size) * (gradient / state.widths)
        return state.widths
