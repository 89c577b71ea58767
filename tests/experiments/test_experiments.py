"""Small versions of Figure 1 and of `privagrad compare`, mostly through the command line."""

import csv
import json
import math
import time
from dataclasses import replace
from itertools import product

import numpy as np
import polars as pl
import pytest
from scipy.stats import binom
from typer.testing import CliRunner

from privagrad.cli import app
from privagrad.experiments import figure1
from privagrad.experiments.arena import (
    RADIUS_FACTORS,
    STEP_SIZES,
    VARIANTS,
    Conditions,
    ConvexComparison,
    recorded_steps,
    run_trial,
)
from privagrad.experiments.problems import BUILT_IN, load_problem
from privagrad.experiments.ring import Trial, median_band
from privagrad.experiments.tasks import run_tasks

SMALL = replace(
    figure1.QUICK, epsilons=(1.0, 4.0), steps=300, step_sizes=(0.2, 1.0), runs=6, points=10
)


@pytest.fixture(scope="module")
def small_figure(tmp_path_factory):
    out = tmp_path_factory.mktemp("figure1")
    return out, figure1.run(out, SMALL, workers=1)


def test_figure1_writes_what_it_promises(small_figure):
    out, summary = small_figure
    with (out / "figure1.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == [
        "epsilon", "method", "step_size", "iteration", "median", "low", "high"
    ]  # fmt: skip
    names = {"adagrad", "pasan-identity", "pagan-identity", "pagan", "pdp-sgd-20", "pdp-sgd-50"}
    assert {(r["epsilon"], r["method"]) for r in rows} == {
        (str(e), m) for e in SMALL.epsilons for m in names
    }
    assert {int(r["iteration"]) for r in rows} == set(recorded_steps(300, 10))
    assert all(float(r["low"]) <= float(r["median"]) <= float(r["high"]) for r in rows)
    for stem in ("figure1", "figure1-average"):
        assert (out / f"{stem}.png").read_bytes().startswith(b"\x89PNG")
        assert "</svg>" in (out / f"{stem}.svg").read_text()
    assert json.loads((out / "figure1.json").read_text())["optimum"] == summary["optimum"]


def test_figure1_shows_the_papers_ordering_already_in_small(small_figure):
    _, summary = small_figure
    loss = {(r["epsilon"], r["method"]): r["loss"] for r in summary["results"]}
    for epsilon in SMALL.epsilons:
        others = [v for (e, m), v in loss.items() if e == epsilon and m not in ("adagrad", "pagan")]
        assert loss[epsilon, "adagrad"] <= loss[epsilon, "pagan"] < min(others)


def test_the_optimum_is_the_linear_programs():
    """0.00983265 by HiGHS (scipy.optimize.linprog on the equivalent linear program)."""
    assert load_problem("absolute-regression").optimum() == pytest.approx(0.00983265, rel=2e-5)


def test_a_finished_task_is_not_run_again(tmp_path):
    trial = Trial("sparse-text", "dp-sgd", 1.0, 1e-5, 50, 20, 0.1, 0.5, (0,))
    journal = tmp_path / "journal.jsonl"
    first = run_tasks(run_trial, [trial], journal, "running", workers=1)
    journal.write_text(journal.read_text() + '{"task": "half a li')
    again = run_tasks(_refuse, [trial], journal, "running", workers=1)
    assert first == again


def _refuse(task):
    raise AssertionError("this outcome is in the journal")


def test_after_a_failure_tasks_that_have_not_begun_are_not_run(tmp_path):
    tasks = [(number, tmp_path) for number in range(300)]
    with pytest.raises(RuntimeError, match="the first one fails"):
        run_tasks(_fail_first, tasks, tmp_path / "journal.jsonl", "running", workers=1)
    assert len(list(tmp_path.glob("*.done"))) < 299


def _fail_first(task):
    number, folder = task
    if number == 0:
        raise RuntimeError("the first one fails")
    time.sleep(0.05)
    (folder / f"{number}.done").touch()


@pytest.mark.parametrize("runs", [5, 10, 30, 101])
def test_the_band_covers_the_median_19_times_in_20(runs):
    values = np.arange(runs, dtype=float)[:, None]
    middle, low, high = (float(v[0]) for v in median_band(values))
    assert middle == (runs - 1) / 2
    inside = binom(runs, 0.5)
    covered = inside.cdf(runs - 1 - low) - inside.cdf(low)
    assert covered >= 0.93
    assert high == runs - 1 - low


@pytest.mark.parametrize("problem", BUILT_IN)
@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_runs_on_every_built_in_problem(problem, name):
    outcome = run_trial(Trial(problem, name, 2.0, 1e-5, 60, 10, 0.2, 0.5, (0,), 2))
    for kind in ("losses", "averaged"):
        assert np.shape(outcome[kind]) == (1, 2)
        assert np.isfinite(outcome[kind]).all()
    assert outcome["epsilon"] <= 2.0 or not VARIANTS[name].private


def test_every_variant_gets_the_same_grid():
    """Only methods without privacy have no radii, and those of one step no schedules."""
    rules = ConvexComparison(Conditions("sparse-text", (1.0,), schedules=("constant", "linear")))
    settings = {
        name: {(t.step_size, t.radius_factor, t.schedule) for t in rules.grid(name, 1.0)}
        for name in VARIANTS
    }
    whole = set(product(STEP_SIZES, RADIUS_FACTORS, ("constant", "linear")))
    for name, tried in settings.items():
        method = VARIANTS[name].method
        if method.one_shot:
            assert tried == {setting for setting in whole if setting[2] == "constant"}
        elif VARIANTS[name].private:
            assert tried == whole
        else:
            assert {(step, schedule) for step, _, schedule in tried} == set(
                product(STEP_SIZES, ("constant", "linear"))
            )


def test_a_trial_runs_with_its_schedule():
    trial = Trial("sparse-text", "sgd", math.inf, 1e-5, 50, 20, 0.5, 1.0, (0,))
    constant, falling = (run_trial(replace(trial, schedule=s)) for s in ("constant", "linear"))
    assert constant["losses"] != falling["losses"]


def invoke(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_compare_on_a_file(tmp_path):
    rng = np.random.default_rng(0)
    X = rng.standard_normal((400, 3))
    frame = pl.DataFrame(X, schema=["a", "b", "c"]).with_columns(label=(X[:, 0] > 0).astype(int))
    frame.write_csv(tmp_path / "people.csv")
    shown = invoke(
        "compare", tmp_path / "people.csv", "--target", "label", "--methods", "sgd,pagan,dp-sgd",
        "--epsilons", "1,4", "--steps", "20", "--runs", "2", "--tuning-runs", "1",
        "--delta", "1e-4", "--out", tmp_path / "out", "--workers", "1",
    )  # fmt: skip
    assert shown.exit_code == 0, shown.output
    with (tmp_path / "out" / "compare.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert sorted((r["method"], r["epsilon"]) for r in rows) == [
        ("dp-sgd", "1.0"), ("dp-sgd", "4.0"), ("pagan", "1.0"), ("pagan", "4.0"), ("sgd", "inf")
    ]  # fmt: skip
    assert all(float(r["epsilon_spent"]) <= float(r["epsilon"]) for r in rows)
    assert (tmp_path / "out" / "compare.png").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("compare", "absent.csv"), "found 'absent.csv'"),
        (("compare", "--methods", "adamax"), "one of sgd, adagrad"),
        (("compare", "--epsilons", "-1"), "epsilon > 0"),
        (("compare", "--schedules", "cosine"), "schedule to be one of constant, linear"),
        (("compare", "--epsilons", "one"), "Expected values of epsilon like 0.1,1,3"),
    ],
)
def test_mistakes_get_a_sentence_and_no_traceback(arguments, message, tmp_path):
    shown = invoke(*arguments, "--out", tmp_path)
    assert shown.exit_code == 2
    assert message in " ".join(shown.output.split())
    assert "Traceback" not in shown.output


def test_theory_recommends_what_the_paper_does(tmp_path):
    boxed = invoke("theory", "--rows", 5000, "--box", 1)
    assert boxed.exit_code == 0, boxed.output
    assert "Use pagan." in boxed.output
    (tmp_path / "sigma.txt").write_text("1.0\n0.5\n0.25\n")
    balled = invoke("theory", "--rows", 5000, "--ball", 1, "--scales", tmp_path / "sigma.txt")
    assert "Use pasan." in balled.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--rows", 5000), "one of --box and --ball"),
        (("--rows", 5000, "--box", 1, "--ball", 1), "one of --box and --ball"),
        (("--rows", 2, "--box", 1), "needs more rows or budget"),
        (("--rows", 50, "--box", 1, "--scales", "absent.txt"), "absent.txt"),
    ],
)
def test_wrong_questions_to_theory_say_why(arguments, message):
    shown = invoke("theory", *arguments)
    assert shown.exit_code == 2
    assert message in " ".join(shown.output.split())


@pytest.mark.parametrize(
    "command",
    [
        (),
        ("compare",),
        ("theory",),
        ("reproduce",),
        ("reproduce", "figure1"),
        ("reproduce", "rates"),
    ],
)
def test_help_teaches(command):
    shown = invoke(*command, "--help")
    assert shown.exit_code == 0
    assert "private" in shown.output.lower() or "epsilon" in shown.output.lower()
