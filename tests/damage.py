"""Files as strangers write them: good ones that were damaged, and ones made to harm."""

from __future__ import annotations

import json
import random
from typing import Any

_WORDS = (
    b"", b"\0", b"\xff", b"\xef\xbb\xbf", b"\n", b"\r", b'"', b",", b";", b"'", b"[", b"{", b"}",
    b"nan", b"inf", b"-inf", b"1e999", b"-1", b"0", b"99999999999999999999", b"1:2", b"0:1",
    b"2147483647:1", b"null", b"true", b"NaN", b"Infinity", b"__reduce__", b"\xed\xa0\x80",
    b"%s%n", b"../../x", b"=1+1", b"\t", b" ", b"#", b"9" * 5000, b"[" * 2000, b"\x80\x04c",
)  # fmt: skip
_VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 10**400, -(10**30), 0.5, 1e308, float("nan"), float("inf"), "",
    "x", "nan", "\ud800", "a" * 5000, [], {}, [[]], [None], {"": None}, [1, 2, 3], {"kind": "x"},
)  # fmt: skip


def damaged(content: bytes, luck: random.Random, others: list[bytes]) -> bytes:
    """Bytes with one to four things wrong; now and then, others altogether."""
    if luck.random() < 0.02:
        return luck.randbytes(luck.randrange(400))
    result = bytearray(content)
    for _ in range(luck.choice((1, 1, 1, 2, 4))):
        at = luck.randrange(len(result) + 1)
        how = luck.randrange(7)
        if how == 0:
            del result[at:]
        elif how == 1 and result:
            result[min(at, len(result) - 1)] = luck.randrange(256)
        elif how == 2 and result:
            result[min(at, len(result) - 1)] ^= 1 << luck.randrange(8)
        elif how == 3:
            result[at:at] = luck.choice(_WORDS)
        elif how == 4:
            del result[at : at + luck.randrange(1, 40)]
        elif how == 5:
            piece = result[at : at + luck.randrange(1, 200)]
            result[luck.randrange(len(result) + 1) : 0] = piece
        else:
            other = luck.choice(others)
            cut = luck.randrange(len(other) + 1)
            result[at : at + luck.randrange(100)] = other[cut : cut + luck.randrange(200)]
    return bytes(result)


def changed(value: Any, luck: random.Random) -> Any:
    """JSON with one to three entries replaced, left out or doubled, wherever they are."""
    result = json.loads(json.dumps(value))
    for _ in range(luck.choice((1, 1, 2, 3))):
        places = list(_places(result))
        if not places:
            return luck.choice(_VALUES)
        holder, key = luck.choice(places)
        how = luck.random()
        if how < 0.2:
            del holder[key]
        elif how < 0.3 and isinstance(holder, list):
            holder.append(holder[key])
        elif how < 0.4 and isinstance(holder, dict):
            holder[luck.choice(("x", "", "__class__", "version"))] = holder[key]
        elif how < 0.55 and isinstance(holder[key], int | float):
            holder[key] = holder[key] * luck.choice((-1, 2, 1e-9, 1e9)) + luck.choice((0, 1))
        else:
            holder[key] = luck.choice(_VALUES)
    return result


def _places(value: Any) -> Any:
    entries = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in list(entries):
        yield value, key
        if isinstance(inner, dict | list):
            yield from _places(inner)
