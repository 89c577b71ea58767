"""AdaCliP: centre and scale every coordinate before bounding (Pichapati et al. 2019).

Pichapati, Suresh, Yu, Reddi, Kumar: AdaCliP, adaptive clipping for private SGD. A gradient g
becomes w = (g - m)/b coordinate by coordinate, w is bounded to norm 1 and released with
isotropic noise, and the gradient is g̃ = b w̃ + m. The gradients' running mean m and standard
deviation s are learned from the g̃ alone, at no privacy cost. Among all b with E‖w‖² ≤ 1, the noise
is least for b_j = sqrt(s_j Σ_i s_i).

What we chose where the original is silent or needs tuning by hand:

- Only the g̃ of whole batches are seen: their variance is s²/batch_size plus the noise's, which we
  take away, and a batch's worth of what remains estimates s².
- The original clamps every step's estimate of s² to [h1, h2] before averaging. Where noise exceeds
  s² that only adds up the noise's upper half. We average first and clamp the average.
- The original starts at a tiny s = sqrt(h1 h2). We start where b is `radius` in every coordinate,
  so that the first step is DP-SGD's, and clamp s to a factor `spread` around that start.
- With E‖w‖² = 1 some two in five normal gradients are clipped, look smaller for it, and make b
  smaller again. We take `multiple` = 2 times that b, with which s does converge.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from privagrad._internal import validate
from privagrad._internal.validate import Vector
from privagrad.methods import sgd
from privagrad.methods._base import Oracle, Setting, Shape
from privagrad.privacy.sampling import Rows


@dataclass
class _State(sgd.State):
    first: float  # s at the start, the same in every coordinate
    mean: Vector = field(init=False)  # m
    variance: Vector = field(init=False)  # the running estimate of s², not clamped
    width: Vector = field(init=False)  # b

    def __post_init__(self) -> None:
        super().__post_init__()
        dim = self.setting.dim
        self.mean = np.zeros(dim)
        self.variance = np.full(dim, self.first**2)
        self.width = np.full(dim, self.setting.radius)


@dataclass(frozen=True)
class AdaCliP(sgd.SGD):
    """x ← x - α (b w̃ + m), with w̃ the private mean of (g - m)/b bounded to norm 1.

    Parameters
    ----------
    mean_memory : float
        β₁, the part of m that a step keeps; 1 leaves m at 0.
    scale_memory : float
        β₂, the part of s² that a step keeps.
    multiple : float
        b = multiple · sqrt(s_j Σ_i s_i): a larger one clips less and adds more noise.
    spread : float
        How many times larger or smaller than at the start s may be; 1 leaves b at `radius`.
    """

    mean_memory: float = 0.99
    scale_memory: float = 0.9
    multiple: float = 2.0
    spread: float = 10.0
    name: ClassVar[str] = "adaclip"
    shape: ClassVar[Shape] = "ball"

    def __post_init__(self) -> None:
        validate.positive("multiple", self.multiple)
        if validate.positive("spread", self.spread) < 1:
            raise ValueError(f"Expected spread >= 1, found spread={self.spread!r}.")
        for name in ("mean_memory", "scale_memory"):
            if validate.positive(name, getattr(self, name)) > 1:
                raise ValueError(f"Expected {name} in (0, 1], found {getattr(self, name)!r}.")

    def start(self, setting: Setting) -> _State:
        return _State(setting, setting.radius / (self.multiple * math.sqrt(setting.dim)))

    def gradient(self, state: _State, oracle: Oracle, x: Vector, batch: Rows) -> Vector:
        if state.setting.noise_multiplier == 0:
            return oracle.bounded(x, batch, None)
        mean, width = state.mean, state.width
        with np.errstate(over="ignore"):
            released = oracle.private_mean_of(x, batch, lambda rows: (rows - mean) / width, x.size)
        gradient: Vector = width * released + mean
        self._learn(state, gradient)
        return gradient

    def _learn(self, state: _State, gradient: Vector) -> None:
        setting, kept = state.setting, self.scale_memory
        off = gradient - state.mean
        batch_size = setting.batches.expected_size
        noise = state.width * (setting.noise_multiplier / batch_size)
        seen = batch_size * (off**2 - noise**2)
        state.variance = kept * state.variance + (1 - kept) * seen
        state.mean = state.mean + (1 - self.mean_memory) * off
        least, most = state.first / self.spread, state.first * self.spread
        deviation = np.sqrt(np.clip(state.variance, least**2, most**2))
        state.width = self.multiple * np.sqrt(deviation * deviation.sum())
