"""A fitted model as a file, after the ledger has been told what was released."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from privagrad.data.models import SavedModel, save_model
from privagrad.data.tables import Table
from privagrad.fitting.plan import PreparedFit
from privagrad.fitting.scores import with_scores
from privagrad.linear import LinearModel, Plan
from privagrad.privacy.accounting import PrivacyReport
from privagrad.privacy.codec import as_json


@dataclass(frozen=True)
class FittedTable:
    """A model and what it was fitted to.

    Attributes
    ----------
    table : Table
        With all categories.
    test : Table or None
        Likewise.
    plan : Plan
    model : LinearModel
    run : str or None
        The name of the run in the ledger.
    """

    table: Table
    test: Table | None
    plan: Plan
    model: LinearModel
    run: str | None


def save(job: PreparedFit, fitted: FittedTable, out: Path) -> SavedModel:
    """Report the releases to the ledger, score the test table, write the model.

    The model is written even if its scores cannot be computed: it is paid for.
    """
    saved = _saved(job, fitted)
    if fitted.run is not None and job.request.ledger is not None:
        job.request.ledger.finish(fitted.run, fitted.model.privacy.events)
    try:
        if fitted.test is not None and job.request.test is not None:
            saved = with_scores(saved, fitted.test, job.request.test)
    finally:
        save_model(saved, out)
    return saved


def _saved(job: PreparedFit, fitted: FittedTable) -> SavedModel:
    model, trace, schema = fitted.model, fitted.model.trace, fitted.table.schema
    if trace is None:
        raise RuntimeError("Expected a private fit with its evaluation, found none.")
    names = fitted.table.encoding.names
    regression = fitted.table.target.kind == "number"
    return SavedModel(
        job.loss.name,
        names,
        None if regression else list(fitted.table.target.categories),
        None if schema.libsvm else schema,
        {**_privacy(model.privacy), "public": job.public},
        _made(job, fitted, trace.ellipsoid.radius),
        _without_nan(asdict(trace.evaluation)),
        model.coef,
        model.intercept,
        trace.noise,
        trace.intercept_noise,
        trace.columns.centre,
        trace.columns.unit,
        trace.ellipsoid.scale[: len(names)],
    )


def _privacy(report: PrivacyReport) -> dict[str, Any]:
    return {
        "epsilon": report.epsilon,
        "delta": report.delta,
        "relation": report.relation,
        "sampling": report.sampling or "all rows in every step",
        "accountant": report.accountant,
        "seeded": report.seeded,
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
        "method": fitted.plan.method,
        "steps": fitted.plan.batches.steps,
        "batch_size": fitted.plan.batches.batch_size,
        "step_size": fitted.plan.step_size,
        "radius": radius,
        "dataset": job.request.dataset,
        "run": fitted.run,
    }


def _without_nan(value: Any) -> Any:
    """JSON knows no NaN."""
    if isinstance(value, dict):
        return {key: _without_nan(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_without_nan(inner) for inner in value]
    return None if isinstance(value, float) and math.isnan(value) else value
