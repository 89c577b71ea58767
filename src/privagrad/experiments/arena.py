"""The ring: every method on one problem, tuned by one rule, measured alike.

Each contender gets the same step sizes and the same multiples of the median gradient norm, in the
norm of its own ellipsoid, as radii; the pair with the least median final loss over a few tuning
runs is then run afresh. Tuning looks at the private rows: these are experiments, not releases.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from privagrad import Ellipsoid, minimize
from privagrad._internal.validate import Vector
from privagrad.experiments.problems import FileProblem, Problem, load_problem
from privagrad.experiments.tasks import Outcome
from privagrad.methods import METHODS, Method
from privagrad.methods.pdp_sgd import PDPSGD

STEP_SIZES = (0.005, 0.01, 0.05, 0.1, 0.15, 0.2, 0.4, 0.5, 1.0)
RADIUS_FACTORS = (0.05, 0.15, 0.5, 1.5)


@dataclass(frozen=True)
class Contender:
    """A method as it enters the ring: its ellipsoid's scale is σ^power."""

    name: str
    method: Method
    power: float = 0.0

    @property
    def private(self) -> bool:
        return self.method.shape != "none"


CONTENDERS = {
    contender.name: contender
    for contender in (
        *(Contender(name, method, method.scale_power) for name, method in METHODS.items()),
        Contender("pasan-identity", METHODS["pasan"]),
        Contender("pagan-identity", METHODS["pagan"]),
        Contender("pdp-sgd-20", PDPSGD(20)),
        Contender("pdp-sgd-50", PDPSGD(50)),
    )
}


@dataclass(frozen=True)
class Trial:
    """Runs of one contender with one setting: everything its outcome depends on."""

    problem: str | FileProblem
    contender: str
    epsilon: float
    delta: float
    batch_size: int
    steps: int
    step_size: float
    radius_factor: float
    seeds: tuple[int, ...]
    looks: int = 1


def look_at(steps: int, looks: int) -> list[int]:
    """The steps whose loss is recorded: denser at the start, the last one always."""
    return sorted({max(1, round(steps * (k / looks) ** 2)) for k in range(1, looks + 1)})


def run_trial(bout: Trial) -> Outcome:
    """Losses of the iterate and of the average at the looks, one row per seed; epsilon; seconds."""
    problem, contender = _problem(bout.problem), CONTENDERS[bout.contender]
    scale = problem.sigma**contender.power
    radius = bout.radius_factor * _median_norm(bout.problem, contender.power)
    looks = set(look_at(bout.steps, bout.looks))
    iterates, averages, seconds = [], [], []
    for seed in bout.seeds:
        losses: list[float] = []
        averaged: list[float] = []
        total = np.zeros(problem.X.shape[1])
        looking = 0.0

        def look(
            step: int,
            x: Vector,
            total: Vector = total,
            losses: list[float] = losses,
            averaged: list[float] = averaged,
        ) -> None:
            nonlocal looking
            start = time.perf_counter()
            np.add(total, x, out=total)
            if step in looks:
                losses.append(problem.objective(x))
                averaged.append(problem.objective(total / step))
            looking += time.perf_counter() - start

        start = time.perf_counter()
        result = minimize(
            problem.loss,
            problem.X,
            problem.y,
            method=contender.method,
            epsilon=bout.epsilon if contender.private else None,
            delta=bout.delta,
            ellipsoid=Ellipsoid(scale, radius),
            domain=problem.domain,
            batch_size=bout.batch_size,
            steps=bout.steps,
            step_size=bout.step_size * problem.step_unit,
            public=problem.public,
            random_state=seed,
            callback=look,
            progress=False,
            threads=1,
        )
        seconds.append(time.perf_counter() - start - looking)
        if contender.method.one_shot:  # its one point, wherever a curve is looked at
            losses = averaged = [problem.objective(result.last)] * len(looks)
        iterates.append(losses)
        averages.append(averaged)
    return {
        "losses": iterates,
        "averaged": averages,
        "epsilon": result.privacy.epsilon,
        "seconds": min(seconds),
    }


def tuning_bouts(
    contender: str,
    problem: str | FileProblem,
    epsilon: float,
    delta: float,
    batch_size: int,
    steps: int,
    step_sizes: tuple[float, ...],
    runs: int,
) -> list[Trial]:
    """Every step size and radius factor, `runs` runs each."""
    factors = RADIUS_FACTORS if CONTENDERS[contender].private else (1.0,)
    seeds = tuple(range(1000, 1000 + runs))
    return [
        Trial(problem, contender, epsilon, delta, batch_size, steps, step_size, factor, seeds)
        for step_size in step_sizes
        for factor in factors
    ]


def final_bouts(best: Trial, runs: int, looks: int, parts: int = 6) -> list[Trial]:
    """`runs` fresh runs of the best setting, in parts for several cores."""
    seeds = np.array_split(np.arange(runs), min(parts, runs))
    return [replace(best, seeds=tuple(part.tolist()), looks=looks) for part in seeds]


def best_of(outcomes: dict[Trial, Outcome]) -> Trial:
    """The setting with the least median final loss."""
    return min(outcomes, key=lambda bout: final_loss(outcomes[bout]))


def final_loss(outcome: Outcome) -> float:
    median = float(np.median([losses[-1] for losses in outcome["losses"]]))
    return median if math.isfinite(median) else math.inf


def median_band(values: Vector) -> tuple[Vector, Vector, Vector]:
    """Median over the rows with its 95 % confidence band from order statistics."""
    from scipy.stats import binom

    ordered = np.sort(values, axis=0)
    runs = len(ordered)
    low = max(int(binom.ppf(0.025, runs, 0.5)) - 1, 0)
    return np.median(ordered, axis=0), ordered[low], ordered[runs - 1 - low]


@lru_cache(maxsize=4)
def _problem(name: str | FileProblem) -> Problem:
    return load_problem(name)


@lru_cache(maxsize=32)
def _median_norm(problem: str | FileProblem, power: float) -> float:
    """The median norm of the public examples' gradients at 0, in the contender's own norm."""
    given = _problem(problem)
    norms = Ellipsoid(given.sigma**power, 1.0).norm(given.public_gradients())
    return float(np.median(norms))
