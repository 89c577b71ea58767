import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

import privagrad as pg

DIMS = st.integers(1, 12)
SCALES = st.floats(-6, 6).map(lambda e: 10.0**e)
NUMBERS = st.floats(-1e6, 1e6)


@st.composite
def ellipsoids_and_rows(draw):
    dim = draw(DIMS)
    scale = draw(arrays(float, dim, elements=SCALES))
    rows = draw(arrays(float, (draw(st.integers(0, 4)), dim), elements=NUMBERS))
    return pg.Ellipsoid(scale, draw(SCALES)), rows


@pytest.mark.parametrize("how", ["radial", "euclidean"])
@given(case=ellipsoids_and_rows(), seed=st.integers(0, 99))
def test_projection_inequality(how, case, seed):
    """⟨g - p, M (y - p)⟩ ≤ 0 for y in the ellipsoid, with M = C (radial) or I (euclidean)."""
    ellipsoid, rows = case
    projected = ellipsoid.project(rows, how=how)
    assert projected.shape == rows.shape
    assert np.all(ellipsoid.norm(projected) <= ellipsoid.radius)
    directions = np.random.default_rng(seed).standard_normal((20, ellipsoid.dim))
    directions /= np.linalg.norm(directions, axis=1, keepdims=True)
    inside = directions * ellipsoid.noise_std
    metric = ellipsoid.scale if how == "radial" else np.ones(ellipsoid.dim)
    for g, p in zip(rows, projected, strict=True):
        products = (inside - p) @ (metric * (g - p))
        size = np.sqrt(metric) * np.abs(g - p) @ (np.sqrt(metric) * ellipsoid.noise_std)
        assert np.all(products <= 1e-9 * size + 1e-300)


ANY = st.one_of(
    st.floats(allow_nan=True, allow_infinity=True),
    st.floats(-5, 5),
    st.sampled_from([np.nan, np.inf, 1.7e308, -1.7e308, 1e300, 1e-300, 5e-324, 0.0]),
)
WIDE = st.floats(-270, 270).map(lambda e: 10.0**e)


@pytest.mark.parametrize("how", ["radial", "euclidean"])
@settings(max_examples=300)
@given(data=st.data(), dim=st.integers(1, 6))
def test_projections_are_inside_to_the_last_bit(how, data, dim):
    """Whatever the row and the scales: as `norm` computes it, alone or among others."""
    spread = data.draw(st.sampled_from([SCALES, WIDE]))
    scale = data.draw(arrays(float, dim, elements=spread))
    radius = data.draw(spread)
    exponents = np.log10(scale) / 2 - np.log10(radius)
    assume(np.abs(exponents).max() < 279)
    ellipsoid = pg.Ellipsoid(scale, radius)
    rows = data.draw(arrays(float, (3, dim), elements=ANY))
    projected = ellipsoid.project(rows, how=how)
    assert np.isfinite(projected).all()
    assert np.all(ellipsoid.norm(projected) <= radius)
    for row, inside in zip(rows, projected, strict=True):
        assert ellipsoid.norm(inside) <= radius
        assert np.array_equal(ellipsoid.project(row, how=how), inside)
        if np.isfinite(row).all():
            assert ellipsoid.norm(row) > radius or np.array_equal(inside, row)
            assert ellipsoid.norm(row) <= radius or ellipsoid.norm(inside) >= radius * (1 - 1e-9)
        else:
            assert not inside.any()


def exact_euclidean(ellipsoid: pg.Ellipsoid, g: np.ndarray) -> np.ndarray:
    """π_A by bisection in extended precision on y_j = g_j / (1 + λ scale_j)."""
    g, scale = g.astype(np.longdouble), ellipsoid.scale.astype(np.longdouble)
    radius = np.longdouble(ellipsoid.radius)
    low, high = np.longdouble(0), np.sqrt((scale * g**2).sum()) / radius / scale.min()
    for _ in range(400):
        middle = (low + high) / 2 if low * 4 > high else max(np.sqrt(low * high), high * 1e-6)
        outside = np.sqrt((scale * (g / (1 + middle * scale)) ** 2).sum()) > radius
        low, high = (middle, high) if outside else (low, middle)
    return (g / (1 + high * scale)).astype(float)


@pytest.mark.parametrize("condition", [1.0, 1e3, 1e12])
@pytest.mark.parametrize("dim", [1, 2, 30, 300])
def test_euclidean_projection_is_exact(condition, dim):
    rng = np.random.default_rng(0)
    for power in (-3, 0, 3):
        scale = 10.0**power * condition ** rng.uniform(0, 1, dim)
        scale[0], scale[-1] = 10.0**power, 10.0**power * condition
        for spread in (0.0, 1.0):
            ellipsoid = pg.Ellipsoid(scale, 0.7)
            g = rng.standard_normal(dim) * scale ** (-spread / 2) * 10.0 ** rng.integers(-2, 5)
            projected = ellipsoid.project(g, how="euclidean")
            if ellipsoid.norm(g) <= 0.7:
                assert np.array_equal(projected, g)
                continue
            assert ellipsoid.norm(projected) == pytest.approx(0.7, rel=1e-10)
            assert projected == pytest.approx(exact_euclidean(ellipsoid, g), rel=1e-10, abs=0)


@given(case=ellipsoids_and_rows())
def test_unwhiten_inverts_whiten(case):
    ellipsoid, rows = case
    assert ellipsoid.unwhiten(ellipsoid.whiten(rows)) == pytest.approx(rows, rel=1e-14)
    norms = np.linalg.norm(ellipsoid.whiten(rows), axis=1) * ellipsoid.radius
    assert ellipsoid.norm(rows) == pytest.approx(norms, rel=1e-12)


@given(rows=arrays(float, (5, 3), elements=NUMBERS), radius=SCALES)
def test_a_ball_clips_the_euclidean_norm_either_way(rows, radius):
    ball = pg.Ellipsoid.ball(3, radius)
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    clipped = rows * np.minimum(1, radius / np.maximum(norms, 1e-300))
    for how in ("radial", "euclidean"):
        assert ball.project(rows, how=how) == pytest.approx(clipped, rel=1e-10, abs=1e-300)


def test_norms_neither_overflow_nor_underflow():
    ellipsoid = pg.Ellipsoid(np.array([1.0, 4.0]), 1.0)
    assert ellipsoid.norm([3e200, 2e200]) == pytest.approx(5e200)
    assert ellipsoid.norm([3e-200, 2e-200]) == pytest.approx(5e-200)
    assert ellipsoid.project([3e200, 2e200]) == pytest.approx([0.6, 0.4])


def test_noise_std_is_radius_over_root_scale():
    assert pg.Ellipsoid(np.array([4.0, 0.25]), 3.0).noise_std.tolist() == [1.5, 6.0]


@pytest.mark.parametrize(
    ("scale", "radius", "message"),
    [
        ([1.0, 0.0], 1.0, r"scale\[1\]=0.0"),
        ([1.0, -2.0], 1.0, "positive"),
        ([np.nan], 1.0, "positive and finite"),
        ([np.inf], 1.0, "positive and finite"),
        ([], 1.0, "no entries"),
        ([[1.0]], 1.0, r"shape \(d,\)"),
        (["a"], 1.0, "numbers"),
        ([1.0], 0.0, "radius > 0"),
        ([1.0], np.inf, "radius > 0"),
        ([1e-300], 1e300, "Rescale"),
    ],
)
def test_wrong_ellipsoids_say_why(scale, radius, message):
    with pytest.raises((ValueError, TypeError), match=message):
        pg.Ellipsoid(scale, radius)


def test_wrong_rows_say_why():
    ellipsoid = pg.Ellipsoid.ball(3, 1.0)
    with pytest.raises(ValueError, match=r"\(m, 3\) or \(3,\), found shape \(2,\)"):
        ellipsoid.norm([1.0, 2.0])
    with pytest.raises(ValueError, match="radial, euclidean; found 'oblique'"):
        ellipsoid.project([1.0, 2.0, 3.0], how="oblique")  # type: ignore[arg-type]
