"""PASAN: SGD with an adaptive step size and noise in the ellipsoid's shape (Algorithm 1)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from privagrad._internal.validate import Vector
from privagrad.geometry.domains import Domain
from privagrad.geometry.scales import SCALE_POWERS
from privagrad.methods import sgd
from privagrad.methods._base import Method, Setting, Shape


@dataclass
class _State(sgd.State):
    squares: float = 0.0


class PASAN(Method):
    """x ← x - α_k ĝ_k with α_k = α / sqrt(Σ_{i ≤ k} ‖ĝ_i‖²)."""

    name: ClassVar[str] = "pasan"
    shape: ClassVar[Shape] = "ellipsoid"
    scale_power: ClassVar[float] = SCALE_POWERS["pasan"]

    def default_step_size(self, domain: Domain, dim: int) -> float:
        return domain.euclidean_diameter(dim)  # Theorem 1

    def start(self, setting: Setting) -> _State:
        return _State(setting)

    def step(self, state: _State, x: Vector, gradient: Vector, step_size: float) -> None:
        state.squares += float(gradient @ gradient)  # Alg. 1, line 7
        if state.squares > 0:
            rate = step_size / math.sqrt(state.squares)
            np.subtract(x, np.multiply(gradient, rate, out=state.scratch), out=x)  # line 8
