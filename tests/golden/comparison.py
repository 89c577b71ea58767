"""Where two recorded results differ, to the last bit or within a tolerance."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from typing import Any

import numpy as np

EXACT = os.environ.get("PRIVAGRAD_GOLDEN") == "exact"
# Other processors and builds of BLAS round sums and exponentials differently.
TOLERANCE = 1e-6
# PyTorch's parameters are float32: each step of a training adds its own rounding errors.
FLOAT32_TOLERANCE = 1e-4
# Reports print four digits.
PRINTED_TOLERANCE = 1e-3
_NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e[+-]?\d+)?")


def differences(found: Any, expected: Any, where: str = "", exact: bool = EXACT) -> Iterator[str]:
    """One line for each place where `found` is not what was `expected`."""
    if isinstance(found, dict) and isinstance(expected, dict):
        if found.keys() != expected.keys():
            yield f"{where}: keys {sorted(found)} instead of {sorted(expected)}"
        elif "sha256" in expected and not exact:
            yield from _summaries(found, expected, where)
        else:
            for key, value in expected.items():
                yield from differences(found[key], value, f"{where}/{key}", exact)
    elif not exact and _is_numeric(expected) and _is_numeric(found):
        if not _close(found, expected, TOLERANCE):
            yield f"{where}: {found} instead of {expected}"
    elif isinstance(found, list) and isinstance(expected, list) and len(found) == len(expected):
        for number, (one, other) in enumerate(zip(found, expected, strict=True)):
            yield from differences(one, other, f"{where}/{number}", exact)
    elif not exact and isinstance(found, str) and isinstance(expected, str):
        if not _same_text(found, expected):
            yield f"{where}: {found!r} instead of {expected!r}"
    # As text, because 0.0 == -0.0 and NaN != NaN.
    elif json.dumps(found) != json.dumps(expected):
        yield f"{where}: {found!r} instead of {expected!r}"


def _is_numeric(value: Any) -> bool:
    """A float, or floats in lists of equal lengths; integers and flags are compared exactly."""
    if isinstance(value, list):
        return bool(value) and all(_is_numeric(entry) for entry in value)
    return isinstance(value, float)


def _close(found: Any, expected: Any, tolerance: float, size: float | None = None) -> bool:
    """Within the tolerance of each entry's own size and of the largest entry's."""
    a, b = np.asarray(found), np.asarray(expected)
    if a.shape != b.shape:
        return False
    largest = np.abs(b[np.isfinite(b)]).max(initial=0.0) if size is None else size
    return bool(np.allclose(a, b, rtol=tolerance, atol=tolerance * largest, equal_nan=True))


def _summaries(found: dict[str, Any], expected: dict[str, Any], where: str) -> Iterator[str]:
    """Of tensors: without their hashes, in units of their norms."""
    for key in ("sum", "norm", "first"):
        if not _close(found[key], expected[key], FLOAT32_TOLERANCE, expected["norm"]):
            yield f"{where}/{key}: {found[key]} instead of {expected[key]}"


def _same_text(found: str, expected: str) -> bool:
    """The same words, and numbers that agree in the digits that are printed."""
    if _NUMBER.sub("#", found) != _NUMBER.sub("#", expected):
        return False
    pairs = zip(_NUMBER.findall(found), _NUMBER.findall(expected), strict=True)
    return all(a == b or _close(float(a), float(b), PRINTED_TOLERANCE) for a, b in pairs)
