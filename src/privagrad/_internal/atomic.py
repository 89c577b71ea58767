"""Files that are written completely or not at all."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """A file to write to, which takes the place of `path` only when all of it is on the disk."""
    partial = path.with_name(f".{secrets.token_hex(8)}.part")
    try:
        with partial.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def write_once_ready(path: Path, content: bytes, ready: Callable[[], None]) -> None:
    """Write a file after `ready`, which is called when the disk has room for it.

    Nothing of the content is on the disk before. If `ready` raises, there is no file.
    """
    with atomic_write(path) as file:
        file.write(bytes(len(content)))
        file.flush()
        os.fsync(file.fileno())
        ready()
        file.seek(0)
        file.write(content)
