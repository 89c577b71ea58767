"""Tables that scikit-learn has validated, and public bounds of their columns."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import validate_data

from privagrad.glm.rows import DenseRows, SparseRows, as_rows, strange_columns
from privagrad.linear import Bounds

BoundsLike = tuple[Any, Any] | None
_ACCEPTED: dict[str, Any] = {
    "accept_sparse": "csr",
    "dtype": [np.float64, np.float32],
    "ensure_all_finite": False,
}
_SHOWN = 10
_quiet = np.errstate(over="ignore", invalid="ignore")
"""A warning of an overflow would tell of a private row."""


@dataclass(frozen=True)
class Table:
    """Finite rows, and the targets as the user gave them.

    `labels` are the distinct labels of the table that was read, which are public; empty in a
    regression.
    """

    rows: DenseRows | SparseRows
    y: NDArray[Any]
    labels: NDArray[Any]

    def take(self, chosen: NDArray[np.int64]) -> Table:
        """These rows. Which labels occur among them is not public: `labels` stay as they are."""
        return Table(as_rows(self.rows.matrix[chosen]), self.y[chosen], self.labels)


@_quiet
def read_table(estimator: Any, X: Any, y: Any, *, regression: bool) -> Table:
    """Validate rows and targets, and note the number and names of columns on the estimator."""
    try:
        X, y = validate_data(
            estimator, X, y, y_numeric=regression, ensure_min_samples=2, **_ACCEPTED
        )
    except ValueError as error:
        if strange := strange_columns(X):
            raise ValueError(
                f"Expected numbers in X, found other things in {strange}. Encode categories as "
                "numbers (one-hot, with public categories), or drop these columns."
            ) from error
        raise
    require_finite(estimator, X)
    if regression:
        if not np.isfinite(y).all():
            raise ValueError("Expected finite targets y, found NaN or inf: drop those rows.")
        return Table(as_rows(X), y, y[:0])
    check_classification_targets(y)
    return Table(as_rows(X), y, np.unique(y))


def read_rows(estimator: Any, X: Any) -> DenseRows | SparseRows:
    """Validate rows to predict for, with the columns that the estimator was fitted to."""
    X = validate_data(estimator, X, reset=False, **_ACCEPTED)
    require_finite(estimator, X)
    return as_rows(X)


def name_columns(estimator: Any, X: Any) -> None:
    """Note the number and names of columns on the estimator; entries are not looked at."""
    validate_data(estimator, X, skip_check_array=True)


@_quiet
def require_finite(estimator: Any, X: Any) -> None:
    """Refuse NaN and infinite entries, and name their columns."""
    sparse = hasattr(X, "tocsr")
    data = X.data if sparse else X
    # A sum shows in one pass whether there is anything to look for.
    if math.isfinite(float(np.sum(data, dtype=np.float64))) or np.isfinite(data).all():
        return
    finite = np.isfinite(data)
    wrong = np.unique(X.indices[~finite]) if sparse else np.flatnonzero(~finite.all(axis=0))
    names = getattr(estimator, "feature_names_in_", None)
    shown = [repr(str(names[j])) if names is not None else str(j) for j in wrong[:_SHOWN]]
    more = f" and {wrong.size - _SHOWN} more" if wrong.size > _SHOWN else ""
    raise ValueError(
        f"Expected finite numbers in X, found NaN or inf in column"
        f"{'s' if wrong.size > 1 else ''} {', '.join(shown)}{more}. Fill missing values by a "
        "public rule, for example a constant, or drop these columns."
    )


def bounds_of(name: str, given: BoundsLike, dim: int) -> Bounds | None:
    """(low, high) as arrays with one number for each column."""
    if given is None:
        return None
    if not isinstance(given, Sequence) or len(given) != 2:
        raise ValueError(f"Expected {name}=(low, high), found {given!r}.")
    low, high = (np.broadcast_to(np.asarray(edge, dtype=np.float64), dim).copy() for edge in given)
    if not (np.isfinite(low).all() and np.isfinite(high).all() and (low <= high).all()):
        raise ValueError(
            f"Expected {name} with finite low <= high in every column, found {given!r}."
        )
    return low, high


def clipped(rows: DenseRows | SparseRows, bounds: Bounds | None) -> DenseRows | SparseRows:
    """Rows with every entry clipped to its column's bounds, where there are bounds."""
    if bounds is None:
        return rows
    low, high = bounds
    if isinstance(rows, DenseRows):
        return DenseRows(np.clip(rows.array, low, high).astype(rows.array.dtype))
    if (low > 0).any() or (high < 0).any():
        raise ValueError(
            "Expected bounds that contain 0 for a sparse table, whose absent entries are 0; found "
            "bounds that do not. Give the table as a dense array, or wider bounds."
        )
    data = np.clip(rows.data, low[rows.indices], high[rows.indices]).astype(rows.data.dtype)
    return SparseRows(data, rows.indices, rows.indptr, rows.dim)
