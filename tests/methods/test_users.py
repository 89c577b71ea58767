"""Minimisation for users: sampled whole, averaged, and as for rows where all have one row."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from scipy.sparse import csr_array

import privagrad as pg
from privagrad.glm.gradients import GlmGradients
from privagrad.glm.rows import as_rows
from privagrad.methods import METHODS, minimize
from privagrad.methods.objective import APART, ObjectiveGradients
from privagrad.methods.oracle import GradientOracle
from privagrad.methods.users import UserGradients
from privagrad.privacy.mechanism import GaussianSum
from privagrad.privacy.users import Users
from privagrad.queries.moments import private_moments

RNG = np.random.default_rng(0)
USERS = 60
X = RNG.standard_normal((USERS, 4))
Y = np.sign(X @ np.arange(4.0) + RNG.standard_normal(USERS))
OWNERS = np.repeat(np.arange(USERS), RNG.integers(1, 7, USERS))
ROWS = X[OWNERS] + 0.3 * RNG.standard_normal((OWNERS.size, 4))
LABELS = Y[OWNERS]
PRIVATE: dict[str, Any] = {"epsilon": 2.0, "delta": 1e-4, "batch_size": 10, "steps": 12,
                           "step_size": 0.2, "random_state": 5}  # fmt: skip
STEPPED = sorted(name for name, m in METHODS.items() if m.shape != "none" and not m.one_shot)


@pytest.mark.parametrize("sampling", ["poisson", "with_replacement", "without_replacement"])
@pytest.mark.parametrize("name", STEPPED)
def test_where_every_user_has_one_row_nothing_changes(name: str, sampling: Any) -> None:
    given = {**PRIVATE, "method": name, "sampling": sampling}
    if METHODS[name].needs_public:
        given["public"] = (X[:20], Y[:20])
    for table in (X, csr_array(X)):
        rows = pg.minimize("logistic", table, Y, **given)
        users = pg.minimize("logistic", table, Y, groups=RNG.permutation(USERS), **given)
        assert np.array_equal(rows.last, users.last)
        assert np.array_equal(rows.average, users.average)
        assert (rows.privacy.unit, users.privacy.unit) == ("row", "user")
        assert users.privacy.epsilon == rows.privacy.epsilon


def test_without_privacy_it_is_the_plain_method_on_the_mean_over_users() -> None:
    result = pg.minimize(
        "logistic", ROWS, LABELS, groups=OWNERS, method="dp-sgd", epsilon=float("inf"), steps=30,
        step_size=0.5, batch_size=USERS, sampling="without_replacement", random_state=0,
    )  # fmt: skip
    weights = 1 / np.bincount(OWNERS)[OWNERS] / USERS
    x = np.zeros(4)
    for _ in range(30):
        slopes = -LABELS / (1 + np.exp(LABELS * (ROWS @ x)))
        x -= 0.5 * (weights * slopes) @ ROWS
    np.testing.assert_allclose(result.last, x, rtol=1e-12)


def test_users_are_sampled_not_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    batches: list[Any] = []
    bounded = GradientOracle.bounded

    def watched(self: Any, x: Any, batch: Any, ellipsoid: Any) -> Any:
        batches.append(batch)
        return bounded(self, x, batch, ellipsoid)

    monkeypatch.setattr(GradientOracle, "bounded", watched)
    many = {**PRIVATE, "steps": 400, "batch_size": 15}
    result = pg.minimize("logistic", ROWS, LABELS, groups=OWNERS, **many)
    counts = [e.n_examples for e in result.privacy.events if isinstance(e, pg.GaussianEvent)]
    assert counts[-1] == USERS
    assert {event.unit for event in result.privacy.events} == {"user"}
    drawn = np.concatenate(batches)
    assert drawn.max() == USERS - 1
    # The mean of 400 batches of Binomial(60, 1/4); false alarm below 1e-5.
    assert abs(drawn.size / 400 - 15) < 4.5 * np.sqrt(60 * 3 / 16 / 400)
    assert result.diagnostics.examples == drawn.size


def test_an_ellipsoid_is_learned_from_one_row_of_each_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries bound rows: all rows of a user would move them by as much as they are many."""
    seen: list[Any] = []

    def watched(rows: Any, releases: Any) -> Any:
        seen.append(rows)
        return private_moments(rows, releases)

    monkeypatch.setattr(minimize, "private_moments", watched)
    pg.minimize("logistic", ROWS, LABELS, groups=OWNERS, **PRIVATE)
    pg.minimize(Mean(), groups=OWNERS, **PRIVATE)
    asked, gradients = seen
    owners = [OWNERS[(row == ROWS).all(axis=1)] for row in asked.matrix]
    assert np.array_equal(np.sort(np.concatenate(owners)), np.arange(USERS))
    assert np.array_equal(np.sort(OWNERS[gradients.examples]), np.arange(USERS))


def test_the_order_of_a_users_rows_and_the_number_of_threads_change_no_bit() -> None:
    ellipsoid = pg.Ellipsoid(np.array([1.0, 2.0, 0.1, 4.0]), 0.3)
    order = np.concatenate([RNG.permutation(np.flatnonzero(u == OWNERS)) for u in range(USERS)])
    first, *others = (
        pg.minimize("logistic", ROWS[o], LABELS[o], groups=OWNERS[o], ellipsoid=ellipsoid,
                    method=name, threads=threads, **PRIVATE).last
        for name in ("pagan",)
        for o, threads in ((slice(None), 1), (order, 1), (order, 2))
    )  # fmt: skip
    for other in others:
        assert np.array_equal(first, other)


@pytest.mark.parametrize("count", [1, 2, 40])
def test_a_user_of_many_rows_moves_a_sum_by_one_and_no_more(count: int) -> None:
    """All rows of the user pull one way, further than the ellipsoid reaches."""
    ellipsoid = pg.Ellipsoid(np.array([1.0, 4.0]), 0.5)
    rows = np.concatenate([RNG.standard_normal((9, 2)), np.tile([30.0, -40.0], (count, 1))])
    users = Users.of([0, 1, 1, 2, 2, 2, 3, 3, 3] + [4] * count, 9 + count)
    linear = GlmGradients(pg.Loss("linear"), as_rows(rows), np.zeros(9 + count))
    gradients = UserGradients(linear, users.draw(np.random.default_rng(0)))
    mechanism = GaussianSum(2, 1.0, 5.0, gradients.slack(5.0))
    sums = []
    for batch in (np.arange(5), np.arange(4)):
        total = mechanism.sum(ellipsoid)
        gradients.add_bounded(total, np.zeros(2), batch)
        sums.append(total.memory.copy())
    moved = float(np.linalg.norm(sums[0] - sums[1])) * mechanism.grid
    assert 0.999 < moved <= mechanism.sensitivity


def test_per_example_gradients_are_means_of_the_finite_ones_over_all_rows() -> None:
    rows = np.array([[1.0, 2.0], [3.0, np.nan], [5.0, 6.0], [7.0, 8.0], [np.inf, 0.0]])
    users = Users.of([0, 0, 1, 0, 2], 5).draw(np.random.default_rng(0))
    gradients = UserGradients(GlmGradients(pg.Loss("linear"), as_rows(rows), np.zeros(5)), users)
    found = gradients.per_example(np.zeros(2), np.arange(3))
    found = found[np.argsort(found[:, 0])]
    np.testing.assert_allclose(found, [[8 / 3, 10 / 3], [5.0, 6.0]])
    total = np.zeros(2)
    assert gradients.add_plain(total, np.zeros(2), np.arange(3)) == (0, 2)
    np.testing.assert_allclose(total, [8 / 3 + 5, 10 / 3 + 6])


class Mean:
    """(1/2) ‖x - z_i‖²."""

    n_examples, dim = OWNERS.size, 4

    def per_example_gradients(self, x: Any, rows: Any) -> Any:
        return x - ROWS[rows]


@pytest.mark.parametrize("most", [1, 1024])
@pytest.mark.parametrize("batch_size", [1, 50, 10_000])
def test_the_slack_counts_the_rounding_of_every_other_user(batch_size: int, most: int) -> None:
    """A user's rows weigh one together, and so does what rounding moves in them."""
    users = Users.of(OWNERS, OWNERS.size).draw(np.random.default_rng(0), most)
    slack = UserGradients(ObjectiveGradients(Mean()), users).slack(batch_size)
    others = 2 * batch_size + 64
    assert others * (APART + others * 2.0**-52) <= slack < 1e-4


@pytest.mark.parametrize("method", ["pagan", "adaclip"])
def test_objectives_of_the_users_own_have_users_too(method: str) -> None:
    given: dict[str, Any] = {**PRIVATE, "epsilon": 5e4, "steps": 300, "batch_size": USERS}
    found = pg.minimize(Mean(), groups=OWNERS, method=method, domain=pg.Box(-1, 1), **given)
    assert found.privacy.unit == "user"
    counts = np.bincount(OWNERS)
    means = np.stack([np.bincount(OWNERS, c) / counts for c in ROWS.T], axis=1).mean(axis=0)
    np.testing.assert_allclose(found.x, means, atol=0.1)


def test_what_does_not_fit_users_is_refused() -> None:
    given = {**PRIVATE, "batch_size": None, "steps": None}
    for name in ("output-perturbation", "objective-perturbation"):
        with pytest.raises(ValueError, match="a method of steps for users"):
            pg.minimize("logistic", ROWS, LABELS, groups=OWNERS, method=name, **given)
    with pytest.raises(ValueError, match="the users in groups"):
        pg.minimize("logistic", ROWS, LABELS, groups=OWNERS, **{**PRIVATE, "batch_size": 61})
    with pytest.raises(ValueError, match="max_rows_per_user"):
        pg.minimize("logistic", ROWS, LABELS, groups=OWNERS, max_rows_per_user=0, **PRIVATE)
    for labels, groups in ((LABELS[:-1], OWNERS), (LABELS, OWNERS[:-1])):
        with pytest.raises(ValueError, match="another number") as caught:
            pg.minimize("logistic", ROWS, labels, groups=groups, **PRIVATE)
        assert str(OWNERS.size) not in str(caught.value)


def test_the_cap_is_public_and_leaves_one_row_of_each_user_if_it_is_one() -> None:
    seen: list[int] = []

    class Watched(Mean):
        def per_example_gradients(self, x: Any, rows: Any) -> Any:
            seen.extend(rows.tolist())
            return super().per_example_gradients(x, rows)

    given = {**PRIVATE, "ellipsoid": pg.Ellipsoid.ball(4, 1.0), "batch_size": USERS}
    pg.minimize(Watched(), groups=OWNERS, max_rows_per_user=1, **given)
    assert sorted(OWNERS[sorted(set(seen))].tolist()) == list(range(USERS))
