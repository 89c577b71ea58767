"""Charts: where things are drawn, what is left out, and that no text becomes markup."""

from __future__ import annotations

import math
import re
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from privagrad.report.charts import Series, bar_chart, gauge, line_chart
from privagrad.report.page import Chart

NUMBERS = st.floats(allow_nan=True, allow_infinity=True)
ELEMENTS = {"svg", "title", "desc", "g", "path", "rect", "text"}


def drawing(chart: Chart) -> ElementTree.Element:
    return ElementTree.fromstring(chart.svg)


def of_class(root: ElementTree.Element, *names: str) -> list[ElementTree.Element]:
    return [e for e in root.iter() if set(e.get("class", "").split()) & set(names)]


def points(root: ElementTree.Element) -> np.ndarray:
    moved = [e.get("transform", "") for e in of_class(root, "mark", "hit")]
    return np.array([[float(n) for n in re.findall(r"-?[\d.]+", text)] for text in moved])


def ticks(root: ElementTree.Element, axis: str) -> tuple[np.ndarray, np.ndarray]:
    """Values and places of the ticks, read from the drawing."""
    anchor, shift = ("middle", 0.0) if axis == "x" else ("end", 4.5)
    texts = [e for e in of_class(root, "tick") if e.get("text-anchor") == anchor]
    values = np.array([float((e.text or "").replace(",", "")) for e in texts])
    return values, np.array([float(e.get(axis, "")) for e in texts]) - shift


def corners(path: str) -> np.ndarray:
    return np.array(re.findall(r"(-?[\d.]+) (-?[\d.]+)", path), dtype=float)


def whole(low: float, high: float) -> st.SearchStrategy[float]:
    return st.floats(low, high, allow_nan=False)


@given(
    exponent=st.integers(-250, 250),
    y=st.lists(whole(-1, 1), min_size=2, max_size=30),
    log=st.booleans(),
)
def test_ticks_cover_the_data_and_place_it(exponent: int, y: list[float], log: bool) -> None:
    values = 10.0**exponent * (10.0 ** (3 * np.array(y)) if log else np.round(y, 3))
    root = drawing(line_chart([Series("a", range(len(y)), values)], "x", "y", log_y=log))
    marked, places = ticks(root, "y")
    if log:
        marked, values = np.log10(marked), np.log10(values)
    slack = 1e-9 * (marked[-1] - marked[0])
    assert 2 <= marked.size <= 9
    assert np.all(np.diff(marked) > 0)
    assert marked[0] <= values.min() + slack
    assert values.max() - slack <= marked[-1]
    slope = (places[-1] - places[0]) / (marked[-1] - marked[0])
    np.testing.assert_allclose(places, places[0] + slope * (marked - marked[0]), atol=0.02)
    expected = places[0] + slope * (values - marked[0])
    np.testing.assert_allclose(points(root)[:, 1], expected, atol=0.02)


@pytest.mark.parametrize("log", [False, True])
def test_the_x_axis_is_linear_in_the_data_or_its_logarithm(log: bool) -> None:
    x = np.array([1.0, 30.0, 200.0, 48_842.0])
    root = drawing(line_chart([Series("a", x, [1, 2, 3, 4])], "x", "y", log_x=log))
    marked, places = ticks(root, "x")
    scale = np.log10 if log else np.asarray
    slope = (places[-1] - places[0]) / (scale(marked[-1]) - scale(marked[0]))
    expected = places[0] + slope * (scale(x) - scale(marked[0]))
    np.testing.assert_allclose(points(root)[:, 0], expected, atol=0.02)


def test_a_gap_splits_the_line_and_a_lone_point_is_marked() -> None:
    y = np.ones(200)
    y[[50, 100, 102]] = np.nan
    root = drawing(line_chart([Series("a", range(200), y)], "x", "y"))
    lines = [corners(e.get("d", "")) for e in of_class(root, "line")[1:]]  # the first is the key
    assert [len(line) for line in lines] == [50, 49, 1, 97]
    lone = [e.findtext("title") for e in of_class(root, "mark")]
    assert "a: 1 at 101" in lone
    assert any("a (3 not shown)" in (e.text or "") for e in of_class(root, "name"))


def test_what_has_no_place_on_the_axis_is_counted() -> None:
    chart = line_chart([Series("a", [1, 2, 3, 4], [1.0, 0.0, -1.0, np.inf])], "x", "y", log_y=True)
    root = drawing(chart)
    assert len(points(root)) == 1
    assert "a (3 not shown)" in (root.findtext("desc") or "")
    assert [row[2] for row in chart.rows] == [1.0, 0.0, -1.0, np.inf]


def test_a_given_range_is_the_axis() -> None:
    series = Series("share", [0, 1, 2, 3], [0.1, 0.5, 0.9, 1.7], [0, 0, 0, 0], [2, 2, 2, 2])
    root = drawing(line_chart([series], "step", "share", y_range=(0, 1)))
    marked, places = ticks(root, "y")
    assert (marked[0], marked[-1]) == (0, 1)
    assert len(points(root)) == 3
    band = corners(of_class(root, "band")[0].get("d", ""))
    assert set(band[:, 1]) == {places[0], places[-1]}
    narrow = drawing(line_chart([Series("a", [0], [3.5])], "x", "y", log_y=True, y_range=(3, 4)))
    np.testing.assert_allclose(ticks(narrow, "y")[0], [3, 4])


def test_the_band_lies_between_low_and_high() -> None:
    low, y, high = np.array([[1.0, 2, np.nan, 3], [2.0, 3, 4, 5], [4.0, 5, 6, 7]])
    root = drawing(line_chart([Series("a", range(4), y, low, high)], "x", "y"))
    marked, places = ticks(root, "y")
    first, last = (corners(e.get("d", "")) for e in of_class(root, "band"))
    np.testing.assert_allclose(first[:, 1], np.interp([4, 5, 2, 1], marked, places), atol=0.02)
    np.testing.assert_allclose(last[:, 1], np.interp([7, 3], marked, places), atol=0.02)


def test_lines_differ_without_colour() -> None:
    series = [Series(f"line {i}", [0, 1], [i, i + 1]) for i in range(8)]
    root = drawing(line_chart(series, "x", "y"))
    keys = of_class(root, "key")
    looks = {
        (line.get("stroke-dasharray"), key.get("d"))
        for line, key in zip(of_class(root, "line")[:5], keys[:5], strict=True)
    }
    assert len(looks) == 5
    drawn = of_class(root, "line")[8:]
    assert len({(e.get("class"), e.get("stroke-dasharray")) for e in drawn}) == 8


def test_long_lines_keep_every_point_in_the_path_and_in_the_data() -> None:
    chart = line_chart([Series("a", range(5000), np.arange(5000) % 7)], "x", "y")
    root = drawing(chart)
    assert len(corners(of_class(root, "line")[0].get("d", ""))) == 5000 == len(chart.rows)
    assert len(points(root)) == 120


@pytest.mark.parametrize(
    "series", [[], [Series("a", [], [])], [Series("a", [1, 2], [np.nan, np.nan])]]
)
def test_nothing_to_draw_is_said(series: list[Series]) -> None:
    assert "nothing to draw" in "".join(drawing(line_chart(series, "x", "y")).itertext())
    assert "nothing to draw" in bar_chart([], [], x_label="x").svg


@given(st.lists(st.tuples(NUMBERS, NUMBERS, NUMBERS), max_size=8), st.booleans(), st.booleans())
@example([(-9.9e307, 9.9e307, -1.7e308), (9.9e307, -9.9e307, 5e-324)], False, False)
@example([(5e-324, 1.7e308, 5e-324), (1.7e308, 5e-324, 0.0)], True, True)
@example([(-9e299, 9e299, 5e-324), (9e299, -9e299, 0.0), (0.0, 5e-324, 0.0)], False, False)
def test_any_numbers_are_drawn_inside(
    rows: list[tuple[float, float, float]], log_x: bool, log_y: bool
) -> None:
    x, y, low = np.array(rows, dtype=float).reshape(-1, 3).T
    chart = line_chart([Series("a", x, y, low, y)], "x", "y", log_x=log_x, log_y=log_y)
    inside(drawing(chart))
    inside(drawing(bar_chart([f"n{i}" for i in range(len(y))], y, np.abs(low), x_label="x")))


def inside(root: ElementTree.Element) -> None:
    width, height = map(float, root.get("viewBox", "").split()[2:])
    assert "nan" not in ElementTree.tostring(root, "unicode")
    places = [points(root)] + [corners(e.get("d", "")) for e in of_class(root, "line", "band")]
    places += [
        np.array([[float(e.get("x", "")), float(e.get("y", ""))]])
        for e in root.iter()
        if e.tag in ("text", "rect")
    ]
    for place in places:
        if place.size:
            assert np.all((place >= 0) & (place <= [width, height]))


@given(st.text(), st.text(), st.text())
def test_text_stays_text(name: str, x_label: str, y_label: str) -> None:
    for chart in (
        line_chart([Series(name, [0, 1], [1, 2]), Series(name, [0], [1])], x_label, y_label),
        bar_chart([name, "b"], [1, -1], [0.1, 0.2], x_label=x_label),
        gauge([(name, 1.0, "spent")], 2.0, y_label),
    ):
        root = drawing(chart)
        assert {e.tag for e in root.iter()} <= ELEMENTS
        assert root.get("role") == "img"
        assert root[0].tag == "title"
        assert root[1].tag == "desc"


def test_bars_start_at_zero_and_whiskers_are_the_errors() -> None:
    values, errors = np.array([2.0, -1.0, 0.5]), np.array([0.5, 0.25, np.nan])
    root = drawing(bar_chart(["a", "b", "c"], values, errors, x_label="weight"))
    marked, places = ticks(root, "x")
    bars = [(float(e.get("x", "")), float(e.get("width", ""))) for e in of_class(root, "bar")]
    for value, (start, width) in zip(values, bars, strict=True):
        ends = np.interp(sorted([0.0, value]), marked, places)
        np.testing.assert_allclose([start, start + width], ends, atol=0.02)
    whiskers = [e.get("d", "") for e in of_class(root, "whisker")]
    assert len(whiskers) == 2
    for whisker, value, error in zip(whiskers, values, errors, strict=False):
        start, stop = re.findall(r"[MH](-?[\d.]+)", whisker)[:2]
        expected = np.interp([value - error, value + error], marked, places)
        np.testing.assert_allclose([float(start), float(stop)], expected, atol=0.02)


def test_long_names_keep_both_ends_and_tell_all_in_a_tooltip() -> None:
    name = "occupation=" + "very-" * 30 + "specialist"
    root = drawing(bar_chart([name, "age"], [1, 2], x_label="weight"))
    short, age = of_class(root, "name")
    assert re.fullmatch("occup.*….*alist", short.text or "")
    assert short.findtext("title") == name
    assert (age.text, age.find("title")) == ("age", None)


def test_a_bar_without_a_number_keeps_its_row() -> None:
    chart = bar_chart(["a", "b"], [np.nan, 1.0], x_label="weight")
    root = drawing(chart)
    assert [e.text for e in of_class(root, "value")] == ["NaN", "1"]
    assert len(of_class(root, "bar")) == 1


def pieces(chart: Chart) -> dict[str, tuple[float, float]]:
    found = {}
    for e in of_class(drawing(chart), "piece"):
        rect = e.find("rect")
        if e.find("title") is not None and rect is not None:
            kind = e.get("class", "").removeprefix("piece ")
            found[kind] = (float(rect.get("x", "")), float(rect.get("width", "")))
    return found


def test_the_gauge_divides_the_total() -> None:
    chart = gauge(
        [("old", 1.0, "spent"), ("open", 0.5, "reserved"), ("now", 2, "this run")], 4, "ε"
    )
    found = pieces(chart)
    whole = sum(width for _, width in found.values())
    shares = {kind: width / whole for kind, (_, width) in found.items()}
    assert shares == pytest.approx(
        {"spent": 0.25, "reserved": 0.125, "this-run": 0.5, "left": 0.125}, abs=1e-4
    )
    assert chart.rows[-1] == ("left", 0.5, "left")
    assert drawing(chart).findtext("title") == "3.5 of 4 ε"


def test_what_goes_beyond_the_total_is_seen() -> None:
    found = pieces(gauge([("old", 3.0, "spent"), ("now", 2.0, "this run")], 4.0, "ε"))
    start, width = found["over"]
    assert start + width == pytest.approx(sum(found["this-run"]), abs=0.02)
    assert width == pytest.approx(found["spent"][1] / 3, abs=0.02)
    assert "left" not in found


def test_a_budget_spent_to_the_last_bit_is_not_over() -> None:
    chart = gauge([("a", 0.1, "spent"), ("b", 0.2, "spent")], 0.3, "ε")
    assert chart.rows[-1] == ("left", 0.0, "left")


def test_mistakes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"shape \(2,\)"):
        line_chart([Series("a", [1, 2], [1])], "x", "y")
    with pytest.raises(ValueError, match="together"):
        line_chart([Series("a", [1], [1], low=[0])], "x", "y")
    with pytest.raises(ValueError, match="y_range"):
        line_chart([], "x", "y", log_y=True, y_range=(0, 1))
    with pytest.raises(ValueError, match="errors >= 0"):
        bar_chart(["a"], [1], [-1], x_label="x")
    with pytest.raises(ValueError, match="kind"):
        gauge([("a", 1.0, "lost")], 2.0, "ε")  # type: ignore[list-item]
    for amount in (-1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="amount"):
            gauge([("a", amount, "spent")], 2.0, "ε")
