"""What all estimators share: one private fit of a table, with the parameters as settings."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

from privagrad._internal import validate
from privagrad._internal.validate import Vector
from privagrad.data.matrices import MatrixTable, NumberTable
from privagrad.data.memory import as_series, open_frame, require_own_name, with_target
from privagrad.data.opening import is_source, open_source
from privagrad.data.schema import Column, Schema
from privagrad.data.tables import Table
from privagrad.estimators import _labels
from privagrad.estimators._fitted import ARRAY, FittedEstimator
from privagrad.estimators._repeats import warn_of_drawn_seed, warn_of_repeated_fit
from privagrad.estimators._sources import (
    labels_of,
    partitioned_table,
    partitions_of,
    require_no_groups,
    require_no_schema,
    source_schema,
)
from privagrad.estimators._tables import (
    BoundsLike,
    Given,
    bounded_schema,
    edges_of,
    matrix_table,
    name_of,
    read_xy,
    schema_of,
    users_of,
)
from privagrad.fitting import (
    FitSettings,
    PreparedFit,
    prepare_table,
    run,
    warn_if_weak,
)
from privagrad.fitting.request import with_classes
from privagrad.glm.examples import PartitionedExamples
from privagrad.glm.rows import DenseRows, is_dask
from privagrad.linear import Choices, Solver
from privagrad.privacy.noise import Noise, RandomSource, RandomState, random_source
from privagrad.privacy.users import require_plain_shapes

_NOT_KEPT = ("schema", "ledger", "dataset", "random_state", "verbose")


class PrivateLinearEstimator(FittedEstimator):
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
    # Of estimators that were pickled without them:
    noise: Noise = "gaussian"
    evaluate: bool = False
    target_bounds: BoundsLike = None

    def _assign(self, parameters: dict[str, Any]) -> None:
        """Set the parameters of a constructor, given its `locals()`."""
        for name, value in parameters.items():
            if name != "self":
                setattr(self, name, value)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        tags.input_tags.allow_nan = self.schema is not None
        return tags

    @property
    def _squares(self) -> Solver | None:
        """How squared errors are minimised, if they are."""
        return None

    @abstractmethod
    def _target(self, given: Given) -> tuple[Column, Vector]:
        """The target as a column, and the targets as numbers or codes of its categories."""

    @abstractmethod
    def _stated_classes(self) -> NDArray[Any] | None:
        """The labels that the parameters state, if they do."""

    @abstractmethod
    def _class_weights(self, labels: NDArray[Any] | None) -> Vector | Literal["balanced"] | None:
        """The weights of the classes in the order of these labels; None: not known yet."""

    @abstractmethod
    def _row_scores(self, given: Given) -> NDArray[np.float64]:
        """How good the prediction for each row is, from 0 to 1. Not private."""

    def fit(self, X: Any, y: Any, *, groups: Any = None, **refused: Any) -> Self:
        """Fit to rows and targets.

        Parameters
        ----------
        X : array, CSR matrix or data frame of shape (n, d)
            The rows. All entries are finite numbers, unless there is a `schema`: then a pandas,
            Polars or Arrow table with its columns. Rows that do not fit into memory: a mapped NumPy
            array, the path of a table (Parquet, Arrow, CSV, LIBSVM, or a folder of such files), or
            an Arrow data set. Rows on a cluster: a dask array or data frame of numbers.
        y : array of shape (n,)
            The targets; of a path or data set the name of the target.
        groups : array of shape (n,), optional
            The user of each row, any hashable values: privacy then protects users, each with all of
            their rows, and every user counts once. With a `schema` a column of kind "user" may
            name them instead. The number of users is public, that of rows is not.
        **refused : None
            ``sample_weight`` is refused: a weight would change what one row may contribute.
        """
        _refuse(refused)
        schema = schema_of(self.schema)
        if is_source(X):
            require_no_groups(groups, "users in a column of kind 'user' of a schema")
            return self._fit_source(X, y, schema)
        if is_dask(X):
            require_no_groups(groups, "rows in memory")
            require_no_schema(schema)
        if schema is None and (partitions := partitions_of(X, y)) is not None:
            require_no_groups(groups, "rows in memory")
            self._note_names(X)
            return self._fit_partitions(partitions, y)
        users = users_of(groups, X, y)
        if schema is None:
            given = replace(self._read(X, y), users=users)
            table: Table = self._table(given)
            labels = self._labels(given)
            return self._fit_job(self._prepared(table, labels), lambda _: labels)
        if users is not None and schema.user is not None:
            raise ValueError(
                f"Expected groups=, or a schema with a column of users, found both: leave out "
                f"groups=, the schema's column {schema.user!r} names them."
            )
        if schema.user is not None:
            require_plain_shapes(X, y)
        framed, kind = self._framed(X, y, schema)
        framed = framed if users is None else replace(framed, users=users)
        known = framed.target.categories if framed.target.name not in framed.counts else None
        told = None if known is None else _labels.typed(known, kind)
        job = self._prepared(framed, told)
        return self._fit_job(job, lambda classes: _labels.typed(classes, kind))

    def _fit_source(self, X: Any, y: Any, schema: Schema | None) -> Self:
        """Fit the rows of a path or of an Arrow data set, of which y names the target."""
        schema = source_schema(X, y, schema, regression=self._loss.regression)
        table = open_source(X, self._completed(schema))
        self._note_columns(table.schema, table.encoding.names)
        known = table.target.categories if table.target.name not in table.counts else None
        told = None if known is None else np.array(known)
        job = self._prepared(table, told)
        return self._fit_job(job, lambda classes: _labels.typed(classes, "i"))

    def _fit_partitions(self, partitions: PartitionedExamples, y: Any) -> Self:
        """Fit rows that lie in partitions, with their targets."""
        regression = self._loss.regression
        given = np.empty(0) if regression else labels_of(partitions, y)
        told = Given(DenseRows(np.empty((0, partitions.shape[1]))), given, given, name_of(y))
        target, _ = self._target(told)
        labels = None if regression else self._labels(told)
        names = getattr(self, "feature_names_in_", None)
        table = partitioned_table(partitions, target, labels, names)
        self.n_features_in_ = table.width
        bounded = table.within(edges_of("bounds", self.bounds, table.width, table.names))
        known = given if labels is None else labels
        return self._fit_job(self._prepared(bounded, known), lambda _: known)

    def _prepared(self, table: Table, labels: NDArray[Any] | None) -> PreparedFit:
        """Checked and planned; a fit of rows that were fitted before is warned of."""
        settings = self._settings(labels)
        settings = replace(settings, strict=settings.dataset is not None or self.schema is not None)
        job = prepare_table(table, settings)
        if math.isinf(settings.epsilon):
            return job
        if settings.random_state is not None:
            warn_of_drawn_seed(self.random_state)
            return job
        warn_if_weak(settings.epsilon, settings.delta)
        if settings.dataset is None:
            warn_of_repeated_fit(table)
        return job

    def _read(self, X: Any, y: Any) -> Given:
        regression = self._loss.regression
        rows, targets = read_xy(self, X, y, regression=regression)
        labels = targets[:0] if regression else np.unique(targets)
        return Given(rows, targets, labels, name_of(y))

    def _table(self, given: Given) -> MatrixTable:
        """The rows within their bounds, with targets as a fit needs them."""
        target, y = self._target(given)
        table = matrix_table(self, given.rows, y, target, given.users)
        names = table.names
        return table.within(edges_of("bounds", self.bounds, given.rows.shape[1], names))

    def _labels(self, given: Given) -> NDArray[Any]:
        """The labels that the columns of a model stand for; those given for a regression."""
        return given.labels

    def _framed(self, X: Any, y: Any, schema: Schema) -> tuple[Table, str]:
        """A frame as a table, and the kind of NumPy's types that its labels have."""
        regression = self._loss.regression
        require_own_name(X, y, schema, name_of(y))
        schema = self._completed(with_target(schema, name_of(y), numbers=regression))
        table = open_frame(X, y, schema)
        self._note_columns(schema, table.encoding.names)
        return table, _kind_of(y)

    def _completed(self, schema: Schema) -> Schema:
        """A schema with a target, with the classes and bounds that the parameters state."""
        stated = self._stated_classes()
        texts = () if stated is None else tuple(_labels.text_of(c, sparse=False) for c in stated)
        schema = with_classes(schema, self._loss, texts)
        return bounded_schema(schema, self.bounds, self.target_bounds)

    def _note_columns(self, schema: Schema, encoded: list[str]) -> None:
        """Note the names and number of columns; LIBSVM files have no names."""
        names = [column.name for column in schema.features]
        self.n_features_in_ = len(encoded if schema.libsvm else names)
        if not schema.libsvm:
            self.feature_names_in_ = np.array(names, dtype=object)

    def _note_names(self, X: Any) -> None:
        """Note the names of a frame's columns, if it has any."""
        if hasattr(self, "feature_names_in_"):
            del self.feature_names_in_
        names = list(getattr(X, "columns", ()))
        if names and all(isinstance(name, str) for name in names):
            self.feature_names_in_ = np.array(names, dtype=object)

    def _settings(self, labels: NDArray[Any] | None) -> FitSettings:
        """The parameters, checked, for a target of these labels; None: not known yet."""
        ledger = self._ledger
        return FitSettings(
            validate.positive("epsilon", self.epsilon, allow_inf=True), self._loss,
            None if self.delta is None else validate.delta_of(self.delta), self._squares,
            bool(self.fit_intercept), self._class_weights(labels), self._choices(),
            _seed(self.random_state), self.noise, bool(self.evaluate), False, self.dataset, ledger,
        )  # fmt: skip

    def _choices(self) -> Choices:
        """What the parameters set instead of the recipe."""
        return Choices(
            self.steps,
            self.batch_size,
            None if self.step_size is None else validate.positive("step_size", self.step_size),
            None if self.radius is None else validate.positive("radius", self.radius),
        )

    def _fit_job(self, job: PreparedFit, labels_of: Callable[[list[str]], NDArray[Any]]) -> Self:
        """Make the releases of a prepared fit, and keep its model."""
        model = run(job, progress=self.verbose)
        about: dict[str, Any] = {"parameters": self._parameters()}
        if isinstance(job.table, NumberTable):
            about |= {"input": ARRAY, "named": job.table.names is not None}
        if model.classes is not None:
            about |= _labels.as_json(labels_of(model.classes))
        return self._keep(replace(model, made={**model.made, **about}))

    def _parameters(self) -> dict[str, Any]:
        """The parameters that a file can keep."""
        return {
            name: value
            for name, value in self.get_params(deep=False).items()
            if name not in _NOT_KEPT and isinstance(value, (bool, int, float, str))
        }


def _kind_of(y: Any) -> str:
    """The kind of NumPy's types that labels of this column have, from its type alone."""
    dtype = as_series("y", y).dtype
    if dtype.is_integer():
        return "i"
    if dtype.is_float():
        return "f"
    return "b" if str(dtype) == "Boolean" else "U"


def _seed(random_state: Any) -> Any:
    """A seed as `random_source` takes it; scikit-learn's may also be a NumPy RandomState."""
    if isinstance(random_state, np.random.RandomState):
        return int(random_state.randint(2**31))
    return random_state


def estimator_source(random_state: Any, noise: Noise) -> RandomSource:
    """`random_source`, which here also takes a NumPy RandomState."""
    return random_source(_seed(random_state), noise)


def _refuse(given: dict[str, Any]) -> None:
    if given.pop("sample_weight", None) is not None:
        raise ValueError(
            "Expected no sample_weight: a weight scales what one row may contribute, so that the "
            "privacy of heavy rows would be weaker than epsilon says. Leave it out."
        )
    if given:
        raise TypeError(f"fit() got unexpected keyword arguments: {', '.join(given)}.")
