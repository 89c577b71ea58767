"""A progress bar, when the work takes long and a person is watching."""

from __future__ import annotations

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
    """`items` with a bar: at once if `show`, after two seconds on a terminal if it is None."""
    if show is False or (show is None and not sys.stderr.isatty()):
        yield from items
        return
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn

    bar = Progress(
        *Progress.get_default_columns()[:2],
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True, force_terminal=show),
        transient=True,
    )
    start, running = time.monotonic(), bool(show)
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
