"""Dask's arrays and data frames as partitions of rows on a cluster."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import dask.array as da
import numpy as np
from dask.delayed import delayed
from distributed import get_client

from privagrad._internal.validate import Vector
from privagrad.distributed.partitions import FAN_OUT, PATIENCE, ClusterPartitions
from privagrad.glm.examples import Examples, PartitionedExamples
from privagrad.glm.rows import DenseRows, SparseRows, as_rows, as_targets


@dataclass(frozen=True)
class _Table:
    """A collection cut into blocks of rows: as delayed values, and their sizes where known."""

    blocks: list[Any]
    sizes: tuple[int, ...] | None


def from_dask(
    X: Any, y: Any = None, *, client: Any = None, fan_out: int = FAN_OUT,
    patience: float = PATIENCE, groups: Any = None, weights: Any = None,
) -> PartitionedExamples:  # fmt: skip
    """Rows and targets of dask collections, loaded into the memory of a cluster's workers.

    Parameters
    ----------
    X : dask array or dask DataFrame of shape (n, d)
        Numbers; chunks of an array may be CSR matrices. Every chunk of rows is a partition.
    y : dask array, Series or DataFrame of one column; or the name of a column of X; or None
        The targets, with the rows in the same order.
    client : distributed.Client, optional
        The cluster; by default the client that was made last.
    fan_out, patience : int, float
        See `ClusterPartitions`.
    groups, weights : None
        Refused: users of rows on a cluster are not known, and weights change what a row may add.

    Guarantees
    ----------
    Rows go from their source to the workers, and nowhere else. n and d are public.
    """
    _refuse(groups, weights)
    if isinstance(y, str):
        X, y = _split(X, y)
    for name, one in (("X", X), ("y", y)):
        _require_numbers(name, one)
    client = _client(client)
    dim = X.shape[1]
    blocks, targets = _aligned(X, y, client)
    kind = _meta_rows(X)
    load = delayed(_examples, pure=False)
    parts = [load(x, t, dim, kind) for x, t in zip(blocks, targets, strict=True)]
    futures = client.compute(parts)
    partitions = ClusterPartitions.of(client, futures, fan_out=fan_out, patience=patience)
    return PartitionedExamples.of(partitions)


def _refuse(groups: Any, weights: Any) -> None:
    if groups is not None:
        raise ValueError(
            "Expected no groups= with rows on a cluster, found them: the rows of a user may lie on "
            "several workers, which would each bound a part of them. Load the rows into memory to "
            "protect users."
        )
    if weights is not None:
        raise ValueError(
            "Expected no weights of rows: a weight scales what one row may contribute, so that the "
            "privacy of heavy rows would be weaker than epsilon says. Leave them out."
        )


def _client(given: Any) -> Any:
    if given is not None:
        return given
    try:
        return get_client()
    except ValueError as error:
        raise ValueError(
            "Expected a client of a Dask cluster for rows in dask collections, found none. Make "
            "one first: from distributed import Client; client = Client('tcp://scheduler:8786'), "
            "or Client() for processes of this machine."
        ) from error


def _split(X: Any, name: str) -> tuple[Any, Any]:
    """A data frame without a column, and the column."""
    if not _is_frame(X) or name not in X.columns:
        raise ValueError(f"Expected y to be a column of a dask DataFrame X, found {name!r}.")
    return X.drop(columns=[name]), X[name]


def _is_frame(one: Any) -> bool:
    return hasattr(one, "to_delayed") and hasattr(one, "npartitions") and hasattr(one, "divisions")


def _require_numbers(name: str, one: Any) -> None:
    """Refuse what is not numbers of this shape, from types alone."""
    if one is None and name == "y":
        return
    if not isinstance(one, da.Array) and not _is_frame(one):
        raise TypeError(
            f"Expected {name} to be a dask array or data frame too, found {type(one).__name__}: "
            "make it one with dask.array.from_array or dask.dataframe.from_pandas."
        )
    columns = one.shape[1] if one.ndim == 2 else 1
    if one.ndim != 2 and (name == "X" or one.ndim != 1):
        raise ValueError(f"Expected {name} of shape (n, d), found {one.ndim} dimensions.")
    if name == "y" and columns != 1:
        raise ValueError(f"Expected one column of targets y, found {columns}.")
    if not columns >= 1:  # NaN where it is not known
        raise ValueError(
            f"Expected a known number of columns in {name}, found {columns}: give X chunks of "
            "known widths."
        )
    if not _is_frame(one):
        types = {name: one.dtype}
    else:
        meta = one._meta
        types = dict(meta.dtypes.items()) if one.ndim == 2 else {meta.name: meta.dtype}
    strange = [
        f"{column!r} ({dtype})"
        for column, dtype in types.items()
        if not isinstance(dtype, np.dtype) or dtype.kind not in "biuf"
    ]
    if strange:
        more = f" and {len(strange) - 10} more" if len(strange) > 10 else ""
        raise TypeError(
            f"Expected numeric columns only, found {', '.join(strange[:10])}{more}. "
            "Encode them as numbers of NumPy's types, fill missing values, or drop them."
        )


def _aligned(X: Any, y: Any, client: Any) -> tuple[list[Any], list[Any]]:
    """Blocks of rows and their targets, delayed."""
    X = _of_whole_rows(X)
    rows = _table(X)
    if y is None:
        return rows.blocks, [None] * len(rows.blocks)
    targets = _table(y)
    if len(rows.blocks) != len(targets.blocks) or (
        rows.sizes is not None and targets.sizes is not None and rows.sizes != targets.sizes
    ):
        # Cut as the rows are, for which all sizes must be known.
        sizes = rows.sizes or _measured(rows, client)
        found = targets.sizes or _measured(targets, client)
        if sum(found) != sum(sizes):
            raise ValueError(
                f"Expected as many targets y as rows of X, found {sum(found)} and {sum(sizes)}."
            )
        y = _column(targets, found) if _is_frame(y) else _with_sizes(y, found)
        targets = _table(y.rechunk({0: sizes}))
    return rows.blocks, targets.blocks


def _of_whole_rows(X: Any) -> Any:
    """An array with one chunk of columns."""
    if _is_frame(X) or X.numblocks[1] == 1:
        return X
    if hasattr(X._meta, "tocsr"):
        raise ValueError(
            f"Expected sparse chunks of all {X.shape[1]} columns, found {X.numblocks[1]} chunks of "
            "columns: build X from matrices of whole rows."
        )
    return X.rechunk({1: -1})


def _table(one: Any) -> _Table:
    if _is_frame(one):
        # Dask's optimizer joins partitions of few columns, so that those of X and y would differ.
        return _Table(list(one.to_delayed(optimize_graph=False)), None)
    sizes = one.chunks[0]
    known = not any(np.isnan(size) for size in sizes)
    return _Table(list(one.to_delayed().ravel()), tuple(map(int, sizes)) if known else None)


def _measured(table: _Table, client: Any) -> tuple[int, ...]:
    """How many rows each block has: they are computed for it."""
    count = delayed(_length, pure=False)
    return tuple(client.gather(client.compute([count(block) for block in table.blocks])))


def _column(table: _Table, sizes: tuple[int, ...]) -> Any:
    """The blocks of a frame's column as an array."""
    told = delayed(as_targets, pure=False)
    blocks = zip(table.blocks, sizes, strict=True)
    return da.concatenate([da.from_delayed(told(b), (n,), meta=np.empty(0)) for b, n in blocks])


def _with_sizes(array: Any, sizes: tuple[int, ...]) -> Any:
    """The array with the sizes of its chunks of rows known."""
    chunks = (sizes, *array.chunks[1:])
    return da.Array(array.dask, array.name, chunks=chunks, meta=array._meta)


def _length(block: Any) -> int:
    return int(block.shape[0])


def _meta_rows(X: Any) -> str:
    """The type of the entries of blocks without rows; "" if blocks are sparse."""
    if hasattr(X._meta, "tocsr"):
        return ""
    kinds = set(X._meta.dtypes) if _is_frame(X) else {X.dtype}
    return "float32" if kinds == {np.dtype(np.float32)} else "float64"


def _examples(block: Any, targets: Any, dim: int, kind: str) -> Examples:
    """A partition of blocks of the collections."""
    rows = _rows(block, dim, kind)
    y = _targets(block, targets)
    if len(y) != rows.shape[0]:
        raise ValueError(
            f"Expected X and y with the same rows in every partition, found one of {rows.shape[0]} "
            f"rows and {len(y)} targets. Make both from the same collection."
        )
    return Examples(rows, y)


def _rows(block: Any, dim: int, kind: str) -> DenseRows | SparseRows:
    if block.shape[1] != dim:
        raise ValueError(f"Expected {dim} columns in every partition, found {block.shape[1]}.")
    if block.shape[0]:
        return as_rows(block)
    if kind:
        return DenseRows(np.empty((0, dim), kind))
    return SparseRows(np.empty(0), np.empty(0, np.int32), np.zeros(1, np.int32), dim)


def _targets(block: Any, targets: Any) -> Vector:
    if targets is None:
        return np.zeros(block.shape[0])
    index, own = getattr(block, "index", None), getattr(targets, "index", None)
    if index is not None and own is not None and not index.equals(own):
        raise ValueError(
            "Expected X and y with the same index in every partition, found different ones: make "
            "both from the same collection, or reset both indices."
        )
    return np.ascontiguousarray(as_targets(targets), dtype=np.float64)
