"""Least squares: the same as without privacy at epsilon = inf, and what is released."""

from dataclasses import replace
from typing import cast

import numpy as np
import pytest
from scipy.sparse import csr_array
from sklearn.linear_model import LinearRegression

import privagrad as pg
from privagrad.glm.examples import Examples
from privagrad.glm.rows import as_rows
from privagrad.linear import BY_GRADIENTS, Choices, Problem, Solver, plan_fit, run_fit
from privagrad.linear.least_squares import moments_are_better, shrunk_solution
from privagrad.privacy.noise import random_source
from privagrad.queries import moments
from privagrad.queries.second_moments import PURPOSE, SecondMoments


def table(n=4000, dim=5, seed=0):
    rng = np.random.default_rng(seed)
    X = rng.standard_normal((n, dim)) @ (np.eye(dim) + 0.5) + np.arange(dim)
    y = 40 + X @ np.linspace(-1, 2, dim) + rng.standard_normal(n)
    return X * np.geomspace(1e-2, 1e3, dim), y


@pytest.mark.parametrize("layout", [np.asarray, csr_array])
@pytest.mark.parametrize("fit_intercept", [True, False])
def test_without_privacy_it_is_least_squares(layout, fit_intercept):
    X, y = table()
    ours = pg.PrivateRidge(np.inf, fit_intercept=fit_intercept).fit(layout(X), y)
    theirs = LinearRegression(fit_intercept=fit_intercept).fit(X, y)
    assert ours.coef_ == pytest.approx(theirs.coef_, rel=1e-6)
    assert ours.intercept_ == pytest.approx(theirs.intercept_, rel=1e-6)
    assert ours.privacy_.epsilon == np.inf


@pytest.mark.parametrize("solver", ["moments", "gradients"])
def test_large_budgets_come_close_to_least_squares(solver):
    X, y = table(n=20_000)
    model = pg.PrivateRidge(8.0, solver=solver, random_state=0).fit(X, y)
    best = LinearRegression().fit(X, y)
    assert model.score(X, y) > best.score(X, y) - 0.01


@pytest.mark.parametrize("layout", [np.asarray, csr_array])
def test_the_matrix_is_one_event_of_the_plan_and_takes_the_place_of_the_gradients(layout):
    X, y = table()
    model = pg.PrivateRidge(1.0, solver="moments").fit(layout(X), y)
    purposes = [event.purpose for event in model.privacy_.events]
    queries = [share.purpose for share in (*moments.COLUMNS.shares, *moments.TARGET.shares)]
    assert purposes == [*queries, "row norms", PURPOSE]
    assert all(event.count == 1 for event in model.privacy_.events)
    assert 0.999 < model.privacy_.epsilon <= 1.0
    without = pg.PrivacyPlan(model.privacy_.events[:-1]).epsilon(model.privacy_.delta)
    assert without < 0.8


def test_the_rule_sees_public_facts_alone():
    assert moments_are_better(100_000, 10, 4.0)
    assert not moments_are_better(1000, 10, 4.0)
    assert not moments_are_better(10**9, 5000, 0.1), "the matrix would be too large"
    X, y = table(n=60_000)
    assert pg.PrivateRidge(4.0, random_state=0).fit(X, y).n_iter_ == 1
    assert pg.PrivateRidge(0.1, random_state=0).fit(X, y).n_iter_ > 1
    assert pg.PrivateRidge(4.0, steps=5, random_state=0).fit(X, y).n_iter_ == 5
    moved = pg.PrivateRidge(4.0, random_state=0).fit(X[::-1] * 7, -(y**2))
    assert moved.n_iter_ == 1


def test_unknown_solvers_are_refused():
    X, y = table(n=100)
    with pytest.raises(ValueError, match="solver"):
        pg.PrivateRidge(solver=cast(Solver, "newton")).fit(X, y)


def test_rows_without_a_target_are_not_learned_from():
    """Whatever stands in them, also NaN."""
    X, y = table()
    left_out = np.arange(y.size) % 4 == 0
    wrong = np.where(left_out, np.nan, y)
    problem = Problem(BY_GRADIENTS, Examples(as_rows(X), wrong, left_out), squares="moments")
    plan = plan_fit(problem.facts, 4.0, 1e-5, Choices())
    found = [
        run_fit(
            replace(problem, examples=Examples(as_rows(X), targets, left_out)),
            plan,
            plan.releases(random_source(0)),
        )
        for targets in (wrong, np.where(left_out, 1e9, y))
    ]
    assert np.array_equal(found[0].coef, found[1].coef)
    assert np.isfinite(found[0].coef).all()


def test_what_noise_hides_is_shrunk_and_the_rest_is_solved():
    """Along eigenvectors: λ b/(λ² + ρ²)."""
    gram = np.diag([1.0, 1e-6])
    matrix = np.block([[gram, np.array([[0.5], [0.0]])], [np.array([[0.5, 0.0]]), np.ones((1, 1))]])
    exact, _ = shrunk_solution(SecondMoments(matrix, 1e-12))
    assert exact == pytest.approx([0.5, 0.0], abs=1e-9)
    noisy = matrix.copy()
    noisy[1, 2] = noisy[2, 1] = 1e-4
    assert abs(shrunk_solution(SecondMoments(noisy, 0.01))[0][1]) < 1e-3
    assert np.linalg.norm(shrunk_solution(SecondMoments(matrix, 10.0))[0]) < 0.01
    assert np.isfinite(shrunk_solution(SecondMoments(-matrix, 0.1))[0]).all()
