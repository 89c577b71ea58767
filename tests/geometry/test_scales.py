"""The variance of gradients is estimated from private gradients alone, up to what noise hides."""

from __future__ import annotations

import numpy as np
import pytest

from privagrad._internal.validate import Vector
from privagrad.geometry.scales import SCALE_POWERS, GradientHistory, visible_size
from privagrad.methods import METHODS
from privagrad.theory import optimal_scale


def test_methods_and_theorems_have_the_same_powers() -> None:
    sigma = np.array([0.5, 3.0])
    for name, power in SCALE_POWERS.items():
        assert METHODS[name].scale_power == power
        np.testing.assert_array_equal(optimal_scale(sigma, name), sigma**power)


def test_estimates_are_due_after_16_32_64_differences() -> None:
    """The gradient after an estimate starts a new difference: it has other noise."""
    history: GradientHistory[Vector] = GradientHistory()
    noise = np.ones(1)
    due = [history.add(np.array([float(step)]), noise) for step in range(70)]
    assert [step for step, is_due in enumerate(due) if is_due] == [16, 33, 66]
    assert history.count == 66


def test_the_variance_is_that_of_the_gradients_without_the_noise() -> None:
    """Five standard errors: a false alarm once in a million."""
    rng = np.random.default_rng(0)
    spread, noise = np.array([3.0, 0.5, 0.0]), np.array([1.0, 2.0, 0.1])
    history: GradientHistory[Vector] = GradientHistory()
    for _ in range(20_000):
        history.add(rng.normal(7.0, spread) + rng.normal(0.0, noise), noise**2)
    error = np.sqrt(3 / history.count) * (spread**2 + noise**2)
    assert (np.abs(history.variance() - spread**2) < 5 * error).all()
    np.testing.assert_allclose(history.hidden(), np.sqrt(2 / history.count) * noise**2)


@pytest.mark.parametrize(("total", "hidden", "size"), [(3.0, 4.0, 3.0), (-1.0, 4.0, 2.0)])
def test_a_size_is_at_least_what_noise_hides_of_it(
    total: float, hidden: float, size: float
) -> None:
    assert visible_size(total, hidden) == size
