"""Files on disk as tables: one way to read CSV, Parquet, Arrow and LIBSVM files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

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
from privagrad.data.parsing import Cells, Parser, Tally
from privagrad.data.schema import Schema
from privagrad.data.tables import ColumnTable, Rows, Spool, Table

__all__ = [
    "chunks",
    "columns_of",
    "infer_schema",
    "open_table",
    "open_test_table",
    "read_table",
    "require_table",
    "require_usual_numbers",
]


def open_table(path: Path, schema: Schema, *, of_model: bool = False) -> Table:
    """Parse a file, once: numbers within bounds, blanks as NaN, categories as codes.

    The schema has a target. Values of categories that it does not state are counted. `of_model`:
    the schema is that of a model, for messages.
    """
    require_table(path)
    if schema.libsvm:
        return open_libsvm(path, schema)
    unknown = _unknown(schema)
    # Sparse matrices hold doubles, and unknown categories may make the matrix sparse.
    single = set(unknown) <= {schema.target} and not encoding_of(schema).sparse
    parser = Parser(schema, unknown=unknown, of_model=of_model)
    return _open_columns(path, parser, np.float32 if single else np.float64)


def open_test_table(path: Path, like: Table) -> Table:
    """Parse a file with the columns of another table, in double precision, to be predicted."""
    require_table(path)
    if like.schema.libsvm:
        return open_libsvm(path, like.schema, len(like.encoding.names))
    if is_libsvm(path):
        raise ValueError(f"Expected a table with the same columns, found {path.name}.")
    parser = Parser(like.schema, unknown=_unknown(like.schema), of_model=True)
    return _open_columns(path, parser, np.float64)


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
    require_usual_numbers(schema, path)
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


def _open_columns(path: Path, parser: Parser, dtype: Any) -> ColumnTable:
    schema = parser.schema
    kinds = [part.kind for part in schema.encoded]
    if not kinds:
        raise ValueError(f"Expected columns to read in {path.name}, found none.")
    numbers = Spool(kinds.count("number"), dtype)
    codes = Spool(kinds.count("category"), np.int32)
    targets = [np.empty(0)]
    for cells in _parsed(path, parser):
        numbers.append(cells.numbers)
        codes.append(cells.codes)
        if cells.y is not None:
            targets.append(cells.y)
    y = np.concatenate(targets)
    if not y.size:
        raise ValueError(f"Expected rows in {path.name}, found none.")
    return ColumnTable(schema, y, parser.counts, numbers, codes)


def _parsed(path: Path, parser: Parser) -> Iterator[Cells]:
    """All rows, some ten thousand at a time."""
    first = 1 + parser.schema.header
    for frame in frames(path, parser.schema, parser.columns):
        yield parser.parse(frame, first)
        first += len(frame)
