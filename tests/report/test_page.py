"""The page: safe whatever the names, in order, and written whole or not at all."""

from __future__ import annotations

import os
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from privagrad.report.charts import Series, line_chart
from privagrad.report.page import (
    Banner,
    Block,
    Card,
    Facts,
    Figure,
    Items,
    Part,
    Table,
    Text,
    aligned,
    readable,
    render,
    write_page,
)

VOID = {"meta"}


class Seen(HTMLParser):
    """The tags of a page, their attributes and the text within each."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(page)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append((self.open[-1] if self.open else "", data))

    def within(self, tag: str) -> list[str]:
        return [text for where, text in self.texts if where == tag]


def every_block(text: str) -> list[Block]:
    return [
        Banner(text),
        Card(text, [(text, text, text)]),
        Figure(text, line_chart([Series(text, [0, 1], [1, 2])], text, text), text),
        Table(text, [text, "n"], [[text, 1]]),
        Table(text, [text], [[text]], collapsed=True),
        Text(text, [text]),
        Part(text, text),
        Facts(text, [(text, text), (text, None)], text),
        Items(text, [text]),
    ]


@given(st.text(), st.sampled_from(["<script>", "</style>", '" onload="x', "&lt;", "<!--", "x"]))
def test_text_stays_text(text: str, start: str) -> None:
    plain, rude = Seen(render("a", "a", every_block("a"))), start + text
    seen = Seen(render(rude, rude, every_block(rude)))
    shape = [(tag, set(attrs)) for tag, attrs in plain.tags]
    # A long name brings a tooltip of its own into a chart.
    assert [(tag, set(attrs)) for tag, attrs in seen.tags if tag != "title"] == [
        each for each in shape if each[0] != "title"
    ]


def test_what_is_written_is_what_is_read() -> None:
    text = "a < b & c > 'd' \"e\" שלום 年収"
    seen = Seen(render(text, text, every_block(text)))
    for tag in (
        "h1",
        "h2",
        "h3",
        "p",
        "li",
        "strong",
        "dt",
        "dd",
        "small",
        "figcaption",
        "th",
        "td",
    ):
        assert text in seen.within(tag), tag
    assert {attrs["aria-label"] for _, attrs in seen.tags if "aria-label" in attrs} >= {text}


def test_what_nobody_can_see_is_made_visible() -> None:
    page = render("a\x00b\x1b\u202ec\ud800", "", [])
    assert "<h1>a\ufffdb\ufffd\ufffdc\ufffd</h1>" in page
    page.encode("utf-8")


def test_the_policy_forbids_everything_but_the_style(blocks: list[Block]) -> None:
    seen = Seen(render("a", "b", blocks))
    (policy,) = [a["content"] for _, a in seen.tags if "http-equiv" in a]
    assert policy is not None
    assert policy.startswith("default-src 'none'; style-src 'unsafe-inline';")
    names = {tag for tag, _ in seen.tags}
    assert not names & {"script", "img", "link", "iframe", "a", "use", "image"}
    assert not {name for _, attrs in seen.tags for name in attrs} & {"src", "href", "style", "id"}
    (style,) = seen.within("style")
    assert "url(" not in style
    assert "@import" not in style


def test_headings_come_in_order(blocks: list[Block]) -> None:
    seen = Seen(render("a", "b", blocks))
    headings = [tag for tag, _ in seen.tags if tag in ("h1", "h2", "h3", "h4")]
    start = next(i for i, block in enumerate(blocks) if isinstance(block, Part))
    before = ["h2"] * (start - 4)  # four are banners
    assert headings == ["h1", *before, "h2", *["h3"] * (len(blocks) - start - 1)]
    assert ("html", {"lang": "en"}) in seen.tags
    assert [tag for tag, _ in seen.tags].count("main") == 1


def test_columns_of_numbers_stand_to_the_right() -> None:
    rows: list[list[str | float | None]] = [
        ["a", 1, 0.5, "1,000.5", None, True],
        ["7", 2_000, 12.25, "-3%", 4, False],
    ]
    seen = Seen(render("a", "b", [Table("t", list("uvwxyz"), rows)]))
    cells = [attrs.get("class") for tag, attrs in seen.tags if tag in ("th", "td")]
    assert cells == [None, "number", "number", "number", "number", None] * 3
    assert seen.within("td")[:6] == ["a", "1", "0.50", "1,000.5", "–", "yes"]
    assert seen.within("td")[6:] == ["7", "2,000", "12.25", "-3%", "4", "no"]


def test_a_row_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="Expected 2 cells"):
        render("a", "b", [Table("t", ["x", "y"], [[1, 2], [1]])])


def test_a_banner_of_another_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="kind"):
        render("a", "b", [Banner("a", "loud")])  # type: ignore[arg-type]


def test_the_data_of_a_long_chart_are_thinned_and_it_is_said() -> None:
    page = render(
        "a", "b", [Figure("f", line_chart([Series("a", range(999), range(999))], "x", "y"))]
    )
    assert "Data: 333 of 999 rows" in page
    assert page.count("<tr>") == 334


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        ("", "–"),
        ("as it is", "as it is"),
        (True, "yes"),
        (48_842, "48,842"),
        (np.int64(7), "7"),
        (0.0, "0"),
        (-0.0, "0"),
        (0.99871, "0.9987"),
        (-0.05, "-0.05"),
        (48_842.0, "48,842"),
        (12_345.678, "12,346"),
        (1e-5, "1e-5"),
        (-1.2346e-7, "-1.235e-7"),
        (1.5e300, "1.5e300"),
        (float("nan"), "NaN"),
        (float("inf"), "∞"),
        (-float("inf"), "-∞"),
    ],
)
def test_numbers_are_readable(value: str | float | None, text: str) -> None:
    assert readable(value) == text


@given(st.floats(-1e307, 1e307))
def test_readable_numbers_are_right_to_four_digits(value: float) -> None:
    assert float(readable(value).replace(",", "")) == pytest.approx(value, rel=6e-4, abs=0)


def test_a_column_has_one_number_of_decimals_where_few_do() -> None:
    assert aligned([0.5, 12.25, None, float("nan")]) == ["0.50", "12.25", "–", "NaN"]
    assert aligned([1, 20_000]) == ["1", "20,000"]
    assert aligned([0.5, 1e-7]) == ["0.5", "1e-7"]
    assert aligned([0.00012, 3.0]) == ["0.00012", "3.00000"]
    assert aligned([0.0001234, 3.0]) == ["0.0001234", "3"]


def test_the_file_is_the_page(tmp_path: Path, blocks: list[Block]) -> None:
    path = tmp_path / "report.html"
    write_page(path, "a", "b", blocks)
    assert path.read_bytes().decode("utf-8") == render("a", "b", blocks)
    assert list(tmp_path.iterdir()) == [path]
    ordinary = tmp_path / "ordinary"
    ordinary.touch()
    assert path.stat().st_mode == ordinary.stat().st_mode


def test_the_file_is_written_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "report.html"
    path.write_text("the old page")
    with path.open() as reader:
        write_page(path, "a", "b", [])
        assert reader.read() == "the old page"
    path.write_text("the old page")

    def full(_: int) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space"):
        write_page(path, "a", "b", [])
    assert path.read_text() == "the old page"
    assert list(tmp_path.iterdir()) == [path]


def test_a_part_is_no_part_of_a_part() -> None:
    page = render("a", "b", [Text("before", ["x"]), Part("one"), Text("c", ["y"]), Part("two")])
    assert page.index(">before<") < page.index(">one<") < page.index(">two<")
    assert page.count('<div class="part">') == 2
    assert Seen(page).within("h2") == ["before", "one", "two"]


def test_an_open_question_is_shown_as_open() -> None:
    seen = Seen(render("a", "b", [Facts("f", [("Who?", None), ("Why?", "so")], "open: ask")]))
    assert seen.within("dd") == ["open: ask", "so"]


def test_lines_end_nowhere_within_a_number() -> None:
    page = render("a", "b", [Text("t", ["1e-06, 0.8 ± 0.1, 5 % and 2024-01-31, well-known"])])
    assert (
        "1e-\u206006, 0.8\u00a0±\u00a00.1, 5\u00a0% and 2024-\u206001-\u206031, well-known" in page
    )
