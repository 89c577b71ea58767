"""What an engine has released, run by run, in memory and beside its checkpoints."""

from __future__ import annotations

import os
import uuid
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from privagrad._internal import validate
from privagrad.privacy.accounting import PrivacyPlan
from privagrad.privacy.codec import as_json, from_json
from privagrad.privacy.events import GaussianEvent, Unit, merged, single
from privagrad.torch import journal
from privagrad.torch.opacus_names import hint_for_accountant

IGNORED_OPTIONS = ("alphas", "eps_error", "delta_error", "poisson")
"""What the accountants of Opacus take besides delta: privacy loss distributions need none of it."""

Entry = tuple[str, GaussianEvent]


@dataclass(frozen=True)
class Charge:
    """What was charged for one release; None: it has no noise."""

    entry: Entry | None


class Accountant:
    """Counts the releases of an engine by run and event, in the process that made the engine.

    A run that continues from a checkpoint, the one that wrote it or another, notes each release in
    a file beside that checkpoint, so that any later run from it, in any process, counts it too.
    """

    def __init__(self) -> None:
        self.run = uuid.uuid4().hex
        self.counts: dict[Entry, int] = {}
        self.unprotected = 0
        self.unit: Unit | None = None
        self._journals: list[Path] = []
        self._process = os.getpid()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Of a copy: what it releases counts beside what the original releases."""
        vars(self).update(state, run=uuid.uuid4().hex)

    def check_process(self) -> None:
        """Refuse a copy of the accountant in another process: its releases would not be counted."""
        if os.getpid() != self._process:
            raise RuntimeError(
                f"Expected the process {self._process}, which made the PrivacyEngine, found a copy "
                f"of it in process {os.getpid()}: releases charged to a copy are missing from the "
                "account. Make the engine in the process that trains; to go on elsewhere, use "
                "save_checkpoint and load_checkpoint."
            )

    def protect(self, unit: Unit) -> None:
        """All releases protect this unit; refuse another than those before."""
        if self.unit not in (None, unit):
            what = "Give make_private groups=" if self.unit == "user" else "Leave groups= out"
            raise ValueError(
                f"Expected a training whose unit is {self.unit!r}, as that of this engine's "
                f"releases or of its checkpoint, found {unit!r}: an epsilon for rows and one for "
                f"users do not add up. {what}, or use a new engine, for other data."
            )
        self.unit = unit

    def charge(self, event: GaussianEvent | None) -> Charge:
        """Note one release, before it is made; None: one without noise.

        Releases that are only charged together, as those of a block of correlated noise, are one.
        """
        self.check_process()
        entry = None
        if event is None:
            self.unprotected += 1
        else:
            entry = (self.run, single(event))
            self.counts[entry] = self.counts.get(entry, 0) + 1
        if self._journals:
            self._write(entry)
        return Charge(entry)

    def _write(self, entry: Entry | None) -> None:
        """Note a release that has been counted beside all checkpoints that are followed."""
        record: dict[str, Any] = {"run": self.run, "event": None}
        if entry is not None:
            record |= {"event": as_json(entry[1]), "count": self.counts[entry]}
        for path in self._journals:
            journal.append(path, record)

    def exchange(self, charge: Charge, event: GaussianEvent | None) -> Charge:
        """Note that a release charged before is made with other noise than was expected.

        Files beside checkpoints keep both: they may count a release too many, never one too few.
        What was charged without noise stays so.
        """
        new = self.charge(event)
        if charge.entry is not None:
            self.counts[charge.entry] -= 1
            if not self.counts[charge.entry]:
                del self.counts[charge.entry]
        return new

    @property
    def events(self) -> tuple[GaussianEvent, ...]:
        """All releases, the same ones together."""
        return merged(
            replace(event, count=count * event.count) for (_, event), count in self.counts.items()
        )

    def __len__(self) -> int:
        return sum(event.count for event in self.events) + self.unprotected

    def get_epsilon(self, delta: float, **options: Any) -> float:
        """The composition of all releases, at `delta`.

        Options of Opacus's accountants (`alphas`, `eps_error`, `delta_error`, `poisson`) are
        accepted; nothing depends on them.
        """
        validate.known_options("get_epsilon", options, IGNORED_OPTIONS)
        return self.plan.epsilon(delta)

    @property
    def history(self) -> list[tuple[float, float, int]]:
        """(noise multiplier, sampling rate, number of releases), as in Opacus; a copy, to read.

        Releases over all rows have the rate 1, those without noise the multiplier 0.
        """
        found = [(e.noise_multiplier, e.rate, e.count) for e in self.events]
        return found + ([(0.0, 1.0, self.unprotected)] if self.unprotected else [])

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(hint_for_accountant(name), name=name, obj=self)

    @property
    def plan(self) -> PrivacyPlan:
        """Everything released so far."""
        return PrivacyPlan(self.events, unprotected=self.unprotected > 0)

    def state_dict(self) -> dict[str, Any]:
        return {
            "unit": self.unit,
            "unprotected": self.unprotected,
            "counts": [
                {"run": run, "event": as_json(event), "count": count}
                for (run, event), count in self.counts.items()
            ],
        }

    def resume(self, state: dict[str, Any], checkpoint: Path) -> None:
        """Continue from a checkpoint: count its releases and all made from it since."""
        # The same in all processes of a training, whose notes of one release count once.
        run = uuid.uuid5(uuid.UUID(self.run), "resumed").hex
        try:
            self._count(state)
            for record in journal.records(self.follow(checkpoint)):
                # What a faster process has noted of this run, this one charges itself.
                if record["run"] != run:
                    self._count_one(record)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"Expected the releases of {checkpoint.name}, found damaged ones: {error!r}."
            ) from error
        self.run = run

    def _count(self, state: dict[str, Any]) -> None:
        """Count the releases of an account as it was saved."""
        unit: Unit | None = state.get("unit", "row")
        if unit is not None:
            self.protect(unit)
        self.unprotected = max(self.unprotected, int(state["unprotected"]))
        for record in state["counts"]:
            self._at_least(record["run"], record["event"], record["count"])

    def _count_one(self, record: dict[str, Any]) -> None:
        """Count a release that was noted after the account was saved."""
        if record["event"] is None:
            self.unprotected += 1
        else:
            self._at_least(record["run"], record["event"], record["count"])

    def follow(self, checkpoint: Path) -> Path:
        """From now on note releases beside this checkpoint too: they are made from it."""
        path = checkpoint.with_name(checkpoint.name + ".resumed")
        if path not in self._journals:
            self._journals.append(path)
        return path

    def _at_least(self, run: str, event: dict[str, Any], count: object) -> None:
        number = validate.integer("count", count, least=1)
        found = from_json(event)
        if not isinstance(found, GaussianEvent):
            raise ValueError(f"Expected Gaussian releases in a checkpoint, found {found}.")
        entry = (run, single(found))
        self.counts[entry] = max(self.counts.get(entry, 0), number)
