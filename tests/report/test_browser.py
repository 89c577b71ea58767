"""The page as a browser shows it: silent, inside its frame, readable by day, by night, on paper."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from privagrad.report.page import Banner, Block, Card, Table, Text, write_page

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

CONTRASTS = """() => {
  const channels = colour => (colour.match(/[\\d.]+/g) || []).map(Number);
  const light = colour => channels(colour).slice(0, 3)
    .map(c => c / 255).map(c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const ground = element => {
    for (let at = element; at; at = at.parentElement) {
      const colour = getComputedStyle(at).backgroundColor;
      if (channels(colour)[3] !== 0) return colour;
    }
  };
  const walker = document.createTreeWalker(document.querySelector("main"), NodeFilter.SHOW_TEXT);
  const found = [];
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || element.closest("title, desc")) continue;
    const style = getComputedStyle(element);
    const ink = element.tagName === "text" ? style.fill : style.color;
    const [a, b] = [light(ink), light(ground(element))].sort((x, y) => y - x);
    found.push([(a + 0.05) / (b + 0.05), walker.currentNode.data.slice(0, 40)]);
  }
  return found;
}"""

MARKS = """() => [...document.querySelectorAll("svg")].map(svg => {
  const frame = svg.getBoundingClientRect();
  const marks = [...svg.querySelectorAll("path, rect, text")]
    .map(e => [e, e.getBoundingClientRect()]);
  return {
    area: frame.width * frame.height,
    marks: marks.length,
    outside: marks.filter(([e, box]) => box.left < frame.left - 1 || box.right > frame.right + 1
      || box.top < frame.top - 1 || box.bottom > frame.bottom + 1)
      .map(([e]) => e.outerHTML.slice(0, 160)),
  };
})"""

SIZES = """() => [...document.querySelectorAll("svg text")].map(
  e => parseFloat(getComputedStyle(e).fontSize) * e.getScreenCTM().a)"""

OPEN_ALL = "() => document.querySelectorAll('details').forEach(e => { e.open = true; })"
OVERFLOW = "() => document.documentElement.scrollWidth - document.documentElement.clientWidth"


@pytest.fixture
def url(tmp_path: Path, blocks: list[Block]) -> str:
    path = tmp_path / "report.html"
    write_page(path, "A report <b>", "with every block", blocks)
    return path.as_uri()


def opened(browser: Browser, url: str, width: int = 1200, **options: Any) -> Page:
    page = browser.new_page(viewport={"width": width, "height": 900}, **options)
    page.goto(url)
    page.evaluate(OPEN_ALL)
    return page


def test_the_page_is_silent(browser: Browser, url: str) -> None:
    page = browser.new_page()
    heard: list[str] = []
    asked: list[str] = []
    page.on("console", lambda message: heard.append(message.text))
    page.on("pageerror", lambda error: heard.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(url)
    page.wait_for_load_state("networkidle")
    assert heard == []
    assert asked == [url]
    assert page.evaluate("() => window.evil === undefined")
    assert page.title() == "A report <b>"
    page.close()


def test_nothing_could_leave_the_file(browser: Browser, url: str) -> None:
    page = browser.new_page()
    heard: list[str] = []
    asked: list[str] = []
    page.on("console", lambda message: heard.append(message.text))
    page.goto(url)
    page.on("requestfinished", lambda request: asked.append(request.url))
    page.evaluate("() => { new Image().src = 'http://127.0.0.1:9/pixel'; }")
    page.evaluate("() => fetch('http://127.0.0.1:9/data').catch(() => 0)")
    page.evaluate(
        "() => document.body.insertAdjacentHTML('beforeend', '<p onclick=\"window.evil=1\">x</p>')"
    )
    page.evaluate("() => document.body.lastChild.click()")
    assert page.evaluate("() => window.evil === undefined")
    assert asked == []
    assert len([text for text in heard if "Content Security Policy" in text]) >= 3
    page.close()


@pytest.mark.parametrize("width", [360, 1200])
def test_drawings_stay_in_their_frames(browser: Browser, url: str, width: int) -> None:
    page = opened(browser, url, width)
    for drawing in page.evaluate(MARKS):
        assert drawing["area"] > 0
        assert drawing["marks"] > 0
        assert drawing["outside"] == []
    page.close()


def test_drawings_have_names_for_those_who_cannot_see_them(browser: Browser, url: str) -> None:
    page = opened(browser, url)
    count = page.locator("svg").count()
    assert page.get_by_role("img").count() == count
    assert page.get_by_role("img", name="loss against step").count() == 2
    page.close()


def test_a_phone_scrolls_tables_but_not_the_page(browser: Browser, url: str) -> None:
    page = opened(browser, url, 360)
    assert page.evaluate(OVERFLOW) <= 0
    wide = page.get_by_role("region", name="Events")
    assert wide.evaluate("e => e.scrollWidth - e.clientWidth") > 0
    assert min(page.evaluate(SIZES)) >= 9
    page.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("media", ["screen", "print"])
def test_text_is_readable_by_day_by_night_and_on_paper(
    browser: Browser, url: str, scheme: str, media: str
) -> None:
    page = opened(browser, url, color_scheme=scheme)
    page.emulate_media(media=media)  # type: ignore[arg-type]
    contrasts = page.evaluate(CONTRASTS)
    assert len(contrasts) > 100
    assert min(contrasts)[0] >= 4.5, min(contrasts)
    page.close()


def test_night_is_dark_and_paper_is_white(browser: Browser, url: str) -> None:
    page = opened(browser, url)
    ground = "() => getComputedStyle(document.body).backgroundColor"
    day = page.evaluate(ground)
    page.emulate_media(color_scheme="dark")
    night = page.evaluate(ground)
    page.emulate_media(media="print")
    assert len({day, night, "rgb(255, 255, 255)"}) == 3
    assert page.evaluate(ground) == "rgb(255, 255, 255)"
    page.close()


def test_paper_shows_closed_tables_but_not_the_data_of_charts(browser: Browser, url: str) -> None:
    page = browser.new_page(viewport={"width": 720, "height": 1000})
    page.goto(url)
    history, long = page.locator("section.table details table").all()
    assert not history.is_visible()
    assert not page.get_by_text("A long one: 200 rows, not printed").is_visible()
    page.emulate_media(media="print")
    assert history.is_visible()
    assert not long.is_visible()
    assert page.get_by_text("A long one: 200 rows, not printed").is_visible()
    assert not page.locator("section.figure details").first.is_visible()
    assert page.evaluate(OVERFLOW) <= 0
    assert page.pdf(format="A4").startswith(b"%PDF")
    page.close()


BROKEN = """() => [...document.querySelectorAll("dd, td, p, li")].flatMap(element => {
  const walker = document.createTreeWalker(element, NodeFilter.SHOW_TEXT);
  const found = [];
  while (walker.nextNode()) {
    const text = walker.currentNode.data;
    const whole = /[\\d.,]+((e?-\\u2060?|\\u00a0±\\u00a0)[\\d.,]+)*(\\u00a0%)?/g;
    for (const number of text.matchAll(whole)) {
      const range = document.createRange();
      range.setStart(walker.currentNode, number.index);
      range.setEnd(walker.currentNode, number.index + number[0].length);
      const lines = new Set([...range.getClientRects()].map(box => Math.round(box.top)));
      if (lines.size > 1 && number[0].length < 30) found.push(number[0]);
    }
  }
  return found;
})"""


@pytest.mark.parametrize(("width", "media"), [(360, "screen"), (1200, "screen"), (690, "print")])
def test_no_line_ends_within_a_number(
    browser: Browser, tmp_path: Path, width: int, media: str
) -> None:
    words = "A delta of 1e-06 at 12.25 ± 0.0034, or 98.75 %, since 2024-01-31. "
    rows = [("Accuracy of the constant", "0.18692 ± 0.00088", "always the most frequent class")]
    table = Table("t", ["a", "b"], [["a_long_name_" * 9, -0.123456], ["x", 0.2]])
    blocks: list[Block] = [
        Banner(words, "note", [words[i:] for i in range(0, 60, 3)]),
        Card("c", rows * 2),
        Card("d", rows),
        Text("e", [words[i:] * 9 for i in range(0, 60, 7)]),
        table,
    ]
    write_page(tmp_path / "numbers.html", "a", "b", blocks)
    page = opened(browser, (tmp_path / "numbers.html").as_uri(), width)
    page.emulate_media(media=media)  # type: ignore[arg-type]
    assert page.evaluate(BROKEN) == []
    page.close()


def test_what_a_row_is_about_stays_while_a_table_scrolls(browser: Browser, url: str) -> None:
    page = opened(browser, url, 360)
    wide = page.get_by_role("region", name="A matrix")
    name = wide.locator("tbody tr").last.locator("td").first
    before = name.bounding_box()
    wide.evaluate("e => { e.scrollLeft = 150; }")
    assert wide.evaluate("e => e.scrollLeft") > 0
    assert before is not None
    assert name.bounding_box() == before
    page.close()


def test_each_part_begins_a_printed_page(browser: Browser, url: str) -> None:
    page = opened(browser, url)
    page.emulate_media(media="print")
    breaks = (
        "() => [...document.querySelectorAll('.part')].map(e => getComputedStyle(e).breakBefore)"
    )
    assert page.evaluate(breaks) == ["auto"]
    kept = "e => getComputedStyle(e).breakInside"
    for name in ("tr", "section.figure", "section.card", ".banner", "h3", "section.facts"):
        assert page.locator(name).first.evaluate(kept) == "avoid", name
    assert page.locator("thead").first.evaluate("e => getComputedStyle(e).display") == (
        "table-header-group"
    )
    page.close()
