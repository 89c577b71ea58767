"""Adam (Kingma, Ba 2015), plain, with isotropic noise, and without the noise's bias.

`DPAdam` is Adam on DP-SGD's gradients: plain post-processing. `DPAdamBC` is DP-AdamBC (Tang,
Shpilevskiy, Lécuyer 2024): the second moment of a private gradient is that of the gradient plus the
noise's variance, which is public and mostly much larger, so that plain Adam divides all coordinates
by about the same number. It takes this variance away first.

What we chose where the originals are silent: the domain's projection is taken in the metric of the
step, as AMSGrad does (Reddi, Kale, Kumar 2018). Tang et al. tune an absolute floor γ' of the
corrected moment; ours is a part of the noise's variance, so that it fits any noise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from privagrad._internal import validate
from privagrad._internal.validate import Vector
from privagrad.geometry.domains import Domain
from privagrad.geometry.ellipsoid import Ellipsoid
from privagrad.methods._base import Method, Setting, Shape


@dataclass
class State:
    setting: Setting
    mean: Vector = field(init=False)  # m, not corrected for its start at 0
    squares: Vector = field(init=False)  # v, likewise
    steps: int = 0

    def __post_init__(self) -> None:
        self.mean = np.zeros(self.setting.dim)
        self.squares = np.zeros(self.setting.dim)


@dataclass(frozen=True)
class Adam(Method):
    """x ← x - α m̂ / (√v̂ + ε), with m and v the running means of ĝ and ĝ².

    m ← β₁ m + (1-β₁) ĝ and v ← β₂ v + (1-β₂) ĝ²; m̂ = m/(1-β₁ᵏ) and v̂ = v/(1-β₂ᵏ) correct their
    start at 0.

    Parameters
    ----------
    mean_memory : float
        β₁, the part of m that a step keeps.
    square_memory : float
        β₂, the part of v that a step keeps.
    eps : float
        ε.
    """

    mean_memory: float = 0.9
    square_memory: float = 0.999
    eps: float = 1e-8
    name: ClassVar[str] = "adam"
    shape: ClassVar[Shape] = "none"

    def __post_init__(self) -> None:
        validate.positive("eps", self.eps)
        for name in ("mean_memory", "square_memory"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"Expected {name} in [0, 1), found {getattr(self, name)!r}.")

    def default_step_size(self, domain: Domain, dim: int) -> float:
        # No theorem gives a constant step.
        return math.inf

    def start(self, setting: Setting) -> State:
        return State(setting)

    def second_moment(self, state: State) -> Vector:
        """The second moment of each coordinate, whose root divides the step: v̂."""
        corrected: Vector = state.squares / (1 - self.square_memory**state.steps)
        return corrected

    def step(self, state: State, x: Vector, gradient: Vector, step_size: float) -> Vector:
        state.steps += 1
        state.mean += (1 - self.mean_memory) * (gradient - state.mean)
        state.squares += (1 - self.square_memory) * (gradient**2 - state.squares)
        size = np.sqrt(self.second_moment(state)) + self.eps
        x -= (step_size / (1 - self.mean_memory**state.steps)) * (state.mean / size)
        return np.maximum(size / step_size, 1e-100)


@dataclass(frozen=True)
class DPAdam(Adam):
    """Adam on gradients bounded to a ball, with isotropic noise."""

    name: ClassVar[str] = "dp-adam"
    shape: ClassVar[Shape] = "ball"


@dataclass(frozen=True)
class DPAdamBC(DPAdam):
    """`DPAdam` with max(v̂ - Φ, floor · Φ) in place of v̂, Φ the variance of the noise.

    Parameters
    ----------
    mean_memory, square_memory, eps : float
        As of `Adam`.
    floor : float
        The least second moment, as a part of the noise's variance.
    """

    floor: float = 0.1
    name: ClassVar[str] = "dp-adambc"

    def __post_init__(self) -> None:
        super().__post_init__()
        validate.positive("floor", self.floor)

    def start(self, setting: Setting) -> State:
        if setting.noise_multiplier > 0 and not isinstance(setting.ellipsoid, Ellipsoid):
            raise ValueError(
                f"Expected one Ellipsoid for {self.name!r}, which must know the variance of the "
                "noise; found a function: use 'dp-adam'."
            )
        return super().start(setting)

    def second_moment(self, state: State) -> Vector:
        noise = np.square(state.setting.noise_std)
        return np.maximum(super().second_moment(state) - noise, self.floor * noise)
