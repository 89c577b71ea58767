"""Private minimisation: the loop of Algorithms 1 and 2, once for every method."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from privagrad._internal import validate
from privagrad._internal.progress import track
from privagrad._internal.validate import Vector
from privagrad.geometry.domains import Domain, WholeSpace
from privagrad.geometry.ellipsoid import PROJECTIONS, Ellipsoid, Projection
from privagrad.glm.gradients import GlmGradients
from privagrad.glm.losses import Loss
from privagrad.glm.rows import as_rows, as_targets
from privagrad.methods import METHODS, SCHEDULES, Method, Oracle, Schedule, Setting
from privagrad.methods.oracle import Diagnostics, GradientOracle
from privagrad.privacy.accounting import PrivacyPlan, PrivacyReport
from privagrad.privacy.events import GaussianEvent, relation_of
from privagrad.privacy.noise import RandomSource, RandomState, random_source
from privagrad.privacy.sampling import SAMPLINGS, Rows, Sampling, batches
from privagrad.queries.columns import query_events
from privagrad.queries.moments import SCALES, known_moments, private_moments, shaped_ellipsoid

Callback = Callable[[int, Vector], object]


@dataclass(frozen=True)
class Result:
    """Where a run ended.

    Attributes
    ----------
    x : the suffix average, what every method returns by default
    last : the last iterate
    average : mean of all iterates x_1 ... x_T, what Algorithms 1 and 2 return
    suffix_average : mean of the last half of the iterates
    privacy : what it cost
    diagnostics : counts for debugging, NOT private
    """

    last: Vector
    average: Vector
    suffix_average: Vector
    privacy: PrivacyReport
    diagnostics: Diagnostics = field(repr=False)

    @property
    def x(self) -> Vector:
        return self.suffix_average


def minimize(
    loss: str | Loss,
    X: Any,
    y: ArrayLike | None = None,
    *,
    method: str | Method = "pagan",
    epsilon: float | None = None,
    delta: float = 1e-5,
    ellipsoid: Ellipsoid | None = None,
    domain: Domain | None = None,
    batch_size: int | None = None,
    steps: int | None = None,
    step_size: float | None = None,
    schedule: Schedule = "constant",
    sampling: Sampling = "poisson",
    projection: Projection = "radial",
    public: tuple[Any, ArrayLike | None] | None = None,
    x0: ArrayLike | None = None,
    random_state: RandomState = None,
    callback: Callback | None = None,
    progress: bool | None = None,
    threads: int | None = None,
) -> Result:
    """Minimise the mean of F(x; z_i) over a domain under differential privacy.

    Parameters
    ----------
    loss : "absolute", "logistic", "hinge", "huber", "quantile", "linear", or a `Loss`
    X : array, CSR matrix, or pandas or Polars frame of numbers, of shape (n, d)
    y : targets of shape (n,); None for the linear loss; classes 0, 1, 2, ... for the losses of
        several classes, of which the highest is taken as public
    method : "pagan", "pasan", "dp-adagrad", "dp-sgd", the non-private "adagrad", "sgd", any other
        name of `privagrad.methods.METHODS`, or a method object with its own settings
    epsilon, delta : the budget; ``epsilon=float("inf")`` means no noise and no clipping
    ellipsoid : what gradients are bounded to, and the shape of the noise. Methods with A = I take
        its radius alone. Its scale and radius must not come from these rows unless privately; with
        None they come from `public` rows, or else from two queries paid out of epsilon.
    domain : the set to optimise over, default `WholeSpace()`
    batch_size : expected rows a step, default max(√n, n/100)
    steps : default (n / batch_size)², as in Lemma 1
    step_size : α; default diam_2 of the domain for PASAN, diam_∞ for AdaGrad and PAGAN
    schedule : "constant", or "linear": α falls in a line towards 0
    sampling : "poisson", "with_replacement" (the paper's) or "without_replacement"
    projection : "radial"; "euclidean" for the paper's π_A; "rows" shrinks a row by what the
        largest possible slope would need, so that quantiles and probabilities keep their balance
    public : (X, y) of rows that need no protection, for the ellipsoid and for the methods that
        learn from them
    x0 : where to start, default the domain's point next to 0
    random_state : None for the secure source; a seed makes a run repeatable and NOT private
    callback : called as ``callback(k, x)`` after step k = 1, 2, ...; x is the loop's own array,
        copy what you keep. A true return value ends the run, which still costs its whole plan:
        when it ends depends on the rows. For a cheaper run give fewer `steps`.
    progress : a bar: None after two seconds on a terminal, False never, True always
    threads : default all processors; the result does not depend on it

    Returns
    -------
    Result
        ``x``, ``last``, ``average``, ``suffix_average``, ``privacy``.

    Guarantees
    ----------
    All iterates together satisfy ``result.privacy``. The number of rows n is public.
    """
    rule = method if isinstance(method, Method) else METHODS[_known(method)]
    validate.choice("sampling", sampling, SAMPLINGS)
    validate.choice("projection", projection, PROJECTIONS)
    validate.choice("schedule", schedule, SCHEDULES)
    rows = as_rows(X)
    kind = loss if isinstance(loss, Loss) else Loss(loss)
    if rule.one_shot and kind.multiclass:
        raise ValueError(
            f"Expected a loss of one margin for {rule.name!r}, which perturbs a minimiser; found "
            f"{kind.name!r}: use 'pagan' or 'pasan'."
        )
    gradients = GlmGradients.of(kind, rows, y)
    n, dim = rows.shape[0], gradients.dim
    domain = WholeSpace() if domain is None else domain
    if rule.one_shot:
        batch_size, steps, sampling = n, 1, "poisson"
    batch_size = _batch_size(batch_size, n)
    steps = validate.integer("steps", round((n / batch_size) ** 2) if steps is None else steps)
    step_size = _step_size(step_size, rule, domain, dim)
    x = domain.project(np.zeros(dim) if x0 is None else validate.vector("x0", x0, dim=dim))
    shown = _public_gradients(rule, kind, public, gradients)
    source = random_source(random_state)

    plan = None
    if _is_private(rule, epsilon):
        budget, delta = float(epsilon or 0), validate.delta_of(delta, n)
        queries: list[GaussianEvent] = []
        if ellipsoid is None and shown is None:
            queries = query_events(SCALES, budget, delta, relation_of(sampling))
        *others, training = rule.events(budget, n, batch_size, steps, sampling)
        plan = PrivacyPlan.calibrate_event(training, budget, delta, [*queries, *others])
        if ellipsoid is None:
            known = known_moments(shown.rows) if shown else private_moments(rows, queries, source)
            moments = np.tile(known, gradients.outputs)
            ellipsoid = shaped_ellipsoid(moments, kind.lipschitz, rule.scale_power)
        ellipsoid = rule.ellipsoid(_given_ellipsoid(ellipsoid, dim))
    setting = Setting(
        dim,
        steps,
        batch_size,
        plan.noise_multiplier if plan else 0.0,
        domain,
        ellipsoid,
        shown,
        n,
        step_size,
        float(epsilon) if plan and epsilon else math.inf,
        sampling,
        projection,
        schedule,
    )
    return train(rule, gradients, setting, plan, delta, x, source, callback, progress, threads)


def train(
    method: Method,
    gradients: GlmGradients,
    setting: Setting,
    plan: PrivacyPlan | None,
    delta: float,
    x: Vector,
    source: RandomSource,
    callback: Callback | None = None,
    progress: bool | None = None,
    threads: int | None = None,
) -> Result:
    """Move `x` in place through all steps of the setting; without a plan, without privacy.

    The plan's last event is this training; those before it have been released by the caller.
    """
    drawn = batches(
        setting.sampling, setting.n_examples, setting.batch_size, setting.steps, source.sampler
    )
    drawn = track(drawn, setting.steps, method.name, progress)
    with _pool(threads) as pool:
        oracle = GradientOracle(gradients, setting, source, pool)
        averages = descend(method, oracle, drawn, x, setting, callback)
    return Result(
        last=x,
        average=averages[0],
        suffix_average=averages[1],
        privacy=_report(plan, delta, setting.sampling, source),
        diagnostics=oracle.diagnostics,
    )


def descend(
    method: Method,
    oracle: Oracle,
    drawn: Iterator[Rows],
    x: Vector,
    setting: Setting,
    callback: Callback | None = None,
) -> tuple[Vector, Vector]:
    """Move `x` in place through the batches; the average and the suffix average."""
    state = method.start(setting)
    project, halfway = setting.domain.project_into, setting.steps // 2
    total = np.zeros_like(x)
    before, skipped = np.zeros_like(x), 0
    done = 0
    for batch in drawn:
        gradient = method.gradient(state, oracle, x, batch)
        metric = method.step(state, x, gradient, setting.step_size_at(done))
        project(x, x, metric)
        total += x
        done += 1
        if done == halfway:
            before, skipped = total.copy(), done
        if callback is not None and callback(done, x):
            break
    return total / done, (total - before) / (done - skipped)


def _known(name: object) -> str:
    return validate.choice("method", name, METHODS)


def _public_gradients(
    method: Method, loss: Loss, public: tuple[Any, Any] | None, private: GlmGradients
) -> GlmGradients | None:
    if public is None:
        if method.needs_public:
            raise ValueError(
                f"Expected public=(X, y) for {method.name!r}, found None: give rows that need no "
                "protection, from the same source as the private ones."
            )
        return None
    rows = as_rows(public[0])
    if rows.shape[1] != private.rows.shape[1]:
        raise ValueError(
            f"Expected public rows of {private.rows.shape[1]} columns, found {rows.shape[1]}."
        )
    targets = loss.targets(as_targets(public[1]), rows.shape[0])
    return GlmGradients(loss, rows, targets, private.outputs)


def _is_private(method: Method, epsilon: float | None) -> bool:
    if method.shape == "none":
        if epsilon is not None and not math.isinf(epsilon):
            raise ValueError(
                f"Expected epsilon=inf for the non-private method {method.name!r}, found "
                f"epsilon={epsilon!r}. Private are 'dp-sgd', 'dp-adagrad', 'pasan' and 'pagan'."
            )
        return False
    if epsilon is None:
        raise ValueError(
            f"Expected a budget epsilon for the private method {method.name!r}, found None. "
            "Give for example epsilon=1.0, or float('inf') for no privacy."
        )
    return not math.isinf(validate.positive("epsilon", epsilon, allow_inf=True))


def _given_ellipsoid(ellipsoid: Ellipsoid, dim: int) -> Ellipsoid:
    if not isinstance(ellipsoid, Ellipsoid):
        raise TypeError(
            f"Expected an Ellipsoid of dimension {dim}, or None to learn one; found {ellipsoid!r}."
        )
    if ellipsoid.dim != dim:
        raise ValueError(f"Expected an ellipsoid of dimension {dim}, as x; found {ellipsoid.dim}.")
    return ellipsoid


def _batch_size(given: int | None, n: int) -> int:
    wanted = round(max(math.sqrt(n), n / 100)) if given is None else given
    batch_size = validate.integer("batch_size", wanted)
    if batch_size > n:
        raise ValueError(
            f"Expected batch_size <= {n}, the rows of X; found batch_size={batch_size}."
        )
    return batch_size


def _step_size(given: float | None, method: Method, domain: Domain, dim: int) -> float:
    if given is not None:
        return validate.positive("step_size", given)
    default = method.default_step_size(domain, dim)
    if not 0 < default < math.inf:
        raise ValueError(
            f"Expected a step_size: {method.name!r} has no default on {domain!r}. Give one, or for "
            "'pasan', 'adagrad' and 'pagan' a bounded domain, for example domain=Box(-1, 1)."
        )
    return default


def _report(
    plan: PrivacyPlan | None,
    delta: float,
    sampling: Sampling | None,
    source: RandomSource,
) -> PrivacyReport:
    if plan is None:
        relation = relation_of(sampling or "poisson")
        return PrivacyReport(math.inf, delta, relation, sampling, "none", (), source.seeded)
    # A run that a callback stopped costs all of it: the time of the stop depends on the releases.
    return PrivacyReport(
        plan.epsilon(delta),
        delta,
        plan.relation,
        plan.events[-1].sampling,
        plan.accountant,
        plan.events,
        source.seeded,
    )


@contextmanager
def _pool(threads: int | None) -> Iterator[Executor | None]:
    count = _processors() if threads is None else validate.integer("threads", threads)
    if count == 1:
        yield None
        return
    with ThreadPoolExecutor(count) as pool:
        yield pool


def _processors() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
