"""A progress bar, when the work takes long and a person is watching."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

Item = TypeVar("Item")
_PATIENCE_SECONDS = 2.0
_LOOK_EVERY = 64


def track(
    items: Iterable[Item], total: int, description: str, show: bool | None = None
) -> Iterator[Item]:
    """`items` with a bar: at once if `show`, after two seconds on a terminal if it is None.

    In notebooks and files, which know no control characters, `show` prints a line for each tenth.
    """
    terminal = sys.stderr.isatty() and "ipykernel" not in sys.modules
    if show is False or (show is None and not terminal):
        yield from items
    elif terminal:
        yield from _bar(items, total, description, bool(show))
    else:
        yield from _lines(items, total, description)


def _lines(items: Iterable[Item], total: int, description: str) -> Iterator[Item]:
    tenth = max(math.ceil(total / 10), 1)
    for done, item in enumerate(items, start=1):
        yield item
        if done % tenth == 0 or done == total:
            print(f"{description}: {done}/{total}", file=sys.stderr, flush=True)


def _bar(items: Iterable[Item], total: int, description: str, at_once: bool) -> Iterator[Item]:
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn

    bar = Progress(
        *Progress.get_default_columns()[:2],
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    start, running = time.monotonic(), at_once
    task = bar.add_task(description, total=total)
    if running:
        bar.start()
    try:
        for done, item in enumerate(items):
            if done % _LOOK_EVERY == 0:
                if not running and time.monotonic() - start > _PATIENCE_SECONDS:
                    running = True
                    bar.start()
                if running:
                    bar.update(task, completed=done)
            yield item
    finally:
        if running:
            bar.stop()
