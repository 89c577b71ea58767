"""Algorithms 4 and 5: line by line, the loop they share with `minimize`, and what they refuse."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import privagrad as pg
from privagrad._internal.validate import Vector
from privagrad.geometry.domains import Domain
from privagrad.methods.biased import Descent, biased_adagrad, biased_sgd

DOMAINS: list[Domain] = [
    pg.Box(-0.5, 1.0),
    pg.L2Ball(0.8),
    pg.L1Ball(0.8),
    pg.Simplex(),
    pg.WholeSpace(),
]
STEPS, DIM = 9, 4


def reference(
    rule: str, gradients: Vector, x: Vector, alpha: Vector, domain: Domain
) -> Iterator[Vector]:
    """x_1, x_2, ... of Algorithm 4 with the α_k given or Algorithm 1's, and of Algorithm 5."""
    for k, g in enumerate(gradients):
        past = gradients[: k + 1]
        if rule == "adagrad":
            metric = np.sqrt(np.diag(past.T @ past)) / alpha[k]
            x = domain.project(x - g / metric, metric)
        else:
            size = alpha[k] if rule == "sgd" else alpha[k] / np.sqrt((past**2).sum())
            x = domain.project(x - size * g)
        yield x


def run(rule: str, gradient: Callable[[Vector, int], Any], x0: Any, **settings: Any) -> Descent:
    if rule == "adagrad":
        return biased_adagrad(gradient, x0, **settings)
    return biased_sgd(gradient, x0, adaptive=rule == "adaptive", **settings)


@pytest.mark.parametrize("domain", DOMAINS, ids=repr)
@pytest.mark.parametrize("rule", ["sgd", "sequence", "adaptive", "adagrad"])
@given(seed=st.integers(0, 2**32 - 1), spread=st.floats(1, 1e4), size=st.floats(0.01, 10))
def test_the_steps_are_the_papers(
    rule: str, domain: Domain, seed: int, spread: float, size: float
) -> None:
    rng = np.random.default_rng(seed)
    gradients = rng.standard_normal((STEPS, DIM)) * np.geomspace(1, 1 / spread, DIM)
    alpha = np.full(STEPS, size)
    settings: dict[str, Any] = {"domain": domain, "steps": STEPS, "step_size": size}
    if rule == "sequence":
        rule = "sgd"
        alpha = settings["step_size"] = size / np.arange(1.0, STEPS + 1)
    asked: list[Vector] = []

    def gradient(x: Vector, k: int) -> Vector:
        assert k == len(asked)
        asked.append(x)
        return gradients[k]

    outside = 3 * rng.standard_normal(DIM)
    found = run(rule, gradient, outside, **settings)
    start = domain.project(outside)
    iterates = np.array(list(reference(rule, gradients, start, alpha, domain)))
    close: dict[str, Any] = {"rel": 1e-7, "abs": 1e-9}
    assert np.array(asked) == pytest.approx(np.vstack([start, iterates[:-1]]), **close)
    assert found.last == pytest.approx(iterates[-1], **close)
    assert found.average == pytest.approx(iterates.mean(axis=0), **close)
    assert found.suffix_average == pytest.approx(iterates[STEPS // 2 :].mean(axis=0), **close)
    assert found.queried_average == pytest.approx(np.mean(asked, axis=0), **close)


@pytest.mark.parametrize(("rule", "method"), [("sgd", "sgd"), ("adagrad", "adagrad")])
@pytest.mark.parametrize("domain", DOMAINS[:3], ids=repr)
def test_on_the_gradients_of_minimize_they_are_minimize(
    rule: str, method: str, domain: Domain
) -> None:
    rng = np.random.default_rng(0)
    X, y = rng.standard_normal((20, DIM)), rng.standard_normal(20)

    def gradient(x: Vector, k: int) -> Any:
        return np.sign(X @ x - y) @ X / 20

    settings: dict[str, Any] = {"domain": domain, "steps": 30, "step_size": 0.1}
    whole = pg.minimize(
        "absolute", X, y, method=method, batch_size=20, sampling="without_replacement", **settings
    )
    found = run(rule, gradient, np.zeros(DIM), **settings)
    for name in ("last", "average", "suffix_average"):
        assert getattr(found, name) == pytest.approx(getattr(whole, name), abs=1e-9)


def test_adagrads_step_size_is_the_largest_width_of_the_domain_unless_given() -> None:
    box = pg.Box(np.zeros(2), np.array([1.0, 3.0]))
    slopes = np.array([1.0, -1.0])
    usual = biased_adagrad(lambda x, k: slopes, [0.5, 0.5], domain=box, steps=4)
    given_ = biased_adagrad(lambda x, k: slopes, [0.5, 0.5], domain=box, steps=4, step_size=3.0)
    assert np.array_equal(usual.average, given_.average)
    assert usual.last.tolist() == [0.0, 3.0]


def test_zero_gradients_move_nothing() -> None:
    for rule in ("sgd", "adaptive", "adagrad"):
        settings: dict[str, Any] = {"domain": pg.L2Ball(1.0), "steps": 4, "step_size": 1.0}
        found = run(rule, lambda x, k: np.zeros(2), [0.5, -0.25], **settings)
        assert found.last.tolist() == found.queried_average.tolist() == [0.5, -0.25]


def test_the_oracle_cannot_move_the_point_nor_can_the_start_be_moved() -> None:
    start = np.array([0.5, 0.5])

    def gradient(x: Vector, k: int) -> Vector:
        x += 100.0
        return np.ones(2)

    found = biased_sgd(gradient, start, domain=pg.WholeSpace(), steps=2, step_size=0.25)
    assert found.last.tolist() == [0.0, 0.0]
    assert start.tolist() == [0.5, 0.5]


BOX = pg.Box(-1, 1)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda g: biased_sgd(g, [0.0], domain=BOX, steps=0, step_size=1.0), "steps >= 1"),
        (lambda g: biased_sgd(g, [0.0], domain=BOX, steps=2, step_size=0.0), "step_size"),
        (lambda g: biased_sgd(g, [0.0], domain=BOX, steps=2, step_size=[1.0]), r"shape \(2,\)"),
        (
            lambda g: biased_sgd(
                g, [0.0], domain=BOX, steps=2, step_size=[1.0, 0.5], adaptive=True
            ),
            "step_size to be a number",
        ),
        (lambda g: biased_sgd(g, 0.0, domain=BOX, steps=2, step_size=1.0), "x0 of shape"),
        (lambda g: biased_sgd(g, [0.0, 0.0], domain=BOX, steps=2, step_size=1.0), r"shape \(2,\)"),
        (
            lambda g: biased_adagrad(g, [0.0, 0.0], domain=BOX, steps=2),
            r"gradient\(x, k\) of shape",
        ),
        (lambda g: biased_adagrad(g, [0.0], domain=pg.WholeSpace(), steps=2), "a step_size, or"),
        (
            lambda g: biased_adagrad(lambda x, k: [np.nan], [0.0], domain=BOX, steps=2),
            "finite numbers from",
        ),
    ],
)
def test_wrong_settings_say_why(call: Callable[[Any], Descent], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        call(lambda x, k: np.ones(1))
