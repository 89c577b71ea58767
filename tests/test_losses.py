import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import privagrad as pg
from privagrad.losses import LOSSES, slope

CASES = [pg.Loss(name) for name in LOSSES] + [pg.Loss("huber", 0.3), pg.Loss("quantile", 0.9)]
MARGINS = st.floats(-20, 20)


def targets_for(loss: pg.Loss, number: float) -> float:
    return float(np.sign(number) or 1.0) if loss.name in ("logistic", "hinge") else number


@pytest.mark.parametrize("loss", CASES, ids=str)
@given(margin=MARGINS, other=MARGINS, number=MARGINS)
def test_the_slope_is_a_subgradient(loss, margin, other, number):
    """ℓ(m') ≥ ℓ(m) + ℓ'(m)(m' - m): which also makes every loss convex."""
    target = targets_for(loss, number)
    here, there = loss.value([margin, other], [target, target])
    assert there >= here + slope(*loss.key, margin, target) * (other - margin) - 1e-9


@pytest.mark.parametrize("loss", CASES, ids=str)
def test_bad_numbers_give_nan_and_huge_ones_do_not(loss):
    target = targets_for(loss, 1.0)
    if loss.name != "linear":
        assert np.isnan(slope(*loss.key, np.nan, target))
        assert np.isnan(slope(*loss.key, 1.0, np.nan))
    for margin in (1e300, -1e300, np.inf, -np.inf):
        assert np.isfinite(slope(*loss.key, margin, target))


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
        (lambda: pg.Loss("logistic").targets([1, 2], 2), "found .*2.0.*Map your two classes"),
        (lambda: pg.Loss("hinge").targets([-1, 0, 1], 3), "-1, 0 and 1 together"),
        (lambda: pg.Loss("logistic").targets([1.0, np.nan], 2), "found .*nan"),
        (lambda: pg.Loss("absolute").targets(None, 2), "found None"),
        (lambda: pg.Loss("absolute").targets([1.0], 2), r"shape \(2,\), found shape \(1,\)"),
        (lambda: pg.Loss("absolute").targets(["a", "b"], 2), "numbers"),
    ],
)
def test_wrong_losses_and_labels_say_why(make, message):
    with pytest.raises((ValueError, TypeError), match=message):
        make()
