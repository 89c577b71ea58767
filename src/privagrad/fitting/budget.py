"""The budget that pays for a run: refused early, reserved before the first release."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

from privagrad.data.files import LocalFiles, TableFiles
from privagrad.privacy.accounting import PrivacyPlan
from privagrad.privacy.events import Event, GaussianEvent
from privagrad.privacy.ledger import NO_DELTA_LEFT, Account, BudgetError, Ledger, require_unit


def paying_account(
    ledger: Ledger | None, dataset: str | None, epsilon: float, *, seeded: bool
) -> Account | None:
    """The budget that pays, if it is likely to: exactly this is known only with the plan."""
    if dataset is None or ledger is None:
        return None
    if seeded:
        raise ValueError(
            "Expected no seed (--seed, random_state) for a run that a budget pays: seeded noise "
            "protects nobody."
        )
    if math.isinf(epsilon):
        raise ValueError("Expected a finite epsilon for a run that a budget pays, found inf.")
    account = ledger.account(dataset)
    require_unit(account, None)
    after = account.spent_with(_typical(epsilon, account))
    if not after <= 1.01 * account.epsilon:
        raise refusal(account, epsilon, after, lambda e: _typical(e, account))
    return account


def require_own_rows(ledger: Ledger, account: Account, content: str, name: str) -> None:
    """Refuse a file that is not that of the budget, or is that of another one."""
    if account.fingerprint and content != account.fingerprint:
        raise ValueError(
            f"Expected the file that the budget of {account.name!r} was opened for, found other "
            f"content in {name}: rows that changed are another data set. Open a budget for it."
        )
    ledger.require_only_budget(account.name, content)


def require_no_budget(
    ledger: Ledger | None, table: Path | TableFiles, what: str, advice: str
) -> None:
    """Refuse a use that no budget pays for of rows that are known to have one.

    `advice` may hold the place {name} of the budget.
    """
    if ledger is None or not ledger.exists():
        return
    files = LocalFiles(table) if isinstance(table, Path) else table
    if owners := ledger.owners(files.fingerprint()):
        raise ValueError(
            f"Expected rows without a budget for {what}, found that {files.name} has that of "
            f"{owners[0]!r}. {advice.format(name=owners[0])} Nothing was spent."
        )


def reserve(
    ledger: Ledger,
    account: Account,
    note: str,
    epsilon: float,
    events_at: Callable[[float], tuple[Event, ...]],
    events: tuple[Event, ...],
    content: str | None = None,
) -> str:
    """Reserve the releases of a run, or say what would fit; the name of the run.

    `events_at` gives the releases of the same run at another epsilon.
    """
    try:
        return ledger.reserve(account.name, events, note, content)
    except BudgetError:
        current = ledger.account(account.name)
        raise refusal(current, epsilon, current.spent_with(events), events_at) from None


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


def _typical(epsilon: float, account: Account) -> tuple[Event, ...]:
    """One Gaussian release of this cost, which composes much as a fit does."""
    event = GaussianEvent(1.0, unit=account.unit or "row")
    return PrivacyPlan.calibrate_event(event, epsilon, account.delta).events
