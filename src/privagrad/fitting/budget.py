"""The budget that pays for a fit, before anything is planned: refused early, for these rows."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from privagrad.privacy.accounting import PrivacyPlan
from privagrad.privacy.events import Event, GaussianEvent
from privagrad.privacy.ledger import NO_DELTA_LEFT, Account, BudgetError, Ledger


class Paid(Protocol):
    """What budgets need to know of a request."""

    @property
    def table(self) -> Path: ...
    @property
    def epsilon(self) -> float | None: ...
    @property
    def seed(self) -> int | None: ...
    @property
    def dataset(self) -> str | None: ...
    @property
    def ledger(self) -> Ledger | None: ...


def paying_account(request: Paid) -> Account | None:
    """The budget that pays, if it is likely to: exactly this is known only with the plan."""
    if request.dataset is None or request.ledger is None or request.epsilon is None:
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


def require_own_rows(request: Paid, account: Account, fingerprint: str) -> None:
    """Refuse rows that are not those of the budget, or are those of another one."""
    if account.fingerprint and fingerprint != account.fingerprint:
        raise ValueError(
            f"Expected the file that the budget of {account.name!r} was opened for, found other "
            f"content in {request.table.name}: rows that changed are another data set. Open a "
            "budget for it."
        )
    if request.ledger is not None:
        request.ledger.require_only_budget(account.name, fingerprint)


def refusal(
    account: Account, epsilon: float, after: float, plan: Callable[[float], tuple[Event, ...]]
) -> BudgetError:
    """Why a run is refused, what is left, and what would fit of the runs plan(epsilon)."""
    # A first run may take all of the budget; what fits after others is known to a percent.
    largest = 0.99 * account.largest(plan) if account.spent else account.epsilon
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
