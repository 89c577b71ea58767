"""The budget that pays for a fit: refused early, reserved exactly."""

from __future__ import annotations

import hashlib
import math
from pathlib import Path
from typing import TYPE_CHECKING

from privagrad.accounting import PrivacyPlan
from privagrad.events import Event, GaussianEvent
from privagrad.fitting.wishes import Wish
from privagrad.ledger import Account, BudgetError, Ledger

if TYPE_CHECKING:
    from privagrad.fitting.jobs import Job


def fingerprint(path: Path) -> str:
    """SHA-256 of a file's bytes."""
    with path.open("rb") as file:
        return "sha256:" + hashlib.file_digest(file, "sha256").hexdigest()


def paying_account(wish: Wish) -> Account | None:
    """The budget that pays, if it is likely to: exactly this is known only with the plan."""
    if wish.dataset is None or wish.ledger is None:
        return None
    if wish.seed is not None:
        raise ValueError(
            "Expected no --seed for a run that a budget pays: seeded noise protects nobody."
        )
    account = wish.ledger.account(wish.dataset)
    after = account.spent_with(_typical(wish.epsilon, account.delta))
    if after > 1.01 * account.epsilon:
        raise refusal(account, wish.epsilon, after)
    return account


def refusal(account: Account, epsilon: float, after: float) -> BudgetError:
    """Why a run is refused, what is left, and what would fit."""
    largest = 0.99 * account.largest(lambda e: _typical(e, account.delta))
    fits = f"the largest epsilon that fits is about {math.floor(1000 * largest) / 1000:g}"
    return BudgetError(
        f"Expected a run within the budget of {account.name!r}, found that epsilon {epsilon:g} "
        f"would bring what is spent from {account.spent:.4g} to {after:.4g} of {account.epsilon:g} "
        f"(delta {account.delta:g}). Left: {max(account.epsilon - account.spent, 0):.4g}; "
        f"{fits if largest >= 0.001 else 'nothing fits any more'}. Nothing was spent."
    )


def _typical(epsilon: float, delta: float) -> tuple[Event, ...]:
    """One Gaussian release of this cost, which composes much as a fit does."""
    return PrivacyPlan.calibrate_event(GaussianEvent(1.0), epsilon, delta).events


def reserve(job: Job, ledger: Ledger) -> str:
    assert job.account is not None
    note = f"fit {job.wish.table.name}: {job.loss.name}, epsilon {job.wish.epsilon:g}"
    try:
        return ledger.reserve(job.account.name, job.events, note)
    except BudgetError:
        account = ledger.account(job.account.name)
        raise refusal(account, job.wish.epsilon, account.spent_with(job.events)) from None
