"""`minimize` from end to end: what it returns, what it costs, what it refuses."""

import math
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pytest
from scipy import optimize
from scipy.sparse import csr_array
from scipy.special import logsumexp

import privagrad as pg
from privagrad._internal.validate import Vector
from privagrad.experiments.problems import absolute_regression
from privagrad.glm.losses import LOSSES
from privagrad.methods.pagan import PAGAN
from privagrad.privacy.sampling import SAMPLINGS
from tests.statistics import assert_scale, rate_accepted

X, Y, SIGMA = absolute_regression(n=200, dim=8)
USUAL: dict[str, Any] = {
    "method": "pagan",
    "epsilon": 1.0,
    "delta": 1e-4,
    "ellipsoid": pg.Ellipsoid(SIGMA ** (-4 / 3), 2.0),
    "domain": pg.Box(-1, 1),
    "batch_size": 14,
    "steps": 40,
    "step_size": 0.2,
}


def usual(table=X, y=Y, loss="absolute", **changes):
    return pg.minimize(loss, table, y, **{**USUAL, **changes})


def test_averages_are_the_iterates_averages():
    for steps in (1, 2, 7, 40):
        seen: list[Vector] = []
        result = usual(steps=steps, callback=lambda k, x, seen=seen: seen.append(x.copy()))
        assert len(seen) == steps
        assert np.array_equal(result.last, seen[-1])
        assert result.average == pytest.approx(np.mean(seen, axis=0), rel=1e-12)
        assert result.suffix_average == pytest.approx(np.mean(seen[steps // 2 :], axis=0), rel=1e-9)
        assert result.x is result.suffix_average


def test_a_run_stopped_at_its_middle_has_a_suffix_average():
    result = usual(steps=10, callback=lambda k, _: k == 5)
    assert np.array_equal(result.x, result.average)


def test_a_run_stopped_by_its_callback_costs_its_whole_plan():
    """The stop looks at iterates: only a number of steps fixed beforehand is cheaper."""
    seen = []

    def stop_at_10(k: int, x: Vector) -> bool:
        seen.append(k)
        return k == 10

    result = usual(callback=stop_at_10)
    assert seen == list(range(1, 11))
    assert result.privacy == usual().privacy


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize(("loss", "classes"), [("linear", 1), ("softmax", 5)])
def test_the_noise_of_a_run_is_what_its_report_says(loss, classes, sampling):
    """Rows of zeros have zero gradients: the iterates of SGD are sums of the noise alone.

    The noise follows from the reported noise multiplier, the ellipsoid and the EXPECTED batch
    size, and the report's noise multiplier is what the budget asks for.
    """
    dim, steps, batch = 50, 400, 5
    ellipsoid = pg.Ellipsoid(np.geomspace(0.1, 10, dim), 0.3)
    gradients = []
    before = np.zeros(dim)

    def difference(_, x):
        gradients.append(x - before)
        np.copyto(before, x)

    result = pg.minimize(
        loss, np.zeros((60, dim // classes)), np.arange(60) % classes, method="dp-sgd", epsilon=2.0,
        delta=1e-4, ellipsoid=ellipsoid, batch_size=batch, steps=steps, step_size=1.0,
        sampling=sampling, callback=difference,
    )  # fmt: skip
    (event,) = result.privacy.events
    assert isinstance(event, pg.GaussianEvent)
    noise = event.noise_multiplier
    plan = pg.PrivacyPlan.calibrate(2.0, 1e-4, 60, batch, steps, sampling)
    assert noise == plan.noise_multiplier
    assert_scale(np.array(gradients), noise * 0.3 / batch)
    assert not result.privacy.seeded


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_rows_are_seen_as_often_as_the_report_says(sampling):
    result = usual(sampling=sampling, steps=400)
    event = result.privacy.events[-1]
    assert event.sampling == result.privacy.sampling == sampling
    if sampling == "poisson":
        assert rate_accepted(result.diagnostics.examples, 400 * 200, event.rate)
        assert not rate_accepted(result.diagnostics.examples, 400 * 200, event.rate * 1.5)
    elif sampling == "random_allocation":
        # Epochs of 14 steps: 28 whole ones and 8 steps, which are charged as a whole one.
        assert event.count == 29 * 14
        assert 28 * 200 < result.diagnostics.examples < 29 * 200
    else:
        assert result.diagnostics.examples == 400 * event.batch_size
    relation = "replace-one" if sampling.endswith("replacement") else "zero-out"
    assert result.privacy.relation == relation


def test_each_example_is_bounded_before_it_is_summed():
    """With next to no noise, a full batch and one step, x is minus the mean bounded gradient."""
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((50, 4)) * [100.0, 1.0, 0.01, 5.0]
    ellipsoid = pg.Ellipsoid(np.array([1.0, 0.5, 100.0, 0.1]), 0.7)
    for projection in ("radial", "euclidean"):
        result = pg.minimize(
            "linear", rows, method="pasan", epsilon=1e5, delta=1e-3, ellipsoid=ellipsoid,
            batch_size=50, steps=1, step_size=1.0, projection=projection,
        )  # fmt: skip
        bounded = ellipsoid.project(rows, how=projection).mean(axis=0)
        assert result.last == pytest.approx(-bounded / np.linalg.norm(bounded), abs=1e-2)
        assert result.diagnostics.clipped == np.sum(ellipsoid.norm(rows) > 0.7)


def test_sums_are_divided_by_the_expected_batch_size():
    """All rows equal: one step is minus the realised size over the expected one, plus noise."""
    ratios = []
    for seed in range(60):
        result = pg.minimize(
            "linear", np.ones((40, 1)), method="dp-sgd", epsilon=1e4, delta=1e-3,
            ellipsoid=pg.Ellipsoid.ball(1, 1.0), batch_size=4, steps=1, step_size=1.0,
            random_state=seed,
        )  # fmt: skip
        assert -result.last[0] * 4 == pytest.approx(result.diagnostics.examples, abs=0.1)
        ratios.append(-result.last[0])
    assert min(ratios) < 0.6
    assert max(ratios) > 1.4


@pytest.mark.parametrize("epsilon", [1e5, float("inf")])
@pytest.mark.parametrize(("n", "size"), [(40, 4), (10, 4), (100, 67), (100, 34)])
def test_an_allocated_epoch_moves_as_far_as_its_steps_are_many(n, size, epsilon):
    """All rows equal, each in one of t = round(n/size) steps, whose expected size is n/t."""
    steps = round(n / size)
    result = pg.minimize(
        "linear", np.ones((n, 1)), method="dp-sgd", epsilon=epsilon, delta=1e-3,
        ellipsoid=pg.Ellipsoid.ball(1, 1.0), batch_size=size, steps=steps, step_size=1.0,
        sampling="random_allocation",
    )  # fmt: skip
    assert result.last[0] == pytest.approx(-steps, abs=0.1)
    assert result.diagnostics.examples == n


@pytest.mark.parametrize("epsilon", [1.0, float("inf")])
def test_batches_without_rows_one_after_the_other_are_steps(epsilon):
    for seed in range(30):
        pg.minimize(
            "linear", np.ones((1000, 1)), method="dp-sgd", epsilon=epsilon, delta=1e-5,
            ellipsoid=pg.Ellipsoid.ball(1, 1.0), batch_size=1, steps=2, step_size=1.0,
            random_state=seed,
        )  # fmt: skip


def test_an_empty_batch_is_a_step_of_noise():
    result = usual(table=X[:2], y=Y[:2], batch_size=1, steps=30, delta=1e-3)
    moves = []
    pg.minimize(
        "linear", np.zeros((3, 2)), method="dp-sgd", epsilon=1.0, delta=1e-3,
        ellipsoid=pg.Ellipsoid.ball(2, 1.0), batch_size=1, steps=30, step_size=1.0,
        callback=lambda _, x: moves.append(x.copy()),
    )  # fmt: skip
    assert len(np.unique(np.array(moves)[:, 0])) == 30
    assert result.privacy.events[-1].count == 30


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("kind", ["array", "float32", "csr", "pandas", "polars"])
def test_all_losses_on_all_kinds_of_tables(loss, kind):
    y: Any = None if loss == "linear" else (Y > 0 if loss in ("logistic", "hinge") else Y)
    more = {}
    if pg.Loss(loss).multiclass:
        y = np.digitize(Y, np.quantile(Y, [1 / 3, 2 / 3]))
        more = {"ellipsoid": pg.Ellipsoid(np.tile(SIGMA ** (-4 / 3), 3), 2.0)}
    table = {
        "array": lambda: X,
        "float32": lambda: X.astype(np.float32),
        "csr": lambda: csr_array(X),
        "pandas": lambda: pd.DataFrame(X, columns=list("abcdefgh")),
        "polars": lambda: pl.DataFrame(X, schema=list("abcdefgh")),
    }[kind]()
    target = pd.Series(y) if kind == "pandas" and y is not None else y
    expected = usual(X, y, loss, random_state=0, **more).last
    found = usual(table, target, loss, random_state=0, **more).last
    assert found == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("kind", ["array", "csr"])
def test_read_only_tables(kind):
    table: Any = X.copy() if kind == "array" else csr_array(X)
    for array in (table,) if kind == "array" else (table.data, table.indices, table.indptr):
        array.setflags(write=False)
    target = Y.copy()
    target.setflags(write=False)
    frozen = usual(table, target, random_state=0)
    assert np.array_equal(frozen.last, usual(X, Y, random_state=0).last)
    usual(table, target, ellipsoid=None)


def blobs(n=600, seed=0):
    """Three classes around the corners of a triangle, and a column of ones."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(3, size=n)
    corners = np.array([[0.0, 2.0], [-1.7, -1.0], [1.7, -1.0]])
    return np.column_stack([rng.normal(corners[labels], 0.8), np.ones(n)]), labels


def accuracy(x, rows, labels):
    return ((rows @ x.reshape(-1, rows.shape[1]).T).argmax(axis=1) == labels).mean()


def cross_entropy(x, rows, labels):
    margins = rows @ x.reshape(-1, rows.shape[1]).T
    return (logsumexp(margins, axis=1) - margins[np.arange(labels.size), labels]).mean()


@pytest.mark.parametrize("loss", ["softmax", "multiclass-hinge"])
def test_classes_are_learned_without_privacy_as_well_as_by_a_solver(loss):
    rows, labels = blobs()
    best = optimize.minimize(cross_entropy, np.zeros(9), (rows, labels))
    result = pg.minimize(
        loss, rows, labels, epsilon=math.inf, step_size=0.5, batch_size=100, steps=500,
        schedule="linear", random_state=0,
    )  # fmt: skip
    assert accuracy(result.x, rows, labels) >= accuracy(best.x, rows, labels) - 0.01 > 0.95
    if loss == "softmax":
        assert cross_entropy(result.x, rows, labels) <= best.fun + 0.01


@pytest.mark.parametrize("loss", ["softmax", "multiclass-hinge"])
def test_classes_are_learned_privately_and_everything_is_charged(loss):
    rows, labels = blobs(2000)
    result = pg.minimize(
        loss, rows, labels, epsilon=2.0, delta=1e-5, domain=pg.Box(-3, 3), step_size=0.5,
        batch_size=100, steps=200, random_state=0,
    )  # fmt: skip
    assert accuracy(result.x, rows, labels) > 0.9
    events = result.privacy.events
    assert [event.purpose for event in events] == ["ranges", "moments", "gradients"]
    assert [event.count for event in events] == [1, 1, 200]
    assert [e.rate for e in events if isinstance(e, pg.GaussianEvent)] == [1, 1, 100 / 2000]
    assert result.privacy.epsilon == pg.PrivacyPlan(events).epsilon(1e-5) <= 2.0


def test_every_class_has_the_columns_ellipsoid():
    rows, labels = blobs(2000)
    seen = []

    class Watched(PAGAN):
        def start(self, setting):
            seen.append(setting.ellipsoid)
            return super().start(setting)

    usual(rows * [1e-3, 1.0, 1e3], labels, "softmax", method=Watched(), ellipsoid=None)
    scale = seen[0].scale.reshape(3, 3)
    assert np.array_equal(scale, np.tile(scale[0], (3, 1)))
    # Columns of scales 1e-3, 1, 1e3 in the shape σ^(-4/3).
    assert np.log10(scale[0] / scale[0, 1]) == pytest.approx([4, 0, -4], abs=1)


@pytest.mark.parametrize("method", ["output-perturbation", "objective-perturbation"])
def test_minimisers_of_class_losses_are_not_perturbed(method):
    rows, labels = blobs()
    with pytest.raises(ValueError, match=r"loss of one margin.*'softmax'"):
        usual(rows, labels, "softmax", method=method, ellipsoid=pg.Ellipsoid.ball(9, 1.0))


def test_a_linear_schedule_falls_in_a_line_to_zero():
    """All gradients are 1: a step of SGD is α."""
    places: dict[str, list[float]] = {}
    for schedule in ("linear", "constant"):
        seen = places.setdefault(schedule, [0.0])

        def note(k: int, x: Vector, seen: list[float] = seen) -> None:
            seen.append(float(x[0]))

        pg.minimize(
            "linear", np.ones((5, 1)), method="sgd", batch_size=5, steps=8, step_size=0.4,
            schedule=schedule, callback=note,
        )  # fmt: skip
    assert -np.diff(places["constant"]) == pytest.approx([0.4] * 8)
    assert -np.diff(places["linear"]) == pytest.approx(0.4 * (1 - np.arange(8) / 8))


def test_secure_runs_differ_and_are_not_seeded():
    first, second = usual(), usual()
    assert not np.array_equal(first.last, second.last)
    assert not first.privacy.seeded
    assert "NOT PRIVATE" not in str(first.privacy)
    assert "NOT PRIVATE" in str(usual(random_state=1).privacy)


def test_the_number_of_threads_changes_nothing():
    rng = np.random.default_rng(0)
    wide = csr_array((rng.standard_normal(300), (np.arange(300) // 5, rng.choice(140_000, 300))))
    tall = rng.standard_normal((40_000, 30))
    for table, batch in ((wide, 20), (tall, 39_000)):
        dim = table.shape[1]
        runs = [
            pg.minimize(
                "logistic", table, np.arange(table.shape[0]) % 2, epsilon=1.0, delta=1e-6,
                ellipsoid=pg.Ellipsoid(np.linspace(1, 2, dim), 1.0), domain=pg.Box(-1, 1),
                batch_size=batch, steps=3, random_state=0, threads=threads,
            ).last
            for threads in (1, 3)
        ]  # fmt: skip
        assert np.array_equal(runs[0], runs[1])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_bad_rows_never_poison_the_result(bad):
    table = X.copy()
    table[::7, 3] = bad
    result = usual(table, steps=100)
    assert np.isfinite(result.last).all()
    assert result.diagnostics.nonfinite > 0
    spoiled = Y.copy()
    spoiled[::5] = np.nan
    assert np.isfinite(usual(X, spoiled).last).all()


@pytest.mark.parametrize(("n", "dim"), [(1, 1), (1, 5), (5, 1), (2, 2)])
def test_the_smallest_tables(n, dim):
    result = pg.minimize(
        "logistic", np.ones((n, dim)), np.ones(n), epsilon=1.0, delta=0.01,
        ellipsoid=pg.Ellipsoid.ball(dim, 1.0), domain=pg.L2Ball(1.0), batch_size=1, steps=5,
    )  # fmt: skip
    assert np.isfinite(result.x).all()


@pytest.mark.parametrize("power", [-150, -30, 30, 140])
def test_tiny_and_huge_columns(power):
    """Units do not matter: rescaled columns with a rescaled ellipsoid move the margins alike."""
    shared = {"loss": "logistic", "domain": pg.WholeSpace(), "y": Y > 0, "random_state": 0}
    factor = 10.0**power
    plain = usual(X, ellipsoid=pg.Ellipsoid(SIGMA**-1, 2.0), **shared)
    scaled = usual(
        X * factor,
        ellipsoid=pg.Ellipsoid(SIGMA**-1, 2.0 * factor),
        **{**shared, "step_size": 0.2 / factor},
    )
    assert scaled.last * factor == pytest.approx(plain.last, rel=1e-4)


def test_defaults_come_from_the_theorems():
    result = pg.minimize(
        "absolute",
        X,
        Y,
        epsilon=1.0,
        delta=1e-4,
        ellipsoid=USUAL["ellipsoid"],
        domain=pg.Box(-1, 1),
    )
    (event,) = result.privacy.events
    assert isinstance(event, pg.GaussianEvent)
    assert event.batch_size == round(math.sqrt(200))
    assert event.count == round((200 / event.batch_size) ** 2)
    given = {"random_state": 0, "steps": 20}
    for method, diameter in (("pagan", 2.0), ("pasan", 2 * math.sqrt(8))):
        default = usual(**given, method=method, step_size=None)
        falling = usual(**given, method=method, step_size=diameter, schedule="linear")
        assert np.array_equal(default.last, falling.last)
        assert np.array_equal(default.x, default.last)


def test_a_start_is_projected_and_left_alone():
    start = np.full(8, 5.0)
    usual(x0=start)
    assert start.tolist() == [5.0] * 8
    first = []
    usual(x0=start, epsilon=math.inf, step_size=1e-9, callback=lambda k, x: first.append(x.copy()))
    assert first[0] == pytest.approx(np.ones(8))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"epsilon": -1.0}, "epsilon > 0"),
        ({"epsilon": 0.0}, "epsilon > 0"),
        ({"epsilon": math.nan}, "epsilon > 0"),
        ({"epsilon": None}, "budget epsilon"),
        ({"delta": 0.0}, "delta > 0"),
        ({"delta": 1.5}, r"delta in \(0, 1\)"),
        ({"method": "adamax"}, "sgd, adagrad, dp-sgd"),
        ({"method": "adagrad"}, "non-private method 'adagrad'"),
        ({"loss": "squared"}, "absolute, logistic"),
        ({"loss": "logistic"}, "labels -1 and 1, or 0 and 1"),
        ({"ellipsoid": np.ones(8)}, "Expected an Ellipsoid of dimension 8, a function that"),
        ({"ellipsoid": pg.Ellipsoid.ball(3, 1.0)}, "dimension 8, as x; found 3"),
        ({"batch_size": 201}, "batch_size <= 200"),
        ({"batch_size": 0}, "batch_size >= 1"),
        ({"batch_size": 2.5}, "whole number"),
        ({"steps": 0}, "steps >= 1"),
        ({"step_size": 0.0}, "step_size > 0"),
        ({"step_size": None, "domain": pg.WholeSpace()}, "bounded domain"),
        ({"step_size": None, "method": "dp-sgd"}, "'dp-sgd' has no default"),
        ({"sampling": "shuffled"}, "poisson"),
        ({"projection": "oblique"}, "radial, euclidean"),
        ({"schedule": "cosine"}, "constant, linear"),
        ({"loss": "softmax"}, "classes 0, 1, 2"),
        ({"loss": "softmax", "y": np.arange(200) % 3}, "dimension 24, as x; found 8"),
        ({"random_state": "seed"}, "random_state"),
        ({"threads": 0}, "threads >= 1"),
        ({"x0": [1.0]}, r"x0 of shape \(8,\)"),
        ({"y": Y[:-1]}, r"y of shape \(200,\), found shape \(199,\)"),
        ({"y": None}, "found None"),
        ({"table": X[0]}, r"shape \(n, d\)"),
        ({"table": pd.DataFrame({"city": ["Bern"] * 200})}, "'city'"),
        ({"public": (X[:, :3], Y)}, "public rows of 8 columns, found 3"),
        ({"method": "gep"}, r"Expected public=\(X, y\) for 'gep'"),
        ({"step_sizes": 0.1}, "unexpected keyword arguments: step_sizes"),
        ({"loss": 3}, "the name of a loss"),
    ],
    ids=str,
)
def test_bad_input_says_what_was_expected(changes, message):
    with pytest.raises((ValueError, TypeError), match=message):
        usual(**changes)


@pytest.mark.parametrize(
    ("method", "chosen", "message"),
    [
        ("pagan", None, "the function to return an Ellipsoid, found None"),
        ("pagan", pg.Ellipsoid.ball(3, 1.0), "dimension 8, as x; found 3"),
        ("adaclip", pg.Ellipsoid.ball(8, 1.0), "Expected one Ellipsoid for 'adaclip'"),
    ],
)
def test_a_function_must_choose_an_ellipsoid(method, chosen, message):
    with pytest.raises((ValueError, TypeError), match=message):
        usual(method=method, ellipsoid=lambda released: chosen)


def test_a_delta_above_one_over_n_is_pointed_out():
    with pytest.warns(UserWarning, match="1/n_examples = 0.005"):
        usual(delta=0.01)


def test_the_progress_bar_writes_to_stderr_only(capsys):
    usual(progress=True)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "pagan" in shown.err
    usual(progress=False)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("method", ["gep", "pdp-sgd", "subspace-adagrad", "adadps"])
def test_public_labels_beyond_the_private_classes_are_refused(method):
    rng = np.random.default_rng(0)
    X, labels = rng.standard_normal((30, 4)), np.arange(30) % 3
    arguments = {"method": method, "epsilon": 1.0, "delta": 1e-3, "step_size": 0.1, "steps": 2,
                 "ellipsoid": pg.Ellipsoid.ball(12, 1.0), "domain": pg.Box(-1, 1)}  # fmt: skip
    with pytest.raises(ValueError, match=r"classes from 0 to 2 .* found 900000"):
        pg.minimize(
            "softmax", X, labels, public=(X, np.where(labels, labels, 900_000)), **arguments
        )
    pg.minimize("softmax", X, labels, public=(X[:5], labels[:5]), **arguments)


def test_an_objective_learns_its_ellipsoid_from_public_examples_for_nothing():
    class Points:
        dim = 3

        def __init__(self, z):
            self.z, self.n_examples = z, len(z)

        def per_example_gradients(self, x, rows):
            return x - self.z[rows]

    rng = np.random.default_rng(0)
    private, public = (Points(rng.standard_normal((n, 3)) * [1, 5, 25]) for n in (200, 100))
    options: dict[str, Any] = {"epsilon": 1.0, "delta": 1e-4, "domain": pg.Box(-1, 1), "steps": 10}
    known = pg.minimize(private, **options, public=public)
    assert [event.purpose for event in known.privacy.events] == ["gradients"]
    learned = pg.minimize(private, **options)
    assert len(learned.privacy.events) == 3
    narrow = Points(np.ones((5, 2)))
    narrow.dim = 2
    wrongs: list[Any] = [(public.z, None), narrow]
    for wrong in wrongs:
        with pytest.raises(ValueError, match="an objective of dimension 3 too"):
            pg.minimize(private, **options, public=wrong)
