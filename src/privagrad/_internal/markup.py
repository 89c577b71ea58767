"""Small tables as HTML, for notebooks: escaped, without scripts and without colours of their own.

Notebooks give tables the colours of their theme, dark or light.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

_LEFT, _RIGHT = 'style="text-align:left"', 'style="text-align:right"'


def html_table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[object]], left: int = 1
) -> str:
    """A table; its first `left` columns are aligned to the left. Without `columns` it has no head.

    Every cell is text: floats have four digits, markup and control characters are shown as such.
    """
    sides = [_LEFT if k < left else _RIGHT for k in range(1000)]
    head = _cells("th", columns, sides) if columns else ""
    body = "".join(f"<tr>{_cells('td', row, sides)}</tr>" for row in rows)
    head = f"<thead><tr>{head}</tr></thead>" if head else ""
    caption = f'<caption style="text-align:left;caption-side:top"><b>{_text(title)}</b></caption>'
    return f"<table>{caption}{head}<tbody>{body}</tbody></table>"


def html_line(text: str) -> str:
    """A line of text."""
    return f"<div>{_text(text)}</div>"


def _cells(tag: str, row: Sequence[object], sides: Sequence[str]) -> str:
    return "".join(f"<{tag} {side}>{_text(c)}</{tag}>" for c, side in zip(row, sides, strict=False))


def _text(value: object) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return escape("".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text))
