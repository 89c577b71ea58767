"""Tables that need not be in memory: files and folders by path, Arrow data sets, mapped arrays."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from privagrad._internal.validate import Vector
from privagrad.data._polars import polars
from privagrad.data.columns import Column, Schema
from privagrad.data.frames import frames, infer_schema, require_table, require_usual_numbers
from privagrad.data.inference import typed_column
from privagrad.data.libsvm import LABEL, is_libsvm, libsvm_schema, open_libsvm
from privagrad.data.parsing import Parser
from privagrad.data.readers import open_cells, row_dtype
from privagrad.data.sources import FRAMES, files_of
from privagrad.data.tables import CHUNK, Table
from privagrad.glm.examples import Examples, PartitionedExamples
from privagrad.glm.rows import as_rows, as_targets, is_dask
from privagrad.glm.stored import is_stored, stored_or_not

if TYPE_CHECKING:
    import polars as pl


def is_source(X: Any) -> bool:
    """Whether rows are given by where they are: the path of a table, or an Arrow data set."""
    return isinstance(X, (str, Path)) or (hasattr(X, "to_batches") and hasattr(X, "scanner"))


def open_examples(X: Any, y: Any) -> Examples | PartitionedExamples | None:
    """Rows and targets that need not be in memory; None for those that are.

    Of a path or an Arrow data set, which hold numbers alone, `y` names the target. Dask's arrays
    and data frames are loaded by the workers of a cluster.
    """
    if isinstance(X, PartitionedExamples):
        if y is not None:
            raise ValueError("Expected y=None for rows in partitions, which hold their targets.")
        return X
    if is_dask(X):
        from privagrad.distributed import from_dask

        return from_dask(X, y)
    if is_source(X):
        return open_source(X, numbers_of(X, y)).examples()
    if not is_stored(X) or X.ndim != 2 or X.dtype not in (np.float32, np.float64):
        return None
    targets = np.zeros(len(X)) if y is None else _numbers(as_targets(y))
    if targets.shape != (len(X),):
        raise ValueError(
            f"Expected one target for each of the {len(X)} rows, found shape {targets.shape}."
        )
    if not X.flags.c_contiguous:
        raise ValueError(
            "Expected a mapped array whose rows lie one after the other (C order), found another "
            "order: write it again with np.ascontiguousarray, part by part."
        )
    return stored_or_not(as_rows(X), targets)


def _numbers(targets: NDArray[Any]) -> Vector:
    """Targets as rows in memory have them; those in a file that are so stay there."""
    if targets.dtype.kind not in "biuf":
        raise TypeError(
            "Expected numbers as targets of rows that are not in memory, found dtype "
            f"{targets.dtype}: encode labels as 0, 1, 2, ..."
        )
    return np.ascontiguousarray(targets, dtype=np.float64)


def open_source(X: Any, schema: Schema) -> Table:
    """The rows of a path or of an Arrow data set, parsed once; the schema has a target."""
    if not isinstance(X, (str, Path)):
        return open_cells(
            lambda parser: _batches(X, parser), schema, _dtype([_types(X)], schema), "the data set",
            users=True,
        )  # fmt: skip
    path = Path(X)
    require_table(path)
    if schema.libsvm:
        return open_libsvm(path, schema)
    types = [_types_of_file(one) for one in files_of(path) if one.suffix.lower() in FRAMES]

    def read(parser: Parser) -> Iterator[pl.DataFrame]:
        return frames(path, schema, parser.columns)

    return open_cells(read, schema, _dtype(types, schema), path.name, users=True)


def numbers_of(X: Any, target: Any, kind: Any = "number") -> Schema:
    """The schema of a source of numbers alone, none of them missing, with a target of this kind."""
    if isinstance(X, (str, Path)):
        path = Path(X)
        require_table(path)
        if is_libsvm(path):
            return libsvm_schema(kind)
        schema = infer_schema(path)
        require_usual_numbers(schema, path.name)
    else:
        types = _types(X).items()
        schema = Schema(tuple(typed_column(name, dtype) for name, dtype in types))
    if not isinstance(target, str):
        raise ValueError(
            "Expected the name of the target as y, for rows that are given by a path or as a data "
            f"set, found {type(target).__name__}."
        )
    schema.column(target)
    texts = [c.name for c in schema.columns if c.kind != "number" and c.name != target]
    if texts:
        shown = ", ".join(map(repr, texts[:5])) + (", ..." if len(texts) > 5 else "")
        raise TypeError(
            f"Expected numbers alone without a schema, found other columns: {shown}. State the "
            "columns with schema= of an estimator, or take privagrad fit --schema."
        )
    columns = tuple(
        Column(c.name, kind if c.name == target else "number", missing=False)
        for c in schema.columns
    )
    return replace(schema, columns=columns, target=target)


def target_of(X: Any, schema: Schema, y: Any) -> str:
    """The name of the target: the one given, or the schema's."""
    if isinstance(X, (str, Path)) and is_libsvm(Path(X)):
        return LABEL
    if y is None and schema.target is not None:
        return schema.target
    if not isinstance(y, str):
        raise ValueError(
            "Expected the name of the target as y, for rows that are given by a path or as a data "
            f"set, found {type(y).__name__}."
        )
    return y


def _dtype(types: Sequence[dict[str, Any]], schema: Schema) -> Any:
    """Single precision where no file's numbers have more, or a schema says more than numbers."""
    kinds = {column.kind for column in schema.features}
    if kinds != {"number"} or not types:
        return row_dtype(schema)
    pl = polars()
    exact = (pl.Float32, pl.Int8, pl.Int16, pl.UInt8, pl.UInt16, pl.Boolean)
    narrow = all(own.get(column.name) in exact for own in types for column in schema.features)
    return np.float32 if narrow else np.float64


def _types_of_file(path: Path) -> dict[str, Any]:
    pl = polars()
    lazy = pl.scan_parquet(path) if path.suffix.lower() == ".parquet" else pl.scan_ipc(path)
    return dict(lazy.collect_schema())


def _types(dataset: Any) -> dict[str, Any]:
    """The types of an Arrow data set's columns, as Polars'."""
    empty: Any = polars().from_arrow(dataset.schema.empty_table())
    return dict(empty.schema)


def _batches(dataset: Any, parser: Parser) -> Iterator[pl.DataFrame]:
    for batch in dataset.to_batches(columns=parser.columns, batch_size=CHUNK):
        if batch.num_rows:
            found: Any = polars().from_arrow(batch)
            yield found
