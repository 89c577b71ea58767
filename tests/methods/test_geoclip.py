"""GeoClip: what it learns of gradients, and what it is where it learns nothing."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

import privagrad as pg
from privagrad.methods.geoclip import GeoClip, turned
from tests.methods.test_baselines import NO_ROWS, Fixed, GivenGradients, run, setting


class Correlated(GivenGradients):
    """Means of batches of normal gradients of this covariance, with the noise that they are given.

    Nothing is clipped.
    """

    def __init__(self, root, mean, batch_size, noise, seed=0):
        self.root, self.mean, self.size, self.noise = root, mean, batch_size, noise
        self.rng = np.random.default_rng(seed)

    def private_mean_of(self, x, batch, transform, dim):
        rows = self.rng.standard_normal((self.size, dim)) @ self.root.T + self.mean
        drawn = self.noise * self.rng.standard_normal(dim)
        return (transform(rows).sum(axis=0) + drawn) / self.size


def turn(dim, seed=1):
    return np.linalg.qr(np.random.default_rng(seed).standard_normal((dim, dim)))[0]


def test_it_learns_the_directions_of_the_gradients():
    """M = U Λ^{-1/4} Uᵀ/(2 sqrt(Σ √λ)) of their covariance U Λ Uᵀ, which the coordinates hide."""
    dim, batch_size, noise = 5, 40, 0.3
    vectors, deviations = turn(dim), np.geomspace(0.1, 1.0, dim)
    mean = np.linspace(-0.2, 0.3, dim)
    method = GeoClip(covariance_memory=0.999, spread=30.0)
    state = method.start(setting(dim, batch_size=batch_size, noise=noise))
    oracle, x = Correlated(vectors * deviations, mean, batch_size, noise), np.zeros(dim)
    for _ in range(6000):
        method.gradient(state, oracle, x, np.arange(batch_size))
    true = (vectors * deviations**2) @ vectors.T
    assert state.covariance == pytest.approx(true, abs=0.15)
    assert state.mean == pytest.approx(mean, abs=0.1)
    # ‖M g‖² has the mean γ = 1/4, in equal parts of √λ.
    parts = state.forward @ true @ state.forward.T
    assert np.trace(parts) == pytest.approx(0.25, rel=0.1)
    expected = deviations / deviations.sum() / 4
    assert np.linalg.eigvalsh(parts) == pytest.approx(expected, rel=0.2)
    assert state.forward @ state.back == pytest.approx(np.eye(dim), abs=1e-9)


def test_it_forgets_neither_the_batch_size_nor_the_noise():
    """Each step's estimate of Σ is unbiased, noise or not."""
    root = turn(3) * np.array([0.2, 0.5, 0.8])
    true = root @ root.T
    for batch_size, noise in [(1, 1e-4), (25, 1e-4), (25, 5.0)]:
        method = GeoClip(mean_memory=1.0, covariance_memory=1e-9, spread=1.0)
        state = method.start(setting(3, batch_size=batch_size, noise=noise, radius=10.0))
        oracle, x, seen = Correlated(root, 0.0, batch_size, noise), np.zeros(3), []
        for _ in range(8000):
            method.gradient(state, oracle, x, NO_ROWS)
            seen.append(state.covariance)
        # Of entries of a Wishart matrix with this covariance on the diagonal.
        largest = 0.64 + (noise * 10.0) ** 2 / batch_size
        assert np.mean(seen, axis=0) == pytest.approx(true, abs=5.5 * math.sqrt(2 / 8000) * largest)


def test_with_a_fixed_shape_it_is_dp_sgd():
    fixed = GeoClip(mean_memory=1.0, spread=1.0)
    assert run(fixed).last == pytest.approx(run("dp-sgd").last, rel=1e-9, abs=1e-12)
    first = {"steps": 1, "step_size": 1.0, "domain": pg.WholeSpace()}
    assert run(GeoClip(), **first).last == pytest.approx(run("dp-sgd", **first).last, rel=1e-9)
    assert run(GeoClip()).last != pytest.approx(run("dp-sgd").last, rel=1e-3)


@given(data=st.data(), dim=st.integers(1, 6))
def test_it_returns_the_mean_gradient_where_nothing_is_clipped(data, dim):
    """However it turns and scales, M⁻¹ w + m undoes it."""
    gradients = data.draw(arrays(float, (5, dim), elements=st.floats(-1, 1)))
    method, oracle, x = GeoClip(), Fixed(gradients), np.zeros(dim)
    state = method.start(setting(dim, batch_size=5))
    for _ in range(3):
        gradient = method.gradient(state, oracle, x, NO_ROWS)
        assert gradient == pytest.approx(gradients.mean(axis=0), rel=1e-9, abs=1e-10)


def test_a_vector_depends_on_its_gradient_alone():
    rng = np.random.default_rng(0)
    gradients, mean, matrix = rng.standard_normal((50, 37)), rng.standard_normal(37), turn(37)
    whole = turned(gradients, mean, matrix)
    assert whole == pytest.approx((gradients - mean) @ matrix.T)
    for rows in (np.arange(50)[::-1], np.array([7]), np.arange(3, 20)):
        assert np.array_equal(turned(gradients[rows], mean, matrix), whole[rows])


def test_the_shape_stays_within_its_spread():
    method = GeoClip(spread=4.0)
    for size, width in ((1e-6, 0.5), (1e6, 8.0)):
        state = method.start(setting(9, radius=2.0))
        for step in range(200):
            gradient = np.zeros((1, 9))
            gradient[0, step % 9] = size
            method.gradient(state, Fixed(gradient), np.zeros(9), np.arange(1))
        widths = np.linalg.eigvalsh(state.back)
        assert widths.max() <= 8.0 * (1 + 1e-9)
        assert widths.min() >= 0.5 * (1 - 1e-9)
        assert widths.mean() == pytest.approx(width, rel=0.5)


@pytest.mark.parametrize(
    "settings", [{"mean_memory": 1.1}, {"covariance_memory": 0}, {"multiple": -1}, {"spread": 0.5}]
)
def test_settings_that_make_no_sense_are_refused(settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        GeoClip(**settings)


def test_very_many_parameters_are_refused():
    with pytest.raises(ValueError, match="at most 1000 parameters"):
        GeoClip().start(setting(1001))
