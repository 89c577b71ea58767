"""The SQLite file of a ledger: tables that only grow, transactions, versions."""

from __future__ import annotations

import getpass
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from privagrad.privacy import codec
from privagrad.privacy.events import Event

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


@contextmanager
def reading(path: Path) -> Iterator[sqlite3.Connection]:
    """One snapshot of the file."""
    db = sqlite3.connect(path, timeout=_PATIENCE_SECONDS, isolation_level=None)
    try:
        db.execute("PRAGMA journal_mode = WAL")
        _prepare(db)
        db.execute("BEGIN")
        yield db
    except sqlite3.DatabaseError as error:
        raise OSError(f"Expected a ledger at {path}, found: {error}.") from error
    finally:
        db.close()


@contextmanager
def writing(path: Path) -> Iterator[sqlite3.Connection]:
    """One transaction, on the disk when it ends; nothing of it after an error."""
    db = sqlite3.connect(path, timeout=_PATIENCE_SECONDS, isolation_level=None)
    try:
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = FULL")
        _prepare(db)
        db.execute("BEGIN IMMEDIATE")
        yield db
        db.execute("COMMIT")
    except sqlite3.DatabaseError as error:
        raise OSError(f"Expected a ledger at {path}, found: {error}.") from error
    finally:
        db.close()


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


def write(
    db: sqlite3.Connection,
    dataset: str,
    run: str,
    state: State,
    note: str,
    events: tuple[Event, ...],
) -> None:
    db.execute(
        "INSERT INTO history (at, user, dataset, run, state, note, events) VALUES (?,?,?,?,?,?,?)",
        (now(), user(), dataset, run, state, note, codec.dumps(events)),
    )


def last_number(db: sqlite3.Connection, name: str) -> int:
    row = db.execute("SELECT max(number) FROM history WHERE dataset = ?", (name,)).fetchone()
    return int(row[0] or 0)


def owners(db: sqlite3.Connection, fingerprint: str | None) -> list[str]:
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


def entries(db: sqlite3.Connection, name: str) -> list[Entry]:
    rows = db.execute("SELECT * FROM history WHERE dataset = ? ORDER BY number", (name,))
    return [entry(row) for row in rows]


def entry(row: Any) -> Entry:
    number, at, user, dataset, run, state, note, events = row
    return Entry(number, at, user, dataset, run, state, note, codec.loads(events))


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError, ImportError):
        return "unknown"
