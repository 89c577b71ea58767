"""Mistakes at the command line: refused in words, with every ledger and file left as it was."""

from pathlib import Path

import numpy as np
import polars as pl
import pytest

from privagrad.data.models import load_model
from tests.cli.test_cli import SCHEMA, as_json, book, people, run  # noqa: F401

UNPAID = {
    "fit": ("fit", "kept.csv", "--schema", "s.toml", "-e", 1, "-o", "n.model"),
    "dry run": ("fit", "kept.csv", "--schema", "s.toml", "-e", 1, "--dry-run"),
    "seeded fit": ("fit", "kept.csv", "--schema", "s.toml", "-e", 1, "--seed", 1, "-o", "n.model"),
    "test table": (
        "fit", "free.csv", "--schema", "s.toml", "-e", 1, "--test", "kept.csv", "-o", "n.model"
    ),
    "exact figures": ("evaluate", "m.model", "kept.csv"),
    "private figures": ("evaluate", "m.model", "kept.csv", "-e", 0.5),
    "comparison": ("compare", "kept.csv", "--target", "rich"),
}  # fmt: skip


@pytest.fixture
def files(book):  # noqa: F811
    people(Path("free.csv"), 800)
    people(Path("kept.csv"), 800, seed=1)
    stated = SCHEMA.replace('kind = "category"', 'kind = "category"\ncategories = ["cook"]', 1)
    Path("s.toml").write_text(stated)
    run("fit", "free.csv", "--schema", "s.toml", "-e", 3, "--steps", 5, "-o", "m.model")
    book.create("kept", 3.0, 1e-5)
    command = ("fit", "kept.csv", "--schema", "s.toml", "-e", 1, "--steps", 5)
    run(*command, "--dataset", "kept", "-o", "kept.model")
    return book


@pytest.mark.parametrize("name", UNPAID)
def test_rows_with_a_budget_are_used_by_no_run_that_it_does_not_pay_for(files, name):
    before = files.history("kept")
    said = " ".join(run(*UNPAID[name], code=2).output.split())
    assert "Expected rows without a budget for " in said
    assert "that of 'kept'" in said
    assert "Nothing was spent" in said
    assert files.history("kept") == before
    assert not Path("n.model").exists()
    if name in ("fit", "private figures"):
        assert "Give --dataset kept." in said


def test_commands_do_not_replace_what_they_read(files):
    kept = {name: Path(name).read_bytes() for name in ("m.model", "free.csv")}
    for command in (
        ("predict", "m.model", "free.csv", "-o", "free.csv"),
        ("predict", "m.model", "free.csv", "-o", "m.model"),
        ("show", "m.model", "--report", "m.model"),
        ("evaluate", "m.model", "free.csv", "--report", "m.model"),
    ):
        assert "twice" in run(*command, code=2).output
    for path in ("no/p.csv", "."):
        said = " ".join(run("predict", "m.model", "free.csv", "-o", path, code=2).output.split())
        assert "Expected a f" in said
        assert "Errno" not in said
    assert "Expected a folder" in run("show", "m.model", "--report", "no/r.html", code=2).output
    assert {name: Path(name).read_bytes() for name in kept} == kept


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("budget", "create", "t", "-e", 1, "--delta", 1e-6, "--file", "no.csv"),
         "Expected the data set's file, found nothing at no.csv"),
        (("plan", "--rows", 100, "--columns", 3, "--epsilons", "0.1;1"),
         "Expected values of epsilon like 0.1,1,3, found '0.1;1'"),
        (("plan", "--rows", 100, "--columns", 3, "--epsilons", "1,"),
         "Expected values of epsilon like 0.1,1,3, found '1,'"),
    ],
)  # fmt: skip
def test_messages_of_wrong_options(book, arguments, message):  # noqa: F811
    assert message in " ".join(run(*arguments, code=2).output.split())
    assert book.names() == []


def test_columns_that_the_schema_spells_in_another_way_are_told(book):  # noqa: F811
    rng = np.random.default_rng(0)
    insured = rng.choice(["jawohl", "nein"], 3000)
    frame = pl.DataFrame({
        "x": rng.standard_normal(3000), "insured": insured, "y": rng.integers(0, 2, 3000),
    })  # fmt: skip
    frame.write_csv("t.csv")
    Path("s.toml").write_text(
        'target = "y"\n[[column]]\nname = "x"\n'
        '[[column]]\nname = "insured"\nkind = "category"\ncategories = ["Ja", "Nein"]\n'
        '[[column]]\nname = "y"\nkind = "category"\ncategories = ["0", "1"]\n'
    )
    book.create("t", 3.0, 1e-5)
    command = ("fit", "t.csv", "--schema", "s.toml", "-e", 2, "--steps", 5, "--dataset", "t")
    told = "Nothing was learned of 'insured'"
    planned = " ".join(run(*command, "--dry-run").output.split())
    assert told not in planned, "that would tell of the rows without noise"
    said = " ".join(run(*command, "-o", "m.model", "--report", "r.html").output.split())
    shown = " ".join(run("show", "m.model").output.split())
    assert told in said
    assert told in shown
    assert any(told in line for line in load_model(Path("m.model")).made["notes"])
    assert "Nothing was learned of" in Path("r.html").read_text()
    assert as_json("show", "m.model")["coefficients"][-1]["measurable"] is False


def test_rows_to_predict_that_cannot_be_read_are_to_be_corrected(book):  # noqa: F811
    """The schema is the model's: no advice to change it."""
    rng = np.random.default_rng(0)
    lines = [f"{a:.2f};{int(a > 0)}".replace(".", ",") for a in rng.standard_normal(400)]
    Path("t.csv").write_text("a;y\n" + "\n".join(lines))
    Path("s.toml").write_text(
        'target = "y"\n[file]\nseparator = ";"\ndecimal = ","\n[[column]]\nname = "a"\n'
        '[[column]]\nname = "y"\nkind = "category"\ncategories = ["0", "1"]\n'
    )
    run("fit", "t.csv", "--schema", "s.toml", "-e", 2, "--steps", 5, "-o", "m.model")
    Path("new.csv").write_text("a\n1,5\n2.5\n")
    said = " ".join(run("predict", "m.model", "new.csv", "-o", "p.csv", code=2).output.split())
    assert "Expected numbers in column 'a'" in said
    assert "in line 3: correct the file" in said
    assert "decimal ','" in said
    assert "2.5" not in said
    assert not Path("p.csv").exists()
