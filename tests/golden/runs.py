"""Results of seeded runs through public import paths, for comparison with `expected.json`.

This writes the results of the present code to `expected.json`, where results are meant to change:

    OPENBLAS_NUM_THREADS=1 OMP_NUM_THREADS=1 python -m tests.golden.runs --write
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.golden import commands, convex, deep

Recorded = dict[str, Any]

EXPECTED = Path(__file__).parent / "expected.json"
RUNS: dict[str, Callable[[], Recorded]] = dict(
    pair for module in (convex, commands, deep) for pair in module.runs()
)


def result_of(name: str) -> Recorded:
    """The result of a run as JSON gives it back: Python writes every digit of a float."""
    found: Recorded = json.loads(json.dumps(RUNS[name]()))
    return found


def expected() -> dict[str, Recorded]:
    found: dict[str, Recorded] = json.loads(EXPECTED.read_text(encoding="utf-8"))
    return found


def write() -> None:
    lines = (f"{json.dumps(name)}: {json.dumps(result_of(name))}" for name in RUNS)
    EXPECTED.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", required=True)
    parser.parse_args()
    write()
