"""What is wrong with a file that is no table: told without any of its cells."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from privagrad.data._polars import polars
from privagrad.data.sources import FRAMES, ending_of, undecodable


@contextmanager
def plain_errors(path: Path, separator: str = ",") -> Iterator[None]:
    """Errors of Polars as ours. Theirs may quote cells, so nothing of their text is passed on."""
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        if error.strerror is None:
            raise _unreadable(path, separator) from None
        raise ValueError(
            f"Expected a file that can be read, found {path.name}: {error.strerror}."
        ) from None
    except polars().exceptions.PanicException:  # no Exception; of damaged Parquet and Arrow files
        raise _unreadable(path, separator) from None
    except polars().exceptions.PolarsError as error:
        if str(error).lower().startswith(("invalid utf-8", "invalid utf8")):
            raise undecodable(path, "UTF-8") from None
        raise _unreadable(path, separator) from None


def _unreadable(path: Path, separator: str) -> ValueError:
    """What is wrong with a file that is no table, without any of its cells."""
    ending = ending_of(path)
    if ending in FRAMES:
        return ValueError(
            f"Expected {'a Parquet' if ending == '.parquet' else 'an Arrow'} file in {path.name}, "
            "found one that is damaged or of another kind: write it again."
        )
    return ValueError(f"Expected a table in {path.name}, found {_first_fault(path, separator)}.")


def _first_fault(path: Path, separator: str) -> str:
    """The first line that is no row of a text file, and why."""
    line = 1
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = csv.reader(file, delimiter=separator, strict=True)
            width = len(next(rows, []))
            line = 1 + rows.line_num
            for row in rows:
                if len(row) > width:
                    return f"more cells in line {line} than in the first one, which has {width}"
                line = 1 + rows.line_num
    except UnicodeDecodeError:
        pass
    except csv.Error:
        return f"a cell from line {line} on whose quotes do not close, or not at its end"
    return "lines that are no rows"
