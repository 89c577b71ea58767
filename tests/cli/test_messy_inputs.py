"""Bad input is refused before anything is spent; predictions keep identifiers."""

import csv
import gzip
from pathlib import Path

import numpy as np
import pytest

from tests.cli.test_cli import as_json, book, run  # noqa: F401
from tests.data.workbooks import write_xlsx

HEAD = 'target = "y"\n[file]\n{file}\n'
COLUMNS = """
[[column]]
name = "when"
kind = "{kind}"
[[column]]
name = "y"
kind = "category"
categories = ["0", "1"]
"""
LINES = "".join(f"2024-01-{1 + k % 28:02},{k % 2}\n" for k in range(400))


def schema(kind="date", file=""):
    Path("s.toml").write_text(HEAD.format(file=file) + COLUMNS.format(kind=kind))


def bad_date():
    Path("t.csv").write_text("when,y\n" + LINES + "01/02/2024,1\n")


def bad_duration():
    schema("duration")
    Path("t.csv").write_text("when,y\n" + LINES)


def wrong_separator():
    Path("t.csv").write_text(("when,y\n" + LINES).replace(",", ";"))


def mixed_encodings():
    Path("t.csv").write_bytes(("when,y\n" + LINES).encode() + b"\xe4,1\n")


def cut_gzip():
    Path("t.csv.gz").write_bytes(gzip.compress(("when,y\n" + LINES).encode())[:-12])


def two_sheets():
    write_xlsx("t.xlsx", {"a": [["when", "y"]], "b": [["x"]]})


def no_excel():
    Path("t.xlsx").write_bytes(b"PK no workbook")


def unknown_kind():
    schema("dat")


def unknown_key():
    schema(file='sepparator = ","')


def unknown_encoding():
    schema(file='encoding = "latin-0"')


CASES = [
    (bad_date, "t.csv", "dates like 2024-01-31"),
    (bad_duration, "t.csv", "durations like"),
    (wrong_separator, "t.csv", "state `separator`"),
    (mixed_encodings, "t.csv", "--encoding latin-1"),
    (cut_gzip, "t.csv.gz", "cut off or damaged"),
    (two_sheets, "t.xlsx", "'a', 'b'"),
    (no_excel, "t.xlsx", "save it again"),
    (unknown_kind, "t.csv", "kind must be number, category"),
    (unknown_key, "t.csv", "unknown entry 'sepparator'"),
    (unknown_encoding, "t.csv", "such as utf-8, latin-1"),
]


@pytest.mark.parametrize(
    ("make", "table", "message"), CASES, ids=lambda v: getattr(v, "__name__", str(v))
)
def test_bad_input_is_refused_and_nothing_is_spent(book, make, table, message):  # noqa: F811
    run("budget", "create", "t", "--epsilon", 3, "--delta", 1e-6)
    schema()
    Path("t.csv").write_text("when,y\n" + LINES)
    make()
    done = run(
        "fit", table, "--schema", "s.toml", "-e", 1, "--dataset", "t", "-o", "m.model", code=2
    )
    said = " ".join(done.output.split())
    assert message in said
    assert "01/02/2024" not in said, "no cell is quoted"
    assert book.account("t").spent == 0
    assert book.account("t").runs == ()
    assert not Path("m.model").exists()


def test_predictions_keep_identifiers_and_blanks_are_told(book):  # noqa: F811
    rng = np.random.default_rng(0)
    x = rng.standard_normal(1500)
    lines = [f"p{k},{v:.3f},{int(v > 0)}" for k, v in enumerate(x)]
    Path("t.csv").write_text("person_id,x,y\n" + "\n".join(lines))
    Path("s.toml").write_text(
        'target = "y"\n[[column]]\nname = "person_id"\nkind = "ignore"\n[[column]]\n'
        'name = "x"\n[[column]]\nname = "y"\nkind = "category"\ncategories = ["0", "1"]\n'
    )
    run("fit", "t.csv", "--schema", "s.toml", "-e", 2, "-o", "m.model")
    Path("new.csv").write_bytes("person_id,name,x\na,Zoë,3\nb,B,\n".encode("latin-1"))
    shown = as_json("predict", "m.model", "new.csv", "-o", "p.csv", "--encoding", "latin-1")
    assert (shown["kept"], shown["missing"]) == (["person_id"], {"x": 1})
    rows = list(csv.DictReader(Path("p.csv").read_text().splitlines()))
    assert (rows[0]["person_id"], rows[0]["prediction"]) == ("a", "1")
    printed = run(
        "predict", "m.model", "new.csv", "-o", "-", "--encoding", "latin-1", "--keep", "name,x"
    ).stdout
    assert printed.splitlines()[:2] == ["name,x,prediction", "Zoë,3,1"]
    assert "x is" in run("show", "m.model").stdout
    none = as_json("predict", "m.model", "t.csv", "-o", "p.csv", "--keep", "")
    assert none["kept"] == []
    said = run("predict", "m.model", "t.csv", "-o", "p.csv", "--keep", "nme", code=2).output
    assert "the column 'nme'" in " ".join(said.split())


def test_rows_of_blanks_are_predicted_unless_the_model_knows_no_blanks(book):  # noqa: F811
    x = np.random.default_rng(0).standard_normal((1500, 2))
    lines = [f"{a:.3f},{b:.3f},{int(a > 0)}" for a, b in x]
    Path("t.csv").write_text("a,b,y\n" + "\n".join(lines))
    Path("new.csv").write_text("a,b,y\n1,2,1\n,,\n-3,4,0\n\n\n")
    told = (
        'target = "y"\n[[column]]\nname = "a"\n{}[[column]]\nname = "b"\n[[column]]\nname = "y"\n'
    )
    told += 'kind = "category"\ncategories = ["0", "1"]\n'
    for never in ("", "missing = false\n"):
        Path("s.toml").write_text(told.format(never))
        run("fit", "t.csv", "--schema", "s.toml", "-e", 2, "-o", "m.model", "--overwrite")
        if not never:
            assert as_json("predict", "m.model", "new.csv", "-o", "p.csv")["rows"] == 3
            continue
        for command in (("predict", "m.model", "new.csv", "-o", "q.csv"),
                        ("evaluate", "m.model", "new.csv")):  # fmt: skip
            said = " ".join(run(*command, code=2).output.split())
            assert "the model was fitted to a table without blanks" in said
            assert "first in line 3: fill them in, or drop those rows" in said
