"""A ledger on a server: who may do what there, lost connections, commits without an answer."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from privagrad.privacy import codec, ledger_server
from privagrad.privacy.accounting import PrivacyPlan
from privagrad.privacy.events import GaussianEvent
from privagrad.privacy.ledger import BudgetError, Ledger
from privagrad.privacy.ledger_server import ROLES, VERSION, ServerStore
from privagrad.privacy.ledger_setup import script, set_up
from privagrad.privacy.ledger_store import Right, UnknownOutcomeError
from privagrad.privacy.ledger_url import has_password, is_url, shown, without_secrets
from tests.killing_server import kill_at_random
from tests.servers import Server

QUERY = GaussianEvent(8.0, 3, purpose="moments")
LESS = replace(QUERY, count=1)


@pytest.fixture
def database(server: Server) -> str:
    """A ledger in which `olga` has opened a budget."""
    name = server.new_ledger()
    Ledger(server.url(name, "olga")).create("adult", 4.0, 1e-5)
    return name


@pytest.fixture
def of(server: Server, database: str) -> Callable[[str], Ledger]:
    """The ledger as a user sees it."""
    return lambda user: Ledger(server.url(database, user))


def test_each_role_may_do_its_part_and_nothing_else(of: Callable[[str], Ledger]) -> None:
    run = of("sam").reserve("adult", [QUERY], "a fit")
    before = of("rea").history("adult")
    actions: dict[Right, Callable[[Ledger], object]] = {
        "open": lambda ledger: ledger.create("other", 1.0, 1e-5),
        "spend": lambda ledger: ledger.reserve("adult", [LESS], "a fit"),
        "release": lambda ledger: ledger.release(run, "it died"),
    }
    may: dict[str, Right] = {"olga": "open", "sam": "spend", "rita": "release", "rea": "read"}
    for user, own in may.items():
        for right, action in actions.items():
            if right != own:
                with pytest.raises(PermissionError, match=rf"without the role {ROLES[right][0]} "):
                    action(of(user))
    with pytest.raises(PermissionError, match="without the role privagrad_reader "):
        of("nobody").account("adult")
    assert of("rea").history("adult") == before
    for user, own in may.items():
        if own != "read":
            actions[own](of(user))


def test_a_spender_finishes_its_own_runs_with_all_they_reserved(
    of: Callable[[str], Ledger],
) -> None:
    """Anything less would be giving back a part of the reservation."""
    run = of("sam").reserve("adult", [QUERY], "a fit")
    with pytest.raises(PermissionError, match="sam finishes run"):
        of("sue").finish(run, [QUERY])
    for fewer in ([], [LESS], [replace(QUERY, noise_multiplier=9.0)]):
        with pytest.raises(PermissionError, match=r"privagrad_releaser.*stays charged"):
            of("sam").finish(run, fewer)
    with pytest.raises(PermissionError):
        of("rita").finish(run, [QUERY])
    of("sam").finish(run, [QUERY])
    of("team").finish(of("sam").reserve("adult", [QUERY], "a fit"), [])
    spent = PrivacyPlan((QUERY,)).epsilon(1e-5)
    assert of("rea").account("adult").spent == pytest.approx(spent)
    run = of("sam").reserve("adult", [LESS], "a fit")
    with pytest.raises(RuntimeError, match="2 beyond"):
        of("sam").finish(run, [QUERY])
    assert of("rea").account("adult").runs[-1].events == (QUERY,)


ENTRY = "INSERT INTO privagrad.history (dataset, run, state, note, events) VALUES "
EVENTS = codec.dumps([QUERY])
DATED = "INSERT INTO privagrad.history (at, dataset, run, state, note, events) VALUES "
ATTACKS = {
    "another total": "UPDATE privagrad.datasets SET epsilon = 100",
    "nothing was spent": "UPDATE privagrad.history SET events = '[]'",
    "forget": "DELETE FROM privagrad.history",
    "forget all": "TRUNCATE privagrad.history, privagrad.contents",
    "forget the contents": "DELETE FROM privagrad.contents",
    "upsert": f"{ENTRY}('adult', 'r', 'reserved', '', '[]') "
    "ON CONFLICT (run, state) DO UPDATE SET events = '[]'",
    "merge": "MERGE INTO privagrad.history h USING privagrad.datasets d ON h.dataset = d.name "
    "WHEN MATCHED THEN DELETE",
    "no triggers": "ALTER TABLE privagrad.history DISABLE TRIGGER ALL",
    "triggers of a replica": "SET session_replication_role = replica",
    "no policies": "ALTER TABLE privagrad.history DISABLE ROW LEVEL SECURITY",
    "another rule": "CREATE OR REPLACE FUNCTION privagrad.covers(made text, reserved text) "
    "RETURNS boolean LANGUAGE sql AS 'SELECT true'",
    "a table of one's own": "CREATE TABLE privagrad.mine (x int)",
    "an older number": "SELECT setval('privagrad.history_number_seq', 1)",
    "the next number": "SELECT nextval('privagrad.history_number_seq')",
    "a number": "INSERT INTO privagrad.history (number, dataset, run, state, note, events) "
    f"OVERRIDING SYSTEM VALUE VALUES (1, 'adult', 'r', 'reserved', '', '{EVENTS}')",
    "another time": f"{DATED}('2020-01-01', 'adult', 'r', 'reserved', '', '{EVENTS}')",
    "another user": 'INSERT INTO privagrad.history ("user", dataset, run, state, note, events) '
    f"VALUES ('olga', 'adult', 'r', 'reserved', '', '{EVENTS}')",
    "a budget": "INSERT INTO privagrad.datasets (name, epsilon, delta) VALUES ('b', 9, 0.1)",
    "a move": "SELECT privagrad.move_in(gen_random_uuid(), '', '[]', '[]', '[]')",
    "a row of a move": "INSERT INTO privagrad.moves (id, source) VALUES (gen_random_uuid(), '')",
    "another version": "UPDATE privagrad.about SET version = 0",
    "give back": f"{ENTRY}('adult', '%(run)s', 'released', 'why', '[]')",
    "give back by finishing": f"{ENTRY}('adult', '%(run)s', 'finished', '', '[]')",
    "a part, by two versions of a list": f"{ENTRY}('adult', '%(run)s', 'finished', '', "
    """'{"version": 2, "events": [1], "events": []}')""",
    "finish for another data set": f"{ENTRY}('other', '%(run)s', 'finished', '', '{EVENTS}')",
    "finish what began never": f"{ENTRY}('adult', 'r', 'finished', '', '{EVENTS}')",
    "finish another's run": f"{ENTRY}('adult', '%(foreign)s', 'finished', '', '{EVENTS}')",
    "reserve again": f"{ENTRY}('adult', '%(run)s', 'reserved', '', '[]')",
    "a state of one's own": f"{ENTRY}('adult', 'r', 'void', '', '[]')",
    "no events": f"{ENTRY}('adult', 'r', 'reserved', '', 'x')",
    "events of tomorrow": f"{ENTRY}('adult', 'r', 'reserved', '', '{{\"version\": 9}}')",
    "events of no kind": f"""{ENTRY}('adult', 'r', 'reserved', '', '[{{"kind": "Free"}}]')""",
    "negative counts": f"""{ENTRY}('adult', 'r', 'reserved', '', '[{{"count": -1}}]')""",
    "the content of another's run": "INSERT INTO privagrad.contents VALUES ('%(foreign)s', 'x')",
    "copy": "COPY privagrad.history (dataset, run, state, note, events) FROM STDIN",
    "become the owner": "SET ROLE owner",
    "become another": "SET SESSION AUTHORIZATION rita",
    "lock everybody out": "LOCK TABLE privagrad.history IN ACCESS EXCLUSIVE MODE",
    "lock rows": "SELECT * FROM privagrad.datasets FOR UPDATE",
    "drop": "DROP TABLE privagrad.contents",
    "drop everything": "DROP SCHEMA privagrad CASCADE",
    "give a right away": "GRANT privagrad_releaser TO sam",
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_spender_with_psql_cannot(
    server: Server, database: str, of: Callable[[str], Ledger], attack: str
) -> None:
    import psycopg

    of("olga").create("other", 1.0, 1e-5)
    runs = {"run": of("sam").reserve("adult", [QUERY], "", "sha256:a"),
            "foreign": of("sue").reserve("adult", [LESS], "")}  # fmt: skip
    before = of("rea").history("adult"), of("rea").account("adult")
    statement = ATTACKS[attack]
    for name, run in runs.items():
        statement = statement.replace(f"%({name})s", run)
    with pytest.raises(psycopg.Error):
        server.execute(database, "sam", "BEGIN ISOLATION LEVEL SERIALIZABLE", statement, "COMMIT")
    assert (of("rea").history("adult"), of("rea").account("adult")) == before


@pytest.mark.parametrize("count", ["1e400", "5e1", "2.5", '"3"', "0", "-1", "null", "[]", "true"])
def test_counts_that_nobody_reads_are_refused(server: Server, database: str, count: str) -> None:
    import psycopg

    events = EVENTS.replace('"count": 3', f'"count": {count}')
    assert events != EVENTS
    entry = f"{ENTRY}('adult', 'r', 'reserved', '', '{events}')"
    with pytest.raises(psycopg.Error, match="as privagrad writes it"):
        server.execute(database, "sam", "BEGIN ISOLATION LEVEL SERIALIZABLE", entry, "COMMIT")


def test_damaged_events_stop_a_data_set_until_their_run_is_given_back(
    server: Server, database: str, of: Callable[[str], Ledger]
) -> None:
    events = EVENTS.replace("8.0", "-8.0")
    entry = f"{ENTRY}('adult', 'damaged', 'reserved', '', '{events}')"
    server.execute(database, "sam", "BEGIN ISOLATION LEVEL SERIALIZABLE", entry, "COMMIT")
    for act in (of("rea").account, of("rea").history):
        with pytest.raises(ValueError, match=r"of run 'damaged' on 'adult'.*release damaged"):
            act("adult")
    with pytest.raises(ValueError, match="'damaged'"):
        of("sue").reserve("adult", [QUERY], "a fit")
    of("rita").release("damaged", "no such run")
    of("sue").reserve("adult", [QUERY], "a fit")
    assert [e.state for e in of("rea").history("adult")] == ["reserved", "released", "reserved"]


def test_changes_are_serializable_or_refused(server: Server, database: str) -> None:
    """Two transactions that do not see each other could spend the same rest."""
    import psycopg

    entry = f"{ENTRY}('adult', 'r', 'reserved', '', '{EVENTS}')"
    for begin in ("BEGIN", "BEGIN ISOLATION LEVEL REPEATABLE READ"):
        with pytest.raises(psycopg.Error, match="SERIALIZABLE"):
            server.execute(database, "sam", begin, entry, "COMMIT")


@pytest.mark.parametrize("user", ["owner", "admin"])
def test_the_owner_does_not_change_anything_by_mistake(
    server: Server, database: str, user: str
) -> None:
    import psycopg

    for attack in ("another total", "nothing was spent", "forget", "forget all"):
        with pytest.raises(psycopg.Error, match="append-only"):
            server.execute(database, user, ATTACKS[attack])


def test_functions_and_tables_of_a_user_come_after_the_ledgers_own(
    server: Server, database: str, of: Callable[[str], Ledger]
) -> None:
    """A temporary table or a path of one's own does not change what the rules read."""
    import psycopg

    run = of("sam").reserve("adult", [QUERY], "")
    with pytest.raises(psycopg.Error, match="fewer"):
        server.execute(
            database, "sam",
            "CREATE TEMPORARY TABLE history AS SELECT * FROM privagrad.history",
            "CREATE FUNCTION pg_temp.covers(text, text) RETURNS boolean LANGUAGE sql AS "
            "'SELECT true'",
            "CREATE FUNCTION pg_temp.pg_has_role(name, text, text) RETURNS boolean LANGUAGE sql AS "
            "'SELECT true'",
            "SET search_path = pg_temp, pg_catalog", "BEGIN ISOLATION LEVEL SERIALIZABLE",
            f"{ENTRY}('adult', '{run}', 'finished', '', '[]')",
        )  # fmt: skip


def test_an_opener_cannot_bring_entries_into_a_budget_that_is_there(
    server: Server, database: str, of: Callable[[str], Ledger]
) -> None:
    import psycopg

    run = of("sam").reserve("adult", [QUERY], "", "sha256:a")
    budget = {"name": "b", "at": "x", "user": "x", "epsilon": 1, "delta": 1e-5, "fingerprint": None}
    entry = {"at": "x", "user": "sam", "dataset": "adult", "run": run, "state": "finished",
             "note": "", "events": "[]"}  # fmt: skip
    taken = {**budget, "fingerprint": "sha256:a"}
    for budgets, entries, bound in (
        ([], [entry], []),
        ([{**budget, "name": "adult"}], [entry], []),
        ([taken], [], []),
        ([budget], [], [{"run": run, "fingerprint": "sha256:c"}]),
        ([budget], [{**entry, "dataset": "b"}], []),
    ):
        values = ", ".join(f"'{json.dumps(rows)}'" for rows in (budgets, entries, bound))
        with pytest.raises(psycopg.Error):
            server.execute(
                database, "olga", "BEGIN ISOLATION LEVEL SERIALIZABLE",
                f"SELECT privagrad.move_in(gen_random_uuid(), 'x', {values})", "COMMIT",
            )  # fmt: skip
    with pytest.raises(psycopg.Error, match="content without a budget"):
        server.execute(
            database, "olga", "BEGIN ISOLATION LEVEL SERIALIZABLE",
            "INSERT INTO privagrad.datasets (name, epsilon, delta, fingerprint) "
            "VALUES ('c', 1, 1e-5, 'sha256:a')",
        )  # fmt: skip
    assert of("rea").names() == ["adult"]


class Cut:
    """Breaks the connection at the COMMIT of the first few transactions that write."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, times: int, how: str) -> None:
        self.left, self.how = times, how
        self.late: list[threading.Timer] = []
        connected = ServerStore.connected
        cut = self

        @contextmanager
        def watched(store: ServerStore) -> Iterator[Any]:
            with connected(store) as db:
                execute = db.execute

                def executed(sql: str, *arguments: Any, **options: Any) -> Any:
                    if sql == "COMMIT" and cut.left:
                        cut.left -= 1
                        cut.commit(db, execute)
                    return execute(sql, *arguments, **options)

                monkeypatch.setattr(db, "execute", executed, raising=False)
                yield db

        monkeypatch.setattr(ServerStore, "connected", watched)

    def commit(self, db: Any, execute: Callable[..., Any]) -> None:
        import psycopg

        if self.how == "after":
            execute("COMMIT")
        elif self.how == "later":
            # As when the server is still writing while the client has lost it.
            close = db.close
            db.close = lambda: None

            def finish() -> None:
                execute("COMMIT")
                close()

            self.late.append(threading.Timer(0.5, finish))
            self.late[-1].start()
            raise psycopg.OperationalError("server closed the connection unexpectedly")
        db.close()
        raise psycopg.OperationalError("server closed the connection unexpectedly")


@pytest.mark.parametrize("how", ["before", "after", "later"])
def test_a_commit_without_an_answer_is_neither_forgotten_nor_made_twice(
    of: Callable[[str], Ledger], monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    with monkeypatch.context() as patch:
        cut = Cut(patch, 1, how)
        run = of("team").reserve("adult", [QUERY], "a fit", "sha256:a")
        cut.left = 1
        of("team").finish(run, [QUERY])
        cut.left = 1
        of("team").create("people", 1.0, 1e-5, "sha256:b")
        again = of("team").reserve("adult", [LESS], "a fit")
        cut.left = 1
        of("team").release(again, "died early")
        assert cut.left == 0
        for timer in cut.late:
            timer.join()
    states = [(entry.run, entry.state) for entry in of("rea").history("adult")]
    assert states == [
        (run, "reserved"), (run, "finished"), (again, "reserved"), (again, "released"),
    ]  # fmt: skip
    assert of("rea").owners("sha256:b") == ["people"]


def test_a_commit_whose_outcome_nobody_tells_is_an_error_and_may_be_charged(
    of: Callable[[str], Ledger], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        cut = Cut(patch, 1, "later")
        patch.setattr(ledger_server, "PATIENCE_SECONDS", 0.1)
        with pytest.raises(UnknownOutcomeError, match="Nothing was released"):
            of("sam").reserve("adult", [QUERY], "a fit")
        cut.late[0].join()
    assert [run.state for run in of("rea").account("adult").runs] == ["reserved"]


@pytest.mark.parametrize("how", ["fast", "immediate"])
def test_operations_wait_for_a_server_that_restarts(
    server: Server, of: Callable[[str], Ledger], how: str
) -> None:
    server.stop(how)
    timer = threading.Timer(0.5, server.start)
    timer.start()
    run = of("sam").reserve("adult", [QUERY], "a fit")
    timer.join()
    assert [told.name for told in of("rea").account("adult").runs] == [run]


def test_a_server_that_stays_away_is_an_error_and_nothing_is_spent(
    server: Server, of: Callable[[str], Ledger], monkeypatch: pytest.MonkeyPatch
) -> None:
    server.stop()
    try:
        monkeypatch.setattr(ledger_server, "PATIENCE_SECONDS", 0.3)
        with pytest.raises(OSError, match="Nothing was changed"):
            of("sam").reserve("adult", [QUERY], "a fit")
    finally:
        server.start()
    monkeypatch.undo()
    assert of("rea").history("adult") == []


def test_a_server_that_refuses_is_not_asked_again(server: Server, database: str) -> None:
    for url, why in (
        (server.url("no_such_database"), "no_such_database"),
        (server.url(database, "stranger"), "stranger"),
        ("postgresql://ann@localhost:port/ledger", "port"),
    ):
        with pytest.raises(OSError, match=why):
            Ledger(url).names()


def test_what_is_worth_waiting_for() -> None:
    import psycopg

    for text in (
        "server closed the connection unexpectedly",
        'connection to server on socket "s" failed: No such file or directory',
        "connection failed: FATAL:  the database system is starting up",
        "FATAL:  the database system is not accepting connections",
        "FATAL:  terminating connection due to administrator command",
        "FATAL:  sorry, too many clients already",
    ):
        assert ledger_server._passes(psycopg.OperationalError(text)), text
    for text in (
        'FATAL:  password authentication failed for user "ann"',
        'FATAL:  database "other" does not exist',
        "fe_sendauth: no password supplied",
        "server does not support SSL, but SSL was required",
    ):
        assert not ledger_server._passes(psycopg.OperationalError(text)), text
    assert ledger_server._passes(psycopg.errors.AdminShutdown())
    assert not ledger_server._passes(psycopg.errors.UndefinedTable())


def test_whoever_waits_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    clock = iter(range(0, 1000, 4))
    slept = SimpleNamespace(monotonic=lambda: next(clock), sleep=lambda _: None)
    monkeypatch.setattr(ledger_server, "time", slept)
    ledger = Ledger(f"postgresql://ann@/ledger?host={tmp_path}")
    with pytest.warns(UserWarning, match="trying for another"), pytest.raises(OSError, match="tmp"):
        ledger.names()


def test_a_server_that_may_forget_is_refused(server: Server, of: Callable[[str], Ledger]) -> None:
    server.execute("postgres", "admin", "ALTER SYSTEM SET fsync = off")
    server.execute("postgres", "admin", "SELECT pg_reload_conf(), pg_sleep(0.3)")
    try:
        with pytest.raises(OSError, match="fsync = on"):
            of("sam").reserve("adult", [QUERY], "a fit")
    finally:
        server.execute("postgres", "admin", "ALTER SYSTEM RESET fsync")
        server.execute("postgres", "admin", "SELECT pg_reload_conf(), pg_sleep(0.3)")
    assert of("rea").history("adult") == []


def test_a_user_who_prefers_speed_is_durable_all_the_same(
    server: Server, database: str, of: Callable[[str], Ledger], monkeypatch: pytest.MonkeyPatch
) -> None:
    server.execute(database, "admin", "ALTER ROLE sam SET synchronous_commit = off")
    try:
        told, real = [], ledger_server._require_durable

        def watched(tables: Any) -> None:
            real(tables)
            told.append(tables.rows("SELECT current_setting('synchronous_commit')"))

        monkeypatch.setattr(ledger_server, "_require_durable", watched)
        of("sam").reserve("adult", [QUERY], "a fit")
    finally:
        server.execute(database, "admin", "ALTER ROLE sam RESET synchronous_commit")
    assert told == [[("on",)]]


def test_the_server_dates_and_signs_entries(
    of: Callable[[str], Ledger], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("user", "now"):
        monkeypatch.setattr(f"privagrad.privacy.ledger_file.{name}", lambda: "forged")
    monkeypatch.setenv("USER", "forged")
    of("sam").reserve("adult", [QUERY], "a fit")
    [entry] = of("rea").history("adult")
    assert entry.user == "sam"
    assert entry.at[:10] == of("rea").now()[:10]
    assert entry.at.endswith("+00:00")


def test_setup_may_be_done_again_and_restores_rights(
    server: Server, database: str, of: Callable[[str], Ledger]
) -> None:
    of("sam").reserve("adult", [QUERY], "a fit")
    before = of("rea").history("adult")
    server.execute(database, "owner", "GRANT ALL ON privagrad.history TO sam, privagrad_reader")
    set_up(server.url(database, "owner"))
    assert of("rea").history("adult") == before
    with pytest.raises(PermissionError):
        of("rea").reserve("adult", [QUERY], "a fit")
    assert script().count("SECURITY DEFINER") == 1


def test_ledgers_of_other_versions_are_refused(
    server: Server, database: str, of: Callable[[str], Ledger]
) -> None:
    server.execute(database, "owner", f"UPDATE privagrad.about SET version = {VERSION + 1}")
    for act in (lambda: of("sam").names(), lambda: of("sam").reserve("adult", [QUERY], "a fit")):
        with pytest.raises(ValueError, match="a newer privagrad made it"):
            act()
    with pytest.raises(PermissionError, match="newer privagrad"):
        set_up(server.url(database, "owner"))
    server.execute(database, "owner", f"UPDATE privagrad.about SET version = {VERSION - 1}")
    with pytest.raises(ValueError, match="budget setup"):
        of("sam").names()


def test_setup_refuses_what_others_have_prepared(server: Server) -> None:
    name = server.new_ledger("trap")
    server.execute(name, "owner", "DROP SCHEMA privagrad CASCADE")
    with pytest.raises(OSError, match="budget setup"):
        Ledger(server.url(name)).names()
    server.execute(name, "admin", "CREATE SCHEMA privagrad AUTHORIZATION sam")
    with pytest.raises(PermissionError, match="things of sam"):
        set_up(server.url(name, "owner"))
    server.execute(name, "admin", "ALTER SCHEMA privagrad OWNER TO owner")
    server.execute(name, "admin", "CREATE TABLE privagrad.history (x int)")
    with pytest.raises(PermissionError, match="things of admin"):
        set_up(server.url(name, "owner"))
    server.execute(name, "admin", "DROP SCHEMA privagrad CASCADE")


URLS = {
    "postgresql://ann:s3cret@db/ledger": "postgresql://ann@db/ledger",
    "postgres://ann:s3/c@r?et@db:5432/ledger": "postgresql://ann@db:5432/ledger",
    "postgresql://ann@db/ledger?sslmode=require&password=s3cret": (
        "postgresql://ann@db/ledger?sslmode=require"
    ),
    "postgresql:///ledger?host=/run/pg&sslpassword=s3cret": "postgresql:///ledger?host=/run/pg",
    "postgresql://ann@db/ledger": "postgresql://ann@db/ledger",
}


@pytest.mark.parametrize("url", URLS)
def test_passwords_are_never_shown(url: str) -> None:
    assert shown(url) == URLS[url]
    assert has_password(url) == ("s3" in url)
    assert is_url(url)
    if "s3cret" in url:
        said = without_secrets('invalid integer value "s3cret" for option "port"', url)
        assert "s3cret" not in said
    assert without_secrets("no route to\n host", url) == "no route to host"


def test_errors_and_names_hold_no_password(server: Server, database: str) -> None:
    url = server.url(database, "sam:s3cret%40word")
    ledger = Ledger(url)
    assert ledger.where == server.url(database, "sam")
    assert "s3cret" not in repr(ledger)
    told = []
    for act in (
        lambda: ledger.account("other"),
        lambda: ledger.create("other", 1.0, 1e-5),
        lambda: Ledger(url.replace(database, "other")).names(),
        lambda: Ledger("postgresql://ann:s3cret%zz@db/ledger"),
        lambda: ledger.path,
    ):
        with pytest.raises((ValueError, OSError)) as caught:
            act()
        told.append(str(caught.value))
    assert "s3cret" not in " ".join(told)
    assert pickle.loads(pickle.dumps(ledger)).names() == ["adult"]


def test_other_urls_and_paths_of_urls_do_not_become_files(tmp_path: Path) -> None:
    for place in ("mysql://ann@db/ledger", "postgresql+psycopg://db/ledger", "sqlite:///a.db"):
        with pytest.raises(ValueError, match="begins with postgresql://"):
            Ledger(place)
    with pytest.raises(ValueError, match="found a path"):
        Ledger(Path("postgresql://ann@db/ledger"))


def test_without_psycopg_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(ImportError, match=r"pip install 'privagrad\[postgres\]'"):
        Ledger("postgresql://ann@db/ledger")


def test_a_file_needs_no_psycopg() -> None:
    code = (
        "import sys, privagrad.privacy.ledger as l, privagrad.cli\n"
        "l.Ledger('x.db').names(); assert 'psycopg' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_two_who_take_the_same_rest_get_it_once(of: Callable[[str], Ledger]) -> None:
    """Both have seen that there is room; the second one to write looks again."""
    one = replace(QUERY, count=1, noise_multiplier=1.5)
    ledger, other = of("sam"), of("sue")
    look = ledger._look
    taken: list[str] = []

    def slow(name: str) -> Any:
        found = look(name)
        if not taken:
            taken.append(other.reserve(name, [one], "quicker"))
        return found

    ledger._look = slow  # type: ignore[method-assign]
    with pytest.raises(BudgetError):
        ledger.reserve("adult", [one], "slower")
    assert [run.name for run in of("rea").account("adult").runs] == taken


def test_killed_processes_and_a_restart_leave_every_release_in_the_ledger(
    server: Server, database: str
) -> None:
    """A few kills of the hundred that `python -m tests.killing_server` makes."""
    counts = kill_at_random(server, database, kills=10, seed=1)
    assert counts["kills"] == 10
    assert counts["runs"] >= counts["released"] > 0
