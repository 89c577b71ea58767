"""Problems, methods compared on them, and the paper's experiments.

Every experiment reads its rows without privacy, to tune and to measure: it compares methods and
releases no model.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable
from pathlib import Path

DELTA = 1e-5
"""Of all experiments: the paper does not state its own."""


def write_csv(path: Path, columns: Iterable[str], rows: Iterable[Iterable[object]]) -> Path:
    """Write a table; its folder is made if there is none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(rows)
    return path
