"""Budgets of several people from the command line: set up, moved, reviewed."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from privagrad.cli import app
from privagrad.privacy.events import GaussianEvent
from privagrad.privacy.ledger import Ledger
from tests.servers import Server

QUERY = GaussianEvent(8.0, 1, purpose="moments")


def call(*arguments: object, code: int = 0) -> str:
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert done.exit_code == code, (done.output, done.exception)
    return " ".join(done.output.split())


def told(*arguments: object) -> Any:
    return json.loads(call(*arguments, "--json"))


@pytest.fixture
def old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of a ledger with a finished run and one that has been open since 2025."""
    path = tmp_path / "old.db"
    ledger = Ledger(path)
    ledger.create("people", 2.0, 1e-5)
    with monkeypatch.context() as patch:
        patch.setattr("privagrad.privacy.ledger_file.now", lambda: "2025-01-01T10:00:00+00:00")
        patch.setattr("privagrad.privacy.ledger_file.user", lambda: "ann")
        ledger.reserve("people", [QUERY], "it died")
    monkeypatch.setattr("privagrad.privacy.ledger_file.user", lambda: "ben")
    ledger.finish(ledger.reserve("people", [QUERY], "a fit"), [QUERY])
    return path


def test_a_review_says_who_spent_what_and_what_is_open(old: Path) -> None:
    found = told("budget", "review", "--ledger", old)
    [people] = found["datasets"]
    assert people["spent"] + people["left"] == pytest.approx(2.0)
    assert [(u["user"], u["runs"], u["finished"], u["open"]) for u in people["users"]] == [
        ("ann", 1, 0, 1),
        ("ben", 1, 1, 0),
    ]
    for user, run in zip(people["users"], people["runs"], strict=True):
        assert user["epsilon_alone"] == run["epsilon_alone"] > 0
    [late] = people["open_for_long"]
    assert late["user"] == "ann"
    assert late["days"] > 300
    text = call("budget", "review", "people", "--since", "2025-06-01", "--ledger", old)
    assert "Open for more than 7 days" in text
    assert "ben" in text
    assert "│ ann" not in text
    assert "No runs" in call("budget", "review", "--since", "2999-01-01", "--ledger", old)
    error = call("budget", "review", "--since", "soon", "--ledger", old, code=2)
    assert "--since YYYY-MM-DD" in error


def test_a_team_sets_up_moves_spends_and_reviews(
    server: Server, old: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    name = server.new_ledger()
    server.execute(name, "owner", "DROP SCHEMA privagrad CASCADE")
    owner, olga = server.url(name, "owner"), server.url(name, "olga")
    assert "budget setup" in call("budget", "list", "--ledger", olga, code=2)
    assert "privagrad_opener" in call("budget", "setup", owner)
    assert told("budget", "setup", owner)["ledger"] == owner
    assert "CREATE POLICY" in call("budget", "setup", "--print")
    call("budget", "setup", code=2)
    call("budget", "setup", owner, "--print", code=2)

    refused = call("budget", "move", "--from", old, "--to", olga, code=2)
    assert "--with-open-runs" in refused
    moved = call("budget", "move", "--from", old, "--to", olga, "--with-open-runs")
    assert "moved people" in moved
    assert "Reserved, not finished" in moved
    assert "were moved to" in call("budget", "show", "people", "--ledger", old, code=2)

    monkeypatch.setenv("PRIVAGRAD_LEDGER", server.url(name, "rea"))
    [people] = told("budget", "review")["datasets"]
    assert [user["user"] for user in people["users"]] == ["ann", "ben"]
    assert told("budget", "show", "people")["runs"][0]["at"] == "2025-01-01T10:00:00+00:00"
    assert len(told("budget", "export", "people")) == 3
    error = call("budget", "create", "more", "-e", 9, "--delta", 1e-6, code=2)
    assert "privagrad_opener" in error

    table = tmp_path / "rows.csv"
    table.write_text("a,b,y\n" + "".join(f"{k % 7},{k % 5},{k % 2}\n" for k in range(400)))
    monkeypatch.setenv("PRIVAGRAD_LEDGER", server.url(name, "sam:s3cret"))
    fit = ("fit", table, "-t", "y", "--classes", "0,1", "--dataset", "people", "-e", "0.5",
           "-o", tmp_path / "m.model")  # fmt: skip
    assert "s3cret" not in call(*fit)
    assert b"s3cret" not in (tmp_path / "m.model").read_bytes()
    runs = told("budget", "show", "people")["runs"]
    assert [run["user"] for run in runs] == ["ann", "ben", "sam"]
    assert runs[-1]["state"] == "finished"
    error = call("evaluate", tmp_path / "m.model", table, code=2)
    assert "Give --epsilon and --dataset people" in error


def test_an_empty_ledger_is_reviewed(tmp_path: Path) -> None:
    assert told("budget", "review", "--ledger", tmp_path / "no.db")["datasets"] == []
    sqlite3.connect(tmp_path / "empty.db").close()
    assert told("budget", "review", "--ledger", tmp_path / "empty.db")["datasets"] == []
