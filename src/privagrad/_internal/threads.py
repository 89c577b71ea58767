"""Threads for work that runs without the interpreter's lock."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

import numpy as np

from privagrad._internal import validate
from privagrad._internal.validate import Vector

Part = TypeVar("Part")

_most: ContextVar[int | None] = ContextVar("most", default=None)


@contextmanager
def at_most(threads: int) -> Iterator[None]:
    """Here pools have so many threads by default, and no more: other work shares the processors."""
    token = _most.set(threads)
    try:
        yield
    finally:
        _most.reset(token)


@contextmanager
def pool_of(threads: int | None = None) -> Iterator[Executor | None]:
    """A pool of so many threads, by default one for each processor; None for a single one."""
    count = _processors() if threads is None else validate.integer("threads", threads)
    if count == 1:
        yield None
        return
    with ThreadPoolExecutor(count) as pool:
        yield pool


def add_parts(
    total: Vector,
    add: Callable[[Vector, Part], tuple[int, int]],
    parts: Iterable[Part],
    pool: Executor | None,
) -> tuple[int, int]:
    """total += what `add` adds of every part to a sum of its own; the sums of its two counts."""

    def add_one(part: Part) -> tuple[Vector, int, int]:
        partial = np.zeros_like(total)
        return partial, *add(partial, part)

    run = map if pool is None else pool.map
    first = second = 0
    for partial, one, other in run(add_one, parts):
        total += partial
        first += one
        second += other
    return first, second


def _processors() -> int:
    if (most := _most.get()) is not None:
        return most
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
