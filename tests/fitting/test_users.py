"""Fits of files whose rows have users: the schema, categories, budgets, evaluations."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from typer.testing import CliRunner

from privagrad.cli import app
from privagrad.data.models import load_model
from privagrad.data.readers import open_table
from privagrad.data.schema import Column, Schema, as_values, from_values, read_schema, template
from privagrad.fitting import (
    EvaluationRequest,
    FitRequest,
    forecast_table,
    prepare,
    prepare_evaluation,
    run,
    run_evaluation,
)
from privagrad.linear import run_fit
from privagrad.privacy.events import GaussianEvent
from privagrad.privacy.ledger import BudgetError, Ledger
from privagrad.report.card import privacy_card
from privagrad.report.card_markdown import card_markdown
from privagrad.report.fit import write_fit_report

RNG = np.random.default_rng(0)
USERS = 900
COUNTS = RNG.integers(1, 6, USERS)
COLUMNS = (
    Column("who", "user"),
    Column("age"),
    Column("job", "category"),
    Column("ill", "category"),
)
SCHEMA = Schema(COLUMNS, "ill")
USER = GaussianEvent(9.0, unit="user")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.fixture
def visits(tmp_path: Path) -> Path:
    lines = ["who,age,job,ill"]
    for user, count in enumerate(COUNTS):
        for _ in range(count):
            age, job = RNG.normal(40, 10), RNG.choice(["cook", "poet"])
            lines.append(f"u{user},{age:.2f},{job},{'yes' if age > 40 else 'no'}")
    # One user with a job of their own, in very many rows.
    lines += ["u0,30,astronaut,no"] * 3000
    path = tmp_path / "visits.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


def rows_of(path: Path) -> int:
    return len(path.read_text().splitlines()) - 1


def test_a_file_says_whose_rows_they_are(visits: Path) -> None:
    table = open_table(visits, SCHEMA)
    assert table.users is not None
    assert (table.n, table.unit, table.y.size) == (USERS, "user", rows_of(visits))
    assert "who" not in " ".join(table.encoding.names)
    chosen = table.users.draw(np.random.default_rng(0)).chosen
    counts = table.counts_of(chosen)
    assert {name: sum(found.values()) for name, found in counts.items()} == {
        "job": USERS, "ill": USERS,
    }  # fmt: skip
    assert counts["job"]["astronaut"] <= 1 < table.counts["job"]["astronaut"]
    first = np.flatnonzero(np.diff(table.users.numbers, prepend=-1) > 0)
    told = Counter(line.split(",")[2] for line in visits.read_text().splitlines()[1:][:900])
    assert table.counts_of(np.arange(900))["job"] == told
    assert first.size >= USERS


def test_a_fit_tells_users_alone_and_finds_no_category_of_one_user(
    visits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    posed: list[Any] = []

    def watched(problem: Any, *others: Any) -> Any:
        posed.append(problem)
        return run_fit(problem, *others)

    monkeypatch.setattr("privagrad.fitting.fit.run_fit", watched)
    job = prepare(FitRequest(visits, None, 3.0, schema=SCHEMA))
    model = run(job, tmp_path / "m.model", False)
    assert posed[0].facts.n == USERS == posed[0].users.count
    assert model.schema is not None
    assert model.schema.column("job").categories == ("cook", "poet") or set(
        model.schema.column("job").categories
    ) == {"cook", "poet"}
    loaded = load_model(tmp_path / "m.model")
    assert loaded.privacy["unit"] == "user"
    assert {event["unit"] for event in loaded.privacy["events"]} == {"user"}
    assert loaded.made["rows"] == USERS
    assert loaded.schema is not None
    assert loaded.schema.user == "who"
    assert str(rows_of(visits)) not in json.dumps([loaded.made, loaded.privacy, job.public])
    people = tmp_path / "new.csv"
    people.write_text("age,job\n30,cook\n61,poet\n")  # no column of users
    [part] = loaded.rows(people)
    assert loaded.predict(part.X).shape == (2,)


def test_a_budget_of_users_pays_for_fits_and_evaluations_of_users_alone(
    visits: Path, tmp_path: Path
) -> None:
    ledger = Ledger(tmp_path / "ledger.db")
    ledger.create("visits", 9.0, 1e-5)
    given: dict[str, Any] = {"dataset": "visits", "ledger": ledger}
    stated = SCHEMA.with_columns(
        [Column("job", "category", categories=("cook", "poet")),
         Column("ill", "category", categories=("no", "yes"))]
    )  # fmt: skip
    rows = Schema(tuple(c for c in stated.columns if c.kind != "user"), "ill")
    job = prepare(FitRequest(visits, None, 1.0, schema=stated, **given))
    assert (
        forecast_table(FitRequest(visits, None, 1.0, schema=stated, **given), [1.0])
        .outlooks[0]
        .events
        == job.events
    )
    model = run(job, None, False)
    assert ledger.account("visits").unit == "user"
    with pytest.raises(ValueError, match="do not add up"):
        prepare(FitRequest(visits, None, 1.0, schema=rows, **given))
    evaluation = prepare_evaluation(EvaluationRequest(model, visits, 1.0, **given))
    found = run_evaluation(evaluation)
    assert found["rows"] == USERS
    assert found["privacy"]["unit"] == "user"
    plain = run(prepare(FitRequest(visits, None, 1.0, schema=rows)), None, False)
    assert plain.privacy["unit"] == "row"
    with pytest.raises(ValueError, match="do not add up"):
        prepare_evaluation(EvaluationRequest(plain, visits, 1.0, **given))
    named = EvaluationRequest(plain, visits, 1.0, user_column="who", **given)
    assert run_evaluation(prepare_evaluation(named))["rows"] == USERS
    with pytest.raises(ValueError, match="no feature"):
        prepare_evaluation(EvaluationRequest(plain, visits, 1.0, user_column="age", **given))
    assert len(ledger.account("visits").runs) == 3


def test_the_command_line_names_users(visits: Path, tmp_path: Path) -> None:
    out, rows = tmp_path / "a.model", rows_of(visits)
    words = ["fit", str(visits), "-e", "2", "--target", "ill", "--user-column", "who"]
    schema = tmp_path / "s.toml"
    plain = Schema((Column("who", "category"), *COLUMNS[1:]), "ill")
    schema.write_text(template(plain, "visits.csv"))
    done = CliRunner().invoke(app, [*words, "--schema", str(schema), "-o", str(out), "--json"])
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert told["privacy"]["unit"] == "user"
    assert told["made"]["rows"] == USERS
    assert str(rows) not in done.output
    dry = CliRunner().invoke(app, [*words, "--schema", str(schema), "--dry-run"])
    assert dry.exit_code == 0, dry.output
    assert "all users" in dry.output
    assert "all rows" not in dry.output
    shown = CliRunner().invoke(app, ["plan", *words[1:2], *words[4:], "--schema", str(schema)])
    assert shown.exit_code == 0, shown.output
    assert f"{USERS} users" in shown.output
    assert str(rows) not in shown.output.replace(",", "")


@pytest.mark.parametrize(
    ("column", "match"),
    [("ill", "target"), ("nobody", "one of the table's columns")],
)
def test_columns_that_cannot_name_users_are_refused(visits: Path, column: str, match: str) -> None:
    plain = Schema((Column("who", "category"), *COLUMNS[1:]), "ill")
    with pytest.raises(ValueError, match=match):
        prepare(FitRequest(visits, None, 1.0, schema=plain, user_column=column))
    with pytest.raises(ValueError, match="name one"):
        prepare(FitRequest(visits, None, 1.0, schema=SCHEMA, user_column=column))


def test_rows_without_a_user_are_refused_without_telling_how_many(tmp_path: Path) -> None:
    path = tmp_path / "some.csv"
    path.write_text("who,age,job,ill\n" + "a,1,x,no\n,2,x,yes\nb,3,x,no\n" * 400)
    with pytest.raises(ValueError, match="a user in every row") as caught:
        prepare(FitRequest(path, None, 1.0, schema=SCHEMA))
    assert not any(digit in str(caught.value) for digit in "0123456789")


@pytest.mark.parametrize(
    ("age", "ill", "match"),
    [("old", "no", "Expected numbers"), ("", "no", "Expected no blanks"), ("3", "?", "labels")],
)
def test_what_cannot_be_read_is_refused_without_telling_lines_or_counts(
    tmp_path: Path, age: str, ill: str, match: str
) -> None:
    path = tmp_path / "some.csv"
    path.write_text("who,age,job,ill\n" + f"a,1,x,no\nb,{age},x,{ill}\n" * 400)
    labels = Column("ill", "category", categories=("no", "yes"))
    schema = SCHEMA.with_columns([Column("age", missing=False), labels])
    with pytest.raises(ValueError, match=match) as caught:
        prepare(FitRequest(path, None, 1.0, schema=schema))
    found = str(caught.value).replace("1.234,5", "")
    assert not any(digit in found for digit in "0123456789")


def test_a_plan_refuses_users_that_are_not_numbers_as_a_fit_does(tmp_path: Path) -> None:
    path = tmp_path / "some.parquet"
    who = [1.0, 2.0, float("nan")] * 100
    frame = {"who": who, "age": range(300), "job": ["x", "y", "x"] * 100, "ill": ["a", "b"] * 150}
    pl.DataFrame(frame).write_parquet(path)
    request = FitRequest(path, None, 1.0, schema=SCHEMA)
    for plan in (prepare, lambda asked: forecast_table(asked, [1.0])):
        with pytest.raises(ValueError, match="found blanks in column 'who'"):
            plan(request)


def test_a_budget_shows_its_unit_and_plans_for_tables_to_come_take_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "ledger.db"
    monkeypatch.setenv("PRIVAGRAD_LEDGER", str(path))
    ledger = Ledger(path)

    def told(*words: str) -> Any:
        done = CliRunner().invoke(app, [*words, "--json"])
        assert done.exit_code == 0, done.output
        return json.loads(done.stdout)

    def shown(*words: str) -> str:
        done = CliRunner().invoke(app, [*words])
        assert done.exit_code == 0, done.output
        return " ".join(done.output.split())

    for name, event in (("new", None), ("rows", GaussianEvent(9.0)), ("users", USER)):
        ledger.create(name, 9.0, 1e-5)
        if event is not None:
            ledger.finish(ledger.reserve(name, [event], "a run"), [event])
        unit = None if event is None else event.unit
        assert told("budget", "show", name)["unit"] == unit
        assert told("budget", "review", name)["datasets"][0]["unit"] == unit
        for command in ("show", "review"):
            text = shown("budget", command, name)
            assert (f"Unit of privacy: {unit}. Later runs must" in text) == (unit is not None)
        size = ["plan", "--rows", "3000", "--columns", "3", "-e", "1", "--dataset", name]
        assert told(*size)["unit"] == unit or name == "new"
    ledger.create("both", 9.0, 1e-5)
    alive = ledger.reserve("both", [USER], "seems dead")
    ledger.release(alive, "no answer")
    ledger.reserve("both", [GaussianEvent(9.0)], "of the other unit")
    with pytest.raises(BudgetError):
        ledger.finish(alive, [USER])
    for command in ("show", "review"):
        assert "Their costs do not add up" in shown("budget", command, "both")
    assert "both" in shown("budget", "list")
    refused = CliRunner().invoke(app, [*size[:-1], "both"])
    assert refused.exit_code != 0
    assert "costs do not add up" in " ".join(refused.output.split())


def test_a_report_of_users_counts_no_rows(visits: Path, tmp_path: Path) -> None:
    job = prepare(FitRequest(visits, None, 2.0, schema=SCHEMA))
    model, page = run(job, None, False), tmp_path / "a.html"
    write_fit_report(page, model)
    text = page.read_text()
    card = card_markdown(privacy_card(model))
    for where in (text, card):
        assert "all users" in where
        assert "all rows in every step" not in where
        assert ">all rows<" not in where
        assert "| all rows |" not in where
    assert "Releases over all users compose" in text
    for sentence in ("| Users | 900 |", "the contribution of one user", "a sum over all users"):
        assert sentence in card


def test_a_report_of_a_model_whose_budget_has_both_units_says_so(
    visits: Path, tmp_path: Path
) -> None:
    ledger = Ledger(tmp_path / "ledger.db")
    ledger.create("both", 9.0, 1e-5)
    alive = ledger.reserve("both", [GaussianEvent(9.0)], "seems dead")
    ledger.release(alive, "no answer")
    request = FitRequest(visits, None, 2.0, dataset="both", ledger=ledger, schema=SCHEMA)
    model, page = run(prepare(request), None, False), tmp_path / "a.html"
    with pytest.raises(BudgetError):
        ledger.finish(alive, [GaussianEvent(9.0)])
    account = ledger.account("both")
    write_fit_report(page, model, account)
    text = page.read_text()
    assert "whose costs do not add up. Nothing is left of it." in text
    assert "Beyond the budget of both" in text
    assert privacy_card(model, account=account)["ledger"]["account"]["spent"] == "infinity"


def test_a_schema_has_at_most_one_column_of_users(tmp_path: Path) -> None:
    path = tmp_path / "schema.toml"
    path.write_text(template(SCHEMA, "visits.csv"))
    assert read_schema(path).columns == SCHEMA.columns
    assert from_values(as_values(SCHEMA)) == SCHEMA
    path.write_text(path.read_text().replace('kind = "number"', 'kind = "user"'))
    with pytest.raises(ValueError, match="more than one column of kind 'user'"):
        read_schema(path)
    path.write_text('target = "who"\n[[column]]\nname = "who"\nkind = "user"\n')
    with pytest.raises(ValueError, match="is the column of users"):
        read_schema(path)
