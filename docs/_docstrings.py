"""How this library's docstrings are read by mkdocstrings.

Items of Parameters and Attributes are written as `name : what it is`, with a type only where the
signature does not say it; sentences may follow them; what is promised stands under `Guarantees`.
"""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any

from griffe import Extension, Object

_ITEM = re.compile(r"^(\*{0,2}\w+(?:, \*{0,2}\w+)*)(?: : (.+))?$")
_TYPES = ("float", "int", "str", "bool", "dict", "list", "tuple", "array", "arrays", "{")
_LONGEST_TYPE = 60


class PlainItems(Extension):
    """Rewrites docstrings before they are parsed."""

    def on_instance(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = rewritten(obj.docstring.value)


def rewritten(text: str) -> str:
    """The docstring with its sentences first, guarantees in a box, then items with descriptions."""
    prose: list[str] = []
    box: list[str] = []
    sections: list[str] = []
    for lines in _sections(text.splitlines()):
        title = _title(lines)
        if not title:
            prose += _fenced_tables(lines)
        elif title == "Guarantees":
            box = ['!!! abstract "Guarantees"', ""]
            box += [f"    {line}".rstrip() for line in lines[2:]]
        elif title in ("Parameters", "Attributes"):
            items, sentences = _items(lines[2:])
            sections += [*lines[:2], *items, ""]
            prose += ["", *sentences]
        else:
            sections += [*lines, ""]
    return "\n".join([*prose, "", *box, "", *sections]).strip()


def _title(lines: list[str]) -> str:
    underlined = len(lines) > 1 and re.fullmatch(r"-{3,}", lines[1])
    return lines[0] if underlined else ""


def _sections(lines: list[str]) -> list[list[str]]:
    """The lines up to the first underlined title, then from title to title."""
    starts = [k for k in range(len(lines)) if _title(lines[k : k + 2])]
    edges = [0, *starts, len(lines)]
    return [lines[a:b] for a, b in pairwise(edges) if b > a]


def _items(lines: list[str]) -> tuple[list[str], list[str]]:
    """Items, each with its own name and its description below; and the sentences after them."""
    items: list[str] = []
    sentences: list[str] = []
    names: list[str] = []
    below: list[str] = []

    def close() -> None:
        told = below if " : " in "".join(names) else _punctuated(below)
        for name in names:
            items.extend([name, *told])

    for line in lines:
        found = _ITEM.match(line)
        if sentences or (line and not line.startswith(" ") and not found):
            sentences.append(line)
        elif found:
            close()
            told = found[2] or ""
            kind = f" : {told}" if _is_type(told) else ""
            names = [name + kind for name in found[1].split(", ")]
            below = [] if kind or not told else [f"    {told}"]
        else:
            below.append(line)
    close()
    return items, sentences


def _punctuated(lines: list[str]) -> list[str]:
    """A full stop where a line in place of a type is followed by a sentence."""
    if len(lines) > 1 and lines[1].strip()[:1].isupper() and re.search(r"[\w)]$", lines[0]):
        return [f"{lines[0]}.", *lines[1:]]
    return lines


def _is_type(text: str) -> bool:
    return text.startswith(_TYPES) and len(text) < _LONGEST_TYPE


def _fenced_tables(lines: list[str]) -> list[str]:
    """Tables drawn with = stay as they are drawn."""
    edges = [k for k, line in enumerate(lines) if re.fullmatch(r"=+( =+)+", line)]
    if not edges:
        return lines
    first, last = edges[0], edges[-1] + 1
    drawn = [line.replace("\\|", "|") for line in lines[first:last]]
    return [*lines[:first], "```text", *drawn, "```", *lines[last:]]
