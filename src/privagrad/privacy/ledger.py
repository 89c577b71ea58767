"""Budgets in a SQLite file: what was spent on a data set, by whom and when.

A data set has a total (epsilon, delta). A run reserves what it is going to release before its first
release, and reports at its end what it did release, before anyone else sees it. The cost of a data
set is a bound on all its runs together (`privagrad.privacy.filters`); a run that never finished is
charged for everything it reserved.
"""

from __future__ import annotations

import getpass
import math
import os
import sqlite3
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from privagrad._internal import validate
from privagrad.privacy import codec
from privagrad.privacy.events import Event, merged
from privagrad.privacy.filters import epsilon_of_runs

VERSION = 1
"""The version of the file, its `user_version`; that of files of privagrad 0.1 is 0."""

State = Literal["reserved", "finished", "released"]

_PATIENCE_SECONDS = 120.0
_TABLES = """
CREATE TABLE IF NOT EXISTS datasets (
    name TEXT PRIMARY KEY, at TEXT NOT NULL, user TEXT NOT NULL,
    epsilon REAL NOT NULL, delta REAL NOT NULL, fingerprint TEXT
);
CREATE TABLE IF NOT EXISTS history (
    number INTEGER PRIMARY KEY AUTOINCREMENT, at TEXT NOT NULL, user TEXT NOT NULL,
    dataset TEXT NOT NULL REFERENCES datasets(name), run TEXT NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('reserved', 'finished', 'released')),
    note TEXT NOT NULL, events TEXT NOT NULL, UNIQUE (run, state)
);
CREATE TABLE IF NOT EXISTS contents (run TEXT PRIMARY KEY, fingerprint TEXT NOT NULL);
"""
_TRIGGER = """
CREATE TRIGGER IF NOT EXISTS {name} BEFORE {when}
BEGIN SELECT RAISE(ABORT, 'the ledger is append-only'); END;
"""
_KEYS = {
    "datasets": "rowid = NEW.rowid OR name = NEW.name",
    "history": "number = NEW.number OR (run = NEW.run AND state = NEW.state)",
    "contents": "rowid = NEW.rowid OR run = NEW.run",
}
"""Which row of a table an insertion would be in conflict with."""


NO_DELTA_LEFT = (
    "Its epsilon is not the reason: later runs have used up their part of delta. Discovering "
    "categories takes most of that: state them in the schema (classes: --classes)."
)


class BudgetError(ValueError):
    """A run would cost more than is left, or has lost its reservation."""


@dataclass(frozen=True)
class Entry:
    """One line of the history."""

    number: int
    at: str
    user: str
    dataset: str
    run: str
    state: State
    note: str
    events: tuple[Event, ...]


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
    def spent(self) -> float:
        """The epsilon of all runs together, at the data set's delta."""
        return self.spent_with(())

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


class Ledger:
    """A file of budgets that many processes may use at once.

    Guarantees
    ----------
    All runs on a data set together are (epsilon, delta)-differentially private with its total, at
    whatever moment processes are killed and however many reserve at once, if every run reserves
    before its first release and finishes before its results are shown or saved. This holds also
    where the settings of a run were chosen by looking at the results of earlier ones: see
    `privagrad.privacy.filters`. A run may finish with fewer events than it reserved only if the
    others were left out for a reason that does not depend on the rows or on any result.

    Nothing is ever changed or deleted: the history only grows.
    """

    def __init__(self, path: Path | str | None = None) -> None:
        self.path = default_path() if path is None else Path(path)

    def create(
        self, name: str, epsilon: float, delta: float, fingerprint: str | None = None
    ) -> Account:
        """Open a budget for a data set; one content (fingerprint) has at most one budget.

        Content for which a run was charged to another budget is refused too.
        """
        if not name.strip():
            raise ValueError("Expected a name for the data set, found an empty one.")
        epsilon = validate.positive("epsilon", epsilon)
        row = (name, _now(), _user(), epsilon, validate.delta_of(delta), fingerprint)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self._writing() as db:
            if owners := [other for other in _owners(db, fingerprint) if other != name]:
                raise ValueError(
                    f"Expected content without a budget, found that {owners[0]!r} in {self.path} "
                    "was opened for the same content or has paid for it: two budgets for the same "
                    "rows would protect them less than each one says. Use it: "
                    f"--dataset {owners[0]}."
                )
            try:
                db.execute("INSERT INTO datasets VALUES (?, ?, ?, ?, ?, ?)", row)
            except sqlite3.IntegrityError:
                raise ValueError(
                    f"Expected a new name, found a budget for {name!r} in {self.path}: a total is "
                    "fixed once. See it with `privagrad budget show`."
                ) from None
        return self.account(name)

    def names(self) -> list[str]:
        """The data sets, oldest first."""
        if not self.path.exists():
            return []
        with self._reading() as db:
            return [row[0] for row in db.execute("SELECT name FROM datasets ORDER BY at, name")]

    def owners(self, fingerprint: str) -> list[str]:
        """The data sets that were opened for this content or were charged for it, oldest first."""
        if not self.path.exists():
            return []
        with self._reading() as db:
            return _owners(db, fingerprint)

    def require_only_budget(self, name: str, fingerprint: str) -> None:
        """Raise where another data set was opened for this content or was charged for it."""
        _require_only_budget(name, self.owners(fingerprint))

    def account(self, name: str) -> Account:
        """A data set and its runs as they are now."""
        return self._look(name)[1]

    def history(self, name: str) -> list[Entry]:
        """Everything that happened to a data set's budget, oldest first."""
        self.account(name)
        with self._reading() as db:
            return _entries(db, name)

    def reserve(
        self, name: str, events: Iterable[Event], note: str, fingerprint: str | None = None
    ) -> str:
        """Set aside what a run will release, before its first release; the run's name.

        Raises, and sets nothing aside: BudgetError where the total would be passed, ValueError
        where the content that the run reads (`fingerprint`) has another budget.
        """
        wanted = merged(events)
        if not wanted:
            raise ValueError("Expected events to reserve, found none.")
        run = uuid.uuid4().hex[:12]
        while True:
            last, account = self._look(name)
            after = account.spent_with(wanted)
            if not after <= account.epsilon:  # NaN is no cost that fits either
                raise BudgetError(
                    f"Expected a run within the budget of {name!r}, found that it would bring the "
                    f"spent epsilon from {account.spent:.4g} to {after:.4g} of {account.epsilon:g} "
                    f"(delta {account.delta:g}). Nothing was read or spent by it."
                    f"{'' if math.isfinite(after) else ' ' + NO_DELTA_LEFT}"
                )
            with self._writing() as db:
                _require_only_budget(name, _owners(db, fingerprint))
                # Composing takes a while: someone else may have reserved meanwhile.
                if _last(db, name) == last:
                    _write(db, name, run, "reserved", note, wanted)
                    if fingerprint is not None:
                        db.execute("INSERT INTO contents VALUES (?, ?)", (run, fingerprint))
                    return run

    def finish(self, run: str, events: Iterable[Event], note: str = "") -> None:
        """Report what a run really released, before anyone sees it: its charge from now on.

        Raises, after charging everything, BudgetError where the run's reservation was given back
        meanwhile, and RuntimeError where it does not cover the events. The results must then not be
        shown or saved.
        """
        made = merged(events)
        with self._writing() as db:
            entry, state = self._run(db, run)
            if state == "finished":
                raise ValueError(f"Expected a run that is not finished, found {run!r} finished.")
            _write(db, entry.dataset, run, "finished", note or entry.note, made)
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
        with self._writing() as db:
            entry, state = self._run(db, run)
            if state != "reserved":
                raise ValueError(f"Expected a reserved run, found {run!r} {state}.")
            _write(db, entry.dataset, run, "released", reason, ())

    def _run(self, db: sqlite3.Connection, run: str) -> tuple[Entry, State]:
        """A run's reservation, and its state now."""
        rows = db.execute("SELECT * FROM history WHERE run = ? ORDER BY number", (run,)).fetchall()
        if not rows:
            raise ValueError(f"Expected a run of this ledger, found none named {run!r}.")
        entries = [_entry(row) for row in rows]
        return entries[0], entries[-1].state

    def _look(self, name: str) -> tuple[int, Account]:
        """The number of the last entry, and the account up to it."""
        row = None
        if self.path.exists():
            with self._reading() as db:
                row = db.execute("SELECT * FROM datasets WHERE name = ?", (name,)).fetchone()
                entries = _entries(db, name)
        if row is None:
            known = ", ".join(repr(n) for n in self.names()) or "none"
            raise ValueError(
                f"Expected a data set with a budget, found no {name!r} in {self.path} (known: "
                f"{known}). Open one: privagrad budget create {name} --epsilon E --delta D."
            )
        last = entries[-1].number if entries else 0
        return last, Account(row[0], row[3], row[4], row[5], _runs(entries))

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        """One snapshot of the file."""
        db = sqlite3.connect(self.path, timeout=_PATIENCE_SECONDS, isolation_level=None)
        try:
            db.execute("PRAGMA journal_mode = WAL")
            _prepare(db)
            db.execute("BEGIN")
            yield db
        except sqlite3.DatabaseError as error:
            raise OSError(f"Expected a ledger at {self.path}, found: {error}.") from error
        finally:
            db.close()

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        """One transaction, on the disk when it ends; nothing of it after an error."""
        db = sqlite3.connect(self.path, timeout=_PATIENCE_SECONDS, isolation_level=None)
        try:
            db.execute("PRAGMA journal_mode = WAL")
            db.execute("PRAGMA synchronous = FULL")
            _prepare(db)
            db.execute("BEGIN IMMEDIATE")
            yield db
            db.execute("COMMIT")
        except sqlite3.DatabaseError as error:
            raise OSError(f"Expected a ledger at {self.path}, found: {error}.") from error
        finally:
            db.close()


def default_path() -> Path:
    """$PRIVAGRAD_LEDGER, or ledger.db in the user's data directory."""
    if named := os.environ.get("PRIVAGRAD_LEDGER"):
        return Path(named)
    from platformdirs import user_data_path

    return user_data_path("privagrad", appauthor=False) / "ledger.db"


def _prepare(db: sqlite3.Connection) -> None:
    """Make the tables and triggers; in a file of an older version, those that it does not have.

    Rows are never rewritten: what older versions wrote is read as it stands (`codec.loads`).
    """
    version = db.execute("PRAGMA user_version").fetchone()[0]
    if version > VERSION:
        raise ValueError(
            f"Expected a ledger of version {VERSION} or older, found version {version}: a newer "
            "privagrad wrote it. Upgrade this one."
        )
    triggers = _triggers()
    found = {row[0] for row in db.execute("SELECT name FROM sqlite_master")}
    if version == VERSION and found >= {*_KEYS, *triggers}:
        return
    steps = ["BEGIN IMMEDIATE;", _TABLES, *triggers.values(), f"PRAGMA user_version = {VERSION};"]
    try:
        db.executescript("".join(steps) + "COMMIT;")
    except sqlite3.OperationalError as error:
        # Whoever may only read an old file can still do that.
        if "history" not in found or not error.sqlite_errorname.startswith("SQLITE_READONLY"):
            raise
        db.rollback()


def _triggers() -> dict[str, str]:
    """The triggers that keep every table append-only, by name.

    REPLACE INTO deletes the rows that are in its way without a DELETE trigger: it is refused before
    the insertion.
    """
    when = {}
    for table, same in _KEYS.items():
        when[f"{table}_no_UPDATE"] = f"UPDATE ON {table}"
        when[f"{table}_no_DELETE"] = f"DELETE ON {table}"
        when[f"{table}_no_REPLACE"] = (
            f"INSERT ON {table} WHEN EXISTS (SELECT 1 FROM {table} WHERE {same})"
        )
    return {name: _TRIGGER.format(name=name, when=event) for name, event in when.items()}


def _write(
    db: sqlite3.Connection,
    dataset: str,
    run: str,
    state: State,
    note: str,
    events: tuple[Event, ...],
) -> None:
    db.execute(
        "INSERT INTO history (at, user, dataset, run, state, note, events) VALUES (?,?,?,?,?,?,?)",
        (_now(), _user(), dataset, run, state, note, codec.dumps(events)),
    )


def _last(db: sqlite3.Connection, name: str) -> int:
    row = db.execute("SELECT max(number) FROM history WHERE dataset = ?", (name,)).fetchone()
    return int(row[0] or 0)


def _owners(db: sqlite3.Connection, fingerprint: str | None) -> list[str]:
    """Data sets that were opened for a content, or have a run on it that is charged."""
    content = {"content": fingerprint}
    owners = {
        row[0]
        for row in db.execute("SELECT name FROM datasets WHERE fingerprint = :content", content)
    }
    if _has_contents(db):
        last = """
            SELECT dataset, events FROM history JOIN contents USING (run)
            WHERE contents.fingerprint = :content
            AND number = (SELECT max(number) FROM history AS later WHERE later.run = history.run)
        """
        # An entry without events is no charge: such a run was given back, or released nothing.
        owners |= {dataset for dataset, events in db.execute(last, content) if codec.loads(events)}
    names = [row[0] for row in db.execute("SELECT name FROM datasets ORDER BY at, name")]
    return [name for name in names if name in owners]


def _has_contents(db: sqlite3.Connection) -> bool:
    """Not in a file of version 0.1.0 that cannot be written."""
    found = db.execute("SELECT count(*) FROM sqlite_master WHERE name = 'contents'").fetchone()
    return bool(found[0])


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


def _entries(db: sqlite3.Connection, name: str) -> list[Entry]:
    rows = db.execute("SELECT * FROM history WHERE dataset = ? ORDER BY number", (name,))
    return [_entry(row) for row in rows]


def _entry(row: Any) -> Entry:
    number, at, user, dataset, run, state, note, events = row
    return Entry(number, at, user, dataset, run, state, note, codec.loads(events))


def _runs(entries: list[Entry]) -> tuple[Run, ...]:
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


def _beyond(made: tuple[Event, ...], reserved: tuple[Event, ...]) -> int:
    """How many releases were made that were not reserved."""
    allowed = {replace(event, count=1): event.count for event in reserved}
    return sum(max(0, e.count - allowed.get(replace(e, count=1), 0)) for e in made)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError, ImportError):
        return "unknown"
