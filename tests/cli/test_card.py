"""`privagrad card`: made, checked, exported; nothing secret in it, nothing left out silently."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from privagrad.cli import app
from privagrad.privacy.ledger import Ledger
from tests.cli.test_cli import SCHEMA, as_json, people, run
from tests.cli.test_transcripts import edit
from tests.report.cards import charge_too_much

STATEMENT = """
name = "Income"
description = "A model of who is rich."
purpose = "To teach."
curators = ["An office"]
region = "Nowhere"
publication_date = 2026-02-03
registry_authors = ["A. Author"]
data_source = "Static"
"""


@pytest.fixture(autouse=True)
def book(tmp_path, monkeypatch):
    monkeypatch.setenv("PRIVAGRAD_LEDGER", str(tmp_path / "ledger.db"))
    monkeypatch.chdir(tmp_path)
    return Ledger(tmp_path / "ledger.db")


@pytest.fixture
def fitted(book):
    book.create("people", 3.0, 1e-6)
    Path("schema.toml").write_text(SCHEMA)
    Path("statement.toml").write_text(STATEMENT)
    run("fit", people(Path("people.csv")), "--schema", "schema.toml", "-e", 1, "--dataset",
        "people", "-o", "income.model")  # fmt: skip
    return Path("income.model")


def test_a_card_is_made_and_checked(fitted):
    shown = run("card", fitted).stdout
    assert shown.splitlines()[0] == "# Privacy card: rich"
    card = as_json("card", fitted, "--statement", "statement.toml", "-o", "card.json")
    assert card == json.loads(Path("card.json").read_text())
    assert card["statement"]["purpose"] == "To teach."
    assert card["ledger"]["account"]["runs"][0]["this_run"]
    assert card["native"]["events"][0]["purpose"] == "categories"
    assert as_json("card", "--check", "card.json") == {
        "card": "card.json", "right": True, "findings": []
    }  # fmt: skip
    assert "follows from the releases" in run("card", "--check", "card.json").stdout
    # Categories that the model discovered are none of the card's business.
    assert "baker" not in Path("card.json").read_text()
    assert "baker" not in shown


def test_a_changed_card_ends_with_exit_code_1_and_names_the_line(fitted):
    run("card", fitted, "-o", "card.json")
    lines = Path("card.json").read_text().splitlines()
    (number,) = [i for i, line in enumerate(lines) if '"mu"' in line]
    lines[number] = '   "mu": 0.01,'
    Path("card.json").write_text("\n".join(lines))
    done = run("card", "--check", "card.json", code=1)
    assert f"card.json: line {number + 1}, /native/gaussian/mu: expected" in done.stdout
    found = as_json("card", "--check", "card.json", code=1)
    assert not found["right"]
    assert found["findings"][0]["line"] == number + 1


def test_the_ending_decides_what_is_written(fitted):
    run("card", fitted, "--statement", "statement.toml", "-o", "card.md")
    assert Path("card.md").read_text().startswith("# Privacy card: Income\n\n## The guarantee")
    run("card", fitted, "--statement", "statement.toml", "-o", "registry.yaml")
    entry = yaml.safe_load(Path("registry.yaml").read_text())
    assert (entry["url_slug"], entry["tier"]) == ("income", 2)
    assert "ends in .json (the card)" in run("card", fitted, "-o", "card.pdf", code=2).stderr
    assert "found none for name" in run("card", fitted, "-o", "r.yaml", code=2).stderr
    assert not Path("r.yaml").exists()


def test_the_template_is_written_once_and_read_back(fitted):
    run("card", "--template", "new.toml")
    assert len(tomllib.loads(Path("new.toml").read_text())) > 20
    assert (
        "found new.toml. Give another name" in run("card", "--template", "new.toml", code=2).stderr
    )
    card = as_json("card", fitted, "--statement", "new.toml")
    assert set(card["statement"].values()) == {None}
    Path("new.toml").write_text("pupose = 'x'")
    assert "did you mean 'purpose'" in run("card", fitted, "--statement", "new.toml", code=2).stderr


def test_a_budget_that_is_not_found_stays_open(fitted, monkeypatch):
    monkeypatch.setenv("PRIVAGRAD_LEDGER", "other.db")
    done = run("card", fitted, "-o", "card.json")
    assert "leaves the budget open" in done.stderr
    card = json.loads(Path("card.json").read_text())
    assert card["ledger"]["account"] is None
    assert card["ledger"]["charged"]
    assert "no 'people'" in run("card", fitted, "--ledger", "other.db", code=2).stderr
    Ledger("other.db").create("people", 1.0, 1e-6)
    assert "found none" in run("card", fitted, "--ledger", "other.db", code=2).stderr
    account = as_json("card", fitted, "--ledger", "ledger.db")["ledger"]["account"]
    assert account["epsilon"] == 3.0


def test_a_card_whose_sentences_cannot_be_compared_says_so(fitted):
    card = as_json("card", fitted, "-o", "card.json")
    done = run("card", "--check", "card.json")
    assert "cannot be checked" in done.stderr
    assert "not compared" not in done.stderr
    card["library"]["version"] = "9.9 \x1b[2J"
    card["guarantee"]["words"] = "Nobody can learn anything."
    Path("card.json").write_text(json.dumps(card))
    done = run("card", "--check", "card.json")
    assert "Another version, 9.9" in done.stderr
    assert "\x1b" not in done.stderr


def test_a_model_is_shown_where_its_ledger_is_not(fitted, monkeypatch):
    monkeypatch.setenv("PRIVAGRAD_LEDGER", "other.db")
    done = run("show", fitted, "--report", "report.html")
    assert "no 'people'" in done.stderr
    assert "that of this run alone: give --ledger" in done.stderr
    assert "written without its ledger" in Path("report.html").read_text()
    assert "no 'people'" in run("show", fitted, "--ledger", "other.db", code=2).stderr
    assert "of 3 left" not in Path("report.html").read_text()


def test_a_budget_that_is_exceeded_is_shown(fitted, book):
    assert "Beyond" not in run("show", fitted).stdout
    charge_too_much(book, "people")
    shown = " ".join(run("show", fitted).stdout.split())
    assert "Beyond the budget of people: its runs together cost epsilon" in shown
    run("show", fitted, "--report", "report.html")
    assert "Beyond the budget of people" in Path("report.html").read_text()


def test_an_evaluation_takes_a_statement(fitted, book):
    people(Path("others.csv"), 2000, seed=1)
    run("evaluate", fitted, "others.csv", "--report", "r.html", "--statement", "statement.toml")
    assert "To teach." in Path("r.html").read_text()
    assert "2,000 rows" in Path("r.html").read_text()
    book.create("others", 1.0, 1e-6)
    paid = ("evaluate", fitted, "others.csv", "-e", 0.5, "--dataset", "others")
    assert "--report" in run(*paid, "--statement", "statement.toml", code=2).stderr
    assert not book.account("others").runs


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((), "Expected one of MODEL, --template and --check, found 0"),
        (("a.model", "--check", "b.json"), "found 2 of them"),
        (("--check", "b.json", "-o", "c.json"), "Expected MODEL with --out"),
        (("--check", "b.json"), "found nothing at b.json"),
        (("a.model", "-o", "a.model"), "Expected a file that ends in"),
        (("a.json", "-o", "a.json"), "Expected a file to write, found a.json, which is read"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments, expected):
    assert expected in " ".join(run("card", *arguments, code=2).stderr.split())


PAGE = Path(__file__).parents[2] / "docs" / "privacy-card.md"
BLOCK = re.compile(r"^```(python|toml|sh|console|diff)\n(.*?)^```", re.DOTALL | re.MULTILINE)


def test_the_session_of_the_documentation(book):
    """Every command of the page, and every line that it shows; … stands for anything."""
    file, seen = Path("statement.toml"), 0
    for kind, text in BLOCK.findall(PAGE.read_text(encoding="utf-8")):
        if kind == "python":
            exec(text, {})
        elif kind == "toml":
            Path("schema.toml").write_text(text)
        elif kind == "diff":
            edit(file, text)
            file = Path("card.json")
        else:
            for part in re.split(r"^(?:\$ )?privagrad ", text, flags=re.MULTILINE)[1:]:
                command, _, printed = part.partition("\n")
                done = CliRunner().invoke(app, shlex.split(command))
                assert done.exit_code in (0, 1, 2), done.output
                assert (done.exit_code == 1) == ("/guarantee/epsilon: expected" in printed)
                shown = re.escape(printed).replace("…", "[^|]*?") if kind == "console" else ""
                assert re.match(shown, done.output), (printed, done.output)
                seen += 1
    assert seen == 8
