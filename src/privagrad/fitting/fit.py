"""From a planned fit to a model: reserve, release, report to the ledger."""

from __future__ import annotations

from pathlib import Path

from privagrad.data.models import SavedModel
from privagrad.data.tables import Table
from privagrad.fitting.budget import reserve
from privagrad.fitting.checks import require_writable
from privagrad.fitting.plan import PreparedFit
from privagrad.fitting.pose import pose
from privagrad.fitting.save import FittedTable, finish
from privagrad.linear import Plan, Problem, run_fit
from privagrad.privacy.noise import random_source
from privagrad.privacy.releases import Releases
from privagrad.privacy.users import UserRows
from privagrad.queries.categories import categories_event, discover, threshold


def run(job: PreparedFit, out: Path | None = None, progress: bool | None = None) -> SavedModel:
    """Reserve, make the releases, report them to the ledger; write the model if `out` is given.

    The ledger comes before the model: once the run is finished nobody can give it back, and what
    was given back before is not shown or saved.
    """
    if out is not None:
        require_writable(out)
    source = random_source(job.settings.random_state, job.settings.noise)
    releases = Releases(job.privacy, source, job.delta)
    users = None
    if job.table.users is not None:
        users = job.table.users.draw(source.another_generator())
    if job.discovers:
        run_name = _reserve(job)
        table = job.table.with_categories(_discover(job, releases, users))
        problem, plan = _posed(job, table, users)
    else:
        # What cannot be encoded fails before anything is spent.
        table = job.table
        problem, plan = _posed(job, table, users)
        run_name = _reserve(job)
    model = run_fit(problem, plan, releases, progress)
    return finish(job, FittedTable(table, plan, model, run_name), out)


def _posed(job: PreparedFit, table: Table, users: UserRows | None) -> tuple[Problem, Plan]:
    """The problem of a table all of whose categories are known, and its plan."""
    problem = pose(table, job.settings, discovered=job.discovers, users=users)
    plan = job.plan(problem.facts)
    if plan.privacy != job.privacy:
        raise RuntimeError("Expected the releases that were planned, found others.")
    return problem, plan


def _reserve(job: PreparedFit) -> str | None:
    """Reserve the releases of a fit; the name of the run, None where no budget pays."""
    settings, account, ledger = job.settings, job.account, job.settings.ledger
    if account is None or ledger is None:
        return None
    epsilon = settings.epsilon
    note = f"fit {settings.table}: {settings.loss_name}, epsilon {epsilon:g}"
    return reserve(ledger, account, note, epsilon, job.events_at, job.events, job.fingerprint)


def _discover(
    job: PreparedFit, releases: Releases, users: UserRows | None
) -> dict[str, tuple[str, ...]]:
    """Categories of the columns where the schema states none; at least two of the target.

    Of each user one row counts.
    """
    target, counts = job.table.target.name, job.table.counts
    if job.privacy.unprotected:
        found = {name: tuple(sorted(values)) for name, values in counts.items()}
    else:
        if users is not None:
            counts = job.table.counts_of(users.chosen)
        found = discover(counts, job.n, releases)
    if target not in found:
        return found
    found[target] = tuple(sorted(found[target]))
    if len(found[target]) < 2:
        least = 0.0
        if not job.privacy.unprotected:
            least = threshold(len(counts), job.n, categories_event(job.privacy))
        raise ValueError(
            f"Expected at least two classes, found {len(found[target])} with more than about "
            f"{least:.0f} {job.table.unit}s, which is what shows under this epsilon. State the "
            "classes, in the schema or with --classes (classes=). The run stays charged: "
            "finding this out was a release."
        )
    return found
