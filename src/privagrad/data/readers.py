"""Files on disk as tables: one way to read CSV, Parquet, Arrow and LIBSVM files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from privagrad.data.encoding import encoding_of, one_hot
from privagrad.data.frames import (
    columns_of,
    frames,
    infer_schema,
    require_table,
    require_usual_numbers,
)
from privagrad.data.libsvm import is_libsvm, libsvm_schema, open_libsvm
from privagrad.data.parsing import Parser, Tally
from privagrad.data.schema import Schema
from privagrad.data.tables import ColumnTable, Rows, Spool, Table
from privagrad.privacy.users import Users

if TYPE_CHECKING:
    import polars as pl

__all__ = [
    "chunks",
    "columns_of",
    "infer_schema",
    "open_cells",
    "open_table",
    "open_test_table",
    "read_table",
    "require_table",
    "require_usual_numbers",
    "row_dtype",
]


def open_table(
    path: Path, schema: Schema, *, of_model: bool = False, users: bool | None = None
) -> Table:
    """Parse a file, once: numbers within bounds, blanks as NaN, categories as codes.

    The schema has a target. Values of categories that it does not state are counted. `of_model`:
    the schema is that of a model, for messages. `users`: whether users are read, by default unless
    it is that of a model.
    """
    require_table(path)
    if schema.libsvm:
        return open_libsvm(path, schema)
    named = not of_model if users is None else users
    return _open_columns(path, schema, row_dtype(schema), of_model, named)


def row_dtype(schema: Schema) -> Any:
    """The precision of rows to be fitted."""
    # Sparse matrices hold doubles, and unknown categories may make the matrix sparse.
    single = set(_unknown(schema)) <= {schema.target} and not encoding_of(schema).sparse
    return np.float32 if single else np.float64


def open_test_table(path: Path, like: Table) -> Table:
    """Parse a file with the columns of another table, in double precision, to be predicted."""
    require_table(path)
    if like.schema.libsvm:
        return open_libsvm(path, like.schema, len(like.encoding.names))
    if is_libsvm(path):
        raise ValueError(f"Expected a table with the same columns, found {path.name}.")
    return _open_columns(path, like.schema, np.float64, of_model=True)


def chunks(
    path: Path,
    schema: Schema,
    *,
    target: bool = True,
    columns: int | None = None,
    tally: Tally | None = None,
    keep: Sequence[str] = (),
) -> Iterator[Rows]:
    """The rows of a file in a model's schema, encoded some ten thousand at a time, never kept.

    They come in order. What the schema does not state as a category is none. `columns` is for
    LIBSVM files. A `tally` counts blanks and other categories: not for private rows. Columns to
    `keep` come with the rows, as they are.
    """
    require_table(path)
    if schema.libsvm:
        for part in open_libsvm(path, schema, columns).parts():
            yield part if target else part._replace(y=None)
        return
    encoding = encoding_of(schema)
    parser = Parser(schema, target=target, tally=tally, of_model=True)
    wanted = list(dict.fromkeys([*parser.columns, *keep]))
    first = 1 + schema.header
    for frame in frames(path, schema, wanted):
        cells = parser.parse(frame, first)
        first += len(frame)
        X = one_hot(schema, encoding, cells.numbers, cells.codes, np.float64)
        kept = [frame[name].to_list() for name in keep]
        yield Rows(X, cells.y, encoding.names, kept)


def read_table(path: Path, target: str | None = None) -> Rows:
    """A file of numbers alone, without a schema: all columns but the target are features.

    Blanks are 0.
    """
    require_table(path)
    schema = libsvm_schema("number") if is_libsvm(path) else _schema_of_numbers(path, target)
    table = open_table(path, schema)
    return Rows(table.rows(), table.targets, table.encoding.names)


def _schema_of_numbers(path: Path, target: str | None) -> Schema:
    schema = infer_schema(path)
    if target is None:
        raise ValueError("Expected the target among the columns, found None: name it.")
    schema.column(target)
    require_usual_numbers(schema, path.name)
    for column in schema.columns:
        if column.kind != "number":
            what = "a numeric target" if column.name == target else "numeric columns only"
            raise TypeError(f"Expected {what}, found {column.name!r}: encode it as numbers first.")
    columns = tuple(replace(column, missing=0.0) for column in schema.columns)
    return replace(schema, columns=columns, target=target)


def _unknown(schema: Schema) -> list[str]:
    """Columns whose categories are to be discovered, the target the last of them."""
    columns = (*schema.features, schema.column(str(schema.target)))
    return [c.name for c in columns if c.kind == "category" and not c.categories]


def _open_columns(
    path: Path, schema: Schema, dtype: Any, of_model: bool = False, users: bool = False
) -> ColumnTable:
    def read(parser: Parser) -> Iterator[pl.DataFrame]:
        return frames(path, schema, parser.columns)

    return open_cells(read, schema, dtype, path.name, of_model, users)


def open_cells(
    read: Callable[[Parser], Iterator[pl.DataFrame]], schema: Schema, dtype: Any, name: str,
    of_model: bool = False, users: bool = False,
) -> ColumnTable:  # fmt: skip
    """Parse the frames that `read` yields of the parser's columns; `name` is for messages.

    With `users` the table knows them, if the schema has a column of users.
    """
    kinds = [part.kind for part in schema.encoded]
    if not kinds:
        raise ValueError(f"Expected columns to read in {name}, found none.")
    parser = Parser(schema, unknown=_unknown(schema), of_model=of_model, users=users)
    numbers = Spool(kinds.count("number"), dtype)
    codes = Spool(kinds.count("category"), np.int32)
    targets, first = Spool(1, np.float64), 1 + schema.header
    labels: list[pl.Series] = []
    for frame in read(parser):
        cells = parser.parse(frame, first)
        first += len(frame)
        numbers.append(cells.numbers)
        codes.append(cells.codes)
        if cells.y is not None:
            targets.append(cells.y[:, None])
        if parser.users is not None:
            labels.append(parser.labels(frame))
    y = targets.column()
    if not y.size:
        raise ValueError(f"Expected rows in {name}, found none.")
    named = None
    if parser.users is not None:
        named = Users.numbered(label for part in labels for label in part.to_list())
    return ColumnTable(schema, y, parser.counts, numbers, codes, users=named)
