"""One private fit of a linear model: scales of columns and target, bound, training; one budget."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from privagrad import moments
from privagrad._validate import Vector
from privagrad.accounting import PrivacyPlan, PrivacyReport
from privagrad.descent import train
from privagrad.domains import WholeSpace
from privagrad.estimators import _recipe
from privagrad.events import GaussianEvent
from privagrad.geometry import Ellipsoid
from privagrad.glm import GlmGradients
from privagrad.losses import Loss
from privagrad.methods import Setting
from privagrad.moments import Columns
from privagrad.noise import RandomSource
from privagrad.queries import Share, private_norm, query_events
from privagrad.tables import DenseRows, SparseRows

Bounds = tuple[Vector, Vector]


@dataclass(frozen=True)
class Problem:
    """What is fitted. `targets` are numbers, signs or class numbers, as the loss wants them."""

    loss: Loss
    rows: DenseRows | SparseRows
    targets: Vector
    outputs: int = 1
    intercept: bool = True
    bounds: Bounds | None = None
    target_bounds: Bounds | None = None

    @property
    def regression(self) -> bool:
        return self.loss.name in ("quantile", "huber")

    @property
    def dim(self) -> int:
        return (self.rows.shape[1] + self.intercept) * self.outputs

    def queries(self) -> list[Share]:
        """What is asked before the training, over all rows."""
        if self.bounds is not None:
            shares = list(moments.BOUNDED_COLUMNS)
        else:
            shares = list(moments.COLUMNS if self.intercept else moments.SCALES)
        if self.regression:
            known = self.target_bounds is not None
            shares += moments.BOUNDED_TARGET if known else moments.TARGET
        return shares + list(moments.NORMS)


@dataclass(frozen=True)
class Choices:
    """What users may set instead of the recipe."""

    steps: int | None = None
    batch_size: int | None = None
    step_size: float | None = None
    radius: float | None = None


@dataclass(frozen=True)
class Plan:
    """A fit before it happens: what it will release. Without `privacy`, without noise."""

    steps: int
    batches: _recipe.Batches
    queries: tuple[GaussianEvent, ...]
    privacy: PrivacyPlan | None
    delta: float
    relative_noise: float
    step_size: float
    radius: float


@dataclass(frozen=True)
class LinearModel:
    """In original units: margins are X @ coef + intercept; `unit` is that of the target."""

    coef: NDArray[np.float64]
    intercept: Vector
    unit: float
    privacy: PrivacyReport


def plan_fit(problem: Problem, epsilon: float, delta: float, choices: Choices) -> Plan:
    """How many steps of how many rows, and their noise, from public facts alone."""
    rows = problem.rows
    n = rows.shape[0]
    steps = _recipe.STEPS if choices.steps is None else choices.steps
    batches = _recipe.batches(
        n, problem.dim, isinstance(rows, SparseRows), steps, choices.batch_size
    )
    queries: list[GaussianEvent] = []
    privacy, noise = None, 0.0
    if not math.isinf(epsilon):
        queries = query_events(problem.queries(), epsilon, delta, "add-or-remove-one")
        training = GaussianEvent(1.0, steps, batches.sampling, n, batches.size, "gradients")
        privacy = PrivacyPlan.calibrate_event(training, epsilon, delta, queries)
        noise = _recipe.relative_noise(privacy.noise_multiplier, batches.size, steps, problem.dim)
    step_size = _recipe.step_size(noise, problem.regression)
    return Plan(
        steps,
        batches,
        tuple(queries),
        privacy,
        delta,
        noise,
        step_size if choices.step_size is None else choices.step_size,
        _recipe.RADIUS if choices.radius is None else choices.radius,
    )


def run_fit(
    problem: Problem, plan: Plan, source: RandomSource, progress: bool | None = None
) -> LinearModel:
    """Make the plan's releases, and the model of them."""
    queries = list(plan.queries)
    columns = _columns(problem, queries, source)
    centre, unit = _target(problem, queries, source)
    targets = (problem.targets - centre) / unit if problem.regression else problem.targets
    table = problem.rows.standardized(columns.centre, columns.unit, problem.intercept)
    sizes = np.append(columns.moments, 1.0) if problem.intercept else columns.moments
    scale = sizes ** (_recipe.METHOD.scale_power / 2)
    ellipsoid = None
    if plan.privacy:
        norm = private_norm(table, scale, queries.pop().noise_multiplier, source)
        radius = plan.radius * problem.loss.lipschitz * norm
        ellipsoid = Ellipsoid(np.tile(scale, problem.outputs), radius)
    setting = Setting(
        dim=problem.dim,
        steps=plan.steps,
        batch_size=plan.batches.size,
        noise_multiplier=plan.privacy.noise_multiplier if plan.privacy else 0.0,
        domain=WholeSpace(),
        ellipsoid=ellipsoid,
        n_examples=problem.rows.shape[0],
        step_size=plan.step_size,
        sampling=plan.batches.sampling,
        # Shrinking large gradients alone would tilt a quantile towards the median.
        projection="rows" if problem.regression else "radial",
        schedule="linear",
    )
    gradients = GlmGradients(problem.loss, table, targets, problem.outputs)
    result = train(
        _recipe.METHOD, gradients, setting, plan.privacy, plan.delta, np.zeros(problem.dim),
        source, progress=progress,
    )  # fmt: skip
    weights = result.last.reshape(problem.outputs, -1) * unit
    dim = problem.rows.shape[1]
    coef = weights[:, :dim] / columns.unit
    intercept = np.full(problem.outputs, centre)
    if problem.intercept:
        intercept += weights[:, dim] - coef @ columns.centre
    return LinearModel(coef, intercept, unit, result.privacy)


def _columns(problem: Problem, queries: list[GaussianEvent], source: RandomSource) -> Columns:
    """What is to be known of the columns, from the first of the queries."""
    rows, intercept = problem.rows, problem.intercept
    if not queries:
        return moments.known_columns(rows, centred=intercept)
    if problem.bounds is not None:
        event = queries.pop(0)
        return moments.bounded_columns(rows, *problem.bounds, event, source, centred=intercept)
    asked = len(moments.COLUMNS if intercept else moments.SCALES)
    events, queries[:asked] = queries[:asked], []
    return moments.private_columns(rows, events, source)


def _target(
    problem: Problem, queries: list[GaussianEvent], source: RandomSource
) -> tuple[float, float]:
    """Centre and unit of a regression's target; 0 and 1 for classes."""
    if not problem.regression:
        return 0.0, 1.0
    column = DenseRows(problem.targets.reshape(-1, 1))
    if not queries:
        found = moments.known_columns(column, always=True)
    elif problem.target_bounds is not None:
        event = queries.pop(0)
        found = moments.bounded_columns(column, *problem.target_bounds, event, source, always=True)
    else:
        events, queries[: len(moments.TARGET)] = queries[: len(moments.TARGET)], []
        found = moments.private_columns(column, events, source, always=True)
    return float(found.centre[0]) if problem.intercept else 0.0, float(found.unit[0])
