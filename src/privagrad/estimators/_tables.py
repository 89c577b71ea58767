"""What users give to estimators, as tables: validated by scikit-learn, or parsed by a schema."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import validate_data

from privagrad._internal.validate import Vector
from privagrad.data.columns import did_you_mean
from privagrad.data.matrices import MatrixTable
from privagrad.data.schema import Column, Schema, read_schema
from privagrad.glm.rows import DenseRows, SparseRows, as_rows, as_targets, strange_columns
from privagrad.privacy.users import Users, require_plain_shapes, require_same_order

BoundsLike = tuple[Any, Any] | Mapping[Any, Any] | None
SchemaLike = Schema | Path | str | None
TARGET = "target"
_ACCEPTED: dict[str, Any] = {
    "accept_sparse": "csr",
    "dtype": [np.float64, np.float32],
    "ensure_all_finite": False,
}
_SHOWN = 10
_quiet = np.errstate(over="ignore", invalid="ignore")
"""A warning of an overflow would tell of a private row."""


@dataclass(frozen=True)
class Given:
    """Finite rows, and the targets as the user gave them.

    `labels` are the distinct labels of the rows that were read, which are public; empty in a
    regression. `users` say whose rows they are, where users are protected.
    """

    rows: DenseRows | SparseRows
    y: NDArray[Any]
    labels: NDArray[Any]
    target: str
    users: Users | None = None

    def take(self, chosen: NDArray[np.int64]) -> Given:
        """These rows. Which labels occur among them is not public: `labels` stay as they are."""
        users = None if self.users is None else self.users.take(chosen)
        rows = as_rows(self.rows.matrix[chosen])
        return replace(self, rows=rows, y=self.y[chosen], users=users)


def users_of(groups: Any, X: Any, y: Any) -> Users | None:
    """The users of rows, if they are named. Lengths are compared here, where none is told."""
    if groups is None:
        return None
    require_plain_shapes(X, y)
    require_same_order(groups, X, y)
    rows = X.shape[0] if hasattr(X, "shape") else len(X)
    if len(as_targets(y)) != rows:
        raise ValueError("Expected as many targets as rows, found another number of them.")
    return Users.of(groups, rows)


@_quiet
def read_xy(
    estimator: Any, X: Any, y: Any, *, regression: bool, reset: bool = True
) -> tuple[DenseRows | SparseRows, NDArray[Any]]:
    """Validate rows and targets, and note the number and names of columns on the estimator."""
    try:
        X, y = validate_data(
            estimator, X, y, y_numeric=regression, ensure_min_samples=2 if reset else 1,
            reset=reset, **_ACCEPTED,
        )  # fmt: skip
    except ValueError as error:
        if strange := strange_columns(X):
            raise ValueError(
                f"Expected numbers in X, found other things in {strange}. State the columns with "
                "schema=, encode categories as numbers (one-hot, with public categories), or drop "
                "these columns."
            ) from error
        raise
    require_finite(estimator, X)
    if not regression:
        check_classification_targets(y)
    elif y.dtype.kind not in "biuf":
        raise TypeError(
            f"Expected numbers as targets of a regression, found {y.dtype}: convert them, or take "
            "a classifier for labels."
        )
    elif not np.isfinite(y).all():
        raise ValueError("Expected finite targets y, found NaN or inf: drop those rows.")
    return as_rows(X), y


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
        f"{'s' if wrong.size > 1 else ''} {', '.join(shown)}{more}. Give a data frame and "
        "schema=, with which missing values are allowed; or fill them by a public rule, for "
        "example a constant, or drop these columns."
    )


def matrix_table(
    estimator: Any,
    rows: DenseRows | SparseRows,
    y: Vector,
    target: Column,
    users: Users | None = None,
) -> MatrixTable:
    """Validated rows with their targets as numbers, or as codes of the target's categories."""
    names = getattr(estimator, "feature_names_in_", None)
    told = None if names is None else tuple(map(str, names))
    schema = Schema((target,), target.name)
    return MatrixTable(schema, y, {}, data=rows, names=told, users=users)


def name_of(y: Any) -> str:
    """What the targets are called."""
    # The name of a dask array is that of its tasks.
    name = None if hasattr(y, "chunks") else getattr(y, "name", None)
    return name if isinstance(name, str) and name else TARGET


def schema_of(given: SchemaLike) -> Schema | None:
    """A schema, or that of a file."""
    if given is None or isinstance(given, Schema):
        return given
    if isinstance(given, (str, Path)):
        return read_schema(Path(given))
    raise TypeError(
        f"Expected schema=None, a Schema or the path of a schema.toml, found {given!r}."
    )


def edges_of(
    name: str, given: BoundsLike, dim: int, names: Sequence[str] | None = None
) -> tuple[Vector, Vector] | None:
    """Bounds (low, high) with one number for each column, infinite where none is stated."""
    if given is None:
        return None
    if isinstance(given, Mapping):
        return _partial(name, given, dim, names)
    if not isinstance(given, Sequence) or len(given) != 2:
        raise ValueError(
            f"Expected {name}=(low, high), or a dict of columns and such pairs; found {given!r}."
        )
    low, high = (np.broadcast_to(np.asarray(edge, dtype=np.float64), dim).copy() for edge in given)
    if not (np.isfinite(low).all() and np.isfinite(high).all() and (low <= high).all()):
        raise ValueError(
            f"Expected {name} with finite low <= high in every column, found {given!r}."
        )
    return low, high


def _partial(
    name: str, given: Mapping[Any, Any], dim: int, names: Sequence[str] | None
) -> tuple[Vector, Vector] | None:
    low, high = np.full(dim, -math.inf), np.full(dim, math.inf)
    places = {} if names is None else {column: j for j, column in enumerate(names)}
    for key, pair in given.items():
        number = isinstance(key, (int, np.integer)) and not isinstance(key, bool)
        place = int(key) if number else places.get(key, -1)
        if not 0 <= place < dim:
            raise ValueError(
                f"Expected {name} of columns that X has, by name or number, found {key!r}."
                f"{did_you_mean(str(key), places) if places else ''}"
            )
        low[place], high[place] = edges_of_column(name, key, pair)
    return (low, high) if given else None


def edges_of_column(name: str, key: Any, pair: Any) -> tuple[float, float]:
    """The two ends of a column's bounds; None: an end that is not known."""
    ends = list(pair) if isinstance(pair, (Sequence, np.ndarray)) else []
    if len(ends) == 2:
        low = -math.inf if ends[0] is None else float(ends[0])
        high = math.inf if ends[1] is None else float(ends[1])
        if low <= high and low < math.inf and high > -math.inf:
            return low, high
    raise ValueError(f"Expected {name} with low <= high of column {key!r}, found {pair!r}.")


def bounded_schema(schema: Schema, given: BoundsLike, target_bounds: BoundsLike) -> Schema:
    """A schema with further bounds, of columns by name and of the target."""
    if given is not None and not isinstance(given, Mapping):
        raise ValueError(
            f"Expected bounds as a dict of names and pairs with schema=, found {given!r}."
        )
    told = dict(given or {})
    names = [column.name for column in schema.features]
    if strange := [key for key in told if key not in names]:
        raise ValueError(
            f"Expected bounds of the schema's columns, found {strange[0]!r}."
            f"{did_you_mean(str(strange[0]), names)}"
        )
    if target_bounds is not None:
        ends = edges_of("target_bounds", target_bounds, 1)
        told[schema.target] = [float(edge[0]) for edge in ends or ()]
    changed = []
    for key, pair in told.items():
        column = schema.column(key)
        if column.kind not in ("number", "duration", "date"):
            raise ValueError(f"Expected bounds of numbers alone, found them for {key!r}.")
        low, high = edges_of_column("bounds", key, pair)
        changed.append(
            replace(
                column,
                low=None if math.isinf(low) else low,
                high=None if math.isinf(high) else high,
            )
        )
    return schema.with_columns(changed)
