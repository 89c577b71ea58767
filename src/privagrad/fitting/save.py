"""A fitted model as a file, after the ledger has been told what was released."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from privagrad.data.models import SavedModel, save_model
from privagrad.data.tables import Table
from privagrad.fitting.evaluate import as_values, exact_figures
from privagrad.fitting.notes import column_notes
from privagrad.fitting.plan import PreparedFit
from privagrad.linear import METHOD, LinearModel, Plan, Trace
from privagrad.privacy.accounting import PrivacyReport
from privagrad.privacy.codec import as_json


@dataclass(frozen=True)
class FittedTable:
    """A model and what it was fitted to; the tables have all categories."""

    table: Table
    test: Table | None
    plan: Plan
    model: LinearModel
    run: str | None


def save(job: PreparedFit, fitted: FittedTable, out: Path) -> SavedModel:
    """Score the test table, report the releases to the ledger, write the model.

    The model is written even if its scores cannot be computed: it is paid for. The ledger comes
    just before the file, so that hardly any kill leaves a finished run without its model.
    """
    saved = _saved(job, fitted)
    try:
        if fitted.test is not None and job.request.test is not None:
            saved = with_scores(saved, fitted.test, job.request.test)
    finally:
        if fitted.run is not None and job.request.ledger is not None:
            job.request.ledger.finish(fitted.run, fitted.model.privacy.events)
        save_model(saved, out)
    return saved


def _saved(job: PreparedFit, fitted: FittedTable) -> SavedModel:
    model, trace, schema = fitted.model, fitted.model.trace, fitted.table.schema
    if trace is None or model.noise is None:
        raise RuntimeError("Expected a private fit with its evaluation, found none.")
    names = fitted.table.encoding.names
    target = fitted.table.target
    classes = None if target.kind == "number" else list(target.categories)
    return SavedModel(
        job.loss.name,
        names,
        classes,
        None if schema.libsvm else schema,
        {**_privacy(model.privacy), "public": job.public},
        {**_made(job, fitted, trace.ellipsoid.radius), "not_measurable": _hidden(fitted, trace)},
        {**as_values(trace.evaluation, classes), "factor": trace.factor},
        model.coef,
        model.intercept,
        model.noise.coef,
        model.noise.intercept,
        trace.columns.centre,
        trace.columns.unit,
        trace.ellipsoid.scale[: len(names)],
    )


def _hidden(fitted: FittedTable, trace: Trace) -> list[str]:
    """The columns of too few rows to show their scale."""
    seen = trace.columns.seen
    if seen is None:
        return []
    pairs = zip(fitted.table.encoding.names, seen.tolist(), strict=True)
    return [name for name, shown in pairs if not shown]


def with_scores(model: SavedModel, table: Table, path: Path) -> SavedModel:
    """The same model with how well it predicts another table, read from `path`. NOT private."""
    rows = int((table.targets >= 0).sum() if model.classes else np.isfinite(table.targets).sum())
    found = as_values(exact_figures(model, table), model.classes)
    test = {"table": path.name, "rows": rows, **found}
    return replace(model, evaluation={**model.evaluation, "test": test})


def _privacy(report: PrivacyReport) -> dict[str, Any]:
    return {
        "epsilon": report.epsilon,
        "delta": report.delta,
        "relation": report.relation,
        "sampling": report.sampling or "all rows in every step",
        "accountant": report.accountant,
        "seeded": report.seeded,
        "noise": report.noise,
        "events": [as_json(event) for event in report.events],
    }


def _made(job: PreparedFit, fitted: FittedTable, radius: float) -> dict[str, Any]:
    from privagrad import __version__

    return {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "version": __version__,
        "table": job.request.table.name,
        "rows": job.n,
        "loss_parameter": job.loss.parameter,
        "method": METHOD.name,
        "steps": fitted.plan.batches.steps,
        "batch_size": fitted.plan.batches.batch_size,
        "step_size": fitted.plan.reach,
        "radius": radius,
        "dataset": job.request.dataset,
        "run": fitted.run,
        "notes": column_notes(fitted.table.schema),
    }
