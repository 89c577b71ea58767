"""Budgets in a file or on a server: what was spent on a data set, by whom and when.

A data set has a total (epsilon, delta). A run reserves what it is going to release before its first
release, and reports at its end what it did release, before anyone else sees it. The cost of a data
set is a bound on all its runs together (`privagrad.privacy.filters`); a run that never finished is
charged for everything it reserved.
"""

from __future__ import annotations

import math
import os
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from privagrad._internal import validate
from privagrad.privacy import ledger_store as store
from privagrad.privacy.account import Account, Run, require_unit, runs_of
from privagrad.privacy.events import Event, merged, single, unit_of
from privagrad.privacy.ledger_file import FileStore
from privagrad.privacy.ledger_server import ServerStore
from privagrad.privacy.ledger_store import Entry, Row, State, Store, Tables
from privagrad.privacy.ledger_url import is_url, require_path

__all__ = [
    "NO_DELTA_LEFT",
    "Account",
    "BudgetError",
    "Entry",
    "Ledger",
    "Run",
    "default_path",
    "require_unit",
    "store_at",
]

NO_DELTA_LEFT = (
    "Its epsilon is not the reason: later runs have used up their part of delta. Discovering "
    "categories takes most of that: state them in the schema (classes: --classes)."
)


class BudgetError(ValueError):
    """A run would cost more than is left, or has lost its reservation."""


class Ledger:
    """Budgets that many processes and people may use at once.

    Parameters
    ----------
    path : path, str or None
        A file, or the URL of a PostgreSQL database such as ``postgresql://ann@host/ledger``, which
        ``privagrad budget setup`` has prepared. None: see `default_path`.

    Guarantees
    ----------
    All runs on a data set together are (epsilon, delta)-differentially private with its total, at
    whatever moment processes are killed, connections break or the server restarts, and however
    many reserve at once, if every run reserves before its first release and finishes before its
    results are shown or saved. This holds also where the settings of a run were chosen by looking
    at the results of earlier ones: see `privagrad.privacy.filters`. A run may finish with fewer
    events than it reserved only if the others were left out for a reason that does not depend on
    the rows or on any result.

    Nothing is ever changed or deleted: the history only grows.
    """

    def __init__(self, path: Path | str | None = None) -> None:
        self._store = store_at(default_path() if path is None else path)

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Version 0.1 pickled the path alone.
        self._store = state["_store"] if "_store" in state else store_at(state["path"])

    @property
    def where(self) -> str:
        """What people call the place of the budgets: a path, or a URL without its password."""
        return self._store.where

    @property
    def path(self) -> Path:
        """The file of the budgets."""
        if isinstance(self._store, FileStore):
            return self._store.path
        raise ValueError(f"Expected a ledger in a file, found {self.where}. Its name is `where`.")

    def __repr__(self) -> str:
        return f"Ledger({self.where!r})"

    def exists(self) -> bool:
        """Whether there is anything to read; a ledger in a file begins with its first budget."""
        return self._store.exists()

    def now(self) -> str:
        """The time on the clock that dates the entries: that of the server, if there is one."""
        return self._store.now()

    def create(
        self, name: str, epsilon: float, delta: float, fingerprint: str | None = None
    ) -> Account:
        """Open a budget for a data set; one content (fingerprint) has at most one budget.

        Content for which a run was charged to another budget is refused too.
        """
        if not name.strip():
            raise ValueError("Expected a name for the data set, found an empty one.")
        epsilon, delta = validate.positive("epsilon", epsilon), validate.delta_of(delta)
        values = {"epsilon": epsilon, "delta": delta, "fingerprint": fingerprint}

        def change(tables: Tables) -> None:
            owners = store.owners(tables, fingerprint)
            if others := [other for other in owners if other != name]:
                raise ValueError(
                    f"Expected content without a budget, found that {others[0]!r} in {self.where} "
                    "was opened for the same content or has paid for it: two budgets for the same "
                    "rows would protect them less than each one says. Use it: "
                    f"--dataset {others[0]}."
                )
            if store.dataset(tables, name) is not None:
                raise ValueError(
                    f"Expected a new name, found a budget for {name!r} in {self.where}: a total is "
                    "fixed once. See it with `privagrad budget show`."
                )
            tables.add("datasets", {"name": name, **values})

        def landed(tables: Tables) -> bool:
            row = store.dataset(tables, name)
            return row is not None and row[3:] == tuple(values.values())

        self._store.write(change, landed, "open")
        return self.account(name)

    def names(self) -> list[str]:
        """The data sets, oldest first."""
        return self._store.read(store.names) if self.exists() else []

    def owners(self, fingerprint: str) -> list[str]:
        """The data sets that were opened for this content or were charged for it, oldest first."""
        if not self.exists():
            return []
        return self._store.read(lambda tables: store.owners(tables, fingerprint))

    def require_only_budget(self, name: str, fingerprint: str) -> None:
        """Raise where another data set was opened for this content or was charged for it."""
        _require_only_budget(name, self.owners(fingerprint))

    def account(self, name: str) -> Account:
        """A data set and its runs as they are now."""
        return self._look(name)[1]

    def history(self, name: str) -> list[Entry]:
        """Everything that happened to a data set's budget, oldest first."""
        self.account(name)
        return self._store.read(lambda tables: store.entries(tables, name))

    def reserve(
        self, name: str, events: Iterable[Event], note: str, fingerprint: str | None = None
    ) -> str:
        """Set aside what a run will release, before its first release; the run's name.

        Raises, and sets nothing aside: BudgetError where the total would be passed, ValueError
        where the content that the run reads (`fingerprint`) has another budget, or where the run
        protects rows and those before it users, or the other way round.
        """
        wanted = merged(events)
        if not wanted:
            raise ValueError("Expected events to reserve, found none.")
        run = uuid.uuid4().hex[:12]
        while True:
            seen, account = self._look(name)
            require_unit(account, unit_of(wanted) or "row")
            after = account.spent_with(wanted)
            if not after <= account.epsilon:  # NaN is no cost that fits either
                raise BudgetError(
                    f"Expected a run within the budget of {name!r}, found that it would bring the "
                    f"spent epsilon from {account.spent:.4g} to {after:.4g} of {account.epsilon:g} "
                    f"(delta {account.delta:g}). Nothing was read or spent by it."
                    f"{'' if math.isfinite(after) else ' ' + NO_DELTA_LEFT}"
                )

            def change(tables: Tables, seen: int = seen) -> bool:
                _require_only_budget(name, store.owners(tables, fingerprint))
                # Composing takes a while: someone else may have reserved meanwhile.
                if store.size(tables, name) != seen:
                    return False
                store.add_entry(tables, name, run, "reserved", note, wanted)
                if fingerprint is not None:
                    tables.add("contents", {"run": run, "fingerprint": fingerprint})
                return True

            if self._store.write(change, _landed(run, "reserved"), "spend"):
                return run

    def finish(self, run: str, events: Iterable[Event], note: str = "") -> None:
        """Report what a run really released, before anyone sees it: its charge from now on.

        Raises, after charging everything, BudgetError where the run's reservation was given back
        meanwhile, and RuntimeError where it does not cover the events. The results must then not be
        shown or saved. On a server, finishing somebody else's run, or with fewer events than were
        reserved, is for users who may give reservations back.
        """
        made = merged(events)

        def change(tables: Tables) -> tuple[Entry, State]:
            state = store.run_of(tables, run)[1]
            if state == "finished":
                raise ValueError(f"Expected a run that is not finished, found {run!r} finished.")
            entry = store.reservation(tables, run)
            store.add_entry(tables, entry.dataset, run, "finished", note or entry.note, made)
            return entry, state

        entry, state = self._store.write(change, _landed(run, "finished"), "spend")
        if state == "released":
            raise BudgetError(
                f"Expected an open reservation of run {run}, found that it was given back with "
                "`privagrad budget release` while the run was alive. Its releases are charged now, "
                "and its results are not saved: others may have spent the budget since. See "
                "`privagrad budget show`, and start the run again if it still fits."
            )
        if beyond := _beyond(made, entry.events):
            raise RuntimeError(
                f"Expected releases within the reservation of run {run}, found {beyond} beyond it. "
                "All are charged."
            )

    def release(self, run: str, reason: str) -> None:
        """Give a dead run's reservation back, because someone knows that it released nothing.

        A run that was alive after all is charged when it finishes.
        """
        if not reason.strip():
            raise ValueError("Expected a reason, found none: it goes into the history.")

        def change(tables: Tables) -> None:
            name, state = store.run_of(tables, run)
            if state != "reserved":
                raise ValueError(f"Expected a reserved run, found {run!r} {state}.")
            store.add_entry(tables, name, run, "released", reason, ())

        self._store.write(change, _landed(run, "released"), "release")

    def _look(self, name: str) -> tuple[int, Account]:
        """The number of entries, and the account with all of them."""

        def look(tables: Tables) -> tuple[Row | None, list[Entry], list[str]]:
            row = store.dataset(tables, name)
            return row, store.entries(tables, name), [] if row else store.names(tables)

        row, entries, names = self._store.read(look) if self.exists() else (None, [], [])
        if row is None:
            known = ", ".join(repr(n) for n in names) or "none"
            raise ValueError(
                f"Expected a data set with a budget, found no {name!r} in {self.where} (known: "
                f"{known}). Open one: privagrad budget create {name} --epsilon E --delta D."
            )
        return len(entries), Account(row[0], row[3], row[4], row[5], runs_of(entries))


def default_path() -> Path | str:
    """$PRIVAGRAD_LEDGER, a path or a URL, or ledger.db in the user's data directory."""
    if named := os.environ.get("PRIVAGRAD_LEDGER"):
        return named if "://" in named else Path(named)
    from platformdirs import user_data_path

    return user_data_path("privagrad", appauthor=False) / "ledger.db"


def store_at(place: Path | str) -> Store:
    """The file or the server that keeps a ledger."""
    if isinstance(place, str) and is_url(place):
        return ServerStore(place)
    return FileStore(require_path(place))


def _landed(run: str, state: State) -> Callable[[Tables], bool]:
    """Tells whether a run has reached a state."""
    return lambda tables: store.has_entry(tables, run, state)


def _require_only_budget(name: str, owners: list[str]) -> None:
    others = [owner for owner in owners if owner != name]
    if not others:
        return
    what = (
        "Both pay for them already: start a new ledger with a total that leaves room for what was "
        "spent."
        if name in owners
        else f"Use --dataset {others[0]}."
    )
    raise ValueError(
        f"Expected the only budget for this content, found {name!r} beside "
        f"{', '.join(map(repr, others))}, which was opened for it or has paid for it: two budgets "
        f"for the same rows would protect them less than each one says. {what} Nothing was spent."
    )


def _beyond(made: tuple[Event, ...], reserved: tuple[Event, ...]) -> int:
    """How many releases were made that were not reserved."""
    allowed = {single(event): event.count for event in reserved}
    return sum(max(0, e.count - allowed.get(single(e), 0)) for e in made)
