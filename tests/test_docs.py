"""The documentation: links lead somewhere, commands have the options they are shown with."""

import re
import shlex
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from privagrad.cli import app

ROOT = Path(__file__).parent.parent
DOCS = sorted((ROOT / "docs").rglob("*.md"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS]
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```\w*\n(.*?)^```", re.DOTALL | re.MULTILINE)


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def prose(page: Path) -> str:
    return FENCE.sub("", page.read_text(encoding="utf-8"))


def anchors(page: Path) -> set[str]:
    """Anchors of a page: its headings, as Python-Markdown names them, and documented names."""
    found = set(re.findall(r"^::: (\S+)$", prose(page), re.MULTILINE))
    for title in re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE):
        plain = unicodedata.normalize("NFKD", title).encode("ascii", "ignore").decode()
        plain = re.sub(r"[^\w\s-]", "", plain).strip().lower()
        found.add(re.sub(r"[-\s]+", "-", plain))
    return found


def links() -> Iterator[Any]:
    for page in PAGES:
        for target in LINK.findall(prose(page)):
            if not target.startswith(("https://", "http://")):
                yield pytest.param(page, target, id=f"{name(page)}-{target}")


@pytest.mark.parametrize(("page", "target"), list(links()))
def test_links_lead_somewhere(page: Path, target: str) -> None:
    path, _, anchor = target.partition("#")
    there = (page.parent / path).resolve() if path else page
    assert there.exists()
    if anchor and there.suffix == ".md":
        assert anchor in anchors(there)


def test_all_pages_are_in_the_navigation() -> None:
    listed = set(re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    assert listed == {p.relative_to(ROOT / "docs").as_posix() for p in DOCS}


def test_tables_of_rooms_and_files_name_what_exists() -> None:
    source = ROOT / "src" / "privagrad"
    named = re.findall(r"`([\w/]+\.py)`", prose(ROOT / "docs" / "notation.md"))
    for page in (ROOT / "CONTRIBUTING.md", ROOT / "docs" / "architecture.md"):
        for first in re.findall(r"^\| (`[^|]+) \|", prose(page), re.MULTILINE):
            named += re.findall(r"`(\w[\w/]*/)`", first)
    assert len(named) > 60
    assert [path for path in dict.fromkeys(named) if not (source / path).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_code_imports_from_the_real_paths(page: Path) -> None:
    former = [path.stem for path in (ROOT / "src" / "privagrad" / "_former_paths").glob("*.py")]
    code = "\n".join(FENCE.findall(page.read_text(encoding="utf-8")))
    assert re.findall(rf"privagrad\.(?:{'|'.join(former)})\b", code) == []


def commands() -> Iterator[Any]:
    """Every `privagrad ...` in blocks of code and between backticks."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        blocks = "\n".join(FENCE.findall(text)).replace("\\\n", " ")
        shown = re.findall(r"^(?:\$ )?(?:\.venv/bin/)?privagrad (.+)$", blocks, re.MULTILINE)
        shown += re.findall(r"`privagrad\s([^`]+)`", prose(page))
        for line in dict.fromkeys(" ".join(part.split()) for part in shown):
            yield pytest.param(line, id=f"{name(page)}-{line}")


@pytest.mark.parametrize("line", list(commands()))
def test_commands_have_the_options_they_are_shown_with(line: str) -> None:
    command: Any = get_command(app)
    words = shlex.split(line, comments=True)
    while hasattr(command, "commands") and words and not words[0].startswith("-"):
        if words[0].isupper():  # stands for any of them
            return
        command = command.commands[words.pop(0)]
    known = {"--help"}
    for parameter in command.params:
        known |= {*parameter.opts, *parameter.secondary_opts}
    given = {word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)}
    assert given <= known


def test_there_are_links_and_commands() -> None:
    assert len(list(links())) > 40
    assert len(list(commands())) > 30
