"""Sums of bounded gradients: the fast kernels against the slow loop, and their sensitivity."""

from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.sparse import csr_array

import privagrad as pg
from privagrad.geometry import PROJECTIONS
from privagrad.glm import GlmGradients
from privagrad.losses import LOSSES, slope
from privagrad.mechanism import GaussianSum
from privagrad.tables import as_rows

LAYOUTS = ["dense", "csr"]
DTYPES = [np.float32, np.float64]


def gradients_of(loss: pg.Loss, X: np.ndarray, y: np.ndarray, layout: str) -> GlmGradients:
    return GlmGradients(loss, as_rows(csr_array(X) if layout == "csr" else X), y)


def bounded_sum(gradients, x, batch, ellipsoid, grid, projection="radial", pool=None):
    units = np.zeros(x.size)
    counts = gradients.add_bounded(units, x, batch, ellipsoid, grid, projection, pool)
    return units, counts


def slow_sum(gradients, X, x, batch, ellipsoid, projection):
    """One example after the other, each gradient written out."""
    total = np.zeros(x.size)
    for i in batch:
        row = X[i].astype(float)
        g = slope(*gradients.loss.key, float(row @ x), gradients.targets[i]) * row
        total += ellipsoid.whiten(ellipsoid.project(g, how=projection))
    return total


def problem(loss: str, dtype=np.float64, n=40, dim=17, seed=0):
    rng = np.random.default_rng(seed)
    X = (rng.standard_normal((n, dim)) * np.geomspace(1, 1e-2, dim)).astype(dtype)
    X[rng.uniform(size=X.shape) < 0.4] = 0
    y = (
        rng.standard_normal(n)
        if loss in ("absolute", "huber", "quantile")
        else rng.choice([-1.0, 1.0], n)
    )
    return pg.Loss(loss), X, y, rng.standard_normal(dim)


@pytest.mark.parametrize("projection", PROJECTIONS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("loss", LOSSES)
def test_the_fast_path_equals_the_slow_loop(loss, dtype, layout, projection):
    kind, X, y, x = problem(loss, dtype)
    gradients = gradients_of(kind, X, y, layout)
    batch = np.array([3, 3, 0, 39, 20, 7, 8, 9, 10, 11, 25])
    grid = 2.0**-30
    clipped = []
    for radius in (1e-3, 0.5, 1e3):
        ellipsoid = pg.Ellipsoid(np.geomspace(0.1, 100, x.size), radius)
        units, (shrunk, left_out) = bounded_sum(gradients, x, batch, ellipsoid, grid, projection)
        expected = slow_sum(gradients, X, x, batch, ellipsoid, projection)
        assert units * grid == pytest.approx(expected, abs=batch.size * grid)
        assert np.array_equal(units, np.rint(units))
        assert left_out == 0
        clipped.append(shrunk)
    assert clipped[0] > 0
    assert clipped[2] == 0


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("loss", LOSSES)
def test_the_plain_sum_is_the_gradient(loss, layout):
    kind, X, y, x = problem(loss)
    gradients = gradients_of(kind, X, y, layout)
    total = np.zeros(x.size)
    assert gradients.add_plain(total, x, np.arange(len(X))) == (0, 0)
    slopes = [slope(*kind.key, m, t) for m, t in zip(X @ x, y, strict=True)]
    assert total == pytest.approx(X.T @ slopes, rel=1e-12)
    step = 1e-6 * np.random.default_rng(1).standard_normal(x.size)
    change = gradients.objective(x + step) - gradients.objective(x - step)
    assert change == pytest.approx(2 * (total / len(X)) @ step, rel=1e-4)


EXTREME = st.one_of(
    st.floats(-10, 10),
    st.sampled_from([0.0, np.nan, np.inf, -np.inf, 1e-300, 1e30, -1e30, 1e150, 1e200, -1e300]),
)


def squared(vector: np.ndarray) -> Fraction:
    return sum((Fraction(v) ** 2 for v in vector.tolist()), Fraction(0))


@pytest.mark.parametrize("projection", PROJECTIONS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("loss", LOSSES)
@given(data=st.data())
def test_one_row_moves_the_sum_by_at_most_the_declared_sensitivity(loss, layout, projection, data):
    """Adding a row moves the pre-noise sum by ≤ sensitivity, changing one by ≤ twice that.

    In exact arithmetic, for any row: huge, tiny, NaN, infinite. One unit vector is 1/grid units.
    """
    dim, n = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 4))
    signs = loss in ("logistic", "hinge")
    targets = st.sampled_from([-1.0, 1.0]) if signs else EXTREME
    dtype = data.draw(st.sampled_from(DTYPES))
    with np.errstate(over="ignore"):
        X = data.draw(arrays(float, (n, dim), elements=EXTREME)).astype(dtype)
        changed = X.copy()
        changed[-1] = data.draw(arrays(float, dim, elements=EXTREME)).astype(dtype)
    y = data.draw(arrays(float, n, elements=targets))
    other = y.copy()
    other[-1] = data.draw(targets)
    x = data.draw(arrays(float, dim, elements=st.floats(-3, 3)))
    exponents = data.draw(arrays(float, dim, elements=st.floats(-8, 8)))
    ellipsoid = pg.Ellipsoid(10.0**exponents, 10.0 ** data.draw(st.floats(-4, 4)))
    mechanism = GaussianSum(dim, data.draw(st.floats(0.01, 100)), n)

    def total(rows, labels, size):
        gradients = gradients_of(pg.Loss(loss), rows, labels, layout)
        units, _ = bounded_sum(gradients, x, np.arange(size), ellipsoid, mechanism.grid, projection)
        assert np.all(np.isfinite(units))
        return units

    most = (Fraction(mechanism.sensitivity) / Fraction(mechanism.grid)) ** 2
    with_row, without, replaced = total(X, y, n), total(X, y, n - 1), total(changed, other, n)
    assert squared(with_row - without) <= most
    assert squared(with_row - replaced) <= 4 * most


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_bound_is_attained(layout):
    """A test of sensitivity that any tighter clipping would pass says nothing about loose noise."""
    X = np.array([[3e5, -4e5]])
    gradients = gradients_of(pg.Loss("linear"), X, np.zeros(1), layout)
    for projection in PROJECTIONS:
        units, _ = bounded_sum(
            gradients,
            np.zeros(2),
            np.array([0]),
            pg.Ellipsoid([1.0, 9.0], 2.0),
            2.0**-30,
            projection,
        )
        assert np.linalg.norm(units) * 2.0**-30 == pytest.approx(1.0, abs=1e-8)


@pytest.mark.parametrize("projection", [*PROJECTIONS, "plain"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("loss", LOSSES)
def test_rows_that_are_not_finite_count_and_contribute_nothing(loss, layout, projection):
    kind, X, y, x = problem(loss)
    for number, bad in enumerate([np.nan, np.inf, -np.inf]):
        X[3 * number, 2] = bad
    finite = np.isfinite(X).all(axis=1)
    gradients = gradients_of(kind, X, y, layout)
    sums = []
    for batch in (np.arange(len(X)), np.flatnonzero(finite)):
        total = np.zeros(x.size)
        if projection == "plain":
            counts = gradients.add_plain(total, x, batch)
        else:
            total, counts = bounded_sum(
                gradients, x, batch, pg.Ellipsoid.ball(x.size, 0.5), 2.0**-30, projection
            )
        assert counts[1] == batch.size - finite.sum()
        sums.append(total)
    assert np.array_equal(*sums)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_sums_are_exact_in_any_order_and_in_any_number_of_threads(layout):
    rng = np.random.default_rng(0)
    X, y, x = (
        rng.standard_normal((30_000, 40)),
        rng.standard_normal(30_000),
        rng.standard_normal(40),
    )
    gradients = gradients_of(pg.Loss("logistic"), X, np.sign(y), layout)
    ellipsoid = pg.Ellipsoid(np.geomspace(1, 9, 40), 1.0)
    batch = rng.permutation(30_000)
    alone, counts = bounded_sum(gradients, x, batch, ellipsoid, 2.0**-25)
    with ThreadPoolExecutor(3) as pool:
        threaded = bounded_sum(gradients, x, np.sort(batch), ellipsoid, 2.0**-25, pool=pool)
    assert np.array_equal(alone, threaded[0])
    assert counts == threaded[1]
    pieces = [
        bounded_sum(gradients, x, part, ellipsoid, 2.0**-25)[0] for part in np.split(batch, 10)
    ]
    assert np.array_equal(alone, np.sum(pieces, axis=0))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_empty_batch_adds_nothing(layout):
    kind, X, y, x = problem("absolute")
    empty = np.empty(0, dtype=np.int64)
    units, counts = bounded_sum(
        gradients_of(kind, X, y, layout), x, empty, pg.Ellipsoid.ball(x.size, 1.0), 1.0
    )
    assert not units.any()
    assert counts == (0, 0)
