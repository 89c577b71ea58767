"""A browser, and a page with every block, with names nobody should trust."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal, NoReturn

import numpy as np
import pytest

from privagrad.report.charts import Kind, Series, bar_chart, gauge, line_chart
from privagrad.report.page import Banner, Block, Card, Facts, Figure, Items, Part, Table, Text

if TYPE_CHECKING:
    from playwright.sync_api import Browser

RUDE = [
    "<script>window.evil = 1</script>",
    "\"><img src=x onerror='window.evil = 1'>",
    "</svg></title></style>&amp;",
    "شركة\u202e.exe\x00\x1b",
    "a_column_whose_name_never_comes_to_an_end_" * 5,
    "年収カテゴリー",
]


@pytest.fixture
def blocks() -> list[Block]:
    step = np.arange(1001)
    loss = 0.3 + 0.4 * np.exp(-step / 150)
    few = np.arange(0, 1001, 100)
    lines = [Series(name, few, few / (i + 1), few / 9, few) for i, name in enumerate(RUDE)]
    names = [*RUDE, *(f"feature {i}" for i in range(8))]
    values = np.linspace(-2.5, 4.0, len(names))
    parts: list[tuple[str, float, Kind]] = [
        ("earlier runs", 0.6, "spent"), ("open", 0.3, "reserved"), (RUDE[0], 0.5, "this run")
    ]  # fmt: skip
    kinds: list[Literal["warning", "caution", "good", "note"]] = [
        "warning", "caution", "good", "note"
    ]  # fmt: skip
    return [
        *(Banner(f"{kind}: {RUDE[0]}", kind, [RUDE[4]]) for kind in kinds),
        Card("Privacy", [("epsilon", 0.9987, "asked for at most 1"), (RUDE[1], RUDE[4], RUDE[3])]),
        Card("Model", [("rows", 32_561), ("delta", 1e-5), ("seeded", None)]),
        Figure("Budget", gauge(parts, 2.0, "epsilon")),
        Figure("Overdrawn", gauge(parts, 1.0, RUDE[4])),
        Figure("Loss", line_chart([Series("loss", step, loss)], "step", "loss"), "A caption."),
        Figure("Many", line_chart(lines, RUDE[0], RUDE[4])),
        Figure("Scales", line_chart([Series("s", few, 10.0 ** (few / 50))], "n", "c", log_y=True)),
        Figure("Far", line_chart([Series("a", [123456.1, 123456.9], [0, 5])], "x", "y")),
        Figure("Nothing", line_chart([], "step", "loss")),
        Figure(RUDE[1], bar_chart(names, values, np.full(len(names), 0.3), x_label=RUDE[2])),
        Table("Events", ["purpose", *RUDE], [[RUDE[4], 1, 2.5, None, "text", 1e-9, -3.25]]),
        Table("History", ["at", "note"], [["2025-01-01", RUDE[2]]] * 3, collapsed=True),
        Text("Words", [RUDE[0], "A second paragraph. " * 20]),
        Part("A part", RUDE[1]),
        Facts("Questions", [(RUDE[0], RUDE[4]), (RUDE[5], None), (RUDE[4], "word " * 200)]),
        Items("A list", RUDE),
        Table(
            "A matrix",
            ["class", *(f"{name} {i}" for i in range(4) for name in RUDE[3:])],
            [[name, *range(12)] for name in RUDE],
        ),
        Table("A long one", ["row"], [[i] for i in range(200)], collapsed=True),
    ]


def _missing(what: str) -> NoReturn:
    if os.environ.get("CI"):
        pytest.fail(what)
    pytest.skip(what)


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    try:
        from playwright.sync_api import sync_playwright
    except ModuleNotFoundError:
        _missing("Expected Playwright, found none: pip install playwright.")
    names = ("chromium", "chromium-browser", "google-chrome")
    path = next(filter(None, map(shutil.which, names)), None)
    if path is None:
        _missing(f"Expected a browser ({', '.join(names)}), found none: apt-get install chromium.")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()
