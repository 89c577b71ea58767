"""The basis in which gradients are bounded: what it is, what it costs, where it is chosen."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scipy.sparse import csr_array

import privagrad as pg
from privagrad.glm.examples import Examples
from privagrad.glm.losses import Loss
from privagrad.glm.rows import DenseRows, as_rows
from privagrad.linear import Choices, Problem, plan_fit, recipe, run_fit
from privagrad.linear.whitening import Whitening, inverse_root, learned_whitening, whitened
from privagrad.privacy.accounting import PrivacyPlan
from privagrad.privacy.noise import random_source
from privagrad.queries.moments import Columns
from privagrad.queries.second_moments import SecondMoments
from tests.releases import releases_at


def spread(values, seed=0):
    """A covariance of these eigenvalues."""
    rng = np.random.default_rng(seed)
    vectors = np.linalg.qr(rng.standard_normal((len(values), len(values))))[0]
    return (vectors * values) @ vectors.T


def correlated(n=8000, dim=12, seed=0):
    """Columns with correlations 0.95^|i - j| and targets of which each direction has its share."""
    rng = np.random.default_rng(seed)
    covariance = 0.95 ** np.abs(np.subtract.outer(np.arange(dim), np.arange(dim)))
    root = np.linalg.cholesky(covariance)
    independent = rng.standard_normal((n, dim))
    y = independent @ rng.choice([-1.0, 1.0], dim) + rng.standard_normal(n)
    return independent @ root.T, y


def test_known_directions_become_equally_wide():
    covariance = spread([2.0, 1.5, 1.0, 0.5])
    root = inverse_root(SecondMoments(covariance, 1e-9))
    assert root == pytest.approx(root.T)
    assert root @ covariance @ root == pytest.approx(1.25 * np.eye(4))


def test_narrow_directions_are_stretched_only_so_far():
    """As if they had 0.3 of the mean eigenvalue, so that few rows are far out."""
    covariance = spread([4.0, 1.0, 0.0, 0.0])
    root = inverse_root(SecondMoments(covariance, 1e-9))
    values = np.linalg.eigvalsh(root)
    assert values[-1] / values[0] == pytest.approx(math.sqrt(4.0 / (0.3 * 1.25)))


def test_what_noise_may_have_made_is_not_followed():
    """Differences between eigenvalues shrink by the part of their squares that is noise."""
    covariance = spread([1.4, 1.2, 0.8, 0.6])  # ‖S - I‖² = 0.4
    for part in (0.0, 0.5, 0.9):
        noise = math.sqrt(part * 0.4 / 20)
        expected = 1 + (1 - part) * np.array([0.4, 0.2, -0.2, -0.4])
        values = np.linalg.eigvalsh(inverse_root(SecondMoments(covariance, noise)))
        assert values == pytest.approx(expected**-0.5)
    for matrix in (covariance, -covariance, np.zeros((4, 4))):
        assert np.array_equal(inverse_root(SecondMoments(matrix, 0.15)), np.eye(4))


def test_noise_alone_gives_no_directions():
    """The mean square of the noise is noise² k (k + 1): the diagonal has twice that of others."""
    rng = np.random.default_rng(5)
    stretched = []
    for _ in range(200):
        E = np.triu(rng.standard_normal((30, 30)), 1)
        matrix = np.eye(30) + 0.05 * (E + E.T + np.diag(math.sqrt(2) * rng.standard_normal(30)))
        values = np.linalg.eigvalsh(inverse_root(SecondMoments(matrix, 0.05)))
        stretched.append(values[-1] / values[0])
    assert np.mean(stretched) < 1.1


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_row_is_whitened_by_itself(dtype):
    """To the last bit, wherever it is; columns that are not chosen stay as they are."""
    rng = np.random.default_rng(1)
    X = rng.standard_normal((99, 44)).astype(dtype)
    matrix, columns = spread(np.linspace(0.5, 3.0, 41)), rng.permutation(44)[:41]
    whole = DenseRows(X.copy()).combined(columns, matrix).array
    expected = X.astype(np.float64)
    expected[:, columns] = expected[:, columns] @ matrix
    assert whole.dtype == dtype
    assert whole == pytest.approx(expected, rel=1e-5, abs=1e-5)
    others = np.setdiff1d(np.arange(44), columns)
    assert np.array_equal(whole[:, others], X[:, others])
    for order in (np.arange(99)[::-1], np.array([5]), np.arange(7, 20)):
        assert np.array_equal(DenseRows(X[order]).combined(columns, matrix).array, whole[order])


@pytest.mark.filterwarnings("error")
def test_rows_that_are_not_finite_stay_so_and_warn_of_nothing():
    X = np.ones((4, 3))
    X[1, 0], X[2, 1], X[3] = np.inf, np.nan, 1.7e308
    moved = DenseRows(X).combined(np.arange(3), np.ones((3, 3))).array
    assert np.isfinite(moved).all(axis=1).tolist() == [True, False, False, False]


def test_margins_and_covariances_are_those_of_the_original_columns():
    """⟨w, W v⟩ = ⟨W w, v⟩, and Cov(W w) = W Cov(w) W, for each of several outputs."""
    rng = np.random.default_rng(2)
    whitening = Whitening(np.array([3, 1]), spread([2.0, 0.4]))
    X, w = rng.standard_normal((7, 5)), rng.standard_normal((3, 5))
    given = Examples(as_rows(X.copy()), np.zeros(7))
    moved = whitened(given, whitening.columns, whitening.matrix)
    assert moved.rows.matrix @ w.T == pytest.approx(X @ whitening.weights(w).T)
    draws = rng.standard_normal((15, 15))
    covariance = draws @ draws.T
    linear = np.array([whitening.weights(row.reshape(3, 5)).ravel() for row in np.eye(15)]).T
    expected = linear @ covariance @ linear.T
    assert whitening.covariance(covariance, 3) == pytest.approx(expected)
    variances = rng.random(15)
    blocks = whitening.covariance(variances, 3)
    expected = linear @ np.diag(variances) @ linear.T
    for k, block in enumerate(blocks):
        assert block == pytest.approx(expected[5 * k : 5 * k + 5, 5 * k : 5 * k + 5])


def test_bounded_whitened_gradients_are_gradients_in_the_ellipsoid():
    """‖W g‖ ≤ B is {g : gᵀ C g ≤ B²} with C = W²; noise in it has the covariance B² C⁻¹."""
    X, y = correlated(50, 4)
    matrix, radius = spread([3.0, 1.0, 0.5, 0.2]), 0.3
    rows = DenseRows(X.copy()).combined(np.arange(4), matrix)
    slopes = np.sign(X @ np.ones(4) - y)
    inside = pg.Ellipsoid.ball(4, radius).project(slopes[:, None] * rows.array)
    original = inside @ np.linalg.inv(matrix)
    norms = np.sqrt(np.einsum("ij,jk,ik->i", original, matrix @ matrix, original))
    assert norms == pytest.approx(np.minimum(radius, np.linalg.norm(rows.array, axis=1)))


def columns_of(X, varied):
    dim = X.shape[1]
    return Columns(np.zeros(dim), np.ones(dim), np.ones(dim), np.array(varied))


def test_indicators_keep_their_units():
    X = np.random.default_rng(3).standard_normal((100, 4))
    examples = Examples(as_rows(X), np.zeros(100))
    releases = releases_at({"covariance": 1e-6})
    found = learned_whitening(examples, columns_of(X, [True, False, True, True]), releases)
    assert found is not None
    assert found.columns.tolist() == [0, 2, 3]
    hidden = replace(columns_of(X, [True] * 4), seen=np.array([True, True, False, False]))
    found = learned_whitening(examples, hidden, releases_at({"covariance": 1e-6}))
    assert found is not None
    assert found.columns.tolist() == [0, 1]


@pytest.mark.parametrize("why", ["plan", "single", "hidden", "sparse"])
def test_without_quantities_or_a_plan_nothing_is_released(why):
    X = np.random.default_rng(3).standard_normal((100, 3))
    known = columns_of(X, [True, why != "single", False])
    known = replace(known, found=why != "hidden")
    rows = as_rows(csr_array(X)) if why == "sparse" else as_rows(X)
    releases = releases_at({"moments" if why == "plan" else "covariance": 1.0})
    assert learned_whitening(Examples(rows, np.zeros(100)), known, releases) is None
    assert not any(releases.made.values())


def test_it_is_chosen_from_public_facts_alone():
    """z d^1.5 ≤ 1.5 n, for dense tables of at most 200 columns."""
    assert recipe.shaped(1000, 9, False, 55.0)
    assert not recipe.shaped(1000, 9, False, 56.0)
    assert not recipe.shaped(1000, 9, True, 1.0)
    assert not recipe.shaped(1000, 1, False, 1.0)
    assert not recipe.shaped(10**6, 201, False, 0.1)
    assert not recipe.shaped(10**9, 9, False, 0.1), "it would take longer than the training"
    X, y = correlated(400, 3)
    for table in (X, 100 * X[::-1] ** 2):
        model = pg.PrivateQuantileRegressor(4.0, steps=2, random_state=0).fit(table, y)
        assert "covariance" in [event.purpose for event in model.privacy_.events]
    with pytest.warns(UserWarning, match="are few"):
        few = pg.PrivateQuantileRegressor(0.05, steps=2, random_state=0).fit(X, y)
    assert "covariance" not in [event.purpose for event in few.privacy_.events]


@pytest.mark.parametrize("kind", ["bounds of indicators", "one-hot columns", "one quantity"])
def test_nothing_is_paid_where_no_columns_can_be_combined(kind):
    """By public facts alone: then the query would be skipped, and its part of epsilon lost."""
    X = np.random.default_rng(0).random((5000, 6))
    more: Any = {
        "bounds of indicators": {"bounds": (np.zeros(6), np.ones(6))},
        "one-hot columns": {"groups": ((0, 3), (3, 6))},
        "one quantity": {"bounds": (np.zeros(6), np.append(np.ones(5), 2.0))},
    }[kind]
    problem = Problem(Loss("logistic"), Examples(as_rows(X), np.ones(5000)), **more)
    plan = plan_fit(problem.facts, 1.0, 1e-6, Choices())
    assert "covariance" not in plan.privacy
    without = replace(problem, bounds=None, groups=())
    assert "covariance" in plan_fit(without.facts, 1.0, 1e-6, Choices()).privacy


@pytest.mark.parametrize("evaluated", [False, True])
def test_second_moments_of_least_squares_need_no_covariance(evaluated):
    X, y = correlated(400, 3)
    problem = Problem(Loss("huber"), Examples(as_rows(X), y), squares="moments")
    plan = plan_fit(problem.facts, 4.0, 1e-5, Choices(), evaluated=evaluated)
    assert plan.from_moments
    assert "covariance" not in plan.privacy
    gradients = replace(problem, squares="gradients")
    plan = plan_fit(gradients.facts, 4.0, 1e-5, Choices(), evaluated=evaluated)
    assert "covariance" in plan.privacy


def test_epsilon_pays_for_it():
    """The event has the noise that its part of epsilon allows, and is a part of the total."""
    X, y = correlated(2000, 4)
    model = pg.PrivateQuantileRegressor(1.0, steps=3, random_state=0).fit(X, y)
    events, delta = model.privacy_.events, model.privacy_.delta
    [event] = [event for event in events if event.purpose == "covariance"]
    assert event.count == 1
    assert PrivacyPlan((event,)).epsilon(delta) == pytest.approx(0.3, rel=0.01)
    rest = tuple(other for other in events if other is not event)
    assert PrivacyPlan(events).epsilon(delta) == model.privacy_.epsilon <= 1.0
    assert PrivacyPlan(rest).epsilon(delta) < 0.98


def fitted(X, y, epsilon, loss="absolute", classes=1, **choices):
    problem = Problem(Loss(loss), Examples(as_rows(X), y), classes)
    plan = plan_fit(problem.facts, epsilon, 1e-5, Choices(**choices), evaluated=True)
    return run_fit(problem, plan, plan.releases(random_source(0)), False)


def test_correlated_columns_are_fitted_better(monkeypatch):
    """MAE 0.80 is that of the truth; a ball in the columns' own directions has 0.85."""
    X, y = correlated(20_000, 12)

    def error():
        model = fitted(X, y, 1.0)
        return np.abs(X @ model.coef[0] + model.intercept - y).mean()

    whitened_error = error()
    monkeypatch.setattr(recipe, "shaped", lambda *_: False)
    assert whitened_error < 0.82
    assert error() > whitened_error + 0.03


def test_several_classes_share_the_whitening():
    X, y = correlated(4000, 4)
    classes = np.digitize(y, [-2.0, 2.0]).astype(float)
    model = fitted(X, classes, 4.0, "softmax", 3)
    predicted = (X @ model.coef.T + model.intercept).argmax(axis=1)
    assert (predicted == classes).mean() > 0.75
    assert model.noise.coef.shape == (3, 4)
    assert (model.noise.coef > 0).all()


def test_left_out_rows_do_not_count():
    """Whatever stands in them."""
    X, y = correlated(600, 3)
    left_out = np.arange(600) % 5 == 0
    coefs = []
    for value in (0.0, 1e6):
        X[left_out, 2] = X[left_out, 1] = 1.0
        targets = np.where(left_out, value, y)
        problem = Problem(Loss("absolute"), Examples(as_rows(X), targets, left_out))
        plan = plan_fit(problem.facts, 4.0, 1e-5, Choices(steps=5))
        coefs.append(run_fit(problem, plan, plan.releases(random_source(0)), False).coef)
    assert np.array_equal(coefs[0], coefs[1])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_tables_of_users_stay_as_they_are(dtype):
    """Rows are whitened in place, but not those that were given."""
    X, y = correlated(500, 3)
    X = X.astype(dtype)
    before = X.copy()
    fitted(X, y, 4.0, steps=2)
    assert np.array_equal(X, before)
