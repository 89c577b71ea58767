"""Processes that are killed at every named point of their work, one point after the other.

`kill_everywhere` starts this module as a program. The program does a task once to learn its points:
the moments before and after every statement of SQLite, every release, every write of a model file
and every reading of the rows. Then it forks one child for every point, which does the same task in
a folder of its own and kills itself there. No clock is involved: each point is met on any machine.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from privagrad.data import files as files_module
from privagrad.fitting import FitRequest, fingerprint, prepare, run
from privagrad.fitting import fit as fit_module
from privagrad.fitting import save as save_module
from privagrad.linear import Choices
from privagrad.privacy.events import GaussianEvent
from privagrad.privacy.ledger import Ledger
from privagrad.privacy.mechanism import GaussianSum
from privagrad.privacy.noise import random_source

_CHANGES = ("BEGIN IMMEDIATE", "INSERT", "COMMIT", "PRAGMA journal_mode")
EVENT = GaussianEvent(20.0, 2, purpose="a release")


class Points:
    """Counts the points of a task, and ends the process at one of them."""

    def __init__(self, folder: Path, last: int | None = None) -> None:
        self.names: list[str] = []
        self.released = folder / "released"
        self.last = last

    def reach(self, name: str) -> None:
        if len(self.names) == self.last:
            os.kill(os.getpid(), signal.SIGKILL)
        self.names.append(name)

    def around(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **options: Any) -> Any:
            self.reach(f"before {name}")
            result = function(*arguments, **options)
            self.reach(f"after {name}")
            return result

        return wrapped

    def watch_everything(self) -> None:
        """In this process, which does nothing else: patches are never taken back."""
        points = self

        class Watched(sqlite3.Connection):
            def execute(self, sql: str, *arguments: Any) -> sqlite3.Cursor:
                words = " ".join(sql.split()[:3])
                points.reach(f"before {words}")
                if sql == "PRAGMA synchronous = FULL":
                    return super().execute("PRAGMA synchronous = OFF")
                cursor = super().execute(sql, *arguments)
                if words.startswith(_CHANGES):
                    points.reach(f"after {words}")
                return cursor

            def executescript(self, sql: str) -> sqlite3.Cursor:
                cursor: sqlite3.Cursor = points.around("script", super().executescript)(sql)
                return cursor

            def close(self) -> None:
                points.reach("before close")
                super().close()

        connect, release = sqlite3.connect, GaussianSum.release

        def connected(*arguments: Any, **options: Any) -> Any:
            db = connect(*arguments, factory=Watched, **options)
            # What was written outlives the process, though not the machine, without a wait.
            sqlite3.Connection.execute(db, "PRAGMA synchronous = OFF")
            return db

        def told(self: GaussianSum, *arguments: Any) -> Any:
            points.tell("r")
            return points.around("release", release)(self, *arguments)

        replaced: list[tuple[Any, str, Callable[..., Any]]] = [
            (sqlite3, "connect", connected),
            (GaussianSum, "release", told),
            # How often a fit trains on made-up rows depends on its noise: the same in every child.
            (fit_module, "random_source", lambda *_: random_source(0)),
        ]
        for owner, name, function in replaced:
            setattr(owner, name, function)
        patches: list[tuple[Any, str]] = [
            (os, "fsync"),
            (os, "replace"),
            (zipfile.ZipFile, "writestr"),
            (shutil, "copyfile"),
            (shutil, "rmtree"),
            (hashlib, "file_digest"),
            (files_module, "open_table"),
            (save_module, "save_model"),
        ]
        for owner, name in patches:
            setattr(owner, name, self.around(name, getattr(owner, name)))

    def tell(self, text: str) -> None:
        """What the outside world has seen, in a file that survives the process."""
        with self.released.open("a") as file:
            file.write(text)


def request(folder: Path) -> FitRequest:
    return FitRequest(
        folder / "rows.libsvm", None, 1.5, classes=("-1", "1"), choices=Choices(steps=2),
        dataset="rows", ledger=Ledger(folder / "ledger.db"),
    )  # fmt: skip


def fit(folder: Path, _: Points) -> None:
    """A fit that a budget pays, whose rows it has the fingerprint of."""
    run(prepare(request(folder)), folder / "rows.model", False)


def keep_account(folder: Path, points: Points) -> None:
    """A ledger from its beginning: one run that finishes, one that is given back."""
    ledger = Ledger(folder / "new.db")
    ledger.create("rows", 2.0, 1e-5)
    first = ledger.reserve("rows", [EVENT], "first")
    points.tell(first)
    ledger.finish(first, [EVENT])
    second = ledger.reserve("rows", [EVENT], "second")
    ledger.release(second, "nothing was released")


TASKS = {"fit": fit, "keep_account": keep_account}


def _in_a_child(task: str, folder: Path, last: int | None) -> int:
    """The state in which a child ended that did the task up to a point."""
    if child := os.fork():
        return os.waitpid(child, 0)[1]
    try:
        tempfile.tempdir = str(folder)
        points = Points(folder, last)
        points.watch_everything()
        TASKS[task](folder, points)
        (folder / "points.json").write_text(json.dumps(points.names))
    finally:
        os._exit(0 if (folder / "points.json").exists() else 1)


def _copy(template: Path, folder: Path) -> Path:
    shutil.copytree(template, folder)
    return folder


def main(task: str, template: Path, out: Path) -> None:
    # Compiled and calibrated once, so that the children are quick.
    TASKS[task](warm := _copy(template, out / "warm"), Points(warm))
    whole = _copy(template, out / "whole")
    if _in_a_child(task, whole, None):
        raise RuntimeError("Expected that the task succeeds if it is not killed, found an error.")
    for k, name in enumerate(json.loads((whole / "points.json").read_text())):
        folder = _copy(template, out / f"{k:04d} {name.replace('/', '_')}")
        if (status := _in_a_child(task, folder, k)) != signal.SIGKILL:
            raise RuntimeError(f"Expected a child killed {name}, found one that ended: {status}.")


def kill_everywhere(task: str, template: Path, out: Path) -> list[Path]:
    """The folders that a task left, which was killed at one point in each; in order."""
    out.mkdir()
    subprocess.run([sys.executable, "-m", "tests.killing", task, template, out], check=True)
    return sorted(path for path in out.iterdir() if path.name[0].isdigit())


def made_ledger(folder: Path) -> Ledger:
    """A budget for the rows in the folder."""
    ledger = Ledger(folder / "ledger.db")
    ledger.create("rows", 2.0, 1e-5, fingerprint(folder / "rows.libsvm"))
    return ledger


def ledger_is_intact(path: Path) -> bool:
    db = sqlite3.connect(path)
    try:
        return bool(db.execute("PRAGMA integrity_check").fetchone()[0] == "ok")
    finally:
        db.close()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
