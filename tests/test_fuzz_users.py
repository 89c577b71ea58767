"""Every way from the rows of users to a release, with rows of any kind, in exact arithmetic.

As in `tests/test_fuzz_tables.py`, what a mechanism is handed before noise is compared in whole
units: all rows of one user together move it by no more than one row may, whatever they hold and
however many there are, and whatever number of them takes their place.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from scipy.sparse import csr_array

import privagrad as pg
from privagrad.estimators import _tables, search
from privagrad.geometry.ellipsoid import PROJECTIONS
from privagrad.glm.examples import Examples
from privagrad.glm.losses import LOSSES
from privagrad.linear import Choices, Problem, Solver, plan_fit, run_fit
from privagrad.methods import METHODS, Setting
from privagrad.methods.objective import ObjectiveGradients
from privagrad.methods.oracle import GradientOracle
from privagrad.methods.users import UserGradients
from privagrad.privacy.events import training_event
from privagrad.privacy.noise import random_source
from privagrad.privacy.releases import Releases
from privagrad.privacy.sampling import Batches
from privagrad.privacy.users import Users
from tests.test_fuzz_tables import (
    SEEDS,
    STEPPED,
    Case,
    Log,
    assert_neighbours,
    assert_within,
    case_of,
    fuzz,
    numbers,
    one_run,
    quiet,
    recorded,
)

SIZES = (1, 1, 1, 2, 3, 5, 24, 1023, 1024, 1500)
"""Rows of the user who is watched: up to the cap of 1024 and beyond."""


def of_users(case: Case, rng: np.random.Generator, users: int = 6) -> tuple[Case, np.ndarray]:
    """The rows of a case, each some times, as those of users; user 0 has many, often all alike."""
    counts = np.append(rng.choice(SIZES), rng.integers(1, 5, users - 1))
    owners = np.repeat(np.arange(users), counts)
    rows = rng.integers(len(case.X), size=owners.size)
    if rng.random() < 0.5:
        rows[owners == 0] = rng.integers(len(case.X))
    y = case.y[rows]
    if case.loss.multiclass:
        y[owners == 1] = case.outputs - 1  # the number of classes is public
    return replace(case, X=case.X[rows], y=y), owners


def with_another(
    case: Case, owners: np.ndarray, rng: np.random.Generator, gone: float = np.nan
) -> tuple[Case, np.ndarray]:
    """The table in which user 0 contributes nothing, by one row or by several."""
    others = owners != 0
    count = int(rng.integers(1, 4))
    X = np.vstack([np.full((count, case.X.shape[1]), gone, case.X.dtype), case.X[others]])
    y = np.append(np.full(count, case.y[others][0]), case.y[others])
    return replace(case, X=X, y=y), np.append(np.zeros(count, int), owners[others])


class Linear:
    """F(x; z) = ⟨x, z⟩ of rows of any kind, as an objective of the user's own."""

    def __init__(self, X: np.ndarray) -> None:
        self.X = X.astype(float)
        self.n_examples, self.dim = X.shape

    def per_example_gradients(self, x: np.ndarray, rows: np.ndarray) -> np.ndarray:
        return self.X[rows]


@pytest.mark.parametrize("name", STEPPED)
@fuzz(5)
@given(seed=SEEDS)
def test_a_user_moves_a_step_by_no_more_than_a_row_may(name, seed):
    rng = np.random.default_rng([seed, 1])
    case, owners = of_users(case_of(seed), rng)
    users = Users.of(owners, owners.size).draw(rng)
    objective = case.outputs == 1 and rng.random() < 0.2
    shown: Any = Case.gradients(replace(case, X=case.public, y=case.public_y))
    batches = Batches(100, int(rng.integers(1, 50)), 50)
    plan = pg.PrivacyPlan(
        (replace(training_event(batches, 10.0 ** rng.uniform(-2, 3)), unit="user"),)
    )
    projection = PROJECTIONS[rng.integers(2 if objective else len(PROJECTIONS))]
    setting = Setting(
        case.x.size, batches, pg.WholeSpace(), plan, METHODS[name].ellipsoid(case.ellipsoid), shown,
        projection=projection,
    )  # fmt: skip
    state = METHODS[name].start(setting)

    def units(batch, order=None):
        """The sum of a batch, with the rows of every user in another order."""
        rows, chosen = case, users
        if order is not None:
            rows = replace(case, X=case.X[order], y=case.y[order])
            chosen = replace(users, rows=np.argsort(order)[users.rows])
        inner = ObjectiveGradients(Linear(rows.X)) if objective else rows.gradients()
        gradients = UserGradients(inner, chosen)
        oracle = GradientOracle(gradients, setting, Releases(plan, random_source(0)), None)
        kept = vars(state).copy()
        with recorded() as log, np.errstate(all="ignore"):
            METHODS[name].gradient(state, oracle, case.x, batch)
        vars(state).update(kept)
        [(mechanism, handed, _)] = log.releases
        return mechanism, handed

    mechanism, alone = units(np.array([0]))
    assert_within(alone, mechanism)
    batch = np.append(0, rng.integers(1, 6, rng.integers(0, 9)))
    together, others = units(batch)[1], units(batch[1:])[1]
    assert_within(together - others, mechanism)
    if not objective:  # whose own arithmetic is known up to rounding
        assert np.array_equal(units(rng.permutation(batch))[1], together)
        assert np.array_equal(units(batch, rng.permutation(owners.size))[1], together)


@pytest.mark.parametrize("name", STEPPED)
@fuzz(3)
@given(seed=SEEDS)
def test_minimisations_with_and_without_a_user_stay_within_the_sensitivity(name, seed):
    rng = np.random.default_rng([seed, 5])
    case, owners = of_users(case_of(seed), rng)
    learned = bool(rng.integers(2)) and not METHODS[name].needs_public
    arguments: dict[str, Any] = {
        "method": name, "epsilon": 1.0, "delta": 1e-3, "domain": pg.Box(-1, 1), "steps": 3,
        "batch_size": int(rng.integers(1, 7)), "step_size": 0.3, "random_state": seed,
        "projection": PROJECTIONS[rng.integers(len(PROJECTIONS))],
        "public": (case.public, case.public_y) if METHODS[name].needs_public else None,
        "ellipsoid": None if learned else case.ellipsoid,
    }  # fmt: skip
    logs: list[Log] = []
    refused: list[str] = []
    for table, named in ((case, owners), with_another(case, owners, rng)):
        X = csr_array(table.X) if case.layout == "csr" else table.X
        y = None if case.loss.name == "linear" else table.y
        public = np.errstate(over="ignore" if name == "pagan-history" else "warn")
        with recorded(logs[0] if logs else None) as log, quiet(), public:
            try:
                pg.minimize(case.loss, X, y, groups=named, **arguments)
                refused.append("")
            except ArithmeticError as error:
                refused.append(str(error))
        logs.append(log)
    assert len(set(refused)) == 1, "refused whatever the rows are, or for no rows"
    if not refused[0]:
        assert_neighbours(*logs)


@fuzz(15)
@given(seed=SEEDS)
def test_fits_with_and_without_a_user_stay_within_the_sensitivity(seed):
    losses = ["logistic", "hinge", "softmax", "multiclass-hinge", "huber", "quantile"]
    rng = np.random.default_rng([seed, 6])
    case, owners = of_users(case_of(seed, losses), rng)
    dim = case.X.shape[1]
    low, high = np.full(dim, -3.0), np.full(dim, 5.0)
    bounded, balanced = rng.random() < 0.3, rng.random() < 0.5
    regression = case.loss.name in ("huber", "quantile")
    squares: Solver | None = "moments" if regression and seed % 4 < 2 else None
    logs: list[Log] = []
    for table, named in ((case, owners), with_another(case, owners, rng)):
        X = np.clip(table.X, low, high).astype(table.X.dtype) if bounded else table.X
        gone = np.isnan(X).all(axis=1)
        if regression:  # a row of NaN is one of blanks, which counts
            X = np.where(gone[:, None], np.inf, X).astype(X.dtype)
        targets = np.where(gone, np.nan, np.nan_to_num(table.y)) if regression else table.y
        problem = Problem(
            case.loss, Examples(case.rows(X), targets, None if regression else gone), case.outputs,
            bool(seed % 2),
            (low, high) if bounded else None,
            class_weights="balanced" if balanced and not regression else None, squares=squares,
            users=Users.of(named, named.size).draw(np.random.default_rng(seed)),
        )  # fmt: skip
        with quiet():
            plan = plan_fit(problem.facts, 3.0, 1e-3, Choices(steps=3), evaluated=not squares)
        assert plan.privacy.unit == "user"
        assert plan.batches.n_examples == 6
        with recorded(logs[0] if logs else None) as log:
            run_fit(problem, plan, plan.releases(random_source(seed)), False)
        logs.append(log)
    assert_neighbours(*logs)


@fuzz(3)
@given(seed=SEEDS)
def test_searches_with_and_without_a_user_stay_within_the_sensitivity(seed):
    rng = np.random.default_rng([seed, 7])
    counts = np.append(rng.choice(SIZES), rng.integers(1, 4, 49))
    owners = np.repeat(np.arange(50), counts)
    kind = rng.integers(3)
    X = np.array([numbers(rng, 3) for _ in owners])
    y = rng.integers(0, 2 + (kind == 2), owners.size).astype(float)
    X, y = np.nan_to_num(X, nan=0.5), y if kind else np.nan_to_num(numbers(rng, owners.size))
    estimator: Any = pg.PrivateHuberRegressor(steps=2)
    if kind:
        estimator = pg.PrivateLogisticRegression(classes=list(range(2 + int(kind == 2))), steps=2)
    logs: list[Log] = []
    kept = np.append(0, np.flatnonzero(owners != 0))
    others = X[kept].copy()
    others[0] = np.inf  # a row of NaN is one of blanks, which counts
    for table, targets, named in ((X, y, owners), (others, y[kept], owners[kept])):
        with (
            recorded(logs[0] if logs else None) as log,
            pytest.MonkeyPatch.context() as patch,
            quiet(),
        ):
            patch.setattr(_tables, "require_finite", lambda *_: None)
            patch.setattr(search, "calibrated_run", one_run)
            found = pg.PrivateSearch(
                estimator, {"radius": [0.2, 0.3]}, epsilon=100.0, mean_runs=1.5, delta=1e-4,
                random_state=seed % 2**31,
            ).fit(table, targets, groups=named)  # fmt: skip
        assert found.privacy_.unit == "user"
        logs.append(log)
    assert_neighbours(*logs)


def test_the_cases_know_every_loss():
    assert {case_of(seed).loss.name for seed in range(200)} == set(LOSSES)
