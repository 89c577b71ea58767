"""The releases of one run, compared with its plan while they are made."""

from __future__ import annotations

import math

from privagrad.privacy.accounting import PrivacyPlan, PrivacyReport
from privagrad.privacy.events import Release, SelectEvent
from privagrad.privacy.noise import RandomSource


class Releases:
    """A plan, the randomness it is carried out with, and what was released so far.

    Every mechanism takes its noise multiplier from here, by the purpose of its release.

    Parameters
    ----------
    plan : PrivacyPlan
        What may be released.
    source : RandomSource
        Where noise and samples come from.
    delta : float
        The delta of the report.

    Guarantees
    ----------
    A release that the plan does not contain, or that exceeds its count there, is refused.
    """

    def __init__(self, plan: PrivacyPlan, source: RandomSource, delta: float = math.nan) -> None:
        self.plan, self.source, self.delta = plan, source, delta
        self._events = {event.purpose: event for event in plan.events}
        self._left = {event.purpose: event.count for event in plan.events}
        if len(self._left) < len(plan.events):
            purposes = [event.purpose for event in plan.events]
            raise ValueError(f"Expected a plan with one event a purpose, found {purposes}.")

    def take(self, purpose: str) -> Release:
        """The event of the next release for `purpose`, which is counted."""
        left = self._left.get(purpose, 0)
        if left == 0:
            raise RuntimeError(
                f"Expected a release that is planned, found one for {purpose!r} beyond those of "
                "the plan. This is a bug in privagrad; please report it."
            )
        event = self._events[purpose]
        if isinstance(event, SelectEvent):
            raise TypeError(f"Expected a single release for {purpose!r}, found a selection.")
        self._left[purpose] = left - 1
        return event

    def noise_for(self, purpose: str) -> float:
        """The noise multiplier of the next release for `purpose`, which is counted."""
        return self.take(purpose).noise_multiplier

    @property
    def made(self) -> dict[str, int]:
        """How many releases were made for each purpose."""
        return {purpose: e.count - self._left[purpose] for purpose, e in self._events.items()}

    def report(self) -> PrivacyReport:
        """The cost of the whole plan: nothing was released beyond it."""
        source = self.source
        return self.plan.report(self.delta, seeded=source.seeded, noise=source.noise)
