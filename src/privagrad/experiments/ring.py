"""The ring: methods tuned and run under equal conditions, whatever is trained.

A `Comparison` says which settings every method tries and how one of them is run: `arena` for convex
problems, `networks.comparison` for small networks. The setting with the best tuning runs is then
run with other seeds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, NotRequired, Protocol, TypedDict

import numpy as np

from privagrad._internal.validate import Vector
from privagrad.experiments.tasks import run_tasks
from privagrad.methods import Schedule

_PARTS = 6
"""The runs of the best setting are shared out among at most so many processes."""
_FIRST_TUNING_SEED = 1000


@dataclass(frozen=True)
class Trial:
    """Runs of one variant with one setting. Holds everything that its outcome depends on.

    `problem` is whatever the comparison's `run_trial` reads it from: its `repr` must name it.
    """

    problem: Any
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

    `epsilon` is what was spent, `seconds` the time of the fastest run. Tuning minimises
    `validation`, one number a seed, where there is one, and the final losses elsewhere.
    """

    losses: list[list[float]]
    averaged: list[list[float]]
    epsilon: float
    seconds: float
    validation: NotRequired[list[float]]


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


Results = dict[tuple[str, float], Result]
"""By variant and epsilon, which is infinite for variants without privacy."""


class Comparison(Protocol):
    """What differs between comparisons."""

    @property
    def epsilons(self) -> tuple[float, ...]:
        """At which every private variant is tuned and run."""

    @property
    def runs(self) -> int:
        """Of each variant's best setting."""

    @property
    def points(self) -> int:
        """Recorded points of each run."""

    @property
    def title(self) -> str:
        """What is solved."""

    @property
    def measure(self) -> str:
        """What is measured, over the reference."""

    @property
    def run_trial(self) -> Callable[[Trial], Outcome]:
        """Runs a trial; a function of a module, so that other processes can call it."""

    def private(self, variant: str) -> bool:
        """Whether a variant is private."""

    def grid(self, variant: str, epsilon: float) -> list[Trial]:
        """The trials of the tuning: as many for every private variant."""

    def reference(self, results: Results) -> float:
        """The loss without privacy, over which excess losses are."""


def tuning_seeds(runs: int) -> tuple[int, ...]:
    """The seeds of the tuning runs, which no other run has."""
    return tuple(range(_FIRST_TUNING_SEED, _FIRST_TUNING_SEED + runs))


def tune_and_run(
    comparison: Comparison, variants: Iterable[str], journal: Path, workers: int | None = None
) -> Results:
    """Tune every variant at every epsilon, then run its best setting.

    Finished trials are kept in `journal`, so that an interrupted comparison can be continued.
    """
    run_trial = comparison.run_trial
    grids = {
        (name, epsilon): comparison.grid(name, epsilon)
        for name in variants
        for epsilon in (comparison.epsilons if comparison.private(name) else (math.inf,))
    }
    tuned = run_tasks(run_trial, chain(*grids.values()), journal, "tuning", workers)
    seeds = np.array_split(np.arange(comparison.runs), min(_PARTS, comparison.runs))
    finals = {}
    for key, grid in grids.items():
        best = min(grid, key=lambda trial: _tuning_loss(tuned[trial]))
        finals[key] = [
            replace(best, seeds=tuple(part.tolist()), points=comparison.points) for part in seeds
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


def _tuning_loss(outcome: Outcome) -> float:
    final = [losses[-1] for losses in outcome["losses"]]
    median = float(np.median(outcome.get("validation", final)))
    return median if math.isfinite(median) else math.inf
