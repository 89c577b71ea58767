import inspect
import pickle
import warnings
from typing import Any, ClassVar

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from scipy.sparse import csr_array, csr_matrix
from sklearn.base import clone
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer
from sklearn.utils.estimator_checks import parametrize_with_checks

import privagrad as pg
from privagrad.estimators._base import PrivateLinearEstimator
from privagrad.experiments.problems import absolute_regression
from privagrad.linear import recipe
from privagrad.methods import oracle
from privagrad.privacy import mechanism, sampling
from privagrad.privacy.events import GaussianEvent
from privagrad.privacy.mechanism import GaussianSum
from privagrad.privacy.releases import Releases
from privagrad.privacy.sampling import Batches
from privagrad.queries import calibration, moments, second_moments
from privagrad.queries import columns as queries

CLASSIFIERS: list[type[PrivateLinearEstimator]] = [
    pg.PrivateLogisticRegression,
    pg.PrivateLinearSVC,
]
REGRESSORS: list[type[PrivateLinearEstimator]] = [
    pg.PrivateQuantileRegressor,
    pg.PrivateHuberRegressor,
    pg.PrivateRidge,
]
ALL = CLASSIFIERS + REGRESSORS
BALANCED: list[tuple[type[PrivateLinearEstimator], dict[str, Any]]] = [
    (cls, {"class_weight": "balanced"}) for cls in CLASSIFIERS
]


def table(n=4000, dim=6, seed=0):
    """Raw columns: units from 1e-3 to 1e3, means up to ten spreads away from 0."""
    rng = np.random.default_rng(seed)
    X = rng.standard_normal((n, dim)) + np.linspace(0, 10, dim)
    signal = (X - np.linspace(0, 10, dim)) @ np.linspace(1, -1, dim)
    return X * np.geomspace(1e-3, 1e3, dim), signal + 0.3 * rng.standard_normal(n)


def labels(signal, classes=2):
    edges = np.quantile(signal, np.arange(1, classes) / classes)
    return np.digitize(signal, edges)


def target_of(cls, signal):
    return labels(signal) if cls in CLASSIFIERS else 500 + 100 * signal


@pytest.mark.filterwarnings("ignore")
@parametrize_with_checks([cls() for cls in ALL])
def test_scikit_learns_own_checks(estimator, check):
    check(estimator)


@pytest.mark.parametrize("cls", ALL)
def test_raw_columns_are_learned_at_epsilon_one(cls):
    X, signal = table(n=8000)
    y = target_of(cls, signal)
    model = cls(random_state=0).fit(X[:6000], y[:6000])
    assert model.score(X[6000:], y[6000:]) > 0.85
    assert model.coef_.shape == ((1, 6) if cls in CLASSIFIERS else (6,))


@pytest.mark.parametrize("cls", CLASSIFIERS)
@pytest.mark.parametrize("layout", [np.asarray, csr_array])
def test_several_classes(cls, layout):
    X, signal = table(n=8000)
    y = np.array(["low", "middle", "high"])[labels(signal, 3)]
    model = cls(random_state=0).fit(layout(X[:6000]), y[:6000])
    assert model.coef_.shape == (3, 6)
    assert list(model.classes_) == ["high", "low", "middle"]
    assert model.score(layout(X[6000:]), y[6000:]) > 0.75
    if cls is pg.PrivateLogisticRegression:
        probabilities = model.predict_proba(X[:10])
        assert probabilities.sum(axis=1) == pytest.approx(1)


def test_without_privacy_it_is_logistic_regression():
    X, signal = table(n=3000)
    y = labels(signal)
    units = X.std(axis=0)
    ours = pg.PrivateLogisticRegression(np.inf, steps=1000).fit(X, y)
    theirs = LogisticRegression(C=1e6, max_iter=1000).fit(X / units, y)
    agreed = ours.predict(X) == theirs.predict(X / units)
    assert agreed.mean() > 0.98
    assert ours.privacy_.epsilon == np.inf


@pytest.mark.parametrize("fit_intercept", [True, False])
@pytest.mark.parametrize("cls", ALL)
def test_predictions_are_linear_in_original_units(cls, fit_intercept):
    X, signal = table(n=500)
    y = target_of(cls, signal)
    model = cls(8.0, fit_intercept=fit_intercept, random_state=0).fit(X, y)
    margins = X @ np.atleast_2d(model.coef_).T + model.intercept_
    shown = model.decision_function(X) if cls in CLASSIFIERS else model.predict(X)
    assert shown == pytest.approx(margins[:, 0])
    assert fit_intercept or np.all(model.intercept_ == 0)


@pytest.mark.parametrize("cls", ALL)
def test_all_kinds_of_tables_give_the_same_model(cls, monkeypatch):
    X, signal = table(n=300, dim=3)
    y = target_of(cls, signal)
    names = ["a", "b", "c"]
    frame = pd.DataFrame(X, columns=names)
    tables = [X, frame, pl.DataFrame(X, schema=names), pa.Table.from_pandas(frame)]
    first, *others = [cls(8.0, random_state=1).fit(kind, y) for kind in tables]
    for other in others:
        assert np.array_equal(first.coef_, other.coef_)
        assert list(other.feature_names_in_) == names
    monkeypatch.setattr(recipe, "shaped", lambda *_: False)  # sparse tables are not whitened
    first, sparse = (cls(8.0, random_state=1).fit(kind, y) for kind in (X, csr_matrix(X)))
    assert sparse.coef_ == pytest.approx(first.coef_, rel=1e-6)


@pytest.mark.parametrize("cls", ALL)
def test_units_of_columns_do_not_matter(cls):
    X, signal = table()
    y = target_of(cls, signal)
    factor = 10.0 ** np.random.default_rng(1).integers(-6, 7, X.shape[1])
    plain = cls(random_state=0).fit(X, y).score(X, y)
    wild = cls(random_state=0).fit(X * factor, y).score(X * factor, y)
    assert wild == pytest.approx(plain, abs=0.01)


@pytest.mark.parametrize(("epsilon", "most"), [(1.0, 0.0125), (4.0, 0.0104)])
def test_section_51_with_unknown_moments(epsilon, most):
    X, y, _ = absolute_regression()
    losses = []
    for seed in range(5):
        model = pg.PrivateQuantileRegressor(epsilon, delta=1e-5, random_state=seed).fit(X, y)
        losses.append(np.abs(model.predict(X) - y).mean())
    assert np.median(losses) <= most


def test_they_live_in_pipelines():
    X, signal = table(n=600, dim=3)
    y = labels(signal)
    model = make_pipeline(
        FunctionTransformer(np.cbrt), pg.PrivateLogisticRegression(8.0, random_state=0)
    )
    assert cross_val_score(clone(model), X, y, cv=3).mean() > 0.6
    fitted = model.fit(X, y)
    again = pickle.loads(pickle.dumps(fitted))
    assert np.array_equal(again.predict(X), fitted.predict(X))
    assert again[-1].privacy_ == fitted[-1].privacy_


class Recorded(GaussianSum):
    made: ClassVar[list[float]] = []

    def release(self, *arguments):
        Recorded.made.append(self.noise_multiplier)
        return super().release(*arguments)


@pytest.fixture
def releases_made(monkeypatch):
    """The purposes of all releases and, as mechanisms see them, their noise multipliers."""
    for room in (moments, queries, calibration, second_moments, oracle, mechanism):
        monkeypatch.setattr(room, "GaussianSum", Recorded)
    Recorded.made = []
    purposes: list[str] = []
    real = Releases.take

    def take(self, purpose):
        purposes.append(purpose)
        return real(self, purpose)

    monkeypatch.setattr(Releases, "take", take)
    return purposes, Recorded.made


@pytest.mark.parametrize("bounds", [None, (-1e5, 1e5)])
@pytest.mark.parametrize("fit_intercept", [True, False])
@pytest.mark.parametrize(("cls", "options"), [*((cls, {}) for cls in ALL), *BALANCED])
def test_every_release_is_an_event_of_the_report(
    cls, options, fit_intercept, bounds, releases_made
):
    """Also the other way round: leaving any event out would understate epsilon."""
    X, signal = table(n=600)
    bounded = {"target_bounds": bounds} if cls in REGRESSORS else {}
    model = cls(3.0, bounds=bounds, fit_intercept=fit_intercept, steps=7, **options, **bounded)
    model.fit(X, target_of(cls, signal))
    events, delta = model.privacy_.events, model.privacy_.delta
    purposes, noises = releases_made
    listed = [e for e in events for _ in range(e.count)]
    assert sorted(purposes) == sorted(e.purpose for e in listed)
    noise_for = {e.purpose: e.noise_multiplier for e in events}
    assert noises == [noise_for[purpose] for purpose in purposes]
    assert model.privacy_.epsilon == pg.PrivacyPlan(events).epsilon(delta)
    assert 2.99 < model.privacy_.epsilon <= 3.0
    for left_out in range(len(events)):
        fewer = events[:left_out] + events[left_out + 1 :]
        assert pg.PrivacyPlan(fewer).epsilon(delta) < 2.9995
    assert not model.privacy_.seeded


@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize("weights", [None, "balanced", "dict"])
@pytest.mark.parametrize("cls", CLASSIFIERS)
def test_the_report_lists_calibration_and_class_shares_where_they_are_released(
    cls, weights, classes, releases_made
):
    X, signal = table(n=1500)
    given = {0: 2.0} if weights == "dict" else weights
    model = cls(4.0, steps=3, class_weight=given).fit(X, labels(signal, classes))
    first = ["class shares"] * (weights == "balanced")
    # Weights of several classes shift margins, which must be log-odds for that.
    shifted = weights is not None and classes > 2
    last = ["calibration"] * (cls is pg.PrivateLogisticRegression or shifted)
    columns = [share.purpose for share in moments.COLUMNS.shares]
    queries = [*columns, "covariance", "row norms"]
    assert releases_made[0] == [*first, *queries, *["gradients"] * 3, *last]
    found = [event.purpose for event in model.privacy_.events]
    assert found == [*columns, "row norms", "covariance", *last, *first, "gradients"]


def test_large_tables_are_sampled_at_the_rate_of_the_report(monkeypatch):
    seen = []
    original = sampling.Samples.of_step

    def recorded(*arguments):
        batch = original(*arguments)
        seen.append(batch.size)
        return batch

    monkeypatch.setattr(sampling.Samples, "of_step", recorded)
    X, signal = table(n=3000)
    model = pg.PrivateLogisticRegression(batch_size=300, random_state=0).fit(X, labels(signal))
    event = model.privacy_.events[-1]
    assert isinstance(event, GaussianEvent)
    assert (event.sampling, event.batch_size, event.n_examples) == ("poisson", 300, 3000)
    assert len(seen) == event.count
    # The mean of 300 binomial counts: 6 standard errors, false alarm below 1e-8.
    assert abs(np.mean(seen) - 300) < 6 * np.sqrt(300 * 0.9 / 300)
    assert np.std(seen) > 5


def test_whole_tables_are_seen_at_every_step_where_that_is_affordable():
    assert recipe.batches(5000, 100, False, 300, None) == Batches(5000, 5000, 300, None)
    large = recipe.batches(10**6, 50, False, 100, None)
    assert (large.sampling, large.batch_size) == ("poisson", 200_000)
    huge = recipe.batches(10**7, 50, False, 100, None)
    assert (huge.sampling, huge.batch_size) == ("poisson", 2_000_000), "at least a fifth of them"
    sparse = recipe.batches(10**6, 50_000, True, 100, None)
    assert sparse.batch_size == recipe.batches(10**6, 100, False, 100, None).batch_size


def test_noise_may_move_margins_less_with_many_columns_for_each_row():
    assert recipe.reach(False, 10**6, 10) == pytest.approx(recipe.REACH, rel=1e-4)
    assert recipe.reach(False, 1000, 1000) == recipe.reach(False, 1000, 10**6) == recipe.REACH / 1.5
    assert recipe.reach(True, 1000, 1000) == recipe.TARGET_REACH
    steps = [recipe.reach(False, 1000, columns) for columns in (10, 100, 500, 1000)]
    assert steps == sorted(steps, reverse=True)


def test_more_noise_brings_units_of_rare_columns_nearer_to_deviations():
    found = [recipe.evenness(noise) for noise in (0.0, 0.0015, 0.0035, 0.012, 1.0)]
    assert found == sorted(found)
    assert (found[0], found[2]) == (0.0, 0.5)
    assert found[1] < 0.2
    assert found[3] > 0.9


def test_rows_have_the_mean_weight_of_classes_with_weights_inverse_to_their_frequencies():
    shares = np.array([0.9, 0.1])
    weights = shares.min() / shares
    ratio = float(weights[0] / weights[1])
    assert recipe.mean_weight(ratio) == pytest.approx(float(shares @ weights))
    assert recipe.mean_weight(1 / ratio) == pytest.approx(recipe.mean_weight(ratio))
    assert recipe.mean_weight(1.0) == 1.0


def test_noise_may_move_margins_less_where_weights_of_classes_differ():
    assert recipe.weighted_reach(1.2, 1.0) == 1.2
    assert recipe.weighted_reach(1.2, 1e-12) == pytest.approx(0.8)


def test_units_and_steps_follow_the_weights_of_classes(monkeypatch):
    X, signal = table(n=500, dim=3)
    units: list[float] = []
    reaches: list[float] = []
    evenness, step_size = recipe.evenness, recipe.step_size

    def seen_evenness(noise):
        units.append(noise)
        return evenness(noise)

    def seen_step_size(reach, *others):
        reaches.append(reach)
        return step_size(reach, *others)

    monkeypatch.setattr(recipe, "evenness", seen_evenness)
    monkeypatch.setattr(recipe, "step_size", seen_step_size)
    for weights in (None, {0: 0.1, 1: 1.0}):
        pg.PrivateLogisticRegression(4.0, class_weight=weights, random_state=0).fit(X, signal > 0)
    mean = recipe.mean_weight(0.1)
    assert units[1] == pytest.approx(units[0] / mean)
    assert reaches[1] == pytest.approx(recipe.weighted_reach(reaches[0], mean))


@pytest.mark.parametrize("cls", ALL)
def test_bad_input_is_named(cls):
    X, signal = table(n=50, dim=3)
    y = target_of(cls, signal)
    frame = pd.DataFrame(X, columns=["age", "pay", "hours"])
    frame.loc[3, "pay"] = np.nan
    with pytest.raises(ValueError, match=r"NaN or inf in column 'pay'.*public rule"):
        cls().fit(frame, y)
    X[4, 1] = np.inf
    with pytest.raises(ValueError, match="in column 1"):
        cls().fit(X, y)
    with pytest.raises(ValueError, match="in column 1"):
        cls().fit(csr_matrix(X), y)
    for frame in (pd.DataFrame, pl.DataFrame, pa.table):
        with pytest.raises(ValueError, match=r"other things in 'city'.*one-hot"):
            cls().fit(frame({"age": [40.0] * 50, "city": ["Bern"] * 50}), y)
    with pytest.raises(ValueError, match=r"no sample_weight.*privacy of heavy rows"):
        cls().fit(X[:, :1], y, sample_weight=np.ones(50))
    with pytest.raises(TypeError, match="unexpected keyword"):
        cls().fit(X[:, :1], y, weights=1)
    with pytest.raises(ValueError, match="bounds"):
        cls(bounds=(2, 1)).fit(X[:, :1], y)
    with pytest.raises(ValueError, match="epsilon"):
        cls(-1.0).fit(X[:, :1], y)


@pytest.mark.parametrize("cls", CLASSIFIERS)
def test_labels_are_public_or_stated(cls):
    X, signal = table(n=60)
    with pytest.raises(ValueError, match=r"one class.*classes="):
        cls().fit(X, np.ones(60))
    with pytest.raises(ValueError, match=r"classes=\[0, 1\], found \[2\]"):
        cls(classes=[0, 1]).fit(X, labels(signal, 3))
    with pytest.warns(UserWarning, match="rows are few"):
        model = cls(classes=[0, 1, 7], random_state=0).fit(X, labels(signal))
    assert list(model.classes_) == [0, 1, 7]


@pytest.mark.parametrize("cls", ALL)
def test_strange_tables_give_finite_models(cls):
    X, signal = table(n=2000, dim=4)
    X[:, 1] = 5.0
    X[:, 2] = 0.0
    X[::3] = 0.0
    model = cls(random_state=0).fit(X, target_of(cls, signal))
    assert np.isfinite(model.coef_).all()


@pytest.mark.parametrize("cls", ALL)
def test_too_few_rows_say_what_to_expect(cls):
    X, signal = table(n=10)
    y = target_of(cls, signal)
    with pytest.warns(UserWarning, match=r"10 rows are few.*keep about \d+ %.*needs about [\d,]+"):
        cls(random_state=0).fit(X, y)
    X, signal = table()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cls(random_state=0).fit(X, target_of(cls, signal))


@pytest.mark.filterwarnings("ignore:.*rows are few")
def test_the_rows_named_in_the_warning_are_enough():
    """The curve behind the warning, on data it was not fitted to."""
    rng = np.random.default_rng(0)
    weights = rng.standard_normal(20)
    X = rng.standard_normal((30_000, 20))
    y = X @ weights + rng.logistic(size=30_000) > 0
    best = (y[20_000:] == (X[20_000:] @ weights > 0)).mean()
    for n, least in ((2000, 0.7), (10_000, 0.9)):
        scores = [
            pg.PrivateLogisticRegression(0.3, random_state=s).fit(X[:n], y[:n]).score(
                X[20_000:], y[20_000:]
            )
            for s in range(3)
        ]  # fmt: skip
        assert (np.mean(scores) - 0.5) / (best - 0.5) > least


def test_bounds_save_the_budget_of_the_ranges():
    X, signal = table()
    width = X.max(axis=0) - X.min(axis=0)
    low, high = X.min(axis=0) - width / 5, X.max(axis=0) + width / 5
    model = pg.PrivateLogisticRegression(bounds=(low, high), random_state=0)
    model.fit(X, labels(signal))
    purposes = [event.purpose for event in model.privacy_.events]
    assert purposes == ["moments", "row norms", "covariance", "calibration", "gradients"]
    assert model.score(X, labels(signal)) > 0.85
    with pytest.raises(ValueError, match="contain 0 for a sparse table"):
        pg.PrivateLogisticRegression(bounds=(1, 2)).fit(csr_matrix(X), labels(signal))


def test_nothing_outside_the_bounds_is_looked_at():
    X, signal = table(n=500, dim=2)
    outside = X.copy()
    outside[:250] *= 1e9
    edges = (np.zeros(2), np.ones(2))
    first, second = (
        pg.PrivateLogisticRegression(8.0, bounds=edges, random_state=0).fit(
            np.clip(kind, 0, 1) if inside else kind, labels(signal)
        )
        for kind, inside in ((outside, True), (outside, False))
    )
    assert np.array_equal(first.coef_, second.coef_)


@pytest.mark.parametrize("quantile", [0.1, 0.5, 0.9])
def test_quantiles_are_covered(quantile):
    X, signal = table(n=8000)
    model = pg.PrivateQuantileRegressor(quantile=quantile, random_state=0).fit(X, signal)
    assert np.mean(signal <= model.predict(X)) == pytest.approx(quantile, abs=0.04)


def test_defaults_of_estimators_are_those_of_their_losses():
    assert pg.PrivateQuantileRegressor().quantile == pg.Loss("quantile").parameter
    assert pg.PrivateHuberRegressor().bend == pg.Loss("huber").parameter


@pytest.mark.parametrize("cls", ALL)
def test_parameters_are_those_of_the_signature(cls):
    given = {name: object() for name in inspect.signature(cls).parameters}
    model = cls(**given)
    assert model.get_params(deep=False) == vars(model) == given
