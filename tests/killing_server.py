"""Eight processes on one budget of a server, killed at random moments while the server restarts.

    python -m tests.killing_server --kills 100

starts a server of its own and prints what it saw. A process reserves a run, notes its release in a
file of its own as noise that the world has seen, finishes the run, notes that too, and goes on
until the budget has no room. Whoever is killed is replaced by another process.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import time
import traceback
import warnings
from pathlib import Path
from tempfile import TemporaryDirectory

from privagrad.privacy.events import GaussianEvent
from privagrad.privacy.ledger import BudgetError, Ledger
from tests.servers import Server, binaries

PROCESSES = 8
DATASET = "shared"
TOTAL = 1.0


def _event(kills: int) -> GaussianEvent:
    """So many runs fit into the total that only the last ones are refused."""
    return GaussianEvent(4.0 * (0.45 * kills) ** 0.5, 1, purpose="a release")


def _work(url: str, told: Path, event: GaussianEvent) -> None:
    """Spend until somebody kills this process."""
    warnings.simplefilter("ignore")
    ledger = Ledger(url)
    with told.open("a", buffering=1) as file:
        while True:
            try:
                run = ledger.reserve(DATASET, [event], "a run")
            except BudgetError:
                file.write("refused\n")
                time.sleep(0.05)
                continue
            file.write(f"released {run}\n")
            ledger.finish(run, [event])
            file.write(f"finished {run}\n")


def _started(url: str, told: Path, event: GaussianEvent) -> int:
    if child := os.fork():
        return child
    try:
        _work(url, told, event)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def kill_at_random(server: Server, database: str, kills: int, seed: int | None) -> dict[str, float]:
    """Kill processes at random moments and stop the server twice; what was seen, if it holds."""
    luck, event = random.Random(seed), _event(kills)
    url = server.url(database)
    Ledger(url).create(DATASET, TOTAL, 1e-5)
    with TemporaryDirectory() as folder:
        files = (Path(folder) / f"{k}" for k in range(10**9))
        alive = [_started(url, next(files), event) for _ in range(PROCESSES)]
        try:
            for k in range(kills):
                time.sleep(luck.uniform(0.0, 0.4))
                killed = alive.pop(luck.randrange(PROCESSES))
                os.kill(killed, signal.SIGKILL)
                status = os.waitpid(killed, 0)[1]
                if status != signal.SIGKILL:
                    raise RuntimeError(f"Expected a process that was killed, found {status}.")
                if k in (kills // 3, 2 * kills // 3):
                    server.stop("immediate" if k == kills // 3 else "fast")
                    server.start()
                alive.append(_started(url, next(files), event))
            time.sleep(1.0)
        finally:
            for process in alive:
                os.kill(process, signal.SIGKILL)
                os.waitpid(process, 0)
        words = [
            tuple(line.split()) for path in Path(folder).iterdir()
            for line in path.read_text().splitlines()
        ]  # fmt: skip
    return _checked(Ledger(url), event, words) | {"kills": kills}


def _checked(
    ledger: Ledger, event: GaussianEvent, words: list[tuple[str, ...]]
) -> dict[str, float]:
    """Raise where the total was passed, or a release is not charged, or an end was forgotten."""
    account = ledger.account(DATASET)
    runs = {run.name: run for run in account.runs}
    seen = {what: {w[1] for w in words if w[0] == what} for what in ("released", "finished")}
    if not account.spent <= account.epsilon:
        raise RuntimeError(f"Expected at most {account.epsilon}, found {account.spent} spent.")
    for name in seen["released"]:
        if name not in runs or runs[name].events != (event,):
            raise RuntimeError(f"Expected the release of {name} in the ledger, found none.")
    for name in seen["finished"]:
        if runs[name].state != "finished":
            raise RuntimeError(f"Expected {name} finished, found {runs[name].state}.")
    return {
        "runs": len(runs),
        "released": len(seen["released"]),
        "finished": sum(run.state == "finished" for run in account.runs),
        "refused": sum(w[0] == "refused" for w in words),
        "spent": account.spent,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int)
    given = parser.parse_args()
    programs = binaries()
    if programs is None:
        raise SystemExit("Expected a PostgreSQL server, found none: apt-get install postgresql.")
    server = Server(programs)
    try:
        server.begin()
        print(kill_at_random(server, server.new_ledger(), given.kills, given.seed))
    finally:
        server.end()


if __name__ == "__main__":
    main()
