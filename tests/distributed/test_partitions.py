"""Partitions on a cluster: the sums of one process, and nothing but sums."""

import gc
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from distributed import Client, LocalCluster

import privagrad as pg
from privagrad.distributed import ClusterPartitions, partitions
from privagrad.distributed.worker import Answer, Branch, ask
from privagrad.glm.examples import Examples, PartitionedExamples, Sums
from privagrad.privacy.sampling import Batches
from tests.distributed.cases import Load, cut, fitted, loaders, same, table

EDGES = [(), (450,), (1, 2, 890), (300, 300, 600)]


def counted(examples: Examples) -> Sums:
    """How many rows there are, and the sum of them."""
    return np.array([examples.shape[0]]), examples.rows.matrix.sum(axis=0)


def doubled(examples: Examples) -> Examples:
    calls.append(examples.shape[0])
    return replace(examples, targets=2 * examples.targets)


calls: list[int] = []


def targets(examples: Examples) -> Sums:
    return (np.array([examples.targets.sum()]),)


def broken(examples: Examples) -> Sums:
    raise ZeroDivisionError("Expected other rows, found these.")


class Stubborn(Exception):
    def __reduce__(self) -> Any:
        raise TypeError("no pickle")


def unpicklable(examples: Examples) -> Sums:
    raise Stubborn("what was found")


@pytest.mark.parametrize("edges", EDGES)
def test_whole_fits_are_those_of_one_process(client: Client, edges: tuple[int, ...]) -> None:
    rows = PartitionedExamples.of(ClusterPartitions.load(client, loaders(*edges)))
    assert rows.shape == (900, 6)
    assert same(fitted(table()), fitted(rows))


@pytest.mark.parametrize("loss", ["hinge", "quantile", "squares"])
def test_all_kinds_of_fits(client: Client, loss: str) -> None:
    rows = PartitionedExamples.of(ClusterPartitions.load(client, loaders(200, 500)))
    assert same(fitted(table(), loss), fitted(rows, loss))


@pytest.mark.parametrize("sampling", ["poisson", "with_replacement", "without_replacement"])
def test_minimize_with_sparse_rows(client: Client, sampling: Any) -> None:
    held = ClusterPartitions.load(client, loaders(400, 401, sparse=True))
    memory, rows = table(sparse=True), PartitionedExamples.of(held)
    assert rows.sparse
    one, other = (
        pg.minimize(
            "logistic", *given, epsilon=1.0, steps=8, batch_size=90, step_size=0.1,
            sampling=sampling, random_state=3,
        )
        for given in ((memory.rows.matrix, memory.targets), (rows, None))
    )  # fmt: skip
    assert np.array_equal(one.last, other.last)
    assert one.privacy == other.privacy


@pytest.mark.parametrize("fan_out", [1, 2, 3, 8])
def test_workers_add_up_in_a_tree(
    seven: Client, fan_out: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = ClusterPartitions.load(seven, loaders(*range(60, 900, 60)), fan_out=fan_out)
    asked: list[Branch] = []

    async def noting(server: Any, branch: Branch, question: bytes) -> Answer:
        asked.append(branch)
        return await ask(server, branch, question)

    monkeypatch.setattr(partitions, "ask", noting)
    count, _ = held.total(counted, sample=None)
    assert count[0] == 900
    workers = {address for ones in seven.who_has(held._futures).values() for address in ones}
    assert len(asked) == min(fan_out, len(workers)) < 8
    assert same(fitted(table()), fitted(PartitionedExamples.of(held)))


def test_workers_send_sums_and_no_rows(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every answer of a whole fit is the numbers of partitions and arrays of the sums' shapes."""
    held = ClusterPartitions.load(client, loaders(200, 500))
    answers: list[Answer] = []

    async def noting(server: Any, branch: Branch, question: bytes) -> Answer:
        answers.append(await ask(server, branch, question))
        return answers[-1]

    monkeypatch.setattr(partitions, "ask", noting)
    found = held.total(counted, sample=(Batches(900, 90, 3).draw(np.random.default_rng()), 2))
    assert [one.shape for one in found] == [(1,), (6,)]
    assert 0 < found[0][0] < 300
    answers.clear()
    fitted(PartitionedExamples.of(held))
    assert len(answers) > 20
    for answer in answers:
        assert set(answer.numbers) <= {0, 1, 2}
        assert answer.sums is not None
        assert all(type(one) is np.ndarray for one in answer.sums)
    # More rows do not make them larger.
    sizes = {one.size for answer in answers for one in answer.sums or ()}
    more = PartitionedExamples.of(ClusterPartitions.load(client, [Load(0, 100)] * 20))
    answers.clear()
    fitted(more)
    assert {one.size for answer in answers for one in answer.sums or ()} == sizes


def test_kept_partitions_are_computed_once_and_freed(seven: Client, threads: LocalCluster) -> None:
    held = ClusterPartitions.load(seven, loaders(200, 500))
    calls.clear()
    kept = PartitionedExamples.of(held).mapped(doubled).kept()
    calls.clear()
    plain = held.total(targets, sample=None)
    for _ in range(3):
        assert kept.total(targets, sample=None)[0][0] == 2 * plain[0][0]
    assert sorted(calls) == [200, 300, 400]
    before = in_memory(threads)
    del kept
    gc.collect()
    deadline = time.monotonic() + 20
    while len(before - in_memory(threads)) < 3 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert len(before - in_memory(threads)) >= 3
    assert held.total(targets, sample=None)[0][0] == plain[0][0]


def in_memory(cluster: LocalCluster) -> set[Any]:
    return {key for worker in cluster.workers.values() for key in worker.data}


def test_a_worker_s_error_is_the_client_s(seven: Client) -> None:
    held = ClusterPartitions.load(seven, loaders(200, 500), fan_out=1)
    with pytest.raises(ZeroDivisionError, match=r"^Expected other rows, found these\.$"):
        held.total(broken, sample=None)
    with pytest.raises(RuntimeError, match="Stubborn: what was found"):
        held.total(unpicklable, sample=None)
    assert held.total(counted, sample=None)[0][0] == 900


def test_errors_of_loading_are_the_client_s(seven: Client) -> None:
    def fails() -> Examples:
        raise FileNotFoundError("Expected a file, found nothing.")

    with pytest.raises(FileNotFoundError, match="Expected a file, found nothing"):
        ClusterPartitions.load(seven, [*loaders(), fails])


def test_partitions_have_the_same_columns(seven: Client) -> None:
    with pytest.raises(ValueError, match=r"same columns, found 6 columns, 6 columns \(CSR\)"):
        ClusterPartitions.load(seven, [Load(0, 3), Load(3, 9, sparse=True)])
    with pytest.raises(ValueError, match="same columns, found no partitions"):
        ClusterPartitions.load(seven, [])
    with pytest.raises(ValueError, match="at least one row in 2 partitions"):
        ClusterPartitions.load(seven, [Load(0, 0), Load(3, 3)])


def test_a_partition_counts_once(seven: Client) -> None:
    future = seven.submit(Load(0, 3))
    with pytest.raises(ValueError, match="its rows would count twice"):
        ClusterPartitions.of(seven, [future, future])


def test_versions_are_the_same(seven: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    held = ClusterPartitions.load(seven, loaders())
    monkeypatch.setattr(partitions, "version_here", lambda: "99.9")
    with pytest.raises(RuntimeError, match=r"Expected privagrad 99\.9 on every worker"):
        held.total(counted, sample=None)


def test_clients_wait_for_results() -> None:
    class Asynchronous:
        asynchronous = True

    with pytest.raises(ValueError, match="found one with asynchronous=True"):
        ClusterPartitions.of(Asynchronous(), [])


def test_labels_are_few(seven: Client) -> None:
    held = ClusterPartitions.load(seven, loaders(200))
    np.testing.assert_array_equal(held.labels(), [-1, 1])
    many = Examples(table(2000).rows, np.arange(2000.0))
    with pytest.raises(ValueError, match="at most 1000 classes, found more"):
        ClusterPartitions.load(seven, [part.kept for part in cut(many, [1500])]).labels()
