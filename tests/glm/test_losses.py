import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

import privagrad as pg
from privagrad.glm.losses import LOSSES, class_slopes, slope

MULTICLASS = [loss for loss in map(pg.Loss, LOSSES) if loss.multiclass]
CASES = [
    *(loss for loss in map(pg.Loss, LOSSES) if not loss.multiclass),
    pg.Loss("huber", 0.3),
    pg.Loss("quantile", 0.9),
    *(pg.Loss(name, ratio) for name in ("logistic", "hinge") for ratio in (0.02, 0.5, 3.0, 50.0)),
]
MARGINS = st.floats(-20, 20)
CLASSES = st.integers(2, 5)


def slopes_of(loss: pg.Loss, margins, label: int) -> np.ndarray:
    """dℓ/dm, one number a class."""
    slopes = np.array(margins, float)
    class_slopes(loss.key[0], slopes, label)
    return slopes


def targets_for(loss: pg.Loss, number: float) -> float:
    return float(np.sign(number) or 1.0) if loss.name in ("logistic", "hinge") else number


@pytest.mark.parametrize("loss", CASES, ids=str)
@given(margin=MARGINS, other=MARGINS, number=MARGINS)
def test_the_slope_is_a_subgradient(loss: pg.Loss, margin, other, number):
    """ℓ(m') ≥ ℓ(m) + ℓ'(m)(m' - m): which also makes every loss convex."""
    target = targets_for(loss, number)
    here, there = loss.value([margin, other], [target, target])
    assert there >= here + slope(*loss.key, margin, target) * (other - margin) - 1e-9


@pytest.mark.parametrize("name", ["logistic", "hinge"])
@given(margin=MARGINS, ratio=st.floats(1e-3, 1e3), target=st.sampled_from([-1.0, 1.0]))
def test_weights_of_classes_multiply_values_and_slopes(name, margin, ratio, target):
    """By w_y, of which the larger one is 1 and w_-1 / w_1 is the parameter."""
    weights = {-1.0: min(ratio, 1.0), 1.0: min(1 / ratio, 1.0)}
    plain, weighted = pg.Loss(name), pg.Loss(name, ratio)
    assert (weighted.ratio, plain.ratio) == (ratio, 1.0)
    assert weights[-1.0] / weights[1.0] == pytest.approx(ratio)
    values = plain.value([margin], [target]) * weights[target]
    assert weighted.value([margin], [target]) == pytest.approx(values, rel=1e-12)
    found, expected = (slope(*loss.key, margin, target) for loss in (weighted, plain))
    assert found == pytest.approx(weights[target] * expected, rel=1e-12)
    assert abs(found) <= weighted.lipschitz == 1.0


@given(
    margin=MARGINS, ratio=st.floats(0.01, 100), target=st.sampled_from([-1.0, 1.0]),
    name=st.sampled_from(["logistic", "hinge"]),
)  # fmt: skip
def test_slopes_of_weighted_losses_are_difference_quotients(margin, ratio, target, name):
    loss, h = pg.Loss(name, ratio), 1e-5
    assume(name == "logistic" or abs(1 - target * margin) > h)
    above, below = loss.value([margin + h, margin - h], [target, target])
    assert slope(*loss.key, margin, target) == pytest.approx((above - below) / (2 * h), abs=1e-8)


def test_only_losses_of_two_classes_have_a_ratio():
    for loss in map(pg.Loss, LOSSES):
        assert loss.ratio == 1.0
    assert pg.Loss("huber", 3.0).ratio == pg.Loss("quantile", 0.9).ratio == 1.0
    assert pg.Loss("logistic") == pg.Loss("logistic", 1.0)


@pytest.mark.parametrize("loss", CASES, ids=str)
def test_bad_numbers_give_nan_and_huge_ones_do_not(loss: pg.Loss):
    target = targets_for(loss, 1.0)
    if loss.name != "linear":
        assert np.isnan(slope(*loss.key, np.nan, target))
        assert np.isnan(slope(*loss.key, 1.0, np.nan))
    for margin in (1e300, -1e300, np.inf, -np.inf):
        assert np.isfinite(slope(*loss.key, margin, target))


@pytest.mark.parametrize("loss", MULTICLASS, ids=str)
@given(data=st.data(), classes=CLASSES)
def test_the_class_slopes_are_a_subgradient(loss, data, classes):
    """ℓ(m') ≥ ℓ(m) + ⟨ℓ'(m), m' - m⟩, and their norm is at most what the loss declares."""
    margins, other = data.draw(arrays(float, (2, classes), elements=MARGINS))
    label = data.draw(st.integers(0, classes - 1))
    here, there = loss.value([margins, other], [label, label])
    slopes = slopes_of(loss, margins, label)
    assert there >= here + slopes @ (other - margins) - 1e-9
    assert np.linalg.norm(slopes) <= loss.lipschitz + 1e-12
    assert slopes.sum() == pytest.approx(0.0, abs=1e-12)


@given(data=st.data(), classes=CLASSES)
def test_class_losses_are_their_formulas(data, classes):
    margins = data.draw(arrays(float, classes, elements=MARGINS))
    label = data.draw(st.integers(0, classes - 1))
    naive = {
        "softmax": -np.log(np.exp(margins[label]) / np.exp(margins).sum()),
        "multiclass-hinge": max(
            max(0.0, 1 + margins[c] - margins[label]) for c in range(classes) if c != label
        ),
    }
    for loss in MULTICLASS:
        assert loss.value([margins], [label]) == pytest.approx(naive[loss.name], abs=1e-9)


@given(data=st.data(), classes=CLASSES)
def test_the_softmax_slopes_are_difference_quotients(data, classes):
    margins = data.draw(arrays(float, classes, elements=MARGINS))
    label = data.draw(st.integers(0, classes - 1))
    loss, h = pg.Loss("softmax"), 1e-5 * np.eye(classes)
    labels = np.full(classes, label)
    quotients = (loss.value(margins + h, labels) - loss.value(margins - h, labels)) / 2e-5
    slopes = slopes_of(loss, margins, label)
    assert slopes == pytest.approx(quotients, abs=1e-8)
    move = data.draw(arrays(float, classes, elements=MARGINS))
    change = slopes_of(loss, margins + move, label) - slopes
    assert np.linalg.norm(change) <= loss.smoothness * np.linalg.norm(move) + 1e-12


@given(first=MARGINS, second=MARGINS)
def test_two_classes_are_the_loss_of_their_difference(first, second):
    for many, two in zip(MULTICLASS, (pg.Loss("logistic"), pg.Loss("hinge")), strict=True):
        for label, sign in ((0, -1.0), (1, 1.0)):
            value = two.value([second - first], [sign])
            assert many.value([[first, second]], [label]) == pytest.approx(value, abs=1e-9)
            along = slope(*two.key, second - first, sign)
            slopes = slopes_of(many, [first, second], label)
            assert slopes == pytest.approx([-along, along], abs=1e-9)


def test_class_losses_are_stable_at_huge_margins():
    margins = np.array([1e4, -1e4, 0.0])
    for loss in MULTICLASS:
        exact = 0.0 if loss.name == "softmax" else 1.0
        values = loss.value([margins] * 3, [0, 1, 2])
        assert values == pytest.approx([0.0, 2e4 + exact, 1e4 + exact], abs=1e-9)
        assert slopes_of(loss, margins, 0).tolist() == [0.0, 0.0, 0.0]
        assert slopes_of(loss, margins, 1).tolist() == [1.0, -1.0, 0.0]
        assert slopes_of(loss, margins, 2).tolist() == [1.0, 0.0, -1.0]
        assert np.linalg.norm(slopes_of(loss, margins, 1)) == pytest.approx(loss.lipschitz)
        assert loss.value([[7.0]], [0]).tolist() == slopes_of(loss, [7.0], 0).tolist() == [0.0]


@pytest.mark.parametrize("loss", MULTICLASS, ids=str)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_one_bad_margin_makes_all_class_slopes_nan(loss, bad):
    for place in range(3):
        margins = np.array([5.0, -3.0, 1.0])
        margins[place] = bad
        for label in range(3):
            assert np.isnan(slopes_of(loss, margins, label)).all()


def test_known_values():
    assert pg.Loss("absolute").value([1.0], [3.0]).tolist() == [2.0]
    assert pg.Loss("hinge").value([0.25], [1.0]).tolist() == [0.75]
    assert pg.Loss("huber", 2.0).value([1.0, 5.0], [0.0, 0.0]).tolist() == [0.5, 8.0]
    assert pg.Loss("quantile", 0.9).value([0.0, 0.0], [1.0, -1.0]) == pytest.approx([0.9, 0.1])
    assert pg.Loss("logistic").value([0.0], [1.0]) == pytest.approx([np.log(2)])
    assert pg.Loss("logistic").value([-1000.0], [1.0]) == pytest.approx([1000.0])
    assert pg.Loss("linear").value([3.0], [0.0]).tolist() == [3.0]


def test_labels_become_signs():
    loss = pg.Loss("logistic")
    assert loss.targets([0, 1, 1], 3).tolist() == [-1.0, 1.0, 1.0]
    assert loss.targets([-1, 1, 1], 3).tolist() == [-1.0, 1.0, 1.0]
    assert loss.targets([True, False], 2).tolist() == [1.0, -1.0]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: pg.Loss("squared"), "absolute, logistic"),
        (lambda: pg.Loss("absolute", 1.0), "no parameter"),
        (lambda: pg.Loss("quantile", 1.0), r"\(0, 1\)"),
        (lambda: pg.Loss("huber", -1.0), "> 0"),
        (lambda: pg.Loss("logistic", 0.0), r"ratio of the weights .* > 0"),
        (lambda: pg.Loss("hinge", -2.0), r"ratio of the weights .* > 0"),
        (lambda: pg.Loss("hinge", np.inf), r"ratio of the weights"),
        (lambda: pg.Loss("softmax", 2.0), "no parameter"),
        (lambda: pg.Loss("logistic").targets([1, 2], 2), "found .*2.0.*Map your two classes"),
        (lambda: pg.Loss("hinge").targets([-1, 0, 1], 3), "-1, 0 and 1 together"),
        (lambda: pg.Loss("logistic").targets([1.0, np.nan], 2), "found .*nan"),
        (lambda: pg.Loss("softmax").targets([0, -1], 2), r"classes 0, 1, 2, .*found .*-1.0"),
        (lambda: pg.Loss("softmax").targets([0, 0.5], 2), r"classes 0, 1, 2, .*found .*0.5"),
        (lambda: pg.Loss("multiclass-hinge").targets([0, np.nan], 2), "found .*nan"),
        (lambda: pg.Loss("softmax").targets(["a", "b"], 2), "numbers"),
        (lambda: pg.Loss("softmax").targets(None, 2), "found None"),
        (lambda: pg.Loss("absolute").targets(None, 2), "found None"),
        (lambda: pg.Loss("absolute").targets([1.0], 2), r"shape \(2,\), found shape \(1,\)"),
        (lambda: pg.Loss("absolute").targets(["a", "b"], 2), "numbers"),
    ],
)
def test_wrong_losses_and_labels_say_why(make, message):
    with pytest.raises((ValueError, TypeError), match=message):
        make()


@pytest.mark.parametrize(
    "loss", [pg.Loss("quantile", 0.1), pg.Loss("quantile", 0.9), pg.Loss("huber", 0.3)]
)
def test_no_slope_is_beyond_the_lipschitz_constant_and_one_attains_it(loss: pg.Loss):
    slopes = [abs(slope(*loss.key, margin, 0.0)) for margin in (-5.0, -0.1, 0.0, 0.1, 5.0)]
    assert max(slopes) == loss.lipschitz


def test_a_bend_whose_slopes_could_overflow_is_refused():
    with pytest.raises(ValueError, match=r"bend .* in \(0, 1e\+12\)"):
        pg.Loss("huber", 1e12)


def test_a_loss_knows_its_task_and_its_multiclass_twin():
    tasks = {name: pg.Loss(name).task for name in LOSSES}
    assert tasks == {
        "absolute": "regression",
        "logistic": "classification",
        "hinge": "classification",
        "huber": "regression",
        "quantile": "regression",
        "linear": "none",
        "softmax": "classification",
        "multiclass-hinge": "classification",
    }
    for loss in map(pg.Loss, LOSSES):
        assert loss.regression == (loss.task == "regression")
        if loss.task == "classification":
            assert loss.multiclass_twin.multiclass
            assert loss.multiclass_twin.multiclass_twin == loss.multiclass_twin
        else:
            with pytest.raises(ValueError, match=rf"loss for classes, found the {loss.name} loss"):
                _ = loss.multiclass_twin
    assert pg.Loss("logistic").multiclass_twin == pg.Loss("softmax")
    assert pg.Loss("hinge").multiclass_twin == pg.Loss("multiclass-hinge")
