"""Tasks for networks: generated raw columns, California housing, images of digits."""

from __future__ import annotations

import csv
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from privagrad._internal.validate import Vector
from privagrad.experiments.images.data import CLASSES, Digits, read_digits

PUBLIC_SHARE = 1 / 20
"""Of the rows that are not held out."""
_HOUSING_NUMBERS = (
    "longitude", "latitude", "housing_median_age", "total_rooms", "total_bedrooms", "population",
    "households", "median_income",
)  # fmt: skip
_HOUSING_PLACES = ("INLAND", "NEAR BAY", "NEAR OCEAN", "<1H OCEAN")
_HOUSING_VALUE, _HOUSING_PLACE = "median_house_value", "ocean_proximity"


class Part(NamedTuple):
    """Rows, and their targets as a column (absolute loss) or as classes."""

    X: Vector
    y: Any


@dataclass(frozen=True)
class Task:
    """Rows in four parts, and a network for them.

    `widths` are those of all layers of the network, inputs and outputs included. `unit` is the
    score of a mean loss of 1: targets are in public units. `own_units`: columns are in units of
    different size. `batch_size` and `steps` are defaults.
    """

    name: str
    loss: Literal["absolute", "softmax"]
    widths: tuple[int, ...]
    private: Part
    public: Part
    validation: Part
    test: Part
    unit: float = 1.0
    own_units: bool = False
    batch_size: int = 1000
    steps: int = 200

    @property
    def score(self) -> str:
        """What is measured on the test rows."""
        return "mean absolute error" if self.loss == "absolute" else "test error"

    def scales(self) -> Vector:
        """Root mean squares of the public columns; that of all of them where a column is 0."""
        squares = np.mean(self.public.X.astype(np.float64) ** 2, axis=0)
        return np.asarray(np.sqrt(np.where(squares > 0, squares, squares.mean())))

    def standardised(self) -> Task:
        """Columns centred and divided by their deviations in the public rows."""
        mean = self.public.X.mean(axis=0, dtype=np.float64)
        deviation = self.public.X.std(axis=0, dtype=np.float64)
        deviation = np.where(deviation > 0, deviation, 1.0)

        def changed(part: Part) -> Part:
            return Part(((part.X - mean) / deviation).astype(np.float32), part.y)

        return replace(
            self, private=changed(self.private), public=changed(self.public),
            validation=changed(self.validation), test=changed(self.test),
        )  # fmt: skip


@dataclass(frozen=True)
class NetworkProblem:
    """A task by name, with the folder of its data.

    `stamp` is the time of the file's last change, so that results of different versions of it are
    not mixed.
    """

    name: str
    data_dir: str | None = None
    stamp: int = 0


def _raw_columns(_: Path | None) -> Task:
    """36 columns in units from 0.01 to 1000, with heavy tails; a nonlinear target.

    A column is Student's t with 3 degrees of freedom times its unit. The target is a sum of 12
    bent functions of some columns each, in which columns matter as 1/√rank whatever their unit,
    plus Laplace noise.
    """
    rng = np.random.default_rng(0)
    n, held_out, dim, bends = 21_000, 4000, 36, 12
    units = rng.permutation(np.logspace(-2, 3, dim))
    plain = rng.standard_t(3, (n + 2 * held_out, dim))
    matters = rng.permutation(np.arange(1, dim + 1) ** -0.5)
    directions = rng.standard_normal((dim, bends)) * matters[:, None]
    inner = plain @ (directions / np.sqrt(3 * np.square(directions).sum(axis=0)))
    y = np.tanh(2 * inner) @ rng.choice([-1.0, 1.0], bends) + np.abs(inner[:, 0]) * 2
    y += rng.laplace(0, 0.1, len(y))
    return replace(_split("raw-columns", plain * units, y, held_out, (64, 32)), own_units=True)


def _decaying_columns(_: Path | None) -> Task:
    """60 columns in one unit whose scales fall as 1/rank; a nonlinear target of all of them.

    As in Section 5.1 of the paper, every column's weights are of one size, so that columns of small
    scale matter little. The target is a random network of 12 tanh units plus Laplace noise.
    """
    rng = np.random.default_rng(0)
    n, held_out, dim, bends = 21_000, 4000, 60, 12
    X = rng.standard_normal((n + 2 * held_out, dim)) / np.arange(1, dim + 1)
    directions = rng.choice([-1.0, 1.0], (dim, bends))
    y = np.tanh(X @ directions) @ rng.choice([-1.0, 1.0], bends)
    y += rng.laplace(0, 0.1, len(y))
    return _split("decaying-columns", X, y, held_out, (64, 32))


def _housing(folder: Path | None) -> Task:
    """California housing in its own units; the places as indicators; blanks are 0."""
    path = data_file("housing", folder)
    with path.open(newline="", encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    wanted = (*_HOUSING_NUMBERS, _HOUSING_PLACE, _HOUSING_VALUE)
    missing = [name for name in wanted if not lines or name not in lines[0]]
    if missing:
        raise ValueError(
            f"Expected the columns {', '.join(wanted)} in {path}, found no {missing[0]!r}."
        )
    numbers = [[float(line[name] or 0) for name in _HOUSING_NUMBERS] for line in lines]
    places = [[float(line[_HOUSING_PLACE] == place) for place in _HOUSING_PLACES] for line in lines]
    values = np.array([float(line[_HOUSING_VALUE]) for line in lines])
    X = np.concatenate([np.array(numbers), np.array(places)], axis=1)
    order = np.random.default_rng(0).permutation(len(X))
    found = _split("housing", X[order], values[order], len(X) // 10, (64, 32))
    return replace(found, own_units=True)


def _digits(folder: Path | None) -> Task:
    """MNIST: pixels from 0 to 1; the last sixth of the training rows is for tuning."""
    data = read_digits(data_file("digits", folder).parent)
    tuning = data.held_out()
    shown = max(1, round(PUBLIC_SHARE * len(tuning.images)))

    def part(images: Any, labels: Any) -> Part:
        return Part((images.reshape(len(images), -1) / np.float32(255)), labels)

    test = Digits(data.test_images, data.test_labels, data.test_images, data.test_labels)
    return Task(
        "digits", "softmax", (tuning.images[0].size, 32, CLASSES),
        private=part(tuning.images[shown:], tuning.labels[shown:]),
        public=part(tuning.images[:shown], tuning.labels[:shown]),
        validation=part(tuning.test_images, tuning.test_labels),
        test=part(test.images, test.labels), batch_size=2000, steps=100,
    )  # fmt: skip


def _split(name: str, X: Vector, y: Vector, held_out: int, hidden: tuple[int, ...]) -> Task:
    """Test rows, validation rows, public rows, private rows; the target in public units."""
    test, validation, rest = (
        slice(held_out),
        slice(held_out, 2 * held_out),
        slice(2 * held_out, None),
    )
    shown = max(1, round(PUBLIC_SHARE * len(X[rest])))
    public, private = slice(2 * held_out, 2 * held_out + shown), slice(2 * held_out + shown, None)
    middle = float(np.median(y[public]))
    unit = float(np.mean(np.abs(y[public] - middle))) or 1.0

    def part(rows: slice) -> Part:
        targets = ((y[rows] - middle) / unit).astype(np.float32)
        return Part(X[rows].astype(np.float32), targets[:, None])

    return Task(
        name, "absolute", (X.shape[1], *hidden, 1), part(private), part(public), part(validation),
        part(test), unit,
    )  # fmt: skip


_TASKS: dict[str, Callable[[Path | None], Task]] = {
    "raw-columns": _raw_columns,
    "decaying-columns": _decaying_columns,
    "housing": _housing,
    "digits": _digits,
}
NETWORKS = tuple(_TASKS)
FILES = {"housing": "housing.csv", "digits": "mnist.npz"}
"""The file of a task in its --data-dir; other tasks are generated."""


def data_file(name: str, folder: Path | None) -> Path:
    """The file of a task; refused if it is not there."""
    if folder is None:
        raise ValueError(
            f"Expected --data-dir with {FILES[name]} for {name}, found none: give the folder."
        )
    path = folder / FILES[name]
    if not path.is_file():
        raise FileNotFoundError(
            f"Expected {FILES[name]} for {name}, found nothing at {path}: give its folder as "
            "--data-dir."
        )
    return path


def find_network(name: str, data_dir: Path | None) -> NetworkProblem:
    """The problem of this name, whose data are there."""
    if name not in FILES:
        return NetworkProblem(name)
    path = data_file(name, data_dir)
    return NetworkProblem(name, str(path.parent), path.stat().st_mtime_ns)


def load_task(problem: NetworkProblem) -> Task:
    """Read or generate the rows."""
    return _TASKS[problem.name](None if problem.data_dir is None else Path(problem.data_dir))
