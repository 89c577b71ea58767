"""The reports themselves: what they say, and that a browser shows all of it."""

from __future__ import annotations

import html
import math
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
from privagrad.privacy.accounting import PrivacyPlan
from privagrad.privacy.composition import gaussian_mu
from privagrad.privacy.events import GaussianEvent
from privagrad.privacy.ledger import Account, Ledger, Run
from privagrad.queries.evaluation import Predicted, evaluate, evaluate_exactly
from privagrad.report.experiments import (
    write_compare_report,
    write_figure1_report,
    write_language_report,
    write_rates_report,
)
from privagrad.report.fit import write_evaluation_report, write_fit_report
from privagrad.report.page import aligned
from privagrad.report.statement import Statement
from privagrad.report.verdict import verdict_of
from tests.releases import releases_at
from tests.report.cards import charge_too_much
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
         "radius_factor": 1.0, "schedule": "linear"}
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
    [promise] = re.findall(r"[^>]*: no set of results of this run becomes more likely", page)
    assert promise.startswith(change)
    assert "the number of rows stays the same" in promise
    for other in ("row away", "add one", "add-or-remove"):
        assert other not in page


def plain(path: Path) -> str:
    """A page without what keeps numbers on one line."""
    return path.read_text(encoding="utf-8").replace("\u00a0", " ").replace("\u2060", "")


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
    text = plain(path)
    for word in (
        "0.9987", "1e-06", "zero-out", "PLD", "61.25",
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
    text = plain(path)
    for word in ("0.8412 ± 0.0040", "0.7611 ± 0.0040", "0.8333", "NOT private: exact"):
        assert word in text, word
    assert ("Better than always answering &#x27;yes&#x27;" in text) == (classes is not None)


def test_a_seeded_fit_is_not_private(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    saved = model(["no", "yes"])
    write_fit_report(path, replace(saved, privacy={**saved.privacy, "seeded": True}))
    assert "NOT PRIVATE" in plain(path)
    assert "Strong protection" not in plain(path)
    assert "50:50 guess, at most" not in plain(path)


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


GUARANTEES = {0.5: "strong", 2.0: "moderate", 8.0: "weak", 50.0: "little"}
MODELS = {"two": ["no", "yes"], "twelve": [f"class {c}" for c in "abcdefghijkl"], "number": None}


def guaranteed(epsilon: float, classes: list[str] | None) -> SavedModel:
    made = model(classes)
    events = [{**event, "noise_multiplier": 60 / epsilon} for event in EVENTS]
    return replace(made, privacy={**made.privacy, "epsilon": epsilon, "events": events})


@pytest.mark.parametrize("kind", MODELS)
def test_the_page_follows_the_guarantee(browser: Browser, tmp_path: Path, kind: str) -> None:
    """At each epsilon another headline and colour, and nothing overflows, also on paper."""
    seen = set()
    for epsilon, level in GUARANTEES.items():
        path = tmp_path / f"{epsilon}.html"
        write_fit_report(path, guaranteed(epsilon, MODELS[kind]))
        page = browser.new_page(viewport={"width": 390, "height": 900})
        page.goto(path.as_uri())
        banner = page.locator(".banner").first
        expected = verdict_of(epsilon, 1e-6, 3000, "zero-out")
        assert expected.level == level
        shown = (banner.text_content() or "").replace("\u00a0", " ").replace("\u2060", "")
        assert expected.headline in shown
        seen.add((shown, banner.evaluate("e => getComputedStyle(e).backgroundColor")))
        assert page.evaluate(OVERFLOW) <= 0
        page.set_viewport_size({"width": 700, "height": 1000})
        page.emulate_media(media="print", color_scheme="dark")
        assert page.evaluate(OVERFLOW) <= 0
        page.close()
    assert len({text for text, _ in seen}) == len({colour for _, colour in seen}) == 4


def test_the_parts_are_for_three_readers(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    write_fit_report(path, model(["no", "yes"]))
    parts = re.split("<h2>", plain(path))[1:]
    assert [part.split("<")[0] for part in parts] == [
        "1 Data protection", "2 The model", "3 The mechanism"
    ]  # fmt: skip
    for word in ("Strong protection", "Purpose", "Public, not protected", "charged to no budget",
                 "A person with several rows", "whole population"):  # fmt: skip
        assert word in parts[0], word
        assert word not in parts[2], word
    for word in ("ROC curve", "Coefficients", "Columns"):
        assert word in parts[1]
    for word in ("All releases", "61.25", "What is proved", "50:50 guess, at most"):
        assert word in parts[2]


def test_what_the_owner_said_is_shown_and_all_else_is_open(tmp_path: Path) -> None:
    path, unknown = tmp_path / "report.html", "open: to be filled in by the data owner"
    write_fit_report(path, model(["no", "yes"]))
    alone = plain(path).count(unknown)
    said = Statement(purpose="To plan <b>beds</b>.", curators=("A", "B"), justification="Law 7.")
    write_fit_report(path, model(["no", "yes"]), None, said)
    page = plain(path)
    assert page.count(unknown) == alone - 3
    for word in ("To plan &lt;b&gt;beds&lt;/b&gt;.", ">A, B<", "Law 7."):
        assert word in page


def test_exact_test_scores_are_not_covered(tmp_path: Path) -> None:
    path, saved = tmp_path / "report.html", model(["no", "yes"])
    write_fit_report(path, saved)
    assert "scores on the test table" not in plain(path)
    test = {"table": "held-out.csv", "rows": 500, **evaluated(["no", "yes"], exact=True)}
    write_fit_report(path, replace(saved, evaluation={**saved.evaluation, "test": test}))
    assert "The scores on the test table held-out.csv: they are exact and NOT private" in plain(
        path
    )


def test_a_budget_that_is_overdrawn_is_the_verdict(tmp_path: Path) -> None:
    path, runs = (
        tmp_path / "report.html",
        (Run("r", "", "", "finished", "", (GaussianEvent(1.0),)),),
    )
    saved = model(["no", "yes"])
    saved = replace(saved, made={**saved.made, "dataset": "people", "run": "r"})
    write_fit_report(path, saved, Account("people", 1.0, 1e-6, None, runs))
    assert "Beyond the budget of people" in plain(path)
    assert "Strong protection" not in plain(path)
    write_fit_report(path, saved, Account("people", 20.0, 1e-6, None, runs))
    assert "Strong protection" in plain(path)


def test_a_private_evaluation_has_a_verdict_of_its_own(tmp_path: Path) -> None:
    path, cost = tmp_path / "report.html", {"delta": 1e-6, "relation": "zero-out", "seeded": False}
    found = {"table": "t", "rows": 3000, **evaluated(["no", "yes"])}
    for epsilon, word in ((0.5, "Strong protection"), (20.0, "This protects little")):
        privacy = {"epsilon": epsilon, **cost}
        write_evaluation_report(path, model(["no", "yes"]), {**found, "privacy": privacy})
        assert word in plain(path)


def test_columns_are_listed_with_their_use_and_encoding(tmp_path: Path) -> None:
    columns = (
        Column("id", "ignore"),
        Column("age", low=18, high=90, missing=False),
        Column("pay"),
        Column("rent", low=0),
        Column("job", "category", categories=("cook", "poet")),
        Column("town", "category"),
        Column("born", "date", low=0.0, high=365.0, missing=1.5),
        Column("wait", "duration"),
        Column("y", "category", categories=("no", "yes")),
    )
    schema, saved = Schema(columns, "y"), model(["no", "yes"])
    hidden = ["pay", "pay is missing", "rent is missing", "job=poet"]
    notes = ["Ignored columns: 'id'.", "Look at age."]
    made = {**saved.made, "not_measurable": hidden, "notes": notes}
    path = tmp_path / "report.html"
    write_fit_report(path, replace(saved, schema=schema, made=made))
    page = plain(path)
    table = page[page.index("Columns: 6 used, 2 not used") :]
    rows = [re.findall("<td>(.*?)</td>", row) for row in re.findall("<tr>(.*?)</tr>", table)][1:10]
    assert rows == [
        ["id", "ignored: the schema says so", "–"],
        ["age", "used", "number; 18 to 90 (stated)"],
        ["pay", "used, but not measurable: too few rows have it",
         "number; range learned with noise; a column of its own for blanks"],
        ["rent", "used; too few blanks to learn from them",
         "number; at least 0 (stated); a column of its own for blanks"],
        ["job", "used; too few rows to measure job=poet", "2 categories: cook, poet"],
        ["town", "not used: no category was frequent enough to be discovered", "category"],
        ["born", "used", "date: days, month, weekday; 1970-01-01 to 1971-01-01 (stated); "
         "missing counts as 1.5"],
        ["wait", "used", "duration in seconds; range learned with noise; a column of its own for "
         "blanks"],
        ["y", "target", "2 classes"],
    ]  # fmt: skip
    assert "Look at age." in page
    assert "Ignored columns:" not in page


def test_coefficients_of_many_classes_stand_in_tables_of_six(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    write_fit_report(path, model(MODELS["twelve"]))
    tables = re.findall(
        "All coefficients, in original units: classes ([0-9]+ to [0-9]+)<", plain(path)
    )
    assert tables == ["1 to 6", "7 to 12"]


@pytest.mark.parametrize(("epsilon", "seeded"), [(math.inf, False), (1.0, True)])
def test_a_report_of_a_run_without_privacy_promises_nothing(
    epsilon: float, seeded: bool, tmp_path: Path
) -> None:
    saved = model(["no", "yes"])
    events = saved.privacy["events"] if seeded else []
    cost = {"epsilon": epsilon, "seeded": seeded, "events": events}
    path = tmp_path / "report.html"
    write_fit_report(path, replace(saved, privacy={**saved.privacy, **cost}))
    text = plain(path)
    for promise in ("One row of the table", "the guarantee fails in at most", "Groups of related",
                    "from a secure source", "What is proved"):  # fmt: skip
        assert promise not in text
        write_fit_report(path, saved)
        assert promise in plain(path)
    assert "Nothing and nobody" in text


def test_several_rows_together_have_a_larger_delta_too(tmp_path: Path) -> None:
    """(k epsilon, k exp((k - 1) epsilon) delta), against the exact trade-off of a Gaussian."""
    path = tmp_path / "report.html"
    for epsilon in (0.5, 1.0, 3.0):
        saved = model(["no", "yes"])
        write_fit_report(path, replace(saved, privacy={**saved.privacy, "epsilon": epsilon}))
        (shown,) = re.findall(r"delta for three is 1 in ([\d,]+)", plain(path))
        bound = 1 / int(shown.replace(",", ""))
        assert bound == pytest.approx(3 * math.exp(2 * epsilon) * 1e-6, rel=0.01)
        together = GaussianEvent(1 / (3 * gaussian_mu(epsilon, 1e-6)))
        assert 1e-6 < PrivacyPlan((together,)).delta(3 * epsilon) <= bound


def test_an_evaluation_has_the_owners_words_and_the_budget(tmp_path: Path) -> None:
    path, saved = tmp_path / "report.html", model(["no", "yes"])
    privacy = {"epsilon": 0.2, "delta": 1e-6, "relation": "zero-out", "seeded": False}
    found = {**saved.evaluation, "table": "t.csv", "rows": 21_000, "privacy": privacy}
    write_evaluation_report(path, saved, found)
    assert "Purpose" not in plain(path)
    assert "21,000 rows" in plain(path)
    ledger = Ledger(tmp_path / "ledger.db")
    ledger.create("people", 1.0, 1e-6)
    charge_too_much(ledger, "people")
    said = Statement(purpose="To compare <b>models</b>.")
    write_evaluation_report(path, saved, found, ledger.account("people"), said)
    text = plain(path)
    assert "To compare <b>models</b>." in html.unescape(text)
    assert "open: to be filled in by the data owner" in text
    assert "Beyond the budget of people" in text
