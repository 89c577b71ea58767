"""The ring on networks: every private method tries as many step sizes and radii."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from privagrad.experiments.networks.settings import (
    NETWORK_METHODS,
    RADIUS_FACTORS,
)
from privagrad.experiments.networks.tasks import NetworkProblem, Task, load_task
from privagrad.experiments.ring import Outcome, Results, Trial, tuning_seeds


def run_trial(trial: Trial) -> Outcome:
    """Train the networks of a trial; imports PyTorch."""
    try:
        from privagrad.experiments.networks.training import run_network
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "Expected PyTorch for networks, found none: pip install 'privagrad[torch]'."
        ) from error
    return run_network(trial)


@dataclass(frozen=True)
class NetworkComparison:
    """Methods on a network: a `privagrad.experiments.ring.Comparison`.

    Without `batch_size` and `steps` those of the task are used. `steps` are rounded to whole passes
    over the rows.
    """

    problem: NetworkProblem
    epsilons: tuple[float, ...]
    delta: float
    batch_size: int | None = None
    steps: int | None = None
    tuning_runs: int = 1
    runs: int = 5
    points = 1
    run_trial = staticmethod(run_trial)

    @cached_property
    def _task(self) -> Task:
        return load_task(self.problem)

    @property
    def title(self) -> str:
        return self._task.name

    @property
    def measure(self) -> str:
        return f"{self._task.score} over that of the best network without privacy"

    def private(self, variant: str) -> bool:
        return NETWORK_METHODS[variant].private

    def grid(self, variant: str, epsilon: float) -> list[Trial]:
        """Every step size and radius; the steps fall linearly to 0."""
        task = self._task
        return [
            Trial(
                self.problem, variant, epsilon, self.delta,
                batch_size=min(self.batch_size or task.batch_size, len(task.private.X)),
                steps=self.steps or task.steps, step_size=step_size, radius_factor=factor,
                seeds=tuning_seeds(self.tuning_runs), schedule="linear",
            )
            for step_size in NETWORK_METHODS[variant].step_sizes
            for factor in (RADIUS_FACTORS if self.private(variant) else (1.0,))
        ]  # fmt: skip

    def reference(self, results: Results) -> float:
        """The best median score without privacy; 0 where no such method was run."""
        scores = [r.losses[:, -1] for (_, epsilon), r in results.items() if math.isinf(epsilon)]
        return min((float(np.median(score)) for score in scores), default=0.0)
