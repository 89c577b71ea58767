"""Problems to compare methods on: synthetic ones, and files."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from privagrad import Box, Loss, WholeSpace
from privagrad._internal.validate import Vector, choice
from privagrad.data.readers import read_table
from privagrad.geometry.domains import Domain
from privagrad.glm.gradients import GlmGradients
from privagrad.glm.rows import as_rows


class Regression(NamedTuple):
    """Rows, targets, and the scales of the columns."""

    X: Vector
    y: Vector
    sigma: Vector


@dataclass(frozen=True)
class Problem:
    """Private rows, public rows with their targets, and public scales of the columns.

    `step_unit` is a factor of the common step sizes: the size of a solution's coordinates.
    """

    name: str
    loss: str
    X: Any
    y: Vector
    sigma: Vector
    public: tuple[Any, Vector]
    domain: Domain
    step_unit: float = 1.0

    @cached_property
    def _gradients(self) -> GlmGradients:
        return GlmGradients(Loss(self.loss), as_rows(self.X), self.y)

    def objective(self, x: Vector) -> float:
        """The mean loss over the private rows. Not private."""
        return self._gradients.value(x)

    def optimum(self) -> float:
        """The least mean loss, found without privacy by L-BFGS-B from 0 in the coordinates σ x.

        The absolute loss is replaced by Huber losses whose bend goes to 0. The other losses use
        their own (sub)gradients.
        """
        from scipy.optimize import minimize as solve

        losses = [Loss(self.loss)]
        if self.loss == "absolute":
            losses = [Loss("huber", bend) for bend in (1e-1, 1e-2, 1e-3, 1e-4, 1e-5)]
        box = self.domain if isinstance(self.domain, Box) else Box(-np.inf, np.inf)
        bounds: Any = np.stack([box.low * self.sigma, box.high * self.sigma], axis=1)
        options: Any = {"maxiter": 1000, "ftol": 1e-11, "gtol": 1e-9}
        point = np.zeros_like(self.sigma)
        for loss in losses:
            smooth = GlmGradients(loss, self._gradients.rows, self.y)
            unit = 1.0 if loss.parameter is None else loss.parameter

            def scaled(v: Vector, smooth: GlmGradients = smooth, unit: float = unit) -> Any:
                value, gradient = smooth.value_and_gradient(v / self.sigma)
                return value / unit, gradient / self.sigma / unit

            point = solve(
                scaled, point, jac=True, method="L-BFGS-B", bounds=bounds, options=options
            ).x
        return self.objective(point / self.sigma)

    def public_gradients(self) -> Vector:
        """The gradients of the public examples at 0, one a row."""
        rows = as_rows(self.public[0])
        gradients = GlmGradients(Loss(self.loss), rows, self.public[1])
        return gradients.per_example(np.zeros(rows.shape[1]), np.arange(rows.shape[0]))


def absolute_regression(
    n: int = 5000, dim: int = 100, tau: float = 0.01, decay: float = 1.5, seed: int = 0
) -> Regression:
    """Section 5.1: a ~ N(0, diag(σ)²) with σ_j = j^-decay, y = ⟨a, x*⟩ + Laplace(tau).

    x* is uniform on {-1, 1}^dim, and every seed is one data set.
    """
    rng = np.random.default_rng(seed)
    sigma: Vector = np.arange(1, dim + 1, dtype=np.float64) ** -decay
    X = rng.standard_normal((n, dim)) * sigma
    best = rng.choice([-1.0, 1.0], dim)
    return Regression(X, X @ best + rng.laplace(0, tau, n), sigma)


def _paper() -> Problem:
    X, y, sigma = absolute_regression(n=5500)
    public = (X[5000:], y[5000:])
    return Problem("absolute-regression", "absolute", X[:5000], y[:5000], sigma, public, Box(-1, 1))


def _text() -> Problem:
    """A bag of words: sparse binary columns with Zipf frequencies, and a logistic label."""
    rng = np.random.default_rng(0)
    n, dim = 5500, 300
    rate = 0.5 / np.arange(1, dim + 1) ** 0.9
    X = (rng.uniform(size=(n, dim)) < rate).astype(np.float64)
    weights = rng.standard_normal(dim) * 1.5
    chance = 1 / (1 + np.exp(-(X @ weights - (rate * weights).sum())))
    y = np.where(rng.uniform(size=n) < chance, 1.0, -1.0)
    public = (X[5000:], y[5000:])
    return Problem(
        "sparse-text", "logistic", X[:5000], y[:5000], np.sqrt(rate), public, WholeSpace()
    )


BUILT_IN = {"absolute-regression": _paper, "sparse-text": _text}


@dataclass(frozen=True)
class FileProblem:
    """A file; a random share of its rows counts as public, and `box` bounds every coefficient.

    A LIBSVM file has no `target`. `stamp` is the time of the last change, so that results of
    different versions of the file are not mixed.
    """

    path: str
    target: str | None
    loss: str
    public_share: float
    box: float | None
    stamp: int


def load_problem(name: str | FileProblem) -> Problem:
    """A built-in problem by name, or one from a file.

    The public rows of a file give the scales: the root mean squares of the columns, with one
    additional row of the average scale, so that none is 0.
    """
    if isinstance(name, str):
        return BUILT_IN[choice("problem", name, BUILT_IN)]()
    X, y, *_ = read_table(Path(name.path), name.target)
    y = Loss(name.loss).targets(y, X.shape[0])
    order = np.random.default_rng(0).permutation(X.shape[0])
    cut = max(1, round(name.public_share * X.shape[0]))
    if cut >= X.shape[0]:
        raise ValueError(f"Expected private rows beside the public ones, found {X.shape[0]} rows.")
    shown, kept = order[:cut], order[cut:]
    squares = np.asarray((X[shown] ** 2).sum(axis=0)).ravel()
    sigma = np.sqrt((squares + squares.mean() / cut) / (cut + 1))
    domain: Domain = WholeSpace() if name.box is None else Box(-name.box, name.box)
    unit = 1.0 / float(np.sqrt(np.square(sigma).sum()))
    public = (X[shown], y[shown])
    return Problem(
        Path(name.path).name, name.loss, X[kept], y[kept], sigma, public, domain, step_unit=unit
    )
