"""What fits without tuning are good for: probabilities, rare classes, any units, small tables."""

from typing import Any

import numpy as np
import pytest
from scipy.sparse import csr_array
from scipy.special import expit
from sklearn.metrics import balanced_accuracy_score, log_loss

import privagrad as pg
from privagrad.glm.examples import Examples
from privagrad.glm.losses import Loss
from privagrad.glm.rows import as_rows
from privagrad.linear import Choices, Problem, default_delta, plan_fit, run_fit
from privagrad.privacy.noise import random_source

CLASSIFIERS: list[Any] = [pg.PrivateLogisticRegression, pg.PrivateLinearSVC]
DIM = 5
WEIGHTS = np.array([2.0, -1.0, 1.0, 0.0, 0.5])
MIXED = {
    "offset": (np.array([1.0, 1e3, 0.01, 1.0, 50.0]), np.array([0, 5e3, 0, 3.0, 0])),
    "wide": (np.array([1e-3, 1e3, 1.0, 30.0, 1e-5]), np.zeros(5)),
}


def logistic_table(n, seed=0, intercept=0.0, weights=WEIGHTS):
    """Standard normal columns and the labels of true log-odds."""
    rng = np.random.default_rng(seed)
    X = rng.standard_normal((n, weights.size))
    chance = expit(X @ weights + intercept)
    return X, (rng.random(n) < chance).astype(int), chance


@pytest.mark.parametrize("dim", [3, 10])
@pytest.mark.parametrize("seed", range(3))
def test_probabilities_are_calibrated(dim, seed):
    """True coefficients of 1 are found within 15 %, and the loss is that of the truth."""
    X, y, chance = logistic_table(20_000, seed, intercept=-1.0, weights=np.ones(dim))
    units = np.geomspace(1e-3, 1e3, dim)
    model = pg.PrivateLogisticRegression(1.0, random_state=seed).fit(X * units, y)
    assert model.coef_[0] * units == pytest.approx(np.ones(dim), abs=0.15)
    assert model.intercept_ == pytest.approx([-1.0], abs=0.15)
    loss = log_loss(y, model.predict_proba(X * units))
    assert loss < log_loss(y, np.full(y.size, y.mean()))
    assert loss == pytest.approx(log_loss(y, chance), abs=0.003)


def test_probabilities_of_several_classes_are_calibrated():
    """Up to a factor of the margins, of which some are tried."""
    rng = np.random.default_rng(0)
    X = rng.standard_normal((20_000, 4))
    weights = np.array([[1.0, 0, -1, 0], [0, 1, 0, -1], [-1, -1, 1, 1]])
    margins = X @ weights.T
    y = (margins + rng.gumbel(size=margins.shape)).argmax(axis=1)
    probabilities = np.exp(margins) / np.exp(margins).sum(axis=1, keepdims=True)
    for seed in range(3):
        model = pg.PrivateLogisticRegression(1.0, random_state=seed).fit(X, y)
        loss = log_loss(y, model.predict_proba(X))
        assert loss == pytest.approx(log_loss(y, probabilities), abs=0.02)


@pytest.fixture(scope="module")
def rare():
    """3 % of the rows are positive."""
    X, y, _ = logistic_table(20_000, 1, intercept=-5.7)
    assert 0.025 < y.mean() < 0.035
    return X * MIXED["wide"][0], y


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("cls", CLASSIFIERS)
def test_balanced_weights_raise_the_balanced_accuracy(cls, seed, rare):
    X, y = rare
    plain, balanced = (
        cls(1.0, class_weight=weight, random_state=seed).fit(X, y) for weight in (None, "balanced")
    )
    before, after = (balanced_accuracy_score(y, model.predict(X)) for model in (plain, balanced))
    assert after > max(before + 0.05, 0.8)
    assert plain.score(X, y) > 0.97 > balanced.score(X, y)


def test_balanced_probabilities_are_those_of_classes_of_equal_frequency(rare):
    X, y = rare
    chance = (
        pg.PrivateLogisticRegression(1.0, class_weight="balanced", random_state=0)
        .fit(X, y)
        .predict_proba(X)[:, 1]
    )
    weights = np.where(y == 1, 0.5 / y.mean(), 0.5 / (1 - y.mean()))
    assert np.average(chance, weights=weights) == pytest.approx(0.5, abs=0.04)
    assert log_loss(y, chance, sample_weight=weights) < 0.75 * np.log(2)


@pytest.mark.parametrize("cls", CLASSIFIERS)
def test_balanced_weights_of_several_classes_raise_the_balanced_accuracy(cls):
    X, _, _ = logistic_table(20_000, 2)
    rng = np.random.default_rng(3)
    y = np.digitize(X @ WEIGHTS + rng.logistic(size=20_000), [-5.0, 5.0])
    plain, balanced = (
        cls(1.0, class_weight=weight, random_state=0).fit(X, y) for weight in (None, "balanced")
    )
    before, after = (balanced_accuracy_score(y, model.predict(X)) for model in (plain, balanced))
    assert after > before + 0.05


@pytest.mark.parametrize("cls", CLASSIFIERS)
@pytest.mark.parametrize("weights", [{0: 0.25}, {0: 1.0, 1: 4.0}, {0: 3, 1: 12}])
def test_public_weights_of_two_classes_are_the_ratio_of_the_loss(cls, weights):
    """Only their ratio counts; a class that is not listed has the weight 1."""
    X, y, _ = logistic_table(3000)
    model = cls(2.0, class_weight=weights, random_state=4, steps=20).fit(X, y)
    loss = Loss(cls._loss.name, 0.25)
    problem = Problem(loss, Examples(as_rows(X), 2.0 * y - 1))
    plan = plan_fit(problem.facts, 2.0, default_delta(3000), Choices(steps=20))
    same = run_fit(problem, plan, plan.releases(random_source(4)), False)
    assert np.array_equal(model.coef_, same.coef)
    assert np.array_equal(model.intercept_, same.intercept)
    assert model.privacy_.events == plan.privacy.events, "public weights cost nothing"
    plain = cls(2.0, random_state=4, steps=20).fit(X, y)
    assert model.predict(X).mean() > plain.predict(X).mean() + 0.05
    equal = cls(2.0, class_weight={0: 2.0, 1: 2.0}, random_state=4, steps=20).fit(X, y)
    assert np.array_equal(equal.coef_, plain.coef_)


@pytest.mark.parametrize("cls", CLASSIFIERS)
def test_public_weights_of_several_classes_shift_the_intercepts(cls):
    X, _, _ = logistic_table(3000)
    y = np.array(["low", "middle", "high"])[np.digitize(X @ WEIGHTS, [-2, 2])]
    plain, weighted = (
        cls(4.0, class_weight=weights, random_state=0, steps=20).fit(X, y)
        for weights in ({"low": 1.0}, {"low": 4.0, "middle": 0.5})
    )
    assert plain.classes_.tolist() == ["high", "low", "middle"]
    assert np.array_equal(plain.coef_, weighted.coef_)
    moved = weighted.intercept_ - plain.intercept_
    moved = moved - moved[0]
    # Margins of a hinge loss are log-odds up to a factor.
    factor = 1.0 if cls is pg.PrivateLogisticRegression else moved[1] / np.log(4.0)
    assert moved == pytest.approx(factor * np.log([1.0, 4.0, 0.5]))
    assert factor > 0


@pytest.mark.parametrize("cls", CLASSIFIERS)
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("balance", "None, 'balanced' or a dict of labels and weights, found 'balance'"),
        (np.array([1.0, 2.0]), "a dict of labels and weights, found array"),
        ([1.0, 2.0], r"a dict of labels and weights, found \[1.0, 2.0\]"),
        ({5: 1.0}, r"labels among \[0, 1\], found \[5\]"),
        ({"yes": 1.0}, r"labels among \[0, 1\], found \['yes'\]"),
        ({0: -1.0}, "class_weight > 0 and finite, found class_weight=-1.0"),
        ({0: 0.0}, "class_weight > 0 and finite"),
        ({0: np.nan}, "class_weight > 0 and finite, found class_weight=nan"),
        ({0: np.inf}, "class_weight > 0 and finite"),
        ({0: "much"}, "class_weight to be a number, found 'much'"),
    ],
    ids=str,
)
def test_bad_class_weights_are_refused(cls, given, message):
    X, y, _ = logistic_table(50)
    with pytest.raises((ValueError, TypeError), match=message):
        cls(class_weight=given).fit(X, y)


@pytest.mark.parametrize("layout", [np.asarray, csr_array])
@pytest.mark.parametrize("cls", CLASSIFIERS)
def test_a_column_of_zeros_hardly_changes_accuracy(cls, layout):
    X, y, _ = logistic_table(8000)
    wider = np.column_stack([X[:, :2], np.zeros(8000), X[:, 2:]])
    for seed in range(3):
        plain, other = (
            cls(1.0, random_state=seed).fit(layout(rows), y).score(layout(rows), y)
            for rows in (X, wider)
        )
        assert other == pytest.approx(plain, abs=0.015)


@pytest.mark.parametrize("unit", [1e-6, 1e-3, 1e3, 1e6])
@pytest.mark.parametrize("cls", CLASSIFIERS)
def test_units_hardly_change_accuracy(cls, unit):
    """Of one column, and of all of them."""
    X, y, _ = logistic_table(8000)
    one = X * [unit, 1, 1, 1, 1]
    plain, *others = (
        cls(1.0, random_state=0).fit(rows, y).score(rows, y) for rows in (X, one, unit * X)
    )
    assert others == pytest.approx([plain, plain], abs=0.015)


@pytest.mark.parametrize("units", MIXED)
@pytest.mark.parametrize("cls", CLASSIFIERS)
@pytest.mark.filterwarnings("ignore:200 rows are few")
def test_no_fit_collapses_on_a_small_table(cls, units):
    """200 rows at epsilon 1: never far below the most frequent class, and mostly above it."""
    unit, offset = MIXED[units]
    gains = []
    for seed in range(20):
        X, y, _ = logistic_table(3200, seed, intercept=-0.3)
        X = X * unit + offset
        model = cls(1.0, random_state=seed).fit(X[:200], y[:200])
        share = y[200:].mean()
        gains.append(model.score(X[200:], y[200:]) - max(share, 1 - share))
    assert min(gains) > -0.1
    assert np.mean(gains) > 0.1


@pytest.mark.parametrize("unit", [1.0, 1e6])
@pytest.mark.filterwarnings("ignore:200 rows are few")
def test_small_tables_of_many_columns_predict_the_most_frequent_class(unit):
    """Whatever the unit of all columns."""
    gains, weights = [], np.concatenate([WEIGHTS, np.zeros(15)])
    for seed in range(20):
        X, y, _ = logistic_table(3200, seed, intercept=-3.0, weights=weights)
        X = X * unit
        model = pg.PrivateLogisticRegression(1.0, random_state=seed).fit(X[:200], y[:200])
        gains.append(model.score(X[200:], y[200:]) - (1 - y[200:].mean()))
    assert np.mean(np.array(gains) < -0.1) <= 0.1
