"""The SQLite file of a ledger: tables that only grow, transactions, versions."""

from __future__ import annotations

import getpass
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from privagrad.privacy.ledger_store import (
    PATIENCE_SECONDS,
    Entry,
    Right,
    Row,
    State,
    T,
    Tables,
)

__all__ = ["MOVED", "VERSION", "Entry", "FileStore", "FileTables", "State", "close", "reopen"]

VERSION = 1
"""The version of the file, its `user_version`; that of files of privagrad 0.1 is 0."""

MOVED = 1_000_000
"""The `user_version` of a file whose budgets were moved to a server. Nothing is added to it.

Programs that do not know it take it for that of a newer version, and refuse.
"""

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


class FileTables:
    """The tables of a file within one transaction."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self.db = db

    @property
    def has_contents(self) -> bool:
        return bool(self.rows("SELECT 1 FROM sqlite_master WHERE name = 'contents'"))

    def rows(self, sql: str, values: Sequence[object] = ()) -> list[Row]:
        return self.db.execute(sql, tuple(values)).fetchall()

    def add(self, table: str, values: Mapping[str, object]) -> None:
        added = dict(values)
        if table != "contents":
            added |= {"at": now(), "user": user()}
        names, marks = ", ".join(added), ", ".join("?" * len(added))
        self.rows(f"INSERT INTO {table} ({names}) VALUES ({marks})", tuple(added.values()))


class FileStore:
    """Budgets in a file, for processes on one machine."""

    def __init__(self, path: Path) -> None:
        self.path, self.where = path, str(path)

    def exists(self) -> bool:
        return self.path.exists()

    def now(self) -> str:
        return now()

    def read(self, look: Callable[[Tables], T]) -> T:
        with self.connected(VERSION) as db:
            db.execute("BEGIN")
            return look(FileTables(db))

    def write(
        self, change: Callable[[Tables], T], landed: Callable[[Tables], bool], right: Right
    ) -> T:
        """Make a change: who may write the file has every right, and no commit is ever in doubt."""
        if right == "open":
            self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.connected(VERSION) as db:
            db.execute("PRAGMA synchronous = FULL")
            db.execute("BEGIN IMMEDIATE")
            found = change(FileTables(db))
            db.execute("COMMIT")
            return found

    @contextmanager
    def connected(self, newest: int) -> Iterator[sqlite3.Connection]:
        """A connection to a file of this version or an older one; uncommitted changes are lost."""
        try:
            db = sqlite3.connect(self.path, timeout=PATIENCE_SECONDS, isolation_level=None)
        except sqlite3.DatabaseError as error:
            raise OSError(f"Expected a ledger at {self.path}, found: {error}.") from error
        try:
            db.execute("PRAGMA journal_mode = WAL")
            _prepare(db, newest)
            yield db
        except sqlite3.DatabaseError as error:
            raise OSError(f"Expected a ledger at {self.path}, found: {error}.") from error
        except UnicodeDecodeError as error:  # of SQLite's message that quotes a damaged file
            raise OSError(f"Expected a ledger at {self.path}, found a damaged one.") from error
        finally:
            db.close()


def _prepare(db: sqlite3.Connection, newest: int) -> None:
    """Make the tables and triggers; in a file of an older version, those that it does not have.

    Rows are never rewritten: what older versions wrote is read as it stands (`codec.loads`).
    """
    version = db.execute("PRAGMA user_version").fetchone()[0]
    if version == MOVED and newest < MOVED:
        _, target, at = moved_to(db)
        raise ValueError(
            f"Expected an open ledger, found a file whose budgets were moved to {target} "
            f"({at}). Use --ledger {target} or $PRIVAGRAD_LEDGER. Nothing was spent."
        )
    if version not in (0, VERSION, newest):
        raise ValueError(
            f"Expected a ledger of version {VERSION} or older, found version {version}: a newer "
            "privagrad wrote it. Upgrade this one."
        )
    if version == MOVED:
        return
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


def close(db: sqlite3.Connection, move: str, target: str) -> None:
    """Let nobody add to the file any more, whatever version of privagrad or SQLite opens it.

    `move` is the name of the move to the server that people call `target`.
    """
    db.execute("CREATE TABLE moved (move TEXT NOT NULL, target TEXT NOT NULL, at TEXT NOT NULL)")
    db.execute("INSERT INTO moved VALUES (?, ?, ?)", (move, target, now()))
    message = f"the budgets of this file were moved to {target}: use that ledger".replace("'", "''")
    for table in _KEYS:
        db.execute(
            f"CREATE TRIGGER {table}_moved BEFORE INSERT ON {table} "
            f"BEGIN SELECT RAISE(ABORT, '{message}'); END"
        )
    db.execute(f"PRAGMA user_version = {MOVED}")


def reopen(db: sqlite3.Connection) -> None:
    """Take `close` back, after a move of which nothing reached the server."""
    for table in _KEYS:
        db.execute(f"DROP TRIGGER {table}_moved")
    db.execute("DROP TABLE moved")
    db.execute(f"PRAGMA user_version = {VERSION}")


def moved_to(db: sqlite3.Connection) -> tuple[str, str, str]:
    """The name of the move that closed a file, the server, and when."""
    move, target, at = db.execute("SELECT move, target, at FROM moved").fetchone()
    return move, target, at


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError, ImportError):
        return "unknown"
