"""Charts as SVG text: lines with bands, bars with whiskers, a budget.

The style sheet defines the colours for light and dark mode; marks and dashes distinguish lines
without colour. Every text from outside is escaped here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from privagrad._internal import validate
from privagrad._internal.validate import Vector
from privagrad.report.axes import (
    LARGEST,
    TEXT,
    WIDTH,
    Axis,
    axis_of,
    ends,
    scaled_values,
    text_width,
)
from privagrad.report.page import Chart, aligned, escape, readable

Kind = Literal["spent", "reserved", "this run"]

_ROW, _PLOT = 22.0, 200.0  # in drawing units
_COLOURS = 6
_DASHES = ("none", "7 4", "2 3", "10 3 2 3", "14 5")
_MARKS = (
    "M-3.5 0a3.5 3.5 0 1 0 7 0a3.5 3.5 0 1 0-7 0z",
    "M-3.2-3.2h6.4v6.4h-6.4z",
    "M0-4.6L4.4 3.2H-4.4z",
    "M0-4.8L4.8 0L0 4.8L-4.8 0z",
    "M0 4.6L4.4-3.2H-4.4z",
)


@dataclass(frozen=True)
class Series:
    """One line; NaN makes a gap. The band lies between `low` and `high`."""

    name: str
    x: ArrayLike
    y: ArrayLike
    low: ArrayLike | None = None
    high: ArrayLike | None = None


@dataclass(frozen=True)
class _Line:
    """x, y, low and high of a series: as given, and on the axes (infinite: outside of them)."""

    name: str
    given: NDArray[np.float64]
    at: NDArray[np.float64]
    shown: NDArray[np.bool_]

    @property
    def label(self) -> str:
        hidden = int(np.sum(~self.shown))
        return f"{self.name} ({hidden:,} not shown)" if hidden else self.name


def line_chart(
    series: Sequence[Series],
    x_label: str,
    y_label: str,
    *,
    log_x: bool = False,
    log_y: bool = False,
    y_range: tuple[float, float] | None = None,
) -> Chart:
    """Lines on common axes; values outside `y_range`, or ≤ 0 on a log axis, are not shown."""
    limits = None if y_range is None else scaled_values(np.array(y_range, dtype=np.float64), log_y)
    if limits is not None and not -np.inf < limits[0] < limits[1] < np.inf:
        raise ValueError(f"Expected y_range=(low, high) on its axis, found {y_range!r}.")
    lines = [_line(given, log_x, log_y, limits) for given in series]
    banded = any(given.low is not None for given in series)
    columns = ("line", x_label, y_label, "low", "high")[: 5 if banded else 3]
    rows = tuple(
        (line.name, *(None if math.isnan(cell) else cell for cell in row[: len(columns) - 1]))
        for line in lines
        for row in line.given.T.tolist()
    )
    title = f"{y_label} against {x_label}"
    if not any(line.shown.any() for line in lines):
        return Chart(_nothing(title), columns, rows)

    alone = len(lines) == 1 and lines[0].shown.all()
    legend, top = _legend([] if alone else [line.label for line in lines])
    top, bottom = top + 18, top + 18 + _PLOT
    across = np.concatenate([line.at[0, line.shown] for line in lines])
    heights = np.concatenate([line.at[1:].ravel() for line in lines])
    y_axis = replace(axis_of(heights, log_y, limits), start=bottom, end=top)
    left = 14 + max(map(text_width, y_axis.labels))
    x_axis = axis_of(across, log_x, room=WIDTH - left).between(left, WIDTH - 8)
    left, right = x_axis.start, x_axis.end
    parts = [_text(0, 14, y_label, "label", room=WIDTH), *legend]
    for y, label in y_axis.marks():
        parts.append(f'<path class="grid" d="M{left:.2f} {y:.2f}H{right:.2f}"/>')
        parts.append(_text(left - 8, y + 4.5, label, "tick", "end"))
    parts.append(f'<path class="axis" d="M{left:.2f} {bottom:.2f}H{right:.2f}"/>')
    for x, label in x_axis.marks():
        parts.append(f'<path class="axis" d="M{x:.2f} {bottom:.2f}v5"/>')
        parts.append(_text(x, bottom + 19, label, "tick", "middle"))
    parts.append(_text(right, bottom + 40, x_label, "label", "end", room=right))
    for number, line in enumerate(lines):
        parts += _drawn(line, number, x_axis, y_axis, few=6 if legend else 0)
    return Chart(_svg(bottom + 46, title, "; ".join(map(_described, lines)), parts), columns, rows)


def bar_chart(
    names: Sequence[str], values: ArrayLike, errors: ArrayLike | None = None, *, x_label: str
) -> Chart:
    """One horizontal bar for each name, from zero to its value, with whiskers of ± its error."""
    known = validate.vector("values", values, dim=len(names))
    spread = np.zeros(known.size)
    if errors is not None:
        spread = validate.vector("errors", errors, dim=known.size)
    if np.any(spread < 0):
        raise ValueError(f"Expected errors >= 0, found {float(np.nanmin(spread))!r}.")
    columns = ("name", x_label, "± error")[: 2 if errors is None else 3]
    table = zip(map(str, names), known.tolist(), spread.tolist(), strict=True)
    rows = tuple(row[: len(columns)] for row in table)
    if not np.isfinite(scaled_values(known, False)).any():
        return Chart(_nothing(x_label), columns, rows)
    tips = [f"{name}: {' ± '.join(map(readable, cells))}" for name, *cells in rows]
    return Chart(_bars(tuple(map(str, names)), known, spread, tips, x_label), columns, rows)


def _bars(
    names: Sequence[str], known: Vector, spread: Vector, tips: Sequence[str], x_label: str
) -> str:
    placed = scaled_values(known, False)
    spread = np.where(np.isfinite(placed) & (spread <= LARGEST), spread, 0.0)
    low, high = placed - spread, placed + spread
    left = min(215.0, max(map(text_width, names))) + 12
    values = aligned(known.tolist(), 3)
    right = WIDTH - 14 - max(map(text_width, values))
    axis = axis_of(np.concatenate([[0.0], low, high]), False, room=right - left).between(
        left, right
    )
    bottom = 6 + _ROW * len(names)
    parts = []
    for x, label in axis.marks():
        kind = "axis" if label == "0" else "grid"
        parts.append(f'<path class="{kind}" d="M{x:.2f} 2V{bottom:.2f}"/>')
        parts.append(_text(x, bottom + 17, label, "tick", "middle"))
    parts.append(_text(right, bottom + 38, x_label, "label", "end", room=right))
    zero, *ends = axis.place(np.concatenate([[0.0], placed])).tolist()
    for i, (name, end, start, stop) in enumerate(
        zip(names, ends, axis.place(low), axis.place(high), strict=True)
    ):
        y = 4 + _ROW * (i + 0.5)
        parts.append(_text(left - 12, y + 4.5, name, "name", "end", room=left - 12))
        parts.append(_text(WIDTH, y + 4.5, values[i], "value", "end"))
        if not np.isfinite(placed[i]):
            continue
        whisker = f"M{start:.2f} {y:.2f}H{stop:.2f}" + "".join(
            f"M{x:.2f} {y - 4:.2f}v8" for x in (start, stop)
        )
        parts.append(
            f"<g><title>{escape(tips[i])}</title>"
            f'<rect class="bar s{int(known[i] < 0)}" x="{min(zero, end):.2f}" y="{y - 6:.2f}" '
            f'width="{max(abs(end - zero), 0.8):.2f}" height="12"/>'
            + (f'<path class="whisker" d="{whisker}"/>' if spread[i] > 0 else "")
            + "</g>"
        )
    desc = f"{len(names)} bars between {axis.labels[0]} and {axis.labels[-1]}"
    return _svg(bottom + 44, x_label, desc, parts)


def gauge(parts: Sequence[tuple[str, float, Kind]], total: float, unit_label: str) -> Chart:
    """A budget as one bar: its parts, what is left, and what exceeds the total."""
    total = validate.positive("total", total)
    for name, amount, kind in parts:
        validate.choice("kind", kind, ("spent", "reserved", "this run"))
        if not 0 <= amount <= LARGEST:
            raise ValueError(f"Expected an amount >= 0 for {name!r}, found {amount!r}.")
    used = math.fsum(amount for _, amount, _ in parts)
    over = used > total * (1 + 1e-9)
    rest = ("over", used - total, "over") if over else ("left", max(total - used, 0.0), "left")
    rows = (*((str(name), float(amount), kind) for name, amount, kind in parts), rest)
    amounts = [amount for _, amount, _ in rows]
    end, *widths = ((WIDTH - 4) * (part / max(total, used)) for part in (total, *amounts))
    values = aligned(amounts)
    head = f"{readable(used)} of {readable(total)} {unit_label}"
    drawn = [_text(0, 18, head, "headline", room=0.65 * WIDTH)]
    at = 2.0
    for i, (name, amount, what) in enumerate(rows):
        y = 104 + _ROW * i
        tip = f"{name}: {readable(amount)} {unit_label}"
        if what == "over":
            drawn.append(_piece(what, 2 + end, 29, widths[i], 34, tip))
        elif amount > 0:
            drawn.append(_piece(what, at, 34, widths[i], 24, tip))
        at += widths[i]
        drawn.append(_piece(what, 2, y - 11, 13, 13))
        drawn.append(_text(24, y, name, "name", room=WIDTH - 120))
        drawn.append(_text(WIDTH, y, values[i], "value", "end"))
    drawn.append(f'<path class="total" d="M{2 + end:.2f} 28V64"/>')
    goal = f"total {readable(total)}"
    anchor = "end" if end > text_width(goal) else "start"
    drawn.append(_text(2 + end, 79, goal, "tick", anchor))
    desc = "; ".join(f"{name} {readable(amount)}" for name, amount, _ in rows)
    svg = _svg(92 + _ROW * len(rows), head, desc, drawn)
    return Chart(svg, ("part", unit_label, "kind"), rows)


def _line(series: Series, log_x: bool, log_y: bool, limits: Vector | None) -> _Line:
    if (series.low is None) != (series.high is None):
        raise ValueError(f"Expected low and high of {series.name!r} together, found one of them.")
    x = validate.vector("x", series.x)
    parts = {"y": series.y, "low": series.low, "high": series.high}
    given = np.full((4, x.size), np.nan)
    given[0] = x
    for i, (name, part) in enumerate(parts.items()):
        if part is not None:
            given[1 + i] = validate.vector(name, part, dim=x.size)
    at = np.vstack([scaled_values(given[:1], log_x), scaled_values(given[1:], log_y)])
    shown = np.isfinite(at[0]) & np.isfinite(at[1])
    if limits is not None:
        shown &= (limits[0] <= at[1]) & (at[1] <= limits[1])
    return _Line(str(series.name), given, at, shown)


def _drawn(line: _Line, number: int, x_axis: Axis, y_axis: Axis, few: int) -> list[str]:
    """The band and the line with its gaps; marks at all points or at a few; tooltips."""
    colour, dash = f"s{number % _COLOURS}", _DASHES[number % len(_DASHES)]
    x = x_axis.place(line.at[0])
    y, low, high = (y_axis.place(part) for part in line.at[1:])
    within = (line.at[2] <= y_axis.high) & (line.at[3] >= y_axis.low) & np.isfinite(line.at[0])
    parts = []
    for run in _runs(within):
        outline = _path(np.r_[x[run], x[run][::-1]], np.r_[high[run], low[run][::-1]])
        parts.append(f'<path class="band {colour}" d="{outline}z"/>')
    runs = _runs(line.shown)
    for run in runs:
        way = _path(x[run], y[run])
        parts.append(f'<path class="line {colour}" stroke-dasharray="{dash}" d="{way}"/>')
    points = np.flatnonzero(line.shown)
    alone = {run.start for run in runs if run.stop - run.start == 1}
    marked = alone | _some(points, 24 if points.size <= 24 else few)
    for i in sorted(marked | _some(points, 120)):
        at, value, *band = map(readable, line.given[:, i].tolist())
        between = "" if "NaN" in band else f" ({' to '.join(band)})"
        parts.append(
            f'<path class="{"mark" if i in marked else "hit"} {colour}" '
            f'transform="translate({x[i]:.2f} {y[i]:.2f})" d="{_MARKS[number % len(_MARKS)]}">'
            f"<title>{escape(f'{line.name}: {value}{between} at {at}')}</title></path>"
        )
    return parts


def _described(line: _Line) -> str:
    """A line in words, for screen readers."""
    x, y = line.given[:2, line.shown]
    if not x.size:
        return f"{line.label}: nothing to draw"
    first, last, least, most = map(readable, (float(y[0]), float(y[-1]), *ends(y)))
    return f"{line.label}: from {first} to {last}, between {least} and {most}"


def _runs(shown: NDArray[np.bool_]) -> list[slice]:
    """The ranges without a gap."""
    edges = np.flatnonzero(np.diff(np.r_[0, shown, 0])).tolist()
    return [slice(*pair) for pair in zip(edges[::2], edges[1::2], strict=True)]


def _some(points: NDArray[np.intp], most: int) -> set[int]:
    """At most so many of the points, evenly spread, with the first and the last."""
    if points.size <= most:
        return set(points.tolist())
    return set(points[np.linspace(0, points.size - 1, most).round().astype(np.intp)].tolist())


def _path(x: Vector, y: Vector) -> str:
    return "M" + "L".join(f"{a:.2f} {b:.2f}" for a, b in zip(x, y, strict=True))


def _text(
    x: float, y: float, text: object, kind: str, anchor: str = "start", room: float = math.inf
) -> str:
    """A text; if it does not fit into `room`, its middle is cut and a tooltip shows all of it."""
    whole = short = " ".join(str(text).split())
    if text_width(whole) > room + 0.01:
        half = int(room / (1.18 * TEXT))
        while text_width(short := f"{whole[:half]}…{whole[-half:]}") > room and half > 1:
            half -= 1
    tip = "" if short == whole else f"<title>{escape(whole)}</title>"
    return (
        f'<text class="{kind}" x="{x:.2f}" y="{y:.2f}" text-anchor="{anchor}">'
        f"{escape(short)}{tip}</text>"
    )


def _legend(names: list[str]) -> tuple[list[str], float]:
    """The legend in rows below the y label, and the height where it ends."""
    parts: list[str] = []
    x, y = 0.0, 38.0 if names else 16.0
    for i, name in enumerate(names):
        width = 52 + min(text_width(name), 210.0)
        if x > 0 and x + width - 18 > WIDTH:
            x, y = 0.0, y + 20
        parts.append(
            f'<path class="line s{i % _COLOURS}" stroke-dasharray="{_DASHES[i % len(_DASHES)]}" '
            f'd="M{x:.2f} {y - 4.5:.2f}h28"/><path class="key s{i % _COLOURS}" '
            f'transform="translate({x + 14:.2f} {y - 4.5:.2f})" d="{_MARKS[i % len(_MARKS)]}"/>'
        )
        parts.append(_text(x + 34, y, name, "name", room=210))
        x += width
    return parts, y


def _piece(kind: str, x: float, y: float, width: float, height: float, tip: str = "") -> str:
    """A rectangle of the budget; stripes distinguish the kinds without colour."""
    stripes = "".join(f"M{x + d:.2f} {y:.2f}v{height:g}" for d in np.arange(3, width, 5))
    return (
        f'<g class="piece {kind.replace(" ", "-")}">'
        + (f"<title>{escape(tip)}</title>" if tip else "")
        + f'<rect x="{x:.2f}" y="{y:.2f}" width="{max(width, 0.8):.2f}" height="{height:g}"/>'
        + (f'<path d="{stripes}"/>' if kind in ("reserved", "over") and stripes else "")
        + "</g>"
    )


def _nothing(title: str) -> str:
    words = "nothing to draw"
    return _svg(64, title, words, [_text(WIDTH / 2, 36, words, "label", "middle")])


def _svg(height: float, title: str, desc: str, parts: list[str]) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH:g} {height:g}" width="100%" role="img">'
        f"<title>{escape(title)}</title><desc>{escape(desc)}</desc>{''.join(parts)}</svg>"
    )
