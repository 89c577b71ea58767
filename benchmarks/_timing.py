"""Timing for noisy machines: contestants take turns, and ratios are taken within a turn."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable


def take_turns(contestants: dict[str, Callable[[], float]], turns: int) -> dict[str, list[float]]:
    """Each contestant once a turn, after a warm-up; a contestant returns its own seconds."""
    for contestant in contestants.values():
        contestant()
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(turns):
        for name, contestant in contestants.items():
            seconds[name].append(contestant())
    return seconds


def median_ratio(over: list[float], under: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(over, under, strict=True))


def repeated(call: Callable[[], object], times: int) -> Callable[[], float]:
    """Mean seconds of one of `times` calls."""

    def measure() -> float:
        start = time.perf_counter()
        for _ in range(times):
            call()
        return (time.perf_counter() - start) / times

    return measure
