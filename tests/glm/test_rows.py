from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from scipy import sparse

from privagrad.glm import rows as rows_module
from privagrad.glm.rows import DenseRows, SparseRows, as_rows, as_targets, strange_columns


def dense_rows(X: Any) -> DenseRows:
    rows = as_rows(X)
    assert isinstance(rows, DenseRows)
    return rows


def sparse_rows(X: Any) -> SparseRows:
    rows = as_rows(X)
    assert isinstance(rows, SparseRows)
    return rows


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_floats_in_c_order_and_canonical_csr_are_not_copied(dtype):
    X = np.arange(6, dtype=dtype).reshape(3, 2)
    assert np.shares_memory(dense_rows(X).array, X)
    matrix = sparse.csr_array(X)
    assert np.shares_memory(sparse_rows(matrix).data, matrix.data)


@pytest.mark.parametrize(
    "X",
    [
        [[1, 2], [3, 4]],
        np.array([[1, 2], [3, 4]], dtype=np.int8),
        np.asfortranarray([[1.0, 2.0], [3.0, 4.0]]),
        pd.DataFrame({"a": [1, 3], "b": [2.0, 4.0]}),
        pl.DataFrame({"a": [1, 3], "b": [2.0, 4.0]}),
        sparse.coo_matrix([[1.0, 2.0], [3.0, 4.0]]),
        sparse.csc_array([[1, 2], [3, 4]]),
    ],
    ids=lambda X: type(X).__name__,
)
def test_all_kinds_of_tables_become_the_same_rows(X):
    rows = as_rows(X)
    assert rows.shape == (2, 2)
    assert rows.margins(np.array([1.0, 10.0])).tolist() == [21.0, 43.0]


def test_a_frame_of_float32_stays_float32():
    frame = pd.DataFrame(np.ones((1, 2), np.float32), columns=["a", "b"])
    assert dense_rows(frame).array.dtype == np.float32


def test_entries_stored_twice_are_summed_even_if_the_flag_says_otherwise():
    """Two entries 3 and 3 at one place are a 6: their norm is 6, not sqrt(18)."""
    matrix = sparse.csr_array((np.array([3.0, 3.0]), np.array([1, 1]), np.array([0, 2])), (1, 2))
    matrix.has_canonical_format = True
    rows = sparse_rows(matrix)
    assert rows.data.tolist() == [6.0]
    assert matrix.data.tolist() == [3.0, 3.0], "the user's matrix stays as it was"


def test_columns_out_of_order_are_sorted():
    matrix = sparse.csr_array((np.array([3.0, 5.0]), np.array([1, 0]), np.array([0, 2])), (1, 2))
    rows = sparse_rows(matrix)
    assert rows.indices.tolist() == [0, 1]
    assert rows.data.tolist() == [5.0, 3.0]


def test_columns_out_of_range_are_refused():
    matrix = sparse.csr_array((np.array([3.0]), np.array([1]), np.array([0, 1])), (1, 2))
    matrix.indices[0] = 7
    with pytest.raises(ValueError, match="ind"):
        as_rows(matrix)


def test_targets_from_frames():
    assert as_targets(pd.Series([1, 2])).tolist() == [1, 2]
    assert as_targets(pl.Series([1.0, 2.0])).tolist() == [1.0, 2.0]
    assert as_targets(pd.DataFrame({"y": [1, 2]})).tolist() == [1, 2]
    assert as_targets(None) is None


@pytest.mark.parametrize(
    ("X", "message"),
    [
        (np.zeros(3), r"shape \(n, d\), found shape \(3,\)"),
        (np.zeros((2, 2, 2)), "shape"),
        (np.zeros((0, 3)), "at least one row"),
        (np.zeros((3, 0)), "at least one row and one column"),
        ([["a", "b"]], "numbers"),
        (np.array([[1j]]), "complex"),
        (np.array([[None]]), "object"),
        (pd.DataFrame({"age": [1], "city": ["Bern"]}), "'city'"),
        (pl.DataFrame({"age": [1], "city": ["Bern"]}), "'city'"),
        (pd.DataFrame({"day": pd.to_datetime(["2020-01-01"])}), "'day'"),
        ([[1.0, 2.0], [3.0]], "a table of numbers, found list"),
        (sparse.csr_array(np.array([[1j]])), "complex128"),
        (sparse.csr_array((0, 3)), "at least one row"),
    ],
    ids=str,
)
def test_wrong_tables_say_why(X, message):
    with pytest.raises((TypeError, ValueError), match=message):
        as_rows(X)


def test_kinds():
    assert isinstance(as_rows(np.eye(2)), DenseRows)
    assert isinstance(as_rows(sparse.eye_array(2)), SparseRows)


def both_layouts(X):
    """A dense and a CSR table of the same rows, the CSR with one zero stored, and their arrays."""
    matrix = sparse.csr_array(np.where(X == 0, 99.0, X).astype(X.dtype))
    matrix.data[matrix.data == 99.0] = 0.0
    return (X, [X]), (matrix, [matrix.data, matrix.indices, matrix.indptr])


def dense(rows):
    return rows.matrix.toarray() if isinstance(rows, SparseRows) else rows.array


@pytest.mark.parametrize("constant", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_standardized_rows_are_their_formula(dtype, constant):
    rng = np.random.default_rng(0)
    X = np.where(rng.uniform(size=(30, 4)) < 0.5, 0.0, rng.normal(3, 2, (30, 4))).astype(dtype)
    centre, unit = np.array([0.0, 2.5, 0.0, -1.0]), np.array([1.0, 0.5, 3.0, 7.0])
    naive = np.column_stack([(X - centre) / unit, np.ones((30, int(constant)))])
    for table, arrays in both_layouts(X):
        before = [array.copy() for array in arrays]
        rows = as_rows(table)
        moved = rows.standardized(centre, unit, constant)
        assert type(moved) is type(rows)
        assert dense(moved) == pytest.approx(naive, rel=4 * float(np.finfo(dtype).eps))
        shifted = rows.centred(np.array([1, 3]), centre[[1, 3]]).array
        assert shifted == pytest.approx(X[:, [1, 3]] - centre[[1, 3]], rel=1e-6)
        for array, copy in zip(arrays, before, strict=True):
            assert np.array_equal(array, copy), "the user's table stays as it was"
        untouched = rows.standardized(np.zeros(4), np.ones(4), False)
        assert dense(untouched) == pytest.approx(X)
    assert dense_rows(X).standardized(centre, unit, constant).array.dtype == dtype


def test_standardized_sparse_columns_keep_their_zeros():
    matrix = sparse.csr_array(sparse.random_array((50, 6), density=0.1, rng=0))
    moved = sparse_rows(matrix).standardized(np.zeros(6), np.full(6, 2.0), True)
    assert moved.data.size == matrix.nnz + 50
    centred = sparse_rows(matrix).standardized(
        np.array([1.0, 0, 0, 0, 0, 0]), np.full(6, 2.0), False
    )
    assert centred.data.size == 50 + matrix[:, 1:].nnz


@pytest.mark.parametrize("constant", [False, True])
@pytest.mark.parametrize("centre", [[0.0, 0, 0, 0, 0], [0, 2.5, 0, 0, -1.0], [1.0, 2, 3, 4, 5]])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_standardized_sparse_rows_are_sums_of_matrices_to_the_last_bit(dtype, centre, constant):
    rng = np.random.default_rng(0)
    X = (rng.normal(3, 2, (200, 5)) * (rng.uniform(size=(200, 5)) < 0.4)).astype(dtype)
    X[3], X[4], X[5, 1] = 0.0, np.array([1, 2.5, 3, 4, -1]), 1e30
    matrix, unit = sparse.csr_array(X), np.array([1.0, 0.3, 3.0, 1e25, 7.0])
    shift = np.array(centre, dtype=np.float64)
    with np.errstate(over="ignore"):
        scaled = sparse.csr_array(X.astype(np.float64) * (1 / unit)).astype(dtype)
        dense = np.where(shift == 0, scaled.toarray(), (X - shift) / unit)
    if constant:
        dense = np.column_stack([dense, np.ones(200)])
    found = sparse_rows(matrix).standardized(shift, unit, constant)
    expected = sparse.csr_array(dense)
    for one, other in zip(
        (found.data, found.indices, found.indptr),
        (expected.data, expected.indices, expected.indptr),
        strict=True,
    ):
        assert np.array_equal(one, other)
    assert found.shape == dense.shape
    assert found.data.dtype == (np.float64 if constant or shift.any() else dtype)
    assert found.indices.dtype == found.indptr.dtype == np.int32


def test_rows_in_the_columns_of_their_entries():
    X = np.array([[0.0, 1, 0, 2, 0], [0, 0, 0, 0, 0], [3, 0, 0, 4, 0], [0, 5, 0, 0, 6]])
    rows = sparse_rows(sparse.csr_array(X))
    for chosen, columns in (([2, 0, 2], [0, 1, 3]), ([1], []), ([], []), ([3], [1, 4])):
        narrow, found = rows.narrowed(np.array(chosen, dtype=np.int64))
        assert found.tolist() == columns
        assert dense(narrow).tolist() == X[chosen][:, columns].tolist()
        assert [a.dtype for a in narrow.flat[:3]] == [a.dtype for a in rows.flat[:3]]


@pytest.mark.parametrize("kind", [np.asarray, sparse.csr_array])
def test_points_of_another_size_are_refused(kind):
    rows = as_rows(kind(np.eye(3)))
    for wrong in (np.ones(2), np.ones(4), np.ones((2, 3))):
        with pytest.raises(ValueError, match="3 columns"):
            rows.margins(wrong)
    assert rows.margins(np.arange(6.0).reshape(3, 2)).tolist() == [[0, 1], [2, 3], [4, 5]]


def test_row_starts_beyond_the_entries_are_refused_unread():
    matrix = sparse.csr_array(np.eye(3))
    matrix.indptr = np.array([0, 10**9, 2, 3], dtype=matrix.indptr.dtype)
    with pytest.raises(ValueError, match="ind"):
        as_rows(matrix)


def test_rows_that_are_left_out_are_zero_and_the_others_stay():
    X = np.arange(1.0, 13.0).reshape(4, 3)
    X[2, 1] = X[3, 0] = 0.0
    left_out = np.array([True, False, True, False])
    for table, _ in both_layouts(X.copy()):
        rows = as_rows(table)
        assert rows.without(left_out) is rows
        assert np.array_equal(dense(rows), np.where(left_out[:, None], 0.0, X))


def test_large_tables_lie_in_files_that_nobody_else_can_open(monkeypatch):
    X = np.random.default_rng(0).standard_normal((50, 3))
    centre, unit = np.array([1.0, 0.0, -2.0]), np.array([2.0, 1.0, 0.5])
    small = dense_rows(X).standardized(centre, unit, True).array
    moved = dense_rows(X).centred(np.array([0, 2]), centre[[0, 2]]).array
    monkeypatch.setattr(rows_module, "_LARGE", 100)
    large = dense_rows(X).standardized(centre, unit, True).array
    assert isinstance(large.base, np.memmap)
    assert not Path(str(large.base.filename)).exists()
    assert np.array_equal(large, small)
    assert np.array_equal(dense_rows(X).centred(np.array([0, 2]), centre[[0, 2]]).array, moved)


def test_columns_that_hold_no_numbers_are_named():
    frame = pd.DataFrame({f"text {k}": ["a"] for k in range(12)} | {"number": [1.0]})
    named = strange_columns(frame)
    assert named.startswith("'text 0' (object), 'text 1' (object)")
    assert named.endswith("'text 9' (object) and 2 more")
    assert "number" not in named
    assert strange_columns(pa.table({"a": [1], "b": ["x"]})) == "'b' (object)"
    for fine in (frame[["number"]], np.ones((2, 2)), sparse.eye_array(2), [[1.0]]):
        assert strange_columns(fine) == ""
