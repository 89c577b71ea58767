"""Rows, partitions of them in this process, and what cluster tests share."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import random_array

from privagrad.glm.examples import Examples, PartitionedExamples
from privagrad.glm.losses import Loss
from privagrad.glm.rows import as_rows
from privagrad.linear import Choices, LinearModel, Problem, plan_fit, run_fit
from privagrad.linear.least_squares import Solver
from privagrad.privacy.noise import random_source


def table(n: int = 900, dim: int = 6, *, sparse: bool = False, seed: int = 0) -> Examples:
    rng = np.random.default_rng(seed)
    X: Any = rng.standard_normal((n, dim))
    if sparse:
        X = random_array((n, dim), density=0.3, rng=rng, format="csr")
    signs = np.where(rng.random(n) < 1 / (1 + np.exp(-3 * np.asarray(X @ np.ones(dim)))), 1.0, -1.0)
    return Examples(as_rows(X), signs)


def cut(examples: Examples, edges: Sequence[int]) -> list[Examples]:
    """The rows between the edges, some of which may be the same."""
    ends = [0, *sorted(edges), examples.shape[0]]
    return [
        Examples(examples.rows.part(first, stop), examples.targets[first:stop])
        for first, stop in pairwise(ends)
    ]


@dataclass(frozen=True)
class Load:
    """A function that a worker calls to load a partition."""

    first: int
    stop: int
    sparse: bool = False

    def __call__(self) -> Examples:
        [_, part, _] = cut(table(sparse=self.sparse), [self.first, self.stop])
        return part


def loaders(*edges: int, sparse: bool = False) -> list[Load]:
    ends = [0, *edges, 900]
    return [Load(first, stop, sparse) for first, stop in pairwise(ends)]


def fitted(
    examples: Examples | PartitionedExamples, loss: str = "logistic", *, seed: int = 1,
    steps: int | None = 20,
) -> LinearModel:  # fmt: skip
    """A whole private fit of a linear model, with everything that it asks of rows."""
    squares: Solver | None = "moments" if loss == "squares" else None
    problem = Problem(Loss("huber" if squares else loss), examples, squares=squares)
    choices = Choices() if squares else Choices(steps=steps)
    plan = plan_fit(problem.facts, 2.0, 1e-5, choices, evaluated=True)
    return run_fit(problem, plan, plan.releases(random_source(seed)))


def same(one: LinearModel, other: LinearModel) -> bool:
    """Whether two models are the same to the last bit, and cost the same."""
    arrays: list[tuple[NDArray[Any], NDArray[Any]]] = [
        (one.coef, other.coef),
        (one.intercept, other.intercept),
        (one.trace.columns.unit, other.trace.columns.unit),
    ]
    return one.privacy == other.privacy and all(np.array_equal(a, b) for a, b in arrays)
