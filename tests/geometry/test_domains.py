import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

import privagrad as pg

DOMAINS = [
    pg.WholeSpace(),
    pg.Box(-1, 1),
    pg.Box(0.5, np.inf),
    pg.L2Ball(2.0),
    pg.L1Ball(1.5),
    pg.Simplex(),
    pg.Simplex(3.0),
]
METRICS = [None, "uniform", "decades"]


def contains(domain: pg.domains.Domain, y: np.ndarray) -> bool:
    slack = 1e-9
    if isinstance(domain, pg.Box):
        return bool(np.all(y >= domain.low) and np.all(y <= domain.high))
    if isinstance(domain, pg.L2Ball):
        return bool(np.linalg.norm(y) <= domain.radius * (1 + slack))
    if isinstance(domain, pg.L1Ball):
        return bool(np.abs(y).sum() <= domain.radius * (1 + slack))
    if isinstance(domain, pg.Simplex):
        return bool(np.all(y >= 0) and abs(y.sum() - domain.radius) <= slack * domain.radius)
    return True


@pytest.mark.parametrize("metric_kind", METRICS)
@pytest.mark.parametrize("domain", DOMAINS, ids=repr)
@given(data=st.data())
def test_projection_inequality(domain, metric_kind, data):
    """⟨x - p, M (y - p)⟩ ≤ 0 for every y in the domain: p is the nearest point in the metric."""
    dim = data.draw(st.integers(1, 8))
    x = data.draw(arrays(float, dim, elements=st.floats(-100, 100)))
    metric = None
    if metric_kind == "uniform":
        metric = np.full(dim, data.draw(st.sampled_from([1e-3, 1.0, 1e5])))
    elif metric_kind == "decades":
        metric = 10.0 ** data.draw(arrays(float, dim, elements=st.floats(-6, 6)))
    p = domain.project(x, metric)
    assert contains(domain, p)
    weights = np.ones(dim) if metric is None else metric
    others = data.draw(arrays(float, (6, dim), elements=st.floats(-5, 5)))
    for other in others:
        y = domain.project(other)
        # p itself may be off by some units in its last place.
        size = np.sum(weights * np.abs(x - p) * (np.abs(y - p) + 1e-5))
        assert np.sum(weights * (x - p) * (y - p)) <= 1e-9 * size + 1e-9 * weights.min()


@pytest.mark.parametrize("domain", DOMAINS, ids=repr)
def test_points_inside_stay_bit_for_bit(domain):
    inside = domain.project(np.array([0.7, 0.2, 0.1]))
    if isinstance(domain, pg.Simplex):
        assert domain.project(inside) == pytest.approx(inside, abs=1e-15)
    else:
        assert np.array_equal(domain.project(inside, [1.0, 5.0, 1e-3]), inside)


@pytest.mark.parametrize("domain", DOMAINS, ids=repr)
def test_projecting_in_place_equals_projecting(domain):
    x, metric = np.array([3.0, -2.0, 0.1]), np.array([1.0, 10.0, 0.1])
    expected = domain.project(x, metric)
    assert domain.project_into(x, x, metric) is x
    assert np.array_equal(x, expected)


def test_known_projections_in_a_metric():
    # min 4 (y1 - 1)² + (y2 - 1)² on y1 + y2 = 1, y ≥ 0: y = (0.8, 0.2).
    assert pg.Simplex().project([1.0, 1.0], [4.0, 1.0]) == pytest.approx([0.8, 0.2])
    assert pg.L1Ball(1.0).project([-1.0, 1.0], [4.0, 1.0]) == pytest.approx([-0.8, 0.2])
    # A very heavy coordinate keeps its place on the circle, the other gives way.
    y = pg.L2Ball(1.0).project([0.6, 5.0], [1e12, 1.0])
    assert y == pytest.approx([0.6, 0.8], abs=1e-6)


def extreme_points(domain: pg.domains.Domain, dim: int) -> np.ndarray:
    if isinstance(domain, pg.Box):
        return np.array(list(itertools.product([domain.low, domain.high], repeat=dim)))
    units = np.eye(dim) * domain.radius
    return units if isinstance(domain, pg.Simplex) else np.vstack([units, -units])


@pytest.mark.parametrize("dim", [1, 2, 4])
@pytest.mark.parametrize("domain", [pg.Box(-1, 2), pg.L2Ball(2.0), pg.L1Ball(1.5), pg.Simplex(3.0)])
def test_diameters_are_attained_at_extreme_points(domain, dim):
    """Also for the L2 ball, whose scaled diameter lies along an axis."""
    scale = np.array([0.5, 3.0, 1.0, 0.1])[:dim]
    points = extreme_points(domain, dim)
    differences = (points[:, None] - points[None]).reshape(-1, dim)
    scaled = np.sqrt(np.square(differences) @ (1 / scale)).max()
    assert domain.scaled_diameter(scale) == pytest.approx(scaled)
    assert domain.max_diameter(dim) == pytest.approx(np.abs(differences).max())
    assert domain.euclidean_diameter(dim) == pytest.approx(
        np.linalg.norm(differences, axis=1).max()
    )


def test_the_whole_space_has_no_diameter():
    whole = pg.WholeSpace()
    assert whole.euclidean_diameter(3) == whole.max_diameter(3) == np.inf


def test_boxes_take_vectors():
    box = pg.Box(np.array([-1.0, 0.0]), 2.0)
    assert box.project([-5.0, -5.0]).tolist() == [-1.0, 0.0]
    assert box.project([5.0, 5.0]).tolist() == [2.0, 2.0]
    assert box.euclidean_diameter(2) == pytest.approx(np.sqrt(13))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: pg.Box(1, -1), "low <= high"),
        (lambda: pg.Box(np.zeros(2), np.ones(3)), "one length"),
        (lambda: pg.L2Ball(0), "radius > 0"),
        (lambda: pg.L1Ball(-1), "radius > 0"),
        (lambda: pg.Simplex("x"), "number"),  # type: ignore[arg-type]
        (lambda: pg.L2Ball(1).project([1.0, 2.0], [1.0, 0.0]), r"metric\[1\]=0.0"),
        (lambda: pg.Box(np.zeros(2), 1.0).project([1.0, 2.0, 3.0]), "2 coordinates"),
        (lambda: pg.Box(0, 1).project([1.0, 2.0], out=np.empty(1)), r"out of shape \(2,\)"),
        (lambda: pg.L2Ball(1).project([1.0, 2.0], [1.0]), r"shape \(2,\)"),
    ],
)
def test_wrong_domains_say_why(make, message):
    with pytest.raises((ValueError, TypeError), match=message):
        make()
