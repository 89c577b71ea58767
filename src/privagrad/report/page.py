"""A page as one HTML file: blocks of text, tables and charts.

Every text from outside is escaped; the only markup in a block is the drawing of a chart. The page's
content security policy forbids it to load or to run anything.
"""

from __future__ import annotations

import html
import math
import numbers
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from itertools import groupby, pairwise
from pathlib import Path
from typing import Literal

import numpy as np

from privagrad._internal import validate
from privagrad._internal.atomic import atomic_write

Cell = str | float | None
Row = tuple[str, Cell] | tuple[str, Cell, str]

_MOST_ROWS = 400
_MOST_PRINTED = 120
_WIDE = 7
_SHORT, _MATRIX = 8, 15
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
_SIGNS = {"note": "i", "good": "✓", "caution": "~", "warning": "!"}
# Characters that are invisible, or that reverse the order of the text around them.
_UNPRINTABLE = re.compile(
    r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]"
)
# A number stays on one line with what belongs to it.
_HYPHENS = re.compile(r"(?<=\d)-(?=\d)|(?<=\de)-(?=\d)")
_JOINED = re.compile(r"(?<=\d) (?=[%±]|in \d)|(?<=±) (?=\d)|(?<=\d in) (?=\d)")


@dataclass(frozen=True)
class Chart:
    """A drawing as SVG, and its data as a table."""

    svg: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]


@dataclass(frozen=True)
class Card:
    """Facts: every row has a label, a value and optionally a note."""

    title: str
    rows: Sequence[Row]


@dataclass(frozen=True)
class Table:
    """A table; columns of numbers are aligned to the right.

    A collapsed table opens at a click. It is printed unless it is long.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    collapsed: bool = False


@dataclass(frozen=True)
class Figure:
    """A chart with its caption, and its data in a collapsed table below it."""

    title: str
    chart: Chart
    caption: str = ""


@dataclass(frozen=True)
class Text:
    """Paragraphs."""

    title: str
    paragraphs: Sequence[str]


@dataclass(frozen=True)
class Banner:
    """An important statement, and what follows from it."""

    text: str
    kind: Literal["note", "good", "caution", "warning"] = "note"
    more: Sequence[str] = ()


@dataclass(frozen=True)
class Facts:
    """Questions and their answers, which may be long. None: the question is open."""

    title: str
    rows: Sequence[tuple[str, str | None]]
    open: str = "open"


@dataclass(frozen=True)
class Items:
    """A list of sentences."""

    title: str
    items: Sequence[str]


@dataclass(frozen=True)
class Part:
    """The start of a part: all blocks up to the next one belong to it. Parts begin a new page."""

    title: str
    intro: str = ""


_PAIRED = (Card, Figure, Items)
Block = Card | Table | Figure | Text | Banner | Facts | Items | Part


def render(title: str, subtitle: str, blocks: Sequence[Block]) -> str:
    """The page as text; consecutive cards, figures and lists are shown side by side."""
    style = resources.files("privagrad.report").joinpath("style.css").read_text("utf-8")
    body = "\n".join(_parts(blocks))
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{escape(title)}</title>
<style>
{style}</style>
</head>
<body>
<main>
<header>
<h1>{escape(title)}</h1>
<p>{escape(subtitle)}</p>
</header>
{body}
</main>
</body>
</html>
"""


def write_page(path: Path | str, title: str, subtitle: str, blocks: Sequence[Block]) -> None:
    """Write the page in one piece: an interrupted write leaves no file."""
    page = render(title, subtitle, blocks)
    with atomic_write(Path(path)) as file:
        file.write(page.encode("utf-8"))


def readable(value: Cell, digits: int = 4) -> str:
    """A cell as text: integers in full, other numbers with so many digits."""
    if value is None or isinstance(value, str):
        return value or "–"
    if isinstance(value, bool | np.bool_):
        return "yes" if value else "no"
    if isinstance(value, numbers.Integral):
        return f"{int(value):,}"
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "∞" if value > 0 else "-∞"
    if value != 0 and not 1e-4 <= abs(value) < 1e6:
        return scientific(value, digits - 1)
    value = value + 0.0  # no negative zero
    whole = value == int(value)
    text = f"{value:,.{0 if whole else max(0, digits - 1 - math.floor(math.log10(abs(value))))}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def aligned(cells: Sequence[Cell], digits: int = 4) -> list[str]:
    """The cells of a column as text, with the same number of decimals where few are enough."""
    texts = [readable(cell, digits) for cell in cells]
    decimals = max((len(text.partition(".")[2]) for text in texts), default=0)
    if decimals > 5 or not all(_is_number(cell) for cell in cells) or "e" in "".join(texts):
        return texts
    return [
        f"{cell:,.{decimals}f}" if isinstance(cell, numbers.Real) and math.isfinite(cell) else text
        for cell, text in zip(cells, texts, strict=True)
    ]


def scientific(value: float, digits: int) -> str:
    """1e-5 rather than 1.000e-05."""
    mantissa, exponent = f"{value:.{digits}e}".split("e")
    return f"{mantissa.rstrip('0').rstrip('.') if digits else mantissa}e{int(exponent)}"


def escape(text: object) -> str:
    """Text that is safe in HTML and SVG, between tags and within quotes."""
    return html.escape(_JOINED.sub("\u00a0", _UNPRINTABLE.sub("\ufffd", str(text))))


def prose(text: object) -> str:
    """Text for a paragraph, in which no line ends within a number or a date."""
    return _HYPHENS.sub("-\u2060", escape(text))


def _parts(blocks: Sequence[Block]) -> Iterator[str]:
    """The blocks before the first part, and each part with its blocks."""
    starts = [i for i, block in enumerate(blocks) if isinstance(block, Part)]
    yield _side_by_side(blocks[: starts[0] if starts else len(blocks)], "h2")
    for start, end in pairwise([*starts, len(blocks)]):
        part = blocks[start]
        if isinstance(part, Part):
            intro = f"<p>{escape(part.intro)}</p>" if part.intro else ""
            shown = _side_by_side(blocks[start + 1 : end], "h3")
            yield (
                f'<div class="part">\n<div class="head"><h2>{escape(part.title)}</h2>{intro}</div>'
                f"\n{shown}\n</div>"
            )


def _side_by_side(blocks: Sequence[Block], heading: str) -> str:
    parts = []
    for paired, group in groupby(blocks, key=lambda block: isinstance(block, _PAIRED)):
        shown = "\n".join(_block(block, heading) for block in group)
        parts.append(f'<div class="pair">\n{shown}\n</div>' if paired else shown)
    return "\n".join(parts)


def _block(block: Block, heading: str) -> str:
    if isinstance(block, Banner):
        sign = _SIGNS[validate.choice("kind", block.kind, _SIGNS)]
        more = "".join(f"<p>{prose(text)}</p>" for text in block.more)
        return (
            f'<div class="banner {block.kind}"><span aria-hidden="true">{sign}</span> '
            f"<div><p><strong>{prose(block.text)}</strong></p>{more}</div></div>"
        )
    kind = type(block).__name__.lower()
    head = f"<{heading}>{escape(block.title)}</{heading}>"
    if isinstance(block, Card):
        inner = head + "<dl>" + "".join(_fact(*row) for row in block.rows) + "</dl>"
    elif isinstance(block, Facts):
        inner = head + "<dl>" + "".join(_answer(*row, block.open) for row in block.rows) + "</dl>"
    elif isinstance(block, Items):
        inner = head + "<ul>" + "".join(f"<li>{prose(item)}</li>" for item in block.items) + "</ul>"
    elif isinstance(block, Text):
        inner = head + "".join(f"<p>{prose(text)}</p>" for text in block.paragraphs)
    elif isinstance(block, Figure):
        inner = head + _figure(block)
    elif isinstance(block, Table):
        inner = _titled_table(block, head)
    else:
        raise TypeError(f"Expected a block within a part, found {kind}.")
    if isinstance(block, Table) and len(block.rows) <= (
        _SHORT if len(block.columns) <= _WIDE else _MATRIX
    ):
        kind += " short"
    return f'<section class="{kind}">{inner}</section>'


def _titled_table(block: Table, head: str) -> str:
    """A table below its title. On paper, a long one that is collapsed is left out."""
    table = _table(block.title, block.columns, block.rows)
    if not block.collapsed:
        return head + table
    if len(block.rows) <= _MOST_PRINTED:
        return f"<details><summary>{head}</summary>{table}</details>"
    left_out = (
        f'<p class="unprinted">{escape(block.title)}: {len(block.rows):,} rows, not printed. The '
        "HTML file shows them.</p>"
    )
    return f'<details class="long"><summary>{head}</summary>{table}</details>{left_out}'


def _fact(label: str, value: Cell, note: str = "") -> str:
    small = f"<small>{prose(note)}</small>" if note else ""
    return f"<div><dt>{escape(label)}</dt><dd>{prose(readable(value))}{small}</dd></div>"


def _answer(question: str, answer: str | None, unanswered: str) -> str:
    told = f"<dd>{prose(answer)}</dd>"
    if answer is None:
        told = f'<dd class="open">{escape(unanswered)}</dd>'
    return f"<div><dt>{escape(question)}</dt>{told}</div>"


def _figure(figure: Figure) -> str:
    rows = figure.chart.rows
    every = math.ceil(len(rows) / _MOST_ROWS) or 1
    what = "Data" if every == 1 else f"Data: {len(rows[::every]):,} of {len(rows):,} rows"
    caption = f"<figcaption>{prose(figure.caption)}</figcaption>" if figure.caption else ""
    table = _table(f"Data of {figure.title}", figure.chart.columns, rows[::every])
    data = f"<details><summary>{what}</summary>{table}</details>" if rows else ""
    return f"<figure>{figure.chart.svg}{caption}</figure>{data}"


def _table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
    for row in rows:
        if len(row) != len(columns):
            raise ValueError(
                f"Expected {len(columns)} cells in each row of {title!r}, found {row}."
            )
    head, cells = "", []
    for i, name in enumerate(columns):
        column = [row[i] for row in rows]
        side = ' class="number"' if column and all(map(_is_number, column)) else ""
        head += f'<th scope="col"{side}>{escape(name)}</th>'
        cells.append([f"<td{side}>{escape(text)}</td>" for text in aligned(column)])
    body = "\n".join(f"<tr>{''.join(row)}</tr>" for row in zip(*cells, strict=True))
    wide = ' class="wide"' if len(columns) > _WIDE else ""
    return (
        f'<div class="scroll" role="region" aria-label="{escape(title)}" tabindex="0">'
        f"<table{wide}><thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table></div>"
    )


def _is_number(cell: Cell) -> bool:
    """Whether a cell is a number, or a text that looks like one."""
    if not isinstance(cell, str):
        return not isinstance(cell, bool | np.bool_)
    return re.fullmatch(r"[-+±]?[\d,]*\.?\d+(e-?\d+)?%?", cell) is not None
