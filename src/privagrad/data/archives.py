"""ZIP archives of JSON and plain arrays by strangers: no code runs, memory is bounded."""

from __future__ import annotations

import io
import json
import math
import tokenize
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

_ROOM, _TIMES = 2**24, 100
"""What all entries may have in bytes: so many, and so many times the bytes of the file. Noisy
coefficients cannot be packed; the rest of a model is up to about 20 times as large as they are."""

_LONGEST_HEADER = 10_000

DAMAGED = (
    zipfile.BadZipFile, zlib.error, EOFError, KeyError, NotImplementedError, OverflowError,
    RecursionError, RuntimeError, TypeError, ValueError, AttributeError, SyntaxError,
    tokenize.TokenError,
)  # fmt: skip
"""What reading a file raises that is damaged, encrypted, packed in another way or made to harm."""


def read_archive(path: Path, document: str, arrays: tuple[str, ...]) -> dict[str, Any]:
    """The JSON object named `document`, with the float64 arrays as further entries.

    Raises one of `DAMAGED` where the file is anything else, before it needs more memory than a
    whole file of this size may.
    """
    try:
        return _read(path, document, arrays)
    except OSError as error:  # places beyond the end of the file
        raise ValueError(f"a damaged archive: {error}") from error


def _read(path: Path, document: str, arrays: tuple[str, ...]) -> dict[str, Any]:
    with zipfile.ZipFile(path) as archive:
        size = sum(entry.file_size for entry in archive.infolist())
        most = _ROOM + _TIMES * path.stat().st_size
        if size > most:
            raise ValueError(f"{size:,} bytes packed into {path.stat().st_size:,}")
        found = json.loads(archive.read(document))
        if not isinstance(found, dict):
            raise ValueError(f"no model of privagrad: no JSON object in {document}")
        json.dumps(found, ensure_ascii=False).encode()  # no halves of characters
        for name in arrays:
            found[name] = _array(archive.read(f"{name}.npy"), name)
    return found


def _array(packed: bytes, name: str) -> NDArray[np.float64]:
    """The array of an .npy file, whose header declares as many bytes as there are."""
    file = io.BytesIO(packed)
    if npy.read_magic(file) != (1, 0):
        raise ValueError(f"{name} in another version of .npy")
    shape, by_columns, kind = npy.read_array_header_1_0(file, _LONGEST_HEADER)
    rest = len(packed) - file.tell()
    if kind != np.float64 or any(size < 0 for size in shape) or 8 * math.prod(shape) != rest:
        raise ValueError(f"{name} of shape {shape} and type {kind} in {rest} bytes")
    values = np.frombuffer(packed, kind, offset=file.tell())
    return values.reshape(shape, order="F" if by_columns else "C").astype(np.float64)
