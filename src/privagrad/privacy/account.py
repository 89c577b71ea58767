"""A data set's budget as a value: its total, and every run that was charged to it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from privagrad._internal.markup import html_table
from privagrad.privacy.accounting import PrivacyPlan
from privagrad.privacy.events import Event, Unit, merged
from privagrad.privacy.filters import epsilon_of_runs
from privagrad.privacy.ledger_store import Entry, State


@dataclass(frozen=True)
class Run:
    """A run of the history; `events` are those it is charged for."""

    name: str
    at: str
    user: str
    state: State
    note: str
    events: tuple[Event, ...]


@dataclass(frozen=True)
class Account:
    """A data set, its total, and every run on it."""

    name: str
    epsilon: float
    delta: float
    fingerprint: str | None
    runs: tuple[Run, ...]

    @property
    def events(self) -> tuple[Event, ...]:
        return merged(event for run in self.runs for event in run.events)

    @property
    def units(self) -> frozenset[Unit]:
        """What the runs that are charged protect: rows, users, or nothing yet.

        It is both where a run was given back, and finished after runs of the other unit.
        """
        return frozenset(event.unit for event in self.events)

    @property
    def unit(self) -> Unit | None:
        """Whether all runs that are charged protect rows, or users; None: neither, or both."""
        units = self.units
        return next(iter(units)) if len(units) == 1 else None

    @property
    def spent(self) -> float:
        """The epsilon of all runs together, at the data set's delta."""
        return self.spent_with(())

    def _repr_html_(self) -> str:
        spent = self.spent
        left = max(self.epsilon - spent, 0.0)
        title = (
            f"Budget {self.name}: {spent:.4g} of epsilon {self.epsilon:g} spent, {left:.4g} left "
            f"(delta {self.delta:g})"
        )
        rows = [
            (run.name, run.at[:16].replace("T", " "), run.user, run.state, run.note,
             PrivacyPlan(run.events).epsilon(self.delta))
            for run in self.runs
        ]  # fmt: skip
        return html_table(
            title, ("run", "since", "user", "state", "note", "epsilon alone"), rows, 5
        )

    def spent_with(self, events: Iterable[Event]) -> float:
        """The epsilon of all runs and one more with these events, at the data set's delta.

        It bounds them also where the settings of later runs depend on the results of earlier ones.
        It is infinite where a run no longer fits into the part of delta that later runs may use.
        """
        runs = [merged(run.events) for run in self.runs]
        return epsilon_of_runs(runs, self.epsilon, self.delta, merged(events))

    def largest(self, plan: Callable[[float], tuple[Event, ...]], precision: float = 0.01) -> float:
        """The largest epsilon, to `precision` of the total, for which plan(epsilon) still fits.

        Costs of Gaussian releases add up almost in squares of 1/noise: a first guess from that,
        and corrections along the chord.
        """

        def excess(epsilon: float) -> float:
            return self.spent_with(plan(epsilon)) - self.epsilon

        spent, step = self.spent, precision * self.epsilon
        low, below = 0.0, spent - self.epsilon
        high, above = self.epsilon, math.inf
        if not below < 0:
            return 0.0
        guess = self.epsilon - spent / 2
        while high - low > step:
            guess = min(max(guess, low + step / 2), high - step / 2)
            found = excess(guess)
            if found <= 0:
                low, below = guess, found
            else:
                high, above = guess, found
            chord = low - below * (high - low) / (above - below) if above < math.inf else high
            # A little to the other side of the root, so that the interval closes from both ends.
            guess = chord + (step / 2 if found <= 0 else -step / 2)
        return low


def require_unit(account: Account, wanted: Unit | None) -> None:
    """Refuse a run of another unit than those before it: their costs do not add up.

    With None a run of any unit is refused where there are runs of both.
    """
    if len(account.units) > 1:
        raise ValueError(
            f"Expected runs of one unit on the budget of {account.name!r}, found runs that protect "
            "rows and runs that protect users: one that was given back finished after all. Their "
            "costs do not add up, so that nothing is known to be left. Nothing was spent."
        )
    found = account.unit
    if wanted is None or found is None or found == wanted:
        return
    what = "name users (--user-column, groups=)" if found == "user" else "name no users"
    raise ValueError(
        f"Expected a run whose unit is {found!r}, as that of the runs before it on the budget of "
        f"{account.name!r}, found {wanted!r}: an epsilon for rows and one for users do not add up. "
        f"Runs on this budget must {what}. Nothing was spent."
    )


def runs_of(entries: list[Entry]) -> tuple[Run, ...]:
    """The runs of a history, oldest first."""
    runs: dict[str, Run] = {}
    for entry in entries:
        begun = runs.get(entry.run)
        runs[entry.run] = Run(
            entry.run,
            begun.at if begun else entry.at,
            begun.user if begun else entry.user,
            entry.state,
            begun.note if begun else entry.note,
            entry.events,
        )
    return tuple(runs.values())
