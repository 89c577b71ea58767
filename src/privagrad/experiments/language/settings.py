"""The runs of the experiment: methods, their step sizes, and everything else a run depends on."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from privagrad._internal import validate

Schedule = Literal["constant", "linear", "warm-up"]
SCHEDULES: tuple[Schedule, ...] = ("constant", "linear", "warm-up")
PAPER_BATCH_SIZE = 250
PAPER_WIDTH = 120
SHAPED = ("pasan", "pagan")
"""Methods whose ellipsoid is not a ball."""
WORDS = "+words"
"""Suffix of a method that starts from the word frequencies of the public text."""


class TunedStep(NamedTuple):
    """The step size that was found best at an epsilon and a batch size."""

    epsilon: float
    batch_size: int
    step_size: float


@dataclass(frozen=True)
class Recipe:
    """The settings of a method that is not tuned.

    Attributes
    ----------
    steps : tuple of TunedStep
        The entry with the nearest epsilon is used; infinite for methods without privacy.
    schedule : str
        How the step size changes during a run.
    power : float
        The step size grows with batch_size ** power: a run with larger batches makes fewer steps,
        which must go as far. 0 for methods that divide by the noise of all previous steps.
    """

    steps: tuple[TunedStep, ...]
    schedule: Schedule = "linear"
    power: float = 1.0

    @property
    def private(self) -> bool:
        return math.isfinite(self.steps[0].epsilon)

    def batch_size(self, epsilon: float) -> int:
        return self._nearest(epsilon).batch_size

    def step_size(self, epsilon: float, batch_size: int) -> float:
        tuned = self._nearest(epsilon)
        return tuned.step_size * math.pow(batch_size / tuned.batch_size, self.power)

    def _nearest(self, epsilon: float) -> TunedStep:
        if not self.private:
            return self.steps[0]
        return min(self.steps, key=lambda tuned: abs(math.log(tuned.epsilon / epsilon)))


def _recipe(
    *steps: tuple[float, int, float], schedule: Schedule = "linear", power: float = 1.0
) -> Recipe:
    return Recipe(tuple(TunedStep(*step) for step in steps), schedule, power)


RECIPES = {
    "dp-sgd": _recipe((3.0, 250, 7.0), (1.0, 250, 4.5), (0.5, 250, 3.5)),
    "pasan": _recipe((3.0, 250, 0.122), (1.0, 250, 0.12), (0.5, 250, 0.1), power=0.0),
    "pagan": _recipe((3.0, 250, 0.2), (1.0, 250, 0.22), (0.5, 250, 0.15), power=0.0),
    "dp-sgd+words": _recipe((3.0, 500, 16.0), (1.0, 1000, 16.0), (0.5, 1000, 12.0)),
    "pasan+words": _recipe((3.0, 500, 0.06), (1.0, 1000, 0.05), (0.5, 1000, 0.06), power=0.0),
    "pagan+words": _recipe((3.0, 500, 0.15), (1.0, 1000, 0.16), (0.5, 1000, 0.14), power=0.0),
    "sgd": _recipe((math.inf, 25, 10.0), power=0.5),
    "adagrad": _recipe((math.inf, 25, 0.05), schedule="constant", power=0.5),
}


@dataclass(frozen=True)
class Setting:
    """Everything that one run depends on, besides the texts.

    Attributes
    ----------
    step_size : float
        The largest step size. For PASAN: the length of a step over the square root of the number
        of parameters.
    radius : float
        The bound on every example's gradient; without privacy, on the mean gradient.
    width : int
        Of the embedding and the LSTM layers.
    sample : int or None
        Examples a step of a trial; None for a run. See `training.train`.
    """

    method: str
    epsilon: float
    step_size: float
    radius: float = 0.5
    schedule: Schedule = "linear"
    epochs: int = 7
    batch_size: int = PAPER_BATCH_SIZE
    seed: int = 0
    width: int = PAPER_WIDTH
    sample: int | None = None

    def __post_init__(self) -> None:
        validate.choice("method", self.method, RECIPES)
        validate.choice("schedule", self.schedule, SCHEDULES)

    @property
    def kind(self) -> str:
        """The method without its suffix."""
        return self.method.removesuffix(WORDS)

    @property
    def words(self) -> bool:
        """Whether it starts from public word frequencies."""
        return self.method.endswith(WORDS)

    @property
    def private(self) -> bool:
        return RECIPES[self.method].private

    @property
    def shaped(self) -> bool:
        return self.kind in SHAPED


@dataclass(frozen=True)
class Plan:
    """Which runs to make. The defaults are those of Table 1.

    Attributes
    ----------
    seeds : int
        Runs of each setting.
    batch_size : int or None
        None: each method's own.
    sample : int or None
        Make trials with so many examples a step instead of runs.
    quick : bool
        A small model on the beginning of the texts.
    tuning_seconds : float
        Time for tuning, shared equally by all methods and epsilons; 0: use the recipes.
    """

    methods: tuple[str, ...] = ("dp-sgd", "pasan", "pagan", "sgd", "adagrad")
    epsilons: tuple[float, ...] = (3.0, 1.0, 0.5)
    epochs: int = 7
    seeds: int = 1
    batch_size: int | None = None
    sample: int | None = None
    quick: bool = False
    tuning_seconds: float = 0.0

    def settings(self) -> list[Setting]:
        """Every run, seed by seed, so that early results cover all methods."""
        return [
            self._setting(method, epsilon, seed)
            for seed in range(self.seeds)
            for method in self.methods
            for epsilon in (self.epsilons if RECIPES[method].private else (math.inf,))
        ]

    def _setting(self, method: str, epsilon: float, seed: int) -> Setting:
        recipe = RECIPES[method]
        batch_size = self.batch_size or recipe.batch_size(epsilon)
        setting = Setting(
            method,
            epsilon,
            recipe.step_size(epsilon, PAPER_BATCH_SIZE if self.quick else batch_size),
            schedule=recipe.schedule,
            epochs=self.epochs,
            batch_size=batch_size,
            seed=seed,
            sample=self.sample,
        )
        if self.quick:
            return replace(setting, batch_size=50, width=32, epochs=min(self.epochs, 2))
        return setting
