"""The estimators without tuning against peers that are allowed to cheat.

privagrad gets raw columns, its defaults and nothing else; its epsilon also pays for finding the
columns' scales. The others, and what is unfair to whom:

- `scikit-learn` has no privacy: the ceiling, not a peer. Columns of dense tables are standardised
  for it; its median regression is exact.
- `DP-SGD` (this library's own, same epsilon and delta) gets for free what costs privacy: the true
  means, deviations or ranges of columns and target, the true median norm of a row, and the step
  size, bound and form of the columns that are best in hindsight ON THE TEST ROWS. A user would pay
  for each of these. All settings are tried on the first seeds, the best few on all seeds.
- `diffprivlib` gets the true largest norm of a row or the true bounds, and the form of the columns
  and the C that are best in hindsight on the test rows; `diffprivlib C=1` is its default on
  standardised columns. Unfair to it: it promises delta = 0, more than the others do. It has no
  median regression: its least squares are judged by absolute error, clipped to the true range.
- `constant` predicts the most frequent class or the median.

± holds the spread of the noise and, where a data set has no test rows of its own, of the split.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy import sparse
from sklearn.datasets import load_svmlight_file, load_svmlight_files
from sklearn.linear_model import LogisticRegression, QuantileRegressor
from sklearn.metrics import accuracy_score, balanced_accuracy_score, mean_absolute_error
from sklearn.preprocessing import MaxAbsScaler, MinMaxScaler, StandardScaler

import privagrad as pg
from benchmarks import _diffprivlib, _dp_sgd
from benchmarks._rows import Row, write_csv
from privagrad.experiments.problems import absolute_regression

FORMS = ("standardised", "ranged")
CS = (1.0, 0.01, 0.001, 0.0001)
SCREENED, KEPT = 3, 6  # seeds that see every setting, settings that see every seed

Split = tuple[Any, np.ndarray, Any, np.ndarray]
Scores = dict[Any, list[float]]


@dataclass(frozen=True)
class Task:
    """A data set: the split of a seed (labels are -1 and 1), and what is measured on test rows."""

    name: str
    metric: str
    split: Callable[[int], Split]
    one_split: bool = False

    @property
    def regression(self) -> bool:
        return self.metric == "absolute error"

    def score(self, y: np.ndarray, margins: np.ndarray) -> float:
        if self.regression:
            return float(mean_absolute_error(y, margins))
        measure = accuracy_score if self.metric == "accuracy" else balanced_accuracy_score
        return float(measure(y, np.where(margins > 0, 1, -1)))

    def ranking(self, scores: Scores) -> list[Any]:
        """Settings from the best mean to the worst, of those that saw the most seeds."""
        seeds = max(map(len, scores.values()))
        full = [setting for setting, values in scores.items() if len(values) == seeds]
        return sorted(full, key=lambda s: np.mean(scores[s]), reverse=not self.regression)

    def row(self, epsilon: float | None, who: str, values: list[float], note: str = "") -> Row:
        return Row(self.name, epsilon, who, self.metric, values, note)


def tasks(folder: Path) -> list[Task]:
    return [
        Task("a9a", "accuracy", lambda _: _a9a(folder / "a9a"), one_split=True),
        Task("adult", "accuracy", lambda _: _adult(folder / "adult"), one_split=True),
        Task("california", "absolute error", lambda seed: _split(*_california(folder), seed)),
        Task("w8a", "balanced accuracy", lambda seed: _split(*_w8a(folder), seed)),
    ]


def _split(X: Any, y: np.ndarray, seed: int) -> Split:
    order = np.random.default_rng(seed).permutation(y.size)
    train, test = np.split(order, [int(0.8 * y.size)])
    return X[train], y[train], X[test], y[test]


@cache
def _a9a(folder: Path) -> Split:
    X, y, X_test, y_test = load_svmlight_files([folder / "a9a", folder / "a9a.t"])
    return X, y, X_test, y_test


@cache
def _w8a(folder: Path) -> tuple[Any, np.ndarray]:
    X, y = load_svmlight_file(folder / "w8a" / "w8a")
    return X, y


@cache
def _adult(folder: Path) -> Split:
    """Numbers raw; "?" is a category like any other; labels of the test file end in a dot."""
    train, test = (
        pd.read_csv(folder / name, header=None, skipinitialspace=True, keep_default_na=False)
        for name in ("adult.data", "adult-test.csv")
    )
    both, n = pd.concat([train, test]), len(train)
    y = np.where(both.pop(14).str.startswith(">"), 1.0, -1.0)
    X = pd.get_dummies(both).to_numpy(np.float64)
    return X[:n], y[:n], X[n:], y[n:]


@cache
def _california(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    table = pd.read_csv(folder / "california-housing" / "housing.csv")
    y = table.pop("median_house_value").to_numpy(np.float64)
    return pd.get_dummies(table.fillna({"total_bedrooms": 500.0})).to_numpy(np.float64), y


def formed(X: Any, X_test: Any, form: str) -> tuple[Any, Any]:
    """Both tables with columns brought to one scale by true facts of the training rows."""
    if form == "standardised":
        X, X_test = _dense(X), _dense(X_test)
        scaler = StandardScaler()
    else:
        scaler = MaxAbsScaler() if sparse.issparse(X) else MinMaxScaler()
    return scaler.fit_transform(X), scaler.transform(X_test)


def _dense(X: Any) -> np.ndarray:
    return np.asarray(X.toarray() if hasattr(X, "toarray") else X)


def constant(task: Task, seeds: range) -> Row:
    splits = [task.split(seed) for seed in seeds]
    values = [task.score(y_test, np.full(y_test.shape, np.median(y))) for _, y, _, y_test in splits]
    return task.row(None, "constant", values)


def scikit_learn(task: Task, seeds: range, C: float = 1.0) -> Row:
    model = LogisticRegression(C=C, max_iter=5000)
    if task.regression:
        model = QuantileRegressor(alpha=0, solver="highs")
    values = []
    for seed in seeds:
        X, y, X_test, y_test = task.split(seed)
        if not sparse.issparse(X):
            X, X_test = formed(X, X_test, "standardised")
        values.append(task.score(y_test, model.fit(X, y).predict(X_test)))
    return task.row(None, "scikit-learn" if C == 1 else f"scikit-learn C={C:g}", values)


def privagrad(task: Task, epsilon: float, seeds: range, units: bool = False) -> Row:
    """Defaults; with `units`, columns times random powers of ten from 1e-6 to 1e6."""
    kind = pg.PrivateQuantileRegressor if task.regression else pg.PrivateLogisticRegression
    values = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for seed in seeds:
            X, y, X_test, y_test = task.split(seed)
            if units:
                powers = 10.0 ** np.random.default_rng(seed).integers(-6, 7, X.shape[1])
                X, X_test = X * powers, X_test * powers
            model = kind(epsilon, random_state=seed).fit(X, y)
            values.append(task.score(y_test, model.predict(X_test)))
    note = "; ".join(sorted({f"warns: {warning.message}" for warning in caught}))
    return task.row(epsilon, "privagrad", values, note)


def in_other_units(task: Task, usual: Row, seeds: range) -> Row:
    assert usual.epsilon is not None
    other = privagrad(task, usual.epsilon, seeds, units=True)
    changes = [b - a for a, b in zip(usual.values, other.values, strict=True)]
    return Row(f"{task.name} units", usual.epsilon, "privagrad", "accuracy change", changes)


def dp_sgd(task: Task, epsilon: float, seeds: range) -> Row:
    settings: list[Any] = list(product(FORMS, _dp_sgd.RADII, _dp_sgd.STEP_SIZES))
    scores: Scores = {setting: [] for setting in settings}
    for seed in seeds:
        if seed == SCREENED:
            settings = task.ranking(scores)[:KEPT]
        X, y, X_test, y_test = task.split(seed)
        for form in {form for form, _, _ in settings}:
            train, test = formed(X, X_test, form)
            margins = _dp_sgd.fits(train, y, test, epsilon, task.regression, seed)
            for setting in settings:
                if setting[0] == form:
                    scores[setting].append(task.score(y_test, margins(*setting[1:])))
    form, radius, step_size = best = task.ranking(scores)[0]
    note = f"{form}, radius {radius:g}, step size {step_size:.2g}"
    return task.row(epsilon, "DP-SGD", scores[best], note)


def diffprivlib(task: Task, epsilons: list[float], seeds: range, python: str) -> Iterator[Row]:
    settings = list(product(epsilons, FORMS, (1.0,) if task.regression else CS))
    scores: Scores = {setting: [] for setting in settings}
    for seed in seeds:
        X, y, X_test, y_test = task.split(seed)
        pairs = {form: formed(_dense(X), _dense(X_test), form) for form in FORMS}
        tables = {form: train for form, (train, _) in pairs.items()}
        models = _diffprivlib.ask(python, settings, tables, y, seed)
        for setting, (intercept, *coef) in zip(settings, models, strict=True):
            margins = pairs[setting[1]][1] @ np.array(coef) + intercept
            margins = np.clip(margins, y.min(), y.max()) if task.regression else margins
            scores[setting].append(task.score(y_test, margins))
    for epsilon in epsilons:
        best = task.ranking({s: values for s, values in scores.items() if s[0] == epsilon})[0]
        note = "least squares" if task.regression else f"C={best[2]:g}"
        yield task.row(epsilon, "diffprivlib", scores[best], f"{best[1]}, {note}")
        if not task.regression:
            usual = scores[epsilon, "standardised", 1.0]
            yield task.row(epsilon, "diffprivlib C=1", usual, "standardised")


def section_5_1(epsilon: float, goal: float) -> Row:
    """Training losses of the paper's problem; a seed is that of the rows and of the noise."""
    losses = []
    for seed in range(20):
        X, y, _ = absolute_regression(n=5000, dim=100, seed=seed)
        model = pg.PrivateQuantileRegressor(epsilon, delta=1e-5, random_state=seed).fit(X, y)
        losses.append(float(mean_absolute_error(y, model.predict(X))))
    note = f"median {statistics.median(losses):.5f}, goal {goal}"
    return Row("section 5.1", epsilon, "privagrad", "training loss", losses, note)


def speed(name: str, X: Any) -> Row:
    """Seconds of a fit with all processors, after a first one that may compile."""
    rng = np.random.default_rng(1)
    y = np.where(X @ rng.standard_normal(X.shape[1]) + rng.logistic(size=X.shape[0]) > 0, 1, -1)
    seconds = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nothing is learned of random labels in wide rows
        for _ in range(4):
            start = time.perf_counter()
            pg.PrivateLogisticRegression(1.0).fit(X, y)
            seconds.append(time.perf_counter() - start)
    shape = f"{X.shape[0]:,} × {X.shape[1]:,}"
    return Row(f"{name} rows", 1.0, "privagrad", "seconds of a fit", seconds[1:], shape)


def wide_rows(n: int = 20_000, dim: int = 100_000, entries: int = 80) -> sparse.csr_array:
    columns = np.sort(np.random.default_rng(0).integers(dim, size=(n, entries)), axis=1).ravel()
    starts = np.arange(n + 1) * entries
    return sparse.csr_array((np.ones(columns.size), columns, starts), shape=(n, dim))


def all_rows(
    folder: Path, seeds: range, epsilons: list[float], python: str | None
) -> Iterator[Row]:
    for task in tasks(folder):
        different = seeds[:1] if task.one_split else seeds
        yield constant(task, different)
        yield scikit_learn(task, different)
        if task.name == "w8a":
            yield scikit_learn(task, different, C=100.0)
        for epsilon in epsilons:
            yield (usual := privagrad(task, epsilon, seeds))
            if task.name == "adult":
                yield in_other_units(task, usual, seeds)
            yield dp_sgd(task, epsilon, seeds)
        if python is not None:
            try:
                yield from diffprivlib(task, epsilons, seeds, python)
            except (OSError, RuntimeError) as error:
                print(f"Without diffprivlib on {task.name}: {error}", flush=True)
    yield from (section_5_1(1.0, goal=0.0125), section_5_1(4.0, goal=0.0104))
    yield speed("dense", np.random.default_rng(0).standard_normal((500_000, 54)))
    yield speed("CSR", wide_rows())


def run(arguments: list[str]) -> dict[str, object]:
    parser = argparse.ArgumentParser("python -m benchmarks estimators")
    option = parser.add_argument
    option("--data-dir", type=Path, required=True, help="has a9a, adult, california-housing, w8a")
    option("--seeds", type=int, default=10)
    option("--epsilons", type=lambda text: [float(e) for e in text.split(",")], default="1,0.1")
    option("--diffprivlib-python", metavar="PATH", help="an interpreter with diffprivlib >= 0.6.6")
    option("--out", type=Path, metavar="CSV", help="write the table there too")
    given = parser.parse_args(arguments)
    if given.diffprivlib_python is None:
        print("Without diffprivlib: give --diffprivlib-python an interpreter that has it.")
    rows = []
    for row in all_rows(
        given.data_dir, range(given.seeds), given.epsilons, given.diffprivlib_python
    ):
        print(row, flush=True)
        rows.append(row)
    if given.out:
        write_csv(rows, given.out)
    return {"rows": [row.record() for row in rows]}
