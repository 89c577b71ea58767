"""CSV, Parquet and Arrow files: their names and types, and their cells chunk by chunk."""

from __future__ import annotations

import csv
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from privagrad.data._polars import polars
from privagrad.data.libsvm import is_libsvm
from privagrad.data.schema import MISSING_MARKS, Column, Kind, Schema, did_you_mean
from privagrad.data.tables import CHUNK

if TYPE_CHECKING:
    import polars as pl

TEXTS = {".csv": ",", ".tsv": "\t", ".txt": ",", ".data": ",", ".test": ","}
FRAMES = (".parquet", ".arrow", ".ipc", ".feather")
_SEPARATORS = ",;\t|"
_LINE = 2**26
_TYPED_ROWS = 10_000
_WIDEST = 20_000
_WITHOUT_HEADER = "privagrad schema TABLE --no-header --names A,B,C"


def infer_schema(path: Path, header: bool | None = None, separator: str | None = None) -> Schema:
    """What the header and the types of a file's columns say, and nothing of its values.

    Without `header` the first line of a text file names the columns, and one that might be a row
    is refused. Without `separator` it is the one that the first line has most of.
    """
    require_table(path)
    if is_libsvm(path):
        raise ValueError(
            f"Expected a table with named columns, found the LIBSVM file {path.name}: it has only "
            "numbers and needs no schema."
        )
    if path.suffix.lower() in FRAMES:
        types = dict(_scan_frame(path).collect_schema())
        return Schema(tuple(Column(name, _kind(dtype)) for name, dtype in types.items()))
    separator = separator or _separator_of(path)
    first = _first_line(path, separator)
    named = header is not False
    names = _header(first, path) if named else [f"column{k}" for k in range(1, len(first) + 1)]
    with _plain_errors(path):
        rows = _scan_text(path, separator, named, names).head(_TYPED_ROWS).collect()
    if header is None:
        _require_evident_header(rows, path)
    return Schema(
        tuple(Column(name, _text_kind(rows[name])) for name in names), None, separator, named
    )


def frames(path: Path, schema: Schema, wanted: list[str]) -> Iterator[pl.DataFrame]:
    """The wanted columns of all rows, some ten thousand rows at a time."""
    with _plain_errors(path):
        frame, names = _scan(path, schema)
        for name in wanted:
            if name not in names:
                raise ValueError(
                    f"Expected the column {name!r} in {path.name}, found none."
                    f"{did_you_mean(name, names)}"
                )
        for chunk in frame.collect_batches(chunk_size=CHUNK, maintain_order=True):
            yield _without_blank_lines(chunk).select(wanted)


def _without_blank_lines(chunk: pl.DataFrame) -> pl.DataFrame:
    """Lines without any cell are no rows, unless there is one column."""
    suspects = np.flatnonzero(chunk.to_series(0).is_null().to_numpy())
    if chunk.width == 1 or not suspects.size:
        return chunk
    empty = [all(cell is None for cell in chunk.row(int(k))) for k in suspects]
    kept = np.ones(len(chunk), dtype=bool)
    kept[suspects[empty]] = False
    return chunk.filter(kept)


def _scan(path: Path, schema: Schema) -> tuple[pl.LazyFrame, list[str]]:
    """The file as a lazy frame of the schema's columns, and their names."""
    if path.suffix.lower() in FRAMES:
        frame = _scan_frame(path)
        return frame, frame.collect_schema().names()
    first = _first_line(path, schema.separator)
    if schema.header:
        names = _header(first, path)
    else:
        names = [column.name for column in schema.columns]
        if len(first) == len(names) - 1 and schema.target in names:
            names.remove(schema.target)
        if len(first) != len(names):
            raise ValueError(
                f"Expected {len(names)} columns in {path.name}, as the schema says, found "
                f"{len(first)}."
            )
    return _scan_text(path, schema.separator, schema.header, names), names


def _scan_text(path: Path, separator: str, header: bool, names: list[str]) -> Any:
    """A text file, all cells as texts."""
    return polars().scan_csv(
        path, separator=separator, has_header=header, new_columns=names, infer_schema=False,
        raise_if_empty=False,
    )  # fmt: skip


def _scan_frame(path: Path) -> Any:
    """A Parquet or Arrow file."""
    pl = polars()
    with _plain_errors(path):
        parquet = path.suffix.lower() == ".parquet"
        lazy = pl.scan_parquet(path) if parquet else pl.scan_ipc(path)
        lazy.collect_schema()
    return lazy


def require_table(path: Path) -> None:
    """A file that is there, of an ending that we read."""
    if not path.is_file():
        raise FileNotFoundError(f"Expected a file, found nothing at {path}.")
    ending = path.suffix.lower()
    if ending not in TEXTS and ending not in FRAMES and not is_libsvm(path):
        known = ", ".join([*TEXTS, *FRAMES])
        raise ValueError(
            f"Expected a table ({known}, or .libsvm), found {path.name}. Convert it first."
        )


@contextmanager
def _plain_errors(path: Path) -> Iterator[None]:
    """Errors of Polars as ours, in one line."""
    try:
        yield
    except FileNotFoundError:
        raise
    except (polars().exceptions.PolarsError, OSError) as error:
        told = (str(error).strip() or "nothing that can be read").splitlines()[0][:200]
        raise ValueError(f"Expected a table in {path.name}, found: {told}") from error


def _kind(dtype: Any) -> Kind:
    return "number" if dtype.is_numeric() else "category"


def _text_kind(texts: pl.Series) -> Kind:
    """Numbers where all texts but blanks and the usual marks of missing values are."""
    told = _not_blank(texts)
    known = told.filter(~told.str.to_lowercase().is_in(list(MISSING_MARKS)))
    numbers = known.cast(polars().Float64, strict=False)
    return "category" if numbers.null_count() or (len(told) and not len(known)) else "number"


def _not_blank(texts: pl.Series) -> pl.Series:
    texts = texts.str.strip_chars()
    return texts.filter(texts.is_not_null() & (texts != ""))


def _separator_of(path: Path) -> str:
    """The separator that the first line has most of; a file's ending decides ties."""
    with path.open("rb") as file:
        line = file.readline(_LINE)
    usual = TEXTS.get(path.suffix.lower(), ",")
    return max(_SEPARATORS, key=lambda s: (line.count(s.encode()), s == usual))


def _first_line(path: Path, separator: str) -> list[str]:
    """The cells of the first line."""
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            cells = next(csv.reader(file, delimiter=separator), None)
    except UnicodeDecodeError as error:
        raise ValueError(
            f"Expected UTF-8 text in {path.name}, found other bytes: convert it first, for example "
            "with iconv -f latin1 -t utf-8."
        ) from error
    except csv.Error as error:
        raise ValueError(f"Expected a table in {path.name}, found: {error}.") from error
    if not cells or not any(cell.strip() for cell in cells):
        raise ValueError(f"Expected a table in {path.name}, found no first line.")
    if len(cells) > _WIDEST:
        raise ValueError(
            f"Expected at most {_WIDEST} columns in a text file, found {len(cells)} in "
            f"{path.name}: write so wide a table as LIBSVM or Parquet."
        )
    return [cell.strip() for cell in cells]


def _header(cells: list[str], path: Path) -> list[str]:
    """The names of the columns; not values that would become public by being taken for names."""
    if any(_is_number(cell) for cell in cells):
        raise ValueError(
            f"Expected names of columns in the first line of {path.name}, found numbers: it looks "
            f"like a row. For a file without a header: {_WITHOUT_HEADER}."
        )
    if "" in cells:
        raise ValueError(
            f"Expected a name for every column of {path.name}, found none for column "
            f"{cells.index('') + 1}."
        )
    counts = Counter(cells)
    twice = [str(k) for k, name in enumerate(cells, 1) if counts[name] > 1]
    if twice:
        # By number: in a file without a header they would be someone's values.
        raise ValueError(
            f"Expected different names of columns in {path.name}, found some twice: those of "
            f"columns {', '.join(twice[:5])}{', ...' if len(twice) > 5 else ''}. For a file "
            f"without a header: {_WITHOUT_HEADER}."
        )
    return cells


def _require_evident_header(rows: pl.DataFrame, path: Path) -> None:
    """Refuse a first line that might be a row: its values would become public as names.

    What shows that it is none: below its text a column holds numbers, and none of its cells is seen
    as a value of its column. Over columns of text alone a header looks like any row, and only the
    user knows. The message quotes no cell.
    """
    if not len(rows):
        raise ValueError(
            f"Expected rows below the first line of {path.name}, found none. For a file without a "
            f"header: {_WITHOUT_HEADER}."
        )
    texts = {name: rows[name].str.strip_chars() for name in rows.columns}
    if any(name.lower() in MISSING_MARKS for name in texts):
        found = "a sign for a missing value in it"
    elif any((column == name).any() for name, column in texts.items()):
        found = "a cell of it again below, as a value of the same column"
    elif all(_not_blank(t).is_empty() or _text_kind(t) == "category" for t in texts.values()):
        found = "text alone in all columns, where a header cannot be told from a row"
    else:
        return
    raise ValueError(
        f"Expected a first line of {path.name} that is surely no row, found {found}. Names of "
        "columns become public. If it holds names and nobody's values: privagrad schema TABLE "
        f"--header. For a file without a header: {_WITHOUT_HEADER}. Then fit with --schema."
    )


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
