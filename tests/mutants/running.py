"""Run tests in a copy of the project that has one bug, and see which of them fail."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.mutants.mutant import ROOT, Mutant

_COPIED = ("src", "tests", "docs", "benchmarks", "examples", "pyproject.toml", "README.md")
_FAILED = re.compile(r"^(?:FAILED|ERROR) (.+?::.+?)(?: - .*)?$", re.MULTILINE)
_SECONDS = 900
_PASSED, _FAILURES = 0, 1
"""What pytest exits with."""


@dataclass(frozen=True)
class Verdict:
    """What tests said of a tree.

    Attributes
    ----------
    failed : tuple of str
        The tests that failed.
    why : str
        "" if the tests ran to their end; else what hindered them.
    """

    failed: tuple[str, ...]
    why: str = ""

    @property
    def passed(self) -> bool:
        return not self.failed and not self.why


class Tree:
    """A copy of the project, which has one bug after the other."""

    def __init__(self, folder: Path) -> None:
        self._root, self._kernels = folder / "project", folder / "kernels"
        self._root.mkdir(parents=True)
        for name in _COPIED:
            source, target = ROOT / name, self._root / name
            if source.is_dir():
                shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy2(source, target)

    def run(self, tests: tuple[str, ...]) -> Verdict:
        """What tests say of the copy without a bug."""
        return _run(self._root, tests, self._kernels)

    def run_with(self, mutant: Mutant) -> Verdict:
        """What a mutant's tests say of the copy with its bug."""
        with self._bug(mutant), tempfile.TemporaryDirectory() as empty:
            # Compiled kernels are kept by the file they are in. One that calls what has changed in
            # another file would not be compiled again.
            text = mutant.source(self._root).read_text()
            compiled = "@kernel" in text or "Instruction(" in text
            return _run(self._root, mutant.tests, Path(empty) if compiled else self._kernels)

    @contextmanager
    def _bug(self, mutant: Mutant) -> Iterator[None]:
        path = mutant.source(self._root)
        kept, stamp = path.read_bytes(), path.stat()
        mutant.apply(self._root)
        try:
            yield
        finally:
            path.write_bytes(kept)
            os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))


def _run(root: Path, tests: tuple[str, ...], kernels: Path) -> Verdict:
    command = [sys.executable, "-B", "-m", "pytest", "-x", "-rfE", "--tb=no"]
    command += ["-p", "no:cacheprovider"]
    environment = {
        **os.environ, "PYTHONPATH": str(root / "src"), "NUMBA_CACHE_DIR": str(kernels),
        "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1",
    }  # fmt: skip
    try:
        done = subprocess.run(
            [*command, *tests], cwd=root, env=environment, capture_output=True, text=True,
            timeout=_SECONDS, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return Verdict((), f"no end within {_SECONDS} seconds")
    failed = tuple(_FAILED.findall(done.stdout))
    if done.returncode == _PASSED or (done.returncode == _FAILURES and failed):
        return Verdict(failed)
    last = (done.stdout + done.stderr).strip().splitlines()[-1:]
    return Verdict((), f"pytest ended with {done.returncode}: {' '.join(last)}")
