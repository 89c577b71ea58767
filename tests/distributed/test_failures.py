"""Workers die, answers are lost: a total has every row once, or there is none."""

import asyncio
import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import dask.array as da
import numpy as np
import pytest
from distributed import Client, LocalCluster
from distributed.comm.core import CommClosedError

import privagrad as pg
from privagrad.distributed import ClusterPartitions, from_dask, partitions
from privagrad.distributed.worker import OPERATION, Answer, Branch, ask
from privagrad.glm.examples import Examples, PartitionedExamples
from privagrad.privacy.ledger import Ledger
from tests.distributed.cases import Load, cut, fitted, loaders, same, table
from tests.distributed.test_partitions import counted


def kill(cluster: LocalCluster, *numbers: int) -> None:
    """Kill these workers' processes, as kill -9 does."""
    workers: list[Any] = list(cluster.workers.values())
    for number in numbers:
        os.kill(workers[number].pid, signal.SIGKILL)


def kill_at(patch: pytest.MonkeyPatch, cluster: LocalCluster, *messages: int) -> list[str]:
    """Kill the workers that these messages go to: before, or while they compute."""
    killed: list[str] = []
    count = itertools.count(1)

    async def killing(server: Any, branch: Branch, question: bytes) -> Answer:
        number = next(count)
        if number in messages:
            workers: list[Any] = list(cluster.workers.values())
            [pid] = [w.pid for w in workers if w.worker_address == branch.address]
            killed.append(branch.address)
            later = 0.002 * (number % 2)
            asyncio.get_running_loop().call_later(later, os.kill, pid, signal.SIGKILL)
            await asyncio.sleep(0)
        return await ask(server, branch, question)

    patch.setattr(partitions, "ask", killing)
    return killed


@pytest.mark.parametrize("messages", [(7,), (4, 12)])
def test_a_run_survives_killed_workers(
    client: Client, cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch,
    messages: tuple[int, ...],
) -> None:  # fmt: skip
    rows = PartitionedExamples.of(ClusterPartitions.load(client, loaders(100, 400, 800)))
    examples = table()
    told: dict[str, Any] = {"epsilon": 1.0, "steps": 40, "batch_size": 90, "step_size": 0.1}
    one = pg.minimize("logistic", examples.rows.matrix, examples.targets, random_state=5, **told)
    killed = kill_at(monkeypatch, cluster, *messages)
    other = pg.minimize("logistic", rows, random_state=5, **told)
    assert len(killed) == len(messages)
    assert np.array_equal(one.last, other.last)
    assert one.privacy == other.privacy


def test_a_fit_with_a_killed_worker_is_the_same_and_charged_once(
    client: Client, cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What was kept, the standardised columns, is there again too."""
    X, y = table().rows.matrix, table().targets
    collections = da.from_array(X, chunks=(300, -1)), da.from_array(y, chunks=300)
    killed = kill_at(monkeypatch, cluster, 25)
    models, ledger = [], Ledger(tmp_path / "ledger")
    for name, *rows in (("memory", X, y), ("cluster", *collections)):
        keys = itertools.count(1)
        # A run that a budget pays takes no seed.
        monkeypatch.setattr(
            "privagrad.privacy.noise.secrets.randbits", lambda bits, keys=keys: next(keys)
        )
        ledger.create(name, 3.0, 1e-5)
        model = pg.PrivateLogisticRegression(
            epsilon=1.0, delta=1e-5, steps=20, ledger=tmp_path / "ledger", dataset=name
        )
        models.append(model.fit(*rows))
    assert len(killed) == 1
    assert np.array_equal(models[0].coef_, models[1].coef_)
    assert models[0].privacy_ == models[1].privacy_
    once, again = (
        [(entry.state, entry.events) for entry in ledger.history(name)]
        for name in ("memory", "cluster")
    )
    assert once == again
    assert [state for state, _ in again] == ["reserved", "finished"]
    assert ledger.account("cluster").spent <= 1.0


def stop_all(client: Client, cluster: LocalCluster) -> None:
    cluster.scale(0)
    while client.nthreads():
        time.sleep(0.005)


def start(client: Client, cluster: LocalCluster) -> None:
    cluster.scale(1)
    client.wait_for_workers(1, timeout=60)


def test_scattered_rows_cannot_be_loaded_again(lone: tuple[Client, LocalCluster]) -> None:
    futures = lone[0].scatter(cut(table(), [300, 600]), hash=False)
    held = ClusterPartitions.of(lone[0], futures)
    assert held.total(counted, sample=None)[0][0] == 900
    stop_all(*lone)
    start(*lone)
    with pytest.raises(RuntimeError, match=r"(?s)lost with its worker.*stays charged"):
        held.total(counted, sample=None)


def test_a_source_that_changed_is_refused(
    lone: tuple[Client, LocalCluster], tmp_path: Path
) -> None:
    size = tmp_path / "rows"
    size.write_text("400")

    def load() -> Examples:
        return Load(0, int(size.read_text()))()

    held = ClusterPartitions.load(lone[0], [load, Load(400, 900)])
    assert held.total(counted, sample=None)[0][0] == 900
    size.write_text("399")
    stop_all(*lone)
    start(*lone)
    with pytest.raises(RuntimeError, match="Expected 400 rows in partition 0 as before, found 399"):
        held.total(counted, sample=None)


@pytest.mark.parametrize("kept", [False, True])
def test_rows_in_another_order_are_refused(
    lone: tuple[Client, LocalCluster], tmp_path: Path, kept: bool
) -> None:
    """As many as before: but one may now be in a partition that was not loaded again, too."""
    first = tmp_path / "rows"
    first.write_text("0")

    def load() -> Examples:
        return Load(int(first.read_text()), int(first.read_text()) + 400)()

    held = ClusterPartitions.load(lone[0], [load, Load(400, 900)])
    used = held.kept(((same_rows, ()),)) if kept else held
    assert used.total(counted, sample=None)[0][0] == 900
    first.write_text("1")
    stop_all(*lone)
    start(*lone)
    with pytest.raises(RuntimeError, match="Expected the rows in partition 0 as before, found oth"):
        used.total(counted, sample=None)


def same_rows(examples: Examples) -> Examples:
    return examples


def test_a_fit_waits_for_workers_but_not_forever(lone: tuple[Client, LocalCluster]) -> None:
    held = ClusterPartitions.load(lone[0], loaders(), patience=0.2)
    stop_all(*lone)
    with pytest.raises(RuntimeError, match=r"(?s)found none for 0 seconds.*stays charged"):
        held.total(counted, sample=None)
    start(*lone)
    assert held.total(counted, sample=None)[0][0] == 900


def test_a_lost_scheduler_is_called_so(lone: tuple[Client, LocalCluster]) -> None:
    held = ClusterPartitions.load(lone[0], loaders())
    lone[0].close()
    with pytest.raises(RuntimeError, match=r"connection to its scheduler lost.*stays charged"):
        asyncio.run(held._located([0]))


class Faults:
    """What goes wrong at workers: by the number of the answer, counted over all of them."""

    def __init__(self, workers: list[Any]) -> None:
        self.workers, self.count = workers, 0
        self.real = {w.address: w.handlers[OPERATION] for w in workers}

    def install(self, fault: Callable[[int], str]) -> None:
        for worker in self.workers:
            worker.handlers[OPERATION] = self.answering(self.real[worker.address], fault)

    def answering(self, real: Any, fault: Callable[[int], str]) -> Any:
        async def answer(**asked: Any) -> Any:
            self.count += 1
            kind = fault(self.count)
            if kind == "before":
                raise CommClosedError("lost before it was computed")
            reply = await real(**asked)
            if kind == "after":
                raise CommClosedError("lost after it was computed")
            return reply

        return answer

    def repair(self) -> None:
        for worker in self.workers:
            worker.handlers[OPERATION] = self.real[worker.address]


@pytest.fixture
def faults(seven: Client, threads: LocalCluster) -> Iterator[Faults]:
    ClusterPartitions.load(seven, loaders())  # workers learn to answer
    found = Faults(list(threads.workers.values()))
    yield found
    found.repair()


@pytest.mark.parametrize("kind", ["before", "after"])
@pytest.mark.parametrize("fan_out", [1, 2, 8])
def test_lost_answers_are_asked_for_again(
    seven: Client, faults: Faults, kind: str, fan_out: int
) -> None:
    """At the client and within the tree: every row once."""
    held = ClusterPartitions.load(seven, loaders(*range(60, 900, 60)), fan_out=fan_out)
    rng = np.random.default_rng(fan_out)
    faults.install(lambda count: kind if rng.random() < 0.2 else "")
    expected = counted(table())
    for _ in range(20):
        count, sums = held.total(counted, sample=None)
        assert count[0] == 900
        np.testing.assert_allclose(sums, expected[1], atol=1e-9)
    rows = PartitionedExamples.of(held)
    assert same(fitted(table()), fitted(rows))


def test_workers_that_never_answer_end_the_fit(seven: Client, faults: Faults) -> None:
    held = ClusterPartitions.load(seven, loaders(300))
    faults.install(lambda count: "after")
    with pytest.raises(RuntimeError, match=r"(?s)did not answer, 5 times in a row.*stays charged"):
        held.total(counted, sample=None)
    faults.repair()
    assert held.total(counted, sample=None)[0][0] == 900


@pytest.mark.parametrize("twice", [[0, 0], [0, 1, 2, 0]])
def test_a_part_that_is_counted_twice_is_no_total(
    seven: Client, monkeypatch: pytest.MonkeyPatch, twice: list[int]
) -> None:
    held = ClusterPartitions.load(seven, loaders(300, 600))

    async def repeating(server: Any, branch: Branch, question: bytes) -> Answer:
        answer = await ask(server, branch, question)
        return Answer([twice[k % len(twice)] for k in range(len(twice))], answer.sums)

    monkeypatch.setattr(partitions, "ask", repeating)
    with pytest.raises(RuntimeError, match="every partition to be added up once"):
        held.total(counted, sample=None)


def test_a_worker_that_hangs_and_is_given_up_is_not_waited_for(
    seven: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scheduler gives up a worker whose machine is gone; no connection says so."""
    held = ClusterPartitions.load(seven, loaders(300, 600))
    slow: list[str] = []

    async def hanging(server: Any, branch: Branch, question: bytes) -> Answer:
        if not slow:
            slow.append(branch.address)
            await asyncio.sleep(3600)
        return await ask(server, branch, question)

    class Scheduler:
        """It does not know the worker that hangs."""

        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

        async def ncores(self, workers: Any = None) -> Any:
            known = await real.ncores(**({} if workers is None else {"workers": workers}))
            return {address: n for address, n in known.items() if address not in slow}

    real: Any = seven.scheduler
    monkeypatch.setattr(partitions, "ask", hanging)
    monkeypatch.setattr(partitions, "_WATCH", 0.05)
    monkeypatch.setattr(seven, "scheduler", Scheduler())
    assert held.total(counted, sample=None)[0][0] == 900
    assert len(slow) == 1


def test_rows_that_are_made_again_are_the_same(client: Client, cluster: LocalCluster) -> None:
    """A dask array that is computed by tasks: its chunks are computed again."""
    X = da.random.default_rng(3).standard_normal((900, 6), chunks=(200, 6))
    rows = from_dask(X, (X.sum(axis=1) > 0).astype(int))
    before = rows.total(counted, sample=None)
    kill(cluster, 1)
    after = rows.total(counted, sample=None)
    assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))
