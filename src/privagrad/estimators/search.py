"""Private choice of hyper-parameters, with every run in the budget."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from typing import Any, Self, cast

import numpy as np
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, MetaEstimatorMixin, clone
from sklearn.utils.metaestimators import available_if
from sklearn.utils.validation import check_is_fitted

from privagrad._internal import validate
from privagrad.data.matrices import MatrixTable
from privagrad.estimators._base import PrivateLinearEstimator, estimator_source
from privagrad.estimators._repeats import warn_of_repeated_fit
from privagrad.estimators._tables import Given, name_columns, users_of
from privagrad.fitting import FitSettings, check_settings, first_plan, prepare_table
from privagrad.linear import Choices, Plan, default_delta, warn_if_hopeless
from privagrad.privacy.accounting import PrivacyPlan
from privagrad.privacy.events import GaussianEvent, SelectEvent
from privagrad.privacy.mechanism import GaussianSum
from privagrad.privacy.noise import RandomSource, RandomState
from privagrad.queries.columns import Share, query_event
from privagrad.report.card import StatementLike

_SCORED = 0.2
_SCORE = Share("score", 0.15)
_OWN = ("epsilon", "delta", "random_state", "noise")
_NOT_SEARCHED = ("schema", "ledger", "dataset", "evaluate")
_CHOICES = {field.name for field in fields(Choices)}


@dataclass(frozen=True)
class Candidate:
    """A setting of the parameters to try, and the table and the settings of a fit under it."""

    setting: dict[str, Any]
    table: MatrixTable
    settings: FitSettings


@dataclass(frozen=True)
class RunPlan:
    """One run before it happens: the budget and plan of its fit, and its noisy score.

    All candidates release the same. `selection` holds the releases of all runs together.
    """

    epsilon: float
    fit: Plan
    score: GaussianEvent
    selection: SelectEvent


class PrivateSearch(MetaEstimatorMixin, BaseEstimator):  # type: ignore[misc]
    """The best of a random number of private fits, by a noisy score on held-out rows.

    Each run draws one setting of `candidates`, fits on four fifths of the rows and is scored with
    noise on the others. One `epsilon` pays for all runs (repeat-and-select, Papernot and Steinke
    2022), so each run's own budget is a fraction of it: about a third at ten runs. Search only
    where the estimators' own choices are known to be wrong.

    Parameters
    ----------
    estimator : estimator
        One of privagrad's estimators, without schema, ledger, dataset and evaluate. Its own
        epsilon, delta and random_state are not used; its kind of noise is that of the whole search.
    candidates : dict
        Names of parameters and the values to try, for example
        ``{"step_size": [0.3, 1, 3], "radius": [0.1, 0.3]}``. They must not change what a fit
        releases: `steps`, `batch_size` and `bounds` stay as they are.
    epsilon : float
        The budget of the whole search.
    delta : float or None
        Probability that the guarantee may fail; None: the smaller of 1e-5 and 1/(10 n).
    mean_runs : float
        Mean of the number of runs, which is geometric; above 1.
    random_state : None, int, Generator or RandomState
        None draws secure noise; a seed makes a search repeatable and NOT private.

    Attributes
    ----------
    best_estimator_ : estimator
        The fitted estimator of the best run. Its `privacy_`, its report, its card and its file
        state the cost of the whole search.
    best_params_ : dict
        Its setting of the candidates.
    best_score_ : float
        Its noisy score.
    privacy_ : PrivacyReport
        What the whole search cost.

    Notes
    -----
    The attributes together satisfy ``privacy_`` as long as the number of runs stays secret. It is
    not kept, and runs show no progress bars and no warnings. But the time that a search takes
    reveals it: do not publish that time.
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

    def fit(self, X: Any, y: Any, *, groups: Any = None) -> Self:
        """Search on rows and targets.

        Parameters
        ----------
        X : array, CSR matrix or data frame of shape (n, d)
            The rows, as for `fit` of the estimator.
        y : array of shape (n,)
            The targets.
        groups : array of shape (n,), optional
            The user of each row, as for `fit` of the estimator: a user's rows are all fitted, or
            all held out.
        """
        epsilon = validate.positive("epsilon", self.epsilon)
        if validate.positive("mean_runs", self.mean_runs) <= 1:
            raise ValueError(f"Expected mean_runs > 1, found {self.mean_runs!r}.")
        self._check_candidates()
        source = estimator_source(self.random_state, self.estimator.noise)
        users = users_of(groups, X, y)
        given: Given = replace(clone(self.estimator)._read(X, y), users=users)
        n = given.y.size if users is None else users.count
        delta = default_delta(n) if self.delta is None else validate.delta_of(self.delta, n)
        train, test = _split(given, source)
        candidates = self._posed(train)
        run = calibrated_run(candidates, float(self.mean_runs), epsilon, delta)
        fitted_table = candidates[0].table
        warn_if_hopeless(fitted_table.n, run.epsilon, run.fit.relative_noise, fitted_table.unit)
        if not source.seeded:
            everything = np.zeros(given.y.size)
            warn_of_repeated_fit(replace(fitted_table, given=given.rows, y=everything))
        best: tuple[float, dict[str, Any], Any] = (-math.inf, {}, None)
        # Whatever a run prints or warns of would tell how many runs there are.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for _ in range(int(source.sampler.geometric(1 / self.mean_runs))):
                candidate = candidates[source.sampler.integers(len(candidates))]
                fitted = self._fitted(candidate, train.labels, run, source)
                score = _noisy_mean(_scores(fitted, test), run.score, source)
                if score > best[0]:
                    best = (score, candidate.setting, fitted)
        self.best_score_, self.best_params_, self.best_estimator_ = best
        self.best_estimator_.set_params(verbose=self.estimator.verbose)
        name_columns(self.best_estimator_, X)
        plan = PrivacyPlan((run.selection,), training=run.selection.purpose)
        self.privacy_ = plan.report(delta, seeded=source.seeded, noise=source.noise)
        self.best_estimator_._charge(self.privacy_, n)
        return self

    def predict(self, X: Any) -> NDArray[Any]:
        """Predictions of the best run's model."""
        check_is_fitted(self, "best_estimator_")
        return self.best_estimator_.predict(X)  # type: ignore[no-any-return]

    @available_if(lambda search: hasattr(search.estimator, "predict_proba"))  # type: ignore[untyped-decorator]
    def predict_proba(self, X: Any) -> NDArray[np.float64]:
        """Probabilities by the best run's model."""
        check_is_fitted(self, "best_estimator_")
        return self.best_estimator_.predict_proba(X)  # type: ignore[no-any-return]

    def score(self, X: Any, y: Any) -> float:
        """The best model's score on other rows. Not private."""
        check_is_fitted(self, "best_estimator_")
        return float(self.best_estimator_.score(X, y))

    def card(self, statement: StatementLike = None) -> dict[str, Any]:
        """The privacy card of the whole search: see ``privagrad.report.card``.

        Parameters
        ----------
        statement : Statement or path or None
            What only the owner of the data can say. Without it, these questions stay open.
        """
        check_is_fitted(self, "best_estimator_")
        best: PrivateLinearEstimator = self.best_estimator_
        return best.card(statement)

    def _check_candidates(self) -> None:
        if not isinstance(self.estimator, PrivateLinearEstimator):
            raise TypeError(
                f"Expected one of privagrad's estimators, found {type(self.estimator).__name__}."
            )
        if not self.candidates:
            raise ValueError("Expected candidates such as {'step_size': [0.3, 1, 3]}, found none.")
        told = self.estimator.get_params(deep=False)
        if kept := [name for name in _NOT_SEARCHED if told.get(name) or name in self.candidates]:
            raise ValueError(
                f"Expected an estimator without {', '.join(kept)} for a search, found them: a "
                "search takes arrays, and its cost is that of all its runs together. Leave them "
                "out, and charge `privacy_.events` of the search to a budget yourself "
                "(`Ledger.reserve`)."
            )
        if own := [name for name in _OWN if name in self.candidates]:
            raise ValueError(
                f"Expected candidates without {', '.join(own)}: {', '.join(_OWN)} are the same in "
                "every run of a search. Leave them out."
            )

    def _estimator(self, **parameters: Any) -> PrivateLinearEstimator:
        made: PrivateLinearEstimator = clone(self.estimator).set_params(**parameters)
        return made

    def _fitted(
        self, candidate: Candidate, labels: NDArray[Any], run: RunPlan, source: RandomSource
    ) -> PrivateLinearEstimator:
        seed = int(source.sampler.integers(2**62)) if source.seeded else None
        budget: dict[str, Any] = {
            "epsilon": run.epsilon,
            "delta": run.fit.delta,
            "random_state": seed,
        }
        estimator = self._estimator(**{**candidate.setting, **budget, "verbose": False})
        settings = replace(candidate.settings, **budget)
        return estimator._fit_job(prepare_table(candidate.table, settings), lambda _: labels)

    def _posed(self, given: Given) -> list[Candidate]:
        """All candidates. Those that differ in choices for the fit alone share one table."""
        tables: dict[tuple[int, ...], MatrixTable] = {}
        posed = []
        for numbered in product(*(enumerate(values) for values in self.candidates.values())):
            values = dict(zip(self.candidates, numbered, strict=True))
            setting = {name: value for name, (_, value) in values.items()}
            estimator = self._estimator(**setting)
            key = tuple(number for name, (number, _) in values.items() if name not in _CHOICES)
            if key not in tables:
                tables[key] = estimator._table(given)
            settings = estimator._settings(estimator._labels(given))
            check_settings(tables[key], settings)
            posed.append(Candidate(setting, tables[key], settings))
        if not posed:
            raise ValueError(
                f"Expected at least one value of every candidate, found {self.candidates!r}."
            )
        return posed


def calibrated_run(
    candidates: Sequence[Candidate], mean_runs: float, epsilon: float, delta: float
) -> RunPlan:
    """A run with a budget as large as the budget of the search allows, from public facts alone."""

    def excess(log_run: float) -> float:
        selection = planned_run(candidates, mean_runs, math.exp(log_run), delta).selection
        return PrivacyPlan((selection,)).epsilon(delta) - epsilon

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
    return planned_run(candidates, mean_runs, math.exp(low), delta)


def planned_run(
    candidates: Sequence[Candidate], mean_runs: float, epsilon: float, delta: float
) -> RunPlan:
    """A run with the given budget of its fit."""
    plans = [
        first_plan(one.table, replace(one.settings, epsilon=epsilon), delta) for one in candidates
    ]
    releases = {plan.privacy.events for plan in plans}
    if len(releases) != 1:
        raise ValueError(
            "Expected candidates that release the same, found some that differ in their "
            f"events: leave {', '.join(candidates[0].setting)} to fits of their own, or search "
            "over step_size and radius alone."
        )
    score = query_event(_SCORE, epsilon, delta, "zero-out")
    score = replace(score, unit=candidates[0].table.unit)
    events = cast(tuple[GaussianEvent, ...], releases.pop())  # SelectEvent refuses others
    return RunPlan(epsilon, plans[0], score, SelectEvent((*events, score), mean_runs))


def _split(given: Given, source: RandomSource) -> tuple[Given, Given]:
    """The rows to fit and the rows to score, drawn without looking at them; a user's together."""
    n, what = given.y.size, "rows"
    if given.users is not None:
        n, what = given.users.count, "users"
    held_out = source.sampler.random(n) < _SCORED
    if not 0 < held_out.sum() <= n - 2:
        raise ValueError(
            f"Expected enough {what} to fit two and hold some out, found {n}: add {what}."
        )
    if given.users is not None:
        held_out = held_out[given.users.numbers]
    return given.take(np.flatnonzero(~held_out)), given.take(np.flatnonzero(held_out))


def _scores(fitted: PrivateLinearEstimator, test: Given) -> NDArray[np.float64]:
    """The score of every row; with users, of every user the mean of the scores of the user's rows.

    A user's depends on nothing but the user's rows, which are added up in their order.
    """
    scores = np.clip(fitted._row_scores(test), 0.0, 1.0)
    if test.users is None:
        return scores
    numbers, count = test.users.numbers, test.users.count
    return np.bincount(numbers, scores, count) / np.bincount(numbers, minlength=count)


def _noisy_mean(scores: NDArray[np.float64], event: GaussianEvent, source: RandomSource) -> float:
    """The mean of numbers in [0, 1], released as one Gaussian event; 0 for those that are not."""
    mechanism = GaussianSum(1, event.noise_multiplier, scores.size)
    total = mechanism.sum()
    total.add(np.clip(scores, 0.0, 1.0)[:, None])
    return float(mechanism.release(total, source)[0])
