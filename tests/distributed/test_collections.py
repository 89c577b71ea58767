"""Dask's arrays and data frames at the doors: what is served, and what is refused at once."""

from pathlib import Path
from typing import Any

import dask.array as da
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
from dask.delayed import delayed
from distributed import Client
from scipy.sparse import csr_matrix

import privagrad as pg
from privagrad.distributed import from_dask
from privagrad.glm.examples import Examples, PartitionedExamples, Sums
from tests.distributed.cases import table

ROWS = table()
X, Y = ROWS.rows.matrix, ROWS.targets


def moments(examples: Examples) -> Sums:
    """Sums that show whether rows and targets belong together."""
    dense = examples.rows.margins(np.eye(examples.shape[1]))
    return np.array([examples.shape[0]]), dense.sum(axis=0), examples.targets @ dense


def require_same_rows(rows: PartitionedExamples) -> None:
    for one, other in zip(moments(ROWS), rows.total(moments, sample=None), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-9)


def unknown(array: np.ndarray, *edges: int) -> Any:
    """A dask array whose chunks have unknown sizes."""
    parts = [da.from_array(part) for part in np.split(array, edges)]
    whole = da.concatenate(parts)
    return whole[da.ones(len(array), chunks=whole.chunks[0], dtype=bool)]


def untouched(*shape: int, dtype: Any = float) -> Any:
    """A dask array that nobody may compute."""

    def fail() -> None:
        pytest.fail("was computed")

    return da.from_delayed(delayed(fail)(), shape=shape, dtype=dtype)


@pytest.mark.parametrize(
    ("rows", "targets"),
    [
        (da.from_array(X, chunks=(300, 6)), da.from_array(Y, chunks=300)),
        (da.from_array(X, chunks=(300, 2)), da.from_array(Y, chunks=130)),
        (da.from_array(X, chunks=(300, 6)), da.from_array(Y, chunks=300)[:, None]),
        (unknown(X, 100, 101), unknown(Y, 100, 101)),
        (unknown(X, 100, 700), unknown(Y, 500)),
        (unknown(X, 100, 700), da.from_array(Y, chunks=130)),
        (da.from_array(X, chunks=(400, 6)), unknown(Y, 500)),
    ],
)
def test_arrays_of_all_chunks(client: Client, rows: Any, targets: Any) -> None:
    require_same_rows(from_dask(rows, targets))


def test_sparse_chunks(client: Client) -> None:
    rows = da.from_array(X, chunks=(300, 6)).map_blocks(csr_matrix)
    found = from_dask(rows, da.from_array(Y, chunks=300))
    assert found.sparse
    require_same_rows(found)


def test_single_precision_and_whole_numbers(client: Client) -> None:
    narrow = from_dask(da.from_array(X.astype(np.float32), chunks=(300, 6)))
    numbers = from_dask(da.from_array((X * 100).astype(np.int16), chunks=(300, 6)))
    for rows, dtype in ((narrow, "float32"), (numbers, "float64")):
        assert rows.total(dtypes, dtype, sample=None)[0][0] == 0


def dtypes(examples: Examples, expected: str) -> Sums:
    return (np.array([examples.rows.matrix.dtype != expected]).astype(int),)


def frame() -> Any:
    names = [f"c{j}" for j in range(6)]
    told = pd.DataFrame(X, columns=names).assign(label=Y)
    return dd.from_pandas(told, npartitions=3)


def test_frames(client: Client) -> None:
    told = frame()
    features = told.drop(columns=["label"])
    require_same_rows(from_dask(told, "label"))
    require_same_rows(from_dask(features, told["label"]))
    require_same_rows(from_dask(features, told[["label"]]))
    require_same_rows(from_dask(features, da.from_array(Y, chunks=200)))


def test_a_folder_of_parquet_files(client: Client, tmp_path: Path) -> None:
    """Dask would read a file's only column in fewer and larger pieces than the others."""
    whole = frame().compute()
    for number, first in enumerate(range(0, 900, 100)):
        whole[first : first + 100].to_parquet(tmp_path / f"{number}.parquet", index=False)
    told = dd.read_parquet(tmp_path)
    require_same_rows(from_dask(told.drop(columns=["label"]), told["label"]))
    rows = da.from_array(X, chunks=(400, 6))
    require_same_rows(from_dask(rows, told["label"]))


def test_partitions_without_rows(client: Client) -> None:
    told = frame()
    some = told.map_partitions(lambda part: part[part.index < 100])
    rows = from_dask(some, "label")
    assert rows.shape == (100, 6)
    memory = pg.minimize("logistic", X[:100], Y[:100], epsilon=1.0, steps=3, random_state=1,
                         step_size=0.1)  # fmt: skip
    cluster = pg.minimize("logistic", rows, epsilon=1.0, steps=3, random_state=1, step_size=0.1)
    assert np.array_equal(memory.last, cluster.last)


@pytest.mark.parametrize(
    ("rows", "targets", "message"),
    [
        (untouched(9, 2, dtype="U3"), None, "numeric columns only, found 'X'"),
        (untouched(9, 2), untouched(9, dtype=object), "numeric columns only, found 'y'"),
        (untouched(9), untouched(9), r"X of shape \(n, d\), found 1 dimensions"),
        (untouched(9, 2), untouched(9, 2), "one column of targets y, found 2"),
        (untouched(9, 2), np.ones(9), "y to be a dask array or data frame too, found ndarray"),
        (untouched(9, 2), "label", "y to be a column of a dask DataFrame X"),
        (untouched(9, 2), untouched(8), "as many targets y as rows of X, found 8 and 9"),
        (untouched(9, 0), untouched(9), "known number of columns in X, found 0"),
    ],
)  # fmt: skip
def test_refused_before_anything_is_computed(
    client: Client, rows: Any, targets: Any, message: str
) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        from_dask(rows, targets)


def test_texts_in_frames_are_refused(client: Client) -> None:
    told = dd.from_pandas(
        pd.DataFrame({"a": [1.0, 2], "b": ["x", "y"], "c": [1, 2]}), npartitions=1
    )
    with pytest.raises(TypeError, match="numeric columns only, found 'b'"):
        from_dask(told, "c")


def test_groups_and_weights_are_refused(client: Client) -> None:
    rows, targets = untouched(9, 2), untouched(9)
    with pytest.raises(ValueError, match="no groups= with rows on a cluster"):
        from_dask(rows, targets, groups=range(9))
    with pytest.raises(ValueError, match="no weights of rows"):
        from_dask(rows, targets, weights=untouched(9))
    with pytest.raises(ValueError, match=r"users with several rows \(groups=\)"):
        pg.minimize("logistic", rows, targets, epsilon=1.0, groups=range(9))
    with pytest.raises(ValueError, match="no groups= for rows that are not in memory"):
        pg.PrivateLogisticRegression().fit(rows, targets, groups=range(9))
    with pytest.raises(ValueError, match="no sample_weight"):
        pg.PrivateLogisticRegression().fit(rows, targets, sample_weight=untouched(9))
    with pytest.raises(ValueError, match="no schema= for dask"):
        pg.PrivateLogisticRegression(schema=pg.schema.Schema((pg.schema.Column("a"),))).fit(
            rows, targets
        )
    with pytest.raises(ValueError, match="minimises over all of them"):
        pg.minimize("logistic", rows, targets, epsilon=1.0, method="output-perturbation")


def test_without_a_client() -> None:
    with pytest.raises(ValueError, match=r"client of a Dask cluster.*Client\('tcp://"):
        from_dask(untouched(9, 2), untouched(9))


def test_rows_and_targets_belong_together(client: Client) -> None:
    told = frame()
    with pytest.raises(ValueError, match="same index in every partition"):
        from_dask(
            told.drop(columns=["label"]),
            told["label"]
            .reset_index(drop=True)
            .map_partitions(lambda part: part.set_axis(part.index + 1), meta=("label", float)),
        )
    with pytest.raises(ValueError, match="same rows in every partition, found one of"):
        from_dask(unknown(X, 400), unknown(Y, 399))


@pytest.mark.parametrize(
    ("estimator", "labels"),
    [
        (pg.PrivateLogisticRegression, Y),
        (pg.PrivateLogisticRegression, (Y > 0).astype(int)),
        (pg.PrivateLinearSVC, np.digitize(X[:, 0], [-0.5, 0.5]) + 4),
        (pg.PrivateQuantileRegressor, X[:, 0] - X[:, 1]),
        (pg.PrivateRidge, X[:, 0] - X[:, 1]),
    ],
)
def test_estimators_fit_as_in_memory(client: Client, estimator: Any, labels: np.ndarray) -> None:
    told = {"epsilon": 2.0, "delta": 1e-5, "random_state": 4}
    if estimator is not pg.PrivateRidge:
        told["steps"] = 10
    memory = estimator(**told).fit(X, labels)
    rows = da.from_array(X, chunks=(350, 6)), da.from_array(labels, chunks=350)
    cluster = estimator(**told).fit(*rows)
    assert np.array_equal(memory.coef_, cluster.coef_)
    assert np.array_equal(memory.intercept_, cluster.intercept_)
    assert memory.privacy_ == cluster.privacy_
    assert np.array_equal(memory.predict(X), cluster.predict(X))
    if hasattr(memory, "classes_"):
        assert memory.classes_.dtype == cluster.classes_.dtype
        assert np.array_equal(memory.classes_, cluster.classes_)
    assert memory.model_.schema == cluster.model_.schema


def test_names_of_columns(client: Client) -> None:
    told = frame()
    parts = told.drop(columns=["label"]), told["label"]
    arguments: dict[str, Any] = {"epsilon": 2.0, "random_state": 4, "steps": 5}
    cluster = pg.PrivateLogisticRegression(**arguments).fit(*parts)
    memory = pg.PrivateLogisticRegression(**arguments).fit(*(part.compute() for part in parts))
    names = [list(model.feature_names_in_) for model in (cluster, memory)]
    assert names[0] == names[1] == list(parts[0].columns)
    assert np.array_equal(memory.coef_, cluster.coef_)
    assert memory.model_.schema == cluster.model_.schema


def test_entries_that_are_not_finite_are_refused(client: Client) -> None:
    wrong = X.copy()
    wrong[700, 3] = np.nan
    with pytest.raises(ValueError, match="NaN or inf in column 3"):
        pg.PrivateLogisticRegression().fit(
            da.from_array(wrong, chunks=(300, 6)), da.from_array(Y, chunks=300)
        )


def test_minimize_takes_collections(client: Client) -> None:
    arguments: dict[str, Any] = {
        "epsilon": 1.0, "steps": 5, "batch_size": 90, "step_size": 0.1, "random_state": 7,
    }  # fmt: skip
    memory = pg.minimize("softmax", X, (Y > 0).astype(int), **arguments)
    rows = da.from_array(X, chunks=(500, 3)), da.from_array((Y > 0).astype(int), chunks=200)
    cluster = pg.minimize("softmax", *rows, **arguments)
    assert np.array_equal(memory.last, cluster.last)
    assert memory.privacy == cluster.privacy
    assert np.array_equal(pg.minimize("linear", X, **arguments).last,
                          pg.minimize("linear", rows[0], **arguments).last)  # fmt: skip
