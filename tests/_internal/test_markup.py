"""Objects in notebooks: small tables of HTML in which nothing of a name is ever markup."""

import ast
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

import privagrad
import privagrad.estimators
from privagrad import GaussianEvent, PrivacyPlan
from privagrad._internal.markup import html_table
from privagrad.data.models import SavedModel
from privagrad.data.schema import Column, Schema
from privagrad.fitting import FitRequest, prepare, run
from privagrad.privacy.events import SelectEvent
from privagrad.privacy.ledger import Ledger
from privagrad.queries.figures import Evaluation
from privagrad.queries.verdicts import Estimate

EVIL = "<script>alert('&\"')</script>"
TAGS = {"table", "caption", "b", "thead", "tbody", "tr", "th", "td"}


class Reader(HTMLParser):
    """Well-formed tables of the known tags, with styles as their only attributes; their text."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        assert tag in TAGS
        assert {name for name, _ in attrs} <= {"style"}
        assert not any("color" in value or "url" in value for _, value in attrs)
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += f"{data} "


def test_cells_are_text_whatever_they_hold():
    shown = html_table(EVIL, ("a", EVIL), [(EVIL, 0.123456), ("\x1b[1m\u202e", 3)])
    read = Reader(shown)
    assert "<script" not in shown
    assert read.text.count(EVIL) == 3
    assert "0.1235" in read.text
    assert not re.search("[\x00-\x1f\u202e]", shown)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> SavedModel:
    folder = tmp_path_factory.mktemp("models")
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2000, 2))
    label = np.where(x[:, 0] > 0, EVIL, "no")
    pl.DataFrame({EVIL: x[:, 0], "b": x[:, 1], "y": label}).write_csv(folder / "t.csv")
    columns = Column(EVIL), Column("b"), Column("y", "category", categories=("no", EVIL))
    asked = FitRequest(folder / "t.csv", None, 2.0, schema=Schema(columns, "y"), seed=0)
    return run(prepare(asked), folder / "m.model", False)


def test_a_model(model: SavedModel) -> None:
    shown = model._repr_html_()
    assert "<script" not in shown
    text = Reader(shown).text
    for part in (EVIL, "t.csv, 2,000 rows", "NOT PRIVATE (seeded noise)", "Better than", "±"):
        assert part in text


def test_figures(model: SavedModel) -> None:
    shown = Evaluation.read(model.evaluation)._repr_html_()
    text = Reader(shown).text
    for part in ("Private figures. Better than always answering 'class ", "Accuracy", "±"):
        assert part in text
    exact = Evaluation(False, {"error": Estimate(2.5), "removed": Estimate(0.5)}, 3.0, 0.5)
    text = Reader(exact._repr_html_()).text
    assert "Exact figures, NOT private. Removes 50% of the error" in text
    assert "±" not in text
    former = Evaluation.read({"score": 0.5, "baseline": 0.4})
    assert "Score of the constant" in Reader(former._repr_html_()).text


def test_reports_and_plans() -> None:
    query = GaussianEvent(20.0, purpose=EVIL)
    plan = PrivacyPlan.calibrate(1.0, 1e-5, 1000, 100, 50, other_events=[query])
    shown = plan._repr_html_()
    assert "<script" not in shown
    text = Reader(shown).text
    for part in (EVIL, "gradients", "50", "poisson", "zero-out", f"{plan.noise_multiplier:.4g}"):
        assert part in text
    report = plan.report(1e-5, seeded=False)
    text = Reader(report._repr_html_()).text
    assert f"({report.epsilon:.4g}, 1e-05)-differential privacy" in text
    assert "NOT PRIVATE" not in text
    text = Reader(plan.report(1e-5, seeded=True, verified=False)._repr_html_()).text
    assert "NOT PRIVATE (seeded noise)" in text
    assert "vouches" in text
    chosen = PrivacyPlan((SelectEvent((GaussianEvent(5.0),), 3.0),))
    assert "the best of 3 runs" in Reader(chosen._repr_html_()).text
    nothing = PrivacyPlan((), unprotected=True)
    assert "epsilon = inf" in Reader(nothing._repr_html_()).text
    assert "Not private" in Reader(nothing.report(1e-5, seeded=False)._repr_html_()).text


def test_budgets(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.db")
    ledger.create(EVIL, 3.0, 1e-6)
    ledger.reserve(EVIL, (GaussianEvent(8.0),), f"note of {EVIL}")
    account = ledger.account(EVIL)
    shown = account._repr_html_()
    assert "<script" not in shown
    text = Reader(shown).text
    for part in (f"note of {EVIL}", "reserved", f"{account.spent:.4g} of epsilon 3 spent"):
        assert part in text


def test_completion_offers_the_estimators() -> None:
    assert set(privagrad.estimators.__all__) <= set(dir(privagrad))


def test_messages_name_no_private_class() -> None:
    trees = [ast.parse(p.read_text()) for p in Path(privagrad.__file__).parent.rglob("*.py")]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    private = {n.name for n in nodes if isinstance(n, ast.ClassDef) and n.name.startswith("_")}
    texts = {n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)}
    named = re.compile(rf"\b(?:{'|'.join(sorted(private))})\b")
    assert [text for text in texts if named.search(text)] == []


NOTEBOOK = """
import sys, types
sys.modules["ipykernel"] = types.ModuleType("ipykernel")
import numpy as np
from privagrad import PrivateLogisticRegression
rng = np.random.default_rng(0)
X = rng.standard_normal((2000, 3))
model = PrivateLogisticRegression(epsilon=1.0, verbose={verbose}).fit(X, X[:, 0] > 0)
model.privacy_._repr_html_()
"""


@pytest.mark.parametrize("verbose", [None, True])
def test_a_fit_in_a_notebook_prints_no_warnings_and_no_control_characters(
    verbose: bool | None,
) -> None:
    """Warnings are errors in the process, which has no terminal, as notebooks have none."""
    command = [sys.executable, "-W", "error", "-c", NOTEBOOK.format(verbose=verbose)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    assert len(lines) == (10 if verbose else 0)
    assert not re.search("[\x00-\x09\x0b-\x1f]", done.stderr)
