"""The data sets of `benchmarks estimators`: a split for every seed, and what is measured."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy import sparse
from sklearn.datasets import (
    load_breast_cancer,
    load_diabetes,
    load_svmlight_file,
    load_svmlight_files,
)
from sklearn.metrics import (
    accuracy_score,
    balanced_accuracy_score,
    mean_absolute_error,
    mean_squared_error,
)

import privagrad as pg

Split = tuple[Any, np.ndarray, Any, np.ndarray]

_MEASURES: dict[str, Callable[[np.ndarray, np.ndarray], float]] = {
    "accuracy": accuracy_score,
    "balanced accuracy": balanced_accuracy_score,
    "absolute error": mean_absolute_error,
    "squared error": mean_squared_error,
}


@dataclass(frozen=True)
class Task:
    """A data set, its estimator and what is measured on test rows; labels are 0, 1, ...

    `published` are results of others: (epsilon, who, value).
    """

    name: str
    metric: str
    split: Callable[[int], Split]
    epsilons: tuple[float, ...]
    kind: type = pg.PrivateLogisticRegression
    options: dict[str, Any] = field(default_factory=dict)
    delta: Callable[[int], float] | None = None
    one_split: bool = False
    many: bool = False
    published: tuple[tuple[float, str, float], ...] = ()

    @property
    def regression(self) -> bool:
        return self.metric.endswith("error")

    def score(self, y: np.ndarray, predicted: np.ndarray) -> float:
        return float(_MEASURES[self.metric](y, predicted))

    def ranking(self, scores: dict[Any, list[float]]) -> list[Any]:
        """Settings from the best mean to the worst, of those that saw the most seeds."""
        seeds = max(map(len, scores.values()))
        full = [setting for setting, values in scores.items() if len(values) == seeds]
        return sorted(full, key=lambda s: np.mean(scores[s]), reverse=not self.regression)


def tasks(folder: Path) -> Iterator[Task]:
    """All of them; a data set whose files are not there is left out, with a line that says so."""
    below_square = lambda n: 1 / n**2  # noqa: E731
    given: list[tuple[str, Task]] = [
        ("a9a", Task("a9a", "accuracy", lambda _: _a9a(folder / "a9a"), (1, 0.1), one_split=True)),
        ("adult", Task("adult", "accuracy", lambda _: _adult(folder / "adult"), (1, 0.1),
                       one_split=True, published=((0.1, "DP-GD, published", 0.809),))),
        ("california-housing", Task("california", "absolute error",
                                    lambda seed: split(*california(folder), seed), (1, 0.1),
                                    kind=pg.PrivateQuantileRegressor)),
        ("w8a", Task("w8a", "balanced accuracy", lambda seed: split(*_w8a(folder), seed), (1, 0.1),
                     options={"class_weight": "balanced"})),
        ("mnist", Task("mnist", "accuracy", lambda _: _mnist(folder / "mnist"), (1, 0.1),
                       options={"bounds": (0, 1)}, delta=below_square, one_split=True, many=True,
                       published=((1, "DP-GD, published", 0.886),))),
        ("", Task("breast cancer", "accuracy", _breast_cancer, (0.67, 0.87), many=True,
                  published=((0.67, "GeoClip, published", 0.879),
                             (0.87, "GeoClip, published", 0.936)))),
        ("", Task("breast cancer, raw", "accuracy", lambda s: _breast_cancer(s, raw=True),
                  (0.67, 1, 2, 4), many=True)),
        ("", Task("diabetes", "squared error", _diabetes, (0.5, 0.93),
                  kind=pg.PrivateHuberRegressor, many=True,
                  published=((0.5, "GeoClip, published", 0.073),
                             (0.93, "GeoClip, published", 0.039)))),
        ("wikitext-2", Task("wiki text", "accuracy",
                            lambda seed: _wiki_split(folder / "wikitext-2", seed), (4, 1))),
        ("", Task("zipf text", "accuracy", _zipf_text, (1,))),
    ]  # fmt: skip
    for name, task in given:
        if name and not (folder / name).is_dir():
            print(f"Without {task.name}: found no folder {name} in {folder}.", flush=True)
        else:
            yield task


def split(X: Any, y: np.ndarray, seed: int) -> Split:
    order = np.random.default_rng(seed).permutation(y.size)
    train, test = np.split(order, [int(0.8 * y.size)])
    return X[train], y[train], X[test], y[test]


@cache
def _a9a(folder: Path) -> Split:
    X, y, X_test, y_test = load_svmlight_files([folder / "a9a", folder / "a9a.t"])
    return X, (y > 0).astype(int), X_test, (y_test > 0).astype(int)


@cache
def _w8a(folder: Path) -> tuple[Any, np.ndarray]:
    X, y = load_svmlight_file(folder / "w8a" / "w8a")
    return X, (y > 0).astype(int)


@cache
def _adult(folder: Path) -> Split:
    """Numbers raw; "?" is a category like any other; labels of the test file end in a dot."""
    train, test = (
        pd.read_csv(folder / name, header=None, skipinitialspace=True, keep_default_na=False)
        for name in ("adult.data", "adult-test.csv")
    )
    both, n = pd.concat([train, test]), len(train)
    y = both.pop(14).str.startswith(">").to_numpy(int)
    X = pd.get_dummies(both).to_numpy(np.float64)
    return X[:n], y[:n], X[n:], y[n:]


@cache
def california(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    table = pd.read_csv(folder / "california-housing" / "housing.csv")
    y = table.pop("median_house_value").to_numpy(np.float64)
    return pd.get_dummies(table.fillna({"total_bedrooms": 500.0})).to_numpy(np.float64), y


@cache
def _mnist(folder: Path) -> Split:
    with np.load(next(folder.glob("*.npz"))) as file:
        X, X_test = (
            file[name].reshape(-1, 784).astype(np.float32) / 255 for name in ("x_train", "x_test")
        )
        return X, file["y_train"].astype(int), X_test, file["y_test"].astype(int)


def _breast_cancer(seed: int, raw: bool = False) -> Split:
    """Columns standardised over all rows, as GeoClip has them, or raw."""
    X, y = load_breast_cancer(return_X_y=True)
    return split(X if raw else (X - X.mean(axis=0)) / X.std(axis=0), y, seed)


def _diabetes(seed: int) -> Split:
    """The target brought to [0, 1], which errors of the published size suggest."""
    X, y = load_diabetes(return_X_y=True)
    return split(X, (y - y.min()) / (y.max() - y.min()), seed)


_CULTURE = frozenset(
    ("song", "album", "songs", "film", "band", "music", "episode", "game", "novel", "actor",
     "series", "singer", "chart", "video", "award", "awards", "television")
)  # fmt: skip
_OTHERS = frozenset(
    ("ship", "army", "war", "river", "species", "battle", "division", "storm", "road", "fort",
     "navy", "railway", "hurricane", "highway", "regiment", "infantry")
)  # fmt: skip


@cache
def _wiki(folder: Path, dim: int = 8192) -> tuple[Any, np.ndarray, np.ndarray]:
    """Paragraphs as hashed sets of words: is their article more of culture than of war and nature?

    The words that decide are left out. Labels are those of articles, and so are splits.
    """
    articles: list[list[list[str]]] = [[]]
    for path in sorted([*folder.glob("*train*"), *folder.glob("*valid*")]):
        for line in path.read_text(encoding="utf-8").splitlines():
            if re.match(r"^ = [^=]+ = $", line):
                articles.append([])
            elif len(line) > 60 and not line.startswith(" ="):
                articles[-1].append(line.lower().split())
    rows: list[int] = []
    columns: list[int] = []
    labels: list[int] = []
    origins: list[int] = []
    for article, paragraphs in enumerate(articles):
        votes = [sum(w in words for p in paragraphs for w in p) for words in (_OTHERS, _CULTURE)]
        for words in paragraphs if votes[0] != votes[1] else ():
            places = sorted({_hash(w) % dim for w in words if w not in _CULTURE | _OTHERS})
            rows += [len(labels)] * len(places)
            columns += places
            labels.append(int(votes[1] > votes[0]))
            origins.append(article)
    shape = (len(labels), dim)
    X = sparse.csr_array((np.ones(len(rows)), (rows, columns)), shape=shape)
    return X, np.array(labels), np.array(origins)


@cache
def _hash(word: str) -> int:
    return int(hashlib.md5(word.encode(), usedforsecurity=False).hexdigest()[:8], 16)


def _wiki_split(folder: Path, seed: int) -> Split:
    X, y, articles = _wiki(folder)
    train = (np.random.default_rng(seed).random(articles.max() + 1) < 0.8)[articles]
    return X[train], y[train], X[~train], y[~train]


@cache
def _zipf_text(seed: int, n: int = 20_000, dim: int = 100_000, words: int = 80) -> Split:
    """Sets of words with Zipf's frequencies, whose log-odds between the classes are normal."""
    rng, tests = np.random.default_rng(1000 + seed), 5000
    frequencies, odds = 1 / (np.arange(dim) + 10.0), 0.25 * rng.standard_normal(dim)
    y = (rng.random(n + tests) < 0.5).astype(int)
    edges = [np.cumsum(frequencies * np.exp(sign * odds)) for sign in (-1, 1)]
    lengths = rng.poisson(words, n + tests) + 1
    places, labels = rng.random(lengths.sum()), np.repeat(y, lengths)
    found = [np.searchsorted(edge, places * edge[-1]) for edge in edges]
    columns = np.minimum(np.where(labels == 1, found[1], found[0]), dim - 1)
    rows = np.repeat(np.arange(n + tests), lengths)
    X = sparse.csr_array((np.ones(columns.size), (rows, columns)), shape=(n + tests, dim))
    X.sum_duplicates()
    X.data[:] = 1.0
    return X[:n], y[:n], X[n:], y[n:]
