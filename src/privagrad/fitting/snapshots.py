"""The bytes of a file at one moment, and their fingerprint."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from privagrad.data.sources import files_of


def fingerprint(path: Path) -> str:
    """SHA-256 of a file's bytes; of a folder, of the names and fingerprints of its files."""
    if path.is_dir():
        told = "".join(f"{fingerprint(file)} {file.name}\n" for file in files_of(path))
        return "sha256:" + hashlib.sha256(told.encode()).hexdigest()
    with path.open("rb") as file:
        return "sha256:" + hashlib.file_digest(file, "sha256").hexdigest()


def same_content(one: Path, other: Path) -> bool:
    """Whether two tables share a file of the same bytes, whatever it is called."""
    pairs = ((a, b) for a in files_of(one) for b in files_of(other))
    return any(_same_bytes(a, b) for a, b in pairs)


def _same_bytes(one: Path, other: Path) -> bool:
    if one.stat().st_size != other.stat().st_size:
        return False
    return one.samefile(other) or fingerprint(one) == fingerprint(other)


@contextmanager
def snapshot(original: Path) -> Iterator[Path]:
    """A private copy of a file or folder under the same name, which nobody else writes to.

    Take the fingerprint of the copy and read the copy: what happens to the original in between
    does not matter.
    """
    with TemporaryDirectory(prefix="privagrad-", ignore_cleanup_errors=True) as folder:
        copy = Path(folder) / original.name
        if original.is_dir():
            copy.mkdir()
            for file in files_of(original):
                shutil.copyfile(file, copy / file.name)
        else:
            shutil.copyfile(original, copy)
        yield copy
