"""The reports themselves: what they say, and that a browser shows all of it."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from string import ascii_lowercase
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from privagrad.data.models import SavedModel
from privagrad.data.schema import Column, Schema
from privagrad.fitting.evaluate import as_values
from privagrad.glm.losses import Loss
from privagrad.privacy.events import GaussianEvent
from privagrad.privacy.ledger import Ledger
from privagrad.queries.evaluation import Predicted, evaluate, evaluate_exactly
from privagrad.report.experiments import (
    write_compare_report,
    write_figure1_report,
    write_language_report,
    write_rates_report,
)
from privagrad.report.fit import write_evaluation_report, write_fit_report
from privagrad.report.page import aligned
from tests.releases import releases_at
from tests.report.conftest import RUDE
from tests.report.test_browser import MARKS, OPEN_ALL, OVERFLOW, SIZES

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

EVENTS = [
    {"purpose": "moments", "count": 1, "noise_multiplier": 20.5, "sampling": None},
    {"purpose": "gradients", "count": 300, "noise_multiplier": 61.25, "sampling": "poisson"},
]


def evaluated(classes: list[str] | None, exact: bool = False) -> dict[str, Any]:
    """What is known of a model of these classes, or of numbers, on 3000 rows."""
    rng = np.random.default_rng(1)
    margins, k = rng.standard_normal(3000), len(classes or "")
    rows = Predicted.of(Loss("huber"), margins, margins + rng.standard_normal(3000) / 2)
    if k == 2:
        signs = np.where(margins + rng.logistic(size=3000) > 0, 1.0, -1.0)
        rows = Predicted.of(Loss("logistic"), margins, signs)
    elif k > 2:
        many = rng.standard_normal((3000, k))
        labels = (many + rng.gumbel(size=(3000, k))).argmax(axis=1).astype(float)
        rows = Predicted.of(Loss("softmax"), many, labels)
    found = evaluate_exactly(rows) if exact else evaluate(rows, releases_at({"evaluation": 9.0}))
    return as_values(found, classes)


FORMER = {
    "steps": [0, 300], "losses": [0.69, 0.4], "clipped": [None, 0.3], "curve_noise": 0.01,
    "loss_cap": 1.4, "score": 0.8412, "baseline": 0.7611, "score_noise": 0.002, "factor": 0.5,
}  # fmt: skip
"""What files of version 0.1 keep."""


def model(classes: list[str] | None = None, features: int = 40) -> SavedModel:
    rng = np.random.default_rng(0)
    k = len(classes) if classes and len(classes) > 2 else 1
    names = [*RUDE, *(f"column {j}" for j in range(features))][:features]
    evaluation = {**evaluated(classes), "factor": 0.5}
    return SavedModel(
        "logistic" if classes else "huber",
        names,
        classes,
        Schema((Column("a"), Column("y")), "y <b>"),
        {
            "epsilon": 0.9987, "delta": 1e-6, "relation": "zero-out",
            "sampling": "poisson", "accountant": "PLD", "seeded": False,
            "events": EVENTS, "public": ["the number of rows: 3000"],
        },
        {
            "at": "2026-01-02T03:04:05+00:00", "version": "0.1.0", "table": "people.csv",
            "rows": 3000, "method": "pagan", "steps": 300, "batch_size": 3000, "step_size": 1.0,
            "radius": 1.5, "dataset": None, "run": None, "loss_parameter": None,
        },
        evaluation,
        rng.standard_normal((k, features)),
        rng.standard_normal(k),
        rng.random((k, features)),
        rng.random(k),
        *rng.random((3, features)) + 0.1,
    )  # fmt: skip


def compared() -> list[dict[str, object]]:
    return [
        {"method": m, "epsilon": e, "loss": 0.1 / e, "low": 0.05, "high": 0.12 / e,
         "excess": 0.02 / e, "epsilon_spent": e, "seconds": 0.1, "step_size": 0.2,
         "radius_factor": 1.0}
        for e in (0.5, 1.0) for m in ("pagan", "dp-sgd", "pasan")
    ]  # fmt: skip


def spoken() -> list[dict[str, object]]:
    return [
        {"method": m, "epsilon": e, "seed": 0, "epochs": 3, "batch_size": 250, "step_size": 7.0,
         "radius": 0.5, "valid_curve": [300.0, 250.0, 220.0], "valid_perplexity": 220.0,
         "valid_perplexity_reset": 225.0, "test_perplexity": None, "epsilon_spent": e,
         "seconds": 100.0}
        for m in ("dp-sgd", "pagan") for e in (3.0, 0.5)
    ]  # fmt: skip


def rated() -> list[dict[str, object]]:
    return [
        {"varied": v, "value": x, "method": m, "excess": 0.1 / x, "low": 0.09 / x, "high": 0.12 / x,
         "upper": 1 / x, "lower": 0.01 / x}
        for v in ("n", "decay") for m in ("pagan", "pasan") for x in (0.5, 1.0, 2.0)
    ]  # fmt: skip


REPORTS = {
    "two classes": lambda path: write_fit_report(path, model(["no", "yes <i>"])),
    "classes": lambda path: write_fit_report(path, model(["a", "b", "c"])),
    "26 classes": lambda path: write_fit_report(path, model(list(ascii_lowercase))),
    "numbers": lambda path: write_fit_report(path, model(None, 3)),
    "evaluation": lambda path: write_evaluation_report(
        path,
        model(["no", "yes <i>"]),
        {"table": RUDE[0], "rows": 3, **evaluated(["no", "yes"], exact=True)},
    ),
    "compare": lambda path: write_compare_report(path, "a <b>", compared()),
    "figure 1": lambda path: write_figure1_report(
        path,
        {"results": compared(), "excess_ratio_of_pagan": [
            {"epsilon": 1.0, "over": "dp-sgd", "ratio": 0.5, "low": 0.4, "high": 0.6}]},
    ),
    "rates": lambda path: write_rates_report(path, rated(), [
        {"varied": "n", "method": "pagan", "measured": -0.99, "predicted": -1.0}
    ], {"n": "rows", "decay": "decay of σ"}),
    "table 1": lambda path: write_language_report(path, spoken()),
}  # fmt: skip


@pytest.mark.parametrize(
    ("relation", "change"),
    [
        ("zero-out", "Let any one row contribute nothing instead of its values"),
        ("replace-one", "Replace the values of any one row by any others"),
    ],
)
def test_a_report_promises_its_relation_and_no_other(
    tmp_path: Path, relation: str, change: str
) -> None:
    """The number of rows is on the page: nothing may be promised to a table that has one more."""
    made = model(["no", "yes"])
    made = replace(made, privacy={**made.privacy, "relation": relation})
    write_fit_report(tmp_path / "report.html", made)
    page = (tmp_path / "report.html").read_text()
    [promise] = re.findall(r"[^>]*: no result of this run becomes more than", page)
    assert promise.startswith(change)
    assert "the number of rows stays the same" in promise
    for other in ("row away", "add one", "add-or-remove"):
        assert other not in page


def listen(page: Page) -> tuple[list[str], list[str]]:
    """What the page will write to the console, errors among it, and the addresses it will ask."""
    heard: list[str] = []
    asked: list[str] = []
    page.on("console", lambda message: heard.append(message.text))
    page.on("pageerror", lambda error: heard.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    return heard, asked


@pytest.mark.parametrize("name", REPORTS)
def test_a_browser_shows_every_report(browser: Browser, tmp_path: Path, name: str) -> None:
    path = tmp_path / "report.html"
    REPORTS[name](path)
    for width in (360, 1200):
        page = browser.new_page(viewport={"width": width, "height": 900})
        heard, asked = listen(page)
        page.goto(path.as_uri())
        page.evaluate(OPEN_ALL)
        assert heard == []
        assert asked == [path.as_uri()]
        drawings = page.evaluate(MARKS)
        assert len(drawings) >= 2
        for drawing in drawings:
            assert drawing["area"] > 0
            assert drawing["marks"] > 3
            assert drawing["outside"] == []
        assert page.evaluate(OVERFLOW) <= 0
        assert min(page.evaluate(SIZES)) >= 9
        page.close()


def test_a_fit_says_what_it_cost_and_how_good_it_is(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    saved = model(["no", "yes"])
    test = {"table": "held-out.csv", "rows": 500, **evaluated(["no", "yes"], exact=True)}
    write_fit_report(path, replace(saved, evaluation={**saved.evaluation, "test": test}))
    text = path.read_text(encoding="utf-8")
    for word in (
        "Epsilon 0.9987 at delta 1e-06", "zero-out", "PLD", "61.25",
        "the number of rows: 3000", "Better than always answering", "AUC", "NOT private: exact",
        "± ", "ROC curve", "Calibration", "Confusion matrix",
        "Positive values raise the probability of yes", "from a secure source",
    ):  # fmt: skip
        assert word in text, word
    for name in RUDE[:3]:
        assert name not in text


@pytest.mark.parametrize("classes", [None, ["no", "yes"]])
def test_models_of_version_0_1_are_shown_with_what_they_have(
    tmp_path: Path, classes: list[str] | None
) -> None:
    path = tmp_path / "report.html"
    test: dict[str, Any] = {"table": "held-out.csv", "rows": 500, "private": False}
    test |= {"accuracy": 0.8333, "majority": 0.75}
    if classes is None:
        test = {"table": "t", "rows": 5, "mean_absolute_error": 0.8333, "private": False,
                "mean_absolute_error_of_median": 0.9}  # fmt: skip
    former = {**FORMER, "shares": [0.24, 0.76] if classes else [], "test": test}
    write_fit_report(path, replace(model(classes), evaluation=former))
    text = path.read_text(encoding="utf-8")
    for word in ("0.8412 ± 0.0040", "0.7611 ± 0.0040", "0.8333", "NOT private: exact"):
        assert word in text, word
    assert ("Better than always answering &#x27;yes&#x27;" in text) == (classes is not None)


def test_a_seeded_fit_is_not_private(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    saved = model(["no", "yes"])
    write_fit_report(path, replace(saved, privacy={**saved.privacy, "seeded": True}))
    assert "NOT PRIVATE" in path.read_text(encoding="utf-8")
    assert "can hardly tell" not in path.read_text(encoding="utf-8")


def test_the_budget_is_shown_with_what_others_spent(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.db")
    ledger.create("people", 2.0, 1e-6)
    ledger.reserve("people", [GaussianEvent(6.0)], "someone else")
    before = ledger.account("people").spent
    mine = ledger.reserve("people", [GaussianEvent(8.0)], "this")
    saved = model(["no", "yes"])
    saved = replace(saved, made={**saved.made, "dataset": "people", "run": mine})
    path = tmp_path / "report.html"
    account = ledger.account("people")
    write_fit_report(path, saved, account)
    text = path.read_text(encoding="utf-8")
    assert "Budget of people" in text
    for shown in aligned([before, account.spent - before, account.epsilon - account.spent]):
        assert shown in text
    assert "Reserved and not finished, counted in full: 1." in text
