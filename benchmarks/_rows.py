"""Lines of a benchmark's table: printed as they come, written as CSV."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

import numpy as np


@dataclass(frozen=True)
class Row:
    """What a contestant reached, a value for each seed; epsilon None: without privacy."""

    data: str
    epsilon: float | None
    contestant: str
    metric: str
    values: list[float]
    note: str = ""

    def __str__(self) -> str:
        mean, sd = (_number(float(f(self.values))) for f in (np.mean, np.std))
        epsilon = "none" if self.epsilon is None else f"{self.epsilon:g}"
        start = f"{self.data:12} {epsilon:5} {self.contestant:18} {self.metric:18}"
        return f"{start} {mean:>9} ± {sd:<9} {self.note}".rstrip()

    def record(self) -> dict[str, object]:
        mean, sd = float(np.mean(self.values)), float(np.std(self.values))
        return {**vars(self), "mean": mean, "sd": sd}


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.4g}"


def write_csv(rows: list[Row], path: Path) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0].record()))
        writer.writeheader()
        writer.writerows(row.record() for row in rows)
