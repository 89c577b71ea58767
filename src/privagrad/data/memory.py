"""Data frames in memory as tables: parsed and encoded by the code that reads files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from privagrad.data._polars import polars
from privagrad.data.encoding import encoding_of, one_hot
from privagrad.data.parsing import Parser
from privagrad.data.readers import open_cells, row_dtype
from privagrad.data.schema import Column, Schema, did_you_mean
from privagrad.data.tables import CHUNK, ColumnTable

if TYPE_CHECKING:
    import polars as pl


def open_frame(X: Any, y: Any, schema: Schema, *, double: bool = False) -> ColumnTable:
    """Parse a frame and its targets, as `open_table` does with a file that holds both.

    Parameters
    ----------
    X : pandas or Polars data frame, or Arrow table
        It has the schema's features; other columns are not looked at.
    y : array, series or list of shape (n,)
        The targets. None and NaN: missing.
    schema : Schema
        It has a target. Categories that it does not state are counted.
    double : bool
        Whether numbers are kept in double precision, to be predicted.
    """
    frame, targets = as_polars(X, schema, users=not double), as_series(str(schema.target), y)
    if len(targets) != len(frame):
        found = f"{len(targets)} and {len(frame)}" if schema.user is None else "other numbers"
        raise ValueError(f"Expected as many targets as rows, found {found}.")
    frame = frame.with_columns(targets)
    dtype = np.float64 if double else row_dtype(schema)
    return open_cells(
        lambda parser: _slices(frame.select(parser.columns)), schema, dtype, "X", users=not double
    )


def encode_frame(X: Any, schema: Schema) -> Any:
    """The rows of a frame as the matrix of a schema: CSR or an array, in double precision."""
    parser, encoding, first = Parser(schema, target=False), encoding_of(schema), 1
    parts = []
    for frame in _slices(as_polars(X, schema).select(parser.columns)):
        cells = parser.parse(frame, first)
        first += len(frame)
        parts.append(one_hot(schema, encoding, cells.numbers, cells.codes, np.float64))
    if not encoding.sparse:
        return np.concatenate(parts)
    from scipy.sparse import vstack

    return vstack(parts, format="csr")


def as_polars(X: Any, schema: Schema, *, users: bool = False) -> pl.DataFrame:
    """The schema's features of a frame, as a frame of Polars; with `users` its users, too."""
    library = polars()
    wanted = [column.name for column in schema.features]
    if users and schema.user is not None:
        wanted.append(schema.user)
    names = getattr(X, "column_names", None)
    if names is None:
        names = getattr(X, "columns", None)
    if names is None or isinstance(X, library.LazyFrame):
        raise TypeError(
            "Expected a data frame (pandas, Polars or Arrow) with the columns of the schema, "
            f"found {type(X).__name__}. Without schema= arrays of numbers are accepted."
        )
    known = [str(name) for name in names]
    for name in wanted:
        if name not in known:
            raise ValueError(
                f"Expected the column {name!r} in X, found none.{did_you_mean(name, known)}"
            )
    if not len(X):
        raise ValueError("Expected rows in X, found none.")
    found: pl.DataFrame = library.DataFrame(
        [as_series(name, X[names[known.index(name)]]) for name in wanted]
    )
    return found


def as_series(name: str, values: Any) -> pl.Series:
    """A column of any library as one of Polars; None and NaN of texts and objects are null."""
    library = polars()
    if isinstance(values, library.Series):
        return _without_nan(values.rename(name))
    if hasattr(values, "to_pylist"):  # Arrow
        arrow: pl.Series = library.Series(name, library.from_arrow(values))
        return _without_nan(arrow)
    if isinstance(values, (list, tuple)):
        values = np.asarray(values, dtype=object if any(v is None for v in values) else None)
    dtype = getattr(values, "dtype", None)
    if getattr(dtype, "tz", None) is not None:
        values = values.dt.tz_localize(None)
        dtype = values.dtype
    array = np.asarray(values) if isinstance(dtype, np.dtype) else None
    if array is not None and array.ndim == 2 and array.shape[1] == 1:
        array = array[:, 0]
    if array is not None and array.ndim != 1:
        raise ValueError(f"Expected one column {name!r}, found shape {array.shape}.")
    if array is not None and array.dtype.kind in "biufM":
        return _without_nan(library.Series(name, _times(array)))
    cells = values.tolist() if array is None else array.tolist()
    try:
        found: pl.Series = library.Series(
            name, [None if cell != cell else cell for cell in map(_plain, cells)]
        )
    except (TypeError, library.exceptions.PolarsError) as error:
        raise TypeError(
            f"Expected values of one type in column {name!r}, found several: convert it, for "
            "example with astype(str)."
        ) from error
    return found


def _without_nan(series: pl.Series) -> pl.Series:
    return series.fill_nan(None) if series.dtype.is_float() else series


def _times(array: Any) -> Any:
    return array.astype("datetime64[us]") if array.dtype.kind == "M" else array


def _plain(cell: Any) -> Any:
    """None for pandas' missing value, which compares with nothing."""
    return None if type(cell).__name__ in ("NAType", "NaTType") else cell


def with_target(schema: Schema, name: str, *, numbers: bool) -> Schema:
    """A schema that has a target: its own, or else a further column of this name."""
    if schema.target is not None:
        return schema
    known = {column.name for column in schema.columns}
    if name in known:
        return replace(schema, target=name)
    target = Column(name, "number" if numbers else "category")
    return replace(schema, columns=(*schema.columns, target), target=name)


def require_own_name(X: Any, y: Any, schema: Schema, name: str) -> None:
    """Refuse targets that are called like a column of X which says something else than they.

    Without a target in the schema the name of the targets says which column they are, and that
    column is left out. A series that was computed from another column still has its name.
    """
    names = getattr(X, "column_names", None)
    known = list(getattr(X, "columns", ()) if names is None else names)
    if schema.target is not None or name not in known:
        return
    if name not in {column.name for column in schema.columns}:
        return
    targets, column = as_series("targets", y), as_series("column", X[name])
    if len(targets) != len(column):
        return
    pairs = polars().DataFrame([targets, column]).n_unique()
    if not pairs == targets.n_unique() == column.n_unique():
        raise ValueError(
            f"Expected targets with a name of their own, found {name!r}, which is a column of X "
            "of other values: it would be left out as the target. Rename the targets, for "
            'example y.rename("target"), or state the target in the schema. Nothing was spent.'
        )


def _slices(frame: pl.DataFrame) -> Iterator[pl.DataFrame]:
    return frame.iter_slices(CHUNK)
