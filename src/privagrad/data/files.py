"""The files of a table, and the fingerprint of their bytes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from privagrad.data.libsvm import is_libsvm
from privagrad.data.readers import infer_schema, open_table
from privagrad.data.schema import Schema
from privagrad.data.sources import files_of
from privagrad.data.tables import Table


class TableFiles(Protocol):
    """The file of a table, or a folder of files, wherever it can be read."""

    @property
    def name(self) -> str:
        """That of the file or of the folder."""

    @property
    def libsvm(self) -> bool:
        """Whether it is a LIBSVM file."""

    def fingerprint(self) -> str:
        """See the function `fingerprint`."""

    def has_content_of(self, path: Path) -> bool:
        """Whether a table here has a file of the same bytes, whatever it is called."""

    def infer_schema(self, encoding: str) -> Schema:
        """The names of the columns, and their kinds."""

    def open(self, schema: Schema) -> Table:
        """The rows, parsed once."""


@dataclass(frozen=True)
class LocalFiles:
    """A table that this process reads."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def libsvm(self) -> bool:
        return is_libsvm(self.path)

    def fingerprint(self) -> str:
        return fingerprint(self.path)

    def has_content_of(self, path: Path) -> bool:
        pairs = ((a, b) for a in files_of(path) for b in files_of(self.path))
        return any(_same_bytes(a, b) for a, b in pairs)

    def infer_schema(self, encoding: str) -> Schema:
        return infer_schema(self.path, encoding=encoding)

    def open(self, schema: Schema) -> Table:
        return open_table(self.path, schema)


def fingerprint(path: Path) -> str:
    """SHA-256 of a file's bytes; of a folder, of the names and fingerprints of its files."""
    if path.is_dir():
        return of_folder((fingerprint(file), file.name) for file in files_of(path))
    with path.open("rb") as file:
        return "sha256:" + hashlib.file_digest(file, "sha256").hexdigest()


def of_folder(files: Iterable[tuple[str, str]]) -> str:
    """The fingerprint of a folder of files with these fingerprints and names."""
    told = "".join(f"{digest} {name}\n" for digest, name in files)
    return "sha256:" + hashlib.sha256(told.encode()).hexdigest()


def _same_bytes(one: Path, other: Path) -> bool:
    if one.stat().st_size != other.stat().st_size:
        return False
    return one.samefile(other) or fingerprint(one) == fingerprint(other)
