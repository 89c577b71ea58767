"""Private choice of hyper-parameters with an honest price."""

from __future__ import annotations

import math
import warnings
from itertools import product
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, MetaEstimatorMixin, clone
from sklearn.utils.metaestimators import available_if
from sklearn.utils.validation import check_is_fitted

from privagrad._internal import validate
from privagrad.estimators._base import PrivateLinearEstimator, estimator_source
from privagrad.geometry.ellipsoid import Ellipsoid
from privagrad.linear import default_delta
from privagrad.privacy.accounting import PrivacyPlan, PrivacyReport
from privagrad.privacy.events import GaussianEvent, SelectEvent
from privagrad.privacy.mechanism import GaussianSum, bounded_units
from privagrad.privacy.noise import RandomSource, RandomState
from privagrad.queries.columns import Share, query_events

_SCORED = 0.2
_SCORE = (Share("score", 0.15),)


def _best_has(name: str) -> Any:
    return available_if(lambda search: hasattr(search.estimator, name))


class PrivateSearch(MetaEstimatorMixin, BaseEstimator):  # type: ignore[misc]
    """The best of a random number of private fits, by a noisy score on rows held out.

    Each run draws one setting of `candidates`, fits on four fifths of the rows and is scored with
    noise on the others. One `epsilon` pays for all runs (repeat-and-select, Papernot and Steinke
    2022), so each run's own budget is a fraction of it: about a third at ten runs. Search only
    where the estimators' own choices are known to be wrong.

    Parameters
    ----------
    estimator : a private estimator; its own epsilon, delta and random_state are not used
    candidates : names of parameters and the values to try, for example
        ``{"step_size": [0.3, 1, 3], "radius": [0.1, 0.3]}``. They must not change what a fit
        releases: `steps`, `batch_size`, `bounds` stay as they are.
    epsilon, delta : the budget of the whole search
    mean_runs : how many runs on average; their number is geometric
    random_state : None for secure randomness; a seed makes it repeatable and NOT private

    Attributes
    ----------
    best_estimator_, best_params_, best_score_ : of the best run; the score is the noisy one
    privacy_ : PrivacyReport of the search; that of `best_estimator_` tells of its run alone

    Guarantees
    ----------
    The attributes together satisfy ``privacy_`` as long as the number of runs stays secret. It is
    not kept, and runs show no progress bars and no warnings; but the time that a search takes
    tells it. Do not publish that.
    """

    def __init__(
        self,
        estimator: PrivateLinearEstimator,
        candidates: dict[str, Any],
        *,
        epsilon: float = 1.0,
        delta: float | None = None,
        mean_runs: float = 10.0,
        random_state: RandomState = None,
    ) -> None:
        self.estimator = estimator
        self.candidates = candidates
        self.epsilon = epsilon
        self.delta = delta
        self.mean_runs = mean_runs
        self.random_state = random_state

    def fit(self, X: Any, y: Any) -> Self:
        """Search on rows X and targets y."""
        epsilon = validate.positive("epsilon", self.epsilon)
        if validate.positive("mean_runs", self.mean_runs) <= 1:
            raise ValueError(f"Expected mean_runs > 1, found {self.mean_runs!r}.")
        settings = self._settings()
        source = estimator_source(self.random_state)
        X, y = _indexable(X), np.asarray(y)
        n = X.shape[0]
        delta = default_delta(n) if self.delta is None else validate.delta_of(self.delta, n)
        held_out = source.sampler.random(n) < _SCORED
        if held_out.all() or not held_out.any():
            raise ValueError(f"Expected enough rows to hold some out, found {n}.")
        train, test = np.flatnonzero(~held_out), np.flatnonzero(held_out)
        run, total = self._calibrated(X[train], y[train], settings, epsilon, delta)
        self._at(run, delta, settings[0], None).warn_if_hopeless(X[train], y[train])
        best: tuple[float, dict[str, Any], Any] = (-math.inf, {}, None)
        # Whatever a run prints or warns of would tell how many runs there are.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for _ in range(int(source.sampler.geometric(1 / self.mean_runs))):
                setting = settings[source.sampler.integers(len(settings))]
                fitted = self._at(run, delta, setting, source).fit(X[train], y[train])
                score = _noisy_mean(fitted.row_scores(X[test], y[test]), total.events[-1], source)
                if score > best[0]:
                    best = (score, setting, fitted)
        self.best_score_, self.best_params_, self.best_estimator_ = best
        self.best_estimator_.set_params(verbose=self.estimator.verbose)
        plan = PrivacyPlan((total,))
        self.privacy_ = PrivacyReport(
            plan.epsilon(delta), delta, plan.relation, total.sampling, plan.accountant,
            plan.events, source.seeded,
        )  # fmt: skip
        return self

    def predict(self, X: Any) -> NDArray[Any]:
        """Predictions of the best run's model."""
        check_is_fitted(self, "best_estimator_")
        return self.best_estimator_.predict(X)  # type: ignore[no-any-return]

    @_best_has("predict_proba")  # type: ignore[untyped-decorator]
    def predict_proba(self, X: Any) -> NDArray[np.float64]:
        """Probabilities by the best run's model."""
        check_is_fitted(self, "best_estimator_")
        return self.best_estimator_.predict_proba(X)  # type: ignore[no-any-return]

    def score(self, X: Any, y: Any) -> float:
        """The best model's score on other rows. Not private."""
        check_is_fitted(self, "best_estimator_")
        return float(self.best_estimator_.score(X, y))

    def _settings(self) -> list[dict[str, Any]]:
        if not isinstance(self.estimator, PrivateLinearEstimator):
            raise TypeError(
                f"Expected one of privagrad's estimators, found {type(self.estimator).__name__}."
            )
        if not self.candidates:
            raise ValueError("Expected candidates such as {'step_size': [0.3, 1, 3]}, found none.")
        names = list(self.candidates)
        return [
            dict(zip(names, values, strict=True)) for values in product(*self.candidates.values())
        ]

    def _at(
        self, epsilon: float, delta: float, setting: dict[str, Any], source: RandomSource | None
    ) -> PrivateLinearEstimator:
        seed = int(source.sampler.integers(2**62)) if source and source.seeded else None
        made: PrivateLinearEstimator = clone(self.estimator).set_params(
            epsilon=epsilon, delta=delta, random_state=seed, **{**setting, "verbose": False}
        )
        return made

    def _calibrated(
        self, X: Any, y: Any, settings: list[dict[str, Any]], epsilon: float, delta: float
    ) -> tuple[float, SelectEvent]:
        """The largest epsilon of one run, and the event of all, within the budget."""

        def event_at(run: float) -> SelectEvent:
            found = {self._events(run, delta, setting, X, y) for setting in settings}
            if len(found) > 1:
                raise ValueError(
                    "Expected candidates that release the same, found some that differ in their "
                    f"events: leave {', '.join(self.candidates)} to fits of their own, or search "
                    "over step_size and radius alone."
                )
            score = query_events(_SCORE, run, delta, "zero-out")
            return SelectEvent((*found.pop(), *score), float(self.mean_runs))

        def excess(log_run: float) -> float:
            return PrivacyPlan((event_at(math.exp(log_run)),)).epsilon(delta) - epsilon

        high = math.log(epsilon)
        low = high - 1.0
        while excess(low) > 0:
            high, low = low, low - 1.0
            if low < math.log(epsilon) - 8:
                raise ValueError(
                    f"No budget of one run keeps the search within epsilon={epsilon:g}: raise "
                    "epsilon, or lower mean_runs."
                )
        for _ in range(6):
            middle = (low + high) / 2
            low, high = (middle, high) if excess(middle) <= 0 else (low, middle)
        return math.exp(low), event_at(math.exp(low))

    def _events(
        self, run: float, delta: float, setting: dict[str, Any], X: Any, y: Any
    ) -> tuple[GaussianEvent, ...]:
        made = clone(self.estimator).set_params(epsilon=run, delta=delta, **setting)
        return made.planned_events(X, y)  # type: ignore[no-any-return]


def _indexable(X: Any) -> Any:
    if hasattr(X, "tocsr"):
        return X.tocsr()
    return X if isinstance(X, np.ndarray) else np.asarray(X)


def _noisy_mean(scores: NDArray[np.float64], event: GaussianEvent, source: RandomSource) -> float:
    """The mean of numbers in [0, 1], released as one Gaussian event; 0 for those that are not."""
    mechanism = GaussianSum(1, event.noise_multiplier, scores.size)
    units, _, _ = bounded_units(np.clip(scores, 0.0, 1.0)[:, None], mechanism.grid)
    return float(mechanism.release(units, Ellipsoid.ball(1, 1.0), source)[0])
