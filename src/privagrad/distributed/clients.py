"""A client of a Dask cluster: connected, checked, and asked for results."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as version_of
from typing import Any

from distributed import Client, KilledWorker, Security
from distributed.comm.core import connect

from privagrad._internal.errors import ClusterError
from privagrad.distributed.worker import version_here

_SECONDS = 5.0
"""So long a scheduler may take to answer, and workers to come."""

_SHOWN = 5

NO_SCHEDULER = (
    "Expected answers of the cluster, found the connection to its scheduler lost: start it again, "
    "with its workers. What was released before stays charged."
)


@contextmanager
def cluster_at(address: str) -> Iterator[Client]:
    """A client of the scheduler at this address, whose workers have this version of privagrad.

    For an address ``tls://...`` the certificates are those of Dask's configuration.
    """
    asyncio.run(_reach(address))
    with Client(address, timeout=_SECONDS, set_as_default=False) as client:
        _require_workers(client, address)
        yield client


def gathered(client: Any, futures: Sequence[Any]) -> list[Any]:
    """The results of tasks; what a task raises is raised here."""
    try:
        found: list[Any] = client.gather(futures)
    except KilledWorker as error:
        raise ClusterError(
            f"Expected workers to load rows, but every worker that tried to died: {error}. Give "
            "workers more memory, or make partitions smaller."
        ) from error
    except CancelledError as error:
        raise ClusterError(NO_SCHEDULER) from error
    return found


def asked_of_a_worker(client: Any, function: Callable[..., Any], *arguments: Any) -> Any:
    """``function(*arguments)`` on one of the workers."""
    return gathered(client, [client.submit(function, *arguments, pure=False)])[0]


async def _reach(address: str) -> None:
    """Refuse an address where no scheduler answers, before a client waits for it."""
    try:
        arguments = Security().get_connection_args("client")
        comm = await connect(address, timeout=_SECONDS, **arguments)
    except OSError:
        raise ConnectionError(
            f"Expected a Dask scheduler at {address}, found none that answers within "
            f"{_SECONDS:g} seconds: start one with dask scheduler, and give the address that it "
            "shows, such as tcp://host:8786. Nothing was spent."
        ) from None
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"Expected the address of a Dask scheduler, such as tcp://host:8786, found "
            f"{address!r}: {error}. Nothing was spent."
        ) from None
    await comm.close()


def _require_workers(client: Client, address: str) -> None:
    """Refuse a cluster without workers, and workers that have another version."""
    try:
        client.wait_for_workers(1, timeout=_SECONDS)
    except TimeoutError:
        raise ConnectionError(
            f"Expected workers at the scheduler {address}, found none within {_SECONDS:g} "
            f"seconds: start some with dask worker {address}. Nothing was spent."
        ) from None
    own = version_here()
    told: dict[str, Any] = client.run(version_of, "privagrad", on_error="return")
    strange = [
        f"{'none' if isinstance(found, PackageNotFoundError) else found} on {worker}"
        for worker, found in told.items()
        if found != own
    ]
    if strange:
        more = f" and {len(strange) - _SHOWN} more" if len(strange) > _SHOWN else ""
        raise ClusterError(
            f"Expected privagrad {own} on every worker, as here, found "
            f"{', '.join(strange[:_SHOWN])}{more}: install the same version everywhere. Nothing "
            "was spent."
        )
