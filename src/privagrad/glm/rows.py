"""Arrays, CSR matrices and data frames as rows that the kernels read."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from tempfile import TemporaryFile
from typing import Any

import numpy as np
from numpy.typing import NDArray

from privagrad._internal.jit import kernel
from privagrad._internal.threads import add_parts, pool_of
from privagrad._internal.validate import Integers, Vector
from privagrad.glm.kernels import FlatRows, add_dense, add_sparse, all_margins
from privagrad.glm.standardize import (
    centre_dense,
    combine_dense,
    offsets_like,
    standardize_csr,
    standardize_dense,
)
from privagrad.privacy.bounded import Adds, BoundedSum

_FLOATS = (np.dtype(np.float32), np.dtype(np.float64))
_LARGE = 2**30
_PARTS, _SPLIT_FROM, _ENTRIES_PER_SUM = 4, 1_000_000, 8
"""Into how many parts rows are cut for threads, and from how many entries on: in all, and for each
of the sums, which every part has for itself."""

quiet = np.errstate(over="ignore", invalid="ignore")
"""A warning of an overflow would reveal a private row; the kernels leave such rows out."""


def scratch(shape: tuple[int, int], dtype: Any) -> NDArray[Any]:
    """Memory for a table; a large one is a temporary file, which is deleted with the array."""
    if math.prod(shape) * np.dtype(dtype).itemsize < _LARGE:
        return np.empty(shape, dtype)
    with TemporaryFile() as file:
        return np.asarray(np.memmap(file, dtype, mode="w+", shape=shape))


@dataclass(frozen=True)
class DenseRows:
    """Rows of a C-ordered float32 or float64 array of shape (n, d)."""

    array: NDArray[Any]

    @property
    def shape(self) -> tuple[int, int]:
        return self.array.shape[0], self.array.shape[1]

    @property
    def sparse(self) -> bool:
        return False

    @property
    def matrix(self) -> Any:
        """All rows, as something with products."""
        return self.array

    @property
    def flat(self) -> FlatRows:
        """The rows as the kernels read them."""
        n, dim = self.shape
        starts = np.arange(0, n * dim + 1, dim)
        return FlatRows(self.array.reshape(-1), np.arange(dim), starts, True)

    def add_to(self, total: BoundedSum, add: Adds, *arguments: Any) -> None:
        """Let ``add(units, per_unit, limit, table, *arguments)`` bound and add all rows."""
        total.add_by(self.add, add, arguments)

    def add(
        self, units: Vector, per_unit: float, limit: float, add: Adds, arguments: tuple[Any, ...]
    ) -> tuple[int, int]:
        """What `add` adds of all rows. Sums are exact, so that threads may share the rows out."""
        return _add_by_threads(units, per_unit, limit, add, self.flat, arguments)

    def margins(self, x: Vector) -> Vector:
        """⟨a_i, x⟩ of every row; for x of shape (d, k) of shape (n, k)."""
        return _margins(self, x)

    def centred(self, columns: NDArray[Any], centre: Vector) -> DenseRows:
        """These columns minus their centres."""
        moved = scratch((self.shape[0], columns.size), np.result_type(self.array, centre))
        centre_dense(self.array, columns, centre, moved)
        return DenseRows(moved)

    def sides(self) -> DenseRows:
        """Positive entries, and beside them the sizes of negative ones."""
        return DenseRows(np.hstack([np.maximum(self.array, 0.0), np.maximum(-self.array, 0.0)]))

    @quiet
    def standardized(self, centre: Vector, unit: Vector, constant: bool) -> DenseRows:
        """(a_j - centre_j)/unit_j in all columns, and optionally a last column of ones.

        Missing entries, NaN, become 0.
        """
        n, dim = self.shape
        table = scratch((n, dim + constant), self.array.dtype)
        standardize_dense(self.array, centre, unit.astype(table.dtype), table)
        return DenseRows(table)

    @quiet
    def combined(self, columns: Integers, matrix: NDArray[np.float64]) -> DenseRows:
        """The table with these columns v replaced by vᵀ `matrix`, in place.

        Guarantees
        ----------
        A row depends on that row and the matrix alone, to the last bit.
        """
        combine_dense(self.array, columns, np.ascontiguousarray(matrix))
        return self

    def take(self, rows: Integers) -> DenseRows:
        """Some rows, in this order."""
        return self if _are_all(rows, self.shape[0]) else DenseRows(self.array[rows])

    def part(self, first: int, stop: int) -> DenseRows:
        """The rows from `first` to before `stop`, without a copy."""
        return DenseRows(self.array[first:stop])

    def without(self, rows: NDArray[np.bool_]) -> DenseRows:
        """The table with these rows set to zeros, in place."""
        self.array[rows] = 0.0
        return self

    @cached_property
    def kernel(self) -> tuple[Adds, tuple[NDArray[Any], ...]]:
        """The kernel that adds gradients, and the table as it reads it."""
        return add_dense, (self.array,)

    @cached_property
    def entries_per_row(self) -> float:
        return float(self.shape[1])


@dataclass(frozen=True)
class SparseRows:
    """Rows of a canonical CSR matrix: in each row, column numbers strictly increase."""

    data: NDArray[Any]
    indices: NDArray[Any]
    indptr: NDArray[Any]
    dim: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.indptr.size - 1, self.dim

    @property
    def sparse(self) -> bool:
        return True

    @property
    def flat(self) -> FlatRows:
        """The rows as the kernels read them."""
        return FlatRows(self.data, self.indices, self.indptr, False)

    @cached_property
    def entries_per_row(self) -> float:
        return self.data.size / max(self.indptr.size - 1, 1)

    @cached_property
    def matrix(self) -> Any:
        """All rows, as something with products."""
        from scipy.sparse import csr_array

        return csr_array((self.data, self.indices, self.indptr), shape=self.shape)

    def add_to(self, total: BoundedSum, add: Adds, *arguments: Any) -> None:
        """Let ``add(units, per_unit, limit, table, *arguments)`` bound and add all rows."""
        total.add_by(self.add, add, arguments)

    def add(
        self, units: Vector, per_unit: float, limit: float, add: Adds, arguments: tuple[Any, ...]
    ) -> tuple[int, int]:
        """What `add` adds of all rows. Sums are exact, so that threads may share the rows out."""
        return _add_by_threads(units, per_unit, limit, add, self.flat, arguments)

    def margins(self, x: Vector) -> Vector:
        """⟨a_i, x⟩ of every row; for x of shape (d, k) of shape (n, k)."""
        return _margins(self, x)

    @quiet
    def centred(self, columns: NDArray[Any], centre: Vector) -> DenseRows:
        """These columns, with their zeros, minus their centres."""
        return DenseRows(np.ascontiguousarray(self.matrix[:, columns].toarray() - centre))

    def standardized(self, centre: Vector, unit: Vector, constant: bool) -> SparseRows:
        """(a_j - centre_j)/unit_j in all columns, and optionally a last column of ones.

        Centred columns store all their entries; the others keep their zeros. Missing entries, NaN,
        become 0.
        """
        table = standardize_csr(self.data, self.indices, self.indptr, centre, unit, constant)
        return SparseRows(*table, self.dim + constant)

    def narrowed(self, rows: NDArray[np.int64]) -> tuple[SparseRows, NDArray[np.int64]]:
        """Some rows as a table of the columns of their entries alone, and these columns."""
        places, starts = self._entries(rows)
        columns, indices = np.unique(self.indices[places], return_inverse=True)
        indices = indices.astype(self.indices.dtype)
        return SparseRows(self.data[places], indices, starts, columns.size), columns

    def take(self, rows: Integers) -> SparseRows:
        """Some rows, in this order."""
        if _are_all(rows, self.shape[0]):
            return self
        places, starts = self._entries(rows)
        return SparseRows(self.data[places], self.indices[places], starts, self.dim)

    def part(self, first: int, stop: int) -> SparseRows:
        """The rows from `first` to before `stop`, without a copy of their entries."""
        starts = self.indptr[first : stop + 1]
        entries = slice(int(starts[0]), int(starts[-1]))
        return SparseRows(self.data[entries], self.indices[entries], starts - starts[0], self.dim)

    def _entries(self, rows: Integers) -> tuple[NDArray[np.int64], NDArray[Any]]:
        """Where the entries of some rows are, and where each row's start among them."""
        counts = self.indptr[rows + 1] - self.indptr[rows]
        starts = np.concatenate([[0], np.cumsum(counts)])
        places = np.repeat(self.indptr[rows] - starts[:-1], counts) + np.arange(starts[-1])
        # Of the same type, so that the same machine code reads them.
        return places, offsets_like(self.indptr, starts)

    def without(self, rows: NDArray[np.bool_]) -> SparseRows:
        """The table with these rows set to zeros, in place."""
        self.data[np.repeat(rows, np.diff(self.indptr))] = 0.0
        return self

    @cached_property
    def kernel(self) -> tuple[Adds, tuple[NDArray[Any], ...]]:
        """The kernel that adds gradients, and the table as it reads it."""
        return add_sparse, (self.data, self.indices, self.indptr)


def _add_by_threads(
    units: Vector, per_unit: float, limit: float, add: Adds, table: FlatRows,
    arguments: tuple[Any, ...],
) -> tuple[int, int]:  # fmt: skip
    data, indices, starts, dense = table
    if starts[-1] - starts[0] < max(_SPLIT_FROM, _ENTRIES_PER_SUM * units.size):
        return add(units, per_unit, limit, table, *arguments)

    def add_part(partial: Vector, edges: tuple[int, int]) -> tuple[int, int]:
        rows = FlatRows(data, indices, starts[edges[0] : edges[1] + 1], dense)
        return add(partial, per_unit, limit, rows, *arguments)

    edges = np.linspace(0, starts.size - 1, _PARTS + 1).astype(int).tolist()
    with pool_of() as pool:
        return add_parts(units, add_part, pairwise(edges), pool)


def _are_all(rows: Integers, count: int) -> bool:
    return rows.size == count and bool((rows == np.arange(count)).all())


def _margins(rows: DenseRows | SparseRows, x: Vector) -> Vector:
    """A row's margins depend on the row and x alone, which products of matrices do not give."""
    weights = np.ascontiguousarray(np.atleast_2d(x.T), dtype=np.float64)
    if weights.shape[1] != rows.shape[1]:
        raise ValueError(f"Expected a point of {rows.shape[1]} columns, found shape {x.shape}.")
    margins = all_margins(rows.flat, weights.ravel(), len(weights))
    return margins if x.ndim == 2 else margins[:, 0]


def as_rows(X: Any) -> DenseRows | SparseRows:
    """Rows of a NumPy array, a SciPy sparse matrix, or a pandas or Polars frame of numbers.

    float32 and float64 arrays in C order and canonical CSR matrices are used as they are,
    without a copy.
    """
    if isinstance(X, (DenseRows, SparseRows)):
        return X
    if hasattr(X, "tocsr"):
        return _sparse(X)
    if hasattr(X, "columns") and hasattr(X, "dtypes"):
        X = _frame(X)
    try:
        array = np.asarray(X)
    except (TypeError, ValueError) as error:
        found = type(X).__name__
        raise TypeError(f"Expected X to be a table of numbers, found {found}.") from error
    if array.ndim != 2:
        raise ValueError(
            f"Expected X of shape (n, d), found shape {array.shape}. "
            "Reshape one feature with X.reshape(-1, 1), one example with X.reshape(1, -1)."
        )
    if array.dtype.kind not in "biuf":
        raise TypeError(
            f"Expected X to hold numbers, found dtype {array.dtype}. "
            "Encode text and categories as numbers first."
        )
    dtype = array.dtype if array.dtype in _FLOATS else np.float64
    rows = DenseRows(np.ascontiguousarray(array, dtype=dtype))
    _require_size(rows.shape)
    return rows


def is_dask(X: Any) -> bool:
    """Whether rows are a Dask collection."""
    return hasattr(X, "__dask_graph__")


def as_targets(y: Any) -> Any:
    """A column of targets as an array: frames of one column and series included."""
    if hasattr(y, "to_numpy"):
        y = y.to_numpy()
    if y is None:
        return None
    array = np.asarray(y)
    return array[:, 0] if array.ndim == 2 and array.shape[1] == 1 else array


def strange_columns(X: Any) -> str:
    """Names and types of a frame's columns that do not hold numbers; "" where all do."""
    names = getattr(X, "column_names", getattr(X, "columns", None))
    if names is None or hasattr(X, "tocsr") or isinstance(X, np.ndarray):
        return ""
    columns = [(name, np.asarray(X[name]).dtype) for name in names]
    strange = [f"{name!r} ({dtype})" for name, dtype in columns if dtype.kind not in "biuf"]
    more = f" and {len(strange) - 10} more" if len(strange) > 10 else ""
    return ", ".join(strange[:10]) + more


def _frame(X: Any) -> Any:
    if strange := strange_columns(X):
        raise TypeError(
            f"Expected numeric columns only, found {strange}. "
            "Encode them as numbers, fill missing values, or drop them."
        )
    columns = [np.asarray(X[name]) for name in X.columns]
    common = np.float32 if all(c.dtype == np.float32 for c in columns) else np.float64
    return np.column_stack(columns).astype(common) if columns else np.empty((len(X), 0))


def _sparse(X: Any) -> SparseRows:
    matrix = X.tocsr()
    if matrix.dtype.kind not in "biuf":
        raise TypeError(f"Expected X to hold numbers, found dtype {matrix.dtype}.")
    _require_size(matrix.shape)
    if matrix.dtype not in _FLOATS:
        matrix = matrix.astype(np.float64)
    # SciPy's own flag may be stale, and an entry stored twice would count too little in the norm.
    if not _is_canonical(matrix.indices, matrix.indptr, matrix.shape[1], matrix.data.size):
        matrix = matrix.copy()
        matrix.has_canonical_format = matrix.has_sorted_indices = False
        matrix.check_format(full_check=True)
        matrix.sum_duplicates()
    return SparseRows(matrix.data, matrix.indices, matrix.indptr, matrix.shape[1])


def _require_size(shape: tuple[int, int]) -> None:
    if min(shape) < 1:
        raise ValueError(f"Expected at least one row and one column in X, found shape {shape}.")


@kernel()
def _is_canonical(indices: Integers, indptr: Integers, dim: int, entries: int) -> bool:
    if indptr[0] != 0 or indptr[-1] != entries or indices.size != entries:
        return False
    for i in range(indptr.size - 1):
        if indptr[i] > indptr[i + 1] or indptr[i + 1] > entries:
            return False
        before = -1
        for k in range(indptr[i], indptr[i + 1]):
            if indices[k] <= before or indices[k] >= dim:
                return False
            before = indices[k]
    return True
