"""Every way from private rows to a release, with rows of any kind, in exact arithmetic.

What a mechanism is handed before noise is a sum of whole units of its grid. So these tests compare
integers: what one row adds is within the declared sensitivity, depends on nothing but that row, and
sums are the same for any order and any cut of a batch. Rows hold what an attacker would write:
NaN, infinities, numbers near the largest and the smallest double, sums that cancel, margins at the
bends of the loss, directions that a public subspace fills.

PRIVAGRAD_FUZZ_EXAMPLES=100 tries a hundred times as many tables, other ones every time.
"""

from __future__ import annotations

import os
import warnings
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse import csr_array

import privagrad as pg
from privagrad.estimators import _tables, search
from privagrad.geometry.ellipsoid import PROJECTIONS
from privagrad.glm.examples import Examples
from privagrad.glm.gradients import GlmGradients
from privagrad.glm.losses import LOSSES
from privagrad.glm.rows import as_rows
from privagrad.linear import Choices, Problem, Solver, plan_fit, run_fit
from privagrad.methods import METHODS, Setting
from privagrad.methods.oracle import GradientOracle
from privagrad.privacy.events import training_event
from privagrad.privacy.mechanism import GaussianSum
from privagrad.privacy.noise import random_source
from privagrad.privacy.releases import Releases
from privagrad.privacy.sampling import Batches
from privagrad.queries import calibration, moments, second_moments
from privagrad.queries import columns as queries
from privagrad.queries.calibration import calibrate, class_shares
from privagrad.queries.categories import PURPOSE, discover
from privagrad.queries.covariance import private_covariance
from privagrad.queries.curvature import private_curvature
from privagrad.queries.evaluation import Predicted, evaluate
from privagrad.queries.second_moments import Factors
from tests.releases import releases_at

TIMES = int(os.environ.get("PRIVAGRAD_FUZZ_EXAMPLES", "1"))
SEEDS = st.integers(0, 2**32 - 1)
STEPPED = sorted(name for name, m in METHODS.items() if m.shape != "none" and not m.one_shot)
MULTICLASS = [name for name in LOSSES if pg.Loss(name).multiclass]


def fuzz(examples: int) -> Any:
    return settings(max_examples=examples * TIMES, derandomize=TIMES == 1, database=None)


# Rows


def numbers(rng: np.random.Generator, size: int) -> np.ndarray:
    """Numbers of one kind, or of several."""
    kinds = [
        lambda: rng.standard_normal(size),
        lambda: rng.integers(-3, 4, size).astype(float),
        lambda: rng.standard_normal(size) * 10.0 ** rng.uniform(-308, 308),
        lambda: rng.choice([1.7976931348623157e308, -1.7e308, 1e308, -1e300, 1e154], size),
        lambda: rng.choice([5e-324, -5e-324, 2.2e-308, 1e-300, -1e-160, 0.0], size),
        lambda: rng.choice([np.nan, np.inf, -np.inf, 1.0, 0.0], size),
        lambda: np.full(size, rng.choice([0.0, 1.0, -1e16, 3e300])),
        lambda: 1e16 * rng.integers(-3, 4, size) + rng.standard_normal(size),
    ]
    if rng.random() < 0.3:
        mixed = np.array([kinds[rng.integers(len(kinds))]()[k] for k in range(size)])
        return np.where(rng.random(size) < 0.2, 0.0, mixed)
    return np.asarray(kinds[rng.choice(len(kinds), p=[0.35, 0.2, *[0.075] * 6])]())


def orthogonal_to(x: np.ndarray, row: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """A row whose product with x is 0 up to rounding, however large the row."""
    if x.size < 2 or not np.isfinite(row).all():
        return row
    i, j = rng.choice(x.size, 2, replace=False)
    result = np.zeros(x.size)
    result[i], result[j] = x[j], -x[i]
    return result * 10.0 ** rng.integers(-5, 150)


@dataclass
class Case:
    """A table with targets, a point, and what is public."""

    loss: pg.Loss
    outputs: int
    X: np.ndarray
    y: np.ndarray
    x: np.ndarray
    ellipsoid: pg.Ellipsoid
    layout: str
    public: np.ndarray
    public_y: np.ndarray

    def rows(self, X: np.ndarray | None = None) -> Any:
        X = self.X if X is None else X
        return as_rows(csr_array(X) if self.layout == "csr" else X)

    def gradients(self, X: np.ndarray | None = None) -> GlmGradients:
        return GlmGradients(self.loss, self.rows(X), self.y, self.outputs)

    def alone(self, i: int) -> np.ndarray:
        """The table with every other row's contribution taken out."""
        X = np.full_like(self.X, np.nan)
        X[i] = self.X[i]
        return X

    def without(self, i: int) -> np.ndarray:
        """The table with this row's contribution taken out."""
        X = self.X.copy()
        X[i] = np.nan
        return X


@np.errstate(all="ignore")
def case_of(seed: int, losses: Any = LOSSES, finite: bool = False) -> Case:
    rng = np.random.default_rng(seed)
    name = str(rng.choice(losses))
    parameter = None
    if name == "huber":
        parameter = float(rng.choice([1.35, 1e-6, 0.9e12]))
    if name == "quantile":
        parameter = float(rng.choice([0.5, 1e-9, 0.9]))
    if name in ("logistic", "hinge"):
        parameter = float(rng.choice([1.0, 1e-6, 0.3, 40.0]))
    loss = pg.Loss(name, parameter)
    outputs = int(rng.integers(2, 5)) if loss.multiclass else 1
    n, dim = int(rng.integers(1, 7)), int(rng.choice([1, 2, 3, 5, 17, 40]))
    dtype = (np.float32, np.float64)[rng.choice(2)]
    x = rng.standard_normal(dim * outputs) * 10.0 ** rng.integers(-3, 4)
    if rng.random() < 0.4:
        x = rng.integers(-3, 4, dim * outputs).astype(float)
    public = rng.standard_normal((8, dim))
    X = np.array([numbers(rng, dim) for _ in range(n)])
    for i in range(n):
        kind = rng.random()
        if kind < 0.2:
            X[i] = orthogonal_to(x[:dim], X[i], rng)
        elif kind < 0.3:
            X[i] = rng.standard_normal(2) @ public[:2] * 10.0 ** rng.integers(-5, 305)
        elif kind < 0.35:
            X[i] = X[0]
    X = X.astype(dtype)
    if finite:
        X = np.nan_to_num(X, nan=0.5)
    if loss.multiclass:
        y = rng.integers(0, outputs, n).astype(float)
        public_y = rng.integers(0, outputs, 8).astype(float)
    elif name in ("logistic", "hinge"):
        y, public_y = rng.choice([-1.0, 1.0], n), rng.choice([-1.0, 1.0], 8)
    else:
        # At the bend of the loss, as one way of computing the margin has it.
        y = np.where(rng.random(n) < 0.5, X.astype(float) @ x, numbers(rng, n))
        y = np.nan_to_num(y) if finite else y
        public_y = rng.standard_normal(8)
    spread = rng.choice([0, 2, 12, 300])
    scale = 10.0 ** rng.uniform(-spread, spread, x.size) if spread < 300 else np.ones(x.size)
    if spread == 300:
        scale = 10.0 ** rng.uniform(-300, 300, x.size)
    ellipsoid = pg.Ellipsoid(scale, 10.0 ** rng.uniform(-3, 3))
    if rng.random() < 0.2:
        ellipsoid = pg.Ellipsoid.ball(x.size, 10.0 ** rng.uniform(-140, 140))
    layout = str(rng.choice(["dense", "csr"]))
    return Case(loss, outputs, X, y, x, ellipsoid, layout, public, public_y)


# Releases


@dataclass
class Log:
    """What mechanisms were handed, and what they gave."""

    releases: list[tuple[GaussianSum, np.ndarray, Any]] = field(default_factory=list)
    given: list[np.ndarray] = field(default_factory=list)


def shape_of(total: Any) -> Any:
    return None if total.ellipsoid is None else total.ellipsoid.noise_std


@contextmanager
def recorded(played: Log | None = None) -> Any:
    """The releases within. With `played` its outcomes come again: all that rows can move is input.

    So two runs on neighbouring tables see the same history at every release.
    """
    log, release = Log(), GaussianSum.release

    def watched(self, total, source, pool=None, history=None):
        number = len(log.releases)
        log.releases.append((self, np.rint(total.memory), shape_of(total)))
        if played is None:
            release(self, total, source, pool, history)
        else:
            total.memory[...] = played.given[number]
        log.given.append(total.memory.copy())
        return total.memory

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GaussianSum, "release", watched)
        yield log


def assert_within(moved: np.ndarray, mechanism: GaussianSum) -> None:
    """‖moved‖ ≤ sensitivity / grid for whole units, in integers."""
    assert np.isfinite(moved).all()
    assert np.array_equal(moved, np.rint(moved))
    squares = sum(int(v) ** 2 for v in moved.tolist())
    assert squares <= (Fraction(mechanism.sensitivity) / Fraction(mechanism.grid)) ** 2


def assert_neighbours(with_row: Log, without: Log) -> None:
    assert len(with_row.releases) == len(without.releases) > 0
    for (one, units, shape), (other, rest, same) in zip(
        with_row.releases, without.releases, strict=True
    ):
        assert one == other
        assert np.array_equal(shape, same)
        assert_within(units - rest, one)


def assert_rows_alone(parts: list[Log], whole: Log, others: list[Log]) -> None:
    """Each row is within the sensitivity, and sums are the sums of what rows give alone."""
    for number, (mechanism, units, _) in enumerate(whole.releases):
        for part in parts:
            assert_within(part.releases[number][1], mechanism)
        total = np.sum([part.releases[number][1] for part in parts], axis=0)
        assert np.array_equal(units, total)
        for other in others:
            assert np.array_equal(other.releases[number][1], units)


# One step of every method


@pytest.mark.parametrize("name", STEPPED)
@fuzz(35)
@given(seed=SEEDS)
def test_a_step_sums_what_rows_give_alone(name, seed):
    case, rng = case_of(seed), np.random.default_rng([seed, 1])
    method, n = METHODS[name], len(case.X)
    batch = rng.integers(0, n, rng.integers(0, 90))
    shown = GlmGradients(case.loss, as_rows(case.public), case.public_y, case.outputs)
    batches = Batches(100, int(rng.integers(1, 50)), 50)
    plan = pg.PrivacyPlan((training_event(batches, 10.0 ** rng.uniform(-2, 3)),))
    setting = Setting(
        case.x.size, batches, pg.WholeSpace(), plan, method.ellipsoid(case.ellipsoid), shown,
        projection=PROJECTIONS[rng.integers(len(PROJECTIONS))],
    )  # fmt: skip
    state = method.start(setting)
    size = setting.radius * 10.0 ** rng.uniform(-2, 1)

    def units(rows):
        releases = Releases(plan, random_source(0))
        oracle = GradientOracle(case.gradients(), setting, releases, None)
        kept = vars(state).copy()
        with recorded() as log, np.errstate(all="ignore"):
            method.gradient(state, oracle, case.x, rows)
        vars(state).update(kept)
        [(mechanism, handed, _)] = log.releases
        return mechanism, handed, oracle.diagnostics

    for _ in range(int(rng.integers(0, 3))):  # a state that has learned something
        oracle = GradientOracle(shown, setting, Releases(plan, random_source(0)), None)
        with np.errstate(all="ignore"):
            method.gradient(state, oracle, case.x, np.arange(8))
            method.step(state, case.x.copy(), size * rng.standard_normal(case.x.size), 0.1)

    single = []
    for i in range(n):
        mechanism, handed, counts = units(np.array([i]))
        assert_within(handed, mechanism)
        if not np.isfinite(case.X[i]).all():
            assert not handed.any()
            assert counts.nonfinite == 1
        single.append(handed)
    _, together, _ = units(batch)
    total = np.zeros(together.size)
    for i in batch:
        total += single[i]
    assert np.array_equal(together, total)
    assert np.array_equal(units(rng.permutation(batch))[1], together)
    cut = int(rng.integers(0, batch.size + 1))
    assert np.array_equal(units(batch[:cut])[1] + units(batch[cut:])[1], together)


# Questions to all rows


def ask_ranges(case, noise, rng, source):
    queries.private_ranges(case.rows(), releases_at({"ranges": noise}, source), "ranges")


def ask_rare(case, noise, rng, source):
    dim = case.X.shape[1]
    releases = releases_at({"ranges": noise, "rare": noise}, source)
    known = queries.private_ranges(case.rows(), releases, "ranges")
    known = replace(known, found=True, seen=rng.random(dim) < 0.5)
    queries.with_rare(case.rows(), known, releases, "rare")


def ask_moments(case, noise, rng, source):
    rows = case.rows()
    scale = 2.0 ** rng.integers(-40, 41, rows.shape[1]).astype(float)
    norm, releases = 10.0 ** rng.uniform(-1, 3), releases_at({"moments": noise}, source)
    queries.whitened_moments(rows, scale, norm, releases, "moments")


def ask_norms(case, noise, rng, source):
    scale = 10.0 ** rng.uniform(-12, 12, case.X.shape[1])
    queries.private_norm(case.rows(), scale, releases_at({"norms": noise}, source), "norms")


def ask_second_moments(case, noise, rng, source):
    radius, releases = 10.0 ** rng.uniform(-3, 3), releases_at({"second moments": noise}, source)
    factors = (
        None if rng.integers(2) else Factors(lambda examples: np.ones((len(case.X), 1, 1)), (), 1)
    )
    examples = Examples(case.rows(), case.y)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(second_moments, "_SPLIT_FROM", int(rng.choice([0, 10**9])))
        patch.setattr(second_moments, "_ROWS_PER_SUM", 0)
        second_moments.private_second_moments(examples, radius, releases, "second moments", factors)


def ask_covariance(case, noise, rng, source):
    """As a fit asks: NaN becomes 0 by standardisation; what was taken out is infinite."""
    if case.layout == "csr":
        return ask_moments(case, noise, rng, source)
    gone, dim = np.isnan(case.X).all(axis=1), case.X.shape[1]
    rows = case.rows(np.where(gone[:, None], np.inf, case.X).astype(case.X.dtype))
    table = rows.standardized(rng.standard_normal(dim), 10.0 ** rng.uniform(-3, 3, dim), True)
    table = table.without(gone)
    chosen = np.flatnonzero(rng.random(dim + 1) < 0.7)
    if not chosen.size:
        chosen = np.array([dim])
    matrix = rng.standard_normal((chosen.size, chosen.size))
    examples = Examples(table.combined(chosen, matrix), case.y)
    radius, releases = 10.0 ** rng.uniform(-3, 3), releases_at({"covariance": noise}, source)
    return private_covariance(examples, chosen, radius, releases)


def ask_columns(case, noise, rng, source):
    noises = {share.purpose: noise for share in moments.COLUMNS.shares}
    releases, always = releases_at(noises, source), bool(rng.integers(2))
    moments.private_columns(case.rows(), moments.COLUMNS, releases, always)


def ask_bounded_columns(case, noise, rng, source):
    low = rng.uniform(-9, 3, case.X.shape[1])
    high = low + 10.0 ** rng.uniform(-9, 9, case.X.shape[1])
    releases = releases_at({"moments": noise}, source)
    moments.bounded_columns(case.rows(), (low, high), releases, "moments")


def with_blanks(case):
    """Every column followed by one that says where it is NaN, and the places of those columns."""
    dim = case.X.shape[1]
    X = np.empty((len(case.X), 2 * dim), case.X.dtype)
    # A row that was taken out is NaN in all columns, and says nothing of its blanks.
    X[:, ::2], X[:, 1::2] = case.X, np.isnan(case.X) & ~np.isnan(case.X).all(axis=1)[:, None]
    blanks = np.where(np.arange(2 * dim) % 2 == 0, np.arange(2 * dim) + 1, -1)
    return case.rows(X), blanks


def ask_columns_with_blanks(case, noise, rng, source):
    rows, blanks = with_blanks(case)
    noises = {share.purpose: noise for share in moments.COLUMNS.shares}
    releases, limits = releases_at(noises, source), np.where(blanks < 0, 1.0, np.inf)
    moments.private_columns(rows, moments.COLUMNS, releases, limits=limits, blanks=blanks)


def ask_bounded_columns_with_blanks(case, noise, rng, source):
    rows, blanks = with_blanks(case)
    low = np.where(blanks < 0, 0.0, rng.uniform(-9, 3, blanks.size))
    high = np.where(blanks < 0, 1.0, low + 10.0 ** rng.uniform(-9, 9, blanks.size))
    releases = releases_at({"moments": noise}, source)
    moments.bounded_columns(rows, (low, high), releases, "moments", blanks=blanks)


def ask_norms_of_blanks_at_centres(case, noise, rng, source):
    """As a fit asks: NaN becomes 0 by standardisation; what was taken out is infinite."""
    gone = np.isnan(case.X).all(axis=1)
    rows = case.rows(np.where(gone[:, None], np.inf, case.X).astype(case.X.dtype))
    dim = case.X.shape[1]
    centre, unit = rng.standard_normal(dim), 10.0 ** rng.uniform(-3, 3, dim)
    table = rows.standardized(centre, unit, True)
    releases = releases_at({"norms": noise}, source)
    queries.private_norm(table, np.ones(dim + 1), releases, "norms")


def ask_algorithm3(case, noise, rng, source):
    if case.layout == "csr":
        return ask_ranges(case, noise, rng, source)
    ratio = 1 + 10.0 ** rng.uniform(-3, 3)
    return moments.algorithm3(case.X, ratio, 1.0, 1e-6, source, rounds=3, noise="paper")


def ask_calibration(case, noise, rng, source):
    weights = rng.standard_normal(case.X.shape[1]) * 10.0 ** rng.integers(-3, 4)
    signs = np.where(case.y > 0, 1.0, -1.0)
    loss = pg.Loss("logistic", 10.0 ** rng.uniform(-2, 2))
    gradients = GlmGradients(loss, case.rows(), signs)
    calibrate(gradients, weights, releases_at({"calibration": noise}, source))


def ask_calibration_of_classes(case, noise, rng, source):
    classes = int(rng.integers(2, 12))
    weights = rng.standard_normal(classes * case.X.shape[1]) * 10.0 ** rng.integers(-3, 4)
    gradients = GlmGradients(
        pg.Loss("softmax"), case.rows(), class_numbers(case.y, classes), classes
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibration, "_ROWS", int(rng.choice([1, 2, 65_536])))
        calibrate(gradients, weights, releases_at({"calibration": noise}, source))


def ask_curvature(case, noise, rng, source):
    names = ["logistic", "hinge", "softmax", "multiclass-hinge", "huber", "quantile", "absolute"]
    loss, outputs, y = pg.Loss(str(rng.choice(names))), 1, case.y
    if loss.multiclass:
        outputs = int(rng.integers(2, 5))
        y = class_numbers(y, outputs)
    elif not loss.regression:
        y = 2 * class_numbers(y, 2) - 1
    weights = rng.standard_normal(outputs * case.X.shape[1]) * 10.0 ** rng.integers(-3, 4)
    ball = pg.Ellipsoid.ball(weights.size, 10.0 ** rng.uniform(-3, 3))
    norm, releases = 10.0 ** rng.uniform(-3, 3), releases_at({"curvature": noise}, source)
    gradients = GlmGradients(loss, case.rows(), y, outputs)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(second_moments, "_SPLIT_FROM", int(rng.choice([0, 10**9])))
        patch.setattr(second_moments, "_ROWS_PER_SUM", 0)
        private_curvature(gradients, weights, ball, norm, releases)


def ask_class_shares(case, noise, rng, source):
    """Rows that are taken out of a table are left out here: labels are all that is asked for."""
    classes, out = int(rng.integers(2, 12)), np.isnan(case.X).all(axis=1)
    labels = class_numbers(case.y, classes)
    class_shares(
        Examples(case.rows(), labels, out), classes, releases_at({"class shares": noise}, source)
    )


def class_numbers(y: np.ndarray, classes: int) -> np.ndarray:
    return np.floor(np.abs(np.nan_to_num(y, posinf=7.0, neginf=8.0)) % classes)


QUESTIONS = [
    ask_ranges, ask_rare, ask_moments, ask_norms, ask_second_moments, ask_covariance, ask_columns,
    ask_bounded_columns, ask_columns_with_blanks, ask_bounded_columns_with_blanks,
    ask_norms_of_blanks_at_centres, ask_algorithm3, ask_calibration, ask_calibration_of_classes,
    ask_curvature, ask_class_shares,
]  # fmt: skip


@pytest.mark.parametrize("ask", QUESTIONS, ids=lambda ask: ask.__name__)
@fuzz(35)
@given(seed=SEEDS)
def test_questions_sum_what_rows_answer_alone(ask, seed):
    case = case_of(seed)
    noise = 10.0 ** np.random.default_rng([seed, 2]).uniform(-2, 2)

    def answers(X, played=None, order=slice(None)):
        rng = np.random.default_rng([seed, 3])
        with recorded(played) as log:
            ask(replace(case, X=X[order], y=case.y[order]), noise, rng, random_source(seed))
        return log

    n = len(case.X)
    whole = answers(case.X)
    parts = [answers(case.alone(i), whole) for i in range(n)]
    permuted = np.random.default_rng(seed).permutation(n)
    assert_rows_alone(parts, whole, [answers(case.X, whole, permuted)])
    i = seed % n
    assert_neighbours(whole, answers(case.without(i), whole))


@fuzz(60)
@given(seed=SEEDS)
def test_an_evaluation_sums_what_rows_answer_alone(seed):
    losses = ["logistic", "hinge", "softmax", "multiclass-hinge", "huber", "quantile"]
    case, rng = case_of(seed, losses), np.random.default_rng([seed, 4])
    n = len(case.X)
    order = rng.permutation(n)
    points = case.x if case.outputs == 1 else case.x.reshape(case.outputs, -1).T

    def answers(X, y):
        with recorded() as log:
            rows = Predicted.of(case.loss, case.rows(X).margins(points), y)
            evaluate(rows, releases_at({"evaluation": 2.0}))
        return log

    whole = answers(case.X, case.y)
    parts = [answers(case.alone(i), case.y) for i in range(n)]
    assert_rows_alone(parts, whole, [answers(case.X[order], case.y[order])])


@fuzz(40)
@given(seed=SEEDS)
def test_categories_move_by_what_a_row_may_move(seed):
    rng = np.random.default_rng(seed)
    columns, n = int(rng.integers(1, 30)), int(10.0 ** rng.uniform(0, 12))
    counts = {
        f"c{k}": Counter({v: int(rng.integers(1, 10**6)) for v in "abc"}) for k in range(columns)
    }
    fewer = {
        name: count - Counter(rng.choice(["a", "b", "c", "-"])) for name, count in counts.items()
    }
    fewer = {name: Counter({v: count[v] for v in "abc"}) for name, count in fewer.items()}
    noise = 10.0 ** rng.uniform(-2, 3)
    logs = []
    for table in (counts, fewer):
        with recorded() as log:
            discover(table, n, releases_at({PURPOSE: noise}, leak=1e-7))
        logs.append(log)
    assert_neighbours(*logs)


# Whole runs on neighbouring tables


@contextmanager
def quiet() -> Any:
    """Warnings of too few rows are right, and beside the point."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield


@pytest.mark.parametrize("name", sorted({*STEPPED, "output-perturbation"}))
@fuzz(6)
@given(seed=SEEDS)
def test_minimisations_of_neighbouring_tables_stay_within_the_sensitivity(name, seed):
    one_shot = METHODS[name].one_shot
    losses = [loss for loss in LOSSES if loss not in MULTICLASS] if one_shot else LOSSES
    case, rng = case_of(seed, losses), np.random.default_rng([seed, 5])
    n = len(case.X)
    learned = bool(rng.integers(2)) and not METHODS[name].needs_public
    arguments: dict[str, Any] = {
        "method": name, "epsilon": 1.0, "delta": 1e-3, "domain": pg.Box(-1, 1), "steps": 3,
        "batch_size": int(rng.integers(1, n + 1)), "step_size": 0.3, "random_state": seed,
        "projection": PROJECTIONS[rng.integers(len(PROJECTIONS))],
        "public": (case.public, case.public_y) if METHODS[name].needs_public else None,
        "ellipsoid": None if learned else case.ellipsoid,
    }  # fmt: skip
    if one_shot:
        arguments["ellipsoid"] = pg.Ellipsoid.ball(case.x.size, 10.0 ** rng.uniform(-2, 2))
    y = None if case.loss.name == "linear" else case.y
    if case.loss.multiclass:
        case.y[-1] = case.outputs - 1  # so that the number of classes is what the case says
    logs: list[Log] = []
    refused: list[str] = []
    for X in (case.X, case.without(seed % n)):
        table = csr_array(X) if case.layout == "csr" else X
        # Squares of a given ellipsoid's noise may overflow there, which is public.
        public = np.errstate(over="ignore" if name == "pagan-history" else "warn")
        with recorded(logs[0] if logs else None) as log, quiet(), public:
            try:
                pg.minimize(case.loss, table, y, **arguments)
                refused.append("")
            except ArithmeticError as error:
                refused.append(str(error))
        logs.append(log)
    assert len(set(refused)) == 1, "refused whatever the rows are, or for no rows"
    if not refused[0]:
        assert_neighbours(*logs)


@fuzz(25)
@given(seed=SEEDS)
def test_fits_of_neighbouring_tables_stay_within_the_sensitivity(seed):
    losses = ["logistic", "hinge", "softmax", "multiclass-hinge", "huber", "quantile"]
    case, rng = case_of(seed, losses), np.random.default_rng([seed, 6])
    n, dim = case.X.shape
    low, high = np.full(dim, -3.0), np.full(dim, 5.0)
    bounded, balanced = rng.random() < 0.3, rng.random() < 0.5
    regression = case.loss.name in ("huber", "quantile")
    squares: Solver | None = "moments" if regression and seed % 4 < 2 else None
    order = rng.permutation(n)
    logs: list[Log] = []
    for X, y in (
        (case.X, case.y),
        (case.without(seed % n), case.y),
        (case.X[order], case.y[order]),
    ):
        if bounded:
            X = np.clip(X, low, high).astype(X.dtype)
        gone = np.isnan(X).all(axis=1)
        if regression:  # a row of NaN is one of blanks, which counts
            X = np.where(gone[:, None], np.inf, X).astype(X.dtype)
        targets = np.where(gone, np.nan, np.nan_to_num(y)) if regression else y
        problem = Problem(
            case.loss, Examples(case.rows(X), targets, None if regression else gone), case.outputs,
            bool(seed % 2),
            (low, high) if bounded else None,
            class_weights="balanced" if balanced and not regression else None, squares=squares,
        )  # fmt: skip
        with quiet():
            plan = plan_fit(problem.facts, 3.0, 1e-3, Choices(steps=3), evaluated=not squares)
        with recorded(logs[0] if logs else None) as log:
            run_fit(problem, plan, plan.releases(random_source(seed)), False)
        logs.append(log)
    assert_neighbours(logs[0], logs[1])
    if plan.batches.sampling is None:
        for (_, units, _), (_, permuted, _) in zip(logs[0].releases, logs[2].releases, strict=True):
            assert np.array_equal(units, permuted)


def one_run(candidates, mean_runs, epsilon, delta):
    """Any split of the budget does: calibration takes long and sees no rows."""
    return search.planned_run(candidates, mean_runs, 5.0, delta)


@fuzz(6)
@given(seed=SEEDS)
def test_searches_on_neighbouring_tables_stay_within_the_sensitivity(seed):
    rng = np.random.default_rng([seed, 7])
    X = np.array([numbers(rng, 3) for _ in range(50)])
    kind = rng.integers(3)
    y = numbers(rng, 50) if kind == 0 else rng.integers(0, 2 + (kind == 2), 50).astype(float)
    X, y = np.nan_to_num(X, nan=0.5), np.nan_to_num(y)
    classes = list(range(2 + int(kind == 2)))
    estimator: Any = pg.PrivateHuberRegressor(steps=2)
    if kind:
        estimator = pg.PrivateLogisticRegression(classes=classes, steps=2)
    logs: list[Log] = []
    others = X.copy()
    others[seed % 50] = np.inf  # a row of NaN is one of blanks, which counts
    for table in (X, others):
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
            ).fit(table, y)  # fmt: skip
        assert np.isfinite(found.best_score_)
        logs.append(log)
    assert_neighbours(*logs)
