"""Lower bounds on epsilon by attack, for every door: the table of docs/audit.md."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from privagrad.audit import Audit, one_release, whole_run

_START, _END = "<!-- table of make audit -->", "<!-- end of the table -->"
_TORCH = {"door": "torch", "canaries": 2000, "draws": 400_000}
_RUN: dict[str, Any] = {"door": "csr", "steps": 100}


def _audits() -> Iterator[tuple[str, Audit]]:
    singles: list[dict[str, Any]] = [
        {"door": "dense"},
        {"door": "csr", "method": "pasan"},
        {"door": "partitions"},
        {"door": "dense", "method": "dp-sgd", "noise": "discrete"},
        {"door": "dense", "projection": "euclidean"},
        _TORCH,
        {"door": "dense", "sampling": "poisson", "rate": 0.1},
        {"door": "dense", "sampling": "without_replacement", "rate": 0.5},
        {"door": "dense", "sampling": "with_replacement", "rate": 0.5},
        {**_TORCH, "rate": 0.1},
    ]
    for chosen in singles:
        for epsilon in (0.5, 1.0, 4.0):
            yield "test", one_release(epsilon, **chosen)
    for rate in (1.0, 0.1):
        for view in ("releases", "model"):
            for bound, canaries in (("test", 20_000), ("curve", 5000), ("guesses", 5000)):
                for epsilon in (1.0, 4.0):
                    chosen = {**_RUN, "rate": rate, "canaries": canaries}
                    chosen |= {"view": view, "bound": bound}
                    yield str(bound), whole_run(epsilon, **chosen)


def _table(audits: list[tuple[str, Audit]]) -> str:
    lines = ["| attack | bound | claimed | measured | part |", "|---|---|---|---|---|"]
    for bound, one in audits:
        lines.append(
            f"| {one.attack} | {bound} | {one.claimed:.3g} | {one.measured:.3g} | "
            f"{one.fraction:.0%} |"
        )
    return "\n".join(lines)


def run(arguments: list[str]) -> dict[str, Any]:
    parser = argparse.ArgumentParser(prog="python -m benchmarks audit", description=__doc__)
    parser.add_argument("--write", type=Path, help="a page to write the table into")
    given = parser.parse_args(arguments)
    audits = []
    for bound, one in _audits():
        print(f"{one.attack}, {bound}: {one.verdict}", flush=True)
        audits.append((bound, one))
    if given.write is not None:
        page = given.write.read_text("utf-8")
        before, rest = page.split(_START)
        _, after = rest.split(_END)
        text = f"{before}{_START}\n\n{_table(audits)}\n\n{_END}{after}"
        given.write.write_text(text, encoding="utf-8")
    return {"audits": [{"bound": bound, **one.as_json()} for bound, one in audits]}
