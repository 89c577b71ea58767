"""Successive halving: many settings for a short while, the best third for three times as long."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

Candidate = TypeVar("Candidate")
KEPT = 3
"""One in so many goes on, for so many times as long: every rung costs the same."""

_TALLEST = 3


@dataclass(frozen=True)
class Rung:
    """How many candidates get how many steps."""

    candidates: int
    steps: int


def ladder(seconds: float, seconds_per_step: float, steps: int, least: int) -> list[Rung]:
    """As many rungs as `seconds` allow, with at least `least` steps in the first.

    The last one has three candidates and at most `steps` steps.
    """
    affordable = seconds / seconds_per_step
    for height in range(_TALLEST, 0, -1):
        first = min(
            int(affordable / (height * KEPT**height)), max(least, steps // KEPT ** (height - 1))
        )
        if first >= least:
            return [Rung(KEPT ** (height - k), min(steps, first * KEPT**k)) for k in range(height)]
    needed = KEPT * least * seconds_per_step
    raise ValueError(
        f"Expected at least {needed / 60:.1f} minutes of tuning for each method and epsilon, found "
        f"{seconds / 60:.1f}: three candidates of {least} steps take that long here."
    )


def halve(
    candidates: Sequence[Candidate],
    rungs: Sequence[Rung],
    score: Callable[[Candidate, int, int], float],
) -> Candidate:
    """The candidate with the least score; `score` is asked with a candidate, rung and steps."""
    left = list(candidates)
    for number, rung in enumerate(rungs):
        left = left[: rung.candidates]
        scores = [score(candidate, number, rung.steps) for candidate in left]
        left = [left[k] for k in sorted(range(len(left)), key=lambda k: scores[k])]
    return left[0]
