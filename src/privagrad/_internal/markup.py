"""Small tables as HTML, for notebooks: escaped, without scripts and without colours of their own.

Notebooks give tables the colours of their theme, dark or light.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape


def html_table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[object]], left: int = 1
) -> str:
    """A table; its first `left` columns are aligned to the left. Without `columns` it has no head.

    Every cell is text: floats have four digits, and markup and control characters do nothing.
    """
    head = f"<thead><tr>{_cells('th', columns, left)}</tr></thead>" if columns else ""
    body = "".join(f"<tr>{_cells('td', row, left)}</tr>" for row in rows)
    caption = f'<caption style="text-align:left;caption-side:top"><b>{_text(title)}</b></caption>'
    return f"<table>{caption}{head}<tbody>{body}</tbody></table>"


def _cells(tag: str, row: Sequence[object], left: int) -> str:
    return "".join(
        f'<{tag} style="text-align:{"left" if k < left else "right"}">{_text(cell)}</{tag}>'
        for k, cell in enumerate(row)
    )


def _text(value: object) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return escape("".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text))
