"""What every implementation of `Partitions` gives: the sums of all rows, to the last bit."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import privagrad as pg
from privagrad.distributed.partitions import _tree
from privagrad.distributed.worker import Answer, Branch, Place, together
from privagrad.glm.examples import Examples, MemoryPartitions, PartitionedExamples, Sums
from privagrad.privacy.sampling import SAMPLINGS, Batches, Sampling
from tests.distributed.cases import cut, fitted, same, table

EDGES = st.lists(st.integers(0, 900), max_size=6)


@given(
    edges=EDGES,
    sampling=st.sampled_from(["poisson", "with_replacement", "without_replacement"]),
    sparse=st.booleans(),
    seed=st.integers(0, 100),
)
def test_iterates_do_not_depend_on_partitions(
    edges: list[int], sampling: Sampling, sparse: bool, seed: int
) -> None:
    examples = table(sparse=sparse)
    parts = PartitionedExamples.of(MemoryPartitions(cut(examples, edges)))
    X = examples.rows.matrix
    one, other = (
        pg.minimize(
            "logistic", *rows, epsilon=1.0, steps=6, batch_size=90, step_size=0.1,
            sampling=sampling, random_state=seed,
        )
        for rows in ((X, examples.targets), (parts, None))
    )  # fmt: skip
    assert np.array_equal(one.last, other.last)
    assert one.privacy == other.privacy


def chosen(examples: Examples) -> Sums:
    """How often each number of a row is among the targets."""
    return (np.bincount(examples.targets.astype(np.int64), minlength=900),)


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_partitions_draw_their_own_part_of_a_sample(sampling: Sampling) -> None:
    """Parts that drew the same rows, each of its own, would not be independent of each other."""
    numbered = replace(table(), targets=np.arange(900.0))
    samples = Batches(900, 90, 6, sampling).draw(np.random.default_rng(0))
    parts = MemoryPartitions(cut(numbered, [100, 100, 450]))
    for step in range(6):
        [found] = parts.total(chosen, sample=(samples, step))
        assert np.array_equal(found, np.bincount(samples.of_step(step), minlength=900))


@pytest.mark.parametrize("edges", [[], [450], [0, 0, 7, 900], [300, 600]])
@pytest.mark.parametrize("loss", ["logistic", "hinge", "quantile", "squares"])
def test_fits_do_not_depend_on_partitions(loss: str, edges: list[int]) -> None:
    examples = table()
    parts = PartitionedExamples.of(MemoryPartitions(cut(examples, edges)))
    assert same(fitted(examples, loss), fitted(parts, loss))


@given(workers=st.integers(1, 80), fan_out=st.integers(1, 9))
def test_a_tree_has_every_worker_once(workers: int, fan_out: int) -> None:
    places = {f"tcp://{k}": [Place(k, str(k), k, 1)] for k in range(workers)}
    top = _tree(places, fan_out)

    def found(branches: list[Branch], depth: int) -> list[tuple[str, int]]:
        assert len(branches) <= fan_out
        return [
            one for b in branches for one in [(b.address, depth), *found(list(b.below), depth + 1)]
        ]

    seen = found(top, 1)
    assert sorted(address for address, _ in seen) == sorted(places)
    if fan_out > 1:
        assert max(depth for _, depth in seen) <= 1 + np.log(workers) / np.log(fan_out)


def test_answers_of_nothing_add_nothing() -> None:
    numbers, sums = together([Answer([], None), Answer([2], (np.ones(3),)), Answer([], None)])
    assert numbers == [2]
    assert sums is not None
    np.testing.assert_array_equal(sums[0], np.ones(3))
