"""What all estimators share: reading tables, one private fit, coefficients in original units."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from sklearn.base import BaseEstimator
from sklearn.utils.validation import check_is_fitted, validate_data

from privagrad._internal import validate
from privagrad.glm.rows import DenseRows, SparseRows, as_rows, strange_columns
from privagrad.linear import (
    Bounds,
    Choices,
    LinearModel,
    Plan,
    Problem,
    default_delta,
    plan_fit,
    run_fit,
    warn_if_hopeless,
)
from privagrad.privacy.events import Event
from privagrad.privacy.noise import RandomSource, RandomState, random_source

BoundsLike = tuple[Any, Any] | None
_quiet = np.errstate(over="ignore", invalid="ignore")
"""A warning of an overflow would tell of a private row."""


class PrivateLinearEstimator(BaseEstimator):  # type: ignore[misc]
    """A linear model fitted under differential privacy; subclasses name the loss."""

    epsilon: float
    delta: float | None
    fit_intercept: bool
    bounds: BoundsLike
    steps: int | None
    batch_size: int | None
    step_size: float | None
    radius: float | None
    random_state: RandomState
    verbose: bool | None

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags

    @_quiet
    def _read(self, X: Any, y: Any, refused: dict[str, Any], *, numeric: bool) -> tuple[Any, Any]:
        """X and y as scikit-learn wants them, whole and finite."""
        _refuse(refused)
        try:
            X, y = validate_data(
                self, X, y, accept_sparse="csr", dtype=[np.float64, np.float32],
                ensure_all_finite=False, y_numeric=numeric, ensure_min_samples=2,
            )  # fmt: skip
        except ValueError as error:
            if strange := strange_columns(X):
                raise ValueError(
                    f"Expected numbers in X, found other things in {strange}. Encode categories as "
                    "numbers (one-hot, with public categories), or drop these columns."
                ) from error
            raise
        self._require_finite(X)
        if numeric and not np.isfinite(y).all():
            raise ValueError("Expected finite targets y, found NaN or inf: drop those rows.")
        return X, y

    @abstractmethod
    def _pose(self, X: Any, y: Any, refused: dict[str, Any]) -> Problem:
        """The problem that rows and targets pose."""

    @abstractmethod
    def _keep(self, model: LinearModel) -> None:
        """Set the fitted attributes."""

    @abstractmethod
    def row_scores(self, X: Any, y: Any) -> NDArray[np.float64]:
        """How good each row's prediction is, from 0 to 1. Not private."""

    def fit(self, X: Any, y: Any, **refused: Any) -> Self:
        """Fit to rows X and targets y. ``sample_weight`` is refused: see the error."""
        problem = self._pose(X, y, refused)
        plan = self._plan(problem)
        source = estimator_source(self.random_state)
        warn_if_hopeless(problem.rows.shape[0], self.epsilon, plan.relative_noise)
        model = run_fit(problem, plan, source, self.verbose)
        self.privacy_, self.n_iter_ = model.privacy, plan.steps
        self._keep(model)
        return self

    def planned_events(self, X: Any, y: Any) -> tuple[Event, ...]:
        """What `fit` would release, from public facts of X and y alone."""
        plan = self._plan(self._pose(X, y, {}))
        return plan.privacy.events if plan.privacy else ()

    def warn_if_hopeless(self, X: Any, y: Any) -> None:
        """The warning that `fit` would give of too few rows."""
        problem = self._pose(X, y, {})
        warn_if_hopeless(problem.rows.shape[0], self.epsilon, self._plan(problem).relative_noise)

    def _plan(self, problem: Problem) -> Plan:
        n = problem.rows.shape[0]
        epsilon = validate.positive("epsilon", self.epsilon, allow_inf=True)
        delta = default_delta(n) if self.delta is None else validate.delta_of(self.delta, n)
        return plan_fit(problem.facts, epsilon, delta, self._choices(n))

    def _table(self, X: Any) -> tuple[DenseRows | SparseRows, Bounds | None]:
        """Rows within the bounds, and the bounds."""
        rows = as_rows(X)
        bounds = bounds_of("bounds", self.bounds, rows.shape[1])
        return (rows if bounds is None else _clipped(rows, bounds)), bounds

    def _choices(self, n: int) -> Choices:
        if self.batch_size is not None and validate.integer("batch_size", self.batch_size) > n:
            raise ValueError(
                f"Expected batch_size <= {n}, the rows of X; found batch_size={self.batch_size}."
            )
        return Choices(
            None if self.steps is None else validate.integer("steps", self.steps),
            self.batch_size,
            None if self.step_size is None else validate.positive("step_size", self.step_size),
            None if self.radius is None else validate.positive("radius", self.radius),
        )

    def _margins(self, X: Any) -> NDArray[np.float64]:
        check_is_fitted(self)
        X = validate_data(
            self, X, accept_sparse="csr", dtype=[np.float64, np.float32], reset=False,
            ensure_all_finite=False,
        )  # fmt: skip
        self._require_finite(X)
        # Row by row: the score of one row of a private search must not hang on the others.
        return np.asarray(as_rows(X).margins(self.coef_.T) + self.intercept_)

    @_quiet
    def _require_finite(self, X: Any) -> None:
        data = X.data if hasattr(X, "tocsr") else X
        # A sum shows in one pass whether there is anything to look for.
        if math.isfinite(float(np.sum(data, dtype=np.float64))) or np.isfinite(data).all():
            return
        if hasattr(X, "tocsr"):
            wrong = np.unique(X.indices[~np.isfinite(X.data)])
        else:
            wrong = np.flatnonzero(~np.isfinite(X).all(axis=0))
        names = getattr(self, "feature_names_in_", None)
        shown = [repr(str(names[j])) if names is not None else str(j) for j in wrong[:10]]
        more = f" and {wrong.size - 10} more" if wrong.size > 10 else ""
        raise ValueError(
            f"Expected finite numbers in X, found NaN or inf in column"
            f"{'s' if wrong.size > 1 else ''} {', '.join(shown)}{more}. Fill missing values by a "
            "public rule, for example a constant, or drop these columns."
        )


def estimator_source(random_state: Any) -> RandomSource:
    """`random_source`, and for scikit-learn's sake seeds from a NumPy RandomState."""
    if isinstance(random_state, np.random.RandomState):
        random_state = int(random_state.randint(2**31))
    return random_source(random_state)


def _refuse(given: dict[str, Any]) -> None:
    if given.pop("sample_weight", None) is not None:
        raise ValueError(
            "Expected no sample_weight: a weight scales what one row may contribute, so that the "
            "privacy of heavy rows would be weaker than epsilon says. Leave it out."
        )
    if given:
        raise TypeError(f"fit() got unexpected keyword arguments: {', '.join(given)}.")


def bounds_of(name: str, given: BoundsLike, dim: int) -> Bounds | None:
    """(low, high) as arrays of the columns' length."""
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


def _clipped(rows: DenseRows | SparseRows, bounds: Bounds) -> DenseRows | SparseRows:
    """Every entry brought within its column's bounds."""
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
