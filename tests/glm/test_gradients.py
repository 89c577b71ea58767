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
from privagrad.geometry.ellipsoid import PROJECTIONS
from privagrad.glm.gradients import GlmGradients
from privagrad.glm.losses import LOSSES, slope
from privagrad.glm.rows import as_rows
from privagrad.privacy.mechanism import GaussianSum

LAYOUTS = ["dense", "csr"]
DTYPES = [np.float32, np.float64]
MULTICLASS = [name for name in LOSSES if pg.Loss(name).multiclass]


def outputs_of(loss: str, classes: int = 3) -> int:
    return classes if loss in MULTICLASS else 1


def gradients_of(
    loss: pg.Loss, X: np.ndarray, y: np.ndarray, layout: str, classes: int = 3
) -> GlmGradients:
    rows = as_rows(csr_array(X) if layout == "csr" else X)
    return GlmGradients(loss, rows, y, outputs_of(loss.name, classes))


def bounded_sum(gradients, x, batch, ellipsoid, grid, projection="radial", pool=None):
    mechanism = GaussianSum(x.size, 1.0, 1.0)
    vars(mechanism)["grid"] = grid
    total = mechanism.sum(ellipsoid)
    gradients.add_bounded(total, x, batch, projection, pool)
    return total.memory, (total.clipped, total.nonfinite)


def slow_gradient(gradients: GlmGradients, row, x, target):
    """One example's gradient, written out."""
    if gradients.loss.name not in MULTICLASS:
        return slope(*gradients.loss.key, float(row @ x), target) * row
    margins, label = x.reshape(-1, row.size) @ row, int(target)
    if gradients.loss.name == "softmax":
        slopes = np.exp(margins) / np.exp(margins).sum()
        slopes[label] -= 1
    else:
        slopes = np.zeros(margins.size)
        rival = max((c for c in range(margins.size) if c != label), key=lambda c: margins[c])
        if 1 + margins[rival] > margins[label]:
            slopes[rival], slopes[label] = 1.0, -1.0
    return np.outer(slopes, row).ravel()


def slow_gradients(gradients, X, x, batch):
    return np.array(
        [slow_gradient(gradients, X[i].astype(float), x, gradients.targets[i]) for i in batch]
    )


def slow_bounded(gradients, X, x, batch, ellipsoid, projection):
    """Each gradient of the batch, brought into the ellipsoid."""
    each = slow_gradients(gradients, X, x, batch)
    if projection != "rows":
        return ellipsoid.project(each, how=projection)
    whitening = ellipsoid.whitening.reshape(gradients.outputs, -1)
    norms = np.linalg.norm(X[batch, None].astype(float) * whitening, axis=2).max(axis=1)
    return each / np.maximum(gradients.loss.lipschitz * norms, 1.0)[:, None]


def problem(loss: str, dtype=np.float64, n=40, dim=17, seed=0):
    rng = np.random.default_rng(seed)
    X = (rng.standard_normal((n, dim)) * np.geomspace(1, 1e-2, dim)).astype(dtype)
    X[rng.uniform(size=X.shape) < 0.4] = 0
    y = (
        rng.standard_normal(n)
        if loss in ("absolute", "huber", "quantile")
        else rng.choice([-1.0, 1.0], n)
    )
    if loss in MULTICLASS:
        y = rng.integers(3, size=n).astype(float)
    return pg.Loss(loss), X, y, rng.standard_normal(dim * outputs_of(loss))


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
        bounded = slow_bounded(gradients, X, x, batch, ellipsoid, projection)
        expected = ellipsoid.whiten(bounded).sum(axis=0)
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
    each = slow_gradients(gradients, X, x, np.arange(len(X)))
    assert total == pytest.approx(each.sum(axis=0), rel=1e-12, abs=1e-15)
    assert gradients.per_example(x, np.arange(len(X))) == pytest.approx(each, rel=1e-12, abs=1e-15)
    step = 1e-6 * np.random.default_rng(1).standard_normal(x.size)
    change = gradients.value(x + step) - gradients.value(x - step)
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
    classes = data.draw(st.integers(1, 4)) if loss in MULTICLASS else 1
    targets = {
        **dict.fromkeys(("logistic", "hinge"), st.sampled_from([-1.0, 1.0])),
        **dict.fromkeys(MULTICLASS, st.integers(0, classes - 1).map(float)),
    }.get(loss, EXTREME)
    dtype = data.draw(st.sampled_from(DTYPES))
    with np.errstate(over="ignore"):
        X = data.draw(arrays(float, (n, dim), elements=EXTREME)).astype(dtype)
        changed = X.copy()
        changed[-1] = data.draw(arrays(float, dim, elements=EXTREME)).astype(dtype)
    y = data.draw(arrays(float, n, elements=targets))
    other = y.copy()
    other[-1] = data.draw(targets)
    x = data.draw(arrays(float, dim * classes, elements=st.floats(-3, 3)))
    exponents = data.draw(arrays(float, x.size, elements=st.floats(-8, 8)))
    ellipsoid = pg.Ellipsoid(10.0**exponents, 10.0 ** data.draw(st.floats(-4, 4)))
    mechanism = GaussianSum(x.size, data.draw(st.floats(0.01, 100)), n)

    def total(rows, labels, size):
        gradients = gradients_of(pg.Loss(loss), rows, labels, layout, classes)
        units, _ = bounded_sum(gradients, x, np.arange(size), ellipsoid, mechanism.grid, projection)
        assert np.all(np.isfinite(units))
        return units

    most = (Fraction(mechanism.sensitivity) / Fraction(mechanism.grid)) ** 2
    with_row, without, replaced = total(X, y, n), total(X, y, n - 1), total(changed, other, n)
    assert squared(with_row - without) <= most
    assert squared(with_row - replaced) <= 4 * most


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("loss", ["linear", *MULTICLASS])
def test_the_bound_is_attained(loss, layout):
    """A test of sensitivity that any tighter clipping would pass says nothing about loose noise."""
    cases = [*((1.0, projection) for projection in PROJECTIONS), (1e295, "radial")]
    for size, projection in cases:
        X = np.array([[3e5, -4e5]]) * size
        gradients = gradients_of(pg.Loss(loss), X, np.zeros(1), layout)
        x = np.zeros((gradients.outputs, 2))
        x[-1, 0] = 1.0  # the wrong class, for certain
        units, counts = bounded_sum(
            gradients,
            x.ravel(),
            np.array([0]),
            pg.Ellipsoid(np.tile([1.0, 9.0], gradients.outputs), 2.0),
            2.0**-30,
            projection,
        )
        assert np.linalg.norm(units) * 2.0**-30 == pytest.approx(1.0, abs=1e-8)
        assert counts == (1, 0)


@pytest.mark.parametrize("projection", PROJECTIONS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("loss", ["hinge", "logistic", *MULTICLASS])
def test_huge_rows_without_a_gradient_add_nothing(loss, layout, projection):
    """Slopes of 0 times anything are 0: a sum that is not finite would give the row away."""
    X, label = np.array([[1e305, 1.0]]), 0.0 if loss in MULTICLASS else 1.0
    gradients = gradients_of(pg.Loss(loss), X, np.array([label]), layout)
    x = np.zeros((gradients.outputs, 2))
    x[0, 1] = 1000.0
    for radius in (1.0, 1e-10):
        ball = pg.Ellipsoid.ball(x.size, radius)
        units, counts = bounded_sum(gradients, x.ravel(), np.array([0]), ball, 2.0**-30, projection)
        assert units.tolist() == [0.0] * x.size
        assert counts == (projection == "rows", 0) or radius < 1


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("loss", LOSSES)
def test_huge_rows_in_huge_ellipsoids_stay_finite(loss, layout):
    X = np.array([[1e300, 2e299]])
    gradients = gradients_of(pg.Loss(loss), X, np.ones(1), layout)
    ball = pg.Ellipsoid.ball(gradients.dim, 1e279)
    units, _ = bounded_sum(gradients, np.zeros(gradients.dim), np.array([0]), ball, 2.0**-30)
    assert np.linalg.norm(units) * 2.0**-30 <= 1.0 + 1e-8
    with pytest.raises(ValueError, match="1e-280 to 1e280"):
        pg.Ellipsoid.ball(2, 1e300)


@pytest.mark.parametrize("projection", PROJECTIONS)
@pytest.mark.parametrize("loss", MULTICLASS)
def test_layouts_agree(loss, projection):
    """Up to one unit, where zeros change the order of a sum."""
    kind, X, y, x = problem(loss)
    ellipsoid = pg.Ellipsoid(np.geomspace(0.1, 100, x.size), 0.5)
    dense, sparse = (
        bounded_sum(
            gradients_of(kind, X, y, layout), x, np.arange(40), ellipsoid, 2.0**-25, projection
        )
        for layout in LAYOUTS
    )
    assert np.abs(dense[0] - sparse[0]).max() <= 1
    assert dense[1] == sparse[1]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_classes_are_counted_from_zero_to_the_largest_label(layout):
    X = np.eye(3)
    rows = as_rows(csr_array(X) if layout == "csr" else X)
    gradients = GlmGradients.of(pg.Loss("softmax"), rows, [0, 3, 1])
    assert (gradients.outputs, gradients.dim) == (4, 12)
    x = np.arange(12.0)
    margins = X @ x.reshape(4, 3).T
    naive = np.log(np.exp(margins).sum(axis=1)) - margins[[0, 1, 2], [0, 3, 1]]
    assert gradients.value(x) == pytest.approx(naive.mean())
    assert GlmGradients.of(pg.Loss("logistic"), rows, [0, 1, 1]).dim == 3


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
    assert np.array_equal(sums[0], sums[1])


@pytest.mark.parametrize("projection", PROJECTIONS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("loss", ["absolute", "huber", "quantile"])
def test_targets_that_are_not_numbers_count_and_contribute_nothing(loss, layout, projection):
    kind, X, y, x = problem(loss)
    y[[3, 5]] = np.nan
    gradients = gradients_of(kind, X, y, layout)
    rest = np.flatnonzero(np.isfinite(y))
    for radius in (1e-3, 1e3):
        ball = pg.Ellipsoid.ball(x.size, radius)
        units, counts = bounded_sum(gradients, x, np.arange(40), ball, 2.0**-30, projection)
        expected, (clipped, _) = bounded_sum(gradients, x, rest, ball, 2.0**-30, projection)
        assert np.array_equal(units, expected)
        assert counts == (clipped, 2)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("loss", ["logistic", *MULTICLASS])
def test_sums_are_exact_in_any_order_and_in_any_number_of_threads(loss, layout):
    n, (kind, X, y, x) = 30_000, problem(loss, n=30_000, dim=60)
    gradients = gradients_of(kind, X, y, layout)
    ellipsoid = pg.Ellipsoid(np.geomspace(1, 9, x.size), 1.0)
    batch = np.random.default_rng(1).permutation(n)
    assert n * gradients.rows.entries_per_row > 1_000_000
    alone, counts = bounded_sum(gradients, x, batch, ellipsoid, 2.0**-25)
    with ThreadPoolExecutor(3) as pool:
        threaded = bounded_sum(gradients, x, np.sort(batch), ellipsoid, 2.0**-25, pool=pool)
    assert np.array_equal(alone, threaded[0])
    assert counts == threaded[1]
    pieces = [
        bounded_sum(gradients, x, part, ellipsoid, 2.0**-25)[0] for part in np.split(batch, 10)
    ]
    assert np.array_equal(alone, np.sum(pieces, axis=0))


@pytest.mark.parametrize("projection", PROJECTIONS)
@pytest.mark.parametrize("classes", [2, 3, 4, 5, 9])
@pytest.mark.parametrize("loss", MULTICLASS)
def test_rows_of_many_columns_add_the_same_in_any_batch(loss, classes, projection):
    """Small batches of sparse rows are summed in the columns of their own entries alone."""
    rng = np.random.default_rng(0)
    X = rng.standard_normal((60, 50)) * (rng.uniform(size=(60, 50)) < 0.1)
    X[5] = 0.0
    y, x = rng.integers(classes, size=60).astype(float), rng.standard_normal(50 * classes)
    ellipsoid = pg.Ellipsoid(np.geomspace(0.1, 9, x.size), 0.3)
    gradients, dense = (
        gradients_of(pg.Loss(loss), X, y, name, classes) for name in ("csr", "dense")
    )

    def summed(batch, given=gradients):
        return bounded_sum(given, x, np.asarray(batch, dtype=int), ellipsoid, 2.0**-20, projection)

    assert 60 * gradients.rows.entries_per_row > 50 > 3 * gradients.rows.entries_per_row
    alone = [summed([i]) for i in range(60)]
    total, counts = summed(np.arange(60))
    assert np.array_equal(np.sum([units for units, _ in alone], axis=0), total)
    assert counts == tuple(np.sum([count for _, count in alone], axis=0))
    few = [7, 5, 7]
    assert np.array_equal(summed(few)[0], np.sum([alone[i][0] for i in few], axis=0))
    assert summed(few)[0] == pytest.approx(summed(few, dense)[0], abs=len(few))


@pytest.mark.parametrize("loss", ["absolute", *MULTICLASS])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_empty_batch_adds_nothing(layout, loss):
    kind, X, y, x = problem(loss)
    empty = np.empty(0, dtype=np.int64)
    units, counts = bounded_sum(
        gradients_of(kind, X, y, layout), x, empty, pg.Ellipsoid.ball(x.size, 1.0), 1.0
    )
    assert not units.any()
    assert counts == (0, 0)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("loss", LOSSES)
def test_a_gradient_depends_on_its_row_alone(loss, layout):
    """In any batch at any place the same to the last bit: at a bend a bit makes another gradient.

    Targets are the margins themselves, rows nearly orthogonal to the point.
    """
    kind, X, y, x = problem(loss, n=70, dim=40)
    X -= np.outer(X @ x[:40], x[:40]) / (x[:40] @ x[:40])
    if loss in ("absolute", "huber", "quantile"):
        X *= 1e9
        y = X @ x
    gradients = gradients_of(kind, X, y, layout)
    alone = np.vstack([gradients.per_example(x, np.array([i])) for i in range(70)])
    for size in (2, 3, 8, 33, 70):
        batch = np.random.default_rng(size).permutation(70)[:size]
        assert np.array_equal(gradients.per_example(x, batch), alone[batch])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("projection", PROJECTIONS)
def test_rows_near_the_largest_double_never_poison_the_sum(projection, layout):
    """Slopes beyond 1 (Huber's reach its bend) times such entries overflow."""
    X = np.array([[1.7e308, 1e300], [1.0, 2.0], [1.7e308, -1.7e308]])
    gradients = gradients_of(pg.Loss("huber", 1.35), X, np.array([-9.0, 0.5, 9.0]), layout)
    batch = np.arange(3)
    for radius in (1e-3, 1.0, 1e3, 1e10, 1e250):
        ellipsoid = pg.Ellipsoid(np.array([1.0, 0.3]), radius)
        units, counts = bounded_sum(gradients, np.ones(2), batch, ellipsoid, 2.0**-30, projection)
        assert np.isfinite(units).all()
        each = [
            bounded_sum(gradients, np.ones(2), batch[i : i + 1], ellipsoid, 2.0**-30, projection)
            for i in range(3)
        ]
        for handed, (_, left_out) in each:
            assert np.linalg.norm(handed) * 2.0**-30 <= 1 + 1e-8
            assert left_out == 0 or not handed.any()
        assert counts[1] == sum(left_out for _, (_, left_out) in each)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("loss", LOSSES)
def test_scales_spread_over_the_range_of_doubles_stay_finite(loss, layout):
    """Where scale/max(scale) underflows, 0 · inf must not arise."""
    kind, X, y, x = problem(loss, dim=3)
    scale = np.tile([1e-300, 1.0, 1e300], x.size // 3)
    for radius in (1e-100, 1.0, 1e100):
        ellipsoid = pg.Ellipsoid(scale, radius)
        units, counts = bounded_sum(
            gradients_of(kind, X * 1e3, y, layout), x, np.arange(40), ellipsoid, 2.0**-30,
            "euclidean",
        )  # fmt: skip
        assert np.isfinite(units).all()
        assert counts[1] == 0
        assert np.linalg.norm(units) * 2.0**-30 <= 40 * (1 + 1e-8)


def test_wrong_sizes_and_labels_are_refused_before_a_kernel_sees_them():
    X = np.ones((3, 2))
    for loss, y, outputs, message in [
        ("softmax", [0, 1, 3], 3, "classes from 0 to 2"),
        ("softmax", [0, 1, -1], 3, "classes from 0 to 2"),
        ("multiclass-hinge", [0, 0.5, 1], 2, "classes from 0 to 1"),
        ("softmax", [0, 1, np.nan], 3, "classes from 0 to 2"),
        ("logistic", [1, -1, 5], 1, "labels -1 and 1"),
        ("absolute", [1.0, 2.0], 1, "each of 3 rows"),
    ]:
        with pytest.raises(ValueError, match=message):
            GlmGradients(pg.Loss(loss), as_rows(X), np.array(y, float), outputs)
    gradients = GlmGradients(pg.Loss("absolute"), as_rows(X), np.ones(3))
    with pytest.raises(ValueError, match=r"point of shape \(2,\)"):
        gradients.per_example(np.ones(3), np.arange(3))
    one = GaussianSum(1, 1.0, 3).sum(pg.Ellipsoid.ball(1, 1.0))
    with pytest.raises(ValueError, match="2 coordinates, found 1 and 1"):
        gradients.add_bounded(one, np.ones(1), np.arange(3))
    with pytest.raises(ValueError, match="dimension 2, as the sum; found 1"):
        bounded_sum(gradients, np.ones(2), np.arange(3), pg.Ellipsoid.ball(1, 1.0), 1.0)
    with pytest.raises(ValueError, match="2 coordinates, found 2 and 1"):
        gradients.add_bounded(one, np.ones(2), np.arange(3))
    with pytest.raises(ValueError, match="coordinates of an ellipsoid"):
        gradients.add_bounded(GaussianSum(2, 1.0, 3).sum(), np.ones(2), np.arange(3))
    with pytest.raises(ValueError, match="classes from 0 to 1"):
        pg.Loss("softmax").value([[0.0, 1.0]], [2])
