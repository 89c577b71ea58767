"""Any objective: the same mechanism, methods, domains and accounting as for linear models."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

import privagrad as pg
from privagrad.glm.gradients import GlmGradients
from privagrad.glm.rows import as_rows
from privagrad.methods import METHODS
from privagrad.methods import objective as objectives
from privagrad.methods.objective import Objective, ObjectiveGradients
from privagrad.privacy.mechanism import GaussianSum
from privagrad.testing import check_objective
from tests.statistics import assert_scale

Array = NDArray[np.float64]
LOSS_NAMES = ["absolute", "logistic", "hinge", "huber", "quantile", "linear", "softmax"]
STEPPED = [name for name, method in METHODS.items() if not method.one_shot]
DOMAINS = [pg.WholeSpace(), pg.Box(-1, 1), pg.L2Ball(0.7), pg.L1Ball(0.7), pg.Simplex(1.0)]


@dataclass
class Linear:
    """A linear model as an objective of one's own, example by example in NumPy."""

    loss: pg.Loss
    X: Array
    y: Array
    outputs: int = 1

    @property
    def dim(self) -> int:
        return self.X.shape[1] * self.outputs

    @property
    def n_examples(self) -> int:
        return len(self.X)

    def per_example_gradients(self, x: Array, rows: Any) -> Array:
        gradients = np.zeros((len(rows), self.dim))
        for k, i in enumerate(rows):
            gradients[k] = self.gradient(x, self.X[i], self.y[i])
        return gradients

    def gradient(self, x: Array, a: Array, y: float) -> Array:
        name = self.loss.name
        if name == "softmax":
            chances = np.exp(x.reshape(self.outputs, -1) @ a)
            chances /= chances.sum()
            chances[int(y)] -= 1
            return np.outer(chances, a).ravel()
        margin = float(a @ x)
        residual = margin - y
        slopes: dict[str, float] = {
            "absolute": np.sign(residual),
            "logistic": -y / (1 + np.exp(y * margin)),
            "hinge": -y * (y * margin < 1),
            "huber": np.clip(residual, -1.35, 1.35),
            "quantile": (residual > 0) - 0.5 if residual else 0.0,
            "linear": 1.0,
        }
        return np.asarray(slopes[name] * a)

    def value(self, x: Array) -> float:
        gradients = GlmGradients(self.loss, as_rows(self.X), self.y, self.outputs)
        return gradients.value(x)


def problem(name: str, seed: int = 0, n: int = 120, dim: int = 5) -> Linear:
    rng = np.random.default_rng(seed)
    X = rng.standard_normal((n, dim)) * np.geomspace(1, 0.05, dim)
    y = X @ rng.choice([-1.0, 1.0], dim) + 0.1 * rng.standard_normal(n)
    if name in ("logistic", "hinge"):
        y = np.sign(y)
    if name == "softmax":
        return Linear(pg.Loss(name), X, rng.integers(0, 3, n).astype(float), 3)
    return Linear(pg.Loss(name), X, np.zeros(n) if name == "linear" else y)


def both(linear: Linear, **settings: Any) -> tuple[pg.Result, pg.Result]:
    common: dict[str, Any] = {
        "method": "pagan", "epsilon": 2.0, "delta": 1e-5, "domain": pg.Box(-1, 1),
        "ellipsoid": pg.Ellipsoid(np.geomspace(1, 30, linear.dim), 0.4), "batch_size": 20,
        "steps": 25, "step_size": 0.1, "random_state": 3, **settings,
    }  # fmt: skip
    if common["method"] in ("sgd", "adagrad"):
        common["epsilon"] = None
    y = None if linear.loss.name == "linear" else linear.y
    return pg.minimize(linear.loss, linear.X, y, **common), pg.minimize(linear, **common)


def assert_same(kernels: pg.Result, own: pg.Result, close: float = 2e-4) -> None:
    """To the rounding of the grid: rows are rounded one by one there, their sum here."""
    for name in ("last", "average", "suffix_average"):
        assert getattr(own, name) == pytest.approx(getattr(kernels, name), abs=close)
    assert own.privacy.events == kernels.privacy.events
    assert own.privacy.epsilon == kernels.privacy.epsilon
    assert own.diagnostics == kernels.diagnostics


@pytest.mark.parametrize("projection", ["radial", "euclidean"])
@pytest.mark.parametrize("loss", LOSS_NAMES)
def test_linear_losses_as_objectives_give_the_iterates_of_the_kernels(loss, projection):
    assert_same(*both(problem(loss), projection=projection))


@pytest.mark.parametrize("method", STEPPED)
def test_every_method_works_on_an_objective(method):
    public = problem("logistic", seed=9, n=60)
    linear = problem("logistic")
    settings: dict[str, Any] = {
        "method": method, "epsilon": None if METHODS[method].shape == "none" else 2.0,
        "ellipsoid": pg.Ellipsoid(np.geomspace(1, 30, 5), 0.4), "batch_size": 20, "steps": 25,
        "step_size": 0.1, "random_state": 3, "domain": pg.L2Ball(2.0),
    }  # fmt: skip
    shown = public.X, public.y
    kernels = pg.minimize("logistic", linear.X, linear.y, **settings, public=shown)
    own = pg.minimize(linear, **settings, public=public)
    assert_same(kernels, own)


@pytest.mark.parametrize("domain", DOMAINS, ids=repr)
@pytest.mark.parametrize("sampling", ["poisson", "with_replacement", "without_replacement"])
def test_every_domain_and_sampling_works_on_an_objective(domain, sampling):
    assert_same(*both(problem("huber"), domain=domain, sampling=sampling))


def test_without_privacy_it_is_the_plain_method():
    kernels, own = both(problem("logistic"), epsilon=float("inf"))
    assert own.last == pytest.approx(kernels.last, abs=1e-12)
    assert own.privacy.epsilon == np.inf


@given(seed=st.integers(0, 10**6), euclidean=st.booleans())
def test_one_example_moves_the_sum_by_at_most_the_sensitivity(seed, euclidean):
    """Also where rounding of the user's arithmetic hangs on the batch."""
    rng = np.random.default_rng(seed)
    n, dim = int(rng.integers(1, 30)), int(rng.integers(1, 8))
    G = rng.standard_normal((n, dim)) * 10.0 ** rng.uniform(-200, 200, (n, 1))
    G[rng.random(n) < 0.1] = np.nan

    @dataclass
    class Wobbly:
        dim: int
        n_examples: int = n

        def per_example_gradients(self, x: Array, rows: Any) -> Array:
            return G[rows] * (1 + objectives.APART / 2 * np.cos(len(rows)))

    gradients = ObjectiveGradients(Wobbly(dim))
    ellipsoid = pg.Ellipsoid(10.0 ** rng.uniform(-3, 3, dim), 10.0 ** rng.uniform(-2, 2))
    mechanism = GaussianSum(dim, 10.0 ** rng.uniform(-2, 2), n, gradients.slack(n))
    how: Any = "euclidean" if euclidean else "radial"

    def units(rows: Any) -> Array:
        total = mechanism.sum(ellipsoid)
        with np.errstate(over="ignore"):
            gradients.add_bounded(total, np.zeros(dim), rows, how)
        return np.rint(total.memory)

    moved = units(np.arange(n)) - units(np.arange(n - 1))
    assert np.isfinite(moved).all()
    assert np.linalg.norm(moved) * mechanism.grid <= mechanism.sensitivity
    alone = units(np.array([n - 1])) * mechanism.grid
    assert np.linalg.norm(alone) <= 1 + np.sqrt(dim) * mechanism.grid


def test_the_noise_has_the_shape_of_the_ellipsoid_and_the_scale_of_the_plan():
    class Nothing:
        dim, n_examples = 400, 1000

        def per_example_gradients(self, x: Array, rows: Any) -> Array:
            return np.zeros((len(rows), 400))

    ellipsoid = pg.Ellipsoid(np.geomspace(0.01, 100, 400), 3.0)
    seen: list[Array] = []
    result = pg.minimize(
        Nothing(), method="dp-sgd", epsilon=1.0, delta=1e-6, batch_size=50, steps=20,
        step_size=1.0, ellipsoid=ellipsoid, callback=lambda k, x: seen.append(x.copy()),
    )  # fmt: skip
    steps = np.diff(np.vstack([np.zeros(400), *seen]), axis=0) * 50 / 3.0
    event = result.privacy.events[0]
    assert isinstance(event, pg.GaussianEvent)
    assert_scale(steps, event.noise_multiplier)


def test_gradients_are_taken_in_chunks_of_bounded_memory(monkeypatch):
    linear = problem("logistic")
    _, own = both(linear, batch_size=60)
    asked = []
    real = linear.per_example_gradients

    def watched(x: Array, rows: Any) -> Array:
        asked.append(len(rows))
        return real(x, rows)

    monkeypatch.setattr(linear, "per_example_gradients", watched)
    monkeypatch.setattr(objectives, "_CHUNK_BYTES", 8 * 5 * 7)
    _, parts = both(linear, batch_size=60)
    assert max(asked) == 7
    assert parts.last == pytest.approx(own.last, abs=1e-12)


@pytest.mark.parametrize("batch_size", [1, 50, 10_000])
def test_the_slack_counts_the_rounding_of_every_other_example(batch_size):
    most = 2 * batch_size + 64
    slack = ObjectiveGradients(problem("logistic")).slack(batch_size)
    assert most * (objectives.APART + most * 2.0**-52) <= slack < 1e-4


def test_an_objective_may_give_every_chunk_in_the_same_memory(monkeypatch):
    linear = problem("logistic")
    expected = ObjectiveGradients(linear).per_example(np.ones(5), np.arange(100))
    memory, real = np.empty((120, 5)), linear.per_example_gradients

    def reused(x: Array, rows: Any) -> Array:
        memory[: len(rows)] = real(x, rows)
        return memory[: len(rows)]

    monkeypatch.setattr(linear, "per_example_gradients", reused)
    monkeypatch.setattr(objectives, "_CHUNK_BYTES", 8 * 5 * 20)
    found = ObjectiveGradients(linear).per_example(np.ones(5), np.arange(100))
    assert np.array_equal(found, expected)


def test_the_dimension_and_the_number_of_examples_are_asked_once():
    class Growing:
        calls = 0

        def _next(self) -> int:
            self.calls += 1
            return 3 + self.calls // 3

        dim = n_examples = property(_next)

        def per_example_gradients(self, x: Array, rows: Any) -> Array:
            return np.zeros((len(rows), self.dim))

    gradients = ObjectiveGradients(Growing())
    assert {gradients.dim for _ in range(9)} == {3}
    assert {gradients.n_examples for _ in range(9)} == {3}
    with pytest.raises(ValueError, match="of shape"):
        gradients.per_example(np.zeros(3), np.arange(2))


def test_gradients_that_a_method_transforms_depend_on_their_example_to_the_last_bit():
    """AdaCliP subtracts a mean: what rounding leaves of the difference could be large."""

    class Product(Linear):
        def per_example_gradients(self, x: Array, rows: Any) -> Array:
            gradients = (self.X[rows] @ x - self.y[rows])[:, None] * self.X[rows]
            return np.asarray(gradients * (1 + objectives.APART / 2 * np.cos(len(rows))))

    linear = problem("huber", n=300, dim=40)
    gradients = ObjectiveGradients(Product(linear.loss, linear.X, linear.y))
    x = np.random.default_rng(0).standard_normal(40)
    alone = np.vstack([gradients.per_example(x, np.array([i])) for i in range(300)])
    assert np.array_equal(gradients.per_example(x, np.arange(300)), alone)


# The ellipsoid


def test_rounding_that_hangs_on_other_examples_moves_no_vote_for_an_octave():
    """1 and the double below it are in different octaves: all rows' votes would move at once."""

    class Rounds:
        dim, n_examples = 1, 256

        def __init__(self, first: float) -> None:
            self.Z = np.ones((256, 1))
            self.Z[0] = first

        def per_example_gradients(self, x: Array, rows: Any) -> Array:
            total = self.Z[rows].sum()
            return (self.Z[rows] + total) - total

    one, other = Rounds(1.0), Rounds(0.15)
    check_objective(other)
    octaves = [np.frexp(entries_of(ObjectiveGradients(each)))[1] for each in (one, other)]
    assert (octaves[0] != octaves[1]).sum() == 1


def entries_of(gradients: ObjectiveGradients) -> Array:
    """All entries of the table of gradients at 0, as queries read them."""
    found = []

    def read(total: Any, per_unit: float, limit: float, table: Any) -> tuple[int, int]:
        found.append(table.data.copy())
        return 0, 0

    gradients.at(np.zeros(1)).add_to(GaussianSum(1, 1.0, 1.0).sum(), read)
    return np.concatenate(found)


def test_without_an_ellipsoid_the_moments_of_the_gradients_at_the_start_are_asked_privately():
    linear = problem("linear", n=4000)
    result = pg.minimize(
        linear, epsilon=4.0, delta=1e-6, domain=pg.Box(-1, 1), batch_size=100, steps=40,
        step_size=0.1, random_state=0,
    )  # fmt: skip
    assert [event.purpose for event in result.privacy.events] == ["ranges", "moments", "gradients"]
    assert result.privacy.epsilon <= 4.0
    seeded = pg.minimize(
        "linear", linear.X, epsilon=4.0, delta=1e-6, domain=pg.Box(-1, 1), batch_size=100, steps=40,
        step_size=0.1, random_state=0,
    )  # fmt: skip
    # A linear loss has its rows as gradients: both learn the same ellipsoid.
    assert result.last == pytest.approx(seeded.last, abs=1e-4)


def test_a_function_chooses_the_ellipsoid_of_every_step_from_released_gradients_alone():
    linear = problem("logistic")
    seen: list[int] = []

    def choose(released: Any) -> pg.Ellipsoid:
        seen.append(len(released))
        assert all(gradient.shape == (5,) for gradient in released)
        if not released:
            return pg.Ellipsoid.ball(5, 0.5)
        return pg.Ellipsoid(1 / (0.1 + np.abs(np.mean(released, axis=0))), 0.5)

    kernels, own = both(linear, ellipsoid=choose, steps=6)
    assert seen == [0, 1, 2, 3, 4, 5] * 2
    assert_same(kernels, own)
    constant, chosen = (
        both(linear, ellipsoid=rule)[0]
        for rule in (pg.Ellipsoid.ball(5, 0.5), lambda _: pg.Ellipsoid.ball(5, 0.5))
    )
    assert np.array_equal(constant.last, chosen.last)


def test_the_gradients_that_choose_an_ellipsoid_are_those_released():
    """Noise is in them: steps of size 1 of SGD are these gradients, to the last bits."""
    linear, rule = problem("linear"), pg.Ellipsoid.ball(5, 0.5)
    settings: dict[str, Any] = {
        "method": "dp-sgd", "epsilon": 1.0, "delta": 1e-5, "batch_size": 20, "steps": 6,
        "step_size": 1.0,
    }  # fmt: skip
    for table in ((linear.loss, linear.X), (linear,)):
        shown: list[Array] = []
        places = [np.zeros(5)]

        def choose(released: Any, shown: list[Array] = shown) -> pg.Ellipsoid:
            shown[:] = released
            return rule

        def note(_: int, x: Array, places: list[Array] = places) -> None:
            places.append(x.copy())

        pg.minimize(*table, ellipsoid=choose, callback=note, **settings)
        assert np.array(shown) == pytest.approx(-np.diff(places, axis=0)[:-1], abs=1e-12)


@pytest.mark.parametrize("method", ["dp-sgd", "dp-adagrad"])
def test_methods_with_a_ball_take_the_radius_of_a_chosen_ellipsoid(method):
    linear = problem("logistic")
    shaped, ball = (
        both(linear, method=method, ellipsoid=lambda _, scale=scale: pg.Ellipsoid(scale, 0.5))[0]
        for scale in (np.geomspace(1, 9, 5), np.ones(5))
    )
    assert np.array_equal(shaped.last, ball.last)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ellipsoid": lambda _: None}, "Expected the function to return an Ellipsoid"),
        ({"ellipsoid": lambda _: pg.Ellipsoid.ball(2, 1.0)}, "dimension 5, as x; found 2"),
        ({"ellipsoid": lambda _: np.ones(5)}, "Expected an Ellipsoid of dimension 5"),
        (
            {"ellipsoid": lambda _: pg.Ellipsoid.ball(5, 1.0), "method": "adaclip"},
            "one Ellipsoid for 'adaclip'",
        ),
        ({"projection": "rows"}, "'radial' or 'euclidean' for an objective"),
        ({"method": "output-perturbation"}, "a loss of a linear model"),
        ({"method": "gep"}, "Expected public="),
        ({"method": "gep", "public": (np.ones((3, 5)), None)}, "to be an objective of dimension 5"),
        ({"public": problem("logistic", dim=3)}, "to be an objective of dimension 5"),
        ({"batch_size": 1000}, "Expected batch_size <= 120"),
        ({"learning_rate": 3}, "unexpected keyword arguments: learning_rate"),
    ],
)
def test_bad_input_says_what_was_expected(settings, message):
    with pytest.raises((TypeError, ValueError), match=message):
        pg.minimize(
            problem("logistic"), **{"epsilon": 1.0, "step_size": 0.1, **settings}
        )  # fmt: skip


def test_objectives_with_rows_or_without_the_interface_are_refused():
    linear: Any = problem("logistic")
    with pytest.raises(ValueError, match="Expected no X and y with an objective"):
        pg.minimize(linear, linear.X, linear.y, epsilon=1.0)
    with pytest.raises(TypeError, match="per_example_gradients"):
        pg.minimize(object(), epsilon=1.0)  # type: ignore[arg-type]

    class Wrong(Linear):
        def per_example_gradients(self, x: Array, rows: Any) -> Array:
            return np.zeros((len(rows) + 1, self.dim))

    wrong = Wrong(linear.loss, linear.X, linear.y)
    with pytest.raises(ValueError, match="one gradient for each of the rows"):
        pg.minimize(wrong, epsilon=1.0, step_size=0.1, ellipsoid=pg.Ellipsoid.ball(5, 1.0))


def test_gradients_that_are_not_finite_contribute_nothing_and_are_counted():
    class Broken(Linear):
        def per_example_gradients(self, x: Array, rows: Any) -> Array:
            gradients = super().per_example_gradients(x, rows)
            gradients[np.asarray(rows) == 0] = np.nan
            gradients[np.asarray(rows) == 1] = np.inf
            return gradients

    linear = problem("logistic")
    broken = Broken(linear.loss, linear.X, linear.y)
    result = pg.minimize(
        broken, method="dp-sgd", epsilon=1.0, ellipsoid=pg.Ellipsoid.ball(5, 1.0), batch_size=120,
        steps=3, step_size=0.1,
    )  # fmt: skip
    assert np.isfinite(result.last).all()
    assert result.diagnostics.nonfinite == 6


# The contract test that users run


@pytest.mark.parametrize("loss", LOSS_NAMES)
def test_sound_objectives_pass_their_check(loss):
    linear = problem(loss)
    assert isinstance(linear, Objective)
    outputs = linear.outputs
    check_objective(
        linear, make=lambda rows: Linear(linear.loss, linear.X[rows], linear.y[rows], outputs)
    )


def test_products_of_matrices_pass_their_check():
    """Their rounding hangs on the batch, which the slack of the mechanism counts."""

    class Product(Linear):
        def per_example_gradients(self, x: Array, rows: Any) -> Array:
            A, y = self.X[rows], self.y[rows]
            return np.asarray((-y / (1 + np.exp(y * (A @ x))))[:, None] * A)

    linear = problem("logistic", n=500, dim=40)
    check_objective(Product(linear.loss, linear.X, linear.y))


class Centred(Linear):
    """Sees the other rows of the batch."""

    def per_example_gradients(self, x: Array, rows: Any) -> Array:
        gradients = super().per_example_gradients(x, rows)
        return np.asarray(gradients - gradients.mean(axis=0) / 10 if len(rows) else gradients)


class Sorted(Linear):
    """Gives gradients back in another order."""

    def per_example_gradients(self, x: Array, rows: Any) -> Array:
        return super().per_example_gradients(x, np.sort(rows))


class Normalised(Linear):
    """Bounds the batch as a whole."""

    def per_example_gradients(self, x: Array, rows: Any) -> Array:
        gradients = super().per_example_gradients(x, rows)
        return np.asarray(gradients / max(float(np.linalg.norm(gradients)), 1.0))


class Remembers(Linear):
    """Sees the rows of earlier calls."""

    seen = 0.0

    def per_example_gradients(self, x: Array, rows: Any) -> Array:
        gradients = super().per_example_gradients(x, rows)
        self.seen += float(gradients.sum())
        return np.asarray(gradients * (1 + 1e-6 * np.sin(self.seen)))


class Counts(Linear):
    """Divides by the realised batch size."""

    def per_example_gradients(self, x: Array, rows: Any) -> Array:
        return np.asarray(super().per_example_gradients(x, rows) / max(len(rows), 1))


class Large(Linear):
    """Sees the other rows of large batches."""

    def per_example_gradients(self, x: Array, rows: Any) -> Array:
        gradients = super().per_example_gradients(x, rows)
        return np.asarray(gradients - (gradients.mean(axis=0) if len(rows) > 100 else 0.0))


class Units(Linear):
    """Sees other rows in one coordinate, beside the first, whose unit is very small."""

    def per_example_gradients(self, x: Array, rows: Any) -> Array:
        gradients = super().per_example_gradients(x, rows)
        gradients[:, 0] += 1e15
        gradients[:, 1] += gradients[:, 1].sum()
        return gradients


class Writes(Linear):
    """Changes x."""

    def per_example_gradients(self, x: Array, rows: Any) -> Array:
        gradients = super().per_example_gradients(x, rows)
        x += 1e-3
        return gradients


class WrongSign(Linear):
    """Has gradients that are not those of its value."""

    def per_example_gradients(self, x: Array, rows: Any) -> Array:
        return -super().per_example_gradients(x, rows)


class Summed(Linear):
    """Forgets the examples."""

    def per_example_gradients(self, x: Array, rows: Any) -> Array:
        return np.asarray(super().per_example_gradients(x, rows).sum(axis=0))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Centred, "in a batch with others"),
        (Sorted, "in a batch with others"),
        (Normalised, "in a batch with others"),
        (Remembers, "Expected one gradient of example"),
        (Counts, "in a batch with others"),
        (Large, "in a batch with others"),
        (Units, "in a batch with others"),
        (Writes, "leave x and rows as they are"),
        (WrongSign, "as for a convex objective"),
        (Summed, "of shape"),
    ],
)
def test_objectives_that_let_one_row_see_another_are_caught(kind, message):
    linear = problem("logistic")
    with pytest.raises(AssertionError, match=message):
        check_objective(kind(linear.loss, linear.X, linear.y))


def test_statistics_of_all_examples_are_caught_by_building_from_half_of_them():
    linear = problem("huber")

    def centred(rows: Any) -> Linear:
        X = linear.X[rows]
        return Linear(linear.loss, X - X.mean(axis=0), linear.y[rows])

    everything = centred(np.arange(120))
    check_objective(everything)
    with pytest.raises(AssertionError, match="built from half of them"):
        check_objective(everything, make=centred)
    with pytest.raises(AssertionError, match="with 60 examples"):
        check_objective(linear, make=lambda rows: linear)
    with pytest.raises(TypeError, match="Expected an objective with dim"):
        check_objective(object())  # type: ignore[arg-type]
