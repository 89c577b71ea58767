"""The runs of the experiment: methods, their tuned settings, and what a run depends on."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from privagrad._internal import validate
from privagrad._internal.validate import Vector
from privagrad.geometry.ellipsoid import Ellipsoid

Rows = Literal["scattering", "pixels"]


@dataclass(frozen=True)
class Recipe:
    """A method of `minimize`, its rows, and the shape of its ellipsoid.

    The scale of a coordinate of the ellipsoid is the public variance of its column to the power of
    minus `power`; methods with A = I take the radius alone. `tuned` lists epsilons with the step
    size and the radius that were best there; the nearest epsilon is used.
    """

    method: str
    rows: Rows
    tuned: tuple[tuple[float, float, float], ...]
    power: float = 0.0

    def nearest(self, epsilon: float) -> tuple[float, float]:
        """Step size and radius at this epsilon."""
        found = min(self.tuned, key=lambda tuned: abs(math.log(tuned[0] / epsilon)))
        return found[1], found[2]


RECIPES = {
    "pagan": Recipe("pagan", "scattering", ((1.0, 4.0, 0.05), (3.0, 8.0, 0.05)), power=0.6),
    "dp-adagrad": Recipe("dp-adagrad", "scattering", ((1.0, 2.0, 0.05), (3.0, 2.0, 0.05))),
    "dp-sgd": Recipe("dp-sgd", "scattering", ((1.0, 5e3, 0.05), (3.0, 1e4, 0.05))),
    "dp-sgd-pixels": Recipe("dp-sgd", "pixels", ((1.0, 5e3, 0.1), (3.0, 1e4, 0.1))),
}
_STEPS, _QUICK_STEPS = 80, 40


@dataclass(frozen=True)
class Setting:
    """Everything that one run depends on, besides the images."""

    method: str
    epsilon: float
    step_size: float
    radius: float
    steps: int = _STEPS
    seed: int = 0

    @property
    def recipe(self) -> Recipe:
        return RECIPES[self.method]

    def columns(self, variances: Vector) -> Ellipsoid:
        """The ellipsoid of a row, for these public variances of its columns."""
        return Ellipsoid((variances / variances.max()) ** -self.recipe.power, 1.0)


@dataclass(frozen=True)
class Plan:
    """Which runs to make: every method at every epsilon, `seeds` times.

    A `quick` plan uses the beginning of the images, fewer steps, and axes of fewer pictures. With
    `held_out` the models are measured on training rows that are held out, not on the test rows.
    """

    methods: tuple[str, ...] = tuple(RECIPES)
    epsilons: tuple[float, ...] = (1.0, 3.0)
    seeds: int = 5
    quick: bool = False
    held_out: bool = False

    def __post_init__(self) -> None:
        for name in self.methods:
            validate.choice("method", name, RECIPES)

    def settings(self) -> list[Setting]:
        """Every run, seed by seed, so that early results cover all methods."""
        steps = _QUICK_STEPS if self.quick else _STEPS
        return [
            Setting(name, epsilon, *RECIPES[name].nearest(epsilon), steps, seed)
            for seed in range(self.seeds)
            for name in self.methods
            for epsilon in self.epsilons
        ]
