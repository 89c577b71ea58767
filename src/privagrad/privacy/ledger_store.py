"""What a ledger asks of the place that keeps it: snapshots, transactions, a handful of statements.

The statements are written once, in SQL that SQLite and PostgreSQL both read, with `?` for values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

from privagrad.privacy import codec
from privagrad.privacy.events import Event

State = Literal["reserved", "finished", "released"]
Right = Literal["read", "open", "spend", "release"]
"""What a user may do: see budgets, open them, reserve and finish runs, give reservations back."""

Row = tuple[Any, ...]
T = TypeVar("T")
PATIENCE_SECONDS = 120.0
"""How long an operation waits for others, for a lost connection or for a server to come back."""

COLUMNS = {
    "datasets": ("name", "at", "user", "epsilon", "delta", "fingerprint"),
    "history": ("number", "at", "user", "dataset", "run", "state", "note", "events"),
    "contents": ("run", "fingerprint"),
}
"""The columns of every table, in order."""


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


class UnknownOutcomeError(OSError):
    """Nobody can tell whether a change was written: the connection broke while it was."""


class Tables(Protocol):
    """The tables of a ledger within one snapshot or one transaction."""

    @property
    def has_contents(self) -> bool:
        """False in a file of version 0.1.0 that cannot be written."""

    def rows(self, sql: str, values: Sequence[object] = ()) -> list[Row]:
        """The rows that a statement finds."""

    def add(self, table: str, values: Mapping[str, object]) -> None:
        """A new row. Its `number`, `at` and `user` come from the store."""


class Store(Protocol):
    """A place that keeps the tables of a ledger: they grow, and nothing in them changes."""

    where: str
    """What people call the place; without passwords."""

    def exists(self) -> bool:
        """Whether there is a ledger to read."""

    def read(self, look: Callable[[Tables], T]) -> T:
        """What `look` finds in one snapshot."""

    def write(
        self, change: Callable[[Tables], T], landed: Callable[[Tables], bool], right: Right
    ) -> T:
        """Make a change that is serialised with all others, and durable when this returns.

        Nothing of it is kept when this raises, except for `UnknownOutcomeError`. `change` may be
        called several times, each time on the tables as they are then; `landed` tells whether its
        row is in the ledger. `right` is what the user needs for it.
        """

    def now(self) -> str:
        """The time on the clock that dates the entries."""


def make_entry(row: Row) -> Entry:
    number, at, user, dataset, run, state, note, events = row
    return Entry(number, at, user, dataset, run, state, note, codec.loads(events))


def select(table: str) -> str:
    """The statement that finds all rows of a table."""
    quoted = [f'"{name}"' for name in COLUMNS[table]]  # in PostgreSQL, user is a function
    return f"SELECT {', '.join(quoted)} FROM {table}"


def names(tables: Tables) -> list[str]:
    """All data sets, oldest first."""
    return [row[0] for row in tables.rows("SELECT name FROM datasets ORDER BY at, name")]


def dataset(tables: Tables, name: str) -> Row | None:
    return next(iter(tables.rows(f"{select('datasets')} WHERE name = ?", (name,))), None)


def entries(tables: Tables, name: str) -> list[Entry]:
    """The history of a data set, oldest entry first."""
    rows = tables.rows(f"{select('history')} WHERE dataset = ? ORDER BY number", (name,))
    return [make_entry(row) for row in rows]


def entries_of_run(tables: Tables, run: str) -> list[Entry]:
    rows = tables.rows(f"{select('history')} WHERE run = ? ORDER BY number", (run,))
    return [make_entry(row) for row in rows]


def size(tables: Tables, name: str) -> int:
    """How many entries a data set has: it changes with every new one."""
    ((count,),) = tables.rows("SELECT count(*) FROM history WHERE dataset = ?", (name,))
    return int(count)


def has_entry(tables: Tables, run: str, state: State) -> bool:
    found = tables.rows("SELECT 1 FROM history WHERE run = ? AND state = ?", (run, state))
    return bool(found)


def add_entry(
    tables: Tables, name: str, run: str, state: State, note: str, events: tuple[Event, ...]
) -> None:
    values = {"dataset": name, "run": run, "state": state, "note": note}
    tables.add("history", {**values, "events": codec.dumps(events)})


def owners(tables: Tables, fingerprint: str | None) -> list[str]:
    """Data sets that were opened for a content, or have a run on it that is charged."""
    if fingerprint is None:
        return []
    content = (fingerprint,)
    found = tables.rows("SELECT name FROM datasets WHERE fingerprint = ?", content)
    owners = {row[0] for row in found}
    if tables.has_contents:
        last = """
            SELECT dataset, events FROM history JOIN contents ON contents.run = history.run
            WHERE contents.fingerprint = ? AND number =
            (SELECT max(number) FROM history AS later WHERE later.run = history.run)
        """
        # An entry without events is no charge: such a run was given back, or released nothing.
        owners |= {name for name, events in tables.rows(last, content) if codec.loads(events)}
    return [name for name in names(tables) if name in owners]
