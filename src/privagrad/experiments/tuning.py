"""Successive halving: many small trials, then larger ones of the best third."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

Candidate = TypeVar("Candidate")
KEPT = 3
"""One in KEPT candidates goes on, to trials KEPT times as large: every rung costs the same."""

_TALLEST = 3


@dataclass(frozen=True)
class Rung:
    """How many candidates are tried, and the size of their trials."""

    candidates: int
    size: int


def ladder(seconds: float, seconds_per_unit: float, largest: int, least: int) -> list[Rung]:
    """As many rungs as `seconds` allow.

    Trials of the first rung have at least `least` units. The last rung has three candidates and
    trials of at most `largest` units.
    """
    affordable = seconds / seconds_per_unit
    for height in range(_TALLEST, 0, -1):
        first = min(
            int(affordable / (height * KEPT**height)), max(least, largest // KEPT ** (height - 1))
        )
        if first >= least:
            return [
                Rung(KEPT ** (height - k), min(largest, first * KEPT**k)) for k in range(height)
            ]
    needed = KEPT * least * seconds_per_unit
    raise ValueError(
        f"Expected at least {needed / 60:.1f} minutes of tuning for each method and epsilon, found "
        f"{seconds / 60:.1f}: three of the smallest trials take that long here. Give --tune more."
    )


def halve(
    candidates: Sequence[Candidate],
    rungs: Sequence[Rung],
    score: Callable[[Candidate, int, int], float],
) -> Candidate:
    """The candidate with the least `score(candidate, rung, size)`."""
    left = list(candidates)
    for number, rung in enumerate(rungs):
        left = left[: rung.candidates]
        scores = [score(candidate, number, rung.size) for candidate in left]
        left = [left[k] for k in sorted(range(len(left)), key=lambda k: scores[k])]
    return left[0]
