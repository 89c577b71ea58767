"""Privacy cards: valid under their schema, computed again by another program, checked, escaped."""

from __future__ import annotations

import ast
import copy
import json
import math
import re
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

import privagrad as pg
from privagrad.data.models import SavedModel, load_model
from privagrad.privacy.codec import as_json
from privagrad.privacy.events import Event, GaussianEvent, ObjectiveEvent, SelectEvent
from privagrad.privacy.ledger import Ledger
from privagrad.report import card as card_module
from privagrad.report.card import Card, card_of_report, card_text, privacy_card
from privagrad.report.card_check import card_problems, check_card, line_of, read_card
from privagrad.report.card_markdown import card_markdown, markdown_escape
from privagrad.report.card_privacy import COMPARISON
from privagrad.report.card_run import BEYOND, mechanisms
from privagrad.report.card_schema import card_schema, schema_problems
from privagrad.report.statement import Statement, statement_of
from tests.report import recompute
from tests.report.cards import KINDS, ROWS, card_named, charge_too_much, table
from tests.report.conftest import RUDE
from tests.report.test_reports import model

# Several kinds of cards are of fits of the same rows.
pytestmark = pytest.mark.filterwarnings("ignore:2 private fits of the same rows")
ROOT = Path(__file__).parents[2]
VALIDATOR = jsonschema.Draft202012Validator(card_schema())
FULL = statement_of(
    {
        told.name: [f"{told.name} <b>|"] if told.metadata["kind"] == "list"
        else told.metadata["options"][0] if told.metadata["kind"] == "choice"
        else "2026-02-03" if told.name == "publication_date" else f"The {told.name}."
        for told in fields(Statement)
    }
)  # fmt: skip


def fitted(classes: list[str] | None = None) -> SavedModel:
    """A model whose epsilon is that of its events."""
    made = model(classes)
    plan = pg.PrivacyPlan((GaussianEvent(9.0, purpose="moments"), GaussianEvent(90.0, 100)))
    cost = {"epsilon": plan.epsilon(1e-6), "events": [as_json(event) for event in plan.events]}
    return replace(made, privacy={**made.privacy, **cost, "sampling": "all rows in every step"})


def written(path: Path, card: Card) -> Path:
    (path / "card.json").write_text(card_text(card), encoding="utf-8")
    return path / "card.json"


def places(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    yield path
    if isinstance(value, dict | list):
        parts = value.items() if isinstance(value, dict) else enumerate(value)
        for name, inner in parts:
            yield from places(inner, (*path, name))


def at(card: Any, path: tuple[str | int, ...]) -> Any:
    for step in path:
        card = card[step]
    return card


def changed(card: Card, path: tuple[str | int, ...], value: Any) -> Card:
    other = copy.deepcopy(card)
    at(other, path[:-1])[path[-1]] = value
    return other


@pytest.mark.parametrize("kind", KINDS)
def test_cards_are_valid_under_their_schema(kind: str) -> None:
    card = json.loads(card_text(card_named(kind)))
    assert list(VALIDATOR.iter_errors(card)) == []
    assert card_problems(card) == []
    assert card["guarantee"]["private"] == (kind not in ("seeded", "not private"))


def test_the_schema_is_one_and_refuses_unknown_fields_everywhere() -> None:
    VALIDATOR.check_schema(card_schema())
    for place in places(card_schema()):
        part = at(card_schema(), place)
        if isinstance(part, dict) and part.get("type") == "object":
            assert part["additionalProperties"] is False, place
            # Only events of correlated noise have bands: cards without them stay valid.
            always = [name for name in part["properties"] if name != "bands"]
            assert always == part["required"], place
            assert part["description"], place


def test_the_schema_describes_every_field_of_every_event() -> None:
    definitions = card_schema()["$defs"]
    kinds = {"gaussian_event": GaussianEvent, "objective_event": ObjectiveEvent,
             "select_event": SelectEvent}  # fmt: skip
    for name, kind in kinds.items():
        told = definitions[name]["properties"]
        assert list(told) == ["kind", *(f.name for f in fields(kind))]
        assert all(len(part["description"]) > 8 for part in told.values())
    inner, outer = definitions["inner_event"], definitions["gaussian_event"]
    assert inner["properties"] == {k: v for k, v in outer["properties"].items() if k != "kind"}


def test_the_schema_asks_for_every_field_of_a_statement() -> None:
    told = card_schema()["properties"]["statement"]["properties"]
    assert list(told) == [field.name for field in fields(Statement)]
    assert [part["description"] for part in told.values()] == [
        field.metadata["ask"] for field in fields(Statement)
    ]


def test_our_check_of_the_schema_finds_what_another_validator_finds() -> None:
    values: tuple[Any, ...] = (None, "", -1, 0.5, True, [], {}, "x" * 3, ["x"])
    number = 0
    for kind in ("charged", "search"):
        card = json.loads(card_text(card_named(kind)))
        for place in places(card):
            # All entries of a list have one schema; of a search only its events are new.
            if not place or place.count(0) < sum(isinstance(step, int) for step in place):
                continue
            if kind == "search" and place[0] != "native":
                continue
            number += 1
            other = changed(card, place, values[number % len(values)])
            assert (not schema_problems(other)) == VALIDATOR.is_valid(other), place
    assert number > 150


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "not private"])
def test_another_program_computes_the_same_epsilon_from_the_card_alone(kind: str) -> None:
    card = json.loads(card_text(card_named(kind)))
    stated = card["guarantee"]["epsilon"]
    assert recompute.epsilon_of_card(card) == pytest.approx(stated, rel=recompute.TOLERANCE)
    other = next(one for one in card["native"]["epsilon_at"] if one["delta"] == 1e-4)
    again = recompute.epsilon_of_card(card, 1e-4)
    assert again == pytest.approx(other["epsilon"], rel=recompute.TOLERANCE)


def test_the_other_program_reads_the_card_alone() -> None:
    tree = ast.parse(Path(str(recompute.__file__)).read_text())
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import)
             for alias in node.names}  # fmt: skip
    names |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert not any(name.startswith("privagrad") for name in names)
    assert any(name.startswith("dp_accounting") for name in names)


@pytest.mark.parametrize(
    ("kind", "place", "value"),
    [
        ("two classes", ("native", "events", 0, "noise_multiplier"), 8.0),
        ("two classes", ("native", "events", -1, "count"), 130),
        ("poisson", ("native", "events", -1, "batch_size"), 60),
        ("poisson", ("native", "events", -1, "n_examples"), 1500),
        ("poisson", ("native", "events", -1, "sampling"), None),
        ("random allocation", ("native", "events", -1, "count"), 160),
        ("random allocation", ("native", "events", -1, "noise_multiplier"), 3.0),
        ("random allocation", ("native", "events", -1, "sampling"), None),
        ("without replacement", ("native", "events", -1, "count"), 150),
        ("with replacement", ("native", "events", -1, "sampling"), "without_replacement"),
        ("objective", ("native", "events", 0, "log_volume"), 0.3),
        ("search", ("native", "events", 0, "mean"), 30.0),
        ("search", ("native", "events", 0, "events", -1, "noise_multiplier"), 2.0),
        ("leak", ("native", "events", 0, "leak"), 9e-7),
        ("charged", ("guarantee", "delta"), 1e-9),
    ],
)
def test_a_changed_event_changes_what_both_programs_compute(
    kind: str, place: tuple[str | int, ...], value: Any
) -> None:
    card = changed(json.loads(card_text(card_named(kind))), place, value)
    stated = card["guarantee"]["epsilon"]
    assert abs(recompute.epsilon_of_card(card) / stated - 1) > 2 * recompute.TOLERANCE
    assert any(where[0] in ("guarantee", "native") for where, _ in card_problems(card))


NUMBERS = [
    ("guarantee", "epsilon"), ("native", "epsilon_at", 3, "epsilon"), ("native", "gaussian", "mu"),
    ("native", "events", 2, "noise_multiplier"), ("guarantee", "delta"), ("guarantee", "rows"),
    ("ledger", "account", "spent"), ("ledger", "account", "left"),
    ("ledger", "account", "runs", 0, "events", 0, "noise_multiplier"),
]  # fmt: skip


@pytest.mark.parametrize("place", NUMBERS, ids=str)
def test_a_changed_number_is_found_with_its_line(
    place: tuple[str | int, ...], tmp_path: Path
) -> None:
    card = card_named("charged")
    assert check_card(written(tmp_path, card)) == []
    wrong = changed(card, place, 3 * at(card, place))
    path = written(tmp_path, wrong)
    findings = check_card(path)
    lines = path.read_text().splitlines()
    assert findings
    for finding in findings:
        name = finding.pointer.split("/")[-1]
        assert f'"{name}"' in lines[finding.line - 1] or name.isdigit(), finding
    if "events" not in place and "delta" not in place:
        pointer = "".join(f"/{step}" for step in place)
        assert pointer in [finding.pointer for finding in findings]
    with pytest.raises(ValueError, match=r"Expected a privacy card in card\.json, found: line \d+"):
        read_card(path)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("guarantee", "private"), False),
        (("guarantee", "verified"), False),
        (("guarantee", "words"), "Everything is safe."),
        (("guarantee", "remarks"), ["Fine."]),
        (("guarantee", "stated_epsilon"), 0.01),
        (("neighbours", "relation"), "replace-one"),
        (("noise", "seeded"), True),
        (("sampling", "scheme"), "poisson"),
        (("unit", "level"), "user"),
        (("native", "unprotected"), True),
        (("accountant", "name"), "RDP (dp-accounting)"),
        (("questions", 6, "status"), "stated by the owner"),
        (("product", "rows"), 77),
        (("statement", "publication_date"), "2026-02-31"),
        (("trust",), ["Nobody sees the rows."]),
        (("side_channels", 1, "status"), "Closed."),
        (("not_private", 0, "status"), "There are none."),
        (("mechanism", "mechanisms", 0, "proof"), "trust us"),
        (("mechanism", "algorithm", "steps"), 3),
        (("mechanism", "algorithm", "batch_size"), 3),
        (("utility", "effects"), "None."),
        (("ledger", "charged"), False),
        (("ledger", "words"), "Nothing was spent."),
        (("ledger", "query_model"), "One run."),
        (("ledger", "when_used_up"), "Nothing."),
        (("ledger", "run"), "0123456789ab"),
        (("ledger", "account", "runs", 0, "this_run"), True),
        (("ledger", "account", "runs", 1, "this_run"), False),
    ],
    ids=str,
)
def test_a_changed_fact_is_found(place: tuple[str | int, ...], value: Any) -> None:
    assert card_problems(changed(card_named("charged"), place, value))


def test_the_run_of_the_ledger_must_have_the_releases_of_the_card() -> None:
    """Whoever writes all numbers of a card anew must also write the history of the budget."""
    card = copy.deepcopy(card_named("charged"))
    runs = card["ledger"]["account"]["runs"]
    (mine,) = [run for run in runs if run["this_run"]]
    others = [run for run in runs if run is not mine]
    mine["events"][0], others[0]["events"][0] = others[0]["events"][1], mine["events"][1]
    problems = card_problems(card)
    assert any(where[-1] == "events" for where, _ in problems)


def test_a_delta_cannot_be_made_to_look_small_by_fewer_rows() -> None:
    card = copy.deepcopy(card_named("two classes"))
    card["guarantee"]["rows"] = card["product"]["rows"] = 20
    assert (("guarantee", "rows"), "expected at least 2000, found 20") in card_problems(card)
    plan = pg.PrivacyPlan((GaussianEvent(9.0, 100, "poisson", 2000, 20, "gradients"),))
    with pytest.raises(ValueError, match="at least the 2000 rows that were sampled, found rows=20"):
        card_of_report(plan.report(1e-6, seeded=False), rows=20)


@pytest.mark.parametrize("place", [("product", "rows"), ("native", "events", 0, "count")])
def test_numbers_beyond_double_precision_are_findings(
    place: tuple[str | int, ...], tmp_path: Path
) -> None:
    path = tmp_path / "card.json"
    path.write_text(json.dumps(changed(card_named("ridge"), place, 10**400)))
    assert "expected integer" in str(check_card(path)[0])


def test_releases_that_cannot_be_composed_in_time_are_findings() -> None:
    for in_the_budget in (False, True):
        card = copy.deepcopy(card_named("charged"))
        where = card["ledger"]["account"]["runs"][0] if in_the_budget else card["native"]
        where["events"] = [{**where["events"][0], "sampling": "poisson", "count": 10**14}]
        assert any("sampled releases, found 100,000" in told for _, told in card_problems(card))


def test_findings_show_names_without_their_control_characters(tmp_path: Path) -> None:
    path = written(tmp_path, {**card_named("ridge"), "\x1b[2J\u202eevil": 1})
    (finding,) = check_card(path)
    assert "\x1b" not in str(finding)
    assert "\u202e" not in str(finding)
    str(finding).encode("ascii")


def test_a_card_that_is_not_verified_says_so_in_the_guarantee() -> None:
    plan = pg.PrivacyPlan((GaussianEvent(9.0, 100, "poisson", 2000, 20, "gradients"),))
    card = card_of_report(plan.report(1e-6, seeded=False, verified=False))
    assert card["guarantee"]["words"].startswith("Only if each example's gradient")
    assert not card_problems(card)


@pytest.mark.parametrize("kind", ["not private", "seeded"])
def test_a_card_of_a_run_without_privacy_names_no_protected_unit(kind: str) -> None:
    assert card_named(kind)["unit"]["words"].startswith("Nothing is protected")
    assert card_named("ridge")["unit"]["words"].startswith("One row")


def test_figures_that_noise_has_left_without_a_value_answer_nothing() -> None:
    card = copy.deepcopy(card_named("two classes"))
    (place,) = [i for i, q in enumerate(card["questions"]) if "How good" in q["question"]]
    assert card["questions"][place]["status"] == "answered by the run"
    for figure in card["utility"]["figures"]:
        figure["value"] = None
    assert ("questions", place, "status") in [where for where, _ in card_problems(card)]


def test_an_algorithm_is_named_by_its_releases() -> None:
    made: dict[str, Event] = {
        "noisy gradients": GaussianEvent(9.0, 100, "poisson", 2000, 20, "gradients"),
        "minimiser of an objective with noise": ObjectiveEvent(5.0, 0.2),
        "sums with noise": GaussianEvent(9.0),
    }
    for name, event in made.items():
        report = pg.PrivacyPlan((event,)).report(1e-6, seeded=False)
        assert card_of_report(report)["mechanism"]["algorithm"]["name"] == name


def test_samples_of_other_releases_than_the_training_are_not_denied() -> None:
    event = GaussianEvent(9.0, 100, "poisson", 2000, 20, "statistics")
    card = card_of_report(pg.PrivacyPlan((event,)).report(1e-6, seeded=False))
    assert "all rows" not in card["sampling"]["words"]
    assert not card_problems(card)


def test_a_budget_that_is_exceeded_is_named_first(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.db")
    ledger.create("people", 1.0, 1e-6)
    report = pg.PrivacyPlan((GaussianEvent(9.0),)).report(1e-6, seeded=False)
    within = card_of_report(report, account=ledger.account("people"))
    assert BEYOND not in card_markdown(within)
    charge_too_much(ledger, "people")
    card = card_of_report(report, account=ledger.account("people"))
    assert BEYOND in card["ledger"]["words"]
    assert card_markdown(card).index(BEYOND) < card_markdown(card).index("## What is open")
    assert not card_problems(card)


def test_a_question_cannot_be_left_out() -> None:
    card = card_named("charged")
    assert card_problems({**card, "questions": card["questions"][:-1]})


def test_a_card_of_a_newer_version_is_refused(tmp_path: Path) -> None:
    for read in (read_card, check_card):
        with pytest.raises(ValueError, match="version 2: a newer privagrad wrote it"):
            read(written(tmp_path, {**card_named("ridge"), "version": 2, "more": 1}))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[]", "Expected a card with the format"),
        ('{"format": "other"}', "Expected a card with the format"),
        ('{"a": NaN}', "NaN, which is no JSON"),
        ('{"a": 1, "a": 2}', 'the name "a" twice'),
        ("{", "Expected JSON in card.json"),
        ("[" * 100_000, "Expected JSON in card.json"),
    ],
)
def test_other_files_are_refused(text: str, expected: str, tmp_path: Path) -> None:
    (tmp_path / "card.json").write_text(text)
    with pytest.raises(ValueError, match=expected):
        check_card(tmp_path / "card.json")


def test_lines_are_found_in_json_of_any_layout() -> None:
    value = {"a": [1, {"b c": "x\ny", "d": [[], {}]}], "e": None}
    for text in (json.dumps(value), json.dumps(value, indent=3), '{"a":\n[1\n,{"b c":"","d":\n[[],'
                 '{}\n]}],"e"\n:null}'):  # fmt: skip
        lines = text.splitlines()
        for place in places(json.loads(text)):
            beginning = lines[line_of(text, place) - 1]
            inner = at(json.loads(text), place)
            assert json.dumps(inner)[:1] in beginning, (text, place)


def test_a_card_reads_back_as_it_was_written(tmp_path: Path) -> None:
    card = card_named("charged")
    assert read_card(written(tmp_path, card)) == json.loads(card_text(card))


def test_mu_is_exact_where_all_rows_are_used_and_a_bound_or_unknown_elsewhere() -> None:
    gaussian = {kind: card_named(kind)["native"]["gaussian"] for kind in KINDS}
    events = card_named("two classes")["native"]["events"]
    square = sum(event["count"] / event["noise_multiplier"] ** 2 for event in events)
    assert gaussian["two classes"]["mu"] == pytest.approx(math.sqrt(square))
    assert gaussian["two classes"]["is"] == "exact"
    assert gaussian["poisson"]["is"] == gaussian["without replacement"]["is"] == "upper bound"
    for kind in ("with replacement", "objective", "search", "leak", "not private"):
        assert (gaussian[kind]["mu"], gaussian[kind]["is"]) == (None, "unknown")
    (event,) = card_named("without replacement")["native"]["events"]
    replaced = 2 * math.sqrt(event["count"]) / event["noise_multiplier"]
    assert gaussian["without replacement"]["mu"] == pytest.approx(replaced)
    for kind in ("poisson", "random allocation"):
        bound = recompute.closed_form(gaussian[kind]["mu"], 1e-6)
        assert card_named(kind)["guarantee"]["epsilon"] < bound
    (event,) = card_named("random allocation")["native"]["events"]
    epochs = event["count"] / 40
    mu = math.sqrt(epochs) / event["noise_multiplier"]
    assert gaussian["random allocation"]["mu"] == pytest.approx(mu)


def test_epsilon_above_one_and_a_large_delta_are_remarked() -> None:
    def remarks(delta: float, rows: int | None, noise: float = 9.0, verified: bool = True) -> str:
        plan = pg.PrivacyPlan((GaussianEvent(noise),))
        report = plan.report(delta, seeded=False, verified=verified)
        return " ".join(card_of_report(report, rows=rows)["guarantee"]["remarks"])

    assert remarks(1e-6, ROWS) == ""
    assert "above 1" in remarks(1e-6, ROWS, noise=1.0)
    assert "not below 1 / n" in remarks(1e-3, ROWS)
    assert "not far below 1 / n" in remarks(1e-4, ROWS)
    assert "see that delta is far below" in remarks(1e-6, None)
    assert "Not verified" in remarks(1e-6, ROWS, verified=False)


def test_every_epsilon_stands_beside_what_a_comparison_needs() -> None:
    card = card_named("charged")
    assert card["guarantee"]["comparison"] == card["native"]["comparison"] == COMPARISON
    shown = card_markdown(card)
    for section in shown.split("\n## "):
        if "psilon |" in section:
            assert COMPARISON in section, section


@pytest.mark.parametrize("kind", KINDS)
def test_every_question_is_answered_stated_or_open(kind: str) -> None:
    card = card_named(kind)
    for entry in card["questions"]:
        found = [at(card, tuple(pointer.split("/")[1:])) for pointer in entry["where"]]
        silent = [value in (None, [], {}, "") for value in found]
        assert any(silent) == (entry["status"] == "open"), entry
    shown = card_markdown(card)
    for entry in card["questions"]:
        count = shown.count(markdown_escape(entry["question"]))
        assert count == (2 if entry["status"] == "open" else 1), entry


def test_a_full_statement_leaves_no_question_of_the_owner_open() -> None:
    told = card_of_report(pg.PrivacyPlan((GaussianEvent(9.0),)).report(1e-6, seeded=False),
                          rows=ROWS, statement=FULL)  # fmt: skip
    left = [entry for entry in told["questions"] if entry["status"] == "open"]
    assert {place.split("/")[1] for entry in left for place in entry["where"]} <= {
        "ledger", "utility"
    }  # fmt: skip
    assert told["statement"]["curators"] == ["curators <b>|"]
    assert card_problems(told) == []
    assert "curators &lt;b&gt;\\|" in card_markdown(told)


def test_statements_are_read_from_their_file(tmp_path: Path) -> None:
    (tmp_path / "statement.toml").write_text('purpose = "To plan beds."')
    estimator = pg.PrivateRidge(epsilon=1.0, delta=1e-6).fit(*table(0))
    card = estimator.card(tmp_path / "statement.toml")
    assert card["statement"]["purpose"] == "To plan beds."
    entry = next(q for q in card["questions"] if "used for" in q["question"])
    assert entry["status"] == "stated by the owner"


def test_the_budget_is_that_of_the_ledger() -> None:
    ledger = card_named("charged")["ledger"]
    account = ledger["account"]
    assert (account["epsilon"], account["delta"], len(account["runs"])) == (3.0, 1e-6, 2)
    assert [run["this_run"] for run in account["runs"]] == [False, True]
    assert 1.0 < account["spent"] < 2.0
    assert account["left"] == pytest.approx(3.0 - account["spent"])
    assert card_named("two classes")["ledger"]["account"] is None


def test_no_user_and_no_note_of_the_ledger_is_in_a_card(tmp_path: Path) -> None:
    ledger = pg.privacy.ledger.Ledger(tmp_path / "l.db")
    ledger.create("stays", 3.0, 1e-6)
    run = ledger.reserve("stays", [GaussianEvent(9.0)], "secret note")
    saved = replace(fitted(), made={**fitted().made, "dataset": "stays", "run": run})
    account = ledger.account("stays")
    text = card_text(privacy_card(saved, account=account))
    assert run in text
    assert "secret note" not in text
    assert f'"{account.runs[0].user}"' not in text
    with pytest.raises(ValueError, match="give the ledger of the fit"):
        privacy_card(fitted(), account=account)


def test_exact_figures_stay_out_of_the_card() -> None:
    exact = {"table": "t", "rows": 3, "figures": {"accuracy": {"value": 0.123456, "noise": 0.0}}}
    saved = fitted(["no", "yes"])
    card = privacy_card(replace(saved, evaluation={**saved.evaluation, "test": exact}))
    assert "0.123456" not in card_text(card)
    assert "remove them before it is published" in card["not_private"][0]["status"]
    assert len(card["utility"]["figures"]) > 3
    assert card_named("seeded")["utility"]["figures"] == []
    assert card_named("not private")["utility"]["figures"] == []


def test_a_model_file_whose_epsilon_is_too_small_gets_no_card() -> None:
    saved = fitted()
    events = [as_json(GaussianEvent(2.0))]
    with pytest.raises(ValueError, match="No card is made of it"):
        privacy_card(replace(saved, privacy={**saved.privacy, "events": events}))
    weaker = privacy_card(replace(saved, privacy={**saved.privacy, "epsilon": 50.0}))
    assert weaker["guarantee"]["stated_epsilon"] == 50.0
    assert weaker["guarantee"]["epsilon"] < 50.0
    assert card_problems(weaker) == []


@pytest.mark.parametrize("name", ["people", "libsvm"])
@pytest.mark.parametrize("folder", ["files_0_1_0", "files_before_move"])
def test_models_of_earlier_versions_have_cards(folder: str, name: str) -> None:
    card = privacy_card(load_model(ROOT / "tests" / "golden" / folder / f"{name}.model"))
    assert card_problems(json.loads(card_text(card))) == []
    assert recompute.epsilon_of_card(card) == pytest.approx(
        card["guarantee"]["epsilon"], rel=recompute.TOLERANCE
    )


def test_proofs_and_tests_are_where_the_card_says() -> None:
    seen = set()
    for kind in KINDS:
        for entry in card_named(kind)["mechanism"]["mechanisms"]:
            seen.add(entry["mechanism"].replace("users", "rows"))
            for told in (entry["proof"], entry["tests"]):
                path, _, anchor = told.partition("#")
                text = (ROOT / path).read_text()
                assert not anchor or f"# {anchor.replace('-', ' ')}" in text.lower(), told
    assert len(seen) == 7, "a mechanism that no card here uses"
    assert mechanisms(pg.PrivacyPlan(()).report(1e-6, seeded=False)) == []


def test_hostile_names_stay_text() -> None:
    saved = fitted([*RUDE, "<b>last</b>"])
    rude = "a|b\n# Heading [x](javascript:alert(1)) https://evil.example www.evil.example `c` _e_"
    made = {**saved.made, "table": rude, "dataset": rude}
    public = [rude, *RUDE, *(f"category {i}" for i in range(10_000)), "x" * 10**6]
    privacy = {**saved.privacy, "public": public}
    card = privacy_card(replace(saved, made=made, privacy=privacy))
    text, shown = card_text(card), card_markdown(card)
    assert len(text) < 60_000
    assert card_problems(json.loads(text)) == []
    assert not any(c in text for c in "\u202e\x00\x1b\x7f")
    assert all(line.count("|") - line.count("\\|") in (0, 3, 4, 5) for line in shown.splitlines())
    assert [line for line in shown.splitlines() if "Heading" in line and line[0] == "#"] == []
    for forbidden in ("<script", "<img", "https://evil", "www.evil", "`c`", " _e_"):
        assert forbidden not in shown, forbidden
    assert re.search(r"(?<!\\)\]\(", shown) is None
    assert "and 9957 more" in shown or "more" in shown


def test_purposes_of_releases_are_text_in_one_line() -> None:
    inner = GaussianEvent(9.0, purpose="a\n# b")
    events = (GaussianEvent(9.0, purpose="\x1b[2J\ud800\n| x"), SelectEvent((inner,), 3.0, "\x00"))
    card = card_of_report(pg.PrivacyPlan(events).report(1e-6, seeded=False), rows=ROWS)
    assert card_problems(json.loads(card_text(card).encode())) == []
    shown = card_markdown(card)
    assert "\x1b" not in shown
    assert "\x00" not in shown
    assert "\n# b" not in shown


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("- item", "\\- item"), ("1. item", "1\\. item"), ("0.75", "0.75"), ("# x", "\\# x"),
        ("a_b", "a_b"), ("_a_", "\\_a\\_"), ("<a>", "&lt;a&gt;"), ("a@b.c", "a&#64;b.c"),
        ("HTTP://x", "HTTP&#58;//x"), ("a\r\nb", "a b"), ("===", "==\\="), ("$x$", "\\$x\\$"),
    ],
)  # fmt: skip
def test_markdown_shows_texts_as_they_are(text: str, expected: str) -> None:
    assert markdown_escape(text) == expected


def test_numbers_that_are_none_are_strict_json() -> None:
    saved = fitted(["no", "yes"])
    figures = {"accuracy": {"value": math.nan, "noise": math.inf}}
    evaluation = {**saved.evaluation, "figures": figures}
    card = privacy_card(replace(saved, evaluation=evaluation))
    assert card["utility"]["figures"] == [{"name": "accuracy", "value": None, "noise": None}]
    assert card_problems(json.loads(card_text(card))) == []
    assert "not known" in card_markdown(card)
    infinite = card_text(card_named("not private"))
    assert json.loads(infinite)["guarantee"]["epsilon"] == "infinity"
    assert "infinite" in card_markdown(card_named("not private"))


def test_epsilon_at_a_delta_below_the_leaks_is_infinite() -> None:
    at_deltas = {one["delta"]: one["epsilon"] for one in card_named("leak")["native"]["epsilon_at"]}
    assert at_deltas[1e-8] == "infinity"
    assert at_deltas[1e-6] == card_named("leak")["guarantee"]["epsilon"]


def test_the_guarantee_comes_first_in_words() -> None:
    shown = card_markdown(card_named("two classes")).splitlines()
    assert shown[2] == "## The guarantee"
    assert shown[4].startswith("**Private.** Take two tables that differ in one thing: one row")
    seeded = card_markdown(card_named("seeded")).splitlines()
    assert seeded[4].startswith("**NOT PRIVATE.** NOT PRIVATE: the noise was seeded")


def test_the_format_is_stated_once() -> None:
    told = card_schema()["properties"]
    assert told["format"]["const"] == card_module.FORMAT
    assert told["version"]["const"] == card_module.VERSION
