"""Plans before a fit: the releases that the fit then makes, from public facts alone."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from privagrad.data.schema import Column, Schema
from privagrad.fitting import FitRequest, Task, forecast_size, forecast_table, prepare, run
from privagrad.privacy.codec import as_json
from privagrad.privacy.events import GaussianEvent
from privagrad.privacy.ledger import Ledger

EPSILONS = (0.3, 1.0, 2.5)
LABELS = ("no", "yes")


def table(path: Path, seed: int, n: int = 2000) -> Path:
    """Random rows with the same public facts: blanks, categories and scales differ."""
    rng = np.random.default_rng(seed)
    scale = 10.0 ** rng.integers(-3, 4)
    kinds = [f"k{seed}-{j}" for j in range(int(rng.integers(1, 9)))]
    frame = pl.DataFrame({
        "x": scale * rng.standard_normal(n),
        "z": pl.Series(rng.random(n)).set(pl.Series(rng.random(n) < rng.random()), None),
        "kind": rng.choice(kinds, n),
        "y": np.where(rng.random(n) < rng.random(), *LABELS),
        "amount": scale * rng.random(n),
    })  # fmt: skip
    frame.write_csv(path)
    return path


def schema(target: str = "y", kind: Column | None = None, classes=LABELS, **bounds) -> Schema:
    columns = (Column("x", **bounds), Column("z", **bounds), kind or Column("kind", "category"),
               Column("y", "category", categories=classes), Column("amount", **bounds))  # fmt: skip
    return Schema(columns, target)


SCHEMAS = {
    "categories to discover": schema(),
    "all stated": schema(kind=Column("kind", "category", categories=("a", "b")), low=0, high=1),
    "labels to discover": schema(classes=()),
    "three classes": schema(classes=(*LABELS, "maybe")),
    "a regression": schema("amount"),
}


def request(path: Path, stated: Schema, **others) -> FitRequest:
    task: Task = "regression" if stated.target == "amount" else "classification"
    return FitRequest(path, None, 1.0, schema=stated, task=task, **others)


@pytest.mark.parametrize("name", SCHEMAS)
@pytest.mark.filterwarnings("ignore:.*rows are few")
def test_the_plan_is_what_the_fit_releases(tmp_path, name):
    asked = request(table(tmp_path / "t.csv", 0), SCHEMAS[name], seed=0)
    found = forecast_table(replace(asked, seed=None), EPSILONS)
    assert len({outlook.events for outlook in found.outlooks}) == len(EPSILONS)
    for outlook in found.outlooks:
        job = prepare(replace(asked, epsilon=outlook.epsilon))
        assert outlook.plan == job.privacy
        assert found.delta == job.delta
    model = run(job, tmp_path / "m.model", False)
    made = [(e["purpose"], e["noise_multiplier"], e["count"]) for e in model.privacy["events"]]
    planned = [as_json(event) for event in found.outlooks[-1].events]
    assert made == [(e["purpose"], e["noise_multiplier"], e["count"]) for e in planned]


@pytest.mark.parametrize("name", SCHEMAS)
def test_no_value_changes_the_plan(tmp_path, name):
    found = {forecast_table(request(table(tmp_path / "t.csv", seed), SCHEMAS[name]), EPSILONS)
             .outlooks for seed in range(6)}  # fmt: skip
    assert len(found) == 1


def test_cells_that_no_fit_accepts_do_not_show(tmp_path):
    path = table(tmp_path / "t.csv", 0)
    before = forecast_table(request(path, SCHEMAS["all stated"]), EPSILONS)
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:-1], "no number,neither,?,strange,nothing"]))
    assert forecast_table(request(path, SCHEMAS["all stated"]), EPSILONS).outlooks == (
        before.outlooks
    )


def test_the_number_of_rows_is_a_fact(tmp_path):
    few, many = (
        forecast_table(request(table(tmp_path / f"{n}.csv", 0, n), SCHEMAS["all stated"]), [1.0])
        for n in (1000, 2000)
    )
    assert (few.table.n, many.table.n) == (1000, 2000)
    assert few.outlooks[0].kept < many.outlooks[0].kept
    assert few.outlooks[0].rows == pytest.approx(many.outlooks[0].rows, rel=0.1)


def test_a_plan_for_no_table_is_that_of_such_a_table(tmp_path):
    rng = np.random.default_rng(0)
    data = {f"c{j}": rng.standard_normal(1500) for j in range(7)}
    pl.DataFrame({**data, "y": rng.integers(0, 3, 1500)}).write_csv(tmp_path / "t.csv")
    asked = FitRequest(tmp_path / "t.csv", "y", 1.0, classes=("0", "1", "2"))
    assert forecast_size(1500, 7, 3, EPSILONS).outlooks == (
        forecast_table(asked, EPSILONS).outlooks
    )
    numbers = replace(asked, classes=None, task="regression")
    assert forecast_size(1500, 7, None, EPSILONS).outlooks == (
        forecast_table(numbers, EPSILONS).outlooks
    )


@pytest.mark.parametrize("classes", [("-1", "1"), None])
def test_of_libsvm_files_the_number_of_columns_counts_too(tmp_path, classes):
    plans = set()
    for seed in range(3):
        rng = np.random.default_rng(seed)
        lines = [
            f"{rng.choice([-1, 1])} {rng.integers(1, 6)}:{rng.normal()} 6:1" for _ in range(900)
        ]
        (tmp_path / "t.libsvm").write_text("\n".join(lines))
        asked = FitRequest(tmp_path / "t.libsvm", None, 2.0, classes=classes, task="classification")
        outlook = forecast_table(asked, [2.0]).outlooks[0]
        assert outlook.plan == prepare(asked).privacy
        plans.add(outlook)
    assert len(plans) == 1


def test_a_hopeless_fit_is_told_as_the_fit_would(tmp_path):
    asked = request(table(tmp_path / "t.csv", 0, 12), SCHEMAS["all stated"])
    outlook = forecast_table(asked, [0.01]).outlooks[0]
    with pytest.raises(ValueError, match="rows for epsilon") as error:
        prepare(replace(asked, epsilon=0.01))
    assert outlook.refused == str(error.value)


def test_as_many_runs_fit_as_are_told_and_nothing_is_spent(tmp_path):
    ledger = Ledger(tmp_path / "ledger.db")
    ledger.create("t", 2.0, 1e-6)
    ledger.reserve("t", (GaussianEvent(8.0),), "earlier")
    before = ledger.history("t")
    asked = request(table(tmp_path / "t.csv", 0), SCHEMAS["all stated"])
    found = forecast_table(replace(asked, dataset="t", ledger=ledger), [0.5, 1.0, 3.0])
    assert ledger.history("t") == before
    assert found.delta == 1e-6
    small, middle, large = (outlook.cost for outlook in found.outlooks)
    assert small
    assert middle
    assert large
    assert small.runs > middle.runs >= 1
    assert large.runs == 0
    assert large.after > 2.0
    assert middle.after == ledger.account("t").spent_with(found.outlooks[1].events)
    assert middle.left == 2.0 - middle.after
    for _ in range(middle.runs):
        ledger.reserve("t", found.outlooks[1].events, "again")
    with pytest.raises(ValueError, match="Expected a run within the budget"):
        ledger.reserve("t", found.outlooks[1].events, "one too many")


@pytest.mark.parametrize(
    ("name", "by_delta"), [("labels to discover", True), ("all stated", False)]
)
def test_whether_delta_or_epsilon_ends_the_runs(tmp_path, name, by_delta):
    ledger = Ledger(tmp_path / "ledger.db")
    ledger.create("t", 2.0, 1e-6)
    asked = request(table(tmp_path / "t.csv", 0), SCHEMAS[name], dataset="t", ledger=ledger)
    outlook = forecast_table(asked, [0.2]).outlooks[0]
    assert outlook.cost
    assert outlook.cost.out_of_delta == by_delta
    for _ in range(outlook.cost.runs):
        ledger.reserve("t", outlook.events, "again")
    with pytest.raises(ValueError, match="part of delta" if by_delta else "within the budget"):
        ledger.reserve("t", outlook.events, "one too many")


@pytest.mark.parametrize(
    ("size", "message"),
    [((0, 3, 2), "rows"), ((100, 0, 2), "columns"), ((100, 3, 1), "two classes")],
)
def test_sizes_that_make_no_sense(size, message):
    rows, columns, classes = size
    with pytest.raises(ValueError, match=message):
        forecast_size(rows, columns, classes, [1.0])
