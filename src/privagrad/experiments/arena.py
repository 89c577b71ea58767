"""The ring on convex problems: the same problem, the same tuning, the same measure.

Every variant tries the same step sizes and schedules, and as radii the same multiples of the median
gradient norm in the norm of its own ellipsoid. The setting with the least median final loss is then
run with other seeds.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from privagrad import Ellipsoid, minimize
from privagrad._internal.validate import Vector
from privagrad.experiments import DELTA
from privagrad.experiments.problems import FileProblem, load_problem
from privagrad.experiments.ring import Outcome, Results, Trial, tuning_seeds
from privagrad.methods import METHODS, Method, Schedule
from privagrad.methods.pdp_sgd import PDPSGD
from privagrad.methods.scale_then_privatize import ScaleThenPrivatize

PAPER_STEP_SIZES = (0.005, 0.01, 0.05, 0.1, 0.15, 0.2, 0.4, 0.5, 1.0)
STEP_SIZES = (0.002, *PAPER_STEP_SIZES, 2.0, 5.0, 10.0, 20.0, 50.0)
RADIUS_FACTORS = (0.05, 0.15, 0.5, 1.5)


@dataclass(frozen=True)
class Variant:
    """A method with an ellipsoid of scale σ^power."""

    method: Method
    power: float = 0.0

    @property
    def private(self) -> bool:
        return self.method.shape != "none"


VARIANTS = {name: Variant(method, method.scale_power) for name, method in METHODS.items()} | {
    "pasan-identity": Variant(METHODS["pasan"]),
    "pagan-identity": Variant(METHODS["pagan"]),
    "pagan-inverse-moments": Variant(METHODS["pagan"], -2.0),
    "pagan-history-identity": Variant(METHODS["pagan-history"]),
    "pdp-sgd-20": Variant(PDPSGD(20)),
    "pdp-sgd-50": Variant(PDPSGD(50)),
    "scale-then-privatize-999": Variant(ScaleThenPrivatize(square_memory=0.999)),
}


@dataclass(frozen=True)
class Conditions:
    """What is the same for all variants.

    Every private variant is tuned and run at each epsilon: `tuning_runs` of every setting that is
    tried, `runs` of the best. By default `batch_size` is √n, or n/100 where that is larger.
    `points` are those of the recorded loss curve; 1 records the final loss only.
    """

    problem: str | FileProblem
    epsilons: tuple[float, ...]
    delta: float = DELTA
    batch_size: int | None = None
    steps: int = 1000
    step_sizes: tuple[float, ...] = STEP_SIZES
    schedules: tuple[Schedule, ...] = ("constant",)
    tuning_runs: int = 2
    runs: int = 10
    points: int = 1


class LossRecorder:
    """A callback that records losses at some steps, and how long it takes itself."""

    def __init__(
        self, objective: Callable[[Vector], float], dim: int, steps: Collection[int]
    ) -> None:
        self.losses: list[float] = []
        self.averaged: list[float] = []
        self.seconds = 0.0
        self._objective, self._steps = objective, frozenset(steps)
        self._total = np.zeros(dim)

    def __call__(self, step: int, x: Vector) -> None:
        start = time.perf_counter()
        self._total += x
        if step in self._steps:
            self.losses.append(self._objective(x))
            self.averaged.append(self._objective(self._total / step))
        self.seconds += time.perf_counter() - start


def recorded_steps(steps: int, points: int) -> list[int]:
    """The steps whose loss is recorded: denser at the start, the last one always."""
    return sorted({max(1, round(steps * (k / points) ** 2)) for k in range(1, points + 1)})


def run_trial(trial: Trial) -> Outcome:
    """Run every seed of a trial and record its losses."""
    problem, variant = _problem(trial.problem), VARIANTS[trial.variant]
    scale = problem.sigma**variant.power
    radius = trial.radius_factor * _median_norm(trial.problem, variant.power)
    steps = recorded_steps(trial.steps, trial.points)
    outcome: Outcome = {"losses": [], "averaged": [], "epsilon": math.nan, "seconds": math.inf}
    for seed in trial.seeds:
        recorder = LossRecorder(problem.objective, problem.X.shape[1], steps)
        start = time.perf_counter()
        result = minimize(
            problem.loss,
            problem.X,
            problem.y,
            method=variant.method,
            epsilon=trial.epsilon if variant.private else None,
            delta=trial.delta,
            ellipsoid=Ellipsoid(scale, radius),
            domain=problem.domain,
            batch_size=trial.batch_size,
            steps=trial.steps,
            step_size=trial.step_size * problem.step_unit,
            schedule=trial.schedule,
            public=problem.public,
            random_state=seed,
            callback=recorder,
            progress=False,
            threads=1,
        )
        seconds = time.perf_counter() - start - recorder.seconds
        if variant.method.one_shot:  # one point: its curve is constant
            recorder.losses = [problem.objective(result.last)] * len(steps)
            recorder.averaged = recorder.losses
        outcome["losses"].append(recorder.losses)
        outcome["averaged"].append(recorder.averaged)
        outcome["epsilon"] = result.privacy.epsilon
        outcome["seconds"] = min(outcome["seconds"], seconds)
    return outcome


@dataclass(frozen=True)
class ConvexComparison:
    """The variants on a convex problem: a `privagrad.experiments.ring.Comparison`."""

    conditions: Conditions
    measure = "excess loss over the optimum without privacy"
    run_trial = staticmethod(run_trial)

    @property
    def epsilons(self) -> tuple[float, ...]:
        return self.conditions.epsilons

    @property
    def runs(self) -> int:
        return self.conditions.runs

    @property
    def points(self) -> int:
        return self.conditions.points

    @property
    def title(self) -> str:
        return _problem(self.conditions.problem).name

    def private(self, variant: str) -> bool:
        return VARIANTS[variant].private

    def grid(self, variant: str, epsilon: float) -> list[Trial]:
        """Every step size, radius factor and schedule, as far as they matter to the variant."""
        conditions, problem = self.conditions, self.conditions.problem
        one_shot = VARIANTS[variant].method.one_shot
        schedules = conditions.schedules[:1] if one_shot else conditions.schedules
        n = _problem(problem).X.shape[0]
        first = Trial(
            problem, variant, epsilon, conditions.delta,
            batch_size=conditions.batch_size or round(max(math.sqrt(n), n / 100)),
            steps=conditions.steps, step_size=math.nan, radius_factor=math.nan,
            seeds=tuning_seeds(conditions.tuning_runs),
        )  # fmt: skip
        return [
            replace(first, step_size=step_size, radius_factor=factor, schedule=schedule)
            for step_size in conditions.step_sizes
            for factor in (RADIUS_FACTORS if self.private(variant) else (1.0,))
            for schedule in schedules
        ]

    def reference(self, results: Results) -> float:
        """The least mean loss over the private rows."""
        return _problem(self.conditions.problem).optimum()


_problem = lru_cache(maxsize=4)(load_problem)


@lru_cache(maxsize=32)
def _median_norm(problem: str | FileProblem, power: float) -> float:
    """The median norm of the public examples' gradients at 0, in the variant's own norm."""
    loaded = _problem(problem)
    norms = Ellipsoid(loaded.sigma**power, 1.0).norm(loaded.public_gradients())
    return float(np.median(norms))
