"""Results of seeded runs through public import paths, for comparison with `expected.json`.

This writes the results of the present code to `expected.json`, where results are meant to change.
Those that agree with what is recorded stay as they are: other machines round differently.

    OPENBLAS_NUM_THREADS=1 OMP_NUM_THREADS=1 python -m tests.golden.runs --write
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.golden import commands, convex, deep
from tests.golden.comparison import differences

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
    recorded = expected()
    lines = (f"{json.dumps(name)}: {json.dumps(_renewed(name, recorded))}" for name in RUNS)
    EXPECTED.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def _renewed(name: str, recorded: dict[str, Recorded]) -> Recorded:
    found = result_of(name)
    if name not in recorded or any(differences(found, recorded[name])):
        return found
    return recorded[name]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", required=True)
    parser.parse_args()
    write()
