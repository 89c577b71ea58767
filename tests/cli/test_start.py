"""`privagrad plan` and `privagrad init`: nothing is spent, shown of values, or half-written."""

import json
import shlex
from datetime import date
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import typer
from typer.testing import CliRunner

from privagrad.cli import app, init
from privagrad.data.schema import read_schema
from privagrad.privacy.ledger import Ledger

N = 1500
EPSILONS = ("--epsilons", "0.5,2")


@pytest.fixture(autouse=True)
def book(tmp_path, monkeypatch):
    monkeypatch.setenv("PRIVAGRAD_LEDGER", str(tmp_path / "ledger.db"))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)
    return Ledger(tmp_path / "ledger.db")


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.setattr(init, "_interactive", lambda: True)


def patients(path: str = "patients.csv", seed: int = 0, n: int = N) -> str:
    rng = np.random.default_rng(seed)
    age = rng.integers(17, 90, n) + 1000 * seed
    frame = pl.DataFrame({
        "patient_id": rng.permutation(n) + 770000, "age": age, "weight": rng.normal(70, 9, n),
        "ward": rng.choice([f"secretA{seed}", f"secretB{seed}"], n),
        "admitted": [date(2024, 3, 1 + int(d)) for d in rng.integers(0, 28, n)],
        "days": age / 10 + rng.exponential(3, n),
        "died": np.where(rng.random(n) < 0.3, f"yes{seed}", f"no{seed}"),
    })  # fmt: skip
    frame.write_csv(path)
    return path


def invoke(*arguments, code=0, answers=()):
    text = "".join(f"{answer}\n" for answer in answers)
    done = CliRunner().invoke(app, [str(a) for a in arguments], input=text)
    assert done.exit_code == code, (done.output, done.exception)
    assert "Traceback" not in done.output
    return done


def as_json(*arguments, code=0):
    return json.loads(invoke(*arguments, "--json", code=code).stdout)


def test_what_plan_prints_does_not_change_with_the_values():
    invoke("init", patients(), "--yes")
    shown = []
    for seed in (0, 1, 2):
        patients(seed=seed)
        for extra in ((), ("--json",)):
            options = ("--schema", "schema.toml", *EPSILONS, "--dataset", "patients", *extra)
            shown.append(invoke("plan", "patients.csv", *options).output)
    assert len(set(shown)) == 2
    assert "secret" not in "".join(shown)


def test_the_plan_is_that_of_a_dry_run_and_spends_nothing(book):
    invoke("init", patients(), "--yes")
    options = ("--schema", "schema.toml", "--dataset", "patients")
    found = as_json("plan", "patients.csv", *options, *EPSILONS)
    assert found["rows"] == N
    assert found["spent"] == 0
    assert found["undiscovered"] == ["ward", "died"]
    for plan in found["plans"]:
        dry = as_json("fit", "patients.csv", *options, "-e", plan["epsilon"], "--dry-run")
        told = [f"{e['count']} x {e['purpose']} at noise multiplier {e['noise_multiplier']:.4g}"
                for e in plan["releases"]]  # fmt: skip
        assert [text.partition(",")[0] for text in dry["events"]] == told
        assert dry["epsilon"] == plan["total_epsilon"] <= plan["epsilon"]
        assert all(0 < e["epsilon_alone"] < plan["epsilon"] for e in plan["releases"])
        assert plan["budget"]["fits"]
        assert plan["budget"]["left_after"] == pytest.approx(3 - plan["budget"]["spent_after"])
    assert found["plans"][0]["budget"]["runs"] > found["plans"][1]["budget"]["runs"]
    assert found["plans"][0]["expected_quality"] < found["plans"][1]["expected_quality"]
    assert book.history("patients") == []
    text = invoke("plan", "patients.csv", *options, *EPSILONS).output
    for word in ("expected quality", "rough guess", "gradients", "such runs fit", "Nothing was"):
        assert word in " ".join(text.split())


def test_a_plan_without_data():
    three = as_json("plan", "--rows", 20000, "--columns", 30, "--classes", 3)
    assert [plan["epsilon"] for plan in three["plans"]] == [0.1, 1, 3]
    assert three["classes"] == ["0", "1", "2"]
    assert as_json("plan", "--rows", 20000, "--columns", 30, "--regression")["classes"] is None
    refused = as_json("plan", "--rows", 50, "--columns", 30, "-e", "0.01")["plans"][0]
    assert "rows for epsilon" in refused["refused"]
    text = invoke("plan", "--rows", 50, "--columns", 30, "-e", "0.01").output
    assert "refused" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan"], "Expected a table, or both --rows and --columns"),
        (["plan", "--rows", 10], "both --rows and --columns"),
        (["plan", "--rows", 10, "--columns", 2, "--target", "y"], "found --target"),
        (["plan", "--rows", 10, "--columns", 2, "--classes", "a,b"], "the number of classes"),
        (["plan", "--rows", 10, "--columns", 2, "--classes", 1], "two classes"),
        (["plan", "--rows", 10, "--columns", 2, "--regression", "--classes", 3], "no --classes"),
        (["plan", "--rows", 10, "--columns", 2, "--task", "guess"], "classification or regression"),
        (["plan", "patients.csv", "--rows", 10], "found both"),
        (["plan", "patients.csv", "--target", "died"], "found text in"),
        (["plan", "nothing.csv", "--target", "died"], "found nothing"),
        (["plan", "--rows", 10, "--columns", 2, "-e", "-1"], "epsilon"),
        (["plan", "--rows", 10, "--columns", 2, "--dataset", "none"], "found no 'none'"),
        (["plan", "--rows", 10, "--columns", 2, "--ledger", "x.db"], "--dataset NAME"),
        (["init", "patients.csv"], "--yes"),
        (["init", "patients.csv", "--json"], "--yes"),
        (["init", "patients.csv", "--yes", "--target", "nobody"], "nobody"),
        (["init", "patients.csv", "--yes", "--target", "admitted"], "a date"),
        (["init", "patients.csv", "--yes", "--total", 1, "-e", 2], "at most 1"),
        (["init", "patients.csv", "--yes", "--delta", 0.5], "delta"),
        (["init", "patients.csv", "--yes", "-o", "no/folder.toml"], "folder"),
    ],
)  # fmt: skip
def test_bad_input_is_a_clear_line(arguments, message, book):
    patients()
    done = invoke(*arguments, code=2)
    assert message in " ".join(done.output.split())
    assert sorted(p.name for p in Path().iterdir()) == ["patients.csv"]


def test_init_without_questions_ends_with_a_command_that_works(book):
    found = as_json("init", patients(), "--yes")
    assert "secret" not in json.dumps(found)
    written = read_schema(Path("schema.toml"))
    assert written.target == "died"
    assert written.column("patient_id").kind == "ignore"
    assert written.column("died").categories == ()
    account = book.account("patients")
    assert (account.epsilon, account.delta, account.runs) == (3.0, 1e-5, ())
    assert account.fingerprint is not None
    words = shlex.split(found["command"])
    assert words[:3] == ["privagrad", "fit", "patients.csv"]
    planned = found["plan"]["plans"][0]
    made = as_json(*words[1:])
    assert made["privacy"]["epsilon"] == planned["total_epsilon"]
    noise = [event["noise_multiplier"] for event in made["privacy"]["events"]]
    assert noise == [event["noise_multiplier"] for event in planned["releases"]]


ANSWERS = [
    "dayz", "days",         # target, once with a mistake
    "",                     # task: regression
    "y",                    # ignore patient_id
    "ward=ingore", "",      # changes, with a mistake
    "y", "0,x", "17,99", "", "2024-01-01,2024-12-31", "0,400",  # bounds; none of weight
    "y", "secretA0, secretB0", "no0,yes0",                      # categories of ward and died
    "?",                    # missing values
    "age, weight",          # never blank
    "stay", "2", "1e-6",    # name, total, delta
    "n",                    # not bound to the file
    "0.5",                  # epsilon
]  # fmt: skip


def test_the_answers_are_the_schema_and_the_budget(terminal, book):
    patients()
    done = invoke("init", "patients.csv", answers=[*ANSWERS, "y"])
    for text in ("Did you mean 'days'?", "Expected a kind of", "Expected a number, found 'x'"):
        assert text in " ".join(done.output.split())
    written = read_schema(Path("schema.toml"))
    assert written.target == "days"
    assert written.blanks == ("", "?")
    age, weight, admitted = (written.column(n) for n in ("age", "weight", "admitted"))
    assert (age.low, age.high, age.missing) == (17, 99, False)
    assert (weight.low, weight.high, weight.missing) == (None, None, False)
    assert admitted.low == (date(2024, 1, 1) - date(1970, 1, 1)).days
    assert admitted.high == (date(2024, 12, 31) - date(1970, 1, 1)).days
    assert admitted.missing is None
    assert (written.column("days").low, written.column("days").high) == (0, 400)
    assert written.column("ward").categories == ("secretA0", "secretB0")
    account = book.account("stay")
    assert (account.epsilon, account.delta, account.fingerprint) == (2.0, 1e-6, None)
    line = next(line for line in done.output.splitlines() if line.startswith("Next: privagrad "))
    words = shlex.split(line.removeprefix("Next: privagrad "))
    assert "regression" in words
    made = as_json(*words)
    assert made["privacy"]["epsilon"] <= 0.5
    assert made["budget"]["total"] == 2


def test_an_interruption_at_any_question_leaves_nothing(terminal, monkeypatch, book):
    """End of input stands for Ctrl-C: both are typer.Abort."""
    patients()
    for count in range(len(ANSWERS) + 1):
        done = invoke("init", "patients.csv", answers=ANSWERS[:count], code=130)
        assert "Nothing was written" in done.output
        assert sorted(p.name for p in Path().iterdir()) == ["patients.csv"]
    done = invoke("init", "patients.csv", answers=[*ANSWERS, "n"], code=130)
    assert sorted(p.name for p in Path().iterdir()) == ["patients.csv"]

    def interrupted(*_, **__):
        raise typer.Abort

    monkeypatch.setattr(typer, "prompt", interrupted)
    assert "interrupted" in invoke("init", "patients.csv", code=130).output


def test_a_budget_that_cannot_be_opened_takes_the_schema_with_it(monkeypatch):
    def refused(*_, **__):
        raise ValueError("Expected a ledger, found none.")

    patients()
    monkeypatch.setattr(Ledger, "create", refused)
    invoke("init", "patients.csv", "--yes", code=2)
    assert not Path("schema.toml").exists()


def test_nothing_is_overwritten_and_rows_get_no_second_budget(book):
    invoke("init", patients(), "--yes")
    before = Path("schema.toml").read_bytes()
    assert "Expected a new file" in invoke("init", "patients.csv", "--yes", code=2).output
    assert Path("schema.toml").read_bytes() == before
    assert "have a budget already" in invoke("init", "patients.csv", "--yes", "-o", "b.toml").output
    done = invoke("init", "patients.csv", "--yes", "-o", "c.toml", "--dataset", "more", code=2)
    assert "two budgets" in done.output
    assert book.names() == ["patients"]
    patients(seed=1)
    assert "Expected a new name" in invoke("init", "patients.csv", "--yes", "-o", "c.toml",
                                           code=2).output  # fmt: skip


@pytest.mark.parametrize("text", ["1,secret\n2,other\n", "secret,other\nthis,that\n"])
def test_a_first_line_that_may_be_a_row_is_no_header(text):
    Path("t.csv").write_text(text)
    assert "secret" not in invoke("init", "t.csv", "--yes", code=2).output
    assert not Path("schema.toml").exists()


def test_numbers_written_in_another_way_are_checked_by_somebody(terminal):
    rows = "".join(f"{k},5;1.{k % 900 + 100},25\n" for k in range(N))
    Path("t.csv").write_text(f"a;b\n{rows}")
    assert "decimal" in invoke("init", "t.csv", "--header", "--yes", code=2).output
    done = invoke("init", "t.csv", "--header", answers=["y", *[""] * 20])
    assert "Are numbers written like 1.234,5?" in done.output
    assert read_schema(Path("schema.toml")).decimal == ","


def test_delta_by_default_is_below_one_over_ten_times_the_rows():
    assert init._round_down(3.07e-6) == 3e-6
    assert init._round_down(1e-5) == 1e-5
    assert init._round_down(9.99e-7) == 9e-7
