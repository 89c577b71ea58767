"""One cluster of two processes for most tests: it listens on the loopback interface alone.

It is closed after each module. Its threads draw from Python's `random`, which tests by Hypothesis,
here in modules without a cluster, must have for themselves.
"""

import contextlib
import os
import time
from collections.abc import Iterator
from typing import Any

import pytest
from distributed import Client, LocalCluster


def started(workers: int, *, processes: bool) -> LocalCluster:
    return LocalCluster(
        n_workers=workers, threads_per_worker=1, processes=processes, memory_limit=0,
        protocol="tcp://", host="127.0.0.1", dashboard_address="127.0.0.1:0", silence_logs=50,
    )  # fmt: skip


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with started(2, processes=True) as cluster:
        yield cluster


@pytest.fixture
def client(cluster: LocalCluster) -> Iterator[Client]:
    """A client of two workers: one that was killed is started again."""
    with Client(cluster) as client:
        wait_for_all(client, cluster)
        yield client


def wait_for_all(client: Client, cluster: LocalCluster) -> None:
    """Until all processes answer: the scheduler may not know yet that one was killed."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        nannies: list[Any] = list(cluster.workers.values())
        with contextlib.suppress(OSError):
            if set(client.run(os.getpid).values()) == {nanny.pid for nanny in nannies}:
                return
        time.sleep(0.05)
    pytest.fail("Expected the cluster's workers to start again, found some missing.")


@pytest.fixture(scope="module")
def threads() -> Iterator[LocalCluster]:
    with started(7, processes=False) as cluster:
        yield cluster


@pytest.fixture
def seven(threads: LocalCluster) -> Iterator[Client]:
    """A client of seven workers, which are threads of this process."""
    with Client(threads, set_as_default=False) as client:
        yield client


@pytest.fixture
def lone() -> Iterator[tuple[Client, LocalCluster]]:
    """A cluster of one worker."""
    with started(1, processes=False) as cluster, Client(cluster, set_as_default=False) as client:
        yield client, cluster
