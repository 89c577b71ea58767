"""The loop of Algorithms 1 and 2, once for every method."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from privagrad._internal.progress import track
from privagrad._internal.threads import pool_of
from privagrad._internal.validate import Vector
from privagrad.methods._base import Gradients, Method, Oracle, Schedule, Setting
from privagrad.methods.oracle import Diagnostics, GradientOracle
from privagrad.privacy.accounting import PrivacyReport
from privagrad.privacy.releases import Releases
from privagrad.privacy.sampling import Rows

Callback = Callable[[int, Vector], object]
Observer = Callable[[int, Vector, Vector, Vector], None]
"""Called with the number of a step, the points before and after it, and the private gradient."""


@dataclass(frozen=True)
class Result:
    """The result of a run.

    Attributes
    ----------
    x : array of shape (d,)
        The suffix average; where the step size falls towards 0, the last iterate.
    last : array of shape (d,)
        The last iterate.
    average : array of shape (d,)
        The mean of all iterates x_1 ... x_T, which Algorithms 1 and 2 return.
    suffix_average : array of shape (d,)
        The mean of the last half of the iterates.
    privacy : PrivacyReport
        What the run cost.
    diagnostics : Diagnostics
        Counts for debugging, NOT private.
    schedule : {"constant", "linear"}
        Whether the step size was constant or fell towards 0.
    """

    last: Vector
    average: Vector
    suffix_average: Vector
    privacy: PrivacyReport
    diagnostics: Diagnostics = field(repr=False)
    schedule: Schedule = "constant"

    @property
    def x(self) -> Vector:
        return self.last if self.schedule == "linear" else self.suffix_average


def train(
    method: Method,
    gradients: Gradients,
    setting: Setting,
    releases: Releases,
    x: Vector,
    *,
    callback: Callback | None = None,
    observer: Observer | None = None,
    progress: bool | None = None,
    threads: int | None = None,
) -> Result:
    """Move `x` in place through all steps of the setting."""
    drawn = gradients.draw(setting.batches.draw(releases.source.sampler))
    drawn = track(drawn, setting.batches.steps, method.name, progress)
    with pool_of(threads) as pool:
        oracle = GradientOracle(gradients, setting, releases, pool)
        average, suffix_average = descend(method, oracle, drawn, x, setting, callback, observer)
    report = releases.report()
    return Result(x, average, suffix_average, report, oracle.diagnostics, setting.schedule)


def descend(
    method: Method,
    oracle: Oracle,
    drawn: Iterator[Rows],
    x: Vector,
    setting: Setting,
    callback: Callback | None = None,
    observer: Observer | None = None,
) -> tuple[Vector, Vector]:
    """Move `x` in place through the batches; the average and the suffix average."""
    state = method.start(setting)
    project, halfway = setting.domain.project_into, setting.batches.steps // 2
    total = np.zeros_like(x)
    before, skipped = np.zeros_like(x), 0
    done = 0
    for batch in drawn:
        if done == halfway:
            before, skipped = total.copy(), done
        gradient = method.gradient(state, oracle, x, batch)
        old = x.copy() if observer is not None else x
        metric = method.step(state, x, gradient, setting.step_size_at(done))
        done += 1
        if observer is not None:
            observer(done, old, x, gradient)
        project(x, x, metric)
        total += x
        if callback is not None and callback(done, x):
            break
    return total / done, (total - before) / (done - skipped)
