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


def _entries(rows: list[Row]) -> list[Entry]:
    """Entries of rows that are in order, with all rows of each of their runs.

    What a later entry of the same run has replaced is charged no more. So damaged events make a
    data set unreadable only until their run is given back.
    """
    last = {row[4]: row[0] for row in rows}
    return [_entry(row, is_charged=row[0] == last[row[4]]) for row in rows]


def _entry(row: Row, *, is_charged: bool) -> Entry:
    number, at, user, dataset, run, state, note, told = row
    events: tuple[Event, ...] = ()
    try:
        events = codec.loads(told)
    except (ValueError, TypeError, KeyError) as error:
        if is_charged:
            raise ValueError(
                f"Expected the events of run {run!r} on {dataset!r}, found some that cannot be "
                f"read: {error} If nothing was released: privagrad budget release {run} --reason "
                "WHY."
            ) from error
    return Entry(number, at, user, dataset, run, state, note, events)


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
    return _entries(rows)


def run_of(tables: Tables, run: str) -> tuple[str, State]:
    """The data set of a run, and its state now."""
    found = tables.rows("SELECT dataset, state FROM history WHERE run = ? ORDER BY number", (run,))
    if not found:
        raise ValueError(f"Expected a run of this ledger, found none named {run!r}.")
    return found[0][0], found[-1][1]


def reservation(tables: Tables, run: str) -> Entry:
    """The first entry of a run."""
    rows = tables.rows(f"{select('history')} WHERE run = ? ORDER BY number", (run,))
    return _entries(rows)[0]


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
