"""Rows that are not in memory, through the doors: the same results to the last bit."""

import gzip
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow.dataset as arrow
import pytest

import privagrad as pg
from privagrad.glm import stored

N, DIM = 3000, 4
OPTIONS: dict[str, Any] = {"epsilon": 1.0, "random_state": 3, "steps": 12}


@pytest.fixture(scope="module")
def table():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(N, DIM)) * [0.1, 1.0, 10.0, 100.0] + [0, 0, 50.0, 0]
    margins = X @ [5.0, -1.0, 0.1, 0.005] - 5.0
    return X, margins, (rng.random(N) < 1 / (1 + np.exp(-margins))).astype(int)


@pytest.fixture
def files(table, tmp_path):
    """The rows as files of every kind, all of which are taken to be large."""
    X, margins, y = table
    columns = {f"x{j}": X[:, j] for j in range(DIM)}
    frame = pl.DataFrame({**columns, "label": y, "size": margins})
    np.save(tmp_path / "X.npy", X)
    (tmp_path / "parts").mkdir()
    for k in range(3):
        frame[k * 1000 : (k + 1) * 1000].write_parquet(tmp_path / "parts" / f"{k}.parquet")
    (tmp_path / "parts" / "_SUCCESS").write_text("")
    frame.write_csv(tmp_path / "rows.csv", float_precision=17)
    with gzip.open(tmp_path / "rows.csv.gz", "wb") as packed:
        packed.write((tmp_path / "rows.csv").read_bytes())
    return tmp_path


@pytest.fixture(params=[2**28, 2**10], ids=["small", "large"])
def threshold(request, monkeypatch):
    monkeypatch.setattr(stored, "LEAST_BYTES", request.param)
    monkeypatch.setattr(stored, "_PART_BYTES", 2**14)


def same(one, other) -> None:
    assert np.array_equal(one.coef_, other.coef_)
    assert np.array_equal(one.intercept_, other.intercept_)
    assert np.array_equal(one.coef_noise_, other.coef_noise_)
    assert one.privacy_ == other.privacy_
    assert one.evaluation_ == other.evaluation_


@pytest.mark.parametrize("batch_size", [None, 200, 1000])
@pytest.mark.usefixtures("threshold")
def test_classifiers_are_the_same_from_everywhere(table, files, batch_size):
    X, _, y = table
    options: dict[str, Any] = {
        **OPTIONS,
        "batch_size": batch_size,
        "classes": [0, 1],
        "evaluate": True,
    }

    def fitted(X, y):
        return pg.PrivateLogisticRegression(**options).fit(X, y)

    whole = fitted(X, y)
    same(whole, fitted(np.load(files / "X.npy", mmap_mode="r"), y))
    frame = pl.read_parquet(files / "parts").drop("size")
    for k in range(3):
        frame[k * 1000 : (k + 1) * 1000].write_parquet(files / "parts" / f"{k}.parquet")
    parts = fitted(files / "parts", "label")
    same(whole, parts)
    same(whole, fitted(str(files / "parts"), "label"))
    same(whole, fitted(arrow.dataset(files / "parts", exclude_invalid_files=True), "label"))
    assert parts.feature_names_in_.tolist() == [f"x{j}" for j in range(DIM)]
    assert parts.predict(frame[:5].drop("label")).tolist() == whole.predict(X[:5]).tolist()


@pytest.mark.usefixtures("threshold")
def test_regressions_and_texts_are_the_same_from_everywhere(table, files):
    X, margins, _ = table
    whole = pg.PrivateQuantileRegressor(**OPTIONS).fit(X, margins)
    same(whole, pg.PrivateQuantileRegressor(**OPTIONS).fit(np.load(files / "X.npy", "r"), margins))
    squares = pg.PrivateRidge(epsilon=1.0, random_state=0).fit(X, margins)
    there = pg.PrivateRidge(epsilon=1.0, random_state=0)
    same(squares, there.fit(np.load(files / "X.npy", "r"), margins))
    plain, packed = (
        pg.PrivateQuantileRegressor(**OPTIONS).fit(files / name, "size")
        for name in ("rows.csv", "rows.csv.gz")
    )
    same(plain, packed)


@pytest.mark.parametrize("sampling", ["poisson", "with_replacement", "without_replacement"])
def test_minimize_is_the_same_from_everywhere(table, files, threshold, sampling):
    X, _, y = table

    def found(X, y, loss="logistic"):
        return pg.minimize(
            loss, X, y, epsilon=1.0, delta=1e-6, domain=pg.Box(-1, 1), batch_size=100, steps=30,
            sampling=sampling, random_state=0,
        )  # fmt: skip

    whole = found(X, y)
    mapped = np.load(files / "X.npy", mmap_mode="r")
    there = found(mapped, y)
    assert np.array_equal(whole.x, there.x)
    assert whole.diagnostics == there.diagnostics
    assert whole.privacy == there.privacy
    classes = np.minimum(np.abs(X[:, 1]), 2).astype(int)
    one, other = found(X, classes, "softmax"), found(mapped, classes, "softmax")
    assert np.array_equal(one.x, other.x)


def test_labels_of_mapped_rows_are_those_of_rows_in_memory(table, files, monkeypatch):
    monkeypatch.setattr(stored, "LEAST_BYTES", 1)
    X, _, y = table
    mapped = np.load(files / "X.npy", mmap_mode="r")
    model = pg.PrivateLogisticRegression(**OPTIONS).fit(mapped, 3 + 4 * y)
    assert model.classes_.tolist() == [3, 7]
    assert set(model.predict(X[:50]).tolist()) <= {3, 7}
    same(model, pg.PrivateLogisticRegression(**OPTIONS).fit(X, 3 + 4 * y))


WRONG = {
    "no target": (lambda f, X: (f / "parts", None), ValueError, "name of the target"),
    "another target": (lambda f, X: (f / "parts", "labl"), ValueError, "Did you mean 'label'"),
    "no folder": (lambda f, X: (f / "nothing", "label"), FileNotFoundError, "found nothing"),
    "texts": (lambda f, X: (texts(f), "label"), TypeError, "other columns: 'city'"),
    "a file twice": (lambda f, X: (linked(f), "label"), ValueError, "which are one file"),
    "a file and its packed copy": (lambda f, X: (packed(f), "label"), ValueError, "and without gz"),
    "folders in it": (lambda f, X: (inner(f), "label"), ValueError, "names of folders"),
    "several kinds": (lambda f, X: (mixed(f), "label"), ValueError, ".csv, .parquet"),
    "NaN": (lambda f, X: (gaps(f, X), X[:, 0]), ValueError, "column 2"),
    "no targets": (lambda f, X: (np.load(f / "X.npy", "r"), None), ValueError, "found None"),
    "labels": (lambda f, X: (np.load(f / "X.npy", "r"), ["a"] * N), TypeError, "dtype <U1"),
    "other order": (lambda f, X: (turned(f, X), X[:, 0]), ValueError, "C order"),
    "other length": (lambda f, X: (np.load(f / "X.npy", "r"), X[1:, 0]), ValueError, "one target"),
}


def texts(folder: Path) -> Path:
    pl.DataFrame({"city": ["a", "b"], "label": [0, 1]}).write_parquet(folder / "texts.parquet")
    return folder / "texts.parquet"


def inner(folder: Path) -> Path:
    (folder / "parts" / "year=2024").mkdir()
    return folder / "parts"


def linked(folder: Path) -> Path:
    first = min((folder / "parts").iterdir())
    (folder / "parts" / f"z{first.name}").symlink_to(first)
    return folder / "parts"


def packed(folder: Path) -> Path:
    """What `gunzip -k` leaves behind."""
    (parts := folder / "packed").mkdir()
    (parts / "a.csv").write_text("x0,label\n1,2\n")
    with gzip.open(parts / "a.csv.gz", "wt") as file:
        file.write("x0,label\n1,2\n")
    return parts


def mixed(folder: Path) -> Path:
    (folder / "parts" / "more.csv").write_text("x0,label\n1,2\n")
    return folder / "parts"


def gaps(folder: Path, X: np.ndarray) -> np.ndarray:
    np.save(folder / "gaps.npy", np.where(np.arange(X.size).reshape(X.shape) == 6, np.nan, X))
    return np.load(folder / "gaps.npy", "r")


def turned(folder: Path, X: np.ndarray) -> np.ndarray:
    np.save(folder / "turned.npy", np.asfortranarray(X))
    return np.load(folder / "turned.npy", "r")


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_fitted_is_refused(table, files, monkeypatch, name):
    monkeypatch.setattr(stored, "LEAST_BYTES", 1)
    given, kind, message = WRONG[name]
    with pytest.raises(kind, match=message):
        pg.PrivateHuberRegressor().fit(*given(files, table[0]))


def test_what_needs_rows_in_memory_is_refused(table, files, monkeypatch):
    monkeypatch.setattr(stored, "LEAST_BYTES", 1)
    X, y = np.load(files / "X.npy", "r"), table[2]
    groups = np.arange(N) % 100
    with pytest.raises(ValueError, match="groups="):
        pg.PrivateLogisticRegression().fit(X, y, groups=groups)
    with pytest.raises(ValueError, match="in memory"):
        pg.PrivateLogisticRegression(epsilon=float("inf")).fit(X, y)
    given: dict[str, Any] = {"epsilon": 1.0, "domain": pg.Box(-1, 1)}
    for method in ("output-perturbation", "objective-perturbation"):
        with pytest.raises(ValueError, match="minimises over all of them"):
            pg.minimize("logistic", X, y, method=method, **given)
    with pytest.raises(ValueError, match="do not leave the partitions"):
        pg.minimize("logistic", X, y, method="adaclip", step_size=0.1, **given)
    with pytest.raises(ValueError, match="may part the rows of a user"):
        pg.minimize("logistic", X, y, groups=groups, **given)
    with pytest.raises(ValueError, match="Map your classes"):
        pg.minimize("logistic", X, y + 1, **given)
    for loss, targets in (("logistic", y + 0.5), ("softmax", np.where(y, np.nan, 0.0))):
        with pytest.raises(ValueError, match="found other targets"):
            pg.minimize(loss, X, targets, **given)
    with pytest.raises(ValueError, match="Expected targets y for the logistic loss, found None"):
        pg.minimize("logistic", X, None, **given)
    for targets in (table[1], y + 0.5, np.where(y, 2**53, 2**53 + 1)):
        with pytest.raises(ValueError, match="take an estimator for regression"):
            pg.PrivateLogisticRegression().fit(X, targets)


@pytest.mark.parametrize("kind", [bool, np.int8, np.uint8, np.float16, np.float32, np.longdouble])
def test_targets_of_every_type_are_those_in_memory(table, files, monkeypatch, kind):
    monkeypatch.setattr(stored, "LEAST_BYTES", 1)
    X, there = table[0], np.load(files / "X.npy", "r")
    given: dict[str, Any] = {**OPTIONS, "steps": 3}
    labels, numbers = table[2].astype(kind), table[1].clip(0, 100).astype(kind)
    results = []
    for rows in (X, there):
        result = pg.minimize(
            "absolute", rows, numbers, epsilon=1.0, delta=1e-6, domain=pg.Box(-1, 1), steps=3,
            random_state=0,
        )  # fmt: skip
        results.append(result.x)
    assert np.array_equal(results[0], results[1])
    models = [pg.PrivateLogisticRegression(**given).fit(rows, labels) for rows in (X, there)]
    same(*models)
    assert models[0].classes_.tolist() == models[1].classes_.tolist()
    if kind is not bool:
        same(*(pg.PrivateHuberRegressor(**given).fit(rows, numbers) for rows in (X, there)))


def test_targets_that_are_not_finite_add_what_they_add_in_memory(table, files, monkeypatch):
    """One such row is no reason for an error, which would show that it is there."""
    monkeypatch.setattr(stored, "LEAST_BYTES", 1)
    X, there = table[0], np.load(files / "X.npy", "r")
    y = table[1].copy()
    y[::7], y[1::7] = np.nan, np.inf
    one, other = (
        pg.minimize("absolute", rows, y, epsilon=1.0, delta=1e-6, domain=pg.Box(-1, 1),
                    steps=3, random_state=0)
        for rows in (X, there)
    )  # fmt: skip
    assert np.array_equal(one.x, other.x)
    assert one.diagnostics == other.diagnostics


def test_huge_entries_are_summed_without_a_warning(table, files, monkeypatch):
    """A warning of an overflow would reveal that a row has them."""
    monkeypatch.setattr(stored, "LEAST_BYTES", 1)
    X = table[0].copy()
    X[:3] = [[1e308], [1e308], [-1e308]]
    np.save(files / "huge.npy", X)
    there = np.load(files / "huge.npy", "r")
    same(*(pg.PrivateHuberRegressor(**OPTIONS).fit(rows, table[1]) for rows in (X, there)))


def test_numbers_keep_the_digits_of_every_file(table, files):
    """Also if those of the first file have few."""
    X, _, y = table
    rows = X.copy()
    rows[:1000] = rows[:1000].astype(np.float32)
    frame = pl.DataFrame({**{f"x{j}": rows[:, j] for j in range(DIM)}, "label": y})
    narrow = {f"x{j}": pl.Float32 for j in range(DIM)}
    for k in range(3):
        part = frame[k * 1000 : (k + 1) * 1000]
        (part if k else part.cast(narrow)).write_parquet(files / "parts" / f"{k}.parquet")  # type: ignore[arg-type]
    options: dict[str, Any] = {**OPTIONS, "classes": [0, 1]}
    whole = pg.PrivateLogisticRegression(**options).fit(rows, y)
    same(whole, pg.PrivateLogisticRegression(**options).fit(files / "parts", "label"))
