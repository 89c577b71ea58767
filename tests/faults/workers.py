"""Workers of a cluster that are killed at random moments of fits."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import dask.array as da
import numpy as np
import pytest
from distributed import Client, LocalCluster

import privagrad as pg
from privagrad.privacy.ledger import Ledger
from tests.distributed.conftest import started, wait_for_all

Row = tuple[str, str]
_STEPS = 60


def workers_lost(folder: Path, luck: random.Random, times: int) -> Row:
    """Fits that each lose one of two workers end as if they had not, and are charged once."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(luck.randrange(2**32))
    X = rng.normal(size=(3000, 6))
    y = (X[:, 0] > 0.3).astype(float)
    alone = _fit(folder / "alone", X, y)
    with started(2, processes=True) as cluster:
        seconds = _on_cluster(folder / "whole", cluster, X, y, None)[1]
        seen = [
            _on_cluster(folder / f"{k}", cluster, X, y, luck.uniform(0, seconds))
            for k in range(times)
        ]
    for found, _ in seen:
        if not np.array_equal(found, alone):
            raise RuntimeError("Expected the coefficients of one process, found others.")
    return (
        f"{times} fits on 2 workers, one killed (kill -9) at a random moment of each",
        f"{times} × the coefficients of one process to the last bit, charged once",
    )


def _on_cluster(
    folder: Path, cluster: LocalCluster, X: Any, y: Any, kill_after: float | None
) -> tuple[Any, float]:
    """The coefficients of a fit, and how long it took."""
    with Client(cluster) as client:
        wait_for_all(client, cluster)
        rows = da.from_array(X, chunks=(500, -1)), da.from_array(y, chunks=500)
        nannies: list[Any] = list(cluster.workers.values())
        timer = threading.Timer(kill_after or 0, _kill, [nannies[0].pid])
        if kill_after is not None:
            timer.start()
        start = time.monotonic()
        found = _fit(folder, *rows)
        seconds = time.monotonic() - start
        if kill_after is not None:
            timer.join()
    return found, seconds


def _kill(process: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)


def _fit(folder: Path, X: Any, y: Any) -> Any:
    """Coefficients of a fit that a budget pays, with the same keys every time."""
    folder.mkdir()
    ledger, keys = Ledger(folder / "ledger"), itertools.count(1)
    ledger.create("rows", 3.0, 1e-5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("privagrad.privacy.noise.secrets.randbits", lambda bits: next(keys))
        model = pg.PrivateLogisticRegression(
            epsilon=1.0, delta=1e-5, steps=_STEPS, ledger=folder / "ledger", dataset="rows"
        ).fit(X, y)
    (entry,) = ledger.account("rows").runs
    if entry.state != "finished" or not 0 < ledger.account("rows").spent <= 1.0:
        raise RuntimeError(f"Expected one charge of at most 1, found {entry}.")
    return model.coef_
