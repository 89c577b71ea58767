"""DP²: preconditioners that are delayed so that noise averages out (Li, Zaheer, Liu et al. 2023).

Differentially private adaptive optimization with delayed preconditioners, as DP²-RMSProp. Steps
alternate: s of DP-SGD, whose private gradients are averaged, and s that divide gradients by √v
before they are bounded, where v is a running mean of the squares of those averages. An average of s
gradients has a noise of 1/s of their variance, and v is of earlier steps, so that the ellipsoid
depends on private gradients alone.

What we chose: s is half an epoch, as in the authors' runs on IMDB. They tune two step sizes and two
bounds. Ours are one of each: the widths √v are scaled to a mean square of 1, so that both kinds of
steps have the same total noise, and where all coordinates are alike all steps are DP-SGD's;
`step_ratio` makes the scaled steps longer. The domain's projection is in the metric of the step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from privagrad._internal import validate
from privagrad._internal.validate import Vector
from privagrad.geometry.domains import Domain
from privagrad.methods._base import Method, Oracle, Setting, Shape
from privagrad.methods._widths import FLOOR, checked_floor, ellipsoid_of, widths_of
from privagrad.privacy.sampling import Rows


@dataclass
class _State:
    setting: Setting
    delay: int
    total: Vector = field(init=False)  # the sum of the gradients of this phase
    squares: Vector = field(init=False)  # v
    widths: Vector = field(init=False)
    steps: int = 0

    def __post_init__(self) -> None:
        dim = self.setting.dim
        self.total, self.squares, self.widths = np.zeros(dim), np.zeros(dim), np.ones(dim)

    @property
    def scaled(self) -> bool:
        """Whether the next step is of the kind that divides by √v."""
        return self.steps // self.delay % 2 == 1


@dataclass(frozen=True)
class DP2(Method):
    """Alternately x ← x - α ĝ and x ← x - α step_ratio ĝ/w, w = √v over its root mean square.

    Parameters
    ----------
    delay : int or None
        s, the steps of a phase; None for half an epoch.
    square_memory : float
        The part of v that a phase keeps.
    step_ratio : float
        How many times longer scaled steps are.
    floor : float
        Added to √v, as a part of its root mean square.
    """

    delay: int | None = None
    square_memory: float = 0.9
    step_ratio: float = 1.0
    floor: float = FLOOR
    name: ClassVar[str] = "dp2"
    shape: ClassVar[Shape] = "ball"

    def __post_init__(self) -> None:
        if self.delay is not None:
            validate.integer("delay", self.delay)
        if not 0 <= self.square_memory < 1:
            raise ValueError(f"Expected square_memory in [0, 1), found {self.square_memory!r}.")
        validate.positive("step_ratio", self.step_ratio)
        checked_floor(self.floor)

    def default_step_size(self, domain: Domain, dim: int) -> float:
        # No theorem gives a constant step without knowing the gradients' size.
        return math.inf

    def start(self, setting: Setting) -> _State:
        half = max(1, setting.batches.epoch // 2)
        return _State(setting, half if self.delay is None else self.delay)

    def gradient(self, state: _State, oracle: Oracle, x: Vector, batch: Rows) -> Vector:
        setting = state.setting
        if setting.noise_multiplier == 0:
            return oracle.bounded(x, batch, None)
        widths = state.widths if state.scaled else np.ones(setting.dim)
        return oracle.bounded(x, batch, ellipsoid_of(widths, setting.radius))

    def step(self, state: _State, x: Vector, gradient: Vector, step_size: float) -> Vector | None:
        scaled = state.scaled
        state.steps += 1
        if scaled:
            x -= step_size * self.step_ratio * (gradient / state.widths)
            return state.widths
        x -= step_size * gradient
        state.total += gradient
        if state.steps % state.delay == 0:
            mean = state.total / state.delay
            state.squares += (1 - self.square_memory) * (mean**2 - state.squares)
            state.widths = widths_of(state.squares, self.floor)
            state.total[:] = 0.0
        return None
