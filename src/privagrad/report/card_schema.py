"""The JSON Schema of privacy cards, and a check of values against it without another library."""

from __future__ import annotations

import json
import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from importlib import resources
from typing import Any

Place = tuple[str | int, ...]
"""Keys and numbers that lead to a value."""

_TOLD = {"$schema", "$id", "$defs", "$comment", "title", "description", "examples"}
_LIMITS: dict[str, tuple[str, Callable[[float, float], bool]]] = {
    "minimum": ("at least", operator.ge),
    "exclusiveMinimum": ("above", operator.gt),
    "exclusiveMaximum": ("below", operator.lt),
}
_SHOWN = 60
_LARGEST = 10**300


@lru_cache(maxsize=1)
def card_schema() -> dict[str, Any]:
    """The schema of this version's cards (JSON Schema, draft 2020-12)."""
    text = resources.files("privagrad.report").joinpath("card.schema.json").read_text("utf-8")
    schema: dict[str, Any] = json.loads(text)
    return schema


def schema_problems(value: Any, schema: Mapping[str, Any] | None = None) -> list[tuple[Place, str]]:
    """Where a value differs from the schema, and how; empty if it is valid.

    Only the keywords of `card.schema.json` are known. A schema with another one is refused.
    """
    root = card_schema() if schema is None else schema
    return list(_problems(value, root, root, ()))


def _problems(
    value: Any, schema: Mapping[str, Any], root: Mapping[str, Any], path: Place
) -> Iterator[tuple[Place, str]]:
    if "$ref" in schema:
        name = schema["$ref"].removeprefix("#/$defs/")
        yield from _problems(value, root["$defs"][name], root, path)
        return
    if "oneOf" in schema:
        yield from _one_of(value, schema["oneOf"], root, path)
        return
    if "type" in schema and not _has_type(value, schema["type"]):
        kinds = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        yield path, f"expected {' or '.join(kinds)}, found {shown(value)}"
        return
    for keyword, told in schema.items():
        if keyword in _TOLD or keyword in ("type", "required", "additionalProperties"):
            continue
        yield from _keyword(value, keyword, told, root, path)
    if isinstance(value, dict):
        yield from _members(value, schema, path)


def _keyword(
    value: Any, keyword: str, told: Any, root: Mapping[str, Any], path: Place
) -> Iterator[tuple[Place, str]]:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if keyword == "const":
        if not _same(value, told):
            yield path, f"expected {shown(told)}, found {shown(value)}"
    elif keyword == "enum":
        if not any(_same(value, option) for option in told):
            yield path, f"expected one of {', '.join(map(shown, told))}; found {shown(value)}"
    elif keyword in _LIMITS:
        words, fits = _LIMITS[keyword]
        if number and not fits(value, told):
            yield path, f"expected a number {words} {told}, found {shown(value)}"
    elif keyword == "pattern":
        if isinstance(value, str) and not re.search(told, value):
            yield path, f"expected a text like {told}, found {shown(value)}"
    elif keyword in ("minItems", "minLength"):
        if isinstance(value, list if keyword == "minItems" else str) and len(value) < told:
            yield path, f"expected a length of at least {told}, found {len(value)}"
    elif keyword == "items":
        for place, part in enumerate(value if isinstance(value, list) else []):
            yield from _problems(part, told, root, (*path, place))
    elif keyword == "properties":
        for name, inner in told.items() if isinstance(value, dict) else ():
            if name in value:
                yield from _problems(value[name], inner, root, (*path, name))
    else:
        raise ValueError(f"Expected a known keyword in the schema of cards, found {keyword!r}.")


def _members(
    value: dict[str, Any], schema: Mapping[str, Any], path: Place
) -> Iterator[tuple[Place, str]]:
    for name in schema.get("required", ()):
        if name not in value:
            yield path, f"expected a field {name!r}, found none"
    if schema.get("additionalProperties") is False:
        for name in value:
            if name not in schema.get("properties", {}):
                yield (*path, name), f"expected no field {shown(name)}"


def _one_of(
    value: Any, options: list[Mapping[str, Any]], root: Mapping[str, Any], path: Place
) -> Iterator[tuple[Place, str]]:
    """The problems with the option that fits best: the one whose problems lie deepest."""
    found = [list(_problems(value, option, root, path)) for option in options]
    fitting = sum(not problems for problems in found)
    if fitting == 1:
        return
    if fitting > 1:
        yield path, f"expected one kind of value, found one that fits {fitting}"
        return
    yield from min(found, key=lambda problems: (_misfit(problems, path), len(problems)))


def _misfit(problems: list[tuple[Place, str]], path: Place) -> bool:
    """Whether the value is of another kind than the option."""
    return any(where in (path, (*path, "kind")) for where, _ in problems)


def _has_type(value: Any, kinds: str | list[str]) -> bool:
    tests = {
        "null": value is None,
        "boolean": isinstance(value, bool),
        "string": isinstance(value, str),
        "array": isinstance(value, list),
        "object": isinstance(value, dict),
        "number": _is_number(value),
        "integer": _is_number(value) and float(value).is_integer(),
    }
    return any(tests[kind] for kind in ([kinds] if isinstance(kinds, str) else kinds))


def _is_number(value: Any) -> bool:
    """Whether a value is a finite number within the range of double precision."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return abs(value) <= _LARGEST if isinstance(value, int) else math.isfinite(value)


def _same(value: Any, other: Any) -> bool:
    """Equal as JSON: true is not 1."""
    return isinstance(value, bool) == isinstance(other, bool) and bool(value == other)


def shown(value: Any) -> str:
    """A value in an error, short."""
    text = json.dumps(value, ensure_ascii=True, default=str)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
