"""From a job to a model file: reserve, release, report to the ledger, save, in this order."""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from privagrad._internal.validate import Vector
from privagrad.data.encoding import Encoder
from privagrad.data.libsvm import read_libsvm
from privagrad.data.models import SavedModel, save_model
from privagrad.data.readers import read_rows
from privagrad.data.schema import Schema
from privagrad.fitting.labels import class_numbers, label_numbers
from privagrad.fitting.plan import PreparedFit, planned
from privagrad.fitting.reserve import reserve
from privagrad.glm.rows import as_rows
from privagrad.linear import (
    Bounds,
    LinearModel,
    Plan,
    Problem,
    run_fit,
)
from privagrad.privacy.accounting import PrivacyPlan
from privagrad.privacy.codec import as_json
from privagrad.privacy.noise import random_source
from privagrad.privacy.releases import Releases
from privagrad.queries.categories import discover, threshold


def run(job: PreparedFit, out: Path, progress: bool | None = None) -> SavedModel:
    """Reserve, make the releases, report them to the ledger, write the model to `out`.

    The ledger comes before the model file: once the run is finished nobody can give it back, and
    what was given back before is not saved.
    """
    request, ledger = job.request, job.request.ledger
    run_name = None
    if job.account and ledger:
        run_name = reserve(job, ledger)
    source = random_source(request.seed)
    releases = Releases(PrivacyPlan(job.events), source, job.delta)
    schema, classes = job.schema, job.classes
    if job.discovery is not None:
        found = discover(job.counts, job.n, releases)
        if schema is not None:
            if schema.target in found:
                found[schema.target] = classes = tuple(sorted(found[schema.target]))
            columns = [replace(schema.column(name), categories=c) for name, c in found.items()]
            schema = schema.with_columns(columns)
        else:
            classes = tuple(sorted(found["(target)"]))
        if classes is not None:
            _require_classes(classes, job)
    problem, names = _problem(job, schema, classes)
    if job.snapshot is not None:
        job.snapshot.delete()
    plan = planned(problem.facts, request, job.delta, job.choices, job.discovery)
    if plan.privacy.events != job.events:
        raise RuntimeError("Expected the releases that were planned, found others.")
    model = run_fit(problem, plan, releases, progress)
    saved = _saved(job, plan, model, schema, classes, names, run_name)
    if run_name and ledger:
        ledger.finish(run_name, model.privacy.events)
    save_model(saved, out)
    return saved


def _problem(
    job: PreparedFit, schema: Schema | None, classes: tuple[str, ...] | None
) -> tuple[Problem, list[str]]:
    bounds: Bounds | None = None
    target_bounds: Bounds | None = None
    groups: tuple[tuple[int, int], ...] = ()
    limits: Vector | None = None
    if schema is None:
        X, y = read_libsvm(job.request.table)
        names = [str(j + 1) for j in range(X.shape[1])]
        y = y if classes is None else label_numbers(y, classes)
    else:
        encoder = Encoder(schema)
        if not encoder.names:
            raise ValueError(
                "Expected columns to learn from, found none: no category was frequent enough to be "
                "discovered. State categories in the schema."
            )
        X, read, names = read_rows(job.request.table, schema)
        y = np.asarray(read)
        bounds, groups, limits = encoder.bounds, encoder.groups, encoder.limits
        column = schema.column(str(schema.target))
        if column.low is not None and column.high is not None:
            target_bounds = np.array([column.low]), np.array([column.high])
    loss, outputs = job.loss, 1
    if classes is None:
        targets = np.asarray(y, dtype=np.float64)
        left_out = np.isnan(targets)
        targets = np.where(left_out, 0.0, targets)
    else:
        targets, left_out = class_numbers(y, discovered=job.discovery is not None)
        if len(classes) == 2:
            targets = 2 * targets - 1
        else:
            loss, outputs = loss.multiclass_twin, len(classes)
    missing = left_out if left_out.any() else None
    rows = as_rows(X)
    return (
        Problem(loss, rows, targets, outputs, True, bounds, target_bounds, missing, groups, limits),
        names,
    )


def _require_classes(classes: tuple[str, ...], job: PreparedFit) -> None:
    if len(classes) < 2:
        assert job.discovery is not None
        least = threshold(len(job.counts), job.n, job.discovery)
        raise ValueError(
            f"Expected at least two classes, found {len(classes)} with more than about "
            f"{least:.0f} rows, which is what shows under this epsilon. State the classes, in the "
            "schema or with --classes. The run stays charged: finding this out was a release."
        )


def _saved(
    job: PreparedFit,
    plan: Plan,
    model: LinearModel,
    schema: Schema | None,
    classes: tuple[str, ...] | None,
    names: list[str],
    run_name: str | None,
) -> SavedModel:
    from privagrad import __version__

    trace, report = model.trace, model.privacy
    assert trace is not None
    assert trace.ellipsoid is not None
    privacy = {
        "epsilon": report.epsilon,
        "delta": report.delta,
        "relation": report.relation,
        "sampling": report.sampling or "all rows in every step",
        "accountant": report.accountant,
        "seeded": report.seeded,
        "events": [as_json(event) for event in report.events],
        "public": job.public,
    }
    made = {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "version": __version__,
        "table": job.request.table.name,
        "rows": job.n,
        "loss_parameter": job.loss.parameter,
        "method": plan.method,
        "steps": plan.batches.steps,
        "batch_size": plan.batches.batch_size,
        "step_size": plan.step_size,
        "radius": trace.ellipsoid.radius,
        "dataset": job.request.dataset,
        "run": run_name,
    }
    evaluation = asdict(trace.evaluation) if trace.evaluation else {}
    dim = len(names)
    return SavedModel(
        job.loss.name,
        names,
        None if classes is None else list(classes),
        schema,
        privacy,
        made,
        _without_nan(evaluation),
        model.coef,
        model.intercept,
        trace.noise,
        trace.intercept_noise,
        trace.columns.centre,
        trace.columns.unit,
        trace.ellipsoid.scale[:dim],
    )


def _without_nan(value: Any) -> Any:
    """JSON knows no NaN."""
    if isinstance(value, dict):
        return {key: _without_nan(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_without_nan(inner) for inner in value]
    return None if isinstance(value, float) and math.isnan(value) else value
