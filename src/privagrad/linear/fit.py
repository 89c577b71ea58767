"""One private fit of a linear model: scales of columns and target, bound, training; one budget."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from privagrad._internal import validate
from privagrad._internal.validate import Vector
from privagrad.geometry.domains import Domain, WholeSpace
from privagrad.geometry.ellipsoid import Ellipsoid
from privagrad.glm.gradients import GlmGradients
from privagrad.glm.losses import Loss
from privagrad.glm.rows import DenseRows, SparseRows
from privagrad.linear import recipe
from privagrad.linear.repeats import repeated_spread
from privagrad.methods import Method, Oracle, Setting
from privagrad.methods._base import Shape
from privagrad.methods.minimize import train
from privagrad.privacy.accounting import PrivacyPlan, PrivacyReport
from privagrad.privacy.events import Event, GaussianEvent
from privagrad.privacy.noise import RandomSource
from privagrad.privacy.sampling import Rows
from privagrad.queries import moments
from privagrad.queries.columns import Share, private_norm, query_events
from privagrad.queries.evaluation import Evaluation, evaluate
from privagrad.queries.moments import Columns

Bounds = tuple[Vector, Vector]
_CHECKPOINTS = 10


@dataclass(frozen=True)
class Problem:
    """What is fitted. `targets` are numbers, signs or class numbers, as the loss wants them.

    Rows in `left_out`, whose targets are unknown, count as rows but teach nothing. `groups` are
    columns, from the first to before the last, of which a row has at most one: one-hot. `limits`
    are public: what no entry of a column exceeds in size, where that is known.
    """

    loss: Loss
    rows: DenseRows | SparseRows
    targets: Vector
    outputs: int = 1
    intercept: bool = True
    bounds: Bounds | None = None
    target_bounds: Bounds | None = None
    left_out: NDArray[np.bool_] | None = None
    groups: tuple[tuple[int, int], ...] = ()
    limits: Vector | None = None

    @property
    def regression(self) -> bool:
        return is_regression(self.loss)

    @property
    def dim(self) -> int:
        return (self.rows.shape[1] + self.intercept) * self.outputs

    @property
    def facts(self) -> PublicFacts:
        return PublicFacts(
            self.rows.shape[0],
            self.dim,
            isinstance(self.rows, SparseRows),
            self.regression,
            self.intercept,
            self.bounds is not None,
            self.target_bounds is not None,
        )


@dataclass(frozen=True)
class PublicFacts:
    """What a plan needs to know of a problem: all of it public."""

    n: int
    dim: int
    sparse: bool
    regression: bool
    intercept: bool
    bounded: bool
    target_bounded: bool

    def queries(self) -> list[Share]:
        """What is asked before the training, over all rows."""
        if self.bounded:
            shares = list(moments.BOUNDED_COLUMNS)
        else:
            shares = list(moments.COLUMNS if self.intercept else moments.SCALES)
        if self.regression:
            shares += moments.BOUNDED_TARGET if self.target_bounded else moments.TARGET
        return shares + list(moments.NORMS)


@dataclass(frozen=True)
class Choices:
    """What users may set instead of the recipe."""

    steps: int | None = None
    batch_size: int | None = None
    step_size: float | None = None
    radius: float | None = None
    method: str = "pagan"

    def __post_init__(self) -> None:
        # Products of NumPy's small integers wrap around.
        for name in ("steps", "batch_size"):
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, validate.integer(name, value))


@dataclass(frozen=True)
class Plan:
    """A fit before it happens: what it will release. Without `privacy`, without noise.

    With an `evaluation` the rows are asked once more at the end, how well they are fitted.
    """

    method: str
    steps: int
    batches: recipe.Batches
    queries: tuple[GaussianEvent, ...]
    privacy: PrivacyPlan | None
    delta: float
    relative_noise: float
    step_size: float
    radius: float
    evaluation: GaussianEvent | None = None


@dataclass(frozen=True)
class Trace:
    """How a fit went, from its private releases alone.

    Attributes
    ----------
    columns : what was learned of the columns
    ellipsoid : what gradients of standardised columns were bounded to; None without privacy
    noise, intercept_noise : so much of the coefficients is noise, in standard deviations: over
        repeated trainings on made-up rows; for very many columns, what all steps' noise adds up
        to where the data do not pull it back
    evaluation : what the rows say of it
    """

    columns: Columns
    ellipsoid: Ellipsoid | None
    noise: NDArray[np.float64]
    intercept_noise: Vector
    evaluation: Evaluation | None


@dataclass(frozen=True)
class LinearModel:
    """In original units: margins are X @ coef + intercept; `unit` is that of the target."""

    coef: NDArray[np.float64]
    intercept: Vector
    unit: float
    privacy: PrivacyReport
    trace: Trace | None = None


def is_regression(loss: Loss) -> bool:
    return loss.name in ("quantile", "huber")


def plan_fit(
    facts: PublicFacts,
    epsilon: float,
    delta: float,
    choices: Choices,
    also: Iterable[Event] = (),
    evaluation: Share | None = None,
) -> Plan:
    """How many steps of how many rows, and their noise, from public facts alone.

    `also` are further releases that the same budget pays for.
    """
    n, dim = facts.n, facts.dim
    steps = recipe.STEPS if choices.steps is None else choices.steps
    batches = recipe.batches(n, dim, facts.sparse, steps, choices.batch_size)
    asked: GaussianEvent | None = None
    queries: list[GaussianEvent] = []
    privacy, noise = None, 0.0
    if not math.isinf(epsilon):
        queries = query_events(facts.queries(), epsilon, delta, "zero-out")
        others: list[Event] = [*also, *queries]
        if evaluation is not None:
            [asked] = query_events([evaluation], epsilon, delta, "zero-out")
            others.append(asked)
        training = GaussianEvent(1.0, steps, batches.sampling, n, batches.size, "gradients")
        privacy = PrivacyPlan.calibrate_event(training, epsilon, delta, others)
        noise = recipe.relative_noise(privacy.noise_multiplier, batches.size, steps, dim)
    step_size = recipe.step_size(noise, facts.regression, choices.method, dim)
    return Plan(
        choices.method,
        steps,
        batches,
        tuple(queries),
        privacy,
        delta,
        noise,
        step_size if choices.step_size is None else choices.step_size,
        recipe.RADIUS if choices.radius is None else choices.radius,
        asked,
    )


def run_fit(
    problem: Problem, plan: Plan, source: RandomSource, progress: bool | None = None
) -> LinearModel:
    """Make the plan's releases, and the model of them."""
    method = recipe.METHODS[plan.method]
    queries = list(plan.queries)
    columns = _columns(problem, queries, source)
    centre, unit = _target(problem, queries, source)
    targets = problem.targets
    if problem.regression:
        with np.errstate(over="ignore"):  # a warning would tell of a private target
            targets = (targets - centre) / unit
    table = problem.rows.standardized(columns.centre, columns.unit, problem.intercept)
    if problem.left_out is not None:
        table = table.without(problem.left_out)
        targets = np.where(problem.left_out, 0.0, targets)
    sizes = np.append(columns.moments, 1.0) if problem.intercept else columns.moments
    scale = sizes ** (method.scale_power / 2)
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
    traced = _Traced(method) if plan.evaluation else None
    result = train(
        traced or method, gradients, setting, plan.privacy, plan.delta, np.zeros(problem.dim),
        source, progress=progress,
    )  # fmt: skip
    weights, trace = result.last, None
    if traced and plan.evaluation and plan.privacy and ellipsoid:
        asked = evaluate(
            gradients, ellipsoid, traced.path, problem.left_out, plan.evaluation, source
        )
        spread = repeated_spread(
            problem.loss, columns, problem.groups, isinstance(table, SparseRows),
            problem.intercept, method, setting, result.last,
        )  # fmt: skip
        if spread is None:
            noise = plan.privacy.noise_multiplier / plan.batches.size * ellipsoid.noise_std
            spread = np.sqrt(traced.gains) * noise
        weights = asked.factor * weights
        noises = asked.factor * spread.reshape(problem.outputs, -1) * unit
        coef_noise = noises[:, : columns.unit.size] / columns.unit
        squares = np.square(coef_noise) @ np.square(columns.centre)
        squares += np.square(noises[:, columns.unit.size :]).sum(axis=1)
        trace = Trace(columns, ellipsoid, coef_noise, np.sqrt(squares), asked)
    coef, intercept = _original(weights.reshape(problem.outputs, -1) * unit, columns)
    return LinearModel(coef, intercept + centre, unit, result.privacy, trace)


def _original(weights: NDArray[np.float64], columns: Columns) -> tuple[NDArray[np.float64], Vector]:
    """Coefficients and intercepts of columns in their own units."""
    dim = columns.unit.size
    coef = weights[:, :dim] / columns.unit
    if weights.shape[1] == dim:
        return coef, np.zeros(len(weights))
    return coef, weights[:, dim] - coef @ columns.centre


class _Traced(Method):
    """Another method, with notes: iterates on the way, and how far gradients moved the point."""

    name: ClassVar[str] = "fit"
    shape: ClassVar[Shape] = "ellipsoid"

    def __init__(self, method: Method) -> None:
        self.method, self.done = method, 0
        self.path: list[tuple[int, Vector]] = []
        self.gains: Any = 0.0

    def default_step_size(self, domain: Domain, dim: int) -> float:
        return self.method.default_step_size(domain, dim)

    def start(self, setting: Setting) -> Any:
        steps = np.linspace(0, setting.steps, min(_CHECKPOINTS, setting.steps) + 1)
        self.stops = set(np.rint(steps).astype(int).tolist())
        self.path.append((0, np.zeros(setting.dim)))
        return self.method.start(setting)

    def gradient(self, state: Any, oracle: Oracle, x: Vector, batch: Rows) -> Vector:
        return self.method.gradient(state, oracle, x, batch)

    def step(self, state: Any, x: Vector, gradient: Vector, step_size: float) -> Vector | None:
        before = x.copy()
        metric = self.method.step(state, x, gradient, step_size)
        # Both kinds of step move a coordinate by a multiple of its gradient.
        moved = np.divide(before - x, gradient, out=np.zeros_like(x), where=gradient != 0)
        self.gains = self.gains + np.square(moved)
        self.done += 1
        if self.done in self.stops:
            self.path.append((self.done, x.copy()))
        return metric


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
    found = moments.private_columns(rows, events, source)
    if problem.limits is None:
        return found
    return replace(found, unit=np.minimum(found.unit, problem.limits))


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
