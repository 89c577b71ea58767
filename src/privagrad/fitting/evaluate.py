"""Figures of a saved model on other rows: exact ones, or private ones that a budget pays for."""

from __future__ import annotations

import math
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from privagrad._internal import validate
from privagrad._internal.validate import Vector
from privagrad.data.files import fingerprint
from privagrad.data.libsvm import is_libsvm, libsvm_schema, open_libsvm
from privagrad.data.models import SavedModel
from privagrad.data.readers import open_table, require_table
from privagrad.data.schema import Column, Schema
from privagrad.data.tables import Table
from privagrad.fitting.budget import (
    paying_account,
    require_no_budget,
    require_own_rows,
    reserve,
)
from privagrad.fitting.checks import require_delta_of, require_test_rows, warn_if_weak
from privagrad.fitting.pose import require_stated_labels
from privagrad.fitting.settings import loss_named
from privagrad.fitting.snapshots import snapshot
from privagrad.glm.rows import as_rows
from privagrad.linear import default_delta
from privagrad.privacy.accounting import PrivacyPlan
from privagrad.privacy.events import GaussianEvent, Unit
from privagrad.privacy.ledger import Account, Ledger, require_unit
from privagrad.privacy.noise import random_source
from privagrad.privacy.releases import Releases
from privagrad.privacy.users import Users
from privagrad.queries.categories import PURPOSE as CATEGORIES
from privagrad.queries.evaluation import EVALUATION, Predicted, evaluate, evaluate_exactly
from privagrad.queries.figures import Evaluation

_MOST_NOISE = 0.1
"""In the share of a class, in standard deviations: figures with more noise say nothing."""


@dataclass(frozen=True)
class EvaluationRequest:
    """What a user asks for: without an `epsilon`, exact figures that no budget pays for.

    `dataset` names the budget in `ledger` that pays. Without a `delta` it is the budget's, or else
    below 1/(10 n). A `seed` makes figures that are not private. Private figures protect users where
    the model's schema names them, or a `user_column` does.
    """

    model: SavedModel
    table: Path
    epsilon: float | None = None
    delta: float | None = None
    dataset: str | None = None
    ledger: Ledger | None = None
    seed: int | None = None
    user_column: str | None = None


@dataclass(frozen=True)
class PreparedEvaluation:
    """Rows that were read and checked; nothing is spent. `plan` is None for exact figures.

    `users` say whose rows they are, where users are protected.
    """

    request: EvaluationRequest
    rows: Predicted
    delta: float
    plan: PrivacyPlan | None
    account: Account | None
    fingerprint: str | None
    users: Users | None = None


def prepare_evaluation(request: EvaluationRequest) -> PreparedEvaluation:
    """Check the budget before anything is read; then read, check and plan. Releases nothing."""
    account = None
    if request.epsilon is not None:
        account = _paying(request, request.epsilon)
    elif request.dataset is not None or request.delta is not None:
        raise ValueError(
            "Expected --epsilon with --dataset or --delta, found none: exact figures are not "
            "private, and are charged to no budget."
        )
    require_table(request.table)
    path, content = request.table, None
    with ExitStack() as stack:
        if account is not None and request.ledger is not None:
            path = stack.enter_context(snapshot(path))
            content = fingerprint(path)
            require_own_rows(request.ledger, account, content, path.name)
        else:
            _require_unpaid(request)
        table = _opened(request, path)
    if account is not None:
        require_unit(account, table.unit)
    rows = _predicted(request, table)
    if request.epsilon is None:
        return PreparedEvaluation(request, rows, 0.0, None, None, None)
    delta = request.delta or (account.delta if account else default_delta(table.n))
    validate.delta_of(delta, table.n)
    plan = _plan(request.epsilon, delta, table.unit)
    least = plan.noise_multiplier / _MOST_NOISE
    if table.n < least:
        raise ValueError(
            f"Expected at least {math.ceil(least)} {table.unit}s for a private evaluation at "
            f"epsilon {request.epsilon:g}, found {table.n}: noise would hide everything. Give more "
            f"{table.unit}s or a larger epsilon. Nothing was spent."
        )
    return PreparedEvaluation(request, rows, delta, plan, account, content, table.users)


def run_evaluation(job: PreparedEvaluation) -> dict[str, Any]:
    """Figures as JSON keeps them, with what they cost: reserved before they are released."""
    request, ledger = job.request, job.request.ledger
    about: dict[str, Any] = {"table": request.table.name, "run": None}
    if job.plan is None:
        found = evaluate_exactly(job.rows)
        about["rows"] = int(job.rows.known.sum())
        return {**about, **as_values(found, request.model.classes)}
    if job.account is not None and ledger is not None:
        about["run"] = _reserve(job, job.account, ledger, job.plan)
    releases = Releases(job.plan, random_source(request.seed), job.delta)
    rows = job.rows
    if job.users is not None:
        rows = rows.take(job.users.draw(releases.source.another_generator()).chosen)
    found, report = evaluate(rows, releases), releases.report()
    if about["run"] is not None and ledger is not None:
        ledger.finish(about["run"], report.events)
    cost = {"epsilon": report.epsilon, "delta": report.delta, "relation": report.relation,
            "unit": report.unit, "seeded": report.seeded}  # fmt: skip
    about["rows"] = len(rows.known)
    return {**about, "privacy": cost, **as_values(found, request.model.classes)}


def as_values(found: Evaluation, classes: list[str] | None) -> dict[str, Any]:
    """Figures as JSON keeps them, with the verdict."""
    return {"verdict": found.verdict(classes), **asdict(found)}


def exact_figures(model: SavedModel, table: Table) -> Evaluation:
    """Of all rows with a target that the model knows. NOT private."""
    margins = np.concatenate([model.margins(part.X) for part in table.parts()])
    return evaluate_exactly(_known(model, margins, table.targets))


def _paying(request: EvaluationRequest, epsilon: float) -> Account | None:
    validate.positive("epsilon", epsilon)
    if request.delta is not None:
        validate.delta_of(request.delta)
    warn_if_weak(epsilon, request.delta)
    if request.model.classes is None and _scale(request.model) is None:
        raise ValueError(
            "Expected a model file that states the scale of its target, found one of an earlier "
            "version: fit the model again, or leave out --epsilon. Nothing was spent."
        )
    seeded = request.seed is not None
    account = paying_account(request.ledger, request.dataset, epsilon, seeded=seeded)
    if account is not None:
        require_delta_of(account, request.delta)
    return account


def _require_unpaid(request: EvaluationRequest) -> None:
    if request.epsilon is None:
        what, advice = "exact figures", "Give --epsilon and --dataset {name}."
    else:
        what, advice = "a run that is charged to no budget", "Give --dataset {name}."
    require_no_budget(request.ledger, request.table, what, advice)


def _opened(request: EvaluationRequest, path: Path) -> Table:
    model, user = request.model, request.user_column
    if user is not None and request.epsilon is None:
        raise ValueError(
            "Expected --epsilon with --user-column, found none: exact figures protect nobody."
        )
    if model.schema is not None:
        if is_libsvm(path):
            raise ValueError(
                f"Expected a table with the columns of {model.made['table']}, found {path.name}."
            )
        schema = model.schema if user is None else _naming(model.schema, user)
        return open_table(path, schema, of_model=True, users=request.epsilon is not None)
    if user is not None:
        raise ValueError(f"Expected a table with named columns for users, found {path.name}.")
    schema = libsvm_schema("number" if model.classes is None else "category",
                           tuple(model.classes or ()))  # fmt: skip
    return open_libsvm(path, schema, len(model.features))


def _naming(schema: Schema, user: str) -> Schema:
    """The schema of a model with this column of users, which it need not know yet."""
    if user not in [column.name for column in schema.columns]:
        schema = replace(schema, columns=(*schema.columns, Column(user, "ignore")))
    if user in [column.name for column in schema.features]:
        raise ValueError(
            f"Expected a column of users that is no feature of the model, found {user!r}."
        )
    return schema.with_user(user)


def _predicted(request: EvaluationRequest, table: Table) -> Predicted:
    model, name = request.model, request.table.name
    discovered = any(event["purpose"] == CATEGORIES for event in model.privacy["events"])
    if request.epsilon is None:
        require_test_rows(table, name, stated=model.classes is not None and not discovered)
    elif model.classes is not None and not discovered:
        require_stated_labels(table)
    # Row by row, unlike `model.margins`: what one row contributes must not depend on the others.
    weights = np.ascontiguousarray(model.coef.T)
    parts = (as_rows(model.filled(part.X)).margins(weights) for part in table.parts())
    margins = np.concatenate(list(parts))
    with np.errstate(over="ignore"):  # a warning would tell of a private row
        margins = margins + model.intercept
    return _known(model, margins, table.targets, _scale(model))


def _known(
    model: SavedModel, margins: Vector, targets: Vector, scale: tuple[float, float] | None = None
) -> Predicted:
    """Rows as the loss of the model needs them; with a scale, numbers in its units."""
    parameter = model.made.get("loss_parameter")
    loss = loss_named(model.loss, parameter)
    if model.classes is None:
        centre, unit = scale or (0.0, 1.0)
        with np.errstate(over="ignore"):
            margins, targets = (margins[:, 0] - centre) / unit, (targets - centre) / unit
        return Predicted.of(loss, margins, targets, scale=(centre, unit))
    left_out = ~(targets >= 0)
    targets = np.where(left_out, 0.0, targets)
    if len(model.intercept) > 1:
        return Predicted.of(loss.multiclass_twin, margins, targets, left_out)
    return Predicted.of(loss, margins[:, 0], 2 * targets - 1, left_out)


def _scale(model: SavedModel) -> tuple[float, float] | None:
    found = model.evaluation.get("scale") or model.made.get("target_scale")
    return None if found is None else (float(found[0]), float(found[1]))


def _plan(epsilon: float, delta: float, unit: Unit) -> PrivacyPlan:
    event = GaussianEvent(1.0, purpose=EVALUATION.purpose, unit=unit)
    return PrivacyPlan.calibrate_event(event, epsilon, delta)


def _reserve(job: PreparedEvaluation, account: Account, ledger: Ledger, plan: PrivacyPlan) -> str:
    epsilon = float(job.request.epsilon or 0.0)
    note = f"evaluate {job.request.table.name}: epsilon {epsilon:g}"
    return reserve(
        ledger, account, note, epsilon,
        lambda e: _plan(e, job.delta, plan.unit).events, plan.events,
        job.fingerprint,
    )  # fmt: skip
