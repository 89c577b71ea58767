"""Full disks, read-only ledgers, wrong clocks, damaged files, no memory, Ctrl-C: one of each.

Every function makes one fault, raises `RuntimeError` if something was lost or under-counted, and
returns what was done and what was seen.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from privagrad.data.models import load_model
from privagrad.fitting import prepare, run
from privagrad.privacy import ledger_file
from privagrad.privacy.ledger import Ledger
from privagrad.torch import PrivacyEngine
from tests import killing
from tests.faults.kills import EVENT, place_for_a_fit, told_before_release
from tests.faults.workers import workers_lost
from tests.torch.small import private

Row = tuple[str, str]
NOBODY = 65534
MEBIBYTE = 2**20
_COMMAND = """
from privagrad.cli import app
app()
"""
_CLEAR = (OSError, ValueError, MemoryError)


def outcome_in_a_child(work: Callable[[], Any]) -> str:
    """'done', or the type and the text of what was raised; how it ended, if it was not by that."""
    read, write = os.pipe()
    if child := os.fork():
        os.close(write)
        with os.fdopen(read) as file:
            text = file.read()
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        return text if text else f"ended with {code}"
    try:
        os.close(read)
        text = "done"
        try:
            work()
        except BaseException as error:
            # Without memory there is none for a message either.
            resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
            text = f"{type(error).__name__}: {error}"
            if not isinstance(error, _CLEAR):
                text += f" UNCLEAR {traceback.format_exc()}"
        os.write(write, text.encode())
    finally:
        os._exit(0)


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise RuntimeError(what)


def _fit(place: Path) -> None:
    told_before_release(place)
    run(prepare(killing.request(place)), place / "rows.model", False)


def _nothing_is_lost(place: Path) -> str:
    """What a fit left: nothing, reserved or finished."""
    ledger = Ledger(place / "ledger.db")
    runs = ledger.account("rows").runs
    told = place / "released"
    released = len(told.read_text().splitlines()) if told.exists() else 0
    charged = sum(event.count for one in runs for event in one.events)
    _require(released <= charged, f"{released} released, {charged} charged")
    state = runs[0].state if runs else "nothing"
    model = place / "rows.model"
    if model.exists():
        _require(state == "finished" and load_model(model) is not None, "an unpaid model")
    _require(not list(place.glob(".*.part")), "a part of a file is left")
    return state


def _counted(states: Counter[str]) -> str:
    return ", ".join(f"{count} × {state}" for state, count in sorted(states.items()))


def full_disk(folder: Path, luck: random.Random, times: int) -> Row:
    """Every file that a fit writes may be at most so many bytes long: the disk is full after."""
    states: Counter[str] = Counter()
    warm = place_for_a_fit(folder, "first")
    run(prepare(killing.request(warm)), warm / "rows.model", False)
    for k in range(times):
        place, most = place_for_a_fit(folder, f"{k}"), luck.randrange(60_000)

        def fit(place: Path = place, most: int = most) -> None:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))
            _fit(place)

        found = outcome_in_a_child(fit)
        _require("UNCLEAR" not in found and not found.startswith("ended"), found)
        end = "done" if found == "done" else found.split(":")[0]
        states[f"{end}, run {_nothing_is_lost(place)}"] += 1
    return f"{times} fits, files limited to a random size", _counted(states)


def full_disk_of_checkpoints(folder: Path, luck: random.Random, times: int) -> Row:
    """A journal that cannot be written: the release is not made, and whoever resumes can."""
    path, errors = folder / "checkpoint.pt", 0
    folder.mkdir()
    options: dict[str, Any] = {"noise_multiplier": 2.0, "poisson_sampling": True, "batch_size": 8}
    first = private(engine=PrivacyEngine(), **options)
    first.engine.save_checkpoint(path=path, module=first.module, optimizer=first.optimizer)

    def resumed() -> Any:
        training = private(engine=PrivacyEngine(), **options)
        training.engine.load_checkpoint(
            path=path, module=training.module, optimizer=training.optimizer
        )
        return training

    def train(most: int) -> None:
        told_before_release(folder)
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        training = resumed()
        journal = path.with_name("checkpoint.pt.resumed")
        size = journal.stat().st_size if journal.exists() else 0
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + most, resource.RLIM_INFINITY))
        try:
            training.epoch()
        finally:  # whoever catches the error and goes on when there is room again
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
            training.epoch()

    for _ in range(times):
        found = outcome_in_a_child(lambda: train(luck.randrange(2000)))
        _require("UNCLEAR" not in found and not found.startswith("ended"), found)
        errors += found != "done"
    told = folder / "released"
    released = len(told.read_text().splitlines()) if told.exists() else 0
    charged = len(resumed().engine.accountant)
    _require(0 < released <= charged, f"{released} released, {charged} charged")
    return (
        f"{times} resumed trainings, the journal limited to a random size; each goes on after",
        f"{errors} clear errors; {released} releases, {charged} charged",
    )


def read_only_ledger(folder: Path, luck: random.Random, times: int) -> Row:
    """A file, or its folder, that may be read alone."""
    errors = []
    # Root may write everywhere: the child is somebody else, who may enter this folder.
    own = Path(tempfile.mkdtemp())
    own.chmod(0o755)
    for file_mode, folder_mode in ((0o444, 0o555), (0o444, 0o777), (0o644, 0o555)):
        place = place_for_a_fit(own, f"{file_mode:o} {folder_mode:o}")
        (place / "out").mkdir(mode=0o777)
        (place / "out").chmod(0o777)
        Ledger(place / "ledger.db").account("rows").spent_with([EVENT])  # so that all is loaded
        (place / "ledger.db").chmod(file_mode)
        place.chmod(folder_mode)

        def reserve(place: Path = place) -> None:
            if os.getuid() == 0:
                os.setgroups([])
                os.setgid(NOBODY)
                os.setuid(NOBODY)
            Ledger(place / "ledger.db").reserve("rows", [EVENT], "a run")
            (place / "out" / "released").touch()

        found = outcome_in_a_child(reserve)
        place.chmod(0o777)
        _require(found.startswith("OSError: Expected"), found)
        _require(not (place / "out" / "released").exists(), "released")
        _require(Ledger(place / "ledger.db").account("rows").runs == (), "a run")
        errors.append(re.sub(r".*found: ", "", found))
    shutil.rmtree(own)
    return "file, folder and both read-only", f"refused: {'; '.join(dict.fromkeys(errors))}"


@contextlib.contextmanager
def _wild_clock(luck: random.Random) -> Iterator[None]:
    real = ledger_file.now

    def now() -> str:
        jump = timedelta(days=luck.uniform(-20_000, 20_000))
        return (datetime(2026, 1, 1, tzinfo=UTC) + jump).isoformat(timespec="seconds")

    ledger_file.now = now
    try:
        yield
    finally:
        ledger_file.now = real


def wild_clock(folder: Path, luck: random.Random, times: int) -> Row:
    """Every entry is dated at random, from 1971 to 2080: the same order, states and cost."""
    folder.mkdir()
    spent = []
    for name in ("true", "wild"):
        ledger = Ledger(folder / f"{name}.db")
        clock = contextlib.nullcontext() if name == "true" else _wild_clock(luck)
        with clock:
            ledger.create("rows", 2.0, 1e-5)
            for k in range(times):
                run_name = ledger.reserve("rows", [EVENT], f"run {k}")
                if k % 3 == 0:
                    ledger.finish(run_name, [EVENT])
                elif k % 3 == 1:
                    ledger.release(run_name, "a test")
        account = ledger.account("rows")
        spent.append(account.spent)
        _require([one.note for one in account.runs if one.state != "released"]
                 == [f"run {k}" for k in range(times) if k % 3 != 1], "another order")  # fmt: skip
    _require(spent[0] == spent[1] > 0, f"{spent}")
    return f"{times} runs, each entry dated at random from 1971 to 2080", "the same order and cost"


def truncated_files(folder: Path, luck: random.Random, times: int) -> Row:
    """Files cut off at random: refused, or read as they were; never read as less."""
    place = place_for_a_fit(folder, "rows")
    run(prepare(killing.request(place)), place / "rows.model", False)
    ledger, model = place / "ledger.db", place / "rows.model"
    whole, charged = ledger.read_bytes(), Ledger(ledger).account("rows").events
    packed = model.read_bytes()
    states: Counter[str] = Counter()
    for k in range(times):
        ledger.write_bytes(whole[: luck.randrange(1, len(whole)) if k else 0])
        try:
            events = Ledger(ledger).account("rows").events
            _require(events == charged, f"a ledger cut off to {ledger.stat().st_size} bytes")
            states["ledger read whole"] += 1
        except (OSError, ValueError) as error:
            _require(str(error).startswith("Expected"), str(error))
            states["ledger refused"] += 1
        model.write_bytes(packed[: luck.randrange(len(packed))])
        try:
            load_model(model)
            raise RuntimeError("Expected a refusal of half a model, found none.")
        except ValueError:
            states["model refused"] += 1
    ledger.write_bytes(whole)
    return f"a ledger and a model cut off at {times} random places", _counted(states)


def no_memory(folder: Path, luck: random.Random, times: int) -> Row:
    """Fits that may take so much more memory than they have at the start."""
    states: Counter[str] = Counter()
    warm = place_for_a_fit(folder, "first")
    run(prepare(killing.request(warm)), warm / "rows.model", False)
    with open("/proc/self/statm") as file:
        now = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    for k in range(times):
        place, more = place_for_a_fit(folder, f"{k}"), int(2 ** luck.uniform(10, 23))

        def fit(place: Path = place, more: int = more) -> None:
            resource.setrlimit(resource.RLIMIT_AS, (now + more, resource.RLIM_INFINITY))
            _fit(place)

        found = outcome_in_a_child(fit)
        _require("UNCLEAR" not in found, found)
        end = "done" if found == "done" else found.split(":")[0]
        states[f"{end}, run {_nothing_is_lost(place)}"] += 1
    return f"{times} fits, address space limited to 1 KiB to 8 MiB more", _counted(states)


def control_c(folder: Path, luck: random.Random, times: int) -> Row:
    """`privagrad fit`, interrupted at random: one line, exit code 130, nothing forgotten."""
    ends: Counter[str] = Counter()
    for k in range(times):
        place = place_for_a_fit(folder, f"{k}")
        environment = {**os.environ, "PRIVAGRAD_LEDGER": str(place / "ledger.db")}
        command = ["fit", "rows.libsvm", "--classes=-1,1", "-e", "1.5", "--dataset", "rows",
                   "-o", "rows.model", "--steps", "2", "--json"]  # fmt: skip
        child = subprocess.Popen(
            [sys.executable, "-c", _COMMAND, *command], cwd=place, text=True,
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            # A shell lets what it runs in the background ignore it.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )  # fmt: skip
        try:
            child.wait(luck.uniform(0.05, 2.5))
        except subprocess.TimeoutExpired:
            child.send_signal(signal.SIGINT)
        out, err = child.communicate(timeout=120)
        state = _nothing_is_lost(place)
        if "Exception ignored" in err:  # Python loses a Ctrl-C while it finalizes an object
            ends[f"Ctrl-C lost by Python, run {state}"] += 1
            continue
        if "Traceback" in err:  # Python's own, before the command begins
            _require(state == "nothing", err)
            ends["traceback of Python before the command began, run nothing"] += 1
            continue
        _require(child.returncode in (0, 130), f"exit code {child.returncode}: {err}")
        if child.returncode == 130 and out:
            _require(json.loads(out)["exit_code"] == 130, out)
        ends[f"exit code {child.returncode}, run {state}"] += 1
    return f"{times} commands, interrupted after 0.05 to 2.5 s", _counted(ends)


def server_restarts(folder: Path, luck: random.Random, times: int) -> Row:
    """Processes on a server that are killed while it crashes and restarts."""
    from tests.killing_server import kill_at_random
    from tests.servers import Server, binaries

    programs = binaries()
    if programs is None:
        return "PostgreSQL crashed and restarted", "not tried: no server on this machine"
    server = Server(programs)
    try:
        server.begin()
        seen = kill_at_random(server, server.new_ledger(), times, luck.randrange(2**30))
    finally:
        server.end()
    return (
        f"{times} kills of 8 processes; the server crashed once and was restarted once",
        f"{seen['released']:.0f} releases, all charged; {seen['finished']:.0f} runs finished",
    )


FAULTS: dict[str, tuple[Callable[[Path, random.Random, int], Row], int]] = {
    "disk full": (full_disk, 60),
    "disk full, checkpoints": (full_disk_of_checkpoints, 40),
    "ledger that can only be read": (read_only_ledger, 3),
    "clock that jumps": (wild_clock, 60),
    "truncated files": (truncated_files, 300),
    "memory exhausted": (no_memory, 60),
    "Ctrl-C": (control_c, 30),
    "database restarted": (server_restarts, 60),
    "worker lost": (workers_lost, 20),
}
"""Each fault, and how often `make faults` makes it."""
