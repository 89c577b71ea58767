"""What a method is: the ellipsoid it bounds gradients to, and the step it takes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar, Literal

from privagrad._validate import Vector
from privagrad.domains import Domain
from privagrad.geometry import Ellipsoid

Shape = Literal["none", "ball", "ellipsoid"]


class Method(ABC):
    """One optimizer. `start` makes its state, `step` moves the point by one gradient.

    Attributes
    ----------
    name : what users call it
    shape : "none" for methods without bound and noise, "ball" for A = I, "ellipsoid" for any A
    """

    name: ClassVar[str]
    shape: ClassVar[Shape]

    def ellipsoid(self, given: Ellipsoid) -> Ellipsoid:
        """The ellipsoid it uses: the one given, or for A = I the ball of the same radius."""
        return Ellipsoid.ball(given.dim, given.radius) if self.shape == "ball" else given

    @abstractmethod
    def default_step_size(self, domain: Domain, dim: int) -> float:
        """α where the user gives none; infinite where the domain does not tell one."""

    @abstractmethod
    def start(self, dim: int) -> Any:
        """The state before the first step."""

    @abstractmethod
    def step(self, state: Any, x: Vector, gradient: Vector, step_size: float) -> Vector | None:
        """Move `x` in place, update `state`, return the metric to project in (None: Euclidean)."""
