"""The estimators without tuning against peers that are allowed to cheat.

privagrad gets raw columns, its defaults and nothing else; its epsilon also pays for finding the
columns' scales. The others, and what is unfair to whom:

- `scikit-learn` has no privacy: the ceiling, not a peer. Columns of dense tables are standardised
  for it; its median regression is exact.
- `DP-GD` and `DP-SGD` (this library's own, same epsilon and delta) get for free what costs privacy:
  the true means, deviations or ranges of columns and target, the true median norm of a row, and
  the step size, bound and form of the columns that are best in hindsight ON THE TEST ROWS. A user
  would pay for each of these. All settings are tried on the first seed, the best few on all seeds.
- `diffprivlib` gets the true largest norm of a row or the true bounds, and the form of the columns
  and the C that are best in hindsight on the test rows; `diffprivlib C=1` is its default on
  standardised columns. Unfair to it: it promises delta = 0, more than the others do. It has no
  median regression: its least squares are judged by absolute error, clipped to the true range.
- `constant` predicts the most frequent class or the median.

- `published` results are those of the papers; their epsilon does not pay for tuning either.

Finished lines are kept in the file of --journal, and a second run goes on after them.

± holds the spread of the noise and, where a data set has no test rows of its own, of the split.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from scipy import sparse
from sklearn.linear_model import LogisticRegression, QuantileRegressor, Ridge
from sklearn.preprocessing import MaxAbsScaler, MinMaxScaler, StandardScaler

import privagrad as pg
from benchmarks import _diffprivlib, _dp_sgd
from benchmarks._rows import Row, write_csv
from benchmarks._tables import Task, tasks
from privagrad.experiments.problems import absolute_regression
from privagrad.linear import default_delta

FORMS = ("standardised", "ranged")
CS = (1.0, 0.01, 0.001, 0.0001)
KEPT = 3  # settings that see every seed
SMALL = ("breast cancer", "breast cancer, raw", "diabetes")
MANY_SEEDS = 20  # splits of small tables, which differ

Scores = dict[Any, list[float]]


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
    values = []
    for seed in seeds:
        _, y, _, y_test = task.split(seed)
        guess = np.median(y) if task.regression else np.bincount(y).argmax()
        values.append(task.score(y_test, np.full(y_test.shape, guess)))
    return Row(task.name, None, "constant", task.metric, values)


def scikit_learn(task: Task, seeds: range) -> Row:
    weight = task.options.get("class_weight")
    model: Any = LogisticRegression(
        max_iter=300 if task.name == "mnist" else 5000, class_weight=weight
    )
    if task.regression:
        model = QuantileRegressor(alpha=0, solver="highs")
        model = Ridge() if task.metric == "squared error" else model
    values = []
    for seed in seeds:
        X, y, X_test, y_test = task.split(seed)
        if not sparse.issparse(X) and task.name != "mnist":
            X, X_test = formed(X, X_test, "standardised")
        values.append(task.score(y_test, model.fit(X, y).predict(X_test)))
    return Row(task.name, None, "scikit-learn", task.metric, values)


def privagrad(task: Task, epsilon: float, seeds: range, units: bool = False) -> Row:
    """Defaults; with `units`, columns times random powers of ten from 1e-6 to 1e6."""
    values = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for seed in seeds:
            X, y, X_test, y_test = task.split(seed)
            if units:
                powers = 10.0 ** np.random.default_rng(seed).integers(-6, 7, X.shape[1])
                X, X_test = X * powers, X_test * powers
            given = {"delta": _delta(task, y.size), "random_state": seed, **task.options}
            model = task.kind(epsilon, **given).fit(X, y)
            values.append(task.score(y_test, model.predict(X_test)))
    note = "; ".join(sorted({f"warns: {warning.message}" for warning in caught})[:1])
    edge = max(values) if task.regression else min(values)
    return Row(task.name, epsilon, "privagrad", task.metric, values, f"worst {edge:.4g} {note}")


def _delta(task: Task, n: int) -> float:
    return default_delta(n) if task.delta is None else task.delta(n)


def in_other_units(task: Task, epsilon: float, seeds: range) -> Row:
    usual, other = privagrad(task, epsilon, seeds), privagrad(task, epsilon, seeds, units=True)
    changes = [b - a for a, b in zip(usual.values, other.values, strict=True)]
    return Row(f"{task.name} units", epsilon, "privagrad", "accuracy change", changes)


def hindsight(who: str, task: Task, epsilon: float, seeds: range) -> Row:
    """DP-GD or DP-SGD at the setting that is best on the test rows."""
    wide = task.name in ("mnist", "wiki text", "zipf text")
    forms = ("ranged",) if wide else FORMS
    settings: list[Any] = list(product(forms, _dp_sgd.RADII, _dp_sgd.STEP_SIZES[who]))
    if task.name == "mnist":
        settings = [s for s in settings if s[1] > 0.1 and s[2] > 3]
    scores: Scores = {setting: [] for setting in settings}
    for seed in seeds:
        if seed == 1:
            settings = task.ranking(scores)[:KEPT]
        X, y, X_test, y_test = task.split(seed)
        for form in {form for form, _, _ in settings}:
            train, test = formed(X, X_test, form)
            delta = _delta(task, y.size)
            fit = _dp_sgd.fits(who, train, y, test, epsilon, delta, task.regression, seed)
            for setting in settings:
                if setting[0] == form:
                    scores[setting].append(task.score(y_test, fit(*setting[1:])))
    form, radius, step_size = best = task.ranking(scores)[0]
    note = f"{form}, radius {radius:g}, step size {step_size:.2g}"
    return Row(task.name, epsilon, f"{who}, tuned", task.metric, scores[best], note)


def diffprivlib(task: Task, epsilon: float, seeds: range, python: str) -> Row:
    settings = list(product((epsilon,), FORMS, (1.0,) if task.regression else CS))
    scores: Scores = {setting: [] for setting in settings}
    for seed in seeds:
        X, y, X_test, y_test = task.split(seed)
        pairs = {form: formed(_dense(X), _dense(X_test), form) for form in FORMS}
        tables = {form: train for form, (train, _) in pairs.items()}
        signs = y if task.regression else np.where(y > 0, 1.0, -1.0)
        models = _diffprivlib.ask(python, settings, tables, signs, seed)
        for setting, (intercept, *coef) in zip(settings, models, strict=True):
            margins = pairs[setting[1]][1] @ np.array(coef) + intercept
            clipped = np.clip(margins, y.min(), y.max())
            predicted = clipped if task.regression else (margins > 0).astype(int)
            scores[setting].append(task.score(y_test, predicted))
    best = task.ranking(scores)[0]
    note = "least squares" if task.regression else f"C={best[2]:g}"
    return Row(task.name, epsilon, "diffprivlib, tuned", task.metric, scores[best], note)


def section_5_1(epsilon: float, goal: float) -> Row:
    """Training losses of the paper's problem; a seed is that of the rows and of the noise."""
    losses = []
    for seed in range(20):
        X, y, _ = absolute_regression(n=5000, dim=100, seed=seed)
        model = pg.PrivateQuantileRegressor(epsilon, delta=1e-5, random_state=seed).fit(X, y)
        losses.append(float(np.abs(y - model.predict(X)).mean()))
    note = f"median {statistics.median(losses):.5f}, goal {goal}"
    return Row("section 5.1", epsilon, "privagrad", "training loss", losses, note)


def speed(name: str, rows: Callable[[], Any]) -> Row:
    """Seconds of a fit with all processors, after a first one that may compile."""
    X = rows()
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


def dense_rows() -> np.ndarray:
    return np.random.default_rng(0).standard_normal((500_000, 54))


def wide_rows(n: int = 20_000, dim: int = 100_000, entries: int = 80) -> sparse.csr_array:
    columns = np.sort(np.random.default_rng(0).integers(dim, size=(n, entries)), axis=1).ravel()
    starts = np.arange(n + 1) * entries
    return sparse.csr_array((np.ones(columns.size), columns, starts), shape=(n, dim))


Line = tuple[str, Callable[[], Row]]
"""What identifies a line of the table, and how it is made."""


def lines(folder: Path, seeds: range, python: str | None) -> Iterator[Line]:
    for task in tasks(folder):
        runs = range(MANY_SEEDS) if task.many and task.name in SMALL else seeds
        different = runs[:1] if task.one_split else runs
        name = task.name
        yield f"{name}/constant", partial(constant, task, different)
        yield f"{name}/scikit-learn", partial(scikit_learn, task, different)
        for epsilon in task.epsilons:
            key = f"{name}/{epsilon:g}"
            for at, who, value in task.published:
                if at == epsilon:
                    yield f"{key}/{who}", partial(Row, name, epsilon, who, task.metric, [value])
            yield f"{key}/privagrad", partial(privagrad, task, epsilon, runs)
            if name == "adult":
                yield f"{key}/units", partial(in_other_units, task, epsilon, runs)
            for who in ("DP-GD", "DP-SGD"):
                if task.metric != "squared error" and (who == "DP-GD" or name != "mnist"):
                    yield f"{key}/{who}", partial(hindsight, who, task, epsilon, seeds)
            if python is not None and not (task.many or "text" in name):
                yield f"{key}/diffprivlib", partial(diffprivlib, task, epsilon, runs, python)
    yield "section 5.1/1/privagrad", partial(section_5_1, 1.0, goal=0.0112)
    yield "section 5.1/4/privagrad", partial(section_5_1, 4.0, goal=0.0101)
    yield "speed/dense", partial(speed, "dense", dense_rows)
    yield "speed/CSR", partial(speed, "CSR", wide_rows)


def run(arguments: list[str]) -> dict[str, object]:
    parser = argparse.ArgumentParser("python -m benchmarks estimators")
    option = parser.add_argument
    option("--data-dir", type=Path, required=True,
           help="has a9a, adult, california-housing, w8a, mnist, wikitext-2; what is missing is "
           "left out")  # fmt: skip
    option("--seeds", type=int, default=5)
    option("--only", default="", help="lines whose names contain this, such as privagrad or mnist")
    option("--journal", type=Path, help="keeps finished lines; a second run goes on after them")
    option("--diffprivlib-python", metavar="PATH", help="an interpreter with diffprivlib >= 0.6.6")
    option("--out", type=Path, metavar="CSV", help="write the table there too")
    given = parser.parse_args(arguments)
    if given.diffprivlib_python is None:
        print("Without diffprivlib: give --diffprivlib-python an interpreter that has it.")
    kept: dict[str, dict[str, Any]] = {}
    if given.journal and given.journal.exists():
        for text in given.journal.read_text(encoding="utf-8").splitlines():
            kept.update(json.loads(text))
    rows = []
    for name, make in lines(given.data_dir, range(given.seeds), given.diffprivlib_python):
        if given.only not in name:
            continue
        row = Row(**kept[name]) if name in kept else make()
        print(row, flush=True)
        rows.append(row)
        if given.journal and name not in kept:
            with given.journal.open("a", encoding="utf-8") as file:
                print(json.dumps({name: vars(row)}), file=file)
    if given.out:
        write_csv(rows, given.out)
    return {"rows": [row.record() for row in rows]}
