"""The runs of the experiment: methods, their step sizes, and everything else a run depends on."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal, get_args

from privagrad._internal import validate
from privagrad.privacy.bands import Correlation

Schedule = Literal["constant", "linear", "warm-up"]
SCHEDULES: tuple[Schedule, ...] = get_args(Schedule)
PAPER_BATCH_SIZE = 250
PAPER_WIDTH = 120
SHAPED = ("pasan", "pagan")
"""Methods whose ellipsoid is not a ball."""
Start = Literal["random", "words", "public"]
"""What a run starts from: random weights; biases of the public text's word frequencies as well; or
the model that was trained on the public text without privacy."""
STARTS: tuple[Start, ...] = get_args(Start)


def started(method: str, start: str) -> str:
    """A method's name with its start: "dp-sgd" from the public model is "dp-sgd+public"."""
    return method if start == "random" or "+" in method else f"{method}+{start}"


@dataclass(frozen=True)
class Recipe:
    """The settings of a method that is not tuned.

    `steps` lists epsilons with the batch size and the step size that were found best there; the
    nearest epsilon is used, which is infinite for methods without privacy. The step size grows with
    batch_size ** power: a run with larger batches makes fewer steps, which must go as far. The
    power is 0 for methods that divide by the noise of all previous steps.
    `correlation` is that of the noise over steps.
    """

    steps: tuple[tuple[float, int, float], ...]
    schedule: Schedule = "linear"
    power: float = 1.0
    correlation: Correlation = 1

    @property
    def private(self) -> bool:
        return math.isfinite(self.steps[0][0])

    def batch_size(self, epsilon: float) -> int:
        return self._nearest(epsilon)[0]

    def step_size(self, epsilon: float, batch_size: int) -> float:
        tuned_size, step_size = self._nearest(epsilon)
        return step_size * math.pow(batch_size / tuned_size, self.power)

    def _nearest(self, epsilon: float) -> tuple[int, float]:
        if not self.private:
            return self.steps[0][1:]
        return min(self.steps, key=lambda tuned: abs(math.log(tuned[0] / epsilon)))[1:]


RECIPES = {
    "dp-sgd": Recipe(((3.0, 250, 7.0), (1.0, 250, 4.5), (0.5, 250, 3.5))),
    "pasan": Recipe(((3.0, 250, 0.122), (1.0, 250, 0.12), (0.5, 250, 0.1)), power=0.0),
    "pagan": Recipe(((3.0, 250, 0.2), (1.0, 250, 0.22), (0.5, 250, 0.15)), power=0.0),
    "dp-sgd+words": Recipe(
        ((3.0, 500, 16.0), (1.0, 1000, 16.0), (0.5, 1000, 12.0)), correlation="auto"
    ),
    "pasan+words": Recipe(((3.0, 500, 0.06), (1.0, 1000, 0.05), (0.5, 1000, 0.06)), power=0.0),
    "pagan+words": Recipe(((3.0, 500, 0.15), (1.0, 1000, 0.16), (0.5, 1000, 0.14)), power=0.0),
    "dp-sgd+public": Recipe(((3.0, 2000, 14.0), (1.0, 2000, 9.0), (0.5, 2000, 6.0))),
    "pasan+public": Recipe(((3.0, 2000, 0.04), (1.0, 2000, 0.05), (0.5, 2000, 0.06)), power=0.0),
    "pagan+public": Recipe(((3.0, 2000, 0.04), (1.0, 2000, 0.04), (0.5, 2000, 0.04)), power=0.0),
    "sgd": Recipe(((math.inf, 25, 10.0),), power=0.5),
    "adagrad": Recipe(((math.inf, 25, 0.05),), schedule="constant", power=0.5),
    "sgd+public": Recipe(((math.inf, 25, 10.0),), power=0.5),
    "adagrad+public": Recipe(((math.inf, 25, 0.05),), schedule="constant", power=0.5),
}


@dataclass(frozen=True)
class Setting:
    """Everything that one run depends on, besides the texts.

    `step_size` is the largest; PASAN's is the length of a step over the square root of the number
    of parameters. `radius` bounds every example's gradient; without privacy, the mean gradient. A
    trial has `sample` examples a step: see `training.train`. `correlation` is over how many steps
    noise is correlated; "auto": as the public rule says.
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
    correlation: Correlation = 1

    def __post_init__(self) -> None:
        validate.choice("method", self.method, RECIPES)
        validate.choice("schedule", self.schedule, SCHEDULES)

    @property
    def kind(self) -> str:
        """The method without its start."""
        return self.method.partition("+")[0]

    @property
    def start(self) -> Start:
        """What the run starts from."""
        return next((s for s in STARTS if self.method.endswith(f"+{s}")), "random")

    @property
    def private(self) -> bool:
        return RECIPES[self.method].private

    @property
    def shaped(self) -> bool:
        return self.kind in SHAPED


@dataclass(frozen=True)
class Plan:
    """Which runs to make. The defaults are those of Table 1.

    Every setting is run `seeds` times, with each method's own batches if no `batch_size` is given.
    With `sample` trials are made instead of runs, and `quick` means a small model on the beginning
    of the texts. `tuning_seconds` are shared equally by all methods and epsilons; 0: no tuning.
    `correlation` replaces that of each private method.
    """

    methods: tuple[str, ...] = ("dp-sgd", "pasan", "pagan", "sgd", "adagrad")
    epsilons: tuple[float, ...] = (3.0, 1.0, 0.5)
    epochs: int = 7
    seeds: int = 1
    batch_size: int | None = None
    sample: int | None = None
    quick: bool = False
    tuning_seconds: float = 0.0
    correlation: Correlation | None = None

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
        size = self.batch_size or recipe.batch_size(epsilon)
        step_size = recipe.step_size(epsilon, PAPER_BATCH_SIZE if self.quick else size)
        setting = Setting(method, epsilon, step_size, schedule=recipe.schedule, seed=seed)
        setting = replace(setting, epochs=self.epochs, batch_size=size, sample=self.sample)
        if recipe.private:
            setting = replace(setting, correlation=self.correlation or recipe.correlation)
        if self.quick:
            return replace(setting, batch_size=50, width=32, epochs=min(self.epochs, 2))
        return setting
