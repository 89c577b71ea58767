"""The curvature of bounded gradients: what it is, what a row can move, its noise."""

import math

import numpy as np
import pytest
from scipy.sparse import csr_array
from scipy.special import expit, softmax

from privagrad.geometry.ellipsoid import Ellipsoid
from privagrad.glm.gradients import GlmGradients
from privagrad.glm.losses import Loss
from privagrad.glm.rows import as_rows
from privagrad.privacy.mechanism import GaussianSum
from privagrad.queries import second_moments
from privagrad.queries.curvature import CURVATURE, private_curvature
from tests.releases import releases_at
from tests.statistics import assert_scale

N, DIM = 300, 3
PURPOSE = CURVATURE.purpose


def problem(loss, outputs=1, layout=np.asarray):
    rng = np.random.default_rng(5)
    X = rng.standard_normal((N, DIM)) * (rng.random((N, DIM)) < 0.8)
    if loss.multiclass:
        y = rng.integers(0, outputs, N).astype(float)
    else:
        y = rng.standard_normal(N) if loss.regression else np.sign(rng.standard_normal(N))
    return GlmGradients(loss, as_rows(layout(X)), y, outputs), X, y


def found(gradients, weights, radius, noise=1e-7, norm=1e4, seed=0):
    """With so large a median norm no row is shrunk."""
    ball = Ellipsoid.ball(weights.size, radius)
    return private_curvature(gradients, weights, ball, norm, releases_at({PURPOSE: noise}, seed))


def mean_of(weights, X):
    return (X * weights[:, None]).T @ X / N


@pytest.mark.parametrize("layout", [np.asarray, csr_array])
@pytest.mark.parametrize("ratio", [1.0, 0.3])
@pytest.mark.parametrize("radius", [0.5, 50.0])
def test_it_is_the_change_of_the_bounded_slope_of_logistic_regression(layout, ratio, radius):
    gradients, X, y = problem(Loss("logistic", ratio), layout=layout)
    w = np.array([1.0, -2.0, 0.5])
    most = radius / np.maximum(np.linalg.norm(X, axis=1), 1e-300)
    weight = np.where(y < 0, ratio, 1.0)

    def slope(margins):
        return np.clip(-weight * y * expit(-y * margins), -most, most)

    change = slope(X @ w + 0.5) - slope(X @ w - 0.5)
    matrix = found(gradients, w, radius).matrix
    assert matrix == pytest.approx(mean_of(change, X), abs=1e-4)
    assert np.linalg.eigvalsh(matrix)[0] > -1e-4


@pytest.mark.parametrize(
    ("loss", "change"),
    [
        (Loss("huber", 1.0), lambda r: np.clip(r + 0.5, -1, 1) - np.clip(r - 0.5, -1, 1)),
        (Loss("quantile", 0.9), lambda r: (np.abs(r) < 1) / 2),
        (Loss("absolute"), lambda r: (np.abs(r) < 1) * 1.0),
    ],
    ids=["huber", "quantile", "absolute"],
)
def test_rows_of_regressions_are_bounded_by_their_norms(loss, change):
    gradients, X, y = problem(loss)
    w, radius = np.array([1.0, -2.0, 0.5]), 0.7
    shrink = np.minimum(1, radius / (loss.lipschitz * np.maximum(np.linalg.norm(X, axis=1), 1e-9)))
    expected = mean_of(shrink * change(X @ w - y), X)
    assert found(gradients, w, radius).matrix == pytest.approx(expected, abs=1e-4)


def bounded_slopes(margins, label, most):
    slopes = softmax(margins)
    slopes[label] -= 1
    return slopes * min(1.0, most / np.linalg.norm(slopes))


@pytest.mark.parametrize("radius", [0.5, 50.0])
def test_of_several_classes_it_is_the_derivative_of_bounded_slopes(radius):
    """Across the gradient, where it is bounded: what its bound does along it is left out."""
    gradients, X, y = problem(Loss("softmax"), 3)
    w = np.random.default_rng(0).standard_normal((3, DIM))
    expected = np.zeros((3 * DIM, 3 * DIM))
    for a, label in zip(X, y.astype(int), strict=True):
        most = radius / max(np.linalg.norm(a), 1e-300)
        slopes = bounded_slopes(w @ a, label, math.inf)
        moved = [
            (bounded_slopes(w @ a + h, label, most) - bounded_slopes(w @ a - h, label, most)) / 2e-5
            for h in 1e-5 * np.eye(3)
        ]
        derivative = np.array(moved).T
        if np.linalg.norm(slopes) > most:
            along = slopes / np.linalg.norm(slopes)
            derivative = derivative @ (np.eye(3) - np.outer(along, along))
        expected += np.kron(derivative, np.outer(a, a)) / N
    assert found(gradients, w.ravel(), radius).matrix == pytest.approx(expected, abs=1e-3)


def test_the_hinge_bends_where_the_rival_comes_near():
    gradients, X, y = problem(Loss("multiclass-hinge"), 3)
    w = np.random.default_rng(0).standard_normal((3, DIM))
    expected = np.zeros((3 * DIM, 3 * DIM))
    for a, label in zip(X, y.astype(int), strict=True):
        others = np.where(np.arange(3) == label, -np.inf, w @ a)
        gap = 1 + others.max() - (w @ a)[label]
        u = np.eye(3)[others.argmax()] - np.eye(3)[label]
        shrink = min(1.0, 0.5 / (math.sqrt(2) * np.linalg.norm(a))) if a.any() else 0.0
        expected += np.kron((abs(gap) < 1) * shrink / 2 * np.outer(u, u), np.outer(a, a)) / N
    assert found(gradients, w.ravel(), 0.5).matrix == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(("name", "outputs"), [("logistic", 1), ("softmax", 3)])
def test_a_row_moves_it_by_at_most_one(name, outputs):
    """And by one if it is shrunk, so that a smaller bound would be noticed."""
    made = []

    class Recorded(GaussianSum):
        def release(self, total, *rest):
            made.append(np.linalg.norm(total.memory) * self.grid)
            return super().release(total, *rest)

    loss = Loss(name)
    for scale in (1.0, 100.0):
        rows = as_rows(np.array([[3.0, -4.0]]) * scale)
        gradients = GlmGradients(loss, rows, np.ones(1), outputs)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(second_moments, "GaussianSum", Recorded)
            found(gradients, np.zeros(2 * outputs), 1e4, noise=1.0, norm=1e-4)
    assert made == pytest.approx([1.0, 1.0], abs=1e-4)


@pytest.mark.parametrize(("name", "outputs"), [("logistic", 1), ("softmax", 3)])
def test_the_noise_is_as_stated(name, outputs):
    """And as the bound needs; false alarm 1e-7."""
    dim, z = 40, 7.0
    gradients = GlmGradients(Loss(name), as_rows(np.zeros((50, dim))), np.ones(50), outputs)
    answer = found(gradients, np.zeros(dim * outputs), 2.0, z, 3.0)
    usual = {"logistic": 0.3, "softmax": 0.6 / math.sqrt(2)}[name]
    assert answer.noise == pytest.approx(z * usual * 2.0 * 3.0 / (math.sqrt(2) * 50))
    assert_scale(answer.matrix[np.triu_indices(dim * outputs, 1)], answer.noise)


def test_a_plan_without_the_event_refuses_it():
    gradients, _, _ = problem(Loss("logistic"))
    ball = Ellipsoid.ball(DIM, 1.0)
    with pytest.raises(RuntimeError, match="curvature"):
        private_curvature(gradients, np.zeros(DIM), ball, 1.0, releases_at({"evaluation": 1.0}))
