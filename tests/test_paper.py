"""Section 5.1 at epsilon = 1, T = 1000, δ = 1e-5: the losses of the last iterates."""

import numpy as np
import pytest

import privagrad as pg
from privagrad.experiments.problems import absolute_regression

X, Y, SIGMA = absolute_regression()
BALL, SHAPED = np.ones(100), SIGMA ** (-4 / 3)


@pytest.mark.parametrize(
    ("method", "scale", "radius", "step_size", "low", "high"),
    [
        # Radius and step size: the best of (0.5, 1, 2, 4) and the paper's grid.
        ("adagrad", None, None, 0.1, 0.0099, 0.0103),
        ("pagan", SHAPED, 2.0, 0.2, 0.0100, 0.0115),
        ("dp-adagrad", BALL, 0.5, 0.5, 0.0200, 0.0260),
        ("pasan", BALL, 0.5, 1.0, 0.0270, 0.0350),
    ],
)
def test_median_loss_of_the_last_iterate(method, scale, radius, step_size, low, high):
    losses = []
    for seed in range(7):
        result = pg.minimize(
            "absolute", X, Y, method=method, epsilon=None if scale is None else 1.0, delta=1e-5,
            ellipsoid=None if scale is None else pg.Ellipsoid(scale, radius), domain=pg.Box(-1, 1),
            batch_size=70, steps=1000, step_size=step_size, random_state=seed,
        )  # fmt: skip
        losses.append(np.abs(X @ result.last - Y).mean())
    assert low <= np.median(losses) <= high
