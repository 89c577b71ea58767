"""The bytes of a file at one moment, and their fingerprint."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
import weakref
from pathlib import Path


def fingerprint(path: Path) -> str:
    """SHA-256 of a file's bytes."""
    with path.open("rb") as file:
        return "sha256:" + hashlib.file_digest(file, "sha256").hexdigest()


def same_content(one: Path, other: Path) -> bool:
    """Whether two files have the same bytes, whatever they are called."""
    if one.stat().st_size != other.stat().st_size:
        return False
    return one.samefile(other) or fingerprint(one) == fingerprint(other)


class Snapshot:
    """A private copy of a file, under the same name, which nobody else writes to.

    The copy is what the fingerprint is of: a file that changes after its fingerprint was compared
    is not read again. It is deleted with this object, or by `delete`.
    """

    def __init__(self, path: Path) -> None:
        folder = Path(tempfile.mkdtemp(prefix="privagrad-"))
        self.delete = weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        self.path = folder / path.name
        shutil.copyfile(path, self.path)
        self.fingerprint = fingerprint(self.path)
