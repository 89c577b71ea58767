"""Budgets moved from a file to a server: all or nothing, and never in both places."""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from privagrad.privacy import ledger_move
from privagrad.privacy.events import GaussianEvent
from privagrad.privacy.ledger import Ledger
from privagrad.privacy.ledger_move import Moved, move
from privagrad.privacy.ledger_server import ServerStore
from privagrad.privacy.ledger_store import UnknownOutcomeError
from tests.golden.files import LEDGER
from tests.servers import Server

GOLDEN = Path(__file__).parents[1] / "golden" / "files_0_1_0" / LEDGER
QUERY = GaussianEvent(8.0, 1, purpose="moments")


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A ledger that version 0.1.0 has written, with one run that is open."""
    return Path(shutil.copy(GOLDEN, tmp_path / "old.db"))


@pytest.fixture
def target(server: Server) -> str:
    return server.url(server.new_ledger(), "olga")


def rows(path: Path, table: str) -> list[Any]:
    with closing(sqlite3.connect(path)) as db:
        key = {"datasets": "at, name", "history": "number", "contents": "run"}[table]
        return db.execute(f"SELECT * FROM {table} ORDER BY {key}").fetchall()


def test_a_ledger_of_version_0_1_0_is_moved_entry_by_entry(
    server: Server, old: Path, target: str
) -> None:
    ledger = Ledger(old)
    ledger.finish(ledger.reserve("people", [QUERY], 'a note\'s "quotes"', "sha256:x"), [QUERY])
    before = {name: (ledger.account(name), ledger.history(name)) for name in ledger.names()}
    datasets, history, contents = (rows(old, t) for t in ("datasets", "history", "contents"))
    moved = move(old, target, with_open_runs=True)
    there = Ledger(target)
    assert there.names() == ledger_names(datasets)
    assert moved.datasets == tuple(there.names())
    assert (moved.entries, len(moved.open_runs)) == (len(history), 1)
    for name, (account, entries) in before.items():
        assert there.account(name) == account
        found = [{**vars(entry), "number": 0} for entry in there.history(name)]
        assert found == [{**vars(entry), "number": 0} for entry in entries]
    texts = server.execute(
        "ledger", "rea",
        'SELECT at, "user", dataset, run, state, note, events FROM privagrad.history '
        "ORDER BY number",
    )  # fmt: skip
    assert texts == [row[1:] for row in history]
    assert server.execute("ledger", "rea", "SELECT * FROM privagrad.contents") == contents
    assert server.execute("ledger", "rea", 'SELECT "user", source FROM privagrad.moves') == [
        ("olga", "old.db")
    ]
    team = Ledger(server.url("ledger"))
    team.release(moved.open_runs[0], "its process cannot finish")
    team.finish(team.reserve("people", [QUERY], "a fit", "sha256:x"), [QUERY])


def ledger_names(datasets: list[Any]) -> list[str]:
    return [row[0] for row in datasets]


def assert_closed(path: Path) -> None:
    """No version of privagrad adds anything: version 0.1.0 knows no versions, but triggers."""
    before = rows(path, "history")
    for act in (
        lambda ledger: ledger.names(),
        lambda ledger: ledger.account("people"),
        lambda ledger: ledger.reserve("people", [QUERY], "a fit"),
        lambda ledger: ledger.create("new", 1.0, 1e-5),
        lambda ledger: ledger.finish("60310c14301c", [QUERY]),
    ):
        with pytest.raises(ValueError, match="moved to postgresql://olga@"):
            act(Ledger(path))
    with closing(sqlite3.connect(path)) as db:
        for statement in (
            "INSERT INTO history (at, user, dataset, run, state, note, events) "
            "VALUES ('', '', 'people', 'r', 'reserved', '', '[]')",
            "INSERT INTO datasets VALUES ('new', '', '', 1.0, 1e-5, NULL)",
            "INSERT INTO contents VALUES ('r', 'sha256:z')",
        ):
            with pytest.raises(sqlite3.DatabaseError, match="were moved to postgresql://olga@"):
                db.execute(statement)
    assert rows(path, "history") == before


def test_the_file_is_closed_after_the_move(old: Path, target: str) -> None:
    moved = move(old, target, with_open_runs=True)
    assert_closed(old)
    assert move(old, target) == moved  # nothing happens the second time


def test_runs_that_are_open_are_carried_over_only_when_told(old: Path, target: str) -> None:
    with pytest.raises(ValueError, match=r"--with-open-runs.*Nothing was moved"):
        move(old, target)
    assert Ledger(target).names() == []
    Ledger(old).reserve("people", [QUERY], "it is open")


def test_data_sets_and_contents_that_the_server_has_are_refused(
    server: Server, old: Path, target: str
) -> None:
    Ledger(target).create("people", 1.0, 1e-5)
    with pytest.raises(ValueError, match=r"budgets there for 'people'"):
        move(old, target, with_open_runs=True)
    other = server.url(server.new_ledger(), "olga")
    Ledger(other).create("steps again", 1.0, 1e-5, "sha256:steps")
    with pytest.raises(ValueError, match="'steps again' was opened for the same content"):
        move(old, other, with_open_runs=True)
    assert Ledger(other).names() == ["steps again"]
    Ledger(old).reserve("people", [QUERY], "it is open")


@pytest.mark.parametrize("user", ["sam", "rita", "rea"])
def test_only_who_may_open_budgets_moves_them(
    server: Server, old: Path, target: str, user: str
) -> None:
    with pytest.raises(PermissionError, match="privagrad_opener"):
        move(old, server.url("ledger", user), with_open_runs=True)
    assert Ledger(target).names() == []
    Ledger(old).reserve("people", [QUERY], "it is open")


def test_the_owner_may_move_budgets_too(server: Server, old: Path, target: str) -> None:
    moved = move(old, server.url("ledger", "owner"), with_open_runs=True)
    assert moved.datasets == tuple(Ledger(target).names())


def test_a_copy_that_differs_is_not_kept(
    old: Path, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = ledger_move._compare

    def compare(tables: Any, table: str, rows: list[Any]) -> None:
        real(tables, table, [*rows[:-1], (*rows[-1][:-1], "[]")] if table == "history" else rows)

    monkeypatch.setattr(ledger_move, "_compare", compare)
    with pytest.raises(RuntimeError, match="Nothing was moved"):
        move(old, target, with_open_runs=True)
    assert Ledger(target).names() == []
    Ledger(old).reserve("people", [QUERY], "it is open")


def test_a_move_without_an_answer_leaves_the_file_closed(
    old: Path, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(self: ServerStore, *_: object) -> None:
        raise UnknownOutcomeError("Expected an answer.")

    with monkeypatch.context() as patch:
        patch.setattr(ServerStore, "write", lost)
        with pytest.raises(UnknownOutcomeError, match="Make the same move again"):
            move(old, target, with_open_runs=True)
    assert_closed(old)
    assert isinstance(move(old, target), Moved)
    assert "people" in Ledger(target).names()


def test_another_server_does_not_complete_a_move(
    server: Server, old: Path, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    move(old, target, with_open_runs=True)
    other = server.url(server.new_ledger("another_ledger"), "olga")
    with pytest.raises(ValueError, match="which is not the ledger at"):
        move(old, other, with_open_runs=True)
    assert Ledger(other).names() == []


POINTS = ["_close", "_send", "_require_new", "_compare"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="kills forked processes")
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("point", POINTS)
def test_a_killed_move_is_completed_by_the_same_move(
    old: Path, target: str, point: str, when: str
) -> None:
    """Whenever it is killed, at most one of both places can be spent."""
    if not (child := os.fork()):
        try:
            setattr(ledger_move, point, _deadly(getattr(ledger_move, point), when))
            move(old, target, with_open_runs=True)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    there = "people" in Ledger(target).names()
    with closing(sqlite3.connect(old)) as db:
        is_open = db.execute("PRAGMA user_version").fetchone()[0] != 1_000_000
    assert not (there and is_open)
    move(old, target, with_open_runs=True)
    assert_closed(old)
    assert len(Ledger(target).history("steps")) == 9


def _deadly(function: Callable[..., Any], when: str) -> Callable[..., Any]:
    def wrapped(*arguments: Any) -> Any:
        if when == "after":
            function(*arguments)
        os.kill(os.getpid(), signal.SIGKILL)

    return wrapped
