"""The stated noise of coefficients: closed forms, doubt, and the spread of repeated fits."""

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy.special import expit

from privagrad.glm.examples import Examples
from privagrad.glm.losses import Loss
from privagrad.glm.rows import as_rows
from privagrad.linear import Choices, Problem, Solver, plan_fit, run_fit
from privagrad.linear.uncertainty import (
    NoisySteps,
    coefficient_noise,
    largest_variances,
    solution_covariance,
    weight_covariance,
)
from privagrad.privacy.noise import random_source
from privagrad.queries.calibration import Calibration
from privagrad.queries.curvature import CURVATURE
from privagrad.queries.moments import Columns
from privagrad.queries.second_moments import SecondMoments

STEPS = NoisySteps(2.0 * (1 - np.arange(50) / 50), 0.1)


def symmetric_noise(size, std, rng):
    """Normal entries: of this deviation off the diagonal, sqrt(2) times that on it."""
    entries = rng.normal(0, std, (size, size))
    return (entries + entries.T) / math.sqrt(2)


def test_gains_are_the_closed_form_of_a_quadratic():
    """Σ_t η_t² Π_{s>t} (1 - η_s h)²."""
    curvature, sizes = np.array([0.0, 1e-3, 0.1, 0.9]), STEPS.sizes
    expected = [
        sum(e**2 * np.prod(np.square(1 - sizes[t + 1 :] * h)) for t, e in enumerate(sizes))
        for h in curvature
    ]
    assert STEPS.gains(curvature) == pytest.approx(expected)
    assert STEPS.gains(curvature)[0] == pytest.approx(np.square(sizes).sum())


def test_steps_that_are_too_large_to_converge_have_finite_gains():
    gains = STEPS.gains(np.array([1.5, 10.0, 1e6]))
    assert (gains <= STEPS.gains(np.zeros(1))).all()


def test_the_covariance_is_that_of_noisy_descent():
    """Of 20,000 descents on a quadratic; each entry within 5 of its standard errors."""
    rng = np.random.default_rng(0)
    basis = np.linalg.qr(rng.standard_normal((3, 3)))[0]
    matrix = (basis * [0.5, 0.05, 0.0]) @ basis.T
    ends = np.zeros((20_000, 3))
    for size in STEPS.sizes:
        ends -= size * (ends @ matrix + STEPS.noise * rng.standard_normal(ends.shape))
    stated = weight_covariance(STEPS, SecondMoments(matrix, 0.0))
    variances = np.diag(stated)
    error = np.sqrt((np.outer(variances, variances) + stated**2) / len(ends))
    assert (np.abs(ends.T @ ends / len(ends) - stated) < 5 * error).all()


def test_a_matrix_of_noise_alone_leaves_nearly_all_of_the_noise():
    bound = math.sqrt(largest_variances(STEPS, np.ones(30), 1)[0])
    rng = np.random.default_rng(1)
    for std in (1e-4, 1e-2, 1.0):
        found = SecondMoments(symmetric_noise(30, std, rng), std)
        stated = np.sqrt(np.diag(weight_covariance(STEPS, found)))
        assert (stated <= bound * (1 + 1e-9)).all()
        assert np.median(stated) > 0.8 * bound


@pytest.mark.parametrize("std", [1e-4, 3e-3, 0.1])
def test_doubt_makes_too_small_statements_rare(std):
    """Also in directions that the noise of the matrix hides: those of nearly equal columns."""
    rng = np.random.default_rng(2)
    matrix = 0.2 * np.eye(8)
    matrix[0, 1] = matrix[1, 0] = 0.2 * 0.999
    exact = np.sqrt(np.diag(weight_covariance(STEPS, SecondMoments(matrix, 0.0))))
    stated = [
        np.sqrt(np.diag(weight_covariance(
            STEPS, SecondMoments(matrix + symmetric_noise(8, std, rng), std))))
        for _ in range(200)
    ]  # fmt: skip
    assert np.mean(np.array(stated) > 0.85 * exact) > 0.95


def test_doubt_widens_little_where_the_curvature_is_clear():
    rng = np.random.default_rng(7)
    exact = weight_covariance(STEPS, SecondMoments(0.2 * np.eye(8), 0.0))[0, 0]
    found = SecondMoments(0.2 * np.eye(8) + symmetric_noise(8, 0.01, rng), 0.01)
    ratio = np.sqrt(np.diag(weight_covariance(STEPS, found)) / exact)
    assert np.median(ratio) < 1.3


def test_sampled_rows_add_their_variance():
    """All of it, along the directions of the gradients, whose second moments curvature follows."""
    steps = NoisySteps(STEPS.sizes, 0.0, sampling=0.5)
    flat = weight_covariance(steps, SecondMoments(1e-12 * np.eye(4), 0.0))
    assert np.trace(flat) == pytest.approx(0.5 * np.square(STEPS.sizes).sum())
    assert largest_variances(steps, np.full(4, 2.0), 3) == pytest.approx(np.diag(flat)[0] / 3)
    skewed = weight_covariance(steps, SecondMoments(1e-12 * np.diag([3.0, 1.0]), 0.0))
    assert skewed[0, 0] == pytest.approx(3 * skewed[1, 1])


@pytest.mark.parametrize("intercept", [True, False])
def test_original_units_are_those_of_the_model(intercept):
    """Against the deviations of weights that are drawn and brought into original units."""
    rng = np.random.default_rng(3)
    centre, unit, target = np.array([2.0, -1.0]), np.array([0.5, 4.0]), 3.0
    columns = Columns(centre, unit, np.ones(2), np.ones(2, dtype=bool))
    size, calibration = 2 + intercept, Calibration(0.5, np.zeros(2), 0.2, 0.4)
    root = rng.standard_normal((2 * size, 2 * size))
    weights = rng.standard_normal((2, size))
    stated = coefficient_noise(root @ root.T, weights, columns, target, calibration)
    drawn = weights + (rng.standard_normal((40_000, 2 * size)) @ root.T).reshape(-1, 2, size)
    factor = 0.5 + 0.2 * rng.standard_normal((40_000, 1, 1))
    # To first order: deviations of the factor times those of the weights are left out.
    moved = (0.5 * (drawn - weights) + factor * weights) * target
    coef = moved[:, :, :2] / unit
    constant = moved[:, :, 2] - coef @ centre if intercept else np.zeros((40_000, 2))
    constant = constant + 0.4 * rng.standard_normal(constant.shape)
    assert stated.coef == pytest.approx(coef.std(axis=0), rel=0.03)
    assert stated.intercept == pytest.approx(constant.std(axis=0), rel=0.03)
    alone = coefficient_noise(np.diag(root @ root.T), weights, columns, target, calibration)
    assert alone.coef == pytest.approx(stated.coef)


def test_least_squares_move_as_stated():
    """The covariance of e - E w, through the inverse."""
    rng = np.random.default_rng(4)
    weights, inverse = rng.standard_normal(3), np.diag([1.0, 2.0, 5.0])
    moved = np.array([
        inverse @ (rng.normal(0, 0.1, 3) - symmetric_noise(3, 0.1, rng) @ weights)
        for _ in range(40_000)
    ])  # fmt: skip
    stated = solution_covariance(SecondMoments(np.eye(4), 0.1), weights, inverse)
    assert moved.T @ moved / len(moved) == pytest.approx(stated, rel=0.05, abs=0.003)


def table(n=6000):
    """Two nearly equal columns, an offset one, a rare indicator."""
    rng = np.random.default_rng(6)
    X = rng.standard_normal((n, 5))
    X[:, 1] = 0.995 * X[:, 0] + 0.1 * X[:, 1]
    X[:, 3] = 5 + 3 * X[:, 3]
    X[:, 4] = rng.random(n) < 0.1
    return X, X @ [1.0, 0.0, -0.5, 0.2, 1.0] - 1, rng


def targets_of(loss, margins, rng):
    if loss.multiclass:
        noisy = np.outer(margins, [1.0, 0.0, -1.0]) + rng.gumbel(size=(margins.size, 3))
        return noisy.argmax(axis=1).astype(float), 3
    if loss.regression:
        return margins + rng.standard_normal(margins.size), 1
    return np.where(rng.random(margins.size) < expit(margins), 1.0, -1.0), 1


@pytest.mark.parametrize(
    ("loss", "choices"),
    [
        (Loss("logistic"), Choices()),
        (Loss("logistic", 0.3), Choices()),
        (Loss("logistic"), Choices(batch_size=1000)),
        (Loss("hinge"), Choices()),
        (Loss("softmax"), Choices()),
        (Loss("multiclass-hinge"), Choices()),
        (Loss("huber"), Choices()),
        (Loss("quantile", 0.8), Choices()),
        (Loss("huber"), None),
    ],
    ids=["logistic", "weighted", "sampled", "hinge", "softmax", "classes", "huber", "quantile",
         "moments"],
)  # fmt: skip
def test_the_stated_noise_is_the_spread_of_repeated_fits(loss, choices):
    """Of 40 fits with these seeds: 95 % intervals hold the mean, and are not much too wide."""
    X, margins, rng = table()
    targets, outputs = targets_of(loss, margins, rng)
    squares: Solver | None = "moments" if choices is None else None
    problem = Problem(loss, Examples(as_rows(X), targets), outputs, squares=squares)
    asked = Choices() if choices is None else choices
    plan = plan_fit(problem.facts, 1.0, 1e-5, asked, evaluated=squares is None)
    fits = [run_fit(problem, plan, plan.releases(random_source(s)), False) for s in range(40)]
    coef = np.array([np.column_stack([fit.coef, fit.intercept]) for fit in fits])
    noise = np.array([
        np.column_stack([fit.noise.coef, fit.noise.intercept]) for fit in fits if fit.noise
    ])  # fmt: skip
    inside = np.abs(coef - coef.mean(axis=0)) <= 1.96 * noise
    assert inside.mean() > 0.92
    assert (inside.mean(axis=0) > 0.8).all()
    ratio = np.median(noise, axis=0) / coef.std(axis=0, ddof=1)
    assert (ratio > 0.75).all()
    assert np.median(ratio) < 2.5
    assert (ratio < 6).all()


def test_without_the_curvature_the_noise_of_all_steps_is_stated():
    X, margins, rng = table(2000)
    signs = targets_of(Loss("logistic"), margins, rng)[0]
    problem = Problem(Loss("logistic"), Examples(as_rows(X), signs))
    stated = {}
    for curved in (True, False):
        plan = plan_fit(problem.facts, 1.0, 1e-5, Choices(steps=20), evaluated=curved)
        assert (CURVATURE.purpose in plan.privacy) == curved
        model = run_fit(problem, plan, plan.releases(random_source(0)), False)
        assert model.noise is not None
        stated[curved] = model.noise.coef
    assert (stated[False] > 0.95 * stated[True]).all()
    assert (stated[False] > 1.5 * stated[True]).any()


@pytest.mark.parametrize(("n", "columns", "released"), [
    (1000, 50, True), (1000, 300, False), (10**7, 50, False),
])  # fmt: skip
def test_the_curvature_is_released_where_it_is_affordable(n, columns, released):
    rows = as_rows(np.zeros((2, columns)))
    facts = Problem(Loss("logistic"), Examples(rows, np.ones(2))).facts
    facts = replace(facts, n=n)
    assert (CURVATURE.purpose in plan_fit(facts, 1.0, 1e-8, Choices(), evaluated=True).privacy) == (
        released
    )
    assert CURVATURE.purpose not in plan_fit(facts, 1.0, 1e-8, Choices()).privacy
