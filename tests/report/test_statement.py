"""The data owner's own statement: every field is optional, and nothing else is taken."""

import json
import tomllib
from dataclasses import fields
from pathlib import Path

import pytest
import yaml

from privagrad.report.statement import (
    Statement,
    read_statement,
    statement_of,
    statement_template,
)

NAMES = [told.name for told in fields(Statement)]


def written(path: Path, text: str) -> Path:
    (path / "statement.toml").write_text(text, encoding="utf-8")
    return path / "statement.toml"


def test_the_template_asks_for_every_field_and_leaves_all_of_them_open(tmp_path: Path) -> None:
    template = statement_template()
    assert list(tomllib.loads(template)) == NAMES
    assert read_statement(written(tmp_path, template)) == Statement()
    assert Statement().open_fields == tuple(NAMES)
    lines = template.splitlines()
    for number, line in enumerate(lines):
        if line and not line.startswith("#"):
            assert lines[number - 1].startswith("# "), line


def test_what_is_filled_in_is_kept_without_blanks_around_it(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        'name = "  Stays  "\ncurators = ["A clinic", ""]\npublication_date = 2026-02-03\n'
        'sector = "Healthcare"\nregion = "Zürich"\npurpose = "line\\none"\n',
    )
    found = read_statement(path)
    assert (found.name, found.curators, found.region) == ("Stays", ("A clinic",), "Zürich")
    assert (found.publication_date, found.sector) == ("2026-02-03", "Healthcare")
    assert found.values()["curators"] == ["A clinic"]
    assert found.values()["contact"] is None
    assert len(found.open_fields) == len(NAMES) - 6
    assert statement_of(found.values()) == found


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ('pupose = "x"', r"'pupose' \(did you mean 'purpose'\?\)\. The fields are name, "),
        ("purpose = 3", "purpose must be a text in quotes, found int '3'"),
        ("purpose = []", "purpose must be a text in quotes, found a list"),
        ('curators = "x"', "curators must be a list of texts, found str 'x'"),
        ("curators = [1]", "curators must be a list of texts, found a list"),
        ('sector = "health"', "sector must be one of Technology, Healthcare"),
        ('publication_date = "3 May"', "publication_date must be a day as YYYY-MM-DD"),
        ('publication_date = "2026-02-30"', "publication_date must be a day as YYYY-MM-DD"),
        ("publication_date = 2026-02-03T10:00:00", "publication_date must be a text"),
        ('purpose = "a\\u202eb"', "purpose has characters that cannot be seen"),
        ('purpose = "a\\u0000b"', "purpose has characters that cannot be seen"),
        ("[purpose]\nx = 1", "purpose must be a text in quotes, found a table"),
        ("purpose = ", "Expected TOML in statement.toml"),
    ],
)
def test_anything_else_is_refused(tmp_path: Path, line: str, expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        read_statement(written(tmp_path, line))


def test_a_file_that_is_not_there_is_named_with_what_writes_it(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="privagrad card --template"):
        read_statement(tmp_path / "none.toml")


def test_all_problems_are_named_at_once() -> None:
    with pytest.raises(ValueError, match=r"name must be.*links must be"):
        Statement(name=3, links="x")  # type: ignore[arg-type]


def test_every_text_that_is_taken_is_text_in_yaml() -> None:
    """YAML 1.1 has no control characters, no surrogates, no U+FFFE and no U+FFFF."""
    for code in [*range(0x20), *range(0x7F, 0xA0), 0xD800, 0xFEFF, 0xFFFE, 0xFFFF]:
        text = f"a{chr(code)}b"
        try:
            taken = Statement(name=text).name
        except ValueError:
            continue
        assert yaml.safe_load(json.dumps(taken, ensure_ascii=False)) == taken
