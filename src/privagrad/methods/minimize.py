"""Private minimisation: from a loss, rows and a budget to the loop."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, TypedDict, Unpack

import numpy as np
from numpy.typing import ArrayLike

from privagrad._internal import validate
from privagrad._internal.validate import Vector
from privagrad.geometry.domains import Domain, WholeSpace
from privagrad.geometry.ellipsoid import PROJECTIONS, Ellipsoid, Projection
from privagrad.glm.examples import Examples, PartitionedExamples
from privagrad.glm.gradients import GlmGradients
from privagrad.glm.losses import Loss
from privagrad.glm.partitioned import PartitionedGradients
from privagrad.glm.rows import DenseRows, as_rows, as_targets, is_dask
from privagrad.glm.stored import is_stored
from privagrad.methods import METHODS, SCHEDULES, Method, Schedule, Setting
from privagrad.methods._base import EllipsoidRule
from privagrad.methods.correlation import correlated, require_one_ellipsoid
from privagrad.methods.loop import Callback, Result, train
from privagrad.methods.objective import Objective, ObjectiveGradients
from privagrad.methods.users import UserGradients, rows_of_users
from privagrad.privacy.accounting import PrivacyPlan
from privagrad.privacy.bands import Correlation
from privagrad.privacy.events import Release, relation_of, training_event
from privagrad.privacy.noise import Noise, RandomState, random_source
from privagrad.privacy.releases import Releases
from privagrad.privacy.sampling import SAMPLINGS, Batches, Sampling
from privagrad.privacy.users import (
    MOST_ROWS,
    UserRows,
    require_plain_shapes,
    require_same_order,
)
from privagrad.queries.columns import query_events
from privagrad.queries.moments import SCALES, known_moments, private_moments, shaped_ellipsoid

AnyGradients = GlmGradients | PartitionedGradients | ObjectiveGradients


class Options(TypedDict, total=False):
    """Keywords of `minimize` that few users need.

    Attributes
    ----------
    schedule : {"constant", "linear"}
        Whether the step size is constant, the default where one is given, or falls linearly towards
        0, the default where none is. Then ``x`` is the last iterate, else the suffix average.
    projection : {"radial", "euclidean", "rows"}
        How gradients are brought into the ellipsoid: "euclidean" is the paper's π_A; "rows"
        shrinks a row of a linear model as the largest possible slope requires, so that quantiles
        and probabilities are not biased.
    public : tuple (X, y) or Objective
        Examples that need no protection, for the ellipsoid and for the methods that learn from
        them.
    x0 : array of shape (d,)
        The starting point, by default the domain's point nearest to 0.
    callback : callable
        Called as ``callback(k, x)`` after step k = 1, 2, ...; x is the loop's own array, copy what
        you keep. A true return value ends the run, which still costs its whole plan: when it ends
        depends on the rows. For a cheaper run give fewer `steps`.
    progress : bool or None
        Whether to show a progress bar; None: after two seconds on a terminal.
    threads : int
        By default all processors; the result does not depend on it.
    noise : {"gaussian", "discrete"}
        Gaussian noise rounded to the grid, or an exact discrete Gaussian: slower, at the same
        cost, without any rounding in the noise.
    groups : sequence of shape (n,)
        The user of each row (of each example of an objective), any hashable values: privacy then
        protects users, each with all of their rows, and F is averaged over every user's rows first.
        Users are sampled instead of rows; their number is public, that of rows is not.
    max_rows_per_user : int
        With `groups`, how many rows of a user count, at most; of more, a random choice of them. It
        is public; by default 1024.
    correlation : "auto" or int
        Over how many steps b the noise is correlated, so that a part of it cancels in the sum of
        the steps; 1, the default, is independent noise. Rows then take turns: a step draws from one
        of b groups, by row number, each row b times as likely. "auto" takes the b with the least
        predicted error, from public numbers alone; with a small epsilon and small batches that is
        1, and for all methods but 'dp-sgd' it always is.
        It needs memory for b - 1 numbers of 4 bytes a coordinate.
    """

    schedule: Schedule
    projection: Projection
    public: tuple[Any, ArrayLike | None] | Objective | None
    x0: ArrayLike | None
    callback: Callback | None
    progress: bool | None
    threads: int | None
    noise: Noise
    groups: Any
    max_rows_per_user: int
    correlation: Correlation | None


def minimize(
    loss: str | Loss | Objective,
    X: Any = None,
    y: ArrayLike | None = None,
    *,
    method: str | Method = "pagan",
    epsilon: float | None = None,
    delta: float = 1e-5,
    ellipsoid: Ellipsoid | EllipsoidRule | None = None,
    domain: Domain | None = None,
    batch_size: int | None = None,
    steps: int | None = None,
    step_size: float | None = None,
    sampling: Sampling = "poisson",
    random_state: RandomState = None,
    **options: Unpack[Options],
) -> Result:
    """Minimise the mean of F(x; z_i) over a domain under differential privacy.

    Parameters
    ----------
    loss : str or Loss or Objective
        "absolute", "logistic", "hinge", "huber", "quantile", "linear", "softmax" or
        "multiclass-hinge" of a linear model of X and y; or an objective of your own, which has its
        own examples.
    X : array of shape (n, d)
        The rows of a linear model; also a CSR matrix, or a pandas or Polars frame of numbers. Rows
        that do not fit into memory: a mapped NumPy array, the path of a table of numbers (Parquet,
        Arrow, CSV, LIBSVM, or a folder of such files), or an Arrow data set. Rows on a cluster: a
        dask array or data frame of numbers.
    y : array of shape (n,)
        Targets; of a path or data set the name of the target. None for the linear loss; classes
        0, 1, 2, ... for the losses of several classes, of which the highest is taken as public.
    method : str or Method
        "pagan", "pasan", "dp-adagrad", "dp-sgd", the non-private "adagrad", "sgd", any other
        name of `privagrad.methods.METHODS`, or a method object with its own settings.
    epsilon : float
        The privacy budget; ``float("inf")`` means no noise and no clipping.
    delta : float
        The probability that the guarantee may fail.
    ellipsoid : Ellipsoid or callable
        The set that gradients are bounded to, and the shape of the noise. Methods with A = I take
        its radius alone. Its scale and radius must not come from these rows, except privately. A
        function of the private gradients released so far (a tuple of arrays, oldest first) chooses
        the ellipsoid A_k of each step, as Algorithms 1 and 2 do. With None it comes from `public`
        rows, or else from two queries paid out of epsilon.
    domain : Domain
        The set to optimise over, by default `WholeSpace()`.
    batch_size : int
        The expected number of rows (with `groups`, of users) in a step, by default max(√n, n/100).
    steps : int
        The number of steps, by default (n / batch_size)², as in Lemma 1.
    step_size : float
        α; by default diam_2 of the domain for PASAN, diam_∞ for AdaGrad and PAGAN, both falling
        linearly towards 0.
    sampling : {"poisson", "with_replacement", "without_replacement", "random_allocation"}
        How a step draws its rows; the paper's is with replacement. "random_allocation": every row
        is in exactly one step of an epoch, a random one; an epoch that is begun is paid for.
    random_state : int or Generator or None
        None for the secure source; a seed makes a run repeatable and NOT private.
    **options : Options
        schedule, projection, public, x0, callback, progress, threads, noise, groups,
        max_rows_per_user, correlation: see `Options`.

    Returns
    -------
    Result
        ``x``, ``last``, ``average``, ``suffix_average``, ``privacy``.

    Guarantees
    ----------
    All iterates together satisfy ``result.privacy``. The number of rows n is public; with `groups`
    n is the number of users, which is public, and the number of rows is not.
    """
    validate.known_options("minimize", options, Options.__annotations__)
    rule = method if isinstance(method, Method) else METHODS[_known(method)]
    validate.choice("sampling", sampling, SAMPLINGS)
    projection = options.get("projection", "radial")
    validate.choice("projection", projection, PROJECTIONS)
    schedule = options.get("schedule", "linear" if step_size is None else "constant")
    validate.choice("schedule", schedule, SCHEDULES)
    source = random_source(random_state, options.get("noise", "gaussian"))
    if options.get("groups") is not None and X is not None and not is_dask(X):
        require_plain_shapes(X, y)
        require_same_order(options["groups"], X, y)
    gradients, users = _gradients(loss, X, y, rule, projection, options.get("groups")), None
    if options.get("groups") is not None:
        most = options.get("max_rows_per_user", MOST_ROWS)
        users = rows_of_users(rule, options["groups"], gradients.n_examples, most, source)
    n = gradients.n_examples if users is None else users.count
    batches = _batches(rule, n, batch_size, steps, sampling, users)
    dim = gradients.dim
    domain = WholeSpace() if domain is None else domain
    step_size = _step_size(step_size, rule, domain, dim)
    x0 = options.get("x0")
    x = domain.project(np.zeros(dim) if x0 is None else validate.vector("x0", x0, dim=dim))
    public = _public(rule, options.get("public"), gradients)
    ellipsoid = _checked(ellipsoid, rule, dim)

    plan = PrivacyPlan((), unprotected=True)
    private, correlation = _is_private(rule, epsilon), options.get("correlation")
    if correlation not in (None, 1):
        require_one_ellipsoid(rule, private, batches, users, ellipsoid)
    if private:
        budget, delta = float(epsilon or 0), validate.delta_of(delta, n)
        learned = ellipsoid is None and public is None
        others = _other_events(rule, batches, budget, delta, learned)
        if correlation is not None:
            batches = correlated(rule, correlation, batches, (budget, delta), schedule, others)
        plan = _plan(rule, batches, budget, delta, others, users)
    releases = Releases(plan, source, delta)
    if not plan.unprotected and ellipsoid is None:
        learned_one = _learned_ellipsoid(rule, gradients, public, x, releases, users)
        ellipsoid = rule.ellipsoid(learned_one)
    setting = Setting(
        dim, batches, domain, plan, ellipsoid, public, step_size, projection, schedule
    )
    return train(
        rule, gradients if users is None else UserGradients(gradients, users), setting, releases, x,
        callback=options.get("callback"), progress=options.get("progress"),
        threads=options.get("threads"),
    )  # fmt: skip


def _known(name: object) -> str:
    return validate.choice("method", name, METHODS)


def _gradients(
    loss: str | Loss | Objective,
    X: Any,
    y: Any,
    rule: Method,
    projection: Projection,
    groups: Any = None,
) -> AnyGradients:
    """The gradients of a linear model, or of an objective of the user's own."""
    if isinstance(loss, (str, Loss)):
        kind = loss if isinstance(loss, Loss) else Loss(loss)
        if rule.one_shot and kind.multiclass:
            raise ValueError(
                f"Expected a loss of one margin for {rule.name!r}, which perturbs a minimiser; "
                f"found {kind.name!r}: use 'pagan' or 'pasan'."
            )
        if is_dask(X):
            _require_sums(rule, groups)
        opened = _opened(X, y)
        if isinstance(opened, PartitionedExamples):
            _require_sums(rule, groups)
            if y is None and (is_dask(X) or isinstance(X, np.ndarray)):
                kind.targets(None, 0)  # refused, unless the loss needs none
            return PartitionedGradients.of(kind, opened)
        if opened is None:
            rows, targets = as_rows(X), as_targets(y)
        else:
            rows, targets = opened.rows, opened.targets
        if groups is not None and targets is not None and len(targets) != rows.shape[0]:
            raise ValueError("Expected as many targets as rows, found another number of them.")
        return GlmGradients.of(kind, rows, targets)
    if not isinstance(loss, Objective):
        raise TypeError(
            "Expected the name of a loss, a Loss, or an objective with dim, n_examples and "
            f"per_example_gradients(x, rows); found {type(loss).__name__}."
        )
    if X is not None or y is not None:
        raise ValueError("Expected no X and y with an objective, which has its own examples.")
    if rule.one_shot:
        raise ValueError(
            f"Expected a loss of a linear model for {rule.name!r}, which perturbs its minimiser; "
            "found an objective: use 'pagan' or 'pasan'."
        )
    if projection == "rows":
        raise ValueError(
            "Expected projection 'radial' or 'euclidean' for an objective, found 'rows', which "
            "needs the rows of a linear model."
        )
    return ObjectiveGradients(loss)


def _opened(X: Any, y: Any) -> Examples | PartitionedExamples | None:
    """Rows that need not be in memory; None for those that are."""
    if isinstance(X, np.ndarray) and not is_stored(X):
        return None
    # Readers of files take time to load, which most calls do not need.
    from privagrad.data.opening import open_examples

    return open_examples(X, y)


def _require_sums(rule: Method, groups: Any) -> None:
    """Refuse what needs more of rows in partitions than sums over them."""
    if groups is not None:
        raise ValueError(
            "Expected rows in memory for users with several rows (groups=), found rows in "
            "partitions, which may part the rows of a user: load them into memory."
        )
    if rule.one_shot:
        raise ValueError(
            f"Expected rows in memory for {rule.name!r}, which minimises over all of them, found "
            "rows in partitions: use 'pagan' or 'pasan'."
        )


def _batches(
    rule: Method,
    n: int,
    batch_size: int | None,
    steps: int | None,
    sampling: Sampling,
    users: UserRows | None = None,
) -> Batches:
    if rule.one_shot:
        return Batches(n, n, 1, "poisson")
    wanted = round(max(math.sqrt(n), n / 100)) if batch_size is None else batch_size
    size = validate.integer("batch_size", wanted)
    if size > n:
        what = "rows of X" if users is None else "users in groups"
        raise ValueError(f"Expected batch_size <= {n}, the {what}; found batch_size={size}.")
    count = round((n / size) ** 2) if steps is None else steps
    return Batches(n, size, validate.integer("steps", count), sampling)


def _other_events(
    rule: Method, batches: Batches, epsilon: float, delta: float, learned: bool
) -> list[Release]:
    """What is released besides gradients: for a `learned` ellipsoid its queries."""
    queries: list[Release] = []
    if learned:
        relation = relation_of(batches.sampling or "poisson")
        queries += query_events(SCALES.shares, epsilon, delta, relation)
    return [*queries, *rule.other_events()]


def _plan(
    rule: Method,
    batches: Batches,
    epsilon: float,
    delta: float,
    others: list[Release],
    users: UserRows | None,
) -> PrivacyPlan:
    """What will be released."""
    training = rule.training(batches, epsilon)
    if not rule.one_shot and training != training_event(batches):
        raise ValueError(
            f"Expected {rule.name!r} to plan one release a step, {training_event(batches)}, found "
            f"{training}: methods over batches are charged for what the loop draws."
        )
    if users is not None:
        training, *others = (replace(event, unit="user") for event in (training, *others))
    return PrivacyPlan.calibrate_event(training, epsilon, delta, others)


def _learned_ellipsoid(
    rule: Method,
    gradients: AnyGradients,
    public: AnyGradients | None,
    x: Vector,
    releases: Releases,
    users: UserRows | None,
) -> Ellipsoid:
    """The ellipsoid by the second moments of the columns, or of an objective's gradients at x.

    Queries see one row of each user.
    """
    if isinstance(gradients, ObjectiveGradients):
        if isinstance(public, ObjectiveGradients):
            known = DenseRows(public.per_example(x, np.arange(public.n_examples)))
            return shaped_ellipsoid(known_moments(known), 1.0, rule.scale_power)
        table = gradients.at(x, None if users is None else users.chosen)
        return shaped_ellipsoid(private_moments(table, releases), 1.0, rule.scale_power)
    if isinstance(public, GlmGradients):
        moments = known_moments(public.rows)
    else:
        rows = gradients.rows if users is None else gradients.rows.take(users.chosen)
        moments = private_moments(rows, releases)
    tiled = np.tile(moments, gradients.outputs)
    return shaped_ellipsoid(tiled, gradients.loss.lipschitz, rule.scale_power)


def _public(method: Method, public: Any, private: AnyGradients) -> AnyGradients | None:
    """The gradients of public examples, of the same kind as the private ones."""
    if public is None:
        if method.needs_public:
            raise ValueError(
                f"Expected public=(X, y) for {method.name!r}, found None: give rows that need no "
                "protection, from the same source as the private ones."
            )
        return None
    if isinstance(private, ObjectiveGradients):
        if not isinstance(public, Objective) or public.dim != private.dim:
            raise ValueError(
                f"Expected public= to be an objective of dimension {private.dim} too, of examples "
                f"that need no protection; found {type(public).__name__}."
            )
        return ObjectiveGradients(public)
    rows = as_rows(public[0])
    if rows.shape[1] != private.rows.shape[1]:
        raise ValueError(
            f"Expected public rows of {private.rows.shape[1]} columns, found {rows.shape[1]}."
        )
    targets = private.loss.targets(as_targets(public[1]), rows.shape[0])
    return GlmGradients(private.loss, rows, targets, private.outputs)


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


def _checked(
    given: Ellipsoid | EllipsoidRule | None, rule: Method, dim: int
) -> Ellipsoid | EllipsoidRule | None:
    """The ellipsoid as the method uses it; of a function, every ellipsoid it chooses."""
    if given is None:
        return None
    if isinstance(given, Ellipsoid):
        if given.dim != dim:
            raise ValueError(f"Expected an ellipsoid of dimension {dim}, as x; found {given.dim}.")
        return rule.ellipsoid(given)
    if not callable(given):
        raise TypeError(
            f"Expected an Ellipsoid of dimension {dim}, a function that chooses one, or None to "
            f"learn one; found {given!r}."
        )
    if type(rule).gradient is not Method.gradient:
        raise ValueError(
            f"Expected one Ellipsoid for {rule.name!r}, found a function: use 'pagan', 'pasan', "
            "'dp-adagrad', 'dp-sgd' or 'mirror-descent'."
        )

    def choose(released: Any) -> Ellipsoid:
        chosen = _checked(given(released), rule, dim)
        if not isinstance(chosen, Ellipsoid):
            raise TypeError(f"Expected the function to return an Ellipsoid, found {chosen!r}.")
        return chosen

    return choose


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
