"""What rows say of a fit: the right figures, with the noise that was paid for."""

import json
import re
from dataclasses import asdict, dataclass, replace

import numpy as np
import pytest
from scipy.special import expit, softmax
from sklearn.metrics import confusion_matrix, log_loss, mean_pinball_loss, roc_auc_score

from privagrad.glm.examples import Examples
from privagrad.glm.losses import Loss
from privagrad.glm.rows import as_rows
from privagrad.linear import Choices, Problem, plan_fit, run_fit
from privagrad.privacy.accounting import PrivacyPlan
from privagrad.privacy.events import GaussianEvent
from privagrad.privacy.mechanism import GaussianSum
from privagrad.privacy.noise import random_source
from privagrad.queries import histograms
from privagrad.queries.calibration import Calibration
from privagrad.queries.evaluation import Predicted, evaluate, evaluate_exactly
from privagrad.queries.figures import Evaluation
from privagrad.queries.histograms import Histogram, release_histograms
from tests.releases import releases_at
from tests.statistics import assert_scale

EXACT = 1e-9
RNG = np.random.default_rng(0)
X = RNG.standard_normal((700, 5)) * [1, 2, 0.5, 1, 3]
W = np.array([1.0, -0.5, 2.0, 0.0, 0.3])
Y = np.where(X @ W + RNG.logistic(size=700) > 0, 1.0, -1.0)
N = 4000
MARGINS = RNG.normal(-0.5, 1.5, N)
SIGNS = np.where(RNG.random(N) < expit(MARGINS), 1.0, -1.0)
CLASS_MARGINS = RNG.normal(0, 1.2, (N, 4))
LABELS = (CLASS_MARGINS + RNG.gumbel(size=(N, 4))).argmax(axis=1).astype(float)
NUMBERS = MARGINS + RNG.normal(0, 0.6, N)
CASES = [
    ("logistic", Predicted.of(Loss("logistic"), MARGINS, SIGNS)),
    ("hinge", Predicted.of(Loss("hinge"), MARGINS, SIGNS)),
    ("softmax", Predicted.of(Loss("softmax"), CLASS_MARGINS, LABELS)),
    ("multiclass-hinge", Predicted.of(Loss("multiclass-hinge"), CLASS_MARGINS, LABELS)),
    ("huber", Predicted.of(Loss("huber"), MARGINS, NUMBERS, scale=(40.0, 12.0))),
    ("quantile", Predicted.of(Loss("quantile", 0.3), MARGINS, NUMBERS)),
]
SHAPES = [Histogram(2, 7), Histogram(3, 3, ordered=False), Histogram(1, 1)]


def at(rows, noise, seed=0):
    return evaluate(rows, releases_at({"evaluation": noise}, seed))


def values(found):
    return {name: figure.value for name, figure in found.figures.items()}


def recorded(action):
    """What rows have added, and what was released, in units of a row."""
    made = []

    class Recorded(GaussianSum):
        def release(self, total, *rest):
            before = total.memory * self.grid
            after = super().release(total, *rest)
            made.append((before, after * self.batch_size))
            return after

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(histograms, "GaussianSum", Recorded)
        action()
    [pair] = made
    return pair


def test_two_classes_are_what_scikit_learn_says():
    found = evaluate_exactly(CASES[0][1])
    chances = expit(MARGINS)
    told = values(found)
    assert told["auc"] == pytest.approx(roc_auc_score(SIGNS, MARGINS))
    assert told["log_loss"] == pytest.approx(log_loss(SIGNS, chances))
    assert told["accuracy"] == pytest.approx((np.sign(MARGINS) == SIGNS).mean())
    share = (SIGNS > 0).mean()
    assert told["baseline_accuracy"] == pytest.approx(max(share, 1 - share))
    assert told["baseline_log_loss"] == pytest.approx(log_loss(SIGNS, np.full(N, share)))
    assert np.allclose(found.confusion, confusion_matrix(SIGNS > 0, MARGINS > 0) / N)
    assert {figure.noise for figure in found.figures.values()} == {0.0}
    assert not found.private


def test_equal_scores_count_half():
    rounded = np.round(MARGINS)
    found = evaluate_exactly(Predicted.of(Loss("hinge"), rounded, SIGNS))
    assert values(found)["auc"] == pytest.approx(roc_auc_score(SIGNS, rounded))


def test_several_classes_are_what_scikit_learn_says():
    found, guesses = evaluate_exactly(CASES[2][1]), CLASS_MARGINS.argmax(axis=1)
    told = values(found)
    assert told["log_loss"] == pytest.approx(log_loss(LABELS, softmax(CLASS_MARGINS, axis=1)))
    assert told["accuracy"] == pytest.approx((guesses == LABELS).mean())
    assert np.allclose(found.confusion, confusion_matrix(LABELS, guesses) / N)
    assert told["calibration_error"] < 0.03
    assert "log_loss" not in evaluate_exactly(CASES[3][1]).figures


@pytest.mark.parametrize("quantile", [0.5, 0.3])
def test_numbers_are_what_scikit_learn_says(quantile):
    rows = Predicted.of(Loss("quantile", quantile), MARGINS, NUMBERS)
    found = values(evaluate_exactly(rows))
    best = np.quantile(NUMBERS, quantile, method="inverted_cdf")
    factor = 2 if quantile == 0.5 else 1
    for name, guess in (("error", MARGINS), ("baseline_error", np.full(N, best))):
        loss = mean_pinball_loss(NUMBERS, guess, alpha=quantile)
        assert found[name] == pytest.approx(factor * loss)
    assert found["removed"] == pytest.approx(1 - found["error"] / found["baseline_error"])
    assert found["below"] == (NUMBERS < MARGINS).mean()
    off = np.abs(NUMBERS - MARGINS)
    assert found["half_within"] == pytest.approx(np.median(off), rel=0.01)


@pytest.mark.parametrize(("name", "rows"), CASES, ids=[c[0] for c in CASES])
def test_bins_change_little(name, rows):
    """Figures of a release without noise are exact, but for what bins do to them."""
    binned, exact = values(at(rows, EXACT)), values(evaluate_exactly(rows))
    assert binned.keys() == exact.keys()
    unit = rows.scale[1]
    for figure, value in exact.items():
        counted = figure in ("accuracy", "baseline_accuracy", "gain", "below")
        size = unit if "error" in figure or "within" in figure else 1.0
        assert binned[figure] == pytest.approx(value, abs=1e-6 if counted else 0.03 * size)


@pytest.mark.parametrize(("name", "rows"), CASES, ids=[c[0] for c in CASES])
def test_one_row_is_a_vector_of_norm_at_most_one(name, rows):
    strange = [0.0, 1e-300, -1e-9, 1e308, -1e308, np.nan, np.inf, -np.inf, 5.0]
    for row in range(40):
        margin = np.array(rows.margins[row : row + 1])
        target = rows.targets[row : row + 1]
        if row < len(strange):
            margin[..., -1] = strange[row]
        one = Predicted.of(rows.loss, margin, target)
        added, _ = recorded(lambda one=one: at(one, 3.0))
        assert 0.3 < np.linalg.norm(added) <= 1 + 1e-6 or (not one.known.any() and not added.any())


@dataclass(frozen=True)
class Cells:
    cells: np.ndarray

    @property
    def n(self):
        return len(self.cells)

    def add_to(self, total, add, *arguments):
        total.add_by(add, self, *arguments)


def test_histograms_add_rows_and_solve_for_them():
    rng = np.random.default_rng(1)
    cells = np.stack([rng.integers(0, shape.size, 500) for shape in SHAPES], axis=1)
    cells[::7] = -1
    releases = releases_at({"evaluation": EXACT})
    found = release_histograms(
        SHAPES, Cells(cells), lambda rows: rows.cells, releases, "evaluation"
    )
    for shape, counts, column in zip(SHAPES, found, cells.T, strict=True):
        exact = np.bincount(column[column >= 0], minlength=shape.size) / 500
        assert np.allclose(counts[0].ravel(), exact, atol=1e-7)


def test_rows_that_do_not_count_add_nothing():
    out = np.arange(N) >= 3000
    margins = np.where(np.arange(N) % 100 == 0, np.nan, MARGINS)
    some = Predicted.of(Loss("logistic"), margins, SIGNS, out)
    kept = np.isfinite(margins) & ~out
    rest = Predicted.of(Loss("logistic"), MARGINS[kept], SIGNS[kept])
    added = [recorded(lambda rows=rows: at(rows, EXACT))[0] for rows in (some, rest)]
    assert np.allclose(added[0], added[1], rtol=1e-9)
    exact = values(evaluate_exactly(some))
    assert values(at(some, EXACT))["accuracy"] == pytest.approx(exact["accuracy"], abs=1e-6)


@pytest.mark.parametrize(("name", "rows"), CASES, ids=[c[0] for c in CASES])
def test_the_noise_is_that_of_the_plan(name, rows):
    raw = [np.subtract(*recorded(lambda s=s: at(rows, 4.0, s))) for s in range(15)]
    assert_scale(np.concatenate(raw), 4.0)


@pytest.mark.parametrize(
    ("case", "figures"),
    [(0, ("accuracy", "baseline_accuracy", "gain", "auc", "log_loss")),
     (2, ("accuracy", "log_loss")),
     (4, ("error", "baseline_error", "removed"))],
)  # fmt: skip
def test_figures_vary_as_much_as_they_say(case, figures):
    """With 400 releases a standard deviation is known to 4 %, and by 200 copies to 5 %."""
    rows = CASES[case][1]
    exact = values(evaluate_exactly(rows))
    found = [at(rows, 8.0, seed) for seed in range(400)]
    for figure in figures:
        spread = np.std([f.figures[figure].value for f in found])
        told = np.mean([f.figures[figure].noise for f in found])
        assert told == pytest.approx(spread, rel=0.2), figure
        mean = np.mean([f.figures[figure].value for f in found])
        assert mean == pytest.approx(exact[figure], abs=0.5 * spread + 0.002 * rows.scale[1])


def test_verdicts_say_what_is_clear_of_noise():
    good, classes = CASES[0][1], ["no", "yes"]
    rng = np.random.default_rng(5)
    useless = Predicted.of(Loss("logistic"), np.full(N, -1.0), SIGNS)
    assert at(good, 5.0).verdict(classes).startswith("Better than always answering 'no': right")
    unclear = at(good, 3000.0).verdict(classes)
    assert unclear.startswith("Not clearly better than always answering")
    assert "the noise hides differences below" in unclear
    assert at(useless, 5.0).verdict(classes) == "No better than always answering 'no'."
    assert evaluate_exactly(useless).verdict(classes) == "No better than always answering 'no'."
    wrong = Predicted.of(Loss("logistic"), -MARGINS, SIGNS)
    assert at(wrong, 5.0).verdict(classes).startswith("Worse than always answering 'no'")
    rare = np.where(rng.random(N) < 0.1 * expit(2 * MARGINS), 1.0, -1.0)
    ranked = at(Predicted.of(Loss("logistic"), MARGINS - 6.0, rare), 5.0).verdict(classes)
    assert ranked.startswith("Its answers are no better than always answering 'no', but its scores")
    numbers = CASES[4][1]
    assert re.fullmatch(r"Removes \d+% of the error of always answering 3\d\.\d+\.",
                        at(numbers, 5.0).verdict(None))  # fmt: skip
    constant = Predicted.of(Loss("huber"), np.full(N, np.median(NUMBERS)), NUMBERS)
    assert at(constant, 2.0, 1).verdict(None).startswith("No better than always answering")
    assert evaluate_exactly(constant).verdict(None).startswith("No better than always answering")
    assert at(numbers, 3000.0).verdict(None).startswith("Not clearly better than always answering")


@pytest.mark.parametrize(("name", "rows"), CASES, ids=[c[0] for c in CASES])
def test_evaluations_survive_json(name, rows):
    found = at(rows, 20.0)
    again = Evaluation.read(json.loads(json.dumps(asdict(found))))
    assert again.figures == found.figures
    assert (again.roc, again.calibration, again.residuals) == (
        found.roc, found.calibration, found.residuals
    )  # fmt: skip


def test_the_evaluation_is_an_event_of_the_plan():
    y = Y
    problem = Problem(Loss("logistic"), Examples(as_rows(X), y))
    plan = plan_fit(problem.facts, 2.0, 1e-4, Choices(steps=20), evaluated=True)
    assert [e.purpose for e in plan.privacy.events].count("evaluation") == 1
    assert plan.privacy.epsilon(1e-4) <= 2.0
    model = run_fit(problem, plan, plan.releases(random_source(0)), False)
    assert model.privacy.events == plan.privacy.events
    assert model.trace.evaluation is not None
    without = plan_fit(problem.facts, 2.0, 1e-4, Choices(steps=20))
    assert without.privacy.noise_multiplier < plan.privacy.noise_multiplier
    plain = run_fit(problem, without, without.releases(random_source(0)), False)
    assert plain.trace.evaluation is None


def test_rows_without_a_target_teach_nothing():
    """Whatever the targets of rows that are left out, the model is the same."""
    y = Y
    out = np.arange(700) % 7 == 0
    plan = plan_fit(
        Problem(Loss("logistic"), Examples(as_rows(X), y)).facts, 2.0, 1e-4, Choices(steps=20)
    )
    one = run_fit(
        Problem(Loss("logistic"), Examples(as_rows(X), y, out)),
        plan,
        plan.releases(random_source(0)),
        False,
    )
    other = run_fit(
        Problem(Loss("logistic"), Examples(as_rows(X), np.where(out, -y, y), out)),
        plan, plan.releases(random_source(0)), False,
    )  # fmt: skip
    assert np.array_equal(one.coef, other.coef)
    all_in = run_fit(
        Problem(Loss("logistic"), Examples(as_rows(X), y)),
        plan,
        plan.releases(random_source(0)),
        False,
    )
    assert not np.allclose(one.coef, all_in.coef)


def leave_margins(*_):
    """A calibration that changes nothing."""
    return Calibration(1.0, np.zeros(1))


def test_columns_in_all_units_are_learned():
    n = 6000
    rng = np.random.default_rng(1)
    rows = rng.standard_normal((n, 4)) * [1, 100, 0.01, 5]
    weights = np.array([1.5, 0.01, -150.0, 0.2])
    y = np.where(rng.random(n) < expit(rows @ weights), 1.0, -1.0)
    problem = Problem(Loss("logistic"), Examples(as_rows(rows), y))
    plan = plan_fit(problem.facts, 2.0, 1e-5, Choices(), evaluated=True)
    model = run_fit(problem, plan, plan.releases(random_source(3)), False)
    best = (np.sign(rows @ weights) == y).mean()
    assert (np.sign(rows @ model.coef[0] + model.intercept[0]) == y).mean() > best - 0.02


@pytest.mark.parametrize("calibrated", [False, True])
def test_the_noise_of_coefficients_is_of_the_right_size(calibrated, monkeypatch):
    """Over seeds, coefficients of independent columns vary as much as each fit says."""
    n = 8000
    rng = np.random.default_rng(2)
    group = rng.integers(0, 3, n)
    rows = np.column_stack([rng.standard_normal((n, 2)) * [1, 30], group[:, None] == np.arange(3)])
    weights = np.array([1.0, 0.02, -1.0, 0.0, 1.0])
    y = np.where(rng.random(n) < expit(rows @ weights), 1.0, -1.0)
    low = np.array([-5.0, -150.0, 0, 0, 0])
    bounds = low, np.maximum(-low, 1.0)
    examples = Examples(as_rows(rows), y)
    problem = Problem(Loss("logistic"), examples, bounds=bounds, groups=((2, 5),))
    if not calibrated:
        monkeypatch.setattr("privagrad.linear.fit.calibrate", leave_margins)
    plan = plan_fit(problem.facts, 1.0, 1e-5, Choices(steps=100), evaluated=True)
    seeds = range(100, 130)
    fits = [run_fit(problem, plan, plan.releases(random_source(seed)), False) for seed in seeds]
    real = np.std([fit.coef[0] for fit in fits], axis=0, ddof=1)
    told = np.median([fit.noise.coef[0] for fit in fits if fit.noise], axis=0)
    assert (real / told < 2).all()
    assert (real / told > 0.5).all()


def test_public_limits_bound_the_units():
    """A one-hot column whose range drowns in noise is not taken for one of billions."""
    rng = np.random.default_rng(4)
    rows = np.column_stack([rng.standard_normal((400, 3)), rng.random((400, 12)) < 0.01])
    limits = np.array([np.inf] * 3 + [1.0] * 12)
    problem = Problem(
        Loss("logistic"), Examples(as_rows(rows * 1.0), np.sign(rows[:, 0])), limits=limits
    )
    plan = plan_fit(problem.facts, 0.5, 1e-5, Choices(steps=10), evaluated=True)

    def trace_of(problem, seed):
        return run_fit(problem, plan, plan.releases(random_source(seed)), False).trace

    for seed in range(5):
        trace = trace_of(problem, seed)
        assert trace is not None
        assert (trace.columns.unit <= limits).all()
    free = replace(problem, limits=None)
    traces = [
        run_fit(free, plan, plan.releases(random_source(seed)), False).trace for seed in range(5)
    ]
    assert any((trace.columns.unit > limits).any() for trace in traces if trace is not None)


def test_the_plan_pays_for_what_comes_before_it():
    problem = Problem(Loss("logistic"), Examples(as_rows(X), Y))
    before = GaussianEvent(9.0, purpose="categories", leak=1e-6)
    plan = plan_fit(problem.facts, 1.0, 1e-4, Choices(steps=10), [before])
    assert before in plan.privacy.events
    assert PrivacyPlan(plan.privacy.events).epsilon(1e-4) <= 1.0


def test_probabilities_of_a_fit_are_right(monkeypatch):
    """Only with the calibration: bounding gradients stretches margins."""
    n = 8000
    rng = np.random.default_rng(6)
    rows = rng.standard_normal((n, 4)) * [1, 100, 0.01, 5]
    chance = expit(rows @ np.array([1.0, 0.005, -50.0, 0.1]))
    y = np.where(rng.random(n) < chance, 1.0, -1.0)
    problem = Problem(Loss("logistic"), Examples(as_rows(rows), y))
    plan, losses = plan_fit(problem.facts, 2.0, 1e-5, Choices(), evaluated=True), {}
    for calibrated in (True, False):
        if not calibrated:
            monkeypatch.setattr("privagrad.linear.fit.calibrate", leave_margins)
        model = run_fit(problem, plan, plan.releases(random_source(0)), False)
        assert model.trace is not None
        assert (model.trace.factor != 1) == calibrated
        margins = rows @ model.coef[0] + model.intercept[0]
        losses[calibrated] = np.logaddexp(0, -y * margins).mean()
    best = -np.where(y > 0, np.log(chance), np.log1p(-chance)).mean()
    assert losses[True] < best + 0.01
    assert losses[False] > losses[True] + 0.02
