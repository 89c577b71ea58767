"""`privagrad audit`: bounds as text, JSON and a report; bad input is refused."""

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from privagrad.cli import app


def call(*arguments: str | Path) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["audit", *map(str, arguments)])
    return result.exit_code, result.stdout, result.stderr


def test_json_has_the_claim_and_what_was_measured(tmp_path: Path) -> None:
    page = tmp_path / "audit.html"
    few = ("--draws", "20000", "--confidence", "0.999")
    code, shown, _ = call("-e", "1,4", *few, "--json", "--report", page)
    found = json.loads(shown)
    assert code == 0
    assert {"claimed", "measured", "confidence", "verdict"} <= found.keys()
    assert [one["claimed"] for one in found["audits"]] == pytest.approx([1, 4])
    assert all(one["measured"] <= one["claimed"] for one in found["audits"])
    assert "Claimed and measured" in page.read_text("utf-8")


def test_own_scores(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    included = rng.integers(2, size=500)
    lines = [f"{coin},{score}" for coin, score in zip(included, included * 5.0, strict=True)]
    file = tmp_path / "canaries.csv"
    file.write_text("\n".join(["included,score", *lines]))
    assert call("--scores", file, "-e", "50")[0] == 0
    code, shown, told = call("--scores", file, "-e", "0.5")
    assert code == 1
    assert "VIOLATED" in shown
    assert "only 0.5 is claimed" in shown
    assert "error" in told


@pytest.mark.parametrize(
    ("text", "message"),
    [("score\n1", "columns named included"), ("included,score\n2,1", "0 or 1 as included"),
     ("included,score\n1,high", "a number as score"), ("included,score\n1,2", "at least 10")],
)  # fmt: skip
def test_bad_files_are_refused(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "canaries.csv"
    file.write_text(text)
    code, _, told = call("--scores", file)
    assert code == 2
    assert message in told


def test_a_training(tmp_path: Path) -> None:
    code, shown, _ = call("--steps", "5", "--canaries", "200", "--bound", "test", "--json")
    assert code == 0
    assert "5 steps" in json.loads(shown)["attack"]
    assert call("--steps", "5", "--view", "nothing")[0] == 2


def test_bounds_by_the_curve_of_a_training_and_of_scores(tmp_path: Path) -> None:
    few = ("--steps", "5", "--canaries", "200", "--json")
    found = {}
    for bound in ("guesses", "curve"):
        code, shown, _ = call(*few, "--bound", bound, "--door", "csr", "-e", "4")
        assert code == 0
        found[bound] = json.loads(shown)["claimed"]
    assert found["curve"] == found["guesses"]
    lines = [f"{k % 2},{(k % 2) * (k % 3 > 0)}" for k in range(300)]
    (tmp_path / "s.csv").write_text("included,score\n" + "\n".join(lines))
    told = {}
    for bound in ("guesses", "curve"):
        code, shown, _ = call("--scores", tmp_path / "s.csv", "-e", "9", "--bound", bound, "--json")
        assert code == 0
        told[bound] = json.loads(shown)["measured"]
    assert told["curve"] > told["guesses"] > 0
    assert call("--scores", tmp_path / "s.csv", "--bound", "test")[0] == 2
