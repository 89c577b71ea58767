"""The command line as people use it: files in, models out, budgets kept, errors in a line."""

import csv
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from typer.main import get_command
from typer.testing import CliRunner

from privagrad.cli import app
from privagrad.data.models import load_model
from privagrad.privacy.ledger import Ledger

N = 3000


@pytest.fixture(autouse=True)
def book(tmp_path, monkeypatch):
    monkeypatch.setenv("PRIVAGRAD_LEDGER", str(tmp_path / "ledger.db"))
    monkeypatch.chdir(tmp_path)
    return Ledger(tmp_path / "ledger.db")


def people(path: Path, n: int = N, seed: int = 0) -> Path:
    rng = np.random.default_rng(seed)
    age, hours = rng.integers(17, 90, n), rng.normal(40, 10, n)
    job = rng.choice(["cook", "baker", "poet", ""], n, p=[0.5, 0.3, 0.19, 0.01])
    score = (age - 50) / 15 + (hours - 40) / 10 + 2.0 * (job == "poet")
    rich = np.where(score + rng.logistic(size=n) > 0, "yes", "no")
    frame = pl.DataFrame({"age": age, "hours": hours, "job": job, "rich": rich})
    frame.write_parquet(path) if path.suffix == ".parquet" else frame.write_csv(path)
    return path


def run(*arguments, code=0):
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert done.exit_code == code, (done.output, done.exception)
    assert "Traceback" not in done.output
    return done


def as_json(*arguments, code=0):
    return json.loads(run(*arguments, "--json", code=code).stdout)


SCHEMA = """
target = "rich"
[[column]]
name = "age"
low = 17
high = 90
[[column]]
name = "hours"
low = 0
high = 100
[[column]]
name = "job"
kind = "category"
[[column]]
name = "rich"
kind = "category"
categories = ["no", "yes"]
"""


def test_from_a_file_to_predictions(book):
    people(Path("people.csv"))
    people(Path("others.csv"), 500, seed=1)
    Path("schema.toml").write_text(SCHEMA)
    Path("statement.toml").write_text('purpose = "To find the rich."')
    run("budget", "create", "people", "--epsilon", 3, "--delta", 1e-6)
    shown = as_json(
        "fit", "people.csv", "--schema", "schema.toml", "--epsilon", 2, "--dataset", "people",
        "--test", "others.csv", "--report", "report.html", "-o", "rich.model", "--statement",
        "statement.toml",
    )  # fmt: skip
    assert shown["privacy"]["epsilon"] <= 2
    assert not shown["privacy"]["seeded"]
    figures, test = shown["evaluation"]["figures"], shown["evaluation"]["test"]["figures"]
    assert test["accuracy"]["value"] > 0.75
    assert shown["evaluation"]["test"]["private"] is False
    assert abs(figures["accuracy"]["value"] - test["accuracy"]["value"]) < 0.1
    purposes = [event["purpose"] for event in shown["privacy"]["events"]]
    assert purposes == [
        "categories", "moments", "row norms", "calibration", "evaluation",
        "curvature", "gradients",
    ]  # fmt: skip
    account = book.account("people")
    assert account.runs[0].state == "finished"
    assert account.spent == pytest.approx(shown["budget"]["spent"])
    assert account.spent <= 2

    model = load_model(Path("rich.model"))
    assert set(model.features) == {
        "age", "age is missing", "hours", "hours is missing", "job=cook", "job=baker", "job=poet",
    }  # fmt: skip
    run("predict", "rich.model", "others.csv", "-o", "out.csv", "--probabilities")
    rows = list(csv.DictReader(Path("out.csv").read_text().splitlines()))
    truth = pl.read_csv("others.csv")["rich"].to_list()
    right = np.mean([row["prediction"] == y for row, y in zip(rows, truth, strict=True)])
    assert right == pytest.approx(test["accuracy"]["value"])
    for row in rows[:50]:
        yes, no = float(row["probability of yes"]), float(row["probability of no"])
        assert yes + no == pytest.approx(1)
        assert (row["prediction"] == "yes") == (yes > 0.5)
    shown = run("show", "rich.model").stdout
    for word in (
        "job=poet",
        "Positive coefficients raise the probability of yes",
        "NOT private",
        "differential privacy",
        "Moderate protection: an attacker's 50:50 guess",
    ):
        assert word in shown
    page = Path("report.html").read_text()
    for word in ("Private model of rich", "To find the rich.", "Moderate protection"):
        assert word in page
    run("show", "rich.model", "--report", "again.html")
    assert "To find the rich." not in Path("again.html").read_text()
    run("show", "rich.model", "--report", "again.html", "--statement", "statement.toml")
    assert "To find the rich." in Path("again.html").read_text()
    refused = run("show", "rich.model", "--statement", "statement.toml", code=2)
    assert "--report FILE with --statement" in refused.output
    same = ("--report", "statement.toml", "--statement", "statement.toml")
    assert "found the statement" in run("show", "rich.model", *same, code=2).output


def test_numbers_alone_need_no_schema_and_one_command():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2000, 2)) * [1, 50]
    frame = pl.DataFrame({"a": x[:, 0], "b": x[:, 1], "y": 3 * x[:, 0] + 0.1 * x[:, 1] + 7})
    frame.write_csv("t.csv")
    shown = as_json(
        "fit", "t.csv", "--target", "y", "--task", "regression", "-e", 3, "-o", "m.model"
    )
    assert shown["evaluation"]["verdict"].startswith("Removes ")
    assert shown["evaluation"]["figures"]["removed"]["value"] > 0.5
    model = load_model(Path("m.model"))
    assert model.loss == "huber"
    run("predict", "m.model", "t.csv", "-o", "p.csv")
    predicted = pl.read_csv("p.csv")["prediction"].to_numpy()
    assert np.corrcoef(predicted, frame["y"].to_numpy())[0, 1] > 0.9


@pytest.mark.parametrize(
    "extra", [["--task", "classification"], ["--classes=-1,1"], ["--loss", "hinge"]], ids=str
)
def test_libsvm_files(extra):
    rng = np.random.default_rng(0)
    x = rng.random((2000, 6)) < 0.3
    y = np.where(x[:, 0] | (x[:, 1] & ~x[:, 2]), 1, -1)
    lines = [
        f"{label:+d} " + " ".join(f"{j + 1}:1" for j in np.flatnonzero(row))
        for label, row in zip(y, x, strict=True)
    ]
    Path("rows.libsvm").write_text("\n".join(lines))
    shown = as_json("fit", "rows.libsvm", "-e", 3, "-o", "m.model", *extra)
    assert shown["evaluation"]["figures"]["accuracy"]["value"] > 0.8
    found = [event["purpose"] for event in shown["privacy"]["events"]]
    assert ("categories" in found) == ("--classes=-1,1" not in extra)
    assert ("calibration" in found) == ("hinge" not in extra)
    Path("new.libsvm").write_text("1 1:1\n-1 9:1 3:1\n")
    run("predict", "m.model", "new.libsvm", "-o", "p.csv")
    assert Path("p.csv").read_text() == "prediction\n1\n-1\n"


def test_several_classes():
    rng = np.random.default_rng(0)
    kind = rng.integers(0, 3, 2500)
    x = rng.standard_normal((2500, 2)) + np.array([[0, 0], [4, 0], [0, 4]])[kind]
    pl.DataFrame({"a": x[:, 0], "b": x[:, 1], "kind": kind}).write_parquet("t.parquet")
    shown = as_json(
        "fit", "t.parquet", "-t", "kind", "--loss", "logistic", "-e", 3, "-o", "m.model"
    )
    assert shown["evaluation"]["figures"]["accuracy"]["value"] > 0.85
    model = load_model(Path("m.model"))
    assert model.classes == ["0", "1", "2"]
    assert model.coef.shape == (3, 4), "each number with what tells of its blanks"
    run("predict", "m.model", "t.parquet", "-o", "p.csv", "--probabilities")
    assert Path("p.csv").read_text().startswith("prediction,probability of 0,")
    assert "a is" in run("show", "m.model").stdout


def test_a_run_beyond_the_budget_is_refused_before_anything_is_read(book, monkeypatch):
    people(Path("people.csv"))
    Path("schema.toml").write_text(SCHEMA)
    run("budget", "create", "people", "--epsilon", 1, "--delta", 1e-6)
    command = ("fit", "people.csv", "--schema", "schema.toml", "--dataset", "people")
    run(*command, "-e", 0.8, "-o", "one.model")
    before = book.account("people")
    Path("people.csv").rename("hidden.csv")  # so that reading it would be another error
    refused = run(*command, "-e", 0.8, "-o", "two.model", code=3).output
    assert "Nothing was spent" in refused
    assert not Path("two.model").exists()
    assert book.account("people") == before
    shown = as_json(*command, "-e", 0.8, "-o", "two.model", code=3)
    assert shown["exit_code"] == 3
    largest = float(shown["error"].split("that fits is about ")[1].split(".  ")[0].split(". ")[0])
    assert f"Left: {1 - before.spent:.4g}" in shown["error"]
    Path("hidden.csv").rename("people.csv")
    assert 0.3 < largest < 0.8
    run(*command, "-e", largest, "-o", "two.model")
    assert book.account("people").spent <= 1
    assert book.account("people").spent > 0.93


def test_a_copy_of_the_rows_is_no_table_to_test_on(book):
    people(Path("people.csv"))
    Path("schema.toml").write_text(SCHEMA)
    Path("held-out.csv").write_bytes(Path("people.csv").read_bytes())
    command = ("fit", "people.csv", "--schema", "schema.toml", "-e", 1, "-o", "m.model")
    refused = run(*command, "--test", "held-out.csv", code=2).output
    assert "Expected another table to test on" in " ".join(refused.split())
    assert not Path("m.model").exists()


def test_a_dry_run_shows_everything_and_spends_nothing(book):
    people(Path("people.csv"))
    Path("schema.toml").write_text(SCHEMA)
    run("budget", "create", "people", "--epsilon", 1, "--delta", 1e-6)
    shown = run(
        "fit", "people.csv", "--schema", "schema.toml", "-e", 0.5, "--dataset", "people",
        "--dry-run",
    ).stdout  # fmt: skip
    for word in ("categories", "moments", "gradients", "evaluation", "Public", "0 of 1 spent"):
        assert word in shown
    assert book.account("people").spent == 0
    assert book.history("people") == []


def test_a_changed_file_is_another_data_set(book):
    people(Path("people.csv"))
    Path("schema.toml").write_text(SCHEMA)
    run("budget", "create", "people", "-e", 1, "--delta", 1e-6, "--file", "people.csv")
    command = ("fit", "people.csv", "--schema", "schema.toml", "--dataset", "people", "-e", 0.5)
    with Path("people.csv").open("a") as file:
        file.write("30,40.0,cook,no\n")
    assert "another data set" in run(*command, "-o", "m.model", code=2).output
    assert book.account("people").spent == 0


def test_budgets(book):
    run("budget", "create", "a", "--epsilon", 2, "--delta", 1e-6)
    assert "fixed once" in run("budget", "create", "a", "-e", 3, "--delta", 1e-6, code=2).output
    people(Path("people.csv"))
    Path("schema.toml").write_text(SCHEMA)
    run("fit", "people.csv", "--schema", "schema.toml", "--dataset", "a", "-e", 1, "-o", "m.model")
    from privagrad.privacy.events import GaussianEvent

    dead = book.reserve("a", [GaussianEvent(20.0)], "a run that died")
    assert dead in run("budget", "show", "a").stdout.replace("\n", "")
    [shown] = as_json("budget", "list")
    assert shown["name"] == "a"
    assert shown["spent"] == pytest.approx(book.account("a").spent)
    assert run("budget", "release", dead, "--reason", " ", code=2)
    run("budget", "release", dead, "--reason", "it never started")
    assert as_json("budget", "show", "a")["spent"] < shown["spent"]
    run("budget", "export", "a", "-o", "h.json")
    history = json.loads(Path("h.json").read_text())
    assert [e["state"] for e in history] == ["reserved", "finished", "reserved", "released"]
    assert history[-1]["note"] == "it never started"
    run("budget", "export", "a", "-o", "h.csv")
    rows = list(csv.DictReader(Path("h.csv").read_text().splitlines()))
    assert json.loads(rows[0]["events"]) == history[0]["events"]
    assert json.loads(run("budget", "export", "a").stdout) == history
    assert "Expected a .json or .csv" in run("budget", "export", "a", "-o", "h.txt", code=2).output
    assert "known: 'a'" in run("budget", "show", "b", code=2).output


GOOD = "age,hours,y\n1,2,0\n2,3,1\n3,1,0\n"
MORE = GOOD + "1,2,0\n2,3,1\n" * 100
BAD = {
    "wrong target": (GOOD, ["-t", "yy"], "Did you mean 'y'"),
    "no target": (GOOD, [], "--target"),
    "no rows": ("age,y\n", ["-t", "y"], "found none"),
    "empty": ("", ["-t", "y"], "no first line"),
    "one column": ("y\n1\n2\n", ["-t", "y"], "beside the target"),
    "two headers": ("a,a,y\n1,2,3\n", ["-t", "y"], "twice"),
    "no header": ("1,2,3\n1,2,4\n", ["-t", "y"], "--no-header"),
    "text": ("a,city,y\n1,Bern,3\n1,Bern,3\n", ["-t", "y"], "privagrad schema"),
    "huge": ("a,y\n1e200,1\n1,2\n", ["-t", "y"], "bounds"),
    "ragged": ("a,y\n1,1,5,6\n1,2\n", ["-t", "y"], "Expected a table"),
    "markup": ("[red]a[/red],y\n1,1\n", ["-t", "[bold]"], "[bold]"),
    "bad loss": (GOOD, ["-t", "y", "--loss", "square"], "square"),
    "bad epsilon": (GOOD, ["-t", "y", "-e", "-1"], "epsilon"),
    "nan epsilon": (GOOD, ["-t", "y", "-e", "nan"], "epsilon"),
    "infinite epsilon": (GOOD, ["-t", "y", "-e", "inf"], "epsilon"),
    "bad delta": (GOOD, ["-t", "y", "--delta", "2"], "delta"),
    "one class": (GOOD, ["-t", "y", "--loss", "logistic", "--classes", "0"], "two classes"),
    "other labels": (
        GOOD,
        ["-t", "y", "--loss", "logistic", "--classes", "0,2"],
        "another one in row 2",
    ),
    "ledger alone": (GOOD, ["-t", "y", "--ledger", "x.db"], "--dataset"),
    "unknown budget": (GOOD, ["-t", "y", "--dataset", "nobody"], "budget create nobody"),
    "no task": (GOOD, ["-t", "y"], "--task classification --classes 0,1"),
    "bad task": (GOOD, ["-t", "y", "--task", "ranking"], "ranking"),
    "other task": (GOOD, ["-t", "y", "--task", "regression", "--loss", "hinge"], "huber, absolute"),
    "classes of numbers": (
        GOOD,
        ["-t", "y", "--task", "regression", "--classes", "0,1"],
        "no clas",
    ),
    "no test": (GOOD, ["-t", "y", "--test", "absent.csv"], "absent.csv"),
    "tests on itself": (GOOD, ["-t", "y", "--test", "t.csv"], "another table"),
    "three rows": (GOOD, ["-t", "y", "--task", "regression"], "Nothing was spent"),
    "few rows": (MORE, ["-t", "y", "--task", "regression", "-e", "0.01"], "Nothing was spent"),
    "classes that stay hidden": (
        MORE,
        ["-t", "y", "--task", "classification"],
        "State the classes",
    ),
    "test without target": (
        MORE,
        ["-t", "y", "--classes", "0,1", "--test", "no-target.csv"],
        "column 'y'",
    ),
    "test without column": (
        MORE,
        ["-t", "y", "--classes", "0,1", "--test", "no-hours.csv"],
        "column 'hours'",
    ),
    "test with other labels": (
        MORE,
        ["-t", "y", "--classes", "0,1", "--test", "labels.csv"],
        "alone in labels.csv",
    ),
    "a report over the model": (GOOD, ["-t", "y", "--report", "m.model"], "m.model twice"),
    "a report over the table": (GOOD, ["-t", "y", "--report", "t.csv"], "t.csv twice"),
    "a statement without a report": (GOOD, ["-t", "y", "--statement", "s.toml"], "--report FILE"),
    "no statement": (
        GOOD,
        ["-t", "y", "--report", "r.html", "--statement", "s.toml"],
        "nothing at s.toml",
    ),
    "a report nowhere": (GOOD, ["-t", "y", "--report", "absent/r.html"], "folder"),
    "no folder": (GOOD, ["-t", "y", "-o", "absent/m.model"], "folder"),
    "no schema": (GOOD, ["-t", "y", "--schema", "absent.toml"], "absent.toml"),
    "large batch": (GOOD, ["-t", "y", "--batch-size", "50"], "batch"),
}


@pytest.mark.parametrize("case", BAD)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_bad_input_is_a_clear_line_and_costs_nothing(case, book):
    text, extra, message = BAD[case]
    Path("t.csv").write_text(text)
    book.create("t", 1.0, 1e-3)
    defaults = [] if {"--dataset", "--ledger"} & set(extra) else ["--dataset", "t"]
    if "-e" not in extra:
        defaults += ["-e", "0.5"]
    if "-o" not in extra:
        defaults += ["-o", "m.model"]
    Path("no-target.csv").write_text("age,hours\n1,2\n")
    Path("no-hours.csv").write_text("age,y\n1,1\n")
    Path("labels.csv").write_text("age,hours,y\n1,2,1\n1,2,1.\n")
    if not {"--task", "--loss", "--classes"} & set(extra) and case != "no task":
        defaults += ["--task", "regression"]
    done = run("fit", "t.csv", *defaults, *extra, code=2)
    assert message in done.output.replace("\n", "")
    assert done.output.count("error:") == 1
    run("fit", "t.csv", *defaults, *extra, "--dry-run", code=2)
    assert book.history("t") == []
    assert book.account("t").spent == 0
    assert not Path("m.model").exists()


def test_a_fit_without_hope_gets_a_warning_before_anything_is_spent(monkeypatch):
    Path("t.csv").write_text(GOOD)
    monkeypatch.setattr("privagrad.fitting.run", lambda *_: pytest.fail("it was run"))
    Path("t.csv").write_text(GOOD + "1,2,0\n2,3,1\n" * 150)
    done = run("fit", "t.csv", "-t", "y", "--task", "regression", "-e", 0.5, "--dry-run")
    assert "are few for epsilon=0.5" in done.output.replace("\n", " ")


def test_a_delta_beyond_the_budgets_is_refused_in_words(book):
    Path("t.csv").write_text(MORE)
    book.create("t", 1.0, 1e-6)
    command = ("fit", "t.csv", "-t", "y", "--classes", "0,1", "-e", 0.5, "--dataset", "t")
    for extra in (["-o", "m.model"], ["--dry-run"]):
        done = run(*command, "--delta", 1e-5, *extra, code=3)
        assert "Leave out --delta (delta=). Nothing was spent" in " ".join(done.output.split())
    assert book.account("t").spent == 0
    run(*command, "--delta", 1e-7, "--dry-run")


def test_guarantees_that_protect_nobody_are_told(book):
    told = " ".join(run("budget", "create", "t", "-e", 100, "--delta", 0.1).output.split())
    assert "epsilon 100 hardly protects anyone" in told
    assert "delta 0.1 hardly protects anyone" in told
    assert "hardly" not in run("budget", "create", "u", "-e", 3, "--delta", 1e-6).output
    Path("t.csv").write_text(MORE)
    done = run("fit", "t.csv", "-t", "y", "--classes", "0,1", "-e", 50, "--dry-run")
    assert "epsilon 50 hardly protects anyone" in " ".join(done.output.split())
    for asked, shown in (("1e7", "10000000.0"), ("2e6", "2000000.0")):
        done = run("fit", "t.csv", "-t", "y", "--classes", "0,1", "-e", asked, "--dry-run", code=2)
        told = " ".join(done.output.split())
        assert f"Expected epsilon <= 1e+06, found {shown}:" in told, "the epsilon that was asked"
    assert book.account("t").spent == 0


def test_unused_columns_and_codes_are_told_in_fit_show_and_the_model(book):
    rng = np.random.default_rng(0)
    frame = pl.DataFrame({
        "x": rng.standard_normal(600), "zip": rng.integers(1000, 9999, 600),
        "town": [f"t{k}" for k in range(600)], "remark": ["a"] * 600, "y": ["no", "yes"] * 300,
    })  # fmt: skip
    frame.write_csv("t.csv")
    kinds = {"town": "category", "remark": "ignore", "y": "category"}
    columns = [
        f'[[column]]\nname = "{c}"\nkind = "{kinds.get(c, "number")}"' for c in frame.columns
    ]
    Path("s.toml").write_text("\n".join(columns) + '\ncategories = ["no", "yes"]\n')
    book.create("t", 3.0, 1e-5)
    command = ("fit", "t.csv", "-t", "y", "--schema", "s.toml", "-e", 2, "--dataset", "t")
    planned = " ".join(run(*command, "--dry-run").output.split())
    assert "Ignored columns: 'remark'" in planned
    assert "used as quantities: 'zip'" in planned
    assert "'town'" not in planned
    assert book.account("t").spent == 0
    said = " ".join(run(*command, "-o", "m.model").output.split())
    shown = " ".join(run("show", "m.model").output.split())
    for text in ("columns: 'remark'", "quantities: 'zip'", "discovered: 'town'"):
        assert text in said
        assert text in shown
        assert any(text in line for line in load_model(Path("m.model")).made["notes"])


def test_predict_counts_blanks_and_unknown_categories_of_its_own_rows(book):
    people(Path("people.csv"))
    Path("schema.toml").write_text(SCHEMA)
    run("fit", "people.csv", "--schema", "schema.toml", "-e", 2, "-o", "m.model")
    Path("new.csv").write_text("age,hours,job\n,40,cook\n30,40,pilot\n30,40,\n40,40,cook\n")
    found = as_json("predict", "m.model", "new.csv", "-o", "p.csv")
    assert (found["missing"], found["unseen"]) == ({"age": 1, "job": 1}, {"job": 1})
    told = run("predict", "m.model", "new.csv", "-o", "p.csv").output
    assert run("predict", "m.model", "new.csv", "-o", "-").stdout == Path("p.csv").read_text()
    run("predict", "m.model", "new.csv", "-o", "-", "--json", code=2)
    assert "Column 'job': 1 values of categories" in " ".join(told.split())


def test_models_are_not_overwritten_unasked():
    Path("m.model").write_text("paid for")
    Path("t.csv").write_text(GOOD)
    assert "--overwrite" in run("fit", "t.csv", "-t", "y", "-e", 1, "-o", "m.model", code=2).output
    assert Path("m.model").read_text() == "paid for"


def test_a_seeded_model_says_so_and_no_budget_pays_for_it():
    people(Path("people.csv"))
    Path("schema.toml").write_text(SCHEMA)
    command = ("fit", "people.csv", "--schema", "schema.toml", "-e", 1, "--seed", 1)
    one, two = (as_json(*command, "-o", name) for name in ("a.model", "b.model"))
    assert one["privacy"]["seeded"]
    assert one["evaluation"] == two["evaluation"]
    assert "NOT PRIVATE" in run("show", "a.model", "--report", "r.html").stdout
    assert "NOT PRIVATE" in Path("r.html").read_text()
    run("budget", "create", "people", "-e", 1, "--delta", 1e-6)
    assert "seed" in run(*command, "--dataset", "people", "-o", "c.model", code=2).output


def test_predict_refuses_what_does_not_fit():
    people(Path("people.csv"))
    Path("schema.toml").write_text(SCHEMA)
    run("fit", "people.csv", "--schema", "schema.toml", "-e", 1, "--seed", 1, "-o", "m.model")
    Path("less.csv").write_text("age,ours\n1,2\n")
    done = run("predict", "m.model", "less.csv", "-o", "p.csv", code=2)
    assert "Did you mean 'ours'" in done.output.replace("\n", "")
    assert not Path("p.csv").exists()
    Path("no.model").write_text("nothing")
    assert (
        "Expected a model" in run("predict", "no.model", "less.csv", "-o", "p.csv", code=2).output
    )
    Path("less.csv").write_text("job,hours,age\npoet,50,60\nnobody,,\n")
    run("predict", "m.model", "less.csv", "-o", "p.csv")
    assert Path("p.csv").read_text().splitlines()[:2] == ["prediction", "yes"]


def test_a_schema_template_from_header_and_types():
    people(Path("people.csv"))
    run("schema", "people.csv", "-t", "rich", "-o", "s.toml")
    text = Path("s.toml").read_text()
    for value in ("cook", "poet", "yes"):
        assert f'"{value}"' not in text
    assert "filled in" in run("schema", "people.csv", "-o", "s.toml", code=2).output
    shown = as_json("schema", "people.csv")
    kinds = [column["kind"] for column in shown["columns"]]
    assert kinds == ["number", "number", "category", "category"]
    Path("bare.data").write_text("1,a\n2,b\n")
    Path("texts.csv").write_text("city,job\nBern,cook\n")
    assert "--header" in run("schema", "texts.csv", code=2).output
    columns = as_json("schema", "texts.csv", "--header")["columns"]
    assert [column["name"] for column in columns] == ["city", "job"]
    done = as_json("schema", "bare.data", "--no-header", "--names", "x,y")
    assert [column["name"] for column in done["columns"]] == ["x", "y"]
    assert run("schema", "bare.data", "--no-header", "--names", "x", code=2)


def commands(group=None, path=()):
    group = group or get_command(app)
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, (*path, name))
        else:
            yield (*path, name)


@pytest.mark.parametrize("command", sorted(commands()), ids=" ".join)
def test_every_help_teaches_by_example(command):
    shown = run(*command, "--help").stdout
    name = " ".join(command).replace("figure2", "table1")  # two names of one command
    assert f"privagrad {name}" in " ".join(shown.split())
    assert "--json" in shown


def test_the_first_help_teaches_and_the_version_is_printed():
    shown = run("--help").stdout
    for word in ("privagrad fit", "privagrad predict", "budget create", "Exit codes"):
        assert word in shown
    assert run("--version").stdout.startswith("privagrad ")
    command = [sys.executable, "-m", "privagrad", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == run("--version").stdout


def test_json_is_all_that_is_printed(monkeypatch):
    shown = as_json("theory", "--rows", 5000, "--dim", 20, "--box", 1)
    assert shown["methods"][0]["method"] == "pagan"
    from privagrad.experiments import rates

    monkeypatch.setattr(rates, "QUICK", replace(rates.QUICK, workers=1, seeds=1))
    shown = as_json("reproduce", "rates", "--quick", "--out", "r", "--report", "r.html")
    assert {slope["method"] for slope in shown["slopes"]} == {"pagan", "pasan"}
    assert "PAGAN against" in Path("r.html").read_text()


def test_bugs_are_reported_without_a_traceback(monkeypatch):
    def broken(*_):
        raise RuntimeError("something odd")

    monkeypatch.setattr("privagrad.fitting.prepare", broken)
    Path("t.csv").write_text(GOOD)
    done = run("fit", "t.csv", "-t", "y", "--loss", "huber", "-e", 1, "-o", "m.model", code=1)
    assert "This is a bug in privagrad; please report it" in " ".join(done.output.split())
    assert "--debug" in done.output
    with pytest.raises(RuntimeError, match="something odd"):
        CliRunner().invoke(
            app,
            ["--debug", "fit", "t.csv", "-t", "y", "-e", "1", "-o", "m"],
            catch_exceptions=False,
        )
    run("--version")


def test_budgets_as_tables_and_files(book):
    Path("people.csv").write_text(GOOD)
    made = as_json("budget", "create", "a", "-e", 2, "--delta", 1e-6, "--file", "people.csv")
    assert made["fingerprint"] == book.account("a").fingerprint is not None
    run("budget", "create", "b", "-e", 3, "--delta", 1e-7)
    from privagrad.privacy.codec import as_json as event_as_json
    from privagrad.privacy.events import GaussianEvent

    done = book.reserve("a", [GaussianEvent(20.0)], "a run")
    book.finish(done, [GaussianEvent(20.0)])
    listed = run("budget", "list").stdout.replace("\n", "")
    for shown in ("data set", "1e-06", "1e-07", f"{book.account('a').spent:.4g}"):
        assert shown in listed
    shown = run("budget", "show", "a").stdout
    assert "finished" in shown
    assert "Reserved, not finished" not in shown
    assert as_json("budget", "export", "a", "-o", "h.json") == json.loads(
        Path("h.json").read_text()
    )
    assert as_json("budget", "export", "a")[0]["events"] == [event_as_json(GaussianEvent(20.0))]
    dead = book.reserve("a", [GaussianEvent(20.0)], "a run that died")
    released = as_json("budget", "release", dead, "--reason", "it never started")
    assert released == {"run": dead, "state": "released", "reason": "it never started"}


def test_what_cannot_be_written_is_refused(monkeypatch):
    Path("t.csv").write_text(GOOD)
    assert "--dry-run" in run("fit", "t.csv", "-t", "y", "-e", 1, code=2).output
    one = run("schema", "t.csv", "--separator", ",,", code=2).output
    assert "a separator of one character" in one


def test_probabilities_are_those_of_logistic_models_alone():
    people(Path("people.csv"), 500)
    schema = SCHEMA.replace('kind = "category"', 'kind = "ignore"', 1)
    Path("schema.toml").write_text(schema)
    fit = ("fit", "people.csv", "--schema", "schema.toml", "-e", 2, "--steps", 20)
    run(*fit, "--loss", "hinge", "-o", "m.model")
    wrong = run("predict", "m.model", "people.csv", "-o", "p.csv", "--probabilities", code=2)
    assert "Expected a model with logistic loss" in wrong.output.replace("\n", " ")
    assert not Path("p.csv").exists()


def test_a_model_is_evaluated_exactly_or_within_a_budget(book):
    """Exact figures are not private; those with an epsilon are charged before they are released."""
    people(Path("people.csv"))
    people(Path("others.csv"), 2000, seed=1)
    Path("schema.toml").write_text(SCHEMA)
    fitted = as_json(
        "fit", "people.csv", "--schema", "schema.toml", "-e", 3, "--test", "others.csv", "-o", "m"
    )
    exact = as_json("evaluate", "m", "others.csv", "--report", "r.html")
    assert exact["private"] is False
    assert "privacy" not in exact
    same = fitted["evaluation"]["test"]["figures"]["auc"]["value"]
    assert exact["figures"]["auc"]["value"] == pytest.approx(same, abs=1e-3)
    assert "NOT PRIVATE: exact figures" in Path("r.html").read_text()
    assert "NOT private" in run("evaluate", "m", "others.csv").stdout

    run("budget", "create", "others", "--epsilon", 1, "--delta", 1e-5)
    paid = as_json("evaluate", "m", "others.csv", "-e", 0.5, "--dataset", "others")
    assert paid["private"] is True
    assert not paid["privacy"]["seeded"]
    assert paid["privacy"]["epsilon"] <= 0.5
    auc = paid["figures"]["auc"]
    assert auc["noise"] > 0
    assert abs(auc["value"] - same) < 6 * auc["noise"]
    [entry] = book.account("others").runs
    assert (entry.state, entry.name) == ("finished", paid["run"])
    [event] = entry.events
    assert (event.purpose, event.count) == ("evaluation", 1)
    assert book.account("others").spent == pytest.approx(paid["privacy"]["epsilon"], rel=0.02)


def test_rows_with_blanks_are_evaluated_too(book):
    """A blank is not a reason to leave a row out: the model predicts it."""
    for name, seed in (("people.csv", 0), ("others.csv", 1)):
        frame = pl.read_csv(people(Path(name), 4000, seed))
        rare = pl.int_range(pl.len()) % 4 < 3
        frame.with_columns(hours=pl.when(rare).then(None).otherwise("hours")).write_csv(name)
    Path("schema.toml").write_text(SCHEMA)
    fitted = as_json(
        "fit", "people.csv", "--schema", "schema.toml", "-e", 3, "--test", "others.csv", "-o", "m"
    )
    test = fitted["evaluation"]["test"]
    exact = as_json("evaluate", "m", "others.csv")
    assert exact["rows"] == test["rows"] == 4000
    for name, figure in test["figures"].items():
        assert exact["figures"][name]["value"] == pytest.approx(figure["value"], abs=1e-9), name
    run("budget", "create", "others", "--epsilon", 5, "--delta", 1e-5)
    paid = as_json("evaluate", "m", "others.csv", "-e", 5, "--dataset", "others")
    for name in ("accuracy", "auc"):
        private, true = paid["figures"][name], test["figures"][name]["value"]
        assert abs(private["value"] - true) < 6 * private["noise"] < 0.05


BAD_EVALUATIONS = {
    "no epsilon": (("others.csv", "--dataset", "others"), 2, "Expected --epsilon"),
    "these have a budget": (("private.csv",), 2, "Expected rows without a budget"),
    "too much": (("others.csv", "-e", 5, "--dataset", "others"), 3, "within the budget"),
    "strange label": (("strange.csv", "-e", 0.1, "--dataset", "others"), 2, "stated labels alone"),
    "no column": (("short.csv", "-e", 0.1, "--dataset", "others"), 2, "Expected the column"),
    "delta": (("others.csv", "-e", 0.1, "--delta", 0.01, "--dataset", "others"), 3, "delta"),
    "report": (
        ("others.csv", "-e", 0.1, "--dataset", "others", "--report", "no/r.html"), 2, "folder"
    ),
    "overwritten": (("others.csv", "--report", "others.csv"), 2, "twice"),
}  # fmt: skip


def test_a_bad_evaluation_is_refused_before_anything_is_spent(book):
    people(Path("people.csv"), 800)
    people(Path("others.csv"), 300, seed=1)
    Path("strange.csv").write_text("age,hours,job,rich\n30,40,cook,perhaps\n")
    Path("short.csv").write_text("age,hours,rich\n30,40,yes\n")
    schema = SCHEMA.replace('kind = "category"', 'kind = "category"\ncategories = ["cook"]', 1)
    Path("schema.toml").write_text(schema)
    run("fit", "people.csv", "--schema", "schema.toml", "-e", 3, "--steps", 5, "-o", "m")
    run("budget", "create", "others", "--epsilon", 1, "--delta", 1e-5)
    people(Path("private.csv"), 300, seed=2)
    run("budget", "create", "kept", "--epsilon", 1, "--delta", 1e-5, "--file", "private.csv")
    for name, (arguments, code, message) in BAD_EVALUATIONS.items():
        done = run("evaluate", "m", *arguments, code=code)
        assert message in done.output.replace("\n", " "), name
    assert book.account("others").runs == ()


def test_a_folder_is_one_table(book):
    """Its files together have one budget; a part of it is no table to test on."""
    Path("rows").mkdir()
    for k in range(3):
        people(Path("rows") / f"{k}.csv", 700, seed=k)
    Path("schema.toml").write_text(SCHEMA)
    run("budget", "create", "all", "--epsilon", 3, "--delta", 1e-6, "--file", "rows")
    fit = ("fit", "rows", "--schema", "schema.toml", "--epsilon", 1, "--dataset", "all", "-o")
    run(*fit, "m.model")
    assert load_model(Path("m.model")).made["rows"] == 2100
    refused = run(*fit, "n.model", "--test", "rows/1.csv", code=2)
    assert "Expected another table to test on" in refused.output
    Path("rows/2.csv").rename("rows/3.csv")
    assert "found other content in rows" in " ".join(run(*fit, "n.model", code=2).output.split())
    assert book.account("all").spent <= 1
    Path("rows/more").mkdir()
    assert "names of folders are no columns" in run(*fit, "n.model", code=2).output
