"""What all estimators share: one private fit, coefficients in original units."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from sklearn.base import BaseEstimator
from sklearn.utils.validation import check_is_fitted

from privagrad._internal import validate
from privagrad.estimators._tables import BoundsLike, Table, read_rows, read_table
from privagrad.glm.losses import Loss
from privagrad.glm.rows import DenseRows, SparseRows
from privagrad.linear import (
    Choices,
    LinearModel,
    Problem,
    default_delta,
    plan_fit,
    run_fit,
    warn_if_hopeless,
)
from privagrad.privacy.noise import Noise, RandomSource, RandomState, random_source


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
    noise: Noise = "gaussian"  # of estimators that were pickled without it

    def _assign(self, parameters: dict[str, Any]) -> None:
        """Set the parameters of a constructor, given its `locals()`."""
        for name, value in parameters.items():
            if name != "self":
                setattr(self, name, value)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags

    @property
    @abstractmethod
    def _loss(self) -> Loss:
        """The loss that is minimised: with two classes, where there are classes."""

    @abstractmethod
    def _pose(self, table: Table) -> Problem:
        """The problem that a table poses under the parameters, which are checked here."""

    @abstractmethod
    def _keep(self, model: LinearModel, labels: NDArray[Any]) -> None:
        """Set the fitted attributes."""

    @abstractmethod
    def _row_scores(self, table: Table) -> NDArray[np.float64]:
        """How good the prediction for each row is, from 0 to 1. Not private."""

    def fit(self, X: Any, y: Any, **refused: Any) -> Self:
        """Fit to rows and targets.

        Parameters
        ----------
        X : array, CSR matrix or data frame of shape (n, d)
            The rows. All entries are finite numbers.
        y : array of shape (n,)
            The targets.
        **refused : None
            ``sample_weight`` is refused: a weight would change what one row may contribute.
        """
        _refuse(refused)
        table = self._read(X, y)
        return self._fit_problem(self._pose(table), table.labels)

    def _read(self, X: Any, y: Any) -> Table:
        return read_table(self, X, y, regression=self._loss.regression)

    def _fit_problem(self, problem: Problem, labels: NDArray[Any]) -> Self:
        """`fit`, from a problem that this estimator or one that poses the same has posed."""
        n = problem.rows.shape[0]
        epsilon = validate.positive("epsilon", self.epsilon, allow_inf=True)
        plan = plan_fit(problem.facts, epsilon, delta_for(self.delta, n), self._choices(n))
        source = estimator_source(self.random_state, self.noise)
        warn_if_hopeless(n, epsilon, plan.relative_noise)
        model = run_fit(problem, plan, plan.releases(source), self.verbose)
        self.privacy_, self.n_iter_ = model.privacy, plan.batches.steps
        self._keep(model, labels)
        return self

    def _choices(self, n: int) -> Choices:
        """What the parameters set instead of the recipe, for a table of n rows."""
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

    def _margins(self, rows: DenseRows | SparseRows) -> NDArray[np.float64]:
        # Row by row: the score of one row of a private search must not depend on the others.
        return np.asarray(rows.margins(self.coef_.T) + self.intercept_)

    def _margins_of(self, X: Any) -> NDArray[np.float64]:
        check_is_fitted(self)
        return self._margins(read_rows(self, X))


def estimator_source(random_state: Any, noise: Noise) -> RandomSource:
    """`random_source`, which here also takes a seed from a NumPy RandomState, as scikit-learn."""
    if isinstance(random_state, np.random.RandomState):
        random_state = int(random_state.randint(2**31))
    return random_source(random_state, noise)


def delta_for(given: float | None, n: int) -> float:
    """The given delta, or the default for n rows."""
    return default_delta(n) if given is None else validate.delta_of(given, n)


def _refuse(given: dict[str, Any]) -> None:
    if given.pop("sample_weight", None) is not None:
        raise ValueError(
            "Expected no sample_weight: a weight scales what one row may contribute, so that the "
            "privacy of heavy rows would be weaker than epsilon says. Leave it out."
        )
    if given:
        raise TypeError(f"fit() got unexpected keyword arguments: {', '.join(given)}.")
