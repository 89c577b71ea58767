"""The adapters of docs/cluster.md for Ray and Spark, over stand-ins for both of them."""

import re
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import reduce
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from distributed.protocol.pickle import dumps, loads

import privagrad as pg
from privagrad.glm.examples import PartitionedExamples
from tests.distributed.cases import fitted as fitted_to
from tests.distributed.cases import loaders, same, table

PAGE = Path(__file__).parents[2] / "docs" / "cluster.md"
POOL = ThreadPoolExecutor(2)


def travelled(value: Any) -> Any:
    return loads(dumps(value))


class Actor:
    """An object in another process, whose methods have a method `remote`."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __getattr__(self, name: str) -> Any:
        def remote(*arguments: Any) -> Future[Any]:
            return POOL.submit(lambda told: getattr(self._value, name)(*told), travelled(arguments))

        return SimpleNamespace(remote=remote)


def remote_class(**options: Any) -> Callable[[Any], Any]:
    return lambda kind: SimpleNamespace(remote=lambda *told: Actor(kind(*travelled(told))))


def get(asked: Sequence[Future[Any]]) -> list[Any]:
    return [travelled(one.result()) for one in asked]


class Collection:
    """An RDD of one element for each partition, or a function that makes one of others."""

    def __init__(self, compute: Callable[[], list[Any]]) -> None:
        self.compute = compute

    def map(self, function: Callable[[Any], Any]) -> "Collection":
        def compute() -> list[Any]:
            return [travelled(one) for one in POOL.map(travelled(function), self.compute())]

        return Collection(compute)

    def persist(self) -> "Collection":
        found = self.compute()
        return Collection(lambda: found)

    def treeReduce(self, function: Callable[[Any, Any], Any]) -> Any:
        return reduce(function, self.compute())


def parallelize(values: Sequence[Any], count: int) -> Collection:
    assert len(values) == count
    return Collection(lambda: list(values))


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the page's adapters define."""
    text = PAGE.read_text(encoding="utf-8")
    text = text[text.index("## Ray, Spark and others") : text.index("### Use")]
    stand_in = SimpleNamespace(remote=remote_class, get=get)
    monkeypatch.setitem(__import__("sys").modules, "ray", stand_in)
    names: dict[str, Any] = {}
    for block in re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        exec(block, names)
    return names


@pytest.mark.parametrize("name", ["RayPartitions", "SparkPartitions"])
@pytest.mark.parametrize("sparse", [False, True])
def test_the_adapters_give_the_sums_of_one_process(
    page: dict[str, Any], name: str, sparse: bool
) -> None:
    context = [SimpleNamespace(parallelize=parallelize)] if name == "SparkPartitions" else []
    counts, edges = [100, 300, 500], [100, 400]
    held = page[name](*context, loaders(*edges, sparse=sparse), counts, 6, sparse)
    rows, examples = PartitionedExamples.of(held), table(sparse=sparse)
    one, other = (
        pg.minimize(
            "logistic", *given, epsilon=1.0, delta=1e-5, steps=5, batch_size=90, step_size=0.1,
            random_state=2,
        )
        for given in ((examples.rows.matrix, examples.targets), (rows, None))
    )  # fmt: skip
    assert np.array_equal(one.last, other.last)
    assert one.privacy == other.privacy
    if not sparse:
        assert same(fitted_to(examples), fitted_to(rows))
