"""Arrays and CSR matrices in memory as tables: numbers alone, used without a copy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from privagrad._internal.validate import Vector
from privagrad.data.encoding import Encoding
from privagrad.data.overlap import Marks, marks_of
from privagrad.data.schema import Column, Schema
from privagrad.data.tables import Rows, Table
from privagrad.glm.rows import DenseRows, SparseRows


@dataclass(frozen=True)
class MatrixTable(Table):
    """Finite numbers in memory: the schema holds the target alone.

    `edges` are public bounds (low, high) of the columns, infinite where none is known. The entries
    of `data` are within them; `given` are the entries before.
    """

    data: DenseRows | SparseRows
    names: tuple[str, ...] | None = None
    edges: tuple[Vector, Vector] | None = None
    given: DenseRows | SparseRows | None = None

    public_columns: ClassVar[str] = "the columns' number, names and given bounds"

    @property
    def sparse(self) -> bool:
        return isinstance(self.data, SparseRows)

    @cached_property
    def encoding(self) -> Encoding:
        names = self._names
        if self.edges is None:
            return Encoding(names, self.sparse)
        limits = np.maximum(np.abs(self.edges[0]), np.abs(self.edges[1]))
        bounds = self.edges if np.isfinite(limits).all() else None
        return Encoding(names, self.sparse, bounds, limits=np.where(limits == 0, 1.0, limits))

    @property
    def _names(self) -> list[str]:
        if self.names is not None:
            return list(self.names)
        first, prefix = (1, "") if self.sparse else (0, "x")
        return [f"{prefix}{j}" for j in range(first, first + self.data.shape[1])]

    @property
    def file_schema(self) -> Schema | None:
        """Of a file with these columns: none for sparse rows, which LIBSVM files hold."""
        if self.sparse:
            return None
        names, target = self._names, self.target
        while target.name in names:
            target = replace(target, name=f"{target.name} (target)")
        columns = (*(Column(name, missing=False) for name in names), target)
        return Schema(columns, target.name)

    def rows(self) -> DenseRows | SparseRows:
        return self.data

    def parts(self) -> Iterator[Rows]:
        yield Rows(self.data.matrix, self.targets, self.encoding.names)

    def within(self, edges: tuple[Vector, Vector] | None) -> MatrixTable:
        """The same table with every entry clipped to public bounds."""
        if edges is None:
            return self
        return replace(self, data=_clipped(self.data, edges), edges=edges, given=self.data)

    def marks(self) -> Marks | None:
        rows = self.data if self.given is None else self.given
        if isinstance(rows, DenseRows):
            return marks_of([rows.array])
        # A product with a fixed vector is computed row by row.
        weights = np.random.default_rng(0).standard_normal(rows.dim)
        return marks_of([np.asarray(rows.matrix @ weights)[:, None]])

    def buffers(self) -> list[NDArray[Any]]:
        rows = self.data if self.given is None else self.given
        return [rows.array] if isinstance(rows, DenseRows) else [rows.data, rows.indices]


def _clipped(
    rows: DenseRows | SparseRows, edges: tuple[Vector, Vector]
) -> DenseRows | SparseRows:  # fmt: skip
    low, high = edges
    if isinstance(rows, DenseRows):
        return DenseRows(np.clip(rows.array, low, high).astype(rows.array.dtype))
    if (low > 0).any() or (high < 0).any():
        raise ValueError(
            "Expected bounds that contain 0 for a sparse table, whose absent entries are 0; found "
            "bounds that do not. Give the table as a dense array, or wider bounds."
        )
    data = np.clip(rows.data, low[rows.indices], high[rows.indices]).astype(rows.data.dtype)
    return SparseRows(data, rows.indices, rows.indptr, rows.dim)
