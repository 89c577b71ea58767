"""Results of seeded runs are those that were recorded; files of earlier versions stay readable.

PRIVAGRAD_GOLDEN=exact compares to the last bit: on the kind of machine that recorded the numbers,
with OPENBLAS_NUM_THREADS=1, because products of matrices round by the number of threads.
"""

from __future__ import annotations

import json
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
from privagrad.ledger import BudgetError, Ledger

from privagrad.methods import METHODS
from tests.golden import files, runs
from tests.golden.comparison import differences
from tests.golden.convex import LOSS_OF

EXPECTED = runs.expected()


@pytest.mark.parametrize("name", runs.RUNS)
def test_a_seeded_run_gives_the_recorded_result(name: str) -> None:
    assert list(differences(runs.result_of(name), EXPECTED[name])) == []


def test_every_recorded_run_is_made() -> None:
    assert list(runs.RUNS) == list(EXPECTED)


def test_every_method_has_recorded_runs() -> None:
    assert set(LOSS_OF) == set(METHODS)


def test_differences_of_one_part_in_a_million_are_seen() -> None:
    expected: dict[str, Any] = {"a": [1.0, 0.0], "n": 3, "text": "epsilon 1.234", "inf": [1e999]}
    assert list(differences(expected, expected, exact=True)) == []
    for key, value, seen, seen_exactly in (
        ("a", [1.0, 1e-5], True, True),
        ("a", [1.0, 1e-9], False, True),
        ("a", [1.0, -0.0], False, True),
        ("a", [1.0], True, True),
        ("a", [1.0, float("nan")], True, True),
        ("n", 4, True, True),
        ("text", "epsilon 1.2341", False, True),
        ("text", "epsilon 1.3", True, True),
        ("text", "delta 1.234", True, True),
        ("inf", [1e308], True, True),
    ):
        found = expected | {key: value}
        assert bool(list(differences(found, expected, exact=False))) == seen, (key, value)
        assert bool(list(differences(found, expected, exact=True))) == seen_exactly, (key, value)


@pytest.fixture(params=files.FOLDERS)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return Path(copytree(files.HERE / request.param, tmp_path / request.param))


def said(folder: Path, name: str = "said_before_move.json") -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / name).read_text(encoding="utf-8"))
    return found


def test_files_of_earlier_versions_say_what_they_said_before(folder: Path) -> None:
    found = json.loads(json.dumps(files.read(folder)))
    assert list(differences(found, said(folder))) == []


def test_ledgers_never_say_less_than_before(folder: Path) -> None:
    ledger, before = Ledger(folder / files.LEDGER), said(folder)["ledger"]
    assert sorted(ledger.names()) == sorted(before)
    for name, told in before.items():
        assert ledger.account(name).spent >= told["spent"] * (1 - 1e-9)


def test_files_of_version_0_1_0_say_what_that_version_said(tmp_path: Path) -> None:
    """Models and predictions are the same; what was spent may be bounded a little more tightly."""
    folder = Path(copytree(files.HERE / "files_0_1_0", tmp_path / "files"))
    then, now = said(folder, "said_by_writer.json"), json.loads(json.dumps(files.read(folder)))
    for name, told in then["models"].items():
        assert told.pop("relation") == "add-or-remove-one"
        assert now["models"][name].pop("relation") == "zero-out"
    assert list(differences(now["models"], then["models"])) == []
    for kind, told in then["checkpoints"].items():
        found = now["checkpoints"][kind]["loaded"]
        assert found["epsilon"] == pytest.approx(told["loaded"].pop("epsilon"), rel=1e-6)
        del found["epsilon"]
        assert list(differences(found, told["loaded"])) == []
    for name, told in then["ledger"].items():
        found = now["ledger"][name]
        # Batches of fixed size are counted 1 % lower since, adaptive runs a few percent higher.
        assert 0.99 * told["spent"] <= found["spent"] <= 1.05 * told["spent"]
        for key in ("epsilon", "delta", "fingerprint", "states"):
            assert found[key] == told[key]
        for run, former in zip(found["runs"], told["runs"], strict=True):
            assert run["alone"] == pytest.approx(former["alone"], rel=0.01)
            for key in ("name", "state", "note", "at", "releases"):
                assert run[key] == former[key]


def test_a_further_run_is_charged_to_an_opened_ledger(folder: Path) -> None:
    ledger, before = Ledger(folder / files.LEDGER), said(folder)["ledger"]
    for name, told in before.items():
        event = files.FIXED if name == "fixed batches" else files.QUERY
        ledger.finish(ledger.reserve(name, [event], "a further run"), [event])
        account = Ledger(folder / files.LEDGER).account(name)
        assert account.spent == pytest.approx(told["spent with one more"], rel=1e-9)
        assert account.spent > told["spent"]
        assert [run.name for run in account.runs[:-1]] == [run["name"] for run in told["runs"]]
        with pytest.raises(BudgetError, match="would bring"):
            ledger.reserve(name, [event] * 10_000, "too much")


def test_a_reservation_of_an_earlier_version_can_be_finished(folder: Path) -> None:
    ledger = Ledger(folder / files.LEDGER)
    before = ledger.account("steps")
    [open_run] = [run for run in before.runs if run.state == "reserved"]
    ledger.finish(open_run.name, open_run.events)
    assert ledger.account("steps").spent == before.spent


def test_the_content_of_an_earlier_budget_has_no_second_one(folder: Path) -> None:
    with pytest.raises(ValueError, match="the same content"):
        Ledger(folder / files.LEDGER).create("again", 1.0, 1e-5, "sha256:steps")
