"""The file beside a checkpoint that holds the releases of all runs that continue from it.

Every line is the record of one release, written before the release is made. A kill or a full disk
may cut a line off; then its release was not made. Any other damage is refused.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

_BEGINNING = b'{"run": "'


def append(path: Path, record: dict[str, Any]) -> None:
    """Add a record; it is in the file when this returns, and survives the process."""
    line = json.dumps(record).encode() + b"\n"
    try:
        with path.open("a+b") as file:
            if file.seek(0, os.SEEK_END):
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":  # the last line was cut off: leave it alone
                    line = b"\n" + line
            file.write(line)
    except OSError as error:
        raise OSError(
            f"Expected to note a release in {path.name}, found: {error}. The release is not made, "
            "though this run counts it. Make room, then go on from the checkpoint."
        ) from error


def records(path: Path) -> list[dict[str, Any]]:
    """All records; none where there is no file."""
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")
    found = [_record(line, f"line {number} of {path.name}") for number, line in enumerate(lines, 1)]
    return [record for record in found if record is not None]


def _record(line: bytes, place: str) -> dict[str, Any] | None:
    """The record of a line; None: it was cut off, or is empty."""
    if not line.strip():
        return None
    try:
        text = line.decode("ascii")
        record = json.loads(text)
    except json.JSONDecodeError as error:
        begun = line.startswith(_BEGINNING) or _BEGINNING.startswith(line)
        # A word such as null, cut off, is complained about at its beginning.
        if begun and (error.pos >= len(text) - 4 or error.msg.startswith("Unterminated")):
            return None
        raise _damaged(place, error) from error
    except (ValueError, RecursionError) as error:
        raise _damaged(place, error) from error
    if not isinstance(record, dict) or not {"run", "event"} <= record.keys():
        raise _damaged(place, "no release")
    return record


def _damaged(place: str, what: object) -> ValueError:
    return ValueError(
        f"Expected the record of a release in {place}, found: {what}. Releases may be missing from "
        "it: bring back a copy of the file."
    )
