"""A ledger in a PostgreSQL database: serializable transactions that outlive lost connections.

Only this module talks to the server. Every operation has a connection of its own, so that ledgers
may be copied into forked and spawned processes.
"""

from __future__ import annotations

import random
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, NoReturn, cast

from privagrad.privacy.ledger_store import (
    PATIENCE_SECONDS,
    Right,
    Row,
    T,
    Tables,
    UnknownOutcomeError,
)
from privagrad.privacy.ledger_url import shown, without_secrets

if TYPE_CHECKING:
    import psycopg

VERSION = 1
"""The version of the schema that `ledger_server.sql` makes."""

ROLES: dict[Right, tuple[str, str]] = {
    "read": ("privagrad_reader", "see budgets"),
    "open": ("privagrad_opener", "open budgets"),
    "spend": ("privagrad_spender", "reserve and finish runs"),
    "release": ("privagrad_releaser", "give reservations back"),
}
REFUSED = "PV001"
"""The code of errors that the schema's own triggers raise: their message is for people."""

_BACK_SOON = ("57P01", "57P02", "57P03", "57P05", "53300")
"""Codes of a server that shuts down, starts up, has closed an idle session, or is crowded."""
_NOT_YET = (
    "starting up", "shutting down", "accepting connections", "recovery mode", "too many",
    "terminating connection",
)  # fmt: skip
"""What a server says that refuses connections for now: such errors have no code."""
_NEVER = ("FATAL", "authentication", "certificate", "does not support SSL", "is bad: invalid",
          "Servname not supported", "no password supplied")  # fmt: skip
"""What is said where the same URL will not do a moment later either."""
_KEEP_ALIVE = {
    "connect_timeout": "10", "keepalives_idle": "10", "keepalives_interval": "5",
    "keepalives_count": "3", "tcp_user_timeout": "30000",
}  # fmt: skip
"""A connection that was cut without a word is noticed within the patience."""


class ServerTables:
    """The tables on the server within one transaction."""

    has_contents = True

    def __init__(self, db: psycopg.Connection[Any]) -> None:
        self.db = db

    def rows(self, sql: str, values: Sequence[object] = ()) -> list[Row]:
        cursor = self.db.execute(cast("Any", sql.replace("?", "%s")), tuple(values))
        return cursor.fetchall() if cursor.description else []

    def add(self, table: str, values: Mapping[str, object]) -> None:
        names, marks = ", ".join(f'"{name}"' for name in values), ", ".join("?" * len(values))
        self.rows(f"INSERT INTO {table} ({names}) VALUES ({marks})", tuple(values.values()))


class _InDoubtError(Exception):
    """A COMMIT that got no answer."""

    def __init__(self, transaction: str, found: object) -> None:
        super().__init__(transaction)
        self.transaction, self.found = transaction, found


class ServerStore:
    """Budgets on a PostgreSQL server, which enforces who may do what: `ledger_server.sql`.

    Guarantees
    ----------
    A change is serialised with all others, and on the server's disk when `write` returns. Where a
    connection breaks during a COMMIT, the server is asked what became of the transaction, and the
    change is made again only if it was not written.
    """

    def __init__(self, url: str) -> None:
        self._url, self.where = url, shown(url)
        try:
            import psycopg
        except ImportError as error:
            raise ImportError(
                f"Expected psycopg for a ledger on a server, found none ({error}): "
                "pip install 'privagrad[postgres]'."
            ) from None
        try:
            given = psycopg.conninfo.conninfo_to_dict(url)
        except psycopg.Error:
            raise ValueError(
                f"Expected a URL such as postgresql://ann@host/ledger, found {self.where}, which "
                "PostgreSQL's library does not read. Percent-encode special characters, or leave "
                "the password to $PGPASSWORD or ~/.pgpass."
            ) from None
        self._options = {k: v for k, v in _KEEP_ALIVE.items() if k not in given}

    def exists(self) -> bool:
        """Always: a database without a ledger is an error, not a ledger without budgets."""
        return True

    def now(self) -> str:
        at = """SELECT to_char(now() AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS"+00:00"')"""
        return str(self.read(lambda tables: tables.rows(at)[0][0]))

    def read(self, look: Callable[[Tables], T]) -> T:
        return self._patiently(lambda: self._look(look), "read", time.monotonic())

    def write(
        self, change: Callable[[Tables], T], landed: Callable[[Tables], bool], right: Right
    ) -> T:
        since = time.monotonic()
        while True:
            try:
                return self._patiently(lambda: self._change(change), right, since)
            except _InDoubtError as doubt:
                if self._has_landed(doubt.transaction, landed, since):
                    return cast("T", doubt.found)
            if time.monotonic() > since + PATIENCE_SECONDS:
                raise OSError(
                    f"Expected a COMMIT from {self.where}, found none within "
                    f"{PATIENCE_SECONDS:.0f} seconds. Nothing was changed."
                )
            time.sleep(0.05)

    def run_script(self, script: str) -> None:
        """Execute a script of statements as one transaction."""

        def once() -> None:
            with self.connected() as db, db.transaction():
                db.execute(cast("Any", script))

        self._patiently(once, "open", time.monotonic())

    @contextmanager
    def connected(self) -> Iterator[psycopg.Connection[Any]]:
        """A connection that commits nothing by itself when it is closed."""
        import psycopg

        with_options = cast("Any", self._options)
        db = psycopg.connect(
            self._url, autocommit=True, prepare_threshold=None, client_encoding="UTF8",
            application_name="privagrad", **with_options,
        )  # fmt: skip
        try:
            yield db
        finally:
            db.close()

    def _look(self, look: Callable[[Tables], T]) -> T:
        with self.connected() as db:
            db.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
            return look(_prepared(db))

    def _change(self, change: Callable[[Tables], T]) -> T:
        import psycopg

        certain = (
            psycopg.errors.SerializationFailure,
            psycopg.errors.DeadlockDetected,
            psycopg.IntegrityError,
        )
        with self.connected() as db:
            db.execute("BEGIN ISOLATION LEVEL SERIALIZABLE READ WRITE")
            tables = _prepared(db)
            _require_durable(tables)
            ((transaction,),) = tables.rows("SELECT pg_current_xact_id()::text")
            found = change(tables)
            try:
                done = db.execute("COMMIT").statusmessage
            except certain:
                raise
            except psycopg.Error:
                raise _InDoubtError(transaction, found) from None
            if done != "COMMIT":
                raise OSError(f"Expected a COMMIT from {self.where}, found {done}. Try again.")
            return found

    def _has_landed(self, transaction: str, landed: Callable[[Tables], bool], since: float) -> bool:
        """Whether a transaction whose COMMIT got no answer has been written."""
        import psycopg

        def is_settled() -> bool | None:
            with self.connected() as db:
                try:
                    status = db.execute("SELECT pg_xact_status(%s::text::xid8)", (transaction,))
                    if (row := status.fetchone()) and row[0] == "in progress":
                        return None
                except psycopg.DataError:
                    pass  # a server that took over and has not had this transaction
            return self._look(landed)

        try:
            while (found := self._patiently(is_settled, "read", since)) is None:
                if time.monotonic() > since + PATIENCE_SECONDS:
                    raise TimeoutError("the transaction is still in progress")
                time.sleep(0.2)
            return found
        except Exception as error:
            raise UnknownOutcomeError(
                f"Expected an answer to a COMMIT from {self.where}, found none, and could not find "
                f"out whether it was written: {error} Nothing was released. If the run is in "
                "`privagrad budget show`, it is charged."
            ) from error

    def _patiently(self, act: Callable[[], T], right: Right, since: float) -> T:
        """Do something on the server, again and again while others or a restart are in its way."""
        import psycopg

        conflicts, told = 0, False
        while True:
            try:
                return act()
            except psycopg.Error as error:
                waited = time.monotonic() - since
                if isinstance(error, psycopg.IntegrityError) and conflicts > 20:
                    self._explain(error, right)
                if not _passes(error) or waited > PATIENCE_SECONDS:
                    self._explain(error, right, waited)
                if waited > 5 and not told and not _is_conflict(error):
                    told = True
                    _tell(f"No answer from the ledger at {self.where}: trying for another "
                          f"{PATIENCE_SECONDS - waited:.0f} seconds.")  # fmt: skip
            conflicts += 1
            # Not all at the same moment.
            time.sleep(random.uniform(0.0, min(0.01 * 1.5 ** min(conflicts, 12), 0.5)))

    def _explain(self, error: psycopg.Error, right: Right, waited: float = 0.0) -> NoReturn:
        """The error that people see."""
        import psycopg

        told = error.diag.message_primary or str(error)
        told = without_secrets(told, self._url).rstrip(".")
        if error.sqlstate == REFUSED:
            raise PermissionError(f"{told}. Ledger: {self.where}.") from None
        if isinstance(error, psycopg.errors.InsufficientPrivilege):
            role, what = ROLES[right]
            raise PermissionError(
                f"Expected a user who may {what}, found one without the role {role} in "
                f"{self.where} ({told}). Ask the owner of the ledger for it: GRANT {role} TO the "
                "user. Nothing was changed."
            ) from None
        missing = (psycopg.errors.UndefinedTable, psycopg.errors.InvalidSchemaName)
        if isinstance(error, missing):
            raise OSError(
                f"Expected a ledger in {self.where}, found a database without one ({told}). Its "
                f"owner prepares it: privagrad budget setup {self.where}."
            ) from None
        after = f" after {waited:.0f} seconds" if waited > 1 else ""
        raise OSError(
            f"Expected a ledger at {self.where}, found{after}: {told}. Nothing was changed."
        ) from None


def _prepared(db: psycopg.Connection[Any]) -> ServerTables:
    """The tables of the transaction that has begun, if this program knows their version."""
    # Nothing that other users can create comes before the ledger's own tables.
    db.execute("SET LOCAL search_path = pg_catalog, privagrad, pg_temp")
    tables = ServerTables(db)
    ((version,),) = tables.rows("SELECT version FROM privagrad.about")
    if version != VERSION:
        whose = "a newer privagrad made it. Upgrade this one"
        older = "run `privagrad budget setup` again"
        raise ValueError(
            f"Expected a ledger of version {VERSION} on the server, found version {version}: "
            f"{whose if version > VERSION else older}."
        )
    return tables


def _require_durable(tables: ServerTables) -> None:
    """What is committed survives a crash of the server: its settings must not say otherwise."""
    tables.rows(
        "SELECT set_config('synchronous_commit', 'on', true) "
        "WHERE current_setting('synchronous_commit') <> 'remote_apply'"
    )
    for name in ("fsync", "full_page_writes"):
        ((value,),) = tables.rows("SELECT current_setting(?)", (name,))
        if value != "on":
            raise OSError(
                f"Expected a server that keeps what it has committed ({name} = on), found {name} = "
                f"{value}: a crash could forget what was spent. Nothing was changed."
            )


def _passes(error: psycopg.Error) -> bool:
    """Whether the same action may succeed later."""
    import psycopg

    code = error.sqlstate
    if _is_conflict(error):
        return True
    if code is not None:
        return code in _BACK_SOON or code.startswith("08")
    if not isinstance(error, psycopg.OperationalError | psycopg.InterfaceError):
        return False
    told = str(error)
    for_now = any(phrase in told for phrase in _NOT_YET)
    return for_now or not any(phrase in told for phrase in _NEVER)


def _is_conflict(error: psycopg.Error) -> bool:
    """Whether others were changing the same rows: they may be gone the next time."""
    return error.sqlstate in ("40001", "40P01", "23505")


def _tell(text: str) -> None:
    # Where warnings are errors, this one must not break off what is being waited for.
    with suppress(UserWarning):
        warnings.warn(text, UserWarning, stacklevel=2)
