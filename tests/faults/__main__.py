"""`python -m tests.faults`: the table of docs/faults.md."""

from __future__ import annotations

import argparse
import random
import tempfile
import warnings
from pathlib import Path

from tests.faults.kills import WORK, Seen
from tests.faults.others import FAULTS

START, END = "<!-- table of make faults -->", "<!-- end of the table -->"


def killed(folder: Path, kills: int, luck: random.Random) -> tuple[list[Seen], list[str]]:
    """What was seen of every kind of work, and its lines of the table."""
    found, lines = [], []
    for name, work in WORK.items():
        seen = work(folder / name, kills // len(WORK), luck)
        told = f"{seen.releases} releases, {seen.charged} charged" if seen.releases else "files"
        done = f"{seen.kills} × SIGKILL, SIGTERM or Ctrl-C at a random moment"
        lines.append(f"| {name} | {done} | {told}; {len(seen.under)} under-counts |")
        print(lines[-1], *seen.under, sep="\n", flush=True)
        found.append(seen)
    return found, lines


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--kills", type=int, default=400, help="at random moments, of all work")
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--write", type=Path, help="a page to write the table into")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    luck = random.Random(given.seed)
    with tempfile.TemporaryDirectory() as folder:
        seen, lines = killed(Path(folder), given.kills, luck)
        failed = []
        for name, (make, times) in FAULTS.items():
            try:
                done, what = make(Path(folder) / name, luck, times)
            except RuntimeError as error:
                done, what = "FAILED", str(error)
                failed.append(name)
            lines.append(f"| {name} | {done} | {what} |")
            print(lines[-1], flush=True)
    if given.write is not None:
        page = given.write.read_text("utf-8")
        before, after = page.split(START)[0], page.split(END)[1]
        table = "\n".join(["| fault or work | done | seen |", "|---|---|---|", *lines])
        given.write.write_text(f"{before}{START}\n\n{table}\n\n{END}{after}", encoding="utf-8")
    kills = sum(one.kills for one in seen)
    bad = sum(len(one.under) for one in seen)
    print(f"{len(FAULTS) - len(failed)} of {len(FAULTS)} other faults without a loss")
    print(f"{kills - bad} of {kills} kills without an under-count")
    raise SystemExit(1 if bad or failed else 0)


if __name__ == "__main__":
    main()
