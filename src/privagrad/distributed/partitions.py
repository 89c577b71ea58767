"""Partitions of rows in the memory of a Dask cluster's workers."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import accumulate
from typing import Any, Self

import numpy as np
from distributed import KilledWorker
from distributed.protocol.pickle import dumps
from numpy.typing import NDArray

from privagrad._internal.errors import ClusterError
from privagrad._internal.validate import Vector
from privagrad.distributed.clients import NO_SCHEDULER, gathered
from privagrad.distributed.worker import (
    Answer,
    Branch,
    PartitionPlugin,
    Place,
    Question,
    ask,
    mark_of,
    require_same_rows,
    together,
    version_here,
)
from privagrad.glm.examples import Examples, PartitionedExamples, RowMap, Sample, Sums, apply

FAN_OUT, PATIENCE = 8, 60.0
"""How many workers answer to one that adds up, and seconds to wait for a worker when none is left.
"""

_FRUITLESS = 5
"""So often in a row a total is asked for without an answer from any worker, before it fails."""

_WATCH, _SHORTEST, _LONGEST = 5.0, 0.005, 0.5
"""Seconds between looks whether workers that compute are alive, and between looks whether
partitions were loaded."""

_MOST_LABELS = 1000

_SOURCE = (
    "What was released before stays charged; this release was not made. Take rows that workers can "
    "load again: files, or a dask collection that is made from them."
)


class ClusterPartitions:
    """Rows on the workers of a cluster, which add up what is asked of them.

    In a step every worker is sent one message and answers with sums. Above `fan_out` workers, they
    add up in a tree. When a worker dies, the scheduler loads its partitions again on another one,
    from the tasks that made them, and what it had to add up is asked again.

    Parameters
    ----------
    client : distributed.Client
        The cluster.
    futures : sequence of distributed.Future
        `Examples` on the cluster, in the order of the rows.
    counts : sequence of int
        The rows of each, which are public.
    marks : sequence of int or None
        A checksum of each, by which a partition that is loaded again with other rows is noticed.
    dim : int
        The number of columns.
    sparse : bool
        Whether rows are `SparseRows`.
    fan_out : int
        How many workers answer to the client, and to every worker that others answer to.
    patience : float
        Seconds to wait for a worker when there is none.

    Guarantees
    ----------
    A total is made of answers that name the partitions they are the sums of. Every partition is
    in exactly one of them, or there is no total, whatever fails. Noise is added to totals alone, by
    the caller. Workers send sums, and no rows. What they send is exact and NOT private.
    """

    def __init__(
        self, client: Any, futures: Sequence[Any], counts: Sequence[int],
        marks: Sequence[int | None], dim: int, sparse: bool, *, fan_out: int = FAN_OUT,
        patience: float = PATIENCE,
    ) -> None:  # fmt: skip
        self._client, self._futures = client, list(futures)
        self._fan_out, self._patience = fan_out, patience
        self._shape, self._sparse = (sum(counts), dim), sparse
        firsts = accumulate(counts[:-1], initial=0)
        self._places = [
            Place(number, future.key, first, count, mark)
            for number, (future, first, count, mark) in enumerate(
                zip(futures, firsts, counts, marks, strict=True)
            )
        ]
        self._where: dict[int, str] = {}
        self._turn = asyncio.Lock()

    @classmethod
    def of(
        cls, client: Any, futures: Sequence[Any], *, fan_out: int = FAN_OUT,
        patience: float = PATIENCE,
    ) -> Self:  # fmt: skip
        """Partitions whose shapes are asked of the workers."""
        if client.asynchronous:
            raise ValueError(
                "Expected a client that waits for results, found one with asynchronous=True: make "
                "another one with distributed.Client(address)."
            )
        if len({future.key for future in futures}) < len(futures):
            raise ValueError(
                "Expected each partition once, found one twice: its rows would count twice."
            )
        client.register_plugin(PartitionPlugin())
        shapes = gathered(client, client.map(_facts, futures, pure=False))
        kinds = Counter((dim, sparse) for _, dim, sparse, _ in shapes)
        if len(kinds) != 1:
            found = ", ".join(f"{dim} columns" + " (CSR)" * sparse for dim, sparse in kinds)
            raise ValueError(
                f"Expected partitions of the same columns, found {found or 'no partitions'}."
            )
        ((dim, sparse),) = kinds
        counts, marks = [count for count, *_ in shapes], [mark for *_, mark in shapes]
        if not sum(counts):
            raise ValueError(f"Expected at least one row in {len(counts)} partitions, found none.")
        return cls(client, futures, counts, marks, dim, sparse, fan_out=fan_out, patience=patience)

    @classmethod
    def load(
        cls, client: Any, loaders: Iterable[Callable[[], Examples]], *, fan_out: int = FAN_OUT,
        patience: float = PATIENCE,
    ) -> Self:  # fmt: skip
        """The partitions that these functions load, in this order, each on some worker."""
        futures = [client.submit(load, pure=False) for load in loaders]
        return cls.of(client, futures, fan_out=fan_out, patience=patience)

    @property
    def shape(self) -> tuple[int, int]:
        return self._shape

    @property
    def sparse(self) -> bool:
        return self._sparse

    def total(self, function: Callable[..., Sums], *arguments: Any, sample: Sample | None) -> Sums:
        question = dumps(Question(function, arguments, sample, version_here()))
        sums: Sums = self._client.sync(self._total, question)
        return sums

    def kept(self, maps: Sequence[RowMap]) -> ClusterPartitions:
        """The partitions after `maps`, computed where they are and again where they are lost."""
        # A task of its own: it is sent to every worker once, and can be run again.
        shared = self._client.submit(_same, tuple(maps), pure=False)
        # Without keys, which Dask may take for the partitions themselves.
        places = [place._replace(key="") for place in self._places]
        futures = self._client.map(_mapped, self._futures, places, maps=shared, pure=False)
        counts = [place.size for place in self._places]
        shown = PartitionedExamples.of(self)
        for function, arguments in maps:
            shown = shown.mapped(function, *arguments)
        return ClusterPartitions(
            self._client, futures, counts, [None] * len(counts), shown.dim, shown.sparse,
            fan_out=self._fan_out, patience=self._patience,
        )  # fmt: skip

    def labels(self) -> NDArray[Any]:
        """The different targets, if these are labels of classes, which are public."""
        futures = self._client.map(_labels, self._futures, pure=False)
        found: list[Vector] = gathered(self._client, futures)
        return np.unique(np.concatenate(found))

    async def _total(self, question: bytes) -> Sums:
        async with self._turn:
            missing = set(range(len(self._places)))
            answers: list[Answer] = []
            fruitless = 0
            while missing:
                workers = await self._located(missing)
                branches = _tree(workers, self._fan_out)
                found = await asyncio.gather(*(self._answer(one, question) for one in branches))
                numbers = [number for answer in found for number in answer.numbers]
                if len(set(numbers)) < len(numbers) or not missing.issuperset(numbers):
                    raise RuntimeError(
                        f"Expected every partition to be added up once, found {sorted(numbers)}. "
                        "This is a bug in privagrad; please report it."
                    )
                answers += found
                missing.difference_update(numbers)
                fruitless = 0 if numbers else fruitless + 1
                if missing and fruitless == _FRUITLESS:
                    raise ClusterError(
                        f"Expected {len(missing)} partitions to be added up, but the workers that "
                        f"had them were lost or did not answer, {fruitless} times in a row: "
                        f"{', '.join(branch.address for branch in branches)}. Check that the "
                        "client reaches the workers, and their memory and logs. What was released "
                        "before stays charged; this release was not made."
                    )
                for number in missing:
                    self._where.pop(number, None)
            sums = together(answers).sums
            assert sums is not None
            return sums

    async def _answer(self, branch: Branch, question: bytes) -> Answer:
        """The branch's answer; that of nothing, if a worker of it is gone and does not say so."""
        task = asyncio.ensure_future(ask(self._client, branch, question))
        addresses, gone = list(_addresses(branch)), False
        try:
            while not (await asyncio.wait({task}, timeout=_WATCH))[0]:
                if gone:
                    return Answer([], None)
                alive = await self._client.scheduler.ncores(workers=addresses)
                gone = len(alive) < len(addresses)
        finally:
            if not task.done():
                task.cancel()
        return task.result()

    async def _located(self, numbers: Collection[int]) -> dict[str, list[Place]]:
        """On which worker each of these partitions is, after waiting for those that are loaded."""
        unknown = [k for k in numbers if k not in self._where or not self._is_there(k)]
        pause, idle = _SHORTEST, 0.0
        while unknown:
            for number in unknown:
                await self._require_possible(number)
            ready = [self._places[k].key for k in unknown if self._is_there(k)]
            found = await self._client.scheduler.who_has(keys=ready) if ready else {}
            load = Counter(self._where[k] for k in numbers if k in self._where)
            for number in unknown:
                if holders := found.get(self._places[number].key):
                    self._where[number] = min(holders, key=lambda one: (load[one], one))
                    load[self._where[number]] += 1
                else:
                    self._where.pop(number, None)
            unknown = [k for k in unknown if k not in self._where]
            if unknown:
                idle = 0.0 if await self._client.scheduler.ncores() else idle + pause
                self._require_workers(idle)
                await asyncio.sleep(pause)
                pause = min(2 * pause, _LONGEST)
        workers: dict[str, list[Place]] = {}
        for number in sorted(numbers):
            workers.setdefault(self._where[number], []).append(self._places[number])
        return workers

    def _is_there(self, number: int) -> bool:
        return bool(self._futures[number].status == "finished")

    async def _require_possible(self, number: int) -> None:
        """Raise what hinders a partition from being loaded, if something does."""
        future = self._futures[number]
        if self._client.status != "running":
            raise ClusterError(NO_SCHEDULER)
        if future.status == "cancelled":
            raise ClusterError(
                f"Expected partition {number} on the cluster, found it lost with its worker, and "
                f"no task that could load it again: it was scattered or cancelled. {_SOURCE}"
            )
        if future.status == "error":
            try:
                await future
            except KilledWorker as error:
                raise ClusterError(
                    f"Expected partition {number} to be loaded, but every worker that tried to "
                    f"died: {error}. Give workers more memory, or make partitions smaller. What "
                    "was released before stays charged; this release was not made."
                ) from error

    def _require_workers(self, idle: float) -> None:
        if idle > self._patience:
            raise ClusterError(
                f"Expected a worker to load partitions on, found none for {idle:.0f} seconds. "
                "Start workers, then fit again. What was released before stays charged; this "
                "release was not made."
            )


def _tree(workers: dict[str, list[Place]], fan_out: int) -> list[Branch]:
    """All workers, at most `fan_out` at the top and below each, as evenly as possible."""

    def branches(some: list[str]) -> list[Branch]:
        groups = [some[start::fan_out] for start in range(min(fan_out, len(some)))]
        return [Branch(top, workers[top], branches(rest)) for top, *rest in groups]

    return branches(sorted(workers))


def _addresses(branch: Branch) -> Iterable[str]:
    yield branch.address
    for below in branch.below:
        yield from _addresses(below)


def _facts(examples: Examples) -> tuple[int, int, bool, int]:
    return *examples.shape, examples.sparse, mark_of(examples)


def _labels(examples: Examples) -> Vector:
    labels = np.unique(examples.targets)
    if labels.size > _MOST_LABELS:
        raise ValueError(
            f"Expected targets y that are labels of at most {_MOST_LABELS} classes, found more "
            "different ones: take an estimator for regression, or encode them."
        )
    return labels


def _mapped(examples: Examples, place: Place, maps: Sequence[RowMap]) -> Examples:
    require_same_rows(examples, place)
    return apply(examples, maps)


def _same(maps: Sequence[RowMap]) -> Sequence[RowMap]:
    return maps
