"""Gradients bounded to an ellipsoid whose axes the fit learns, against a ball in comparable units.

Every fit gets raw columns and no tuning; its epsilon pays for all that it learns of them. Errors
are those on a fifth of the rows, which no fit sees.

- `ball` is the recipe without the covariance, and without its cost.
- `recipe` is what estimators do: with the covariance where the public rule has it.
- `true` has the true covariance of the training rows instead, which is NOT private, and pays for
  it all the same: the ceiling.

`difference` is that of `recipe` to `ball`, by seed. The numbers of the rule were found on seeds
below 200, on the same problems.
"""

from __future__ import annotations

import argparse
import json
import statistics
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from scipy.special import expit

import privagrad as pg
from benchmarks._tables import Split, california, split, tasks
from privagrad._internal.validate import Integers
from privagrad.glm.examples import Examples
from privagrad.linear import recipe, whitening
from privagrad.privacy.releases import Releases
from privagrad.queries.second_moments import SecondMoments

SEEDS, FIRST_SEED = 5, 200
EPSILONS = (0.1, 1.0, 3.0)
SHAPES = ("ball", "recipe", "true")


@dataclass(frozen=True)
class Table:
    """A problem: a split for every seed, the estimator, and whether accuracy is measured."""

    name: str
    made: Callable[[int], Split]
    kind: type
    classes: bool
    epsilons: tuple[float, ...] = EPSILONS

    def score(self, given: Split, epsilon: float, shape: str, seed: int) -> float:
        """Accuracy, or the mean absolute error."""
        X, y, X_test, y_test = given
        with warnings.catch_warnings(), shaped(shape):
            warnings.simplefilter("ignore")
            predicted = self.kind(epsilon, random_state=seed).fit(X, y).predict(X_test)
        if self.classes:
            return float(np.mean(predicted == y_test))
        return float(np.abs(predicted - y_test).mean())


def shaped(shape: str) -> ExitStack:
    """Fits within use this shape."""
    stack = ExitStack()
    if shape == "ball":
        stack.enter_context(patch.object(recipe, "shaped", lambda *_: False))
    elif shape == "true":
        stack.enter_context(patch.object(whitening, "private_covariance", true_covariance))
    return stack


def true_covariance(
    examples: Examples, columns: Integers, radius: float, releases: Releases
) -> SecondMoments:
    """What `private_covariance` would give without noise and bounds. NOT private."""
    releases.take("covariance")
    rows: Any = examples.rows.matrix[:, columns]
    return SecondMoments(rows.T @ rows / len(rows), 0.0)


def generated(
    seed: int, covariance: np.ndarray, weights: str, classes: bool, n: int = 25_000,
    heavy: bool = False,
) -> Split:  # fmt: skip
    """Columns of this covariance in random units, off centre; margins of deviation 2.

    Weights are independent in the columns' own units ("columns"), or along the directions of their
    covariance in units in which all have the same variance ("directions").
    """
    rng = np.random.default_rng([seed, 8])
    dim = len(covariance)
    values, vectors = np.linalg.eigh(covariance)
    drawn = rng.standard_t(3, (n, dim)) if heavy else rng.standard_normal((n, dim))
    X = drawn * np.sqrt(values) @ vectors.T
    w = rng.standard_normal(dim)
    if weights == "directions":
        w = vectors @ (w / np.sqrt(values))
    margins = X @ w
    margins *= 2 / margins.std()
    X = X * np.exp(rng.standard_normal(dim)) + rng.standard_normal(dim)
    if classes:
        return split(X, (rng.random(n) < expit(margins)).astype(int), seed)
    return split(X, margins + rng.standard_normal(n), seed)


def neighbouring(dim: int) -> np.ndarray:
    """Correlations 0.95^|i - j|."""
    return np.asarray(0.95 ** np.abs(np.subtract.outer(np.arange(dim), np.arange(dim))))


def factors(dim: int) -> np.ndarray:
    """Five factors that all columns have in common, and a tenth of their variance beside them."""
    loadings = np.random.default_rng(9).standard_normal((dim, 5))
    covariance = loadings @ loadings.T + 0.5 * np.eye(dim)
    size = np.sqrt(np.diag(covariance))
    return np.asarray(covariance / np.outer(size, size))


def with_products(X: np.ndarray) -> np.ndarray:
    """California's number columns, scaled by rough public constants, and their products."""
    numbers = X[:, :8].copy()
    numbers[:, 3:] = np.log(np.maximum(numbers[:, 3:], 0.1))
    centre = np.array([-119.5, 35.5, 28.0, 7.6, 6.1, 7.0, 6.0, 1.2])
    numbers = (numbers - centre) / np.array([2.0, 2.0, 12.0, 0.75, 0.75, 0.75, 0.75, 0.5])
    one, other = np.triu_indices(8)
    return np.hstack([numbers, numbers[:, one] * numbers[:, other], X[:, 8:]])


def problems(folder: Path | None) -> Iterator[Table]:
    """All of them; those of files only where these are there."""
    kinds = {True: pg.PrivateLogisticRegression, False: pg.PrivateQuantileRegressor}
    for classes, kind in kinds.items():
        what = "logistic" if classes else "absolute"

        def made(
            covariance: np.ndarray, weights: str = "columns", heavy: bool = False,
            classes: bool = classes,
        ) -> Callable[[int], Split]:  # fmt: skip
            return lambda seed: generated(seed, covariance, weights, classes, heavy=heavy)

        for name, given in {
            "neighbours 0.95, 20,000 x 20": made(neighbouring(20)),
            "the same, signal in all directions": made(neighbouring(20), "directions"),
            "40 columns, signal in all directions": made(neighbouring(40), "directions"),
            "five factors, 20,000 x 20": made(factors(20)),
            "heavy tails (t, 3 degrees), 20,000 x 40": made(neighbouring(40), heavy=True),
            "independent, 20,000 x 20": made(np.eye(20)),
            "independent, 20,000 x 40": made(np.eye(40)),
        }.items():
            yield Table(f"{name}: {what}", given, kind, classes)
    if folder is None or not (folder / "california-housing").is_dir():
        print("Without California: give --data-dir DIR, a folder with california-housing.")
        return
    X, y = california(folder)
    above, products = (y > np.median(y)).astype(int), with_products(X)
    for name, table in (("California", X), ("California, products", products)):
        for classes, kind in kinds.items():
            target = above if classes else y
            what = "above the median" if classes else "absolute error"

            def of(seed: int, table: np.ndarray = table, target: np.ndarray = target) -> Split:
                return split(table, target, seed)

            yield Table(f"{name}, {what}", of, kind, classes)
    for task in tasks(folder):
        if task.name == "adult":
            yield Table("Adult", task.split, task.kind, True, (0.3, 1.0, 3.0))


def run(arguments: list[str]) -> dict[str, object]:
    parser = argparse.ArgumentParser("python -m benchmarks shape")
    parser.add_argument("--data-dir", type=Path, help="a folder with california-housing, adult")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--only", default="", help="problems whose names have this in them")
    options = parser.parse_args(arguments)
    rows = []
    for table in problems(options.data_dir):
        if options.only not in table.name:
            continue
        splits = [table.made(FIRST_SEED + seed) for seed in range(options.seeds)]
        for epsilon in table.epsilons:
            scores = {
                shape: [table.score(s, epsilon, shape, k) for k, s in enumerate(splits)]
                for shape in SHAPES
            }
            pairs = zip(scores["recipe"], scores["ball"], strict=True)
            row = {"table": table.name, "epsilon": epsilon}
            figures = {**scores, "difference": [one - other for one, other in pairs]}
            for name, found in figures.items():
                row[name] = [round(statistics.fmean(found), 5), round(statistics.stdev(found), 5)]
            print(json.dumps(row), flush=True)
            rows.append(row)
    return {"seeds": options.seeds, "rows": rows}
