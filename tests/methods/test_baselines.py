"""The mathematics of the private baselines; the contract they share is in test_methods."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

import privagrad as pg
from privagrad.experiments.problems import absolute_regression
from privagrad.glm.gradients import GlmGradients
from privagrad.glm.losses import Loss
from privagrad.glm.rows import as_rows
from privagrad.methods import Setting
from privagrad.methods.adaclip import AdaCliP
from privagrad.methods.gep import GEP, join, split
from privagrad.methods.mirror_descent import MirrorDescent, from_mirror, to_mirror
from privagrad.methods.sgd import DPSGD
from privagrad.methods.subspace_adagrad import SubspaceAdaGrad
from privagrad.privacy.accounting import PrivacyPlan
from privagrad.privacy.events import training_event
from privagrad.privacy.sampling import Batches

NO_ROWS = np.arange(0)
BASELINES = [AdaCliP(), GEP(rank=6), SubspaceAdaGrad(rank=6), MirrorDescent()]
named = pytest.mark.parametrize("method", BASELINES, ids=lambda method: method.name)


class GivenGradients:
    """An oracle that has no rows: a test gives the gradients."""

    loss = Loss("linear")

    def bounded(self, x, batch, ellipsoid):
        raise AssertionError("not asked for in these tests")

    def private_mean_of(self, x, batch, transform, dim):
        raise AssertionError("not asked for in these tests")

    def minimum(self, ridge, smoothing):
        raise AssertionError("not asked for in these tests")

    def perturbed_minimum(self, ridge, smoothing):
        raise AssertionError("not asked for in these tests")


class Fixed(GivenGradients):
    """An oracle without noise on gradients that are given, with a batch of its expected size.

    `transforms` keeps what it was asked to map by.
    """

    def __init__(self, gradients):
        self.gradients = gradients
        self.transforms = []

    def bounded(self, x, batch, ellipsoid):
        return self.gradients.mean(axis=0)

    def private_mean_of(self, x, batch, transform, dim):
        self.transforms.append(transform)
        vectors = transform(self.gradients)
        assert vectors.shape == (len(self.gradients), dim)
        return vectors.mean(axis=0)


class Stream(GivenGradients):
    """An oracle that draws normal gradients of known mean and deviation, bounds and adds noise."""

    def __init__(self, mean, deviation, batch_size, noise):
        self.mean, self.deviation, self.batch_size, self.noise = mean, deviation, batch_size, noise
        self.rng = np.random.default_rng(0)

    def private_mean_of(self, x, batch, transform, dim):
        normals = self.rng.standard_normal((self.batch_size, dim))
        vectors = transform(self.mean + self.deviation * normals)
        vectors /= np.maximum(1.0, np.linalg.norm(vectors, axis=1))[:, None]
        noise = self.noise * self.rng.standard_normal(dim)
        return (vectors.sum(axis=0) + noise) / self.batch_size


def setting(dim, *, batch_size=1, noise=1.0, radius=1.0, public=None, domain=None):
    domain = pg.WholeSpace() if domain is None else domain
    ball = pg.Ellipsoid.ball(dim, radius)
    batches = Batches(10 * batch_size, batch_size, 100)
    plan = PrivacyPlan((), unprotected=True)
    if noise > 0:
        plan = PrivacyPlan((training_event(batches, noise),))
    return Setting(dim, batches, domain, plan, ball, public)


def public_rows(rows):
    """Public gradients that are the rows themselves, wherever the point is."""
    return GlmGradients(Loss("linear"), as_rows(rows), np.zeros(len(rows)))


def run(method, **changes):
    X, y, _ = absolute_regression(n=1000, dim=20)
    arguments = {
        "method": method,
        "epsilon": 4.0,
        "ellipsoid": pg.Ellipsoid.ball(20, 1.0),
        "domain": pg.Box(-1, 1),
        "batch_size": 50,
        "steps": 200,
        "step_size": 0.2,
        "random_state": 0,
        "public": absolute_regression(n=200, dim=20, seed=77)[:2],
    }
    return pg.minimize("absolute", X, y, **{**arguments, **changes})


@named
def test_the_loss_falls_under_privacy(method):
    X, y, _ = absolute_regression(n=1000, dim=20)
    assert np.abs(X @ run(method).last - y).mean() < np.abs(y).mean() / 2


@named
def test_an_empty_batch_is_a_step_of_noise(method):
    """Batches of 1 expected row out of 50 are empty more often than not."""
    X, y, _ = absolute_regression(n=50, dim=20)
    result = pg.minimize(
        "absolute", X, y, method=method, epsilon=1.0, ellipsoid=pg.Ellipsoid.ball(20, 1.0),
        domain=pg.Box(-1, 1), batch_size=1, steps=20, step_size=0.1, random_state=0,
        public=absolute_regression(n=30, dim=20, seed=77)[:2],
    )  # fmt: skip
    assert result.diagnostics.examples < 60
    assert np.isfinite(result.last).all()


@pytest.mark.parametrize("method", [AdaCliP(), GEP()], ids=lambda method: method.name)
def test_without_noise_a_mapping_leaves_no_trace(method):
    plain = run("sgd", epsilon=None)
    assert np.array_equal(run(method, epsilon=float("inf")).last, plain.last)


# AdaCliP


def test_adaclip_learns_the_examples_means_and_deviations():
    deviation, mean = np.geomspace(0.05, 1.0, 8), np.linspace(-0.2, 0.3, 8)
    method = AdaCliP(scale_memory=0.999, spread=30.0)
    state = method.start(setting(8, batch_size=40, noise=0.3))
    oracle, x = Stream(mean, deviation, 40, 0.3), np.zeros(8)
    for _ in range(8000):
        method.step(state, x, method.gradient(state, oracle, x, np.arange(40)), 0.1)
    # s² averages a thousand χ²: 1/√1000 of itself, hence 1.6% of s, is one standard deviation.
    learned = np.sqrt(state.variance)
    assert learned == pytest.approx(deviation, rel=0.1)
    assert state.mean == pytest.approx(mean, abs=0.1 * deviation.max())
    assert state.width == pytest.approx(2 * np.sqrt(learned * learned.sum()), rel=1e-12)


def test_adaclip_forgets_neither_the_batch_size_nor_the_noise():
    """Each step's estimate of s² is unbiased: its mean over many steps is s², noise or not."""
    for batch_size, noise in [(1, 0.0001), (25, 0.0001), (25, 5.0)]:
        method = AdaCliP(mean_memory=1.0, scale_memory=1e-9, spread=1.0)
        state = method.start(setting(4, batch_size=batch_size, noise=noise, radius=10.0))
        oracle, x, seen = Stream(0.0, 0.5, batch_size, noise), np.zeros(4), []
        for _ in range(5000):
            method.step(state, x, method.gradient(state, oracle, x, NO_ROWS), 0.1)
            seen.append(state.variance)
        # The mean of 20,000 estimates, each off by √2 (s² + (z·radius)²/batch_size).
        error = math.sqrt(2 / 20_000) * (0.25 + (noise * 10.0) ** 2 / batch_size)
        # 5.5 deviations: another seed would raise a false alarm with probability below 1e-7.
        assert np.mean(seen) == pytest.approx(0.25, abs=5.5 * error)


def test_adaclip_with_fixed_scales_is_dp_sgd():
    fixed = AdaCliP(mean_memory=1.0, spread=1.0)
    assert run(fixed).last == pytest.approx(run("dp-sgd").last, rel=1e-9, abs=1e-12)
    first = {"steps": 1, "step_size": 1.0, "domain": pg.WholeSpace()}
    assert run(AdaCliP(), **first).last == pytest.approx(run("dp-sgd", **first).last, rel=1e-9)
    assert run(AdaCliP()).last != pytest.approx(run("dp-sgd").last, rel=1e-3)


@given(data=st.data(), dim=st.integers(1, 6))
def test_adaclip_returns_the_mean_gradient_where_nothing_is_clipped(data, dim):
    """However it centres and scales, b w + m undoes it."""
    gradients = data.draw(arrays(float, (5, dim), elements=st.floats(-1, 1)))
    method, oracle, x = AdaCliP(), Fixed(gradients), np.zeros(dim)
    state = method.start(setting(dim, batch_size=5))
    for _ in range(3):
        gradient = method.gradient(state, oracle, x, NO_ROWS)
        assert gradient == pytest.approx(gradients.mean(axis=0), rel=1e-9, abs=1e-12)
        method.step(state, x, gradient, 0.1)


def test_adaclips_scales_stay_within_their_spread():
    method = AdaCliP(spread=4.0)
    for size in (1e-6, 1e6):
        state = method.start(setting(9, radius=2.0))
        for _ in range(100):
            method.gradient(state, Fixed(np.full((1, 9), size)), np.zeros(9), np.arange(1))
        assert state.width == pytest.approx(8.0 if size > 1 else 0.5)


@pytest.mark.parametrize(
    "settings", [{"mean_memory": 1.1}, {"scale_memory": 0}, {"multiple": -1}, {"spread": 0.5}]
)
def test_adaclip_refuses_settings_that_make_no_sense(settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        AdaCliP(**settings)


# GEP


def orthonormal(dim, rank, seed=0):
    return np.linalg.qr(np.random.default_rng(seed).standard_normal((dim, rank)))[0]


def bounds_both_parts(transform, gradients, rank):
    """Whether each part of every row has norm ≤ 1/√2, and so the row norm ≤ 1."""
    vectors, most = transform(gradients), math.sqrt(0.5) * (1 + 1e-12)
    parts = (vectors[:, :rank], vectors[:, rank:])
    return all((np.linalg.norm(part, axis=1) <= most).all() for part in parts)


extreme = st.one_of(st.floats(-5, 5), st.sampled_from([1e308, -1e200, 1e-200, 5e-324]))


@given(data=st.data(), dim=st.integers(1, 7), ratio=st.sampled_from([1e-3, 0.2, 1.0, 30.0]))
def test_geps_map_has_norm_one_at_most(data, dim, ratio):
    rank = data.draw(st.integers(1, dim))
    gradients = data.draw(arrays(float, (4, dim), elements=extreme))
    basis, radii = orthonormal(dim, rank), (0.7, 0.7 * ratio)
    assert bounds_both_parts(lambda rows: split(rows, basis, radii), gradients, rank)
    axes = np.eye(dim)[:, :rank]
    assert bounds_both_parts(lambda rows: split(rows, axes, radii), gradients, rank)
    whole = np.linalg.norm(split(gradients, basis, radii), axis=1)
    assert (whole <= 1 + 1e-12).all()


def test_a_map_that_does_not_bound_would_be_caught():
    """The bound is reached, so that no factor is to spare; mutants of the map exceed it."""
    dim, rank, radii = 6, 2, (0.7, 0.14)
    basis = orthonormal(dim, rank)
    gradients = 10 * np.random.default_rng(0).standard_normal((20, dim))
    assert np.linalg.norm(split(gradients, basis, radii), axis=1) == pytest.approx(np.ones(20))
    inside = gradients @ basis
    outside = gradients - inside @ basis.T

    def bound(rows, radius):
        return rows / np.maximum(1.0, np.linalg.norm(rows, axis=1) / radius)[:, None]

    def stack(first, second):
        return np.hstack([first / radii[0], second / radii[1]]) / math.sqrt(2)

    right = stack(bound(inside, radii[0]), bound(outside, radii[1]))
    assert split(gradients, basis, radii) == pytest.approx(right, rel=1e-12)
    mutants = {
        "no bound": stack(inside, outside),
        "no bound on the embedding": stack(inside, bound(outside, radii[1])),
        "no bound on the residual": stack(bound(inside, radii[0]), outside),
        "the residual bounded like the embedding": stack(
            bound(inside, radii[0]), bound(outside, radii[0])
        ),
        "no share": stack(bound(inside, radii[0]), bound(outside, radii[1])) * math.sqrt(2),
        "only the whole bounded": bound(stack(inside, outside), 1.0),
    }
    for name, vectors in mutants.items():
        assert not bounds_both_parts(lambda _, vectors=vectors: vectors, gradients, rank), name


@given(data=st.data(), dim=st.integers(1, 7))
def test_gep_returns_the_mean_gradient_where_nothing_is_clipped(data, dim):
    rank = data.draw(st.integers(1, dim))
    gradients = data.draw(arrays(float, (5, dim), elements=st.floats(-1, 1)))
    basis, radii = orthonormal(dim, rank), (4.0, 5.0)
    joined = join(split(gradients, basis, radii).mean(axis=0), basis, radii)
    assert joined == pytest.approx(gradients.mean(axis=0), rel=1e-9, abs=1e-12)


def test_gep_asks_for_the_split_in_its_public_subspace():
    rng = np.random.default_rng(0)
    basis, gradients = orthonormal(5, 2), 10 * rng.standard_normal((8, 5))
    method, oracle, x = GEP(rank=2, residual_ratio=0.3), Fixed(gradients), np.zeros(5)
    rows = rng.standard_normal((30, 2)) @ basis.T
    state = method.start(setting(5, batch_size=8, radius=0.5, public=public_rows(rows)))
    gradient = method.gradient(state, oracle, x, NO_ROWS)
    (transform,) = oracle.transforms
    assert bounds_both_parts(transform, gradients, 2)
    inside = gradients @ basis @ basis.T
    outside = gradients - inside
    expected = 0.5 * inside / np.linalg.norm(inside, axis=1)[:, None]
    expected += 0.15 * outside / np.linalg.norm(outside, axis=1)[:, None]
    assert gradient == pytest.approx(expected.mean(axis=0), rel=1e-9)


# Subspace AdaGrad


def full_matrix_adagrad(gradients, basis, alpha):
    """x ← x - α (P (Σ g gᵀ) P)^{+1/2} P g with P the projection, by dense matrices."""
    projection = basis @ basis.T
    x, moments = np.zeros(len(basis)), np.zeros((len(basis), len(basis)))
    for g in gradients:
        moments += np.outer(projection @ g, projection @ g)
        values, vectors = np.linalg.eigh(moments)
        root = vectors @ np.diag(np.sqrt(np.maximum(values, 0))) @ vectors.T
        x = x - alpha * np.linalg.pinv(root, rcond=1e-7) @ projection @ g
        yield x


@pytest.mark.parametrize("rank", [5, 2])
def test_subspace_adagrad_is_full_matrix_adagrad(rank):
    rng = np.random.default_rng(1)
    gradients = rng.standard_normal((30, 5)) * np.geomspace(1, 0.01, 5)
    basis = orthonormal(5, rank)
    rows = public_rows(rng.standard_normal((40, rank)) @ basis.T)
    method, x = SubspaceAdaGrad(rank=rank), np.zeros(5)
    state = method.start(setting(5, public=rows))
    for g, expected in zip(gradients, full_matrix_adagrad(gradients, basis, 0.3), strict=True):
        method.step(state, x, method.gradient(state, Fixed(g[None]), x, NO_ROWS), 0.3)
        assert x == pytest.approx(expected, rel=1e-6, abs=1e-9)
    assert x - basis @ (basis.T @ x) == pytest.approx(np.zeros(5), abs=1e-12)


def test_subspace_adagrad_stays_still_where_it_saw_nothing():
    method, x = SubspaceAdaGrad(rank=3), np.ones(3)
    state = method.start(setting(3, public=public_rows(np.eye(3))))
    for gradient, moved in [([0, 0, 0], [1, 1, 1]), ([0, -4.0, 0], [1, 1.5, 1])]:
        rows = np.array([gradient], dtype=float)
        method.step(state, x, method.gradient(state, Fixed(rows), x, NO_ROWS), 0.5)
        assert x == pytest.approx(np.array(moved), rel=1e-12)


def test_a_ridge_shortens_subspace_adagrads_steps():
    method, x = SubspaceAdaGrad(rank=2, ridge=16.0), np.zeros(2)
    state = method.start(setting(2, public=public_rows(np.eye(2))))
    rows = np.array([[0.0, 3.0]])
    method.step(state, x, method.gradient(state, Fixed(rows), x, NO_ROWS), 1.0)
    assert x == pytest.approx(np.array([0.0, -3 / 5]))


def test_subspace_adagrad_keeps_its_first_basis():
    """Public gradients of the huber loss turn with the point; the basis does not."""
    rng = np.random.default_rng(0)
    public = GlmGradients(Loss("huber"), as_rows(rng.standard_normal((9, 4))), np.ones(9))
    method = SubspaceAdaGrad(rank=2)
    state = method.start(setting(4, public=public))
    bases = []
    for point in (0.0, 5.0, -3.0):
        method.gradient(state, Fixed(np.ones((1, 4))), np.full(4, point), NO_ROWS)
        bases.append(state.basis)
    assert bases[0] is bases[1] is bases[2]


# Mirror descent


@pytest.mark.parametrize("domain", [pg.WholeSpace(), pg.Box(-1, 1), pg.L1Ball(1.0)], ids=repr)
def test_mirror_descent_with_power_two_is_dp_sgd(domain):
    mirrored, plain = run(MirrorDescent(power=2.0), domain=domain), run(DPSGD(), domain=domain)
    assert mirrored.last == pytest.approx(plain.last, rel=1e-9, abs=1e-12)


@given(
    x=arrays(float, st.integers(1, 30), elements=st.floats(-1e3, 1e3)),
    unit=st.sampled_from([1e-150, 1.0, 1e150]),
    power=st.floats(1.05, 2.0),
)
def test_the_mirror_inverts(x, unit, power):
    there = to_mirror(x * unit, power)
    assert np.isfinite(there).all()
    assert from_mirror(there, power) / unit == pytest.approx(x, rel=1e-9, abs=1e-12)


@given(x=arrays(float, 5, elements=st.floats(-10, 10)), power=st.floats(1.1, 2.0))
def test_the_mirror_is_the_gradient_of_its_potential(x, power):
    """Fenchel's equality h(x) + h*(θ) = ⟨x, θ⟩ holds at θ = ∇h(x) and nowhere else."""
    dual, conjugate = to_mirror(x, power), power / (power - 1)
    potential = np.linalg.norm(x, power) ** 2 / (2 * (power - 1))
    polar = np.linalg.norm(dual, conjugate) ** 2 * (power - 1) / 2
    assert potential + polar == pytest.approx(x @ dual, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize(("dim", "power"), [(1, 2), (3, 2), (4, 1 + 1 / math.log(4)), (100, 1.217)])
def test_mirror_descents_power_follows_the_dimension(dim, power):
    assert MirrorDescent().start(setting(dim)).power == pytest.approx(power, rel=1e-3)


@pytest.mark.parametrize("size", [0.0, 5e-324, 1e-200, 1e200])
def test_mirror_descent_survives_tiny_and_huge_coordinates(size):
    method = MirrorDescent()
    state = method.start(setting(6))
    for x in (np.zeros(6), np.array([1.0, -1.0, 1e-300, 1e100, 0.0, 3.0])):
        method.step(state, x, np.array([size, -size, 1.0, 0.0, 0.0, 1e-30]), 0.1)
        assert np.isfinite(x).all()


def test_mirror_descent_leaves_small_coordinates_to_a_sparse_point():
    """The first step from 0 is steeper than any linear one: |x_j| grows as |g_j|^{1/(p-1)}."""
    method, x = MirrorDescent(), np.zeros(50)
    state = method.start(setting(50))
    method.step(state, x, np.r_[-1.0, -0.5, np.zeros(48)], 1.0)
    assert x[1] / x[0] == pytest.approx(0.5 ** math.log(50))


@pytest.mark.parametrize("power", [1.0, 2.5])
def test_mirror_descent_refuses_powers_without_a_mirror(power):
    with pytest.raises(ValueError, match="power"):
        MirrorDescent(power=power)
