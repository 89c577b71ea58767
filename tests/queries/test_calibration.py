"""What makes margins log-odds: from one release within its sensitivity, with its event's noise."""

from contextlib import contextmanager
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.special import expit, softmax

from privagrad.glm.examples import Examples
from privagrad.glm.gradients import GlmGradients
from privagrad.glm.losses import Loss
from privagrad.glm.rows import as_rows
from privagrad.privacy.accounting import PrivacyPlan
from privagrad.privacy.mechanism import GaussianSum
from privagrad.privacy.noise import random_source
from privagrad.privacy.releases import Releases
from privagrad.queries import calibration
from privagrad.queries.calibration import CALIBRATION, CLASS_SHARES, calibrate, class_shares
from tests.releases import releases_at, releases_of
from tests.statistics import assert_scale

CLASSES = [2, 3, 5]
USUAL = 0.7
LARGE = 1e4
NO_PRIVACY = PrivacyPlan((), unprotected=True)
MARGINS = st.one_of(
    st.floats(-8, 8),
    st.sampled_from([0.0, 0.5, -6.0, 1e300, -1e300, np.nan, np.inf, -np.inf]),
)


def gradients_of(margins, labels, ratio=1.0) -> tuple[GlmGradients, np.ndarray]:
    """Gradients and weights of a model that has these margins, for labels 0, 1, ..."""
    columns = margins if margins.ndim > 1 else margins[:, None]
    outputs, labels = columns.shape[1], np.asarray(labels, float)
    if outputs == 1:
        return GlmGradients(Loss("logistic", ratio), as_rows(columns), 2 * labels - 1), np.ones(1)
    softmax = GlmGradients(Loss("softmax"), as_rows(columns), labels, outputs)
    return softmax, np.eye(outputs).ravel()


def shape_of(n, classes):
    return (n, classes) if classes > 2 else n


@contextmanager
def recorded():
    """The releases within: mechanism, the units it was handed, what it gave."""
    made: list[tuple[GaussianSum, np.ndarray, np.ndarray]] = []

    class Recorded(GaussianSum):
        def release(self, total, *rest):
            before = total.memory.copy()
            after = super().release(total, *rest)
            made.append((self, before, after.copy()))
            return after

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibration, "GaussianSum", Recorded)
        yield made


def asked(margins, labels, left_out=None, noise=1.0, seed=0):
    """Mechanism, units and release of the one query of a calibration."""
    with recorded() as made, np.errstate(all="ignore"):
        releases = releases_at({CALIBRATION.purpose: noise}, seed)
        gradients, weights = gradients_of(margins, labels)
        calibrate(replace(gradients, left_out=left_out), weights, releases)
    [one] = made
    return one


def labelled(labels, left_out=None):
    return Examples(as_rows(np.zeros((len(labels), 1))), np.asarray(labels, float), left_out)


def asked_shares(labels, classes, left_out=None, noise=1.0, seed=0):
    with recorded() as made:
        releases = releases_at({CLASS_SHARES.purpose: noise}, seed)
        class_shares(labelled(labels, left_out), classes, releases)
    [one] = made
    return one


def assert_moved_by(units, other, mechanism, times):
    """‖moved‖ ≤ times · sensitivity, in integers."""
    moved = units - other
    assert np.array_equal(moved, np.rint(moved))
    most = times * Fraction(mechanism.sensitivity) / Fraction(mechanism.grid)
    assert sum(int(v) ** 2 for v in moved.tolist()) <= most**2


@pytest.mark.parametrize("classes", CLASSES)
@given(data=st.data())
def test_one_row_moves_a_calibration_by_at_most_the_sensitivity(classes, data):
    """In exact arithmetic, for any margins: left out by one sensitivity, replaced by two."""
    n = data.draw(st.integers(1, 5))
    margins = data.draw(arrays(float, shape_of(n, classes), elements=MARGINS))
    labels = data.draw(arrays(int, n, elements=st.integers(0, classes - 1)))
    noise, last = data.draw(st.floats(0.01, 100)), np.arange(n) == n - 1
    changed, relabelled = margins.copy(), labels.copy()
    changed[-1] = data.draw(arrays(float, margins[-1].shape, elements=MARGINS))
    relabelled[-1] = data.draw(st.integers(0, classes - 1))
    mechanism, whole, _ = asked(margins, labels, noise=noise)
    assert (mechanism.noise_multiplier, mechanism.batch_size) == (noise, n)
    assert_moved_by(whole, asked(margins, labels, last, noise)[1], mechanism, 1)
    assert_moved_by(whole, asked(changed, relabelled, noise=noise)[1], mechanism, 2)


@pytest.mark.parametrize("classes", CLASSES)
def test_a_row_uses_its_whole_norm(classes):
    """One cell of a histogram; for more classes an answer that is certain and wrong."""
    margins = np.full(shape_of(1, classes), -1e3)
    if classes > 2:
        margins[0, 0] = 1e3
    mechanism, units, _ = asked(margins, [1])
    assert np.linalg.norm(units) * mechanism.grid == pytest.approx(1, abs=1e-5)
    mechanism, units, _ = asked_shares([1], classes)
    assert np.linalg.norm(units) * mechanism.grid == pytest.approx(1, abs=1e-5)


def test_what_two_classes_release_is_a_histogram_of_margins_and_labels():
    rng = np.random.default_rng(0)
    margins, labels = rng.normal(0, 4, 3000), rng.integers(0, 2, 3000)
    mechanism, units, _ = asked(margins, labels)
    edges = [-np.inf, *calibration.EDGES, np.inf]
    counts = [np.histogram(margins[labels == label], edges)[0] for label in (0, 1)]
    assert np.array_equal(np.rint(units * mechanism.grid), np.concatenate(counts))


@pytest.mark.parametrize("classes", [3, 5])
def test_what_several_classes_release_are_mean_squared_errors(classes):
    """Of the probabilities for each factor, over their largest norm: no row is shrunk."""
    rng = np.random.default_rng(0)
    margins, labels = rng.normal(0, 6, (500, classes)), rng.integers(0, classes, 500)
    mechanism, units, _ = asked(margins, labels)
    factors = USUAL * np.geomspace(0.25, 4, 9)
    chances = softmax(factors[:, None, None] * margins, axis=2)
    errors = np.square(chances - np.eye(classes)[labels]).sum(axis=2) / 2
    assert errors.max() > 0.99
    expected = errors.sum(axis=1) / np.sqrt(factors.size)
    assert units * mechanism.grid == pytest.approx(expected, rel=1e-5)


@given(data=st.data(), classes=st.integers(2, 5))
def test_one_row_moves_class_shares_by_at_most_the_sensitivity(data, classes):
    n = data.draw(st.integers(1, 5))
    labels = data.draw(arrays(int, n, elements=st.integers(0, classes - 1)))
    noise, last = data.draw(st.floats(0.01, 100)), np.arange(n) == n - 1
    changed = labels.copy()
    changed[-1] = data.draw(st.integers(0, classes - 1))
    mechanism, whole, _ = asked_shares(labels, classes, noise=noise)
    assert (mechanism.noise_multiplier, mechanism.batch_size) == (noise, n)
    assert np.array_equal(np.rint(whole * mechanism.grid), np.bincount(labels, minlength=classes))
    assert_moved_by(whole, asked_shares(labels, classes, last, noise)[1], mechanism, 1)
    assert_moved_by(whole, asked_shares(changed, classes, noise=noise)[1], mechanism, 2)


@pytest.mark.parametrize("classes", CLASSES)
def test_the_noise_is_that_of_the_event(classes):
    """What a release gives, less what it was handed. False alarms: one in ten million."""
    rng = np.random.default_rng(0)
    margins, labels = rng.normal(0, 3, shape_of(50, classes)), rng.integers(0, classes, 50)
    for share, ask in (
        (CALIBRATION, lambda noise, seed: asked(margins, labels, None, noise, seed)),
        (CLASS_SHARES, lambda noise, seed: asked_shares(labels, classes, None, noise, seed)),
    ):
        event = releases_of([share], 1.0, 1e-5).plan[share.purpose]
        noises = []
        for seed in range(600 // classes):
            mechanism, units, released = ask(event.noise_multiplier, seed)
            noises.append(released * 50 - units * mechanism.grid)
        assert_scale(np.concatenate(noises), event.noise_multiplier)


@pytest.mark.parametrize("classes", CLASSES)
def test_a_query_is_one_release_of_its_plan(classes):
    rng = np.random.default_rng(0)
    margins, labels = rng.normal(0, 3, shape_of(50, classes)), rng.integers(0, classes, 50)
    releases = releases_of([CALIBRATION, CLASS_SHARES], 1.0, 1e-5)
    calibrate(*gradients_of(margins, labels), releases)
    assert releases.made == {CALIBRATION.purpose: 1, CLASS_SHARES.purpose: 0}
    class_shares(labelled(labels), classes, releases)
    assert releases.made == {CALIBRATION.purpose: 1, CLASS_SHARES.purpose: 1}


@pytest.mark.parametrize("classes", CLASSES)
def test_rows_left_out_and_margins_that_are_not_finite_add_nothing(classes):
    rng = np.random.default_rng(0)
    margins, labels = rng.normal(0, 3, shape_of(40, classes)), rng.integers(0, classes, 40)
    _, known, _ = asked(margins[:30], labels[:30], noise=LARGE)
    # The grid is coarser for more rows, so that all tables have the same number of them.
    strange = margins.copy()
    for i, bad in zip(range(30, 40), [np.nan, np.inf, -np.inf] * 4, strict=False):
        strange[i if classes == 2 else (i, i % classes)] = bad
    out = np.arange(40) >= 30
    mechanism, units, _ = asked(strange, labels, noise=LARGE)
    assert np.array_equal(asked(margins, labels, out, LARGE)[1], units)
    assert np.array_equal(asked(strange, labels, out, LARGE)[1], units)
    first, _, _ = asked(margins[:30], labels[:30], noise=LARGE)
    assert units * mechanism.grid == pytest.approx(known * first.grid, abs=1e-3)
    assert not np.array_equal(asked(margins, labels, noise=LARGE)[1], units)
    _, none, _ = asked(margins, labels, np.ones(40, bool))
    assert not none.any()
    mechanism, shares, _ = asked_shares(labels, classes, out)
    counts = np.bincount(labels[:30], minlength=classes)
    assert np.array_equal(np.rint(shares * mechanism.grid), counts)


def stretched(factor, shift, n=20_000, ratio=1.0) -> tuple[GlmGradients, np.ndarray]:
    """Margins of which `factor` times and `shift` more are the log-odds of the labels."""
    rng = np.random.default_rng(1)
    margins = rng.normal(0, 2, n)
    labels = rng.random(n) < expit(factor * margins + shift)
    return gradients_of(margins, labels, ratio)


@pytest.mark.parametrize("noise", [1.0, 5.0])
@pytest.mark.parametrize("shift", [-1.0, 0.0, 1.5])
@pytest.mark.parametrize("factor", [0.3, 1.0, 1.8])
def test_stretched_and_shifted_margins_are_brought_back(factor, shift, noise):
    for seed in range(3):
        releases = releases_at({CALIBRATION.purpose: noise}, seed)
        found = calibrate(*stretched(factor, shift), releases)
        assert found.factor == pytest.approx(factor, rel=0.06)
        assert found.shifts == pytest.approx([shift], abs=0.08)


@pytest.mark.parametrize("ratio", [0.05, 1.0, 20.0])
def test_weights_of_classes_move_the_log_odds(ratio):
    """Of rows that count with weights w_y, log-odds are larger by log(w_1/w_-1)."""
    table = stretched(0.8, np.log(ratio), 40_000, ratio)
    found = calibrate(*table, releases_at({CALIBRATION.purpose: 1.0}))
    assert found.factor == pytest.approx(0.8, rel=0.1)
    assert found.shifts == pytest.approx([0.0], abs=0.15)


@pytest.mark.parametrize("classes", [3, 5])
@pytest.mark.parametrize("factor", [0.25, 0.5, 1.0, 2.0])
def test_stretched_margins_of_several_classes_are_brought_back(factor, classes):
    """To the nearest of the factors, which are half an octave apart, or to one beside it."""
    rng = np.random.default_rng(2)
    margins = rng.normal(0, 2, (20_000, classes))
    labels = (factor * margins + rng.gumbel(size=margins.shape)).argmax(axis=1)
    found = calibrate(*gradients_of(margins, labels), releases_at({CALIBRATION.purpose: 1.0}))
    assert abs(np.log2(found.factor / factor)) <= 0.75
    assert found.shifts.tolist() == [0.0] * classes


@pytest.mark.parametrize("factor", [0.3, 2.0])
def test_noise_that_hides_everything_leaves_the_usual_factor_and_no_shift(factor):
    rng = np.random.default_rng(3)
    margins = rng.normal(0, 2, (5000, 3))
    labels = (factor * margins + rng.gumbel(size=margins.shape)).argmax(axis=1)
    for seed in range(20):
        for table in (stretched(factor, 1.5, 5000), gradients_of(margins, labels)):
            found = calibrate(*table, releases_at({CALIBRATION.purpose: LARGE}, seed))
            assert found.factor == pytest.approx(USUAL, abs=0.05)
            assert found.shifts == pytest.approx(np.zeros(found.shifts.size), abs=0.05)


def test_a_model_is_not_turned_around():
    """Margins of the wrong sign get a small factor, not a negative one."""
    found = calibrate(*stretched(-1.0, 0.0), releases_at({CALIBRATION.purpose: 1.0}))
    assert 0 < found.factor < USUAL / 2


@pytest.mark.parametrize("labels", [[0] * 200, [1] * 200, [0]])
@pytest.mark.parametrize("noise", [1e-3, 1.0, 1e3])
@pytest.mark.parametrize("margin", [0.0, 1e-9, 30.0])
def test_strange_tables_give_finite_calibrations(labels, noise, margin):
    for classes in CLASSES:
        margins = np.full(shape_of(len(labels), classes), margin)
        table = gradients_of(margins, np.array(labels))
        found = calibrate(*table, releases_at({CALIBRATION.purpose: noise}))
        assert np.isfinite([found.factor, *found.shifts]).all()
        assert found.factor > 0


def test_without_privacy_a_calibration_is_exact():
    """The slope of the likelihood at the answer is 0 up to its weak prior."""
    releases = Releases(NO_PRIVACY, random_source(0))
    assert calibrate(*stretched(1.2, 0.5), releases).factor == pytest.approx(1.2, rel=0.05)
    labels = np.repeat([0.0, 1.0, 2.0], [10, 30, 60])
    assert class_shares(labelled(labels), 3, releases).tolist() == [0.1, 0.3, 0.6]
    out = labels == 2
    assert class_shares(labelled(labels, out), 3, releases) == pytest.approx(
        np.array([0.1, 0.3, 0.01]) / 0.41
    )


@pytest.mark.parametrize("noise", [1.0, 30.0])
def test_class_shares_are_positive_and_as_exact_as_their_noise(noise):
    labels = np.repeat([0.0, 1.0, 2.0, 3.0], [5000, 4000, 990, 10])
    for seed in range(10):
        found = class_shares(labelled(labels), 5, releases_at({CLASS_SHARES.purpose: noise}, seed))
        # Shares are divided by their sum, which has noise and raised shares in it.
        assert found == pytest.approx([0.5, 0.4, 0.099, 0.001, 0.0], abs=8 * noise / 10_000)
        assert found.sum() == pytest.approx(1)
        assert (found >= 0.9 * noise / 10_000).all()
