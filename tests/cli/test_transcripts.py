"""The session of docs/tutorials/hospital.md, carried out: its errors and plans word for word."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from benchmarks._people import write_session
from typer.testing import CliRunner

from privagrad.cli import app

PAGE = Path(__file__).parents[2] / "docs" / "tutorials" / "hospital.md"
BLOCK = re.compile(r"^```(console|diff)\n(.*?)^```", re.DOTALL | re.MULTILINE)
EXACT = ("error:", "wrote ", "created ", "Planned ", "Budget ", "note: Ignored", "No runs yet")
"""What lines that noise does not change begin with, or hold."""


def steps(page: str) -> Iterator[tuple[str, str]]:
    """Commands with what they print, and edits of the schema, from top to bottom."""
    for kind, text in BLOCK.findall(page):
        if kind == "diff":
            yield "", text
            continue
        for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
            command, _, printed = part.replace("\\\n", " ").partition("\n")
            yield " ".join(command.split()), printed


def edit(file: Path, changes: str) -> None:
    """Apply a diff: a line of context is looked for from the last place on."""
    lines, at = file.read_text(encoding="utf-8").splitlines(), 0
    for change in changes.splitlines():
        sign, line = change[:1], change[1:]
        if sign == "+":
            lines.insert(at, line)
            at += 1
        elif sign in (" ", "-"):
            at = lines.index(line, at)
            del lines[at : at + (sign == "-")]
            at += sign == " "
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")


def carry_out(command: str) -> str:
    """What a command prints; commands of others than privagrad are skipped."""
    name, *arguments = shlex.split(command)
    if name != "privagrad":
        return ""
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code in (0, 2, 3), (command, done.output, done.exception)
    return done.output


def words(text: str) -> str:
    return " ".join(text.split())


@pytest.fixture
def folder(tmp_path, monkeypatch):
    write_session(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PRIVAGRAD_LEDGER", "ledger.db")
    monkeypatch.setenv("COLUMNS", "100")
    return tmp_path


def test_the_session_with_a_hospital_table_is_as_shown(folder):
    ran = 0
    for command, shown in steps(PAGE.read_text(encoding="utf-8")):
        if not command:
            edit(folder / "schema.toml", shown)
            continue
        printed = carry_out(command)
        ran += bool(printed)
        if "error:" in shown:
            assert words(printed) == words(shown), command
        for line in shown.splitlines():
            if any(mark in line for mark in EXACT) and "error:" not in line:
                assert words(line) in words(printed), command
    assert ran > 15
