"""Processes that are killed at random moments, and what they leave behind.

A child notes every release in a file of its own BEFORE it is made: what the world may have seen. An
under-count is a release that was noted and that nobody is charged for.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from privagrad._internal.atomic import atomic_write
from privagrad.data.models import load_model, save_model
from privagrad.fitting import prepare, run
from privagrad.privacy.events import GaussianEvent
from privagrad.privacy.ledger import Ledger
from privagrad.privacy.mechanism import GaussianSum
from privagrad.torch import PrivacyEngine
from tests import killing
from tests.torch.small import private

SIGNALS = (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
EVENT = GaussianEvent(500.0, 1, purpose="a release")


@dataclass
class Seen:
    """What kills of one kind of work left."""

    kills: int = 0
    finished: int = 0
    releases: int = 0
    charged: int = 0
    under: list[str] = field(default_factory=list)

    def note(self, released: int, charged: int, where: str) -> None:
        self.releases += released
        self.charged += charged
        if released > charged:
            self.under.append(f"{where}: {released} released, {charged} charged")


def kill(work: Callable[[], Any], moment: float, how: signal.Signals) -> bool:
    """Do the work in a child and send it a signal after so many seconds; whether it was in time."""
    sys.stdout.flush()
    child = os.fork()
    if not child:
        code = 1
        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            work()
            code = 0
        except KeyboardInterrupt:
            code = 130
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    time.sleep(moment)
    os.kill(child, how)
    code = os.waitstatus_to_exitcode(_ended(child, how))
    if code not in (0, 130, -signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT):
        raise RuntimeError(f"Expected a child that {how.name} ends, found exit code {code}.")
    return code != 0


def _ended(child: int, how: signal.Signals) -> int:
    """How a child ended. Python loses a Ctrl-C that comes while it finalizes an object: again."""
    while how == signal.SIGINT:
        for _ in range(100):
            found, status = os.waitpid(child, os.WNOHANG)
            if found:
                return status
            time.sleep(0.05)
        os.kill(child, how)
    return os.waitpid(child, 0)[1]


def duration(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    if kill(work, 0.0, signal.SIGCONT):
        raise RuntimeError("Expected work that succeeds if nobody kills it, found an error.")
    return time.perf_counter() - start


def _append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def told_before_release(folder: Path) -> None:
    """In a child: note every release before it is made."""
    release = GaussianSum.release

    def told(self: GaussianSum, *arguments: Any) -> Any:
        _append(folder / "released", "release\n")
        return release(self, *arguments)

    setattr(GaussianSum, "release", told)  # noqa: B010


def fits(folder: Path, kills: int, luck: random.Random) -> Seen:
    """Fits that a ledger pays, each with a budget of its own."""
    seen = Seen()

    def work(place: Path) -> Callable[[], None]:
        def fit() -> None:
            told_before_release(place)
            run(prepare(killing.request(place)), place / "rows.model", False)

        return fit

    first = place_for_a_fit(
        folder, "first"
    )  # in this process: children inherit what it has computed
    run(prepare(killing.request(first)), first / "rows.model", False)
    usual = sorted(duration(work(place_for_a_fit(folder, f"warm {k}"))) for k in range(3))[1]
    while seen.kills < kills:
        place = place_for_a_fit(folder, f"fit {seen.kills + seen.finished}")
        in_time = kill(work(place), luck.uniform(0, usual), luck.choice(SIGNALS))
        seen.kills += in_time
        seen.finished += not in_time
        ledger = Ledger(place / "ledger.db")
        runs = ledger.account("rows").runs
        charged = sum(event.count for one in runs for event in one.events)
        seen.note(len(_lines(place / "released")), charged, place.name)
        model = place / "rows.model"
        if not killing.ledger_is_intact(ledger.path):
            seen.under.append(f"{place.name}: a damaged ledger")
        if model.exists() and (
            [one.state for one in runs] != ["finished"]
            or load_model(model).made["run"] != runs[0].name
        ):
            seen.under.append(f"{place.name}: a model that nobody is charged for")
        if not model.exists() and not in_time:
            seen.under.append(f"{place.name}: a model was lost")
    return seen


def place_for_a_fit(folder: Path, name: str) -> Path:
    place = folder / name
    place.mkdir(parents=True)
    with (place / "rows.libsvm").open("w") as file:
        file.writelines(f"{1 if k % 3 else -1} 1:{k % 7} 2:{k % 5}\n" for k in range(400))
    killing.made_ledger(place)
    return place


def reservations(folder: Path, kills: int, luck: random.Random) -> Seen:
    """Runs that reserve, release and finish, one after the other, on one ledger."""
    seen, ledger = Seen(), Ledger(folder / "ledger.db")
    folder.mkdir()
    ledger.create("rows", 2.0, 1e-5)

    def work() -> None:
        while True:
            name = ledger.reserve("rows", [EVENT], "a run")
            _append(folder / "released", f"{name}\n")
            ledger.finish(name, [EVENT])
            _append(folder / "ended", f"{name}\n")

    ledger.finish(ledger.reserve("rows", [EVENT], "the first one"), [EVENT])
    while seen.kills < kills:
        kill(work, luck.uniform(0.0, 0.3), luck.choice(SIGNALS))
        seen.kills += 1
        runs = {one.name: one for one in ledger.account("rows").runs}
        for name in _lines(folder / "released"):
            if name not in runs or runs[name].events != (EVENT,):
                seen.under.append(f"{name} is not charged")
        for name in _lines(folder / "ended"):
            if runs[name].state != "finished":
                seen.under.append(f"the end of {name} was forgotten")
    if not killing.ledger_is_intact(ledger.path):
        seen.under.append("a damaged ledger")
    seen.releases, seen.charged = len(_lines(folder / "released")), len(runs)
    return seen


def trainings(folder: Path, kills: int, luck: random.Random) -> Seen:
    """Trainings with PyTorch that go on from the last checkpoint, and write new ones."""
    seen, path = Seen(), folder / "checkpoint.pt"
    folder.mkdir()
    options: dict[str, Any] = {"noise_multiplier": 2.0, "poisson_sampling": True, "batch_size": 8}

    def resumed() -> Any:
        training = private(engine=PrivacyEngine(), **options)
        training.engine.load_checkpoint(
            path=path, module=training.module, optimizer=training.optimizer
        )
        return training

    def save(training: Any) -> None:
        training.engine.save_checkpoint(
            path=path, module=training.module, optimizer=training.optimizer
        )

    def work() -> None:
        told_before_release(folder)
        training = resumed()
        while True:
            for step, (x, y) in enumerate(training.loader):
                training.step(torch.nn.functional.cross_entropy, x, y)
                if step % 3 == 2:
                    save(training)

    first = private(engine=PrivacyEngine(), **options)
    first.epoch()
    save(first)
    before = len(first.engine.accountant)
    while seen.kills < kills:
        kill(work, luck.uniform(0.0, 0.25), luck.choice(SIGNALS))
        seen.kills += 1
        charged = len(resumed().engine.accountant) - before
        released = len(_lines(folder / "released"))
        if released > charged:
            seen.under.append(f"kill {seen.kills}: {released} released, {charged} charged")
    seen.releases, seen.charged = released, charged
    return seen


def saves(folder: Path, kills: int, luck: random.Random) -> Seen:
    """Model files that are replaced again and again: what is there is whole."""
    seen, path = Seen(), folder / "rows.model"
    place = place_for_a_fit(folder, "rows")
    model = run(prepare(killing.request(place)), path, False)

    def work() -> None:
        while True:
            save_model(model, path)
            with atomic_write(folder / "card.json") as file:
                file.write(b"{}" * 50_000)

    while seen.kills < kills:
        kill(work, luck.uniform(0.0, 0.1), luck.choice(SIGNALS))
        seen.kills += 1
        if load_model(path).made["run"] != model.made["run"]:
            seen.under.append("another model")
        card = folder / "card.json"
        if card.exists() and card.stat().st_size != 100_000:
            seen.under.append("half a card")
    return seen


WORK: dict[str, Callable[[Path, int, random.Random], Seen]] = {
    "fit with a ledger": fits,
    "reserve, release, finish": reservations,
    "PyTorch training from checkpoint to checkpoint": trainings,
    "save": saves,
}
