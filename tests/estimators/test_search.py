import math
import warnings
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from scipy.sparse import csr_array
from sklearn.base import clone
from typer.testing import CliRunner

import privagrad as pg
from privagrad.cli import app
from privagrad.data import matrices
from privagrad.estimators import _tables
from privagrad.estimators._base import PrivateLinearEstimator
from privagrad.estimators.search import _noisy_mean
from privagrad.privacy.accounting import RENYI_ACCOUNTANT
from privagrad.privacy.events import GaussianEvent, SelectEvent
from privagrad.privacy.noise import random_source
from tests.statistics import assert_scale

CANDIDATES = {"step_size": [1e-4, 1.0], "radius": [0.2, 0.3]}


def table(n=3000):
    rng = np.random.default_rng(0)
    X = rng.standard_normal((n, 4))
    return X, (X @ [1, -1, 2, 0] + rng.logistic(size=n) > 0).astype(int)


def test_the_better_setting_wins():
    X, y = table()
    search = pg.PrivateSearch(
        pg.PrivateLogisticRegression(), CANDIDATES, epsilon=2.0, random_state=1
    ).fit(X, y)
    assert search.best_params_["step_size"] == 1.0
    assert search.score(X, y) > 0.75
    assert search.best_score_ == pytest.approx(search.score(X, y), abs=0.1)
    assert search.predict_proba(X).shape == (3000, 2)
    assert not hasattr(search, "n_runs_"), "the number of runs must stay secret"


def test_one_epsilon_pays_for_all_runs():
    X, y = table()
    search = pg.PrivateSearch(pg.PrivateLinearSVC(), CANDIDATES, epsilon=1.0, random_state=1)
    report = search.fit(X, y).privacy_
    assert report.accountant == RENYI_ACCOUNTANT
    assert report.epsilon == pg.PrivacyPlan(report.events).epsilon(report.delta)
    assert 0.9 < report.epsilon <= 1.0
    (selection,) = report.events
    assert isinstance(selection, SelectEvent)
    assert selection.events[-1].purpose == "score"
    run = pg.PrivacyPlan(selection.events[:-1])
    assert 0.2 < run.epsilon(report.delta) < 0.6


def test_the_best_model_states_the_cost_of_the_search_wherever_it_goes(tmp_path):
    """Whoever gets the model alone must not be promised the epsilon of one fit."""
    X, y = table()
    search = pg.PrivateSearch(
        pg.PrivateLinearSVC(noise="discrete"), CANDIDATES, epsilon=1.0, delta=1e-6
    )
    best = search.fit(X, y).best_estimator_
    assert best.privacy_ == search.privacy_
    best.save(tmp_path / "best.model")
    loaded = pg.PrivateLinearSVC.load(tmp_path / "best.model")
    assert loaded.privacy_ == search.privacy_
    assert np.array_equal(loaded.predict(X), search.predict(X))
    assert "the number of rows: 3,000" in loaded.model_.privacy["public"]
    card = loaded.card()
    assert card == search.card() == best.card()
    assert card["guarantee"]["epsilon"] == pytest.approx(search.privacy_.epsilon)
    assert card["guarantee"]["rows"] == 3000
    assert "private search" in card["product"]["kind"]
    loaded.report(tmp_path / "best.html")
    page = (tmp_path / "best.html").read_text()
    for told in ("best of 10 on average", "private search", "Papernot and Steinke", "score"):
        assert told in page
    shown = CliRunner().invoke(app, ["show", str(tmp_path / "best.model")]).output
    assert "chosen by a private search" in shown
    assert f"({search.privacy_.epsilon:.4g}, 1e-06)" in shown


def test_the_score_has_the_noise_of_its_event():
    source, scores = random_source(0), np.full(50, 0.5)
    draws = [_noisy_mean(scores, GaussianEvent(3.0), source) for _ in range(4000)]
    assert_scale((np.array(draws) - 0.5) * 50, 3.0)


def test_scores_count_from_0_to_1():
    wild = np.array([-1e9, 1e9])
    assert _noisy_mean(wild, GaussianEvent(1e-3), random_source(0)) == pytest.approx(0.5, abs=0.01)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_scores_that_are_not_numbers_count_as_nothing(bad):
    scores = np.array([0.5, 0.7, 0.2])
    event, odd = GaussianEvent(1e-3), np.append(scores, bad)
    found = _noisy_mean(odd, event, random_source(0))
    most = 2.4 if bad == np.inf else 1.4  # inf is the best score there is, 1
    assert found * 4 == pytest.approx(most, abs=0.01)


def test_a_search_over_rows_near_the_largest_double_finds_a_model():
    """Predictions for such rows are NaN: inf - inf."""
    X = 1e-3 * table(300)[0]
    X[:40:3] = 1.7e308
    y = np.random.default_rng(1).standard_normal(300)
    for seed in range(4):
        search = pg.PrivateSearch(
            pg.PrivateHuberRegressor(steps=3), CANDIDATES, epsilon=50.0, mean_runs=1.5,
            random_state=seed,
        ).fit(X, y)  # fmt: skip
        assert search.best_estimator_ is not None
        assert np.isfinite(search.best_score_)


@pytest.mark.filterwarnings("always")
def test_nothing_shows_how_many_runs_there_were(capfd):
    """Warnings and progress bars come equally often in short searches and in long ones."""
    X, y = table(300)
    shown = set()
    for seed in range(4):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            pg.PrivateSearch(
                pg.PrivateLogisticRegression(verbose=True, steps=3), CANDIDATES, epsilon=0.5,
                mean_runs=6.0, random_state=seed,
            ).fit(X, y)  # fmt: skip
        told = [str(warning.message) for warning in caught]
        assert sum("rows are few" in message for message in told) == 1
        shown.add((len(told), *capfd.readouterr()))
    assert len(shown) == 1
    assert shown.pop()[1:] == ("", "")


def test_as_many_runs_are_made_as_are_charged(monkeypatch):
    """Their number is geometric, of the mean of the event: a number that is known costs more."""
    asked, scored = [], []

    class Watched(np.random.Generator):
        def geometric(self, p, size=None):
            asked.append(p)
            return 4

    def score(*arguments):
        scored.append(_noisy_mean(*arguments))
        return scored[-1]

    source = replace(random_source(0), sampler=Watched(np.random.PCG64(0)))
    monkeypatch.setattr("privagrad.estimators.search.estimator_source", lambda *_: source)
    monkeypatch.setattr("privagrad.estimators.search._noisy_mean", score)
    search = pg.PrivateSearch(
        pg.PrivateLogisticRegression(steps=3), CANDIDATES, epsilon=20.0, mean_runs=3.0
    ).fit(*table(300))
    (selection,) = search.privacy_.events
    assert isinstance(selection, SelectEvent)
    assert asked == [1 / selection.mean]
    assert len(scored) == 4


def test_the_best_model_keeps_its_own_settings():
    X, y = table(300)
    search = pg.PrivateSearch(
        pg.PrivateLogisticRegression(verbose=True, steps=3), CANDIDATES, epsilon=20.0,
        mean_runs=1.5, random_state=0,
    ).fit(X, y)  # fmt: skip
    assert search.best_estimator_.verbose is True


@pytest.mark.parametrize("seed", [None, 0])
def test_runs_are_seeded_only_if_the_search_is(seed):
    X, y = table(300)
    search = pg.PrivateSearch(
        pg.PrivateLogisticRegression(steps=3, random_state=5), CANDIDATES, epsilon=20.0,
        mean_runs=1.5, random_state=seed,
    ).fit(X, y)  # fmt: skip
    seeded = seed is not None
    assert search.privacy_.seeded == search.best_estimator_.privacy_.seeded == seeded
    assert (search.best_estimator_.random_state is not None) == seeded


def test_more_runs_cost_more_and_one_run_costs_a_run():
    inner = (GaussianEvent(30.0, 10), GaussianEvent(50.0))
    epsilons = [
        pg.PrivacyPlan((SelectEvent(inner, mean),)).epsilon(1e-5) for mean in (1.01, 3, 10, 100)
    ]
    assert epsilons == sorted(epsilons)
    assert epsilons[0] > pg.PrivacyPlan(inner).epsilon(1e-5)


def test_a_selection_composes_with_other_releases():
    select = SelectEvent((GaussianEvent(30.0, 10),), 5.0)
    alone = pg.PrivacyPlan((select,)).epsilon(1e-5)
    both = pg.PrivacyPlan((GaussianEvent(20.0), select)).epsilon(1e-5)
    assert both > alone
    plan = pg.PrivacyPlan((select,))
    assert plan.delta(alone) == pytest.approx(1e-5, rel=0.1)
    fixed = SelectEvent((GaussianEvent(1.0, 1, "with_replacement", 100, 10),), 5.0)
    with pytest.raises(ValueError, match="beside a selection"):
        pg.PrivacyPlan((fixed,)).epsilon(1e-5)


def test_papernot_and_steinkes_bound_by_hand():
    """Theorem 2 at η = 1: ε(λ) + 2 (1 - 1/λ̂) ε(λ̂) + 2 log(1/γ)/λ̂ + log E[K]/(λ - 1), ε = λ/2z².

    γ = 1/mean for the geometric distribution; the best λ and λ̂ over a grid, then to (ε, δ).
    """
    noise, mean, delta = 20.0, 10.0, 1e-5
    orders = np.geomspace(1.01, 2000, 400)
    renyi = orders / (2 * noise**2)
    price = np.min(2 * (1 - 1 / orders) * renyi + 2 * math.log(mean) / orders)
    total = renyi + price + math.log(mean) / (orders - 1)
    by_hand = np.min(total + np.log1p(-1 / orders) - np.log(delta * orders) / (orders - 1))
    found = pg.PrivacyPlan((SelectEvent((GaussianEvent(noise),), mean),)).epsilon(delta)
    assert found == pytest.approx(by_hand, rel=0.05)


def test_candidates_must_not_change_what_is_released():
    X, y = table(300)
    estimator = pg.PrivateLogisticRegression()
    with pytest.raises(ValueError, match="release the same"):
        pg.PrivateSearch(estimator, {"steps": [10, 20]}).fit(X, y)
    with pytest.raises(ValueError, match="found none"):
        pg.PrivateSearch(estimator, {}).fit(X, y)
    with pytest.raises(TypeError, match="privagrad's estimators"):
        pg.PrivateSearch(object(), CANDIDATES).fit(X, y)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="mean_runs > 1"):
        pg.PrivateSearch(estimator, CANDIDATES, mean_runs=1).fit(X, y)
    assert clone(pg.PrivateSearch(estimator, CANDIDATES)).candidates == CANDIDATES
    for own in ("epsilon", "delta", "random_state"):
        with pytest.raises(ValueError, match=f"candidates without {own}: epsilon"):
            pg.PrivateSearch(estimator, {**CANDIDATES, own: [1]}).fit(X, y)
    with pytest.raises(ValueError, match="at least one value of every candidate"):
        pg.PrivateSearch(estimator, {**CANDIDATES, "radius": []}).fit(X, y)


@pytest.mark.parametrize(
    ("candidates", "message"),
    [
        ({"step_size": [1.0, -1.0]}, "step_size > 0"),
        ({"batch_size": [10, 1000]}, "batch_size <= "),
        ({"bounds": [(-1, 1), (1, -1)]}, "finite low <= high"),
        ({"bounds": [(-1, 1), (1, 2)]}, "contain 0 for a sparse table"),
        ({"classes": [[0, 1], [1, 2]]}, r"found \[0\]"),
        ({"unknown": [1, 2]}, "Invalid parameter 'unknown'"),
    ],
)
def test_every_candidate_is_checked_before_the_first_run(candidates, message, monkeypatch):
    """An error during a run would depend on which runs there are."""
    monkeypatch.setattr(PrivateLinearEstimator, "_fit_job", None)
    X, y = table(300)
    with pytest.raises(ValueError, match=message):
        pg.PrivateSearch(pg.PrivateLogisticRegression(), candidates).fit(csr_array(X), y)


def counted(monkeypatch, module, name):
    """How often a function of a module is called, as a list that grows."""
    calls, original = [], getattr(module, name)

    def function(*arguments, **options):
        calls.append(name)
        return original(*arguments, **options)

    monkeypatch.setattr(module, name, function)
    return calls


@pytest.mark.filterwarnings("ignore:.*rows are few")
@pytest.mark.parametrize("layout", [np.asarray, np.asfortranarray, csr_array])
@pytest.mark.parametrize(("mean_runs", "steps"), [(1.5, [1.0]), (8.0, [0.1, 0.3, 1.0, 3.0])])
def test_a_table_is_read_once_whatever_the_number_of_candidates(
    layout, mean_runs, steps, monkeypatch
):
    reads = counted(monkeypatch, _tables, "require_finite")
    copies = counted(monkeypatch, _tables, "as_rows")
    clips = counted(monkeypatch, matrices, "_clipped")
    X, y = table(300)
    pg.PrivateSearch(
        pg.PrivateLogisticRegression(steps=3, bounds=(-2.0, 2.0)),
        {"step_size": steps, "radius": [0.1, 0.2, 0.3]}, epsilon=8.0, mean_runs=mean_runs,
        random_state=0,
    ).fit(layout(X), y)  # fmt: skip
    assert len(reads) == 1
    assert len(copies) == 3, "the table, the rows to fit, the rows to score"
    assert len(clips) == 1


@pytest.mark.filterwarnings("ignore:.*rows are few")
def test_bounds_that_candidates_share_are_applied_once(monkeypatch):
    clips = counted(monkeypatch, matrices, "_clipped")
    X, y = table(300)
    pg.PrivateSearch(
        pg.PrivateLogisticRegression(steps=3),
        {"step_size": [0.1, 1.0], "bounds": [(-1, 1), (-2, 2)], "radius": [0.2, 0.3]},
        epsilon=8.0, random_state=0,
    ).fit(X, y)  # fmt: skip
    assert len(clips) == 2


@pytest.mark.filterwarnings("ignore:.*rows are few")
@pytest.mark.parametrize("layout", [np.asarray, csr_array])
@pytest.mark.parametrize(
    ("estimator", "candidates"),
    [
        (pg.PrivateLinearSVC(steps=5), {"bounds": [(-1, 1), (-2, 2)], "radius": [0.2, 1.0]}),
        (pg.PrivateHuberRegressor(steps=5), {"bend": [0.5, 2.0], "step_size": [0.3, 1.0]}),
    ],
)
def test_the_best_run_is_the_fit_of_its_setting(estimator, candidates, layout):
    """Problems that candidates share are those that each of them would pose alone."""
    X, y = table(300)
    for seed in range(4):
        search = pg.PrivateSearch(
            estimator, candidates, epsilon=8.0, mean_runs=3.0, random_state=seed
        ).fit(layout(X), y)
        held_out = random_source(seed).sampler.random(300) < 0.2
        best = search.best_estimator_
        assert search.best_params_.items() <= best.get_params().items()
        alone = clone(best).fit(layout(X[~held_out]), y[~held_out])
        assert np.array_equal(best.coef_, alone.coef_)
        (selection,) = search.privacy_.events
        assert isinstance(selection, SelectEvent)
        assert selection.events[:-1] == alone.privacy_.events


@pytest.mark.filterwarnings("ignore:.*rows are few")
def test_all_labels_are_known_to_a_run_whichever_rows_it_is_fitted_to():
    """The set of labels in y is public; that of a secret part of y is not."""
    X, y = table(300)
    held_out = random_source(3).sampler.random(300) < 0.2
    for rare in (np.flatnonzero(held_out)[0], np.flatnonzero(~held_out)[0]):
        labels = y.copy()
        labels[rare] = 7
        search = pg.PrivateSearch(
            pg.PrivateLogisticRegression(steps=3), {"radius": [0.2]}, epsilon=8.0, mean_runs=1.5,
            random_state=3,
        ).fit(X, labels)  # fmt: skip
        assert search.best_estimator_.classes_.tolist() == [0, 1, 7]


def test_the_best_model_knows_the_names_of_columns():
    X, y = table(300)
    frame = pd.DataFrame(X, columns=list("abcd"))
    search = pg.PrivateSearch(
        pg.PrivateLogisticRegression(steps=3), {"radius": [0.2]}, epsilon=20.0, mean_runs=1.5,
        random_state=0,
    ).fit(frame, y)  # fmt: skip
    assert search.best_estimator_.feature_names_in_.tolist() == list("abcd")
    assert search.best_estimator_.n_features_in_ == 4
    assert np.array_equal(search.predict(frame), search.predict_proba(frame)[:, 1] > 0.5)


def test_too_few_rows_to_split_are_refused():
    """One row to fit is refused too, which `fit` of the estimators refuses."""
    X, y = table(300)
    first = [np.flatnonzero(y == label)[0] for label in (0, 1)]
    for seed in range(20):
        search = pg.PrivateSearch(pg.PrivateLogisticRegression(), CANDIDATES, random_state=seed)
        with pytest.raises(ValueError, match="fit two and hold some out, found 2"):
            search.fit(X[first], y[first])
