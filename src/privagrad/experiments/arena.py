"""Methods compared under equal conditions: the same problem, the same tuning, the same measure.

Every variant tries the same step sizes and schedules, and as radii the same multiples of the median
gradient norm in the norm of its own ellipsoid. The setting with the least median final loss is then
run with other seeds.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import TypedDict

import numpy as np

from privagrad import Ellipsoid, minimize
from privagrad._internal.validate import Vector
from privagrad.experiments import DELTA
from privagrad.experiments.problems import FileProblem, load_problem
from privagrad.experiments.tasks import run_tasks
from privagrad.methods import METHODS, Method, Schedule
from privagrad.methods.pdp_sgd import PDPSGD
from privagrad.methods.scale_then_privatize import ScaleThenPrivatize

PAPER_STEP_SIZES = (0.005, 0.01, 0.05, 0.1, 0.15, 0.2, 0.4, 0.5, 1.0)
STEP_SIZES = (0.002, *PAPER_STEP_SIZES, 2.0, 5.0, 10.0, 20.0, 50.0)
RADIUS_FACTORS = (0.05, 0.15, 0.5, 1.5)
_PARTS = 6
"""The runs of the best setting are shared out among at most so many processes."""


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


@dataclass(frozen=True)
class Trial:
    """Runs of one variant with one setting. Holds everything that its outcome depends on."""

    problem: str | FileProblem
    variant: str
    epsilon: float
    delta: float
    batch_size: int
    steps: int
    step_size: float
    radius_factor: float
    seeds: tuple[int, ...]
    points: int = 1
    schedule: Schedule = "constant"


class Outcome(TypedDict):
    """Losses at the recorded steps, of the iterate and of the averaged iterate, one row a seed.

    `epsilon` is what was spent, `seconds` the time of the fastest run.
    """

    losses: list[list[float]]
    averaged: list[list[float]]
    epsilon: float
    seconds: float


@dataclass(frozen=True)
class Result:
    """A variant's best setting, and the outcome of all its runs: arrays of runs × points."""

    step_size: float
    radius_factor: float
    schedule: Schedule
    losses: Vector
    averaged: Vector
    epsilon: float
    seconds: float


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


def tune_and_run(
    conditions: Conditions, variants: Iterable[str], journal: Path, workers: int | None = None
) -> dict[tuple[str, float], Result]:
    """Tune every variant at every epsilon, then run its best setting.

    The epsilon of variants without privacy is infinite. Finished trials are kept in `journal`, so
    that an interrupted comparison can be continued.
    """
    grids = {
        (name, epsilon): _grid(conditions, name, epsilon)
        for name in variants
        for epsilon in (conditions.epsilons if VARIANTS[name].private else (math.inf,))
    }
    tuned = run_tasks(run_trial, chain(*grids.values()), journal, "tuning", workers)
    seeds = np.array_split(np.arange(conditions.runs), min(_PARTS, conditions.runs))
    finals = {}
    for key, grid in grids.items():
        best = min(grid, key=lambda trial: _final_loss(tuned[trial]))
        finals[key] = [
            replace(best, seeds=tuple(part.tolist()), points=conditions.points) for part in seeds
        ]
    done = run_tasks(run_trial, chain(*finals.values()), journal, "running", workers)
    return {
        key: Result(
            trials[0].step_size,
            trials[0].radius_factor,
            trials[0].schedule,
            np.concatenate([np.array(done[trial]["losses"]) for trial in trials]),
            np.concatenate([np.array(done[trial]["averaged"]) for trial in trials]),
            done[trials[0]]["epsilon"],
            min(done[trial]["seconds"] for trial in trials),
        )
        for key, trials in finals.items()
    }


def median_band(values: Vector) -> tuple[Vector, Vector, Vector]:
    """Median over the rows with its 95 % confidence band from order statistics."""
    from scipy.stats import binom

    ordered = np.sort(values, axis=0)
    runs = len(ordered)
    low = max(int(binom.ppf(0.025, runs, 0.5)) - 1, 0)
    return np.median(ordered, axis=0), ordered[low], ordered[runs - 1 - low]


def _grid(conditions: Conditions, variant: str, epsilon: float) -> list[Trial]:
    """Every step size, radius factor and schedule, as far as they matter to the variant."""
    rule = VARIANTS[variant].method
    factors = RADIUS_FACTORS if VARIANTS[variant].private else (1.0,)
    schedules = conditions.schedules[:1] if rule.one_shot else conditions.schedules
    seeds = tuple(range(1000, 1000 + conditions.tuning_runs))
    problem, delta, steps = conditions.problem, conditions.delta, conditions.steps
    n = _problem(problem).X.shape[0]
    size = conditions.batch_size or round(max(math.sqrt(n), n / 100))
    first = Trial(problem, variant, epsilon, delta, size, steps, math.nan, math.nan, seeds)
    return [
        replace(first, step_size=step_size, radius_factor=factor, schedule=schedule)
        for step_size in conditions.step_sizes
        for factor in factors
        for schedule in schedules
    ]


def _final_loss(outcome: Outcome) -> float:
    median = float(np.median([losses[-1] for losses in outcome["losses"]]))
    return median if math.isfinite(median) else math.inf


_problem = lru_cache(maxsize=4)(load_problem)


@lru_cache(maxsize=32)
def _median_norm(problem: str | FileProblem, power: float) -> float:
    """The median norm of the public examples' gradients at 0, in the variant's own norm."""
    loaded = _problem(problem)
    norms = Ellipsoid(loaded.sigma**power, 1.0).norm(loaded.public_gradients())
    return float(np.median(norms))
