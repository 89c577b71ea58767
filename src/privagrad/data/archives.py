"""ZIP archives of JSON and plain arrays by strangers: no code runs, memory is bounded."""

from __future__ import annotations

import json
import math
import re
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

_ROOM, _TIMES = 2**24, 100
"""What all entries may have in bytes: so many, and so many times the bytes of the file. Noisy
coefficients cannot be packed; the rest of a model is up to about 20 times as large as they are."""

_HEADER = re.compile(
    rb"\x93NUMPY\x01\x00..\{'descr': '([<>]f8)', 'fortran_order': (True|False), "
    rb"'shape': \(((?:\d{1,18}, ?)*(?:\d{1,18})?)\),? ?\} *\n",
    re.DOTALL,
)
"""As NumPy writes it; NumPy's own reader evaluates it as Python, with a way round for Python 2."""

DAMAGED = (
    zipfile.BadZipFile, zlib.error, EOFError, KeyError, NotImplementedError, OverflowError,
    RecursionError, RuntimeError, TypeError, ValueError, AttributeError,
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
    start = 10 + int.from_bytes(packed[8:10], "little")
    header = _HEADER.fullmatch(packed[:start])
    if header is None:
        raise ValueError(f"{name} without the header of an array of doubles")
    kind, by_columns, sizes = header.groups()
    shape = tuple(int(size) for size in sizes.split(b",") if size.strip())
    if 8 * math.prod(shape) != len(packed) - start:
        raise ValueError(f"{name} of shape {shape} in {len(packed) - start} bytes")
    values = np.frombuffer(packed, np.dtype(kind.decode()), offset=start)
    return values.reshape(shape, order="F" if by_columns == b"True" else "C").astype(np.float64)
