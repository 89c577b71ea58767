"""One cluster of two processes for most tests: it listens on the loopback interface alone."""

from collections.abc import Iterator

import pytest
from distributed import Client, LocalCluster


def started(workers: int, *, processes: bool) -> LocalCluster:
    return LocalCluster(
        n_workers=workers, threads_per_worker=1, processes=processes, protocol="tcp://", host="127.0.0.1",
        dashboard_address="127.0.0.1:0", memory_limit=0, silence_logs=50,
    )  # fmt: skip


@pytest.fixture(scope="session")
def cluster() -> Iterator[LocalCluster]:
    with started(2, processes=True) as cluster:
        yield cluster


@pytest.fixture
def client(cluster: LocalCluster) -> Iterator[Client]:
    """A client of two workers: one that was killed is started again."""
    with Client(cluster) as client:
        client.wait_for_workers(2, timeout=60)
        yield client


@pytest.fixture(scope="session")
def threads() -> Iterator[LocalCluster]:
    with started(7, processes=False) as cluster:
        yield cluster


@pytest.fixture
def seven(threads: LocalCluster) -> Iterator[Client]:
    """A client of seven workers, which are threads of this process."""
    with Client(threads, set_as_default=False) as client:
        yield client
