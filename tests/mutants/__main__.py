"""`python -m tests.mutants`: put every bug in, and see that its tests fail; docs/mutants.md."""

from __future__ import annotations

import argparse
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

from tests.mutants import MUTANTS
from tests.mutants.mutant import Mutant
from tests.mutants.running import Tree, Verdict

START, END = "<!-- table of make mutate -->", "<!-- end of the table -->"


@dataclass
class Trees:
    """Copies of the project, one for each thread."""

    free: SimpleQueue[Tree]

    @classmethod
    def of(cls, folder: Path, count: int) -> Trees:
        free: SimpleQueue[Tree] = SimpleQueue()
        for number in range(count):
            free.put(Tree(folder / str(number)))
        return cls(free)

    def sound(self, tests: tuple[str, ...]) -> Verdict:
        """What tests say of the code as it is."""
        tree = self.free.get()
        try:
            return tree.run(tests)
        finally:
            self.free.put(tree)

    def broken(self, mutant: Mutant) -> Verdict:
        """What its tests say of the code with a bug."""
        tree, start = self.free.get(), time.monotonic()
        try:
            verdict = tree.run_with(mutant)
        finally:
            self.free.put(tree)
        seconds = time.monotonic() - start
        told = f"caught by {verdict.failed[0]}" if verdict.failed else f"SURVIVED {verdict.why}"
        print(f"{mutant.name}: {told} ({seconds:.0f} s)", flush=True)
        return verdict


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--only", default="", help="bugs whose name or file contains this text")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--write", type=Path, help="a page to write the table into")
    given = parser.parse_args()
    chosen = [one for one in MUTANTS if given.only in f"{one.name} {one.file}"]
    with (
        tempfile.TemporaryDirectory() as folder,
        ThreadPoolExecutor(given.processes) as threads,
    ):
        trees = Trees.of(Path(folder), given.processes)
        # A test that fails anyway catches nothing.
        tests = sorted({test for one in chosen for test in one.tests})
        shares = [tuple(tests[k :: given.processes]) for k in range(given.processes)]
        for verdict in threads.map(trees.sound, [share for share in shares if share]):
            if not verdict.passed:
                raise SystemExit(
                    "Expected all tests to pass on the code without bugs, found "
                    f"{', '.join(verdict.failed) or verdict.why}."
                )
        print(f"{len(tests)} tests pass without bugs", flush=True)
        verdicts = list(threads.map(trees.broken, chosen))
    if given.write is not None:
        _write(given.write, chosen, verdicts)
    pairs = zip(chosen, verdicts, strict=True)
    survivors = [mutant.name for mutant, verdict in pairs if not verdict.failed]
    print(f"survivors: {', '.join(survivors) or 'none'}")
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} mutants caught")
    raise SystemExit(1 if survivors else 0)


def _write(page: Path, mutants: list[Mutant], verdicts: list[Verdict]) -> None:
    lines = ["| bug | put into | caught by |", "|---|---|---|"]
    for mutant, verdict in zip(mutants, verdicts, strict=True):
        caught = f"`{verdict.failed[0]}`" if verdict.failed else f"**nothing** {verdict.why}"
        lines.append(f"| {mutant.name} | `{mutant.file}` | {caught} |")
    text = page.read_text("utf-8")
    before, after = text.split(START)[0], text.split(END)[1]
    table = "\n".join(lines)
    page.write_text(f"{before}{START}\n\n{table}\n\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
