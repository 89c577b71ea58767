"""What a worker of a cluster does with the partitions that it holds."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from importlib.metadata import version as version_of
from threading import Lock
from typing import Any, NamedTuple
from weakref import ref

import numpy as np
from distributed import Worker, WorkerPlugin
from distributed.core import send_recv
from distributed.protocol.pickle import dumps, loads
from distributed.protocol.serialize import to_serialize

from privagrad._internal.errors import ClusterError
from privagrad._internal.threads import at_most
from privagrad.glm.examples import Examples, Sample, Sums
from privagrad.glm.rows import DenseRows
from privagrad.glm.stored import added
from privagrad.privacy.sampling import Batches, Rows, Samples

OPERATION = "privagrad"
"""What workers call it to answer a question about partitions."""

_CONNECT = (0.25, 1.0, 5.0, 10.0)
"""After so many seconds without a connection the scheduler is asked whether the worker is alive. A
dead one is found at once; one that is busy may be slow."""

_MOST_RUNS = 4
"""Of so many runs a worker keeps the samples."""


class Place(NamedTuple):
    """A partition: its number, its key on the cluster, the number of its first row, its rows.

    `mark` is that of its rows when it was first loaded; None: it was made of such a partition.
    """

    number: int
    key: str
    first: int
    size: int
    mark: int | None = None


class Branch(NamedTuple):
    """A worker, the partitions that it adds up, and the workers whose sums it adds to its own."""

    address: str
    places: Sequence[Place]
    below: Sequence[Branch]


class Answer(NamedTuple):
    """The sum of the partitions with these numbers; without numbers there is none."""

    numbers: Sequence[int]
    sums: Sums | None


class Question(NamedTuple):
    """What is asked of all partitions."""

    function: Callable[..., Sums]
    arguments: tuple[Any, ...]
    sample: Sample | None
    version: str


class PartitionPlugin(WorkerPlugin):
    """Lets a worker answer questions about the partitions in its memory.

    Guarantees
    ----------
    Sums leave the worker, and no rows.
    """

    name, idempotent = OPERATION, True

    def __init__(self) -> None:
        self._samples: dict[tuple[Batches, int], Samples] = {}
        self._seen: dict[str, ref[Examples]] = {}

    def setup(self, worker: Worker) -> None:
        self._worker, self._drawing = worker, Lock()
        worker.handlers[OPERATION] = self.answer

    def teardown(self, worker: Worker) -> None:
        worker.handlers.pop(OPERATION, None)

    async def answer(self, question: bytes, branch: bytes) -> dict[str, Any]:
        """The sum of a branch's partitions, as far as they are here, and of those below it."""
        try:
            asked: Question = loads(question)
            here: Branch = loads(branch)
            self._require_same(asked.version)
            own, *others = await asyncio.gather(
                self._own(asked, here.places),
                *(ask(self._worker, below, question) for below in here.below),
            )
        except Exception as error:
            # Not raised: the worker's log would show what was asked.
            return {"error": _pickled(error)}
        numbers, sums = together([own, *others])
        return {"numbers": numbers, "sums": to_serialize(sums)}

    def _require_same(self, version: str) -> None:
        if version != (own := version_here()):
            raise ClusterError(
                f"Expected privagrad {version} on every worker, as on the client; found "
                f"{own} on {self._worker.address}: install the same version everywhere."
            )

    async def _own(self, asked: Question, places: Sequence[Place]) -> Answer:
        answers = []
        for place in places:
            # Only the event loop may read a worker's data.
            examples: Any = self._worker.data.get(place.key)
            if examples is not None:
                answers.append(await asyncio.to_thread(self._of, examples, place, asked))
        return together(answers)

    def _of(self, examples: Examples, place: Place, asked: Question) -> Answer:
        seen = self._seen.get(place.key)
        if seen is None or seen() is not examples:
            require_same_rows(examples, place)
            self._seen[place.key] = ref(examples, lambda _: self._seen.pop(place.key, None))
        if asked.sample is not None and asked.sample[0].batches.sampling is not None:
            rows = self._drawn(asked.sample, place)
            examples = examples.take(np.sort(rows) - place.first)
        with at_most(self._worker.state.nthreads):
            return Answer([place.number], asked.function(examples, *asked.arguments))

    def _drawn(self, sample: Sample, place: Place) -> Rows:
        """The rows of a sample that are in a partition.

        A worker has samples of its own, because workers may be threads of one process.
        """
        given, step = sample
        with self._drawing:
            key = given.batches, given.key
            if (own := self._samples.pop(key, None)) is None:
                own = Samples(*key)
            self._samples = {key: own, **dict(list(self._samples.items())[: _MOST_RUNS - 1])}
            return own.of_step(step, place.first, place.first + place.size)


def mark_of(examples: Examples) -> int:
    """A checksum of the rows in their order, and of their targets."""
    rows, found = examples.rows, 0
    arrays = [rows.array] if isinstance(rows, DenseRows) else [rows.data, rows.indices, rows.indptr]
    for array in (*arrays, examples.targets):
        found = zlib.crc32(np.ascontiguousarray(array).data, found)
    return found


def require_same_rows(examples: Examples, place: Place) -> None:
    """Refuse a partition that has been loaded again with other rows, or in another order.

    A row could otherwise be in two partitions, and count twice in one release.
    """
    size = examples.shape[0]
    if size == place.size and place.mark in (None, mark_of(examples)):
        return
    expected, found = (f"{place.size} rows", size) if size != place.size else ("the rows", "others")
    raise ClusterError(
        f"Expected {expected} in partition {place.number} as before, found {found} after it was "
        "loaded again. Its source has changed: what was released stays charged; start again with "
        "rows that stay the same, in the same order."
    )


async def ask(server: Any, branch: Branch, question: bytes) -> Answer:
    """What a worker, and those below it, answer to a client or another worker.

    Without numbers the worker is lost, or its partitions are elsewhere by now.
    """
    try:
        comm = await _connected(server, branch.address)
        try:
            reply = await send_recv(comm, op=OPERATION, question=question, branch=dumps(branch))
        finally:
            server.rpc.reuse(branch.address, comm)
    except OSError:
        return Answer([], None)
    if "error" in reply:
        raise loads(reply["error"])
    return Answer(reply["numbers"], reply["sums"])


@cache
def version_here() -> str:
    """The version of privagrad in this process."""
    return version_of("privagrad")


def together(answers: Iterable[Answer]) -> Answer:
    """One answer of several."""
    numbers: list[int] = []
    sums: Sums | None = None
    for answer in answers:
        if answer.sums is not None:
            numbers += answer.numbers
            # Arrays that came from elsewhere may be read-only.
            fresh = tuple(np.array(one) for one in answer.sums) if sums is None else answer.sums
            sums = fresh if sums is None else added(sums, fresh)
    return Answer(numbers, sums)


async def _connected(server: Any, address: str) -> Any:
    """A connection to a worker, as long as the scheduler knows it."""
    for timeout in _CONNECT:
        try:
            return await server.rpc.connect(address, timeout=timeout)
        except OSError as error:
            found = error
            if not await server.scheduler.ncores(workers=[address]):
                break
    raise found


def _pickled(error: Exception) -> bytes:
    try:
        pickled: bytes = dumps(error)
        loads(pickled)
    except Exception:
        pickled = dumps(RuntimeError(f"{type(error).__name__}: {error}"))
    return pickled
