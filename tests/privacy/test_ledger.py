"""Budgets that outlive the process: composition, crashes, races, history.

Tests of `ledger` hold in a file and on a server; those of `in_file` are about the file.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from privagrad.privacy import codec
from privagrad.privacy.accounting import PrivacyPlan
from privagrad.privacy.codec import as_json, from_json
from privagrad.privacy.events import GaussianEvent, ObjectiveEvent, SelectEvent, merged
from privagrad.privacy.ledger import BudgetError, Ledger, default_path
from privagrad.privacy.ledger_file import VERSION
from tests import killing

QUERY = GaussianEvent(8.0, 1, purpose="moments")
TRAINING = GaussianEvent(2.0, 50, "poisson", 10_000, 100, "gradients")


@pytest.fixture(params=["file", "server"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Where a new ledger is: a path, or a URL."""
    if request.param == "file":
        return str(tmp_path / "ledger.db")
    server = request.getfixturevalue("server")
    return str(server.url(server.new_ledger()))


@pytest.fixture
def ledger(place: str) -> Ledger:
    return opened(place)


@pytest.fixture
def in_file(tmp_path: Path) -> Ledger:
    return opened(tmp_path / "ledger.db")


def opened(place: Path | str) -> Ledger:
    ledger = Ledger(place)
    ledger.create("adult", 1.0, 1e-5)
    return ledger


def test_spending_is_composed_not_added(ledger: Ledger, place: str) -> None:
    for _ in range(3):
        ledger.finish(ledger.reserve("adult", [QUERY, TRAINING], "a fit"), [QUERY, TRAINING])
    one = PrivacyPlan((QUERY, TRAINING)).epsilon(1e-5)
    fixed = PrivacyPlan((replace(QUERY, count=3), replace(TRAINING, count=150))).epsilon(1e-5)
    spent = Ledger(place).account("adult").spent
    # A little more than the composition of runs that were fixed beforehand.
    assert fixed < spent < 1.04 * fixed
    assert spent < 0.8 * 3 * one


def test_a_run_that_would_pass_the_total_is_refused_and_costs_nothing(ledger: Ledger) -> None:
    before = ledger.account("adult")
    with pytest.raises(BudgetError, match=r"from 0 to .* of 1 "):
        ledger.reserve("adult", [replace(QUERY, noise_multiplier=1.0)], "too much")
    assert ledger.account("adult") == before


def test_a_cost_that_is_no_number_fits_no_budget(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("privagrad.privacy.account.epsilon_of_runs", lambda *_: float("nan"))
    with pytest.raises(BudgetError, match="to nan of 1"):
        ledger.reserve("adult", [QUERY], "a fit")
    assert ledger.history("adult") == []
    assert ledger.account("adult").largest(lambda _: (QUERY,)) == 0


def test_everything_reserved_counts_until_the_run_tells_what_it_made(ledger: Ledger) -> None:
    run = ledger.reserve("adult", [QUERY, TRAINING], "a fit")
    assert ledger.account("adult").spent == PrivacyPlan((QUERY, TRAINING)).epsilon(1e-5)
    ledger.finish(run, [QUERY])
    assert ledger.account("adult").spent == PrivacyPlan((QUERY,)).epsilon(1e-5)
    with pytest.raises(ValueError, match="finished"):
        ledger.finish(run, [])
    with pytest.raises(ValueError, match="finished"):
        ledger.release(run, "it is over")


def test_releases_beyond_the_reservation_are_charged_and_reported(ledger: Ledger) -> None:
    run = ledger.reserve("adult", [QUERY], "a fit")
    with pytest.raises(RuntimeError, match="50 beyond"):
        ledger.finish(run, [QUERY, TRAINING])
    assert ledger.account("adult").spent == PrivacyPlan((QUERY, TRAINING)).epsilon(1e-5)


def test_a_dead_run_is_given_back_only_with_a_reason(ledger: Ledger) -> None:
    run = ledger.reserve("adult", [TRAINING], "a fit")
    with pytest.raises(ValueError, match="reason"):
        ledger.release(run, "  ")
    assert ledger.account("adult").spent > 0
    ledger.release(run, "the machine died before the first release")
    assert ledger.account("adult").spent == 0
    states = [(entry.state, entry.note) for entry in ledger.history("adult")]
    assert states[0] == ("reserved", "a fit")
    assert states[1] == ("released", "the machine died before the first release")


def test_a_run_that_was_given_back_while_alive_is_charged_when_it_finishes(ledger: Ledger) -> None:
    run = ledger.reserve("adult", [TRAINING], "a fit")
    ledger.release(run, "taken for dead")
    assert ledger.account("adult").spent == 0
    with pytest.raises(BudgetError, match="given back"):
        ledger.finish(run, [TRAINING])
    assert ledger.account("adult").spent == PrivacyPlan((TRAINING,)).epsilon(1e-5)
    assert [entry.state for entry in ledger.history("adult")] == [
        "reserved", "released", "finished",
    ]  # fmt: skip
    for again in (lambda: ledger.finish(run, []), lambda: ledger.release(run, "once more")):
        with pytest.raises(ValueError, match="finished"):
            again()
    assert ledger.account("adult").spent > 0


def test_one_content_has_one_budget(ledger: Ledger) -> None:
    ledger.create("people", 1.0, 1e-5, "sha256:abc")
    with pytest.raises(ValueError, match=r"'people' in .* the same content"):
        ledger.create("people again", 1.0, 1e-5, "sha256:abc")
    ledger.create("others", 1.0, 1e-5, "sha256:def")
    ledger.create("unmarked", 1.0, 1e-5)  # like "adult": no content is known of either
    assert sorted(ledger.names()) == ["adult", "others", "people", "unmarked"]
    assert ledger.owners("sha256:abc") == ["people"]


def test_content_that_a_budget_was_charged_for_has_no_other_budget(ledger: Ledger) -> None:
    """No budget was opened for the content: the first run on it decides which one pays."""
    ledger.create("loose", 1.0, 1e-5)
    ledger.finish(ledger.reserve("adult", [QUERY], "a fit", "sha256:abc"), [QUERY])
    assert ledger.owners("sha256:abc") == ["adult"]
    with pytest.raises(ValueError, match=r"'loose' beside 'adult'.* --dataset adult\."):
        ledger.reserve("loose", [QUERY], "a fit", "sha256:abc")
    with pytest.raises(ValueError, match=r"'adult' in .* has paid for it"):
        ledger.create("bound", 1.0, 1e-5, "sha256:abc")
    assert ledger.history("loose") == []
    assert sorted(ledger.names()) == ["adult", "loose"]
    ledger.reserve("loose", [QUERY], "a fit", "sha256:def")
    ledger.reserve("adult", [QUERY], "a fit", "sha256:abc")


def test_content_that_nothing_was_released_of_is_free_again(ledger: Ledger) -> None:
    ledger.create("loose", 1.0, 1e-5)
    run = ledger.reserve("adult", [QUERY], "a fit", "sha256:abc")
    assert ledger.owners("sha256:abc") == ["adult"]
    ledger.release(run, "died before the first release")
    assert ledger.owners("sha256:abc") == []
    ledger.reserve("loose", [QUERY], "a fit", "sha256:abc")
    with pytest.raises(BudgetError, match="given back"):
        ledger.finish(run, [QUERY])
    for name in ("adult", "loose"):
        with pytest.raises(ValueError, match="Both pay for them already"):
            ledger.reserve(name, [QUERY], "a fit", "sha256:abc")


CHANGES = (
    "DELETE FROM history",
    "UPDATE history SET events = '[]'",
    "UPDATE datasets SET epsilon = 100",
    "DELETE FROM datasets",
    "REPLACE INTO datasets SELECT name, at, user, 100.0, delta, fingerprint FROM datasets",
    "REPLACE INTO datasets (rowid, name, at, user, epsilon, delta) VALUES (1, 'b', '', '', 9, 0.1)",
    "REPLACE INTO history SELECT number, at, user, dataset, run, state, note, '[]' FROM history",
    "INSERT OR REPLACE INTO history (at, user, dataset, run, state, note, events) "
    "SELECT at, user, dataset, run, state, note, '[]' FROM history",
    "UPDATE OR REPLACE history SET events = '[]'",
    "DELETE FROM contents",
    "UPDATE contents SET fingerprint = ''",
    "REPLACE INTO contents SELECT run, '' FROM contents",
    "REPLACE INTO contents (rowid, run, fingerprint) VALUES (1, 'other', '')",
)


def assert_nothing_can_be_changed(path: Path) -> None:
    db = sqlite3.connect(path)
    for command in CHANGES:
        with pytest.raises(sqlite3.DatabaseError, match="append-only"):
            db.execute(command)
    db.close()


def test_the_history_cannot_be_changed(in_file: Ledger) -> None:
    in_file.reserve("adult", [QUERY], "a fit", "sha256:abc")
    assert_nothing_can_be_changed(in_file.path)


FIRST_FORMAT = """
CREATE TABLE datasets (
    name TEXT PRIMARY KEY, at TEXT NOT NULL, user TEXT NOT NULL,
    epsilon REAL NOT NULL, delta REAL NOT NULL, fingerprint TEXT
);
CREATE TABLE history (
    number INTEGER PRIMARY KEY AUTOINCREMENT, at TEXT NOT NULL, user TEXT NOT NULL,
    dataset TEXT NOT NULL REFERENCES datasets(name), run TEXT NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('reserved', 'finished', 'released')),
    note TEXT NOT NULL, events TEXT NOT NULL, UNIQUE (run, state)
);
CREATE TRIGGER datasets_no_UPDATE BEFORE UPDATE ON datasets
BEGIN SELECT RAISE(ABORT, 'the ledger is append-only'); END;
CREATE TRIGGER datasets_no_DELETE BEFORE DELETE ON datasets
BEGIN SELECT RAISE(ABORT, 'the ledger is append-only'); END;
CREATE TRIGGER history_no_UPDATE BEFORE UPDATE ON history
BEGIN SELECT RAISE(ABORT, 'the ledger is append-only'); END;
CREATE TRIGGER history_no_DELETE BEFORE DELETE ON history
BEGIN SELECT RAISE(ABORT, 'the ledger is append-only'); END;
"""
"""What version 0.1.0 wrote."""


def version_of(path: Path) -> int:
    with closing(sqlite3.connect(path)) as db:
        return int(db.execute("PRAGMA user_version").fetchone()[0])


@pytest.fixture
def old(tmp_path: Path) -> Ledger:
    """A ledger of the first format, with two budgets and one run."""
    path = tmp_path / "old.db"
    db = sqlite3.connect(path)
    db.execute("PRAGMA journal_mode = WAL")
    db.executescript(FIRST_FORMAT)
    db.execute("INSERT INTO datasets VALUES ('adult', '2025-01-01', 'ann', 1.0, 1e-5, NULL)")
    db.execute("INSERT INTO datasets VALUES ('people', '2025-01-02', 'ann', 2.0, 1e-5, 'sha256:a')")
    db.execute(
        "INSERT INTO history (at, user, dataset, run, state, note, events) "
        "VALUES ('2025-01-03', 'ann', 'adult', 'first', 'reserved', 'a fit', ?)",
        (json.dumps([as_json(QUERY)]),),
    )
    db.commit()
    db.close()
    return Ledger(path)


def test_ledgers_of_the_first_format_mean_the_same_and_are_protected(old: Ledger) -> None:
    assert old.names() == ["adult", "people"]
    assert old.owners("sha256:a") == ["people"]
    account = old.account("adult")
    assert account.spent == PrivacyPlan((QUERY,)).epsilon(1e-5)
    assert [(run.name, run.state, run.events) for run in account.runs] == [
        ("first", "reserved", (QUERY,))
    ]
    old.finish("first", [QUERY])
    old.finish(old.reserve("adult", [QUERY], "another fit", "sha256:b"), [QUERY])
    assert len(old.account("adult").runs) == 2
    assert old.owners("sha256:b") == ["adult"]
    assert_nothing_can_be_changed(old.path)


def test_ledgers_of_the_first_format_are_protected_once_they_were_read(old: Ledger) -> None:
    old.names()
    db = sqlite3.connect(old.path)
    with pytest.raises(sqlite3.DatabaseError, match="append-only"):
        db.execute("REPLACE INTO history SELECT * FROM history")
    db.close()


def test_a_ledger_of_the_first_format_that_cannot_be_written_is_read(
    old: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect = sqlite3.connect
    monkeypatch.setattr(
        sqlite3,
        "connect",
        lambda path, **options: connect(f"{path.as_uri()}?mode=ro", uri=True, **options),
    )
    assert old.account("adult").spent > 0
    assert old.owners("sha256:a") == ["people"]
    with pytest.raises(OSError, match="readonly"):
        old.reserve("adult", [QUERY], "a fit")


@pytest.mark.parametrize(
    "event",
    [QUERY, TRAINING, ObjectiveEvent(1.5, 0.1), SelectEvent((QUERY, TRAINING), 10.0)],
)
def test_events_survive_the_file(event: GaussianEvent) -> None:
    assert from_json(json.loads(json.dumps(as_json(event)))) == event


def test_equal_releases_are_merged() -> None:
    assert merged([QUERY, TRAINING, QUERY]) == (replace(QUERY, count=2), TRAINING)


def test_merged_runs_are_charged_as_separate_ones(tmp_path: Path) -> None:
    """Fifty equal searches cost what fifty searches cost, not what one does."""
    ledger = Ledger(tmp_path / "ledger.db")
    ledger.create("adult", 20.0, 1e-5)
    search = SelectEvent((replace(QUERY, noise_multiplier=60.0), TRAINING), 10.0)
    searches = [search] * 50
    ledger.finish(ledger.reserve("adult", searches, "searches"), searches)
    account = ledger.account("adult")
    assert account.events == (replace(search, count=50),)
    apart = PrivacyPlan((search,) * 50).epsilon(1e-5)
    assert account.spent == pytest.approx(apart, rel=1e-12)
    assert account.spent > 5 * PrivacyPlan((search,)).epsilon(1e-5)


def test_a_ledger_that_says_add_or_remove_one_keeps_its_meaning(in_file: Ledger) -> None:
    """Version 0.1.0 wrote that name for zero-out: the events and what they cost are the same."""
    event = replace(QUERY, under="zero-out")
    run = in_file.reserve("adult", [event], "a fit")
    stored = json.dumps([as_json(event)]).replace("zero-out", "add-or-remove-one")
    assert "add-or-remove-one" in stored
    with sqlite3.connect(in_file.path) as db:
        db.execute(
            "INSERT INTO history (at, user, dataset, run, state, note, events) "
            "VALUES ('2025-01-01', 'someone', 'adult', 'old', 'finished', '', ?)",
            (stored,),
        )
    account = in_file.account("adult")
    assert [r.events for r in account.runs] == [(event,), (event,)]
    assert account.events == (replace(event, count=2),)
    # Two runs cost a little more than two events that were fixed beforehand.
    fixed = PrivacyPlan((replace(event, count=2),)).epsilon(1e-5)
    assert fixed <= account.spent <= 1.05 * fixed
    in_file.finish(run, [event])


def test_the_largest_epsilon_that_fits(in_file: Ledger) -> None:
    def plan(epsilon: float) -> tuple[GaussianEvent, ...]:
        return PrivacyPlan.calibrate(epsilon, 1e-5, 10_000, 100, 50).events  # type: ignore[return-value]

    in_file.reserve("adult", plan(0.6), "a fit")
    account = in_file.account("adult")
    largest = account.largest(plan, 0.02)
    assert account.spent_with(plan(largest)) <= 1.0
    assert account.spent_with(plan(largest + 0.05)) > 1.0
    assert largest > 0.4 + 0.1  # composition gains over adding epsilons


def test_mistakes_say_what_to_do(tmp_path: Path, ledger: Ledger) -> None:
    with pytest.raises(ValueError, match="budget create other"):
        ledger.account("other")
    with pytest.raises(ValueError, match="budget create other"):
        Ledger(tmp_path / "nothing.db").account("other")
    with pytest.raises(ValueError, match="fixed once"):
        ledger.create("adult", 2.0, 1e-5)
    with pytest.raises(ValueError, match="none named"):
        ledger.release("nobody", "why not")
    broken = tmp_path / "broken.db"
    broken.write_text("this is no ledger, but a text that is long enough " * 40)
    with pytest.raises(OSError, match="Expected a ledger"):
        Ledger(broken).account("adult")


@pytest.mark.parametrize(
    "name", ["o'hara", 'a "quoted" name', "--", "a; DROP TABLE history", "年収%s?"]
)
def test_names_are_only_names(ledger: Ledger, name: str) -> None:
    ledger.create(name, 1.0, 1e-5, f"sha256:{name}")
    run = ledger.reserve(name, [QUERY], f"a fit of {name}", f"sha256:{name}")
    ledger.finish(run, [QUERY])
    assert ledger.owners(f"sha256:{name}") == [name]
    assert [entry.note for entry in ledger.history(name)] == [f"a fit of {name}"] * 2


def test_a_run_of_very_many_kinds_of_events_is_kept_whole(ledger: Ledger) -> None:
    events = [replace(QUERY, noise_multiplier=1e6 + k, purpose="x" * 5000) for k in range(300)]
    ledger.finish(run := ledger.reserve("adult", events, "a fit"), events)
    [told] = ledger.account("adult").runs
    assert (told.name, told.events) == (run, tuple(events))


def test_nothing_is_opened_without_a_name_or_reserved_without_events(ledger: Ledger) -> None:
    with pytest.raises(ValueError, match="name for the data set"):
        ledger.create(" ", 1.0, 1e-5)
    with pytest.raises(ValueError, match="events to reserve"):
        ledger.reserve("adult", [], "a fit")
    assert ledger.history("adult") == []


def test_without_a_file_no_content_has_an_owner(tmp_path: Path) -> None:
    assert Ledger(tmp_path / "none.db").owners("a fingerprint") == []
    assert not (tmp_path / "none.db").exists()


def test_a_user_whom_the_system_does_not_know_is_unknown(
    in_file: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nobody() -> str:
        raise KeyError("getpwuid(): uid not found")

    monkeypatch.setattr("getpass.getuser", nobody)
    in_file.reserve("adult", [QUERY], "a fit")
    assert [entry.user for entry in in_file.history("adult")] == ["unknown"]


def test_the_place_can_be_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PRIVAGRAD_LEDGER", str(tmp_path / "mine.db"))
    assert default_path() == tmp_path / "mine.db"
    monkeypatch.delenv("PRIVAGRAD_LEDGER")
    assert Path(default_path()).name == "ledger.db"
    monkeypatch.setenv("PRIVAGRAD_LEDGER", "postgresql://ann@db/ledger")
    assert default_path() == "postgresql://ann@db/ledger"


def test_ledgers_that_were_pickled_by_their_path_are_found(in_file: Ledger) -> None:
    former = Ledger.__new__(Ledger)
    former.__setstate__({"path": in_file.path})
    assert former.names() == ["adult"]
    assert pickle.loads(pickle.dumps(in_file)).path == in_file.path


def _race(place: str, turns: int) -> None:
    for _ in range(turns):
        try:
            Ledger(place).reserve("adult", [replace(QUERY, noise_multiplier=12.0)], "a race")
        except BudgetError:
            return


def test_eight_processes_never_overspend_together(ledger: Ledger, place: str) -> None:
    context = multiprocessing.get_context("spawn")
    racers = [context.Process(target=_race, args=(place, 3)) for _ in range(8)]
    for racer in racers:
        racer.start()
    for racer in racers:
        racer.join()
        assert racer.exitcode == 0
    account = ledger.account("adult")
    assert account.spent <= 1.0
    # Nobody was refused while there was room.
    assert (
        account.spent_with([replace(QUERY, noise_multiplier=12.0)]) > 1.0 or len(account.runs) == 24
    )


@pytest.mark.skipif(not hasattr(os, "fork"), reason="kills forked processes")
def test_a_killed_process_leaves_every_release_in_the_ledger(tmp_path: Path) -> None:
    """SIGKILL before and after every statement, from the making of the file on."""
    (template := tmp_path / "template").mkdir()
    seen = set()
    for folder in killing.kill_everywhere("keep_account", template, tmp_path / "out"):
        ledger, states = Ledger(folder / "new.db"), []
        if not ledger.names():
            ledger.create("rows", 2.0, 1e-5)
        assert killing.ledger_is_intact(ledger.path)
        for entry in ledger.account("rows").runs:
            assert entry.events == (() if entry.state == "released" else (killing.EVENT,))
            states.append(entry.state)
        if (released := folder / "released").exists():
            assert released.read_text() == ledger.account("rows").runs[0].name
        if tuple(states) not in seen:  # whoever comes next finds a ledger that works
            ledger.reserve("rows", [QUERY], "the next one")
        seen.add(tuple(states))
    assert seen == {
        (), ("reserved",), ("finished",), ("finished", "reserved"), ("finished", "released"),
    }  # fmt: skip


def test_an_old_file_gets_a_version_and_keeps_its_rows(old: Ledger) -> None:
    def rows() -> list[Any]:
        with closing(sqlite3.connect(old.path)) as db:
            return db.execute("SELECT * FROM history ORDER BY number").fetchall()

    before, spent = rows(), old.account("adult").spent
    assert version_of(old.path) == VERSION == 1
    run = old.reserve("adult", [GaussianEvent(50.0)], "a later fit")
    old.finish(run, [GaussianEvent(50.0)])
    assert rows()[: len(before)] == before
    assert old.account("adult").spent > spent
    [(stored,)] = [row[-1:] for row in rows() if row[4:6] == (run, "finished")]
    assert json.loads(stored)["version"] == codec.VERSION_OF_ROWS


def test_files_and_events_of_a_newer_version_are_refused(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "new.db")
    ledger.create("adult", 1.0, 1e-5)
    with closing(sqlite3.connect(ledger.path)) as db:
        db.execute(f"PRAGMA user_version = {VERSION + 1}")
    with pytest.raises(ValueError, match="a newer privagrad wrote it"):
        ledger.account("adult")
    with pytest.raises(ValueError, match="a newer privagrad wrote them"):
        codec.loads(json.dumps({"version": codec.VERSION + 1, "events": []}))
    with pytest.raises(ValueError, match="found 'Unknown'"):
        codec.loads('[{"kind": "Unknown"}]')
    assert codec.loads("[]") == codec.loads(codec.dumps(())) == ()


@pytest.mark.parametrize(
    "text",
    [
        "null", "{}", '{"events": []}', '{"version": "2", "events": []}',
        '{"version": NaN, "events": []}', '{"version": -1, "events": []}', '{"version": 2}',
        '{"version": 2, "events": {}}', '{"version": 2, "events": ""}',
    ],
)  # fmt: skip
def test_damaged_events_are_refused_and_never_read_as_none(text: str) -> None:
    with pytest.raises(ValueError, match="Expected"):
        codec.loads(text)


def test_a_damaged_entry_stops_a_data_set_until_its_run_is_given_back(in_file: Ledger) -> None:
    """What nobody can read is not charged nothing."""
    with sqlite3.connect(in_file.path) as db:
        db.execute(
            "INSERT INTO history (at, user, dataset, run, state, note, events) "
            "VALUES ('now', 'ann', 'adult', 'damaged', 'reserved', '', '[{')"
        )
    db.close()
    for act in (in_file.account, in_file.history):
        with pytest.raises(ValueError, match=r"of run 'damaged' on 'adult'.*release damaged"):
            act("adult")
    with pytest.raises(ValueError, match="'damaged'"):
        in_file.reserve("adult", [QUERY], "a fit")
    in_file.release("damaged", "no such run")
    in_file.reserve("adult", [QUERY], "a fit")
    assert in_file.account("adult").spent == PrivacyPlan((QUERY,)).epsilon(1e-5)
