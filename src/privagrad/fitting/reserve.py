"""The budget that pays for a fit: refused early, reserved exactly."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from privagrad.fitting.request import FitRequest
from privagrad.fitting.snapshots import Snapshot
from privagrad.privacy.accounting import PrivacyPlan
from privagrad.privacy.events import Event, GaussianEvent
from privagrad.privacy.ledger import NO_DELTA_LEFT, Account, BudgetError, Ledger

if TYPE_CHECKING:
    from privagrad.fitting.plan import PreparedFit


def paying_account(request: FitRequest) -> Account | None:
    """The budget that pays, if it is likely to: exactly this is known only with the plan."""
    if request.dataset is None or request.ledger is None:
        return None
    if request.seed is not None:
        raise ValueError(
            "Expected no --seed for a run that a budget pays: seeded noise protects nobody."
        )
    account = request.ledger.account(request.dataset)
    after = account.spent_with(_typical(request.epsilon, account.delta))
    if not after <= 1.01 * account.epsilon:
        raise refusal(account, request.epsilon, after, lambda e: _typical(e, account.delta))
    return account


def covered_content(request: FitRequest, account: Account | None) -> Snapshot | None:
    """The content of the table, for the budget that pays; refused if it is another budget's.

    The snapshot holds the bytes that were compared and are charged: whatever happens to the file
    afterwards, these are the rows to read.
    """
    if account is None or request.ledger is None:
        return None
    snapshot = Snapshot(request.table)
    if account.fingerprint and snapshot.fingerprint != account.fingerprint:
        raise ValueError(
            f"Expected the file that the budget of {account.name!r} was opened for, found other "
            f"content in {request.table.name}: rows that changed are another data set. Open a "
            "budget for it."
        )
    request.ledger.require_only_budget(account.name, snapshot.fingerprint)
    return snapshot


def refusal(
    account: Account, epsilon: float, after: float, plan: Callable[[float], tuple[Event, ...]]
) -> BudgetError:
    """Why a run is refused, what is left, and what would fit of the runs plan(epsilon)."""
    largest = 0.99 * account.largest(plan)
    fits = f"the largest epsilon that fits is about {math.floor(1000 * largest) / 1000:g}"
    return BudgetError(
        f"Expected a run within the budget of {account.name!r}, found that epsilon {epsilon:g} "
        f"would bring what is spent from {account.spent:.4g} to {after:.4g} of {account.epsilon:g} "
        f"(delta {account.delta:g}). Left: {max(account.epsilon - account.spent, 0):.4g}; "
        f"{fits if largest >= 0.001 else 'nothing fits any more'}. Nothing was spent."
        f"{'' if math.isfinite(after) else ' ' + NO_DELTA_LEFT}"
    )


def _typical(epsilon: float, delta: float) -> tuple[Event, ...]:
    """One Gaussian release of this cost, which composes much as a fit does."""
    return PrivacyPlan.calibrate_event(GaussianEvent(1.0), epsilon, delta).events


def _scaled(job: PreparedFit, epsilon: float) -> tuple[Event, ...]:
    """The releases of a fit at another epsilon, nearly: noise in proportion to 1/epsilon."""
    factor = job.request.epsilon / epsilon
    return tuple(
        replace(event, noise_multiplier=factor * event.noise_multiplier)
        for event in job.events
        if isinstance(event, GaussianEvent)
    )


def reserve(job: PreparedFit, ledger: Ledger) -> str:
    assert job.account is not None
    assert job.snapshot is not None
    note = f"fit {job.request.table.name}: {job.loss.name}, epsilon {job.request.epsilon:g}"
    try:
        return ledger.reserve(job.account.name, job.events, note, job.snapshot.fingerprint)
    except BudgetError:
        account = ledger.account(job.account.name)
        after = account.spent_with(job.events)
        raise refusal(account, job.request.epsilon, after, partial(_scaled, job)) from None
