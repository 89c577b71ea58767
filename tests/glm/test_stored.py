"""Rows in files: the same sums as in memory, whatever the parts, and little memory."""

import mmap
import os
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse import csr_array, random_array

from privagrad.geometry.ellipsoid import Ellipsoid
from privagrad.glm import stored
from privagrad.glm.examples import Examples, PartitionedExamples, targets_as_rows
from privagrad.glm.gradients import GlmGradients
from privagrad.glm.losses import Loss
from privagrad.glm.partitioned import PartitionedGradients
from privagrad.glm.rows import DenseRows, SparseRows, as_rows
from privagrad.glm.stored import StoredPartitions, forget, is_stored, stored_or_not
from privagrad.privacy.mechanism import GaussianSum
from privagrad.privacy.noise import random_source
from privagrad.privacy.sampling import SAMPLINGS, Batches


def mapped(array: np.ndarray, folder: Path, mode: str = "r") -> np.ndarray:
    """The array as a mapped file."""
    path = folder / f"{len(list(folder.iterdir()))}.numbers"
    np.ascontiguousarray(array).tofile(path)
    return np.memmap(path, array.dtype, mode=mode, shape=array.shape)  # type: ignore[call-overload]


def in_files(examples: Examples, folder: Path) -> PartitionedExamples:
    rows, targets = examples.rows, mapped(examples.targets, folder)
    if isinstance(rows, DenseRows):
        return PartitionedExamples.of(
            StoredPartitions(DenseRows(mapped(rows.array, folder)), targets)
        )
    data, indices, starts = (
        mapped(part, folder) for part in (rows.data, rows.indices, rows.indptr)
    )
    sparse = SparseRows(data, indices, starts, rows.dim)
    return PartitionedExamples.of(StoredPartitions(sparse, targets))


def bounded_sum(gradients, x, batch):
    mechanism = GaussianSum(x.size, 1.0, 20)
    total = mechanism.sum(Ellipsoid(np.linspace(0.5, 2.0, x.size), 1.0))
    gradients.add_bounded(total, x, batch)
    return total.memory.copy(), total.clipped, total.nonfinite


@settings(max_examples=40)
@given(data=st.data(), sparse=st.booleans(), sampling=st.sampled_from([*SAMPLINGS, None]))
def test_sums_are_those_of_rows_in_memory(data, sparse, sampling):
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    n, dim, classes = data.draw(st.integers(1, 200)), 5, data.draw(st.sampled_from([1, 3]))
    X = random_array((n, dim), density=0.4, rng=rng).toarray() * 30
    X[rng.random(n) < 0.1] = np.nan
    loss = Loss("logistic" if classes == 1 else "softmax")
    y = np.sign(rng.normal(size=n)) if classes == 1 else rng.integers(0, 3, n).astype(float)
    examples = Examples(as_rows(csr_array(X) if sparse else X), y)
    size = data.draw(st.integers(1, n))
    samples = Batches(n, size, 3, sampling).draw(random_source(0).sampler)
    x = rng.normal(size=dim * classes)
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(stored, "_PART_BYTES", data.draw(st.sampled_from([50, 400, 2**12, 2**25])))
        patch.setattr(stored, "_TOGETHER", data.draw(st.integers(1, 30)))
        patch.setattr(stored, "_PAGE", data.draw(st.sampled_from([1, 4096])))
        there = in_files(examples, Path(folder))
        one = GlmGradients(loss, examples.rows, y, classes)
        other = PartitionedGradients(loss, there, classes)
        for batch, step in zip(one.draw(samples), other.draw(samples), strict=True):
            expected, found = bounded_sum(one, x, batch), bounded_sum(other, x, step)
            assert np.array_equal(expected[0], found[0])
            assert expected[1:] == found[1:]
            assert step.size == batch.size
            plain = [np.zeros(x.size), np.zeros(x.size)]
            assert one.add_plain(plain[0], x, batch)[1] == other.add_plain(plain[1], x, step)[1]
            assert np.allclose(plain[0], plain[1])
        del there, other  # before the files


def seen(examples: Examples) -> tuple[np.ndarray, ...]:
    return examples.targets.sum(keepdims=True), np.array([examples.shape[0]])


def test_maps_are_applied_to_every_part(tmp_path, monkeypatch):
    monkeypatch.setattr(stored, "_PART_BYTES", 300)
    X, y = np.arange(60.0).reshape(30, 2), np.arange(30.0)
    there = in_files(Examples(as_rows(X), y), tmp_path)
    mechanism = GaussianSum(1, 1.0, 30)
    column = there.mapped(targets_as_rows)
    assert column.shape == (30, 1)
    total, count = column.kept().total(seen, sample=None)
    assert (total[0], count[0]) == (y.sum(), 30)
    sums = mechanism.sum()
    column.rows.add_to(sums, lambda units, *_: (units.__iadd__(1.0), (0, 0))[1])
    assert sums.memory[0] > 1  # once for each part


def resident() -> int:
    """Bytes of files that are in this process's memory."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssFile"))


most = [0]


def watched(examples: Examples) -> tuple[np.ndarray, ...]:
    most[0] = max(most[0], resident())
    return (np.array([float(np.sum(examples.rows.matrix))]),)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="only Linux tells")
@pytest.mark.parametrize("size", [None, 300])
def test_parts_leave_memory_when_they_were_used(tmp_path, monkeypatch, size):
    monkeypatch.setattr(stored, "_PART_BYTES", 2**21)
    monkeypatch.setattr(stored, "_TOGETHER", 4)
    X = np.ones((2**19, 16))  # 64 MB
    there = in_files(Examples(as_rows(X), np.ones(len(X))), tmp_path)
    samples = Batches(len(X), size or len(X), 20, size and "poisson").draw(random_source(0).sampler)
    before, most[0] = resident(), 0
    for step in range(20 if size else 1):
        there.total(watched, sample=(samples, step))
    assert most[0] - before < 32 * 2**20
    # The check can fail: the whole file mapped is seen as such.
    partitions = there.partitions
    assert isinstance(partitions, StoredPartitions)
    assert float(np.sum(partitions.rows.matrix)) == X.size
    assert resident() - before > 56 * 2**20


@pytest.mark.parametrize("size", [None, 3])
def test_a_file_that_was_cut_off_is_refused(tmp_path, monkeypatch, size):
    """Reading it would end the process."""
    monkeypatch.setattr(stored, "_PART_BYTES", 2**14)
    X = np.ones((4000, 3))
    there = in_files(Examples(as_rows(X), np.ones(len(X))), tmp_path)
    samples = Batches(len(X), size or len(X), 2, size and "poisson").draw(random_source(0).sampler)
    there.total(seen, sample=(samples, 0))
    for path in tmp_path.iterdir():
        os.truncate(path, 100)
    with pytest.raises(RuntimeError, match="cut off to 100: what was released stays charged"):
        there.total(seen, sample=(samples, 1))


def test_small_arrays_and_private_copies_stay_in_memory(tmp_path, monkeypatch):
    X = np.ones((10, 2))
    assert not is_stored(mapped(X, tmp_path))
    monkeypatch.setattr(stored, "LEAST_BYTES", 1)
    assert is_stored(mapped(X, tmp_path))
    assert is_stored(mapped(X, tmp_path, "r+"))
    assert is_stored(np.asarray(mapped(X, tmp_path))[2:])
    # What was written to a private copy would be lost with its pages.
    assert not is_stored(mapped(X, tmp_path, "c"))
    private = mmap.mmap(-1, X.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    held: np.ndarray = np.ndarray(X.shape, X.dtype, private)
    held[:] = X
    assert not is_stored(held)
    forget(held)
    assert np.array_equal(held, X)
    assert not is_stored(X)
    assert isinstance(stored_or_not(as_rows(X), X[:, 0]), Examples)
    there = stored_or_not(as_rows(mapped(X, tmp_path)), X[:, 0])
    assert isinstance(there, PartitionedExamples)
