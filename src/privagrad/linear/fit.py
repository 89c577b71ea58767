"""One private fit of a linear model: scales of columns and target, bound, training."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from privagrad._internal.validate import Integers, Vector
from privagrad.geometry.domains import WholeSpace
from privagrad.geometry.ellipsoid import Ellipsoid
from privagrad.glm.examples import Examples, PartitionedExamples, in_memory, targets_as_rows
from privagrad.glm.gradients import GlmGradients, LinearGradients
from privagrad.glm.losses import Loss
from privagrad.glm.partitioned import PartitionedGradients
from privagrad.glm.rows import DenseRows
from privagrad.linear import recipe
from privagrad.linear.least_squares import fit_squares
from privagrad.linear.plan import Plan
from privagrad.linear.problem import Bounds, Problem
from privagrad.linear.uncertainty import (
    CoefficientNoise,
    NoisySteps,
    coefficient_noise,
    curvature_is_affordable,
    largest_variances,
    weight_covariance,
)
from privagrad.linear.whitening import Whitening, learned_whitening, whitened
from privagrad.methods import Setting
from privagrad.methods._base import Gradients
from privagrad.methods.loop import train
from privagrad.methods.users import UserGradients
from privagrad.privacy.accounting import PrivacyReport
from privagrad.privacy.releases import Releases
from privagrad.queries import moments
from privagrad.queries.calibration import Calibration, calibrate, class_shares
from privagrad.queries.columns import FeatureTable, Share, private_norm
from privagrad.queries.curvature import CURVATURE, private_curvature
from privagrad.queries.evaluation import EVALUATION, PredictedExamples, evaluate
from privagrad.queries.figures import Evaluation
from privagrad.queries.moments import ColumnQueries, Columns

_LARGEST_WEIGHT = 50.0
"""The largest ratio of balanced weights of classes."""

_LARGEST_RATIO = 1e12
_NO_UNIT = 2.0**-40
"""Of a target whose scale noise hides: predictions are 0, rather than noise times a guess."""


@dataclass(frozen=True)
class Trace:
    """How a fit went, from its private releases alone.

    Attributes
    ----------
    columns : Columns
        What was learned of the columns.
    ellipsoid : Ellipsoid or None
        The set that gradients of standardised columns were bounded to, where these are whitened
        those of the whitened ones; None: there were none, or no bound.
    evaluation : Evaluation or None
        How well the rows are fitted; None where that was not asked.
    factor : float
        What the trained weights were multiplied by to make margins log-odds; 1 where they are not.
    scale : tuple of two floats
        Centre and unit of the target; 0 and 1 for classes.
    """

    columns: Columns
    ellipsoid: Ellipsoid | None
    evaluation: Evaluation | None
    factor: float
    scale: tuple[float, float]


@dataclass(frozen=True)
class LinearModel:
    """In original units: margins are X @ coef + intercept; `unit` is that of the target.

    `noise` is an upper bound where no release tells how training pulls it back.
    """

    coef: NDArray[np.float64]
    intercept: Vector
    unit: float
    privacy: PrivacyReport
    trace: Trace
    noise: CoefficientNoise


@dataclass(frozen=True)
class _Standardized:
    """A problem in standardised columns and targets, and what leads back to original units.

    `gradients` are of the rows that queries see, `trained` of all rows, averaged over each user's.
    Rows are whitened after they were standardised, if there is a `whitening`.
    """

    gradients: GlmGradients | PartitionedGradients
    trained: Gradients
    columns: Columns
    centre: float
    unit: float
    whitening: Whitening | None

    @property
    def row_norm(self) -> float:
        """The root mean square of the rows' norms, as far as the moments tell."""
        constant = self.gradients.examples.shape[1] - self.columns.unit.size
        return math.sqrt(max(float(self.columns.moments.sum()) + constant, 1.0))

    def unwhitened(self, weights: Vector) -> NDArray[np.float64]:
        """Weights of standardised columns, of shape (outputs, columns)."""
        matrix = weights.reshape(self.gradients.outputs, -1)
        return matrix if self.whitening is None else self.whitening.weights(matrix)

    def original(self, weights: Vector) -> tuple[NDArray[np.float64], Vector]:
        """Coefficients and intercepts of columns and targets in their own units."""
        matrix = self.unwhitened(weights) * self.unit
        columns, dim = self.columns, self.columns.unit.size
        coef = matrix[:, :dim] / columns.unit
        if matrix.shape[1] == dim:
            return coef, np.zeros(len(matrix)) + self.centre
        return coef, matrix[:, dim] - coef @ columns.centre + self.centre


def run_fit(
    problem: Problem, plan: Plan, releases: Releases, progress: bool | None = None
) -> LinearModel:
    """Make the plan's releases, and compute the model from them."""
    everything, problem = problem, problem.one_row_a_user
    class_weights = _class_weights(problem, releases)
    weighted = _weighted(everything, class_weights)
    weight = recipe.mean_weight(weighted.loss.ratio)
    evenness = recipe.evenness(plan.relative_noise / weight)
    task = _standardize(weighted, problem, releases, evenness)
    dim, norm, ellipsoid, noise = problem.facts.dim, task.row_norm, None, 0.0
    if not plan.privacy.unprotected:
        scale = np.ones(task.gradients.examples.shape[1])
        norm = private_norm(task.gradients.rows, scale, releases, moments.NORMS.purpose, guess=norm)
    if plan.from_moments or (problem.squares and plan.privacy.unprotected):
        return _from_moments(problem, task, norm, releases)
    if not plan.privacy.unprotected:
        ellipsoid = Ellipsoid.ball(dim, plan.radius * problem.loss.lipschitz * norm)
        noise = plan.privacy.noise_multiplier * ellipsoid.radius / plan.batches.batch_size
    setting = Setting(
        dim,
        plan.batches,
        WholeSpace(),
        plan.privacy,
        ellipsoid,
        step_size=recipe.step_size(
            recipe.weighted_reach(plan.reach, weight),
            noise,
            norm,
            plan.batches.steps,
            recipe.largest_step(problem.loss),
        ),
        # Shrinking large gradients alone would tilt a quantile towards the median.
        projection="rows" if problem.loss.regression else "radial",
        schedule="linear",
    )
    x = np.zeros(dim)
    result = train(recipe.METHOD, task.trained, setting, releases, x, progress=progress)
    found = _calibration(problem, task.gradients, result.last, class_weights, releases)
    weights = _moved(problem, found.factor * result.last, found.shifts)
    trace = _trace(problem, task, weights, ellipsoid, found.factor, releases)
    covariance = np.zeros(dim)
    if ellipsoid is not None:
        covariance = _covariance(task, setting, ellipsoid, result.last, norm, releases)
    if task.whitening is not None:
        covariance = task.whitening.covariance(covariance, problem.outputs)
    trained = task.unwhitened(result.last)
    spread = coefficient_noise(covariance, trained, task.columns, task.unit, found)
    return LinearModel(*task.original(weights), task.unit, releases.report(), trace, spread)


def _from_moments(
    problem: Problem, task: _Standardized, norm: float, releases: Releases
) -> LinearModel:
    """The model of least squares from second moments."""
    examples, users = task.gradients.examples, None
    if isinstance(task.trained, UserGradients) and isinstance(task.trained.rows, GlmGradients):
        examples, users = task.trained.rows.examples, task.trained.users
    weights, covariance = fit_squares(examples, norm, releases, users)
    trace = _trace(problem, task, weights, None, 1.0, releases)
    spread = coefficient_noise(covariance, weights[None], task.columns, task.unit)
    return LinearModel(*task.original(weights), task.unit, releases.report(), trace, spread)


def _trace(
    problem: Problem, task: _Standardized, weights: Vector, ellipsoid: Ellipsoid | None,
    factor: float, releases: Releases,
) -> Trace:  # fmt: skip
    """How the fit went, with an evaluation if the plan has one."""
    asked = None
    if EVALUATION.purpose in releases.plan:
        asked = evaluate(_predicted(problem, task, weights), releases)
    return Trace(task.columns, ellipsoid, asked, factor, (task.centre, task.unit))


def _covariance(
    task: _Standardized, setting: Setting, ellipsoid: Ellipsoid, weights: Vector, norm: float,
    releases: Releases,
) -> NDArray[np.float64]:  # fmt: skip
    """The covariance of the trained weights; for very many, bounds on their variances."""
    steps = NoisySteps.of(setting)
    # Categories that are discovered may be more than the plan expected.
    outputs, n = task.gradients.outputs, setting.batches.n_examples
    affordable = curvature_is_affordable(n, weights.size, outputs)
    if CURVATURE.purpose in releases.plan and affordable:
        found = private_curvature(task.gradients, weights, ellipsoid, norm, releases)
        return weight_covariance(steps, found)
    moments = np.ones(weights.size // outputs)
    moments[: task.columns.moments.size] = task.columns.moments
    return largest_variances(steps, moments, outputs)


def _class_weights(problem: Problem, releases: Releases) -> Vector | None:
    """The weights of the classes, the largest being 1; None where all are."""
    given = problem.class_weights
    if given is None:
        return None
    if isinstance(given, str):
        shares = class_shares(problem.examples, max(problem.outputs, 2), releases)
        given = 1 / np.maximum(shares, shares.max() / _LARGEST_WEIGHT)
    return np.asarray(np.maximum(given / given.max(), 1 / _LARGEST_RATIO))


def _weighted(problem: Problem, weights: Vector | None) -> Problem:
    """With two classes the loss has the weights. With more, margins are shifted at the end."""
    if weights is None or problem.outputs > 1:
        return problem
    ratio = float(np.clip(weights[0] / weights[1], 1 / _LARGEST_RATIO, _LARGEST_RATIO))
    return replace(problem, loss=Loss(problem.loss.name, ratio))


def _calibration(
    problem: Problem, gradients: LinearGradients, weights: Vector, classes: Vector | None,
    releases: Releases,
) -> Calibration:  # fmt: skip
    """The factor and the shifts that make margins log-odds, and count the weights of classes."""
    shifted = problem.outputs > 1 and classes is not None
    # Without bounds on gradients, margins of a likelihood are log-odds.
    if not problem.calibrated or (releases.plan.unprotected and not shifted):
        return Calibration(1.0, np.zeros(problem.outputs))
    found = calibrate(gradients, weights, releases)
    shifts = found.shifts if classes is None or not shifted else found.shifts + np.log(classes)
    if problem.loss.name in ("logistic", "softmax"):
        return replace(found, shifts=shifts)
    return Calibration(1.0, shifts / found.factor)


def _moved(problem: Problem, weights: Vector, shifts: Vector) -> Vector:
    """The weights with these shifts of the intercepts, if there are any."""
    matrix = weights.reshape(problem.outputs, -1).copy()
    if problem.intercept:
        matrix[:, -1] += shifts
    return matrix.ravel()


def _predicted(problem: Problem, task: _Standardized, weights: Vector) -> PredictedExamples:
    """The rows with what the model predicts, to be evaluated."""
    examples, scale = task.gradients.examples, (task.centre, task.unit)
    return PredictedExamples(examples, problem.loss, problem.outputs, weights, scale)


def _standardize(
    problem: Problem, asked: Problem, releases: Releases, evenness: float
) -> _Standardized:
    """Learn columns and target from what queries see, and bring all rows into their units."""
    columns = _columns(asked, releases, evenness)
    centre, unit = _target(asked, releases)
    target = (centre, unit) if problem.loss.regression else None
    given = columns.centre, columns.unit, problem.intercept
    examples = problem.examples.mapped(_in_units, *given, target)
    seen = examples
    if problem.users is not None:
        seen = in_memory(examples, "users").take(problem.users.chosen)
    whitening = learned_whitening(seen, columns, releases)
    if whitening is not None:
        examples = examples.mapped(whitened, whitening.columns, whitening.matrix)
    examples, scale = examples.kept(), (centre, unit)
    if isinstance(examples, PartitionedExamples):
        parts = PartitionedGradients(problem.loss, examples, problem.outputs)
        return _Standardized(parts, parts, columns, *scale, whitening)
    gradients = GlmGradients(
        problem.loss, examples.rows, examples.targets, problem.outputs, examples.left_out
    )
    if problem.users is None:
        return _Standardized(gradients, gradients, columns, *scale, whitening)
    trained = UserGradients(gradients, problem.users)
    seen_gradients = gradients.take(problem.users.chosen)
    return _Standardized(seen_gradients, trained, columns, *scale, whitening)


def _in_units(
    examples: Examples, centre: Vector, unit: Vector, intercept: bool,
    target: tuple[float, float] | None,
) -> Examples:  # fmt: skip
    """Rows, and numbers as targets, in these units; rows that are left out become zeros."""
    targets, left_out = examples.targets, examples.left_out
    if target is not None:
        with np.errstate(over="ignore"):  # a warning would tell of a private target
            targets = (targets - target[0]) / target[1]
    table = examples.rows.standardized(centre, unit, intercept)
    if left_out is not None:
        table = table.without(left_out)
        targets = np.where(left_out, 0.0, targets)
    return Examples(table, targets, left_out)


def _columns(problem: Problem, releases: Releases, evenness: float) -> Columns:
    """Centres, units and moments of the columns."""
    rows, asked = problem.examples.rows, problem.facts.column_queries
    if releases.plan.unprotected:
        known = in_memory(problem.examples, "epsilon=inf").rows
        return moments.known_columns(known, problem.intercept, blanks=problem.blanks)
    if not isinstance(asked, ColumnQueries):
        return _learned(
            rows, asked, problem.bounds, releases, problem.intercept, blanks=problem.blanks
        )
    return moments.private_columns(
        rows, asked, releases, limits=problem.limits, blanks=problem.blanks, evenness=evenness
    )


def _target(problem: Problem, releases: Releases) -> tuple[float, float]:
    """Centre and unit of a regression's target; 0 and 1 for classes."""
    asked = problem.facts.target_queries
    if asked is None:
        return 0.0, 1.0
    # Unknown targets are NaN, and what is not finite adds nothing to a query.
    column = problem.examples.mapped(targets_as_rows).rows
    if isinstance(column, DenseRows) and releases.plan.unprotected:
        known = column.array[~np.isnan(column.array[:, 0])]
        found = moments.known_columns(DenseRows(known), always=True)
    else:
        found = _learned(column, asked, problem.target_bounds, releases, always=True)
    if not found.found:
        return 0.0, _NO_UNIT
    return float(found.centre[0]) if problem.intercept else 0.0, float(found.unit[0])


def _learned(
    rows: FeatureTable,
    asked: ColumnQueries | Share,
    bounds: Bounds | None,
    releases: Releases,
    centred: bool = True,
    always: bool = False,
    blanks: Integers | None = None,
) -> Columns:
    if isinstance(asked, ColumnQueries):
        return moments.private_columns(rows, asked, releases, always)
    if bounds is None:
        raise ValueError(f"Expected bounds of the columns for the query {asked.purpose!r}.")
    return moments.bounded_columns(rows, bounds, releases, asked.purpose, centred, always, blanks)
