"""Text, Excel, Parquet and Arrow files: their names and types, and their cells chunk by chunk."""

from __future__ import annotations

import csv
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from privagrad.data._polars import polars
from privagrad.data.faults import plain_errors
from privagrad.data.inference import (
    not_blank,
    number_style,
    tells_of_a_header,
    text_column,
    typed_column,
)
from privagrad.data.libsvm import is_libsvm
from privagrad.data.parsing import Parser
from privagrad.data.schema import MISSING_MARKS, Schema, did_you_mean
from privagrad.data.sources import (
    EXCEL,
    FRAMES,
    empty_lines_at_the_end,
    ending_of,
    files_of,
    plain_text,
    undecodable,
)
from privagrad.data.tables import CHUNK

if TYPE_CHECKING:
    import polars as pl

TEXTS = {".csv": ",", ".tsv": "\t", ".txt": ",", ".data": ",", ".test": ","}
_SEPARATORS = ",;\t|"
_LINE = 2**26
_TYPED_ROWS, _NAMED = 10_000, 5
_WIDEST = 20_000
_WITHOUT_HEADER = "privagrad schema TABLE --no-header --names A,B,C"


def infer_schema(
    path: Path,
    header: bool | None = None,
    separator: str | None = None,
    encoding: str = "utf-8",
    sheet: str | None = None,
) -> Schema:
    """The names of a file's columns, and their kinds.

    The kinds are those of the types in Parquet and Arrow files. In text and Excel files they tell
    whether all entries in the first rows read as numbers or as dates, which one row can change.
    Without `header` the first line of a text file names the columns, and one that might be a row
    is refused. Without `separator` it is the one that the first line has most of. Decimal commas
    are part of what is inferred: use such a schema only if somebody has looked at it.
    """
    require_table(path)
    path = files_of(path)[0]
    if is_libsvm(path):
        raise ValueError(
            f"Expected a table with named columns, found the LIBSVM file {path.name}: it has only "
            "numbers and needs no schema."
        )
    if path.suffix.lower() in FRAMES:
        types = dict(_scan_frame(path).collect_schema())
        return Schema(tuple(typed_column(name, dtype) for name, dtype in types.items()))
    written = Schema((), encoding=encoding, sheet=sheet, separator=separator or ",")
    with plain_text(path, written) as text:
        separator = separator or ("," if ending_of(path) == EXCEL else _separator_of(text))
        first = _first_line(text, separator)
        named = header is not False
        names = _header(first, path) if named else [f"column{k}" for k in range(1, len(first) + 1)]
        with plain_errors(text, separator):
            rows = _scan_text(text, separator, named, names).head(_TYPED_ROWS).collect()
    if header is None:
        _require_evident_header(rows, path)
    decimal, thousands = number_style([rows[name] for name in names])
    found = replace(
        written, separator=separator, header=named, decimal=decimal, thousands=thousands
    )
    return replace(found, columns=tuple(text_column(rows[name], found) for name in names))


def require_usual_numbers(schema: Schema, name: str) -> None:
    """Refuse numbers whose way of writing was guessed: 1,234 may be two numbers."""
    usual = Schema(())
    if (schema.decimal, schema.thousands) != (usual.decimal, usual.thousands):
        raise ValueError(
            f"Expected numbers like 1234.5 in a table without a schema, found other ones in "
            f"{name}. Write a schema and check its `decimal` and `thousands`: privagrad schema "
            f"{name} -o schema.toml"
        )


def columns_of(path: Path, schema: Schema) -> list[str]:
    """The names of a file's columns."""
    path = files_of(path)[0]
    with ExitStack() as stack:
        if ending_of(path) not in FRAMES:
            path = stack.enter_context(plain_text(path, schema))
        with plain_errors(path, schema.separator):
            return _scan(path, schema)[1]


def frames(path: Path, schema: Schema, wanted: list[str]) -> Iterator[pl.DataFrame]:
    """The wanted columns of all rows, some ten thousand rows at a time.

    Every line of a text file is a row, whatever its cells, but for empty lines at its end. The rows
    of a folder are those of its files, one after the other.
    """
    for file in files_of(path):
        yield from frames_of_file(file, schema, wanted)


def rows_of_file(path: Path, schema: Schema, wanted: list[str]) -> int:
    """How many rows a file has: of Parquet and Arrow files no column is read for it."""
    if ending_of(path) not in FRAMES:
        return sum(len(frame) for frame in frames_of_file(path, schema, wanted))
    with plain_errors(path):
        return int(_scan_frame(path).select(polars().len()).collect().item())


def frames_of_file(
    path: Path, schema: Schema, wanted: list[str], rows: tuple[int, int] | None = None
) -> Iterator[pl.DataFrame]:
    """`frames` of one file; of its rows from the first given number on so many as the second."""
    with ExitStack() as stack:
        if ending_of(path) not in FRAMES:
            path = stack.enter_context(plain_text(path, schema))
        stack.enter_context(plain_errors(path, schema.separator))
        frame, names = _scan(path, schema)
        if missing := [name for name in wanted if name not in names]:
            more = f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
            raise ValueError(
                f"Expected the column{'s' if len(missing) > 1 else ''} "
                f"{', '.join(map(repr, missing[:_NAMED]))}{more} in {path.name}, found none."
                f"{_other_separator(names) or did_you_mean(missing[0], names)}"
            )
        # In a file of one column an empty line is a row whose cell is blank.
        text = ending_of(path) not in FRAMES and len(names) > 1 and rows is None
        if rows is not None:
            frame = frame.slice(*rows)
        chunks = frame.collect_batches(chunk_size=CHUNK, maintain_order=True)
        for chunk in _without_last(chunks, empty_lines_at_the_end(path) if text else 0):
            yield chunk.select(wanted)


def row_count(path: Path, schema: Schema) -> int:
    """How many rows a table has with the columns of a schema; no cell is parsed.

    Where the schema names users, how many users: only their names are read.
    """
    wanted = [column.name for column in (*schema.features, schema.column(str(schema.target)))]
    if schema.user is None:
        return sum(len(frame) for frame in frames(path, schema, wanted))
    parser, users = Parser(schema, users=True), set[Any]()
    for frame in frames(path, schema, [*wanted, schema.user]):
        users.update(parser.labels(frame).unique().to_list())
    return len(users)


def _without_last(chunks: Iterator[pl.DataFrame], count: int) -> Iterator[pl.DataFrame]:
    """All rows but the last `count` ones."""
    held: pl.DataFrame | None = None
    for chunk in chunks:
        rows = chunk if held is None or held.is_empty() else held.vstack(chunk)
        ready = max(len(rows) - count, 0)
        if ready:
            yield rows[:ready]
        held = rows[ready:]


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
                f"{len(first)}.{_other_separator(first)}"
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
    with plain_errors(path):
        parquet = path.suffix.lower() == ".parquet"
        lazy = pl.scan_parquet(path) if parquet else pl.scan_ipc(path)
        lazy.collect_schema()
    return lazy


def require_table(path: Path) -> None:
    """A file that is there, of an ending that we read; or a folder of such files."""
    if path.is_dir():
        for file in files_of(path):
            require_table(file)
        return
    if not path.is_file():
        raise FileNotFoundError(f"Expected a file, found nothing at {path}.")
    ending, packed = ending_of(path), path.suffix.lower() == ".gz"
    known_frame = ending in (*FRAMES, EXCEL) and not packed
    if ending not in TEXTS and not known_frame and (packed or not is_libsvm(path)):
        known = ", ".join([*TEXTS, ".csv.gz", EXCEL, *FRAMES])
        raise ValueError(
            f"Expected a table ({known}, or .libsvm), found {path.name}. Convert it first."
        )


def _other_separator(names: list[str]) -> str:
    """A hint where a line is one cell with another separator in it."""
    if len(names) == 1 and any(s in names[0] for s in _SEPARATORS):
        return (
            " The line is one cell, with another separator in it: state `separator` under [file] "
            "in the schema, or privagrad schema TABLE --separator."
        )
    return ""


def _separator_of(path: Path) -> str:
    """The separator that the first line has most of; a file's ending decides ties."""
    with path.open("rb") as file:
        line = file.readline(_LINE)
    usual = TEXTS.get(ending_of(path), ",")
    return max(_SEPARATORS, key=lambda s: (line.count(s.encode()), s == usual))


def _first_line(path: Path, separator: str) -> list[str]:
    """The cells of the first line."""
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            cells = next(csv.reader(file, delimiter=separator), None)
    except UnicodeDecodeError:
        raise undecodable(path, "UTF-8") from None
    except csv.Error:
        raise ValueError(
            f"Expected a table in {path.name}, found a first line that cannot be read."
        ) from None
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
    elif all(not_blank(t).is_empty() or not tells_of_a_header(t) for t in texts.values()):
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
