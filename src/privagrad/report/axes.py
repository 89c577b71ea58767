"""Axes of charts: positions of values, ticks, and the width of labels."""

from __future__ import annotations

import math
import unicodedata
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from privagrad._internal.validate import Vector
from privagrad.report.page import readable, scientific

# In drawing units. A phone shows one as 3/4 of a pixel: the text still has 9 pixels there.
WIDTH, TEXT = 420.0, 13.0
LARGEST = 1e300


@dataclass(frozen=True)
class Axis:
    """A linear map of [low, high] onto [start, end]; on a log axis, of the logarithms."""

    low: float
    high: float
    ticks: list[float]
    labels: list[str]
    start: float = 0.0
    end: float = 1.0

    def place(self, at: Vector) -> Vector:
        share = (np.clip(at, self.low, self.high) - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)

    def marks(self) -> list[tuple[float, str]]:
        return list(zip(self.place(np.array(self.ticks)).tolist(), self.labels, strict=True))

    def between(self, left: float, right: float) -> Axis:
        """From `left` to `right`, less the room that the first and the last label need."""
        first, last = text_width(self.labels[0]) / 2, text_width(self.labels[-1]) / 2
        return replace(self, start=max(left, first), end=min(right, WIDTH - last))


def scaled_values(values: NDArray[np.float64], log: bool) -> NDArray[np.float64]:
    """Coordinates on an axis; infinite for values that are too large or too small for it."""
    scaled = np.where(np.abs(values) > LARGEST, np.copysign(np.inf, values), values)
    if log:
        below = scaled < 1 / LARGEST
        scaled = np.where(below, -np.inf, np.log10(np.where(below, 1.0, scaled)))
    return scaled


def axis_of(at: Vector, log: bool, limits: Vector | None = None, room: float = 4 * WIDTH) -> Axis:
    """An axis with ticks that cover the values, or lie within the limits, and fit into `room`."""
    known = at[np.isfinite(at)]
    low, high = ends(known if limits is None else limits)
    if high - low <= (1e-6 if log else max(1e-12 * max(abs(low), abs(high)), 1 / LARGEST)):
        pad = 0.3 if log else abs(low) / 2 if abs(low) > 1 / LARGEST else 1.0
        low, high = low - pad, high + pad
    for about in (5, 4, 3, 2, 1):
        ticks, labels = (_powers if log else _steps)(low, high, about)
        if 1.4 * sum(map(text_width, labels)) < room:
            break
    if limits is None:
        return Axis(min(low, ticks[0]), max(high, ticks[-1]), ticks, labels)
    slack = 1e-9 * (high - low)
    inside = [i for i, tick in enumerate(ticks) if low - slack <= tick <= high + slack]
    if not inside:
        return Axis(low, high, [low, high], [readable(10.0**low), readable(10.0**high)])
    return Axis(low, high, [ticks[i] for i in inside], [labels[i] for i in inside])


def _steps(low: float, high: float, about: int) -> tuple[list[float], list[str]]:
    """Multiples of 1, 2 or 5 times a power of ten, from at most `low` to at least `high`."""
    power = math.floor(math.log10((high - low) / about))
    step = next(m for m in (1, 2, 5, 10) if m * 10.0**power * about >= (high - low) * (1 - 1e-9))
    power, step = (power + 1, 1) if step == 10 else (power, step)
    width = step * 10.0**power
    first, last = math.floor(low / width + 1e-9), math.ceil(high / width - 1e-9)
    ticks = [k * width for k in range(first, last + 1)]
    size = math.floor(math.log10(max(map(abs, ticks))))
    if -4 <= size < 6:
        return ticks, [f"{tick:,.{max(0, -power)}f}" if tick else "0" for tick in ticks]
    return ticks, [scientific(tick, size - power) if tick else "0" for tick in ticks]


def _powers(low: float, high: float, about: int) -> tuple[list[float], list[str]]:
    """The same for a log axis: powers of ten; on short axes also 2 and 5 times a power of ten."""
    first, last = math.floor(low + 1e-9), math.ceil(high - 1e-9)
    every = math.ceil((last - first) / (about + 1))
    marks = [(1, e) for e in range(first, last + every, every)]
    if high - low < 2 and about > 2:
        marks = [(m, e) for e in range(first, last + 1) for m in (1, 2, 5)]
    ticks = [e + math.log10(m) for m, e in marks]
    begin = max(i for i, tick in enumerate(ticks) if tick <= low + 1e-9)
    end = min(i for i, tick in enumerate(ticks) if tick >= high - 1e-9) + 1
    plain = all(-5 < e < 6 for _, e in marks[begin:end])
    labels = [readable(m * 10.0**e) if plain else f"{m}e{e}" for m, e in marks[begin:end]]
    return ticks[begin:end], labels


def ends(values: Vector) -> tuple[float, float]:
    """The least and the largest value."""
    return float(np.min(values)), float(np.max(values))


def text_width(text: str) -> float:
    """An upper estimate of the width of a text, also in wide fonts."""
    wide = sum(unicodedata.east_asian_width(letter) in "WF" for letter in text)
    return TEXT * (0.59 * len(text) + 0.4 * wide)
