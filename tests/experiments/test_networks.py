"""The ring on small networks: equal tuning, rows kept apart, every method trains."""

from __future__ import annotations

import csv
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner, Result

from privagrad.cli import app
from privagrad.experiments.networks import comparison as ring_of_networks
from privagrad.experiments.networks import settings
from privagrad.experiments.networks.comparison import NetworkComparison, run_trial
from privagrad.experiments.networks.optimizers import ScaledSteps, widths_of_moments
from privagrad.experiments.networks.settings import NETWORK_METHODS, methods_for
from privagrad.experiments.networks.shapes import first_step_size, gradient_sizes, loss_of
from privagrad.experiments.networks.tasks import (
    NETWORKS,
    NetworkProblem,
    Part,
    Task,
    find_network,
    load_task,
)
from privagrad.experiments.networks.training import make_network
from privagrad.experiments.ring import Trial, tune_and_run
from privagrad.methods._widths import FLOOR, widths_of

PRIVATE = [name for name, method in NETWORK_METHODS.items() if method.private]


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def housing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """600 rows in the columns of California housing, whose value follows the income."""
    rng = np.random.default_rng(0)
    folder = tmp_path_factory.mktemp("housing")
    income = rng.lognormal(1.0, 0.5, 600)
    with (folder / "housing.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([
            "longitude", "latitude", "housing_median_age", "total_rooms", "total_bedrooms",
            "population", "households", "median_income", "median_house_value", "ocean_proximity",
        ])  # fmt: skip
        for row in range(600):
            place = ("INLAND", "NEAR BAY", "ISLAND")[row % 3]
            rooms, blank = 100 * rng.exponential(20), row % 50 == 0
            writer.writerow([
                -119.5, 35.6, 30, rooms, "" if blank else rooms / 5, rooms / 2, rooms / 6,
                income[row], 50_000 * income[row], place,
            ])  # fmt: skip
    return folder


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pictures of which one row of pixels tells the digit."""
    rng = np.random.default_rng(0)
    folder = tmp_path_factory.mktemp("digits")
    arrays: dict[str, Any] = {}
    for part, rows in (("train", 600), ("test", 100)):
        labels = rng.integers(0, 10, rows)
        images = rng.integers(0, 60, (rows, 28, 28))
        images[np.arange(rows), 2 * labels + 3] = 255
        arrays |= {f"x_{part}": images.astype(np.uint8), f"y_{part}": labels}
    np.savez(folder / "mnist.npz", **arrays)
    return folder


def conditions(problem: NetworkProblem, **changed: Any) -> NetworkComparison:
    return NetworkComparison(problem, **{"epsilons": (1.0,), "delta": 1e-3, **changed})


def first_trial(problem: NetworkProblem, variant: str, **changed: Any) -> Trial:
    """With moderate settings: a step of 0.3 (Adam) or 1, and half the median norm."""
    private = NETWORK_METHODS[variant].private
    trials = conditions(problem, batch_size=100, steps=40).grid(
        variant, 1.0 if private else math.inf
    )
    return replace(trials[0], radius_factor=0.5 if private else 1.0, seeds=(0,), **changed)


def test_every_private_method_tries_as_many_settings() -> None:
    ring = conditions(NetworkProblem("decaying-columns"))
    grids = {
        name: {(t.step_size, t.radius_factor, t.seeds, t.steps) for t in ring.grid(name, 1.0)}
        for name in PRIVATE
    }
    assert {len(tried) for tried in grids.values()} == {21}
    for tried in grids.values():
        assert len({step for step, *_ in tried}) == 7
        assert {radius for _, radius, *_ in tried} == {0.1, 0.5, 2.0}


def test_a_comparison_through_the_command_line_resumes(
    housing: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a smaller grid. What is in the journal is not run again."""
    monkeypatch.setattr(ring_of_networks, "RADIUS_FACTORS", (0.5,))
    for name in ("_ADAM_STEP_SIZES", "_SGD_STEP_SIZES"):
        monkeypatch.setattr(settings, name, (0.3, 3.0))
    arguments = (
        "compare", "housing", "--data-dir", housing, "--methods", "adam,dp-sgd,pagan-adam",
        "--epsilons", "4", "--delta", "1e-3", "--steps", "4", "--batch-size", "100", "--runs", "2",
        "--out", tmp_path, "--workers", "1", "--report", tmp_path / "report.html",
    )  # fmt: skip
    shown = invoke(*arguments)
    assert shown.exit_code == 0, shown.output
    journal = tmp_path / "compare.journal.jsonl"
    lines = journal.read_text().splitlines()
    assert len(lines) == 3 * 2 + 3 * 2
    with (tmp_path / "compare.csv").open() as file:
        rows = {row["method"]: row for row in csv.DictReader(file)}
    assert set(rows) == {"adam", "dp-sgd", "pagan-adam"}
    for row in rows.values():
        assert float(row["low"]) <= float(row["loss"]) <= float(row["high"])
        assert float(row["epsilon_spent"]) <= 4 or row["method"] == "adam"
    assert float(rows["adam"]["excess"]) == 0
    assert (tmp_path / "compare.png").exists()
    assert "NOT PRIVATE" in (tmp_path / "report.html").read_text()
    journal.write_text("\n".join(lines[:-1]) + "\n")
    assert invoke(*arguments).exit_code == 0
    assert sorted(journal.read_text().splitlines()[:-1]) == sorted(lines[:-1])
    again = journal.read_text().splitlines()[-1]
    assert again.split('"outcome"')[0] == lines[-1].split('"outcome"')[0]


def test_tuning_takes_the_best_on_validation_rows(tmp_path: Path) -> None:
    """Test scores would choose another setting."""

    class Rules(NetworkComparison):
        run_trial = staticmethod(_scores_that_disagree)

    rules = Rules(NetworkProblem("decaying-columns"), (1.0,), 1e-5, runs=2)
    result = tune_and_run(rules, ["dp-sgd"], tmp_path / "journal.jsonl", workers=1)
    assert result["dp-sgd", 1.0].step_size == 10.0


def _scores_that_disagree(trial: Trial) -> Any:
    distance = abs(math.log(trial.step_size / 10.0))
    count = len(trial.seeds)
    return {
        "losses": [[-distance]] * count, "averaged": [[-distance]] * count, "epsilon": 1.0,
        "seconds": 1.0, "validation": [distance] * count,
    }  # fmt: skip


@pytest.mark.parametrize("name", NETWORK_METHODS)
def test_every_method_trains_on_columns(name: str) -> None:
    """With a large budget the error on test rows falls far below that of the best constant."""
    problem, method = NetworkProblem("decaying-columns"), NETWORK_METHODS[name]
    task = load_task(problem)
    constant = task.unit * float(np.abs(task.test.y - np.median(task.test.y)).mean())
    epsilon = 200.0 if method.private else math.inf
    best = math.inf
    for step_size in method.step_sizes[2:4]:
        trial = first_trial(problem, name, step_size=step_size, epsilon=epsilon)
        outcome = run_trial(replace(trial, delta=1e-5, batch_size=1000, steps=20))
        assert outcome["epsilon"] <= epsilon
        best = min(best, *outcome["losses"][0])
    assert best < 0.9 * constant


@pytest.mark.parametrize("name", methods_for(columns=False))
def test_every_method_trains_on_digits(name: str, digits: Path) -> None:
    epsilon = 200.0 if NETWORK_METHODS[name].private else math.inf
    trial = first_trial(find_network("digits", digits), name, step_size=1.0, epsilon=epsilon)
    assert run_trial(trial)["losses"][0][0] < 0.7


def test_runs_of_a_seed_are_alike_and_of_others_differ(housing: Path) -> None:
    trial = first_trial(find_network("housing", housing), "pagan-adam", step_size=0.3)
    both = run_trial(replace(trial, seeds=(3, 4)))["losses"]
    assert run_trial(replace(trial, seeds=(3,)))["losses"][0] == both[0]
    assert both[0] != both[1]


@pytest.mark.parametrize("name", NETWORKS)
def test_parts_of_a_task_share_no_row(name: str, housing: Path, digits: Path) -> None:
    task = load_task(find_network(name, {"housing": housing, "digits": digits}.get(name)))
    rows = [
        part.X[i].tobytes()
        for part in (task.private, task.public, task.validation, task.test)
        for i in range(len(part.X))
    ]
    assert len(set(rows)) == len(rows)
    share = len(task.public.X) / (len(task.public.X) + len(task.private.X))
    assert share == pytest.approx(1 / 20, abs=1e-3)
    assert all(part.X.dtype == np.float32 for part in (task.private, task.test))


def test_columns_are_standardised_by_public_rows_alone(housing: Path) -> None:
    task = load_task(find_network("housing", housing))
    before = task.public.X.astype(np.float64)
    done = task.standardised()
    deviation = np.where(before.std(axis=0) > 0, before.std(axis=0), 1.0)
    expected = (task.private.X - before.mean(axis=0)) / deviation
    assert np.allclose(done.private.X, expected, rtol=1e-4, atol=1e-4)
    moved = replace(task, private=Part(task.private.X * 1e3, task.private.y)).standardised()
    assert np.array_equal(moved.test.X, done.test.X)


def test_columns_in_their_own_units_start_from_networks_alike(housing: Path) -> None:
    """Divided first weights on raw columns are the plain weights on divided columns."""
    task = load_task(find_network("housing", housing))
    torch.manual_seed(0)
    divided = make_network(task, divide=True)
    torch.manual_seed(0)
    plain = make_network(task, divide=False)
    X = torch.from_numpy(task.private.X[:50])
    scales = torch.from_numpy(task.scales()).float()
    assert torch.allclose(divided(X), plain(X / scales), atol=1e-4)


def small_task() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1))
    return module, torch.randn(9, 6) * torch.logspace(-1, 1, 6), torch.randn(9, 1)


def test_sizes_are_medians_over_gradients_of_single_rows() -> None:
    module, X, y = small_task()
    scales = {name: torch.rand_like(p) + 0.5 for name, p in module.named_parameters()}
    norms, sums = [], []
    for x, target in zip(X, y, strict=True):
        own = torch.autograd.grad(loss_of(module(x[None]), target[None]), [*module.parameters()])
        pairs = list(zip(scales.values(), own, strict=True))
        norms.append(math.sqrt(sum(float((s * g.square()).sum()) for s, g in pairs)))
        sums.append(sum(float(g.abs().sum()) for g in own))
    found = gradient_sizes(module, X, y, scales)
    assert found.own_norm == pytest.approx(float(np.median(norms)), rel=1e-4)
    assert found.absolute_sum == pytest.approx(float(np.median(sums)), rel=1e-4)


@pytest.mark.parametrize("name", ["dp-sgd", "dp-adam"])
def test_a_step_of_1_changes_the_loss_by_1_to_first_order(name: str) -> None:
    module, X, y = small_task()
    scales = {name: torch.ones_like(p) for name, p in module.named_parameters()}
    sizes = gradient_sizes(module, X[:1], y[:1], scales)
    own = torch.autograd.grad(loss_of(module(X[:1]), y[:1]), [*module.parameters()])
    gradient = torch.cat([g.flatten() for g in own])
    step = gradient.sign() if name == "dp-adam" else gradient
    change = float(gradient @ step) * first_step_size(NETWORK_METHODS[name], sizes, 2.0)
    assert change == pytest.approx(1.0, rel=1e-4)


def test_widths_are_those_of_the_convex_methods() -> None:
    moments = {"a": torch.tensor([[1.0, 4.0], [0.0, 0.25]]), "b": torch.tensor([9.0])}
    flat = np.concatenate([m.numpy().ravel() for m in moments.values()])
    found, size = widths_of_moments(moments)
    expected = widths_of(flat, FLOOR)
    assert np.allclose(np.concatenate([w.numpy().ravel() for w in found.values()]), expected)
    assert size == pytest.approx(math.sqrt(flat.mean()))


@pytest.mark.parametrize("steps", [False, True])
def test_scaled_steps_are_those_of_the_formula(steps: bool) -> None:
    """x ← x - lr · g/w (AdaDPS), and x ← x - lr · g/w² in the ellipsoid's own coordinates."""
    x, width = nn.Parameter(torch.tensor([1.0, 2.0])), torch.tensor([0.5, 4.0])
    optimizer = ScaledSteps(torch.optim.SGD([x], lr=0.1), steps=steps)
    optimizer.widths = {x: width}
    x.grad = torch.tensor([3.0, -1.0])
    expected = x.detach() - 0.1 * x.grad / width ** (2 if steps else 1)
    optimizer.step()
    assert torch.allclose(x.detach(), expected)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("housing",), "Expected --data-dir with housing.csv"),
        (("digits", "--data-dir", "nowhere"), "Expected mnist.npz for digits"),
        (("digits", "--data-dir", "{digits}", "--methods", "dp-sgd-standardised"), "one of adam"),
        (("raw-columns", "--methods", "geoclip"), "one of adam, adam-standardised"),
        (("raw-columns", "--target", "y"), "Expected no --target with the network raw-columns"),
        (("raw-columns", "--box", "1"), "Expected no --box"),
        (("raw-columns", "--schedules", "constant"), "Expected no --schedules"),
        (("rawcolumns",), "raw-columns, decaying-columns, housing, digits"),
    ],
)
def test_mistakes_get_a_sentence(
    arguments: tuple[str, ...], message: str, digits: Path, tmp_path: Path
) -> None:
    filled = [argument.format(digits=digits) for argument in arguments]
    shown = invoke("compare", *filled, "--out", tmp_path)
    assert shown.exit_code == 2
    assert message in " ".join(shown.output.split())
    assert not any(tmp_path.iterdir())


def test_without_pytorch_the_command_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("privagrad.cli.compare.find_spec", lambda name: None)
    shown = invoke("compare", "raw-columns", "--out", tmp_path)
    assert shown.exit_code == 2
    assert "pip install 'privagrad[torch]'" in " ".join(shown.output.split())


def test_a_table_without_a_column_is_refused(tmp_path: Path) -> None:
    (tmp_path / "housing.csv").write_text("longitude,latitude\n1,2\n")
    with pytest.raises(ValueError, match="found no 'housing_median_age'"):
        load_task(find_network("housing", tmp_path))


def test_a_changed_file_is_another_problem(housing: Path, tmp_path: Path) -> None:
    path = tmp_path / "housing.csv"
    path.write_bytes((housing / "housing.csv").read_bytes())
    before = find_network("housing", tmp_path)
    os.utime(path, ns=(1, before.stamp + 10**9))
    assert repr(find_network("housing", tmp_path)) != repr(before)


def test_the_measure_of_classes_is_the_share_of_errors(digits: Path) -> None:
    task: Task = load_task(find_network("digits", digits))
    assert task.score == "test error"
    assert "test error" in conditions(find_network("digits", digits)).measure
