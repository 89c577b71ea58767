"""From a planned fit to a model file: reserve, release, report to the ledger, save."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from privagrad.data.models import SavedModel
from privagrad.data.tables import Table
from privagrad.fitting.budget import refusal
from privagrad.fitting.checks import require_writable
from privagrad.fitting.plan import PreparedFit, class_numbers
from privagrad.fitting.save import FittedTable, save
from privagrad.glm.rows import as_rows
from privagrad.linear import Bounds, Problem, run_fit
from privagrad.privacy.ledger import BudgetError
from privagrad.privacy.noise import random_source
from privagrad.privacy.releases import Releases
from privagrad.queries.categories import categories_event, discover, threshold


def run(job: PreparedFit, out: Path, progress: bool | None = None) -> SavedModel:
    """Reserve, make the releases, report them to the ledger, write the model to `out`.

    The ledger comes before the model file: once the run is finished nobody can give it back, and
    what was given back before is not saved.
    """
    require_writable(out)
    run_name = _reserve(job)
    source = random_source(job.request.seed, job.request.noise)
    releases = Releases(job.privacy, source, job.delta)
    table, test = job.table, job.test
    if job.discovers:
        found = _discover(job, releases)
        table = table.with_categories(found)
        test = None if test is None else test.with_categories(found)
    problem = _problem(job, table)
    plan = job.plan(problem.facts)
    if plan.privacy != job.privacy:
        raise RuntimeError("Expected the releases that were planned, found others.")
    model = run_fit(problem, plan, releases, progress)
    return save(job, FittedTable(table, test, plan, model, run_name), out)


def _reserve(job: PreparedFit) -> str | None:
    """Reserve the releases of a fit; the name of the run, None where no budget pays."""
    request, account, ledger = job.request, job.account, job.request.ledger
    if account is None or ledger is None:
        return None

    note = f"fit {request.table.name}: {job.loss.name}, epsilon {request.epsilon:g}"
    try:
        return ledger.reserve(account.name, job.events, note, job.fingerprint)
    except BudgetError:
        current = ledger.account(account.name)
        after = current.spent_with(job.events)
        raise refusal(current, request.epsilon, after, job.events_at) from None


def _discover(job: PreparedFit, releases: Releases) -> dict[str, tuple[str, ...]]:
    """Categories of the columns where the schema states none; at least two of the target."""
    found = discover(job.table.counts, job.n, releases)
    target = job.table.target.name
    if target not in found:
        return found
    found[target] = tuple(sorted(found[target]))
    if len(found[target]) < 2:
        least = threshold(len(job.table.counts), job.n, categories_event(job.privacy))
        raise ValueError(
            f"Expected at least two classes, found {len(found[target])} with more than about "
            f"{least:.0f} rows, which is what shows under this epsilon. State the classes, in the "
            "schema or with --classes. The run stays charged: finding this out was a release."
        )
    return found


def _problem(job: PreparedFit, table: Table) -> Problem:
    encoding, target = table.encoding, table.target
    if not encoding.names:
        raise ValueError(
            "Expected columns to learn from, found none: no category was frequent enough to be "
            "discovered. State categories in the schema. The run stays charged: finding this out "
            "was a release."
        )
    target_bounds: Bounds | None = None
    if target.low is not None and target.high is not None:
        target_bounds = np.array([target.low]), np.array([target.high])
    loss, outputs = job.loss, 1
    if target.kind == "number":
        left_out = np.isnan(table.targets)
        targets = np.where(left_out, 0.0, table.targets)
    else:
        targets, left_out = class_numbers(table.targets, discovered=job.discovers)
        if len(target.categories) == 2:
            targets = 2 * targets - 1
        else:
            loss, outputs = loss.multiclass_twin, len(target.categories)
    return Problem(
        loss,
        as_rows(table.rows()),
        targets,
        outputs,
        bounds=encoding.bounds,
        target_bounds=target_bounds,
        left_out=left_out if left_out.any() else None,
        groups=encoding.groups,
        limits=encoding.limits,
        blanks=encoding.blanks,
    )
