"""The pages of proofs name code and tests that exist, and have the same parts."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted((ROOT / "docs" / "proofs").glob("*.md"))
PROOFS = [page for page in PAGES if page.name != "index.md"]
NAMED = re.compile(r"`((?:src|tests|benchmarks)/[\w/.]+?)(?:::(\w+))?`")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_what_is_named_exists(page: Path) -> None:
    for path, name in NAMED.findall(page.read_text(encoding="utf-8")):
        assert (ROOT / path).exists(), path
        if name:
            assert f"def {name}(" in (ROOT / path).read_text(encoding="utf-8"), name


@pytest.mark.parametrize("page", PROOFS, ids=lambda page: page.stem)
def test_a_page_has_all_parts(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert "**Precondition.**" in text
    titles = re.findall(r"^## (.+)$", text, re.MULTILINE)
    assert titles == ["Mechanism", "Statement", "Proof", "What is idealised", "Guarded by"]
    assert len(NAMED.findall(text)) >= 3
    assert "∎" in text
    assert f"]({page.name})" in (page.parent / "index.md").read_text(encoding="utf-8")
