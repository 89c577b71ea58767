"""The bytes of a file at one moment."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from privagrad.data.sources import files_of


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
