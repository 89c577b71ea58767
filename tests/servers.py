"""A PostgreSQL server of the tests' own, in a folder of its own, reached by a socket in it.

It has no password and listens on no port. A server that the machine runs is never used.
"""

from __future__ import annotations

import glob
import os
import pwd
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any
from urllib.parse import quote

from privagrad.privacy.ledger_server import ServerStore
from privagrad.privacy.ledger_setup import set_up

USERS = {
    "team": ("opener", "spender", "releaser"),
    "olga": ("opener",),
    "sam": ("spender",),
    "sue": ("spender",),
    "rita": ("releaser",),
    "rea": ("reader",),
    "nobody": (),
}
"""Users of every ledger on the server, and what they may do."""


def binaries() -> Path | None:
    """The folder of the newest server of PostgreSQL on this machine."""
    folders = glob.glob("/usr/lib/postgresql/*/bin/initdb")
    if found := shutil.which("initdb"):
        folders.append(found)
    known = sorted(folders, key=lambda path: [int(p) for p in path.split("/") if p.isdigit()])
    return Path(known[-1]).parent if known else None


class Server:
    """A server that can be stopped, killed and started again; owner of every ledger: `owner`."""

    def __init__(self, programs: Path) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="privagrad-postgres-"))
        self._programs, self._user = programs, None
        if os.getuid() == 0:  # the server refuses to run as root
            self._user = _unprivileged()
            os.chown(self.folder, pwd.getpwnam(self._user).pw_uid, -1)
        self.folder.chmod(0o755)
        self._databases: set[str] = set()

    def begin(self) -> None:
        self._run("initdb", "--auth=trust", "--encoding=UTF8", "--no-locale", "--username=admin",
                  "--no-sync", "--wal-segsize=4", "-D", str(self.folder / "data"))  # fmt: skip
        self.start()
        admin = ServerStore(self.url("postgres", "admin"))
        with admin.connected() as db:
            db.execute("CREATE ROLE owner LOGIN CREATEROLE CREATEDB")
        self.new_ledger()
        with admin.connected() as db:
            for user, rights in USERS.items():
                db.execute(f"CREATE ROLE {user} LOGIN")
                for right in rights:
                    db.execute(f"GRANT privagrad_{right} TO {user}")

    def start(self) -> None:
        settings = f"-c listen_addresses= -c unix_socket_directories={self.folder}"
        self._run("pg_ctl", "start", "-w", "-s", "-D", str(self.folder / "data"), "-o", settings,
                  "-l", str(self.folder / "log"))  # fmt: skip

    def stop(self, how: str = "fast") -> None:
        """Stop the server: "fast" tells its clients, "immediate" is a crash."""
        self._run("pg_ctl", "stop", "-w", "-s", "-D", str(self.folder / "data"), "-m", how)

    def end(self) -> None:
        if (self.folder / "data" / "postmaster.pid").exists():
            self.stop("immediate")
        shutil.rmtree(self.folder)

    def url(self, database: str, user: str = "team") -> str:
        return f"postgresql://{user}@/{database}?host={quote(str(self.folder), safe='/')}"

    def new_ledger(self, database: str = "ledger") -> str:
        """The name of a database with an empty ledger: what was in it before is gone."""
        if database not in self._databases:
            self.execute("postgres", "owner", f"CREATE DATABASE {database}")
            self._databases.add(database)
        self.execute(database, "owner", "DROP SCHEMA IF EXISTS privagrad CASCADE")
        set_up(self.url(database, "owner"))
        return database

    def execute(self, database: str, user: str, *statements: str) -> list[Any]:
        """What statements find, each in a transaction of its own unless they say BEGIN."""
        found: list[Any] = []
        with ServerStore(self.url(database, user)).connected() as db:
            for statement in statements:
                cursor = db.execute(statement)
                found = cursor.fetchall() if cursor.description else []
        return found

    def _run(self, program: str, *arguments: str) -> None:
        done = subprocess.run(
            [str(self._programs / program), *arguments], user=self._user, cwd=self.folder,
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"Expected that {program} succeeds, found: {done.stderr}")


def _unprivileged() -> str:
    known = {user.pw_name for user in pwd.getpwall()}
    return "postgres" if "postgres" in known else "nobody"
