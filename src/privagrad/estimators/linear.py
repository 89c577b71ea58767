"""The estimators: logistic regression, linear SVC, quantile and Huber regression."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit, softmax
from sklearn.base import ClassifierMixin, RegressorMixin

from privagrad._internal import validate
from privagrad._internal.validate import Vector
from privagrad.data.models import SavedModel
from privagrad.data.schema import Column
from privagrad.estimators._base import PrivateLinearEstimator
from privagrad.estimators._fitted import LedgerLike
from privagrad.estimators._labels import class_column, from_json
from privagrad.estimators._tables import BoundsLike, Given, SchemaLike, edges_of
from privagrad.glm.losses import Loss
from privagrad.glm.rows import SparseRows
from privagrad.privacy.noise import Noise, RandomState

ClassWeight = Literal["balanced"] | dict[Any, float] | None


class PrivateLinearClassifier(ClassifierMixin, PrivateLinearEstimator):  # type: ignore[misc]
    classes: Any
    class_weight: ClassWeight = None  # of estimators that were pickled without it

    def __init__(
        self, epsilon: float = 1.0, *, delta: float | None = None, classes: Any = None,
        bounds: BoundsLike = None, fit_intercept: bool = True, steps: int | None = None,
        batch_size: int | None = None, step_size: float | None = None,
        radius: float | None = None, random_state: RandomState = None,
        verbose: bool | None = None, noise: Noise = "gaussian",
        class_weight: ClassWeight = None, schema: SchemaLike = None, ledger: LedgerLike = None,
        dataset: str | None = None, evaluate: bool = False,
    ) -> None:  # fmt: skip
        self._assign(locals())

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.classifier_tags.poor_score = True  # on the few dozen rows of scikit-learn's checks
        return tags

    def _target(self, given: Given) -> tuple[Column, Vector]:
        classes = self._classes(given.labels)
        codes = np.searchsorted(classes, given.y).astype(np.float64)
        sparse = isinstance(given.rows, SparseRows)
        return class_column(given.target, classes, sparse=sparse), codes

    def _labels(self, given: Given) -> NDArray[Any]:
        return self._classes(given.labels)

    def _stated_classes(self) -> NDArray[Any] | None:
        return None if self.classes is None else np.asarray(self.classes)

    def _class_weights(self, labels: NDArray[Any] | None) -> Vector | Literal["balanced"] | None:
        given = self.class_weight
        if given is None:
            return None
        if isinstance(given, str) and given == "balanced":
            return "balanced"
        if not isinstance(given, dict):
            raise ValueError(
                "Expected class_weight None, 'balanced' or a dict of labels and weights, found "
                f"{given!r}."
            )
        if labels is None:
            raise ValueError(
                "Expected stated classes for a dict class_weight, found classes that are to be "
                "discovered. State them in the schema, or with classes=. Nothing was spent."
            )
        if strange := [label for label in given if label not in labels]:
            raise ValueError(
                f"Expected class_weight to have labels among {labels.tolist()}, found {strange}."
            )
        weights = [given.get(label, 1.0) for label in labels.tolist()]
        return np.array([validate.positive("class_weight", weight) for weight in weights])

    def _take(self, model: SavedModel) -> None:
        labels = from_json(model.made, list(model.classes or ()))
        order = np.argsort(labels)
        two, sorted_already = len(model.intercept) == 1, bool((order[1:] > order[:-1]).all())
        sign, rows = 1.0, slice(None) if two or sorted_already else order
        if two and not sorted_already:
            sign = -1.0  # the model's second class is the first one in order
        self.classes_ = labels[order]
        self.coef_, self.intercept_ = sign * model.coef[rows], sign * model.intercept[rows]
        self.coef_noise_, self.intercept_noise_ = (
            model.coef_noise[rows],
            model.intercept_noise[rows],
        )

    def _row_scores(self, given: Given) -> NDArray[np.float64]:
        """1 where the prediction is right, else 0. Not private."""
        return np.asarray(self._predicted(self._margins(given.rows)) == given.y, dtype=np.float64)

    def decision_function(self, X: Any) -> NDArray[np.float64]:
        """Margins: of shape (n,) for two classes, (n, k) for k > 2 classes."""
        margins = self._margins_of(X)
        return margins[:, 0] if margins.shape[1] == 1 else margins

    def predict(self, X: Any) -> NDArray[Any]:
        """The class of the largest margin for each row."""
        return self._predicted(self._margins_of(X))

    def _predicted(self, margins: NDArray[np.float64]) -> NDArray[Any]:
        two = margins.shape[1] == 1
        labels: NDArray[Any] = self.classes_[
            (margins[:, 0] > 0).astype(int) if two else margins.argmax(axis=1)
        ]
        return labels

    def _classes(self, labels: NDArray[Any]) -> NDArray[Any]:
        stated = labels if self.classes is None else np.unique(np.asarray(self.classes))
        unknown = np.setdiff1d(labels, stated)
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


class PrivateLogisticRegression(PrivateLinearClassifier):
    """Logistic regression under differential privacy, without tuning; softmax for k > 2 classes.

    Parameters
    ----------
    epsilon : float
        The budget. It pays for everything: scales of columns, norms of rows, training.
        ``float("inf")`` means no privacy.
    delta : float or None
        Probability that the guarantee may fail; None: the smaller of 1e-5 and 1/(10 n).
    classes : list or None
        All labels that can occur; None: the set of labels in y, which is then public. With a
        `schema` None means the categories that it states, or else labels are discovered privately.
    bounds : tuple (low, high), dict or None
        Bounds of the columns that are known without looking at the rows; each is one number, or
        one number for each column. Entries are clipped to them, and no budget is spent on
        finding ranges. A dict such as ``{"age": (0, 120)}`` states those of some columns, by name
        or number; an end may be None.
    fit_intercept : bool
        Whether to add a constant; without it columns are not centred.
    steps : int or None
        Number of steps; None, here and below: the recipe chooses.
    batch_size : int or None
        Expected number of rows of a step.
    step_size : float or None
        How far the noise of all steps together may move the margin of a typical row, which
        sets their length; with weights of two classes up to a third less.
    radius : float or None
        Bound on gradients, in units of the median norm of a row.
    random_state : None, int, Generator or RandomState
        None draws secure noise; a seed makes a fit repeatable and NOT private.
    verbose : bool or None
        Whether to show a progress bar; None: on a terminal, after two seconds.
    noise : {"gaussian", "discrete"}
        Gaussian noise rounded to a grid, or an exact discrete Gaussian: slower, at the same cost,
        without any rounding in the noise.
    class_weight : {"balanced"}, dict or None
        Weights of the classes, by label; what is not listed weighs 1. "balanced": inverse to the
        frequencies of the classes, at most 1 to 50, which one more release learns. Predictions
        and probabilities are then those for classes of equal frequency.
    schema : Schema, path or None
        What is public about the columns of a data frame, or the path of a schema.toml. X is then a
        pandas, Polars or Arrow table with text, categories, dates, booleans and missing values,
        which are read as ``privagrad fit`` reads a file. None: X holds finite numbers alone.
    ledger : Ledger, path or None
        The file of budgets; None: the default one, if `dataset` is given.
    dataset : str or None
        The budget in the ledger that every fit is charged to, before its first release. A fit that
        does not fit into it is refused. None: fits are not charged to any budget.
    evaluate : bool
        Whether the same epsilon pays for an evaluation on the training rows and for a better
        statement of the noise in the coefficients, as in ``privagrad fit``.

    Attributes
    ----------
    coef_ : array of shape (1, d) or (k, d)
        Coefficients in the units of the columns.
    intercept_ : array of shape (1,) or (k,)
        Intercepts.
    coef_noise_, intercept_noise_ : arrays of the same shapes
        Standard deviations of the noise in them; without `evaluate` upper bounds.
    evaluation_ : Evaluation or None
        How well the model fits the training rows, privately; None without `evaluate`.
    model_ : SavedModel
        The whole model, as `save` writes it.
    classes_ : array of shape (k,)
        Labels in order.
    privacy_ : PrivacyReport
        What the fit cost, with every release as an event.
    n_iter_ : int
        Number of steps.
    n_features_in_ : int
        Number of columns.
    feature_names_in_ : array of shape (d,)
        Names of the columns, where X had names.

    Notes
    -----
    All fitted attributes together satisfy ``privacy_``. Public are: the number of rows and
    columns, the columns' names, the set of labels, all parameters, and whether the table is
    sparse. With a `schema`, labels and categories that it leaves open are discovered privately. Do
    not take parameters from the rows.
    """

    _loss = Loss("logistic")
    _losses = ("logistic", "softmax")

    def predict_proba(self, X: Any) -> NDArray[np.float64]:
        """Probabilities of the classes in the order of `classes_`, of shape (n, k).

        They are calibrated on the training rows, by a query that `privacy_` lists.
        """
        margins = self._margins_of(X)
        if margins.shape[1] == 1:
            right = expit(margins[:, 0])
            return np.column_stack([1 - right, right])
        probabilities: NDArray[np.float64] = softmax(margins, axis=1)
        return probabilities

    def predict_log_proba(self, X: Any) -> NDArray[np.float64]:
        """Logarithms of `predict_proba`."""
        return np.log(self.predict_proba(X))


class PrivateLinearSVC(PrivateLinearClassifier):
    """A linear support vector classifier under differential privacy, without tuning.

    It minimises the hinge loss for two classes and Crammer and Singer's loss for more. Parameters,
    attributes and guarantees are those of `PrivateLogisticRegression`.
    """

    _loss = Loss("hinge")
    _losses = ("hinge", "multiclass-hinge")


class PrivateLinearRegressor(RegressorMixin, PrivateLinearEstimator):  # type: ignore[misc]
    target_bounds: BoundsLike

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.regressor_tags.poor_score = True  # on the few dozen rows of scikit-learn's checks
        return tags

    def _target(self, given: Given) -> tuple[Column, Vector]:
        targets, column = np.asarray(given.y, dtype=np.float64), Column(given.target)
        if edges := edges_of("target_bounds", self.target_bounds, 1):
            targets = np.clip(targets, *edges)
            column = replace(column, low=float(edges[0][0]), high=float(edges[1][0]))
        return column, targets

    def _stated_classes(self) -> None:
        return None

    def _class_weights(self, labels: NDArray[Any] | None) -> None:
        return None

    def _take(self, model: SavedModel) -> None:
        self.coef_, self.intercept_ = model.coef[0], float(model.intercept[0])
        self.coef_noise_ = model.coef_noise[0]
        self.intercept_noise_ = float(model.intercept_noise[0])
        scale = model.made.get("target_scale") or model.evaluation.get("scale") or (0.0, 1.0)
        self.target_unit_ = float(scale[1])

    def _row_scores(self, given: Given) -> NDArray[np.float64]:
        """1 minus the loss over the loss at four standard deviations, at least 0. Not private."""
        loss, unit = self._loss, self.target_unit_
        losses = loss.value(self._margins(given.rows) / unit, given.y / unit)
        return np.clip(1 - losses / (4 * loss.lipschitz), 0.0, 1.0)

    def predict(self, X: Any) -> NDArray[np.float64]:
        """X @ coef_ + intercept_, of shape (n,)."""
        return self._margins_of(X)


class PrivateQuantileRegressor(PrivateLinearRegressor):
    """Quantile regression under differential privacy, without tuning; the median by default.

    The parameters that are not listed here, the attributes and the guarantees are those of
    `PrivateLogisticRegression`, without classes. ``coef_`` has shape (d,), and ``intercept_`` is
    a number. The centre and the scale of the target are learned from the same epsilon.

    Parameters
    ----------
    quantile : float
        In (0, 1).
    target_bounds : tuple (low, high) or None
        Bounds of the target that are known without looking at the rows. Targets are clipped to
        them, and less budget is spent on finding their range.

    Attributes
    ----------
    target_unit_ : float
        The scale of the target, from the same budget.
    """

    quantile: float
    _losses = ("quantile",)

    def __init__(
        self, epsilon: float = 1.0, *, quantile: float = 0.5, delta: float | None = None,
        bounds: BoundsLike = None, target_bounds: BoundsLike = None, fit_intercept: bool = True,
        steps: int | None = None, batch_size: int | None = None, step_size: float | None = None,
        radius: float | None = None, random_state: RandomState = None, verbose: bool | None = None,
        noise: Noise = "gaussian",
        schema: SchemaLike = None, ledger: LedgerLike = None, dataset: str | None = None,
        evaluate: bool = False,
    ) -> None:  # fmt: skip
        self._assign(locals())

    @property
    def _loss(self) -> Loss:
        return Loss("quantile", self.quantile)


class PrivateHuberRegressor(PrivateLinearRegressor):
    """Huber regression under differential privacy, without tuning.

    The parameters that are not listed here, the attributes and the guarantees are those of
    `PrivateQuantileRegressor`.

    Parameters
    ----------
    epsilon : float
        The privacy budget. (scikit-learn's HuberRegressor calls the bend `epsilon`.)
    bend : float
        Where the loss turns from square to linear, in standard deviations of the target.
    """

    bend: float
    _losses = ("huber",)

    def __init__(
        self, epsilon: float = 1.0, *, bend: float = 1.35, delta: float | None = None,
        bounds: BoundsLike = None, target_bounds: BoundsLike = None, fit_intercept: bool = True,
        steps: int | None = None, batch_size: int | None = None, step_size: float | None = None,
        radius: float | None = None, random_state: RandomState = None, verbose: bool | None = None,
        noise: Noise = "gaussian",
        schema: SchemaLike = None, ledger: LedgerLike = None, dataset: str | None = None,
        evaluate: bool = False,
    ) -> None:  # fmt: skip
        self._assign(locals())

    @property
    def _loss(self) -> Loss:
        return Loss("huber", self.bend)
