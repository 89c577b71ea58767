"""The estimators: logistic regression, linear SVC, quantile and Huber regression."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit, softmax
from sklearn.base import ClassifierMixin, RegressorMixin
from sklearn.utils.multiclass import check_classification_targets

from privagrad.estimators._base import BoundsLike, PrivateLinearEstimator, bounds_of
from privagrad.glm.losses import Loss
from privagrad.linear import LinearModel, Problem
from privagrad.privacy.noise import RandomState


class _PrivateLinearClassifier(ClassifierMixin, PrivateLinearEstimator):  # type: ignore[misc]
    _binary_loss: str
    _multiclass_loss: str

    def __init__(
        self,
        epsilon: float = 1.0,
        *,
        delta: float | None = None,
        classes: Any = None,
        bounds: BoundsLike = None,
        fit_intercept: bool = True,
        steps: int | None = None,
        batch_size: int | None = None,
        step_size: float | None = None,
        radius: float | None = None,
        random_state: RandomState = None,
        verbose: bool | None = None,
    ) -> None:
        self.epsilon = epsilon
        self.delta = delta
        self.classes = classes
        self.bounds = bounds
        self.fit_intercept = fit_intercept
        self.steps = steps
        self.batch_size = batch_size
        self.step_size = step_size
        self.radius = radius
        self.random_state = random_state
        self.verbose = verbose

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.classifier_tags.poor_score = True  # on the few dozen rows of scikit-learn's checks
        return tags

    def _pose(self, X: Any, y: Any, refused: dict[str, Any]) -> Problem:
        X, y = self._read(X, y, refused, numeric=False)
        check_classification_targets(y)
        self.classes_ = self._classes(y)
        labels = np.searchsorted(self.classes_, y).astype(np.float64)
        rows, bounds = self._table(X)
        two = self.classes_.size == 2
        return Problem(
            Loss(self._binary_loss if two else self._multiclass_loss),
            rows,
            2 * labels - 1 if two else labels,
            1 if two else self.classes_.size,
            bool(self.fit_intercept),
            bounds,
        )

    def _keep(self, model: LinearModel) -> None:
        self.coef_, self.intercept_ = model.coef, model.intercept

    def row_scores(self, X: Any, y: Any) -> NDArray[np.float64]:
        """1 where the prediction is right, else 0. Not private."""
        return np.asarray(self.predict(X) == y, dtype=np.float64)

    def decision_function(self, X: Any) -> NDArray[np.float64]:
        """Margins: of shape (n,) for two classes, (n, k) for more."""
        margins = self._margins(X)
        return margins[:, 0] if margins.shape[1] == 1 else margins

    def predict(self, X: Any) -> NDArray[Any]:
        """The class of the largest margin."""
        margins = self.decision_function(X)
        number = (margins > 0).astype(int) if margins.ndim == 1 else margins.argmax(axis=1)
        labels: NDArray[Any] = self.classes_[number]
        return labels

    def _classes(self, y: NDArray[Any]) -> NDArray[Any]:
        found = np.unique(y)
        stated = found if self.classes is None else np.unique(np.asarray(self.classes))
        unknown = np.setdiff1d(found, stated)
        if unknown.size:
            raise ValueError(
                f"Expected labels among classes={stated.tolist()}, found {unknown[:5].tolist()}: "
                "add them to classes, or drop those rows."
            )
        if stated.size < 2:
            raise ValueError(
                "This classifier needs at least two classes, found one class: "
                f"{stated.tolist()}. If the table happens to hold one of several, state them all: "
                "classes=[...]."
            )
        return stated


class PrivateLogisticRegression(_PrivateLinearClassifier):
    """Logistic regression under differential privacy, without tuning; softmax for k > 2 classes.

    Parameters
    ----------
    epsilon, delta : the budget that pays for everything: scales of columns, row norms, training.
        ``delta=None`` is the smaller of 1e-5 and 1/(10 n); ``epsilon=float("inf")`` no privacy.
    classes : all labels that can occur. Without it the set of labels in y is taken as public.
    bounds : (low, high), numbers or one number a column, known without looking at the rows:
        entries are clipped to them, and no budget goes to finding ranges
    fit_intercept : whether to add a constant; without it columns are not centred
    steps, batch_size, step_size, radius : instead of the recipe's choices. `step_size` is how far
        noise may carry a coefficient of a standardised column, `radius` the bound on gradients
        in units of the median norm of a row.
    random_state : None for secure noise; a seed makes a fit repeatable and NOT private
    verbose : a progress bar: None after two seconds on a terminal, False never, True always

    Attributes
    ----------
    coef_, intercept_ : in the columns' own units; of shape (1, d) and (1,), or (k, d) and (k,)
    classes_ : labels in order
    privacy_ : PrivacyReport, with every release as an event
    n_iter_, n_features_in_, feature_names_in_ : as in scikit-learn

    Guarantees
    ----------
    All fitted attributes together satisfy ``privacy_``. Public are: the number of rows and
    columns, the columns' names, the set of labels, all parameters, and whether the table is
    sparse. Do not take parameters from the rows.
    """

    _binary_loss = "logistic"
    _multiclass_loss = "softmax"

    def predict_proba(self, X: Any) -> NDArray[np.float64]:
        """Probabilities of the classes, of shape (n, k).

        Bounding gradients makes rare classes look rarer than they are; ``radius=1`` is closer to
        true probabilities, with more noise.
        """
        margins = self.decision_function(X)
        if margins.ndim == 1:
            right = expit(margins)
            return np.column_stack([1 - right, right])
        probabilities: NDArray[np.float64] = softmax(margins, axis=1)
        return probabilities

    def predict_log_proba(self, X: Any) -> NDArray[np.float64]:
        """Logarithms of `predict_proba`."""
        return np.log(self.predict_proba(X))


class PrivateLinearSVC(_PrivateLinearClassifier):
    """A linear support vector classifier under differential privacy, without tuning.

    The hinge loss for two classes, Crammer and Singer's for more. Parameters, attributes and
    guarantees as for `PrivateLogisticRegression`.
    """

    _binary_loss = "hinge"
    _multiclass_loss = "multiclass-hinge"


class _PrivateLinearRegressor(RegressorMixin, PrivateLinearEstimator):  # type: ignore[misc]
    target_bounds: BoundsLike

    @abstractmethod
    def _loss(self) -> Loss:
        """What is minimised."""

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.regressor_tags.poor_score = True  # on the few dozen rows of scikit-learn's checks
        return tags

    def _pose(self, X: Any, y: Any, refused: dict[str, Any]) -> Problem:
        X, y = self._read(X, y, refused, numeric=True)
        targets = np.asarray(y, dtype=np.float64)
        target_bounds = bounds_of("target_bounds", self.target_bounds, 1)
        if target_bounds is not None:
            low, high = target_bounds
            targets = np.clip(targets, low, high)
        rows, bounds = self._table(X)
        return Problem(
            self._loss(), rows, targets, 1, bool(self.fit_intercept), bounds, target_bounds
        )

    def _keep(self, model: LinearModel) -> None:
        self.coef_, self.intercept_ = model.coef[0], float(model.intercept[0])
        self.target_unit_ = model.unit

    def row_scores(self, X: Any, y: Any) -> NDArray[np.float64]:
        """1 minus the loss over the loss at four standard deviations, at least 0. Not private."""
        loss, unit = self._loss(), self.target_unit_
        losses = loss.value(self.predict(X) / unit, np.asarray(y) / unit)
        return np.clip(1 - losses / (4 * loss.lipschitz), 0.0, 1.0)

    def predict(self, X: Any) -> NDArray[np.float64]:
        """X @ coef_ + intercept_."""
        return self._margins(X)


class PrivateQuantileRegressor(_PrivateLinearRegressor):
    """Quantile regression under differential privacy, without tuning; the median by default.

    Parameters
    ----------
    quantile : in (0, 1)
    target_bounds : (low, high) of the target, known without looking at the rows: targets are
        clipped to them, and less budget goes to finding their range

    The others, the attributes and the guarantees are those of `PrivateLogisticRegression`;
    ``coef_`` has shape (d,), ``intercept_`` is a number. The target's centre and scale are
    learned from the same epsilon.
    """

    def __init__(
        self,
        epsilon: float = 1.0,
        *,
        quantile: float = 0.5,
        delta: float | None = None,
        bounds: BoundsLike = None,
        target_bounds: BoundsLike = None,
        fit_intercept: bool = True,
        steps: int | None = None,
        batch_size: int | None = None,
        step_size: float | None = None,
        radius: float | None = None,
        random_state: RandomState = None,
        verbose: bool | None = None,
    ) -> None:
        self.epsilon = epsilon
        self.quantile = quantile
        self.delta = delta
        self.bounds = bounds
        self.target_bounds = target_bounds
        self.fit_intercept = fit_intercept
        self.steps = steps
        self.batch_size = batch_size
        self.step_size = step_size
        self.radius = radius
        self.random_state = random_state
        self.verbose = verbose

    def _loss(self) -> Loss:
        return Loss("quantile", self.quantile)


class PrivateHuberRegressor(_PrivateLinearRegressor):
    """Huber regression under differential privacy, without tuning.

    Parameters
    ----------
    epsilon : the privacy budget. (scikit-learn's HuberRegressor calls the bend `epsilon`.)
    bend : where the loss turns from square to linear, in standard deviations of the target

    The others are those of `PrivateQuantileRegressor`.
    """

    def __init__(
        self,
        epsilon: float = 1.0,
        *,
        bend: float = 1.35,
        delta: float | None = None,
        bounds: BoundsLike = None,
        target_bounds: BoundsLike = None,
        fit_intercept: bool = True,
        steps: int | None = None,
        batch_size: int | None = None,
        step_size: float | None = None,
        radius: float | None = None,
        random_state: RandomState = None,
        verbose: bool | None = None,
    ) -> None:
        self.epsilon = epsilon
        self.bend = bend
        self.delta = delta
        self.bounds = bounds
        self.target_bounds = target_bounds
        self.fit_intercept = fit_intercept
        self.steps = steps
        self.batch_size = batch_size
        self.step_size = step_size
        self.radius = radius
        self.random_state = random_state
        self.verbose = verbose

    def _loss(self) -> Loss:
        return Loss("huber", self.bend)
