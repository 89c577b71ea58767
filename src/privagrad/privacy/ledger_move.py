"""Budgets of a file moved to a server, entry by entry: completely or not at all.

The file is closed first, so that at no moment both places can be spent. If the server then refuses
the copy, the file is opened again. If the move is stopped in between, the file stays closed, and
the same move made again completes it.
"""

from __future__ import annotations

import json
import sqlite3
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from privagrad.privacy import ledger_file as file
from privagrad.privacy import ledger_store as store
from privagrad.privacy.ledger_file import FileStore, FileTables
from privagrad.privacy.ledger_server import ROLES, ServerStore
from privagrad.privacy.ledger_store import COLUMNS, Row, Tables, UnknownOutcomeError


@dataclass(frozen=True)
class Moved:
    """What a move has copied: names of data sets, numbers of entries, runs that are open."""

    datasets: tuple[str, ...]
    entries: int
    open_runs: tuple[str, ...]


@dataclass(frozen=True)
class _Copy:
    """All rows of a file, in order."""

    datasets: list[Row]
    history: list[Row]
    contents: list[Row]

    @property
    def open_runs(self) -> tuple[str, ...]:
        over = {row[4] for row in self.history if row[5] != "reserved"}
        return tuple(row[4] for row in self.history if row[4] not in over)

    @property
    def told(self) -> Moved:
        return Moved(tuple(row[0] for row in self.datasets), len(self.history), self.open_runs)


def move(source: Path, target: str, *, with_open_runs: bool = False) -> Moved:
    """Copy all budgets of a file to a server, compare, and close the file.

    Parameters
    ----------
    source : path
        A ledger in a file. Nothing can be added to it afterwards, by any version of privagrad.
    target : str
        The URL of a ledger on a server, to a user who may open budgets there.
    with_open_runs : bool
        Whether runs that are reserved now are carried over as reserved. They stay charged for
        everything until they are given back there: their processes know only the file, and are
        refused when they finish. Without it such a file is refused.

    Guarantees
    ----------
    At no moment can a budget be spent in both places. Times, users, names of runs, fingerprints and
    the text of all events are the same there, which is compared before the copy is committed.
    """
    server, old = ServerStore(target), FileStore(source)
    if not source.exists():
        raise ValueError(f"Expected the file of a ledger, found none at {source}.")
    ledger = server.read(_open_ledger)
    with old.connected(file.MOVED) as db:
        db.execute("PRAGMA synchronous = FULL")
        name = _name_of_move(db, ledger, server.where)
        if name is not None:
            # What a stopped move has sent may still arrive: the file is not opened again.
            _send(server, name, source, _copy_of(db))
            return _copy_of(db).told
        server.read(lambda tables: _require_new(tables, _copy_of(db)))
        name, copy = _close(db, ledger, server.where, with_open_runs)
        try:
            _send(server, name, source, copy)
        except UnknownOutcomeError as error:
            raise UnknownOutcomeError(
                f"{error} The file {source} is closed. Make the same move again."
            ) from error
        except Exception:
            with _transaction(db):
                file.reopen(db)
            raise
    return copy.told


def _open_ledger(tables: Tables) -> str:
    """The identity of a ledger on a server, in which the user may open budgets."""
    right = "has_function_privilege('privagrad.move_in(uuid, text, json, json, json)', 'EXECUTE')"
    ((ledger, may_open),) = tables.rows(f"SELECT ledger::text, {right} FROM about")
    if not may_open:
        raise PermissionError(
            "Expected a user who may open budgets there, found one without the role "
            f"{ROLES['open'][0]}. Ask the owner of the ledger for it. Nothing was moved."
        )
    return str(ledger)


def _close(
    db: sqlite3.Connection, ledger: str, where: str, with_open_runs: bool
) -> tuple[str, _Copy]:
    """Close a file; the name of the move, and all rows of the file."""
    name = f"{uuid.uuid4()} {ledger}"
    with _transaction(db):
        copy = _copy_of(db)
        if copy.open_runs and not with_open_runs:
            raise ValueError(
                f"Expected no run that is reserved, found {', '.join(copy.open_runs)}. Wait for "
                "them, give them back, or carry them over as they are with --with-open-runs: they "
                "stay charged, and cannot finish. Nothing was moved."
            )
        file.close(db, name, where)
    return name, copy


@contextmanager
def _transaction(db: sqlite3.Connection) -> Iterator[None]:
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
        db.execute("COMMIT")
    except BaseException:
        if db.in_transaction:
            db.execute("ROLLBACK")
        raise


def _name_of_move(db: sqlite3.Connection, ledger: str, where: str) -> str | None:
    """The move that a file was closed by, if it was; it must have been to the same ledger."""
    if db.execute("PRAGMA user_version").fetchone()[0] != file.MOVED:
        return None
    name, target, at = file.moved_to(db)
    if name.split()[1] != ledger:
        raise ValueError(
            f"Expected an open ledger, found a file whose budgets were moved to {target} ({at}), "
            f"which is not the ledger at {where}. Nothing was moved."
        )
    return name


def _copy_of(db: sqlite3.Connection) -> _Copy:
    tables = FileTables(db)
    return _Copy(
        tables.rows(f"{store.select('datasets')} ORDER BY at, name"),
        tables.rows(f"{store.select('history')} ORDER BY number"),
        tables.rows(f"{store.select('contents')} ORDER BY run"),
    )


def _require_new(tables: Tables, copy: _Copy) -> None:
    """Refuse data sets and contents that have a budget on the server."""
    taken = set(store.names(tables)) & {row[0] for row in copy.datasets}
    if taken:
        raise ValueError(
            f"Expected data sets that the server does not have, found budgets there for "
            f"{', '.join(map(repr, sorted(taken)))}. Nothing was moved."
        )
    contents = {row[5] for row in copy.datasets} | {row[1] for row in copy.contents}
    for content in sorted(contents - {None}):
        if owners := store.owners(tables, content):
            raise ValueError(
                f"Expected content without a budget on the server, found that {owners[0]!r} was "
                "opened for the same content or has paid for it: two budgets for the same rows "
                "would protect them less than each one says. Nothing was moved."
            )


def _send(server: ServerStore, name: str, source: Path, copy: _Copy) -> None:
    values = (name.split()[0], str(source.name), *(
        json.dumps([dict(zip(COLUMNS[table], row, strict=True)) for row in rows])
        for table, rows in _tables(copy)
    ))  # fmt: skip

    def change(tables: Tables) -> None:
        if _landed(tables, name):
            return
        _require_new(tables, copy)
        tables.rows("SELECT move_in(?::uuid, ?, ?::json, ?::json, ?::json)", values)
        for table, rows in _tables(copy):
            _compare(tables, table, rows)

    server.write(change, lambda tables: _landed(tables, name), "open")


def _compare(tables: Tables, table: str, rows: list[Row]) -> None:
    """Raise where the server does not hold exactly these rows, in this order."""
    # The number is the server's own; the order of numbers is that of the file.
    key, order, skipped = {
        "datasets": ("name", "at, name", 0),
        "history": ("run", "number", 1),
        "contents": ("run", "run", 0),
    }[table]
    position = COLUMNS[table].index(key)
    keys = [row[position] for row in rows]
    found = tables.rows(
        f"{store.select(table)} WHERE {key} = ANY(?) ORDER BY {order}", (list(keys),)
    )
    if [row[skipped:] for row in found] != [tuple(row[skipped:]) for row in rows]:
        raise RuntimeError(
            f"Expected the same rows of {table} on the server as in the file, found others. "
            "Nothing was moved. This is a bug in privagrad; please report it."
        )


def _tables(copy: _Copy) -> Iterable[tuple[str, list[Row]]]:
    return (
        ("datasets", copy.datasets), ("history", copy.history), ("contents", copy.contents),
    )  # fmt: skip


def _landed(tables: Tables, name: str) -> bool:
    return bool(tables.rows("SELECT 1 FROM moves WHERE id = ?::uuid", (name.split()[0],)))
