"""Many independent runs on all cores; results are kept on disk, so that they can be resumed."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

from privagrad._internal import progress

Task = TypeVar("Task")
Outcome = TypeVar("Outcome")


def run_tasks(
    work: Callable[[Task], Outcome],
    tasks: Iterable[Task],
    journal: Path,
    description: str,
    workers: int | None = None,
) -> dict[Task, Outcome]:
    """The outcome of every task; outcomes of finished tasks are read from `journal`.

    JSON must be able to hold an outcome. A task's `repr` is its name in the journal: it must show
    everything that the outcome depends on. By default every core gets a process.
    """
    tasks = list(tasks)
    done: dict[str, Outcome] = _read(journal)
    missing = [task for task in tasks if repr(task) not in done]
    journal.parent.mkdir(parents=True, exist_ok=True)
    if missing:
        with journal.open("a", encoding="utf-8") as lines, _processes(workers) as pool:
            pending = {pool.submit(work, task): task for task in missing}
            for future in progress.track(as_completed(pending), len(pending), description):
                name = repr(pending[future])
                done[name] = future.result()
                lines.write(json.dumps({"task": name, "outcome": done[name]}) + "\n")
                lines.flush()
    return {task: done[repr(task)] for task in tasks}


@contextmanager
def _processes(workers: int | None) -> Iterator[ProcessPoolExecutor]:
    """New processes with one BLAS thread each: several pools of threads slow each other down."""
    names = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS")
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(dict.fromkeys(names, "1"))
    try:
        with ProcessPoolExecutor(workers or os.cpu_count(), get_context("spawn")) as pool:
            try:
                yield pool
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _read(journal: Path) -> dict[str, Any]:
    done = {}
    lines = journal.read_text(encoding="utf-8").splitlines() if journal.exists() else []
    for line in lines:
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:
            continue  # the line that was being written when the run was killed
        done[entry["task"]] = entry["outcome"]
    return done
