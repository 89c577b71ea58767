"""The cost of a planned fit, reserved in the ledger before the first release."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from privagrad.fitting.budget import refusal
from privagrad.fitting.plan import PreparedFit
from privagrad.privacy.events import Event, GaussianEvent
from privagrad.privacy.ledger import BudgetError


def reserve(job: PreparedFit) -> str | None:
    """Reserve the releases of a fit; the name of the run, None where no budget pays."""
    request, payment, ledger = job.request, job.payment, job.request.ledger
    if payment is None or ledger is None:
        return None
    name = payment.account.name
    note = f"fit {request.table.name}: {job.loss.name}, epsilon {request.epsilon:g}"
    try:
        return ledger.reserve(name, job.events, note, payment.fingerprint)
    except BudgetError:
        account = ledger.account(name)
        after = account.spent_with(job.events)
        raise refusal(account, request.epsilon, after, partial(_scaled, job)) from None


def _scaled(job: PreparedFit, epsilon: float) -> tuple[Event, ...]:
    """The releases of a fit at another epsilon, nearly: noise in proportion to 1/epsilon."""
    factor = job.request.epsilon / epsilon
    return tuple(
        replace(event, noise_multiplier=factor * event.noise_multiplier)
        for event in job.events
        if isinstance(event, GaussianEvent)
    )
