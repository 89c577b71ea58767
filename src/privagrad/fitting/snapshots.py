"""The bytes of a file at one moment, and their fingerprint."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from pathlib import Path
from typing import Self


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
    is not read again. It is made on entering the context and deleted on leaving it.

    Attributes
    ----------
    path : Path
        The copy.
    fingerprint : str
        Of the copy.
    """

    path: Path
    fingerprint: str

    def __init__(self, original: Path) -> None:
        self._original = original

    def __enter__(self) -> Self:
        self._folder = Path(tempfile.mkdtemp(prefix="privagrad-"))
        try:
            self.path = self._folder / self._original.name
            shutil.copyfile(self._original, self.path)
            self.fingerprint = fingerprint(self.path)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
