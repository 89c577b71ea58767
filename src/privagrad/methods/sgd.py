"""Stochastic gradient descent with a constant step, plain and private (Abadi et al. 2016)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from privagrad._internal.validate import Vector
from privagrad.geometry.domains import Domain
from privagrad.methods._base import Method, Setting, Shape


@dataclass
class State:
    setting: Setting
    scratch: Vector = field(init=False)

    def __post_init__(self) -> None:
        self.scratch = np.empty(self.setting.dim)


class SGD(Method):
    """x ← x - α g."""

    name: ClassVar[str] = "sgd"
    shape: ClassVar[Shape] = "none"

    def default_step_size(self, domain: Domain, dim: int) -> float:
        # No theorem gives a constant step without knowing the gradients' size.
        return math.inf

    def start(self, setting: Setting) -> State:
        return State(setting)

    def step(self, state: State, x: Vector, gradient: Vector, step_size: float) -> Vector | None:
        np.subtract(x, np.multiply(gradient, step_size, out=state.scratch), out=x)
        return None


class DPSGD(SGD):
    """SGD on gradients bounded to a ball, with isotropic noise."""

    name: ClassVar[str] = "dp-sgd"
    shape: ClassVar[Shape] = "ball"
    adds_up: ClassVar[bool] = True
