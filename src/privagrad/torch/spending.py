"""What an engine has released, run by run, in memory and beside its checkpoints."""

from __future__ import annotations

import json
import math
import uuid
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from privagrad.accounting import PrivacyPlan
from privagrad.events import GaussianEvent

Entry = tuple[str, GaussianEvent]


class Spending:
    """Counts releases by run and event.

    A run that goes on from a checkpoint notes each release in a file beside that checkpoint, so
    that another run from the same checkpoint, in any process, counts it too.
    """

    def __init__(self) -> None:
        self.run = uuid.uuid4().hex
        self.counts: dict[Entry, int] = {}
        self.unprotected = 0
        self._journals: list[Path] = []

    def charge(self, event: GaussianEvent | None) -> None:
        """Note one release, before it is made; None: one without noise."""
        if event is None:
            self.unprotected += 1
        else:
            entry = (self.run, replace(event, count=1))
            self.counts[entry] = self.counts.get(entry, 0) + 1
        line = json.dumps({"run": self.run, "event": None if event is None else asdict(event)})
        for journal in self._journals:
            with journal.open("a", encoding="utf-8") as file:
                file.write(line + "\n")

    @property
    def events(self) -> tuple[GaussianEvent, ...]:
        """All releases, the same ones together."""
        totals: dict[GaussianEvent, int] = {}
        for (_, event), count in self.counts.items():
            totals[event] = totals.get(event, 0) + count
        return tuple(replace(event, count=count) for event, count in totals.items())

    def __len__(self) -> int:
        return sum(self.counts.values()) + self.unprotected

    def get_epsilon(self, delta: float) -> float:
        """The composition of all releases, at `delta`."""
        if self.unprotected:
            return math.inf
        return PrivacyPlan(self.events).epsilon(delta)

    def state_dict(self) -> dict[str, Any]:
        return {
            "unprotected": self.unprotected,
            "counts": [
                {"run": run, "event": asdict(event), "count": count}
                for (run, event), count in self.counts.items()
            ],
        }

    def resume(self, state: dict[str, Any], checkpoint: Path) -> None:
        """Go on from a checkpoint: its releases, all made from it since, and our own count."""
        self.unprotected = max(self.unprotected, int(state["unprotected"]))
        for record in state["counts"]:
            self._at_least(record["run"], record["event"], int(record["count"]))
        journal = checkpoint.with_name(checkpoint.name + ".resumed")
        since: dict[str, int] = {}
        if journal.exists():
            for line in journal.read_text(encoding="utf-8").splitlines():
                since[line] = since.get(line, 0) + 1
        for line, count in since.items():
            record = json.loads(line)
            if record["event"] is None:
                self.unprotected += count
            else:
                self._at_least(record["run"], record["event"], count)
        if journal not in self._journals:
            self._journals.append(journal)
        self.run = uuid.uuid4().hex

    def _at_least(self, run: str, event: dict[str, Any], count: int) -> None:
        entry = (run, replace(GaussianEvent(**event), count=1))
        self.counts[entry] = max(self.counts.get(entry, 0), count)
