"""AdaGrad with a diagonal metric (Duchi, Hazan, Singer 2011), plain and with isotropic noise."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from privagrad._internal.jit import kernel
from privagrad._internal.validate import Vector
from privagrad.geometry.domains import Domain
from privagrad.methods._base import Method, Setting, Shape


@dataclass
class State:
    setting: Setting
    squares: Vector
    metric: Vector


class AdaGrad(Method):
    """x ← x - H_k⁻¹ g_k with H_k = diag(Σ_{i ≤ k} g_i g_iᵀ)^{1/2} / α, projected in ‖·‖_{H_k}.

    With a `head_start` the sum begins at that part of what the noise of all steps will add to it:
    then the first steps, which are mostly noise, do not have length α.
    """

    name: ClassVar[str] = "adagrad"
    shape: ClassVar[Shape] = "none"

    def __init__(self, head_start: float = 0.0) -> None:
        self.head_start = head_start

    def default_step_size(self, domain: Domain, dim: int) -> float:
        return domain.max_diameter(dim)  # Theorem 2

    def start(self, setting: Setting) -> State:
        squares = np.zeros(setting.dim)
        if self.head_start:
            squares += self.head_start * setting.batches.steps * np.square(setting.noise_std)
        return State(setting, squares, np.empty(setting.dim))

    def step(self, state: State, x: Vector, gradient: Vector, step_size: float) -> Vector:
        _step(state.squares, state.metric, x, gradient, step_size)
        return state.metric


class DPAdaGrad(AdaGrad):
    """AdaGrad on gradients bounded to a ball, with isotropic noise."""

    name: ClassVar[str] = "dp-adagrad"
    shape: ClassVar[Shape] = "ball"


@kernel()
def _step(squares: Vector, metric: Vector, x: Vector, gradient: Vector, step_size: float) -> None:
    for j in range(x.size):
        squares[j] += gradient[j] * gradient[j]  # Alg. 2, line 7
        root = math.sqrt(squares[j])
        # 0/0 is 0; a coordinate that never moved weighs next to nothing in the projection.
        metric[j] = max(root / step_size, 1e-100)
        x[j] -= step_size * gradient[j] / root if root > 0.0 else 0.0  # line 8
