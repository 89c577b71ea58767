"""A fitted model in memory and as a file, after the ledger has been told what was released."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from privagrad.data.models import SavedModel, save_model
from privagrad.data.tables import Table
from privagrad.fitting.evaluate import as_values, exact_figures
from privagrad.fitting.notes import column_notes, hidden_notes
from privagrad.fitting.plan import PreparedFit
from privagrad.linear import METHOD, LinearModel, Plan, Trace
from privagrad.privacy.report_codec import report_as_json


@dataclass(frozen=True)
class FittedTable:
    """A model and what it was fitted to; the table has all categories."""

    table: Table
    plan: Plan
    model: LinearModel
    run: str | None


def finish(job: PreparedFit, fitted: FittedTable, out: Path | None = None) -> SavedModel:
    """Score the test table, report the releases to the ledger, write the model.

    The model is written even if its scores cannot be computed: it is paid for. The ledger is told
    when the disk has room for the file, just before it is written: neither a full disk nor hardly
    any kill leaves a finished run without its model, and a run that was given back leaves no model.
    """
    saved, ledger, run = saved_model(job, fitted), job.settings.ledger, fitted.run

    def tell_ledger() -> None:
        if run is not None and ledger is not None:
            ledger.finish(run, fitted.model.privacy.events)

    try:
        if job.test is not None:
            saved = with_scores(saved, job.test, job.test_name)
    finally:
        if out is None:
            tell_ledger()
        else:
            save_model(saved, out, tell_ledger)
    return saved


def saved_model(job: PreparedFit, fitted: FittedTable) -> SavedModel:
    """The model in memory, as its file holds it; without an evaluation that is empty."""
    model, trace, target = fitted.model, fitted.model.trace, fitted.table.target
    names = fitted.table.encoding.names
    classes = None if target.kind == "number" else list(target.categories)
    evaluation: dict[str, Any] = {}
    if trace.evaluation is not None:
        evaluation = {**as_values(trace.evaluation, classes), "factor": trace.factor}
    scale = np.ones(len(names))
    if trace.ellipsoid is not None:
        scale = trace.ellipsoid.scale[: len(names)]
    return SavedModel(
        job.settings.loss_name,
        names,
        classes,
        fitted.table.file_schema,
        {**report_as_json(model.privacy), "unit": fitted.table.unit, "public": job.public},
        _made(job, fitted),
        evaluation,
        model.coef,
        model.intercept,
        model.noise.coef,
        model.noise.intercept,
        trace.columns.centre,
        trace.columns.unit,
        scale,
    )


def _hidden(fitted: FittedTable, trace: Trace) -> list[str]:
    """The columns of too few rows to show their scale."""
    seen = trace.columns.seen
    if seen is None:
        return []
    pairs = zip(fitted.table.encoding.names, seen.tolist(), strict=True)
    return [name for name, shown in pairs if not shown]


def with_scores(model: SavedModel, table: Table, name: str) -> SavedModel:
    """The same model with how well it predicts another table of this name. NOT private."""
    found = {c.name: c.categories for c in model.schema.columns} if model.schema else {}
    found[table.target.name] = tuple(model.classes or ())
    table = table.with_categories({column: found[column] for column in table.counts})
    rows = int((table.targets >= 0).sum() if model.classes else np.isfinite(table.targets).sum())
    figures = as_values(exact_figures(model, table), model.classes)
    test = {"table": name, "rows": rows, **figures}
    return replace(model, evaluation={**model.evaluation, "test": test})


def _made(job: PreparedFit, fitted: FittedTable) -> dict[str, Any]:
    plan, trace, settings = fitted.plan, fitted.model.trace, job.settings
    hidden, schema = _hidden(fitted, trace), fitted.table.schema
    by_moments = trace.ellipsoid is None and settings.squares is not None
    return {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "version": version("privagrad"),
        "table": settings.table,
        "rows": job.n,
        "loss_parameter": job.loss.parameter,
        "method": "second moments" if by_moments else METHOD.name,
        "steps": plan.batches.steps,
        "batch_size": plan.batches.batch_size,
        "step_size": plan.reach,
        "radius": None if trace.ellipsoid is None else trace.ellipsoid.radius,
        "target_scale": list(trace.scale),
        "dataset": settings.dataset,
        "run": fitted.run,
        "notes": column_notes(schema) + hidden_notes(schema, hidden),
        "not_measurable": hidden,
    }
