"""Noisy mirror descent for the geometry of ℓ₁ (Asi, Feldman, Koren, Talwar 2021).

Private stochastic convex optimization: optimal rates in ℓ₁ geometry. The step is taken in the
mirror of h(x) = ‖x‖_p²/(2(p - 1)) with p = 1 + 1/log d, which is strongly convex in a norm that is
ℓ₁'s up to a constant: good where the best point is sparse and all gradients' coordinates are small.

What we took of it: the noisy steps. The original runs them in phases, each regularised towards the
last one's answer with a smaller step size; ours is one phase. Gradients are bounded to a Euclidean
ball and get isotropic noise as in DP-SGD. After the step the domain's projection is Euclidean,
where the theory uses the Bregman projection of h, which our domains do not have; on R^d they agree.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from privagrad._internal import validate
from privagrad._internal.validate import Vector
from privagrad.geometry.domains import Domain
from privagrad.methods._base import Method, Setting, Shape


@dataclass
class _State:
    setting: Setting
    power: float


@dataclass(frozen=True)
class MirrorDescent(Method):
    """x ← ∇h*(∇h(x) - α ĝ).

    Parameters
    ----------
    power : float or None
        p in (1, 2]; None for 1 + 1/log d, or 2 where d ≤ 3. With 2 it is DP-SGD.
    """

    power: float | None = None
    name: ClassVar[str] = "mirror-descent"
    shape: ClassVar[Shape] = "ball"

    def __post_init__(self) -> None:
        if self.power is not None and not 1 < validate.positive("power", self.power) <= 2:
            raise ValueError(f"Expected power in (1, 2], found power={self.power!r}.")

    def default_step_size(self, domain: Domain, dim: int) -> float:
        # The theorem's step needs a bound on the gradients' coordinates.
        return math.inf

    def start(self, setting: Setting) -> _State:
        standard = 1 + 1 / math.log(setting.dim) if setting.dim > 3 else 2.0
        return _State(setting, standard if self.power is None else self.power)

    def step(self, state: _State, x: Vector, gradient: Vector, step_size: float) -> None:
        dual = to_mirror(x, state.power) - step_size * gradient
        np.copyto(x, from_mirror(dual, state.power))


def to_mirror(x: Vector, power: float) -> Vector:
    """∇h(x) for h = ‖·‖_p²/(2(p - 1))."""
    return _half_square_gradient(x, power) / (power - 1)


def from_mirror(dual: Vector, power: float) -> Vector:
    """∇h*(θ) for h* = (p - 1)‖·‖_q²/2 with 1/p + 1/q = 1: the inverse of `to_mirror`."""
    return _half_square_gradient(dual, power / (power - 1)) * (power - 1)


def _half_square_gradient(v: Vector, power: float) -> Vector:
    """∇(‖v‖_r²/2) = sign(v_j) |v_j|^{r-1} ‖v‖_r^{2-r}, and 0 at 0."""
    largest = np.abs(v).max(initial=0.0)
    if largest == 0:
        return np.zeros_like(v)
    # Homogeneous of degree 1: at largest coordinate 1 no power overflows.
    sizes = np.abs(v / largest)
    norm = float(np.sum(sizes**power)) ** (1 / power)
    return np.asarray(np.sign(v) * sizes ** (power - 1) * (norm ** (2 - power) * largest))
