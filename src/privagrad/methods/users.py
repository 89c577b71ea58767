"""Gradients of users: the averages of the gradients of their rows."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

import numpy as np

from privagrad._internal import validate
from privagrad._internal.validate import Vector
from privagrad.geometry.ellipsoid import Projection
from privagrad.methods._base import Gradients, Method
from privagrad.privacy.bounded import BoundedSum
from privagrad.privacy.noise import RandomSource
from privagrad.privacy.sampling import Rows, Samples
from privagrad.privacy.users import UserRows, Users


@dataclass(frozen=True, eq=False)
class UserGradients:
    """Gradients of the mean over users of the mean over each user's rows: examples are users.

    Guarantees
    ----------
    What a user adds to a sum depends on x and on the user's rows alone, and has norm ≤ 1 as one
    vector, however many rows there are: see `Averages`.
    """

    rows: Gradients
    users: UserRows

    @property
    def dim(self) -> int:
        return self.rows.dim

    @property
    def n_examples(self) -> int:
        return self.users.count

    def draw(self, samples: Samples) -> Iterator[Rows]:
        return iter(samples)

    def slack(self, batch_size: float) -> float:
        """What rounding lets the rows of all users of a batch move, each of 1/k of its norm."""
        most = self.users.most
        if most == 1:
            return self.rows.slack(batch_size)
        return self.rows.slack(most * (batch_size + 32)) / most

    def add_bounded(
        self,
        total: BoundedSum,
        x: Vector,
        batch: Rows,
        projection: Projection = "radial",
        pool: Executor | None = None,
    ) -> None:
        """Add 1/k of the gradient of each of a user's k rows, each bounded to the ellipsoid."""
        averages = total.averages()
        for count, rows in self.users.by_count(batch):
            self.rows.add_bounded(averages.of(count), x, rows, projection, pool)
        averages.add()

    def add_plain(
        self, total: Vector, x: Vector, batch: Rows, pool: Executor | None = None
    ) -> tuple[int, int]:
        """Add the averages as they are; rows that are not finite count as zeros."""
        left_out = 0
        for count, rows in self.users.by_count(batch):
            part = total if count == 1 else np.zeros_like(total)
            left_out += self.rows.add_plain(part, x, rows, pool)[1]
            if count > 1:
                total += part / count
        return 0, left_out

    def per_example(self, x: Vector, batch: Rows) -> Vector:
        """The averages, one a row; users without a finite gradient are left out.

        A coordinate is added up from the smallest to the largest, so that neither the order of a
        user's rows nor other users change it.
        """
        means = [np.empty((0, self.dim))]
        for count, rows in self.users.by_count(batch):
            found = self.rows.per_example(x, rows)
            if len(found) == rows.size:
                means.append(_mean(found.reshape(-1, count, self.dim)))
                continue
            for mine in rows.reshape(-1, count):
                finite = self.rows.per_example(x, mine)
                if len(finite):
                    padded = np.zeros((1, count, self.dim))
                    padded[0, : len(finite)] = finite
                    means.append(_mean(padded))
        return np.concatenate(means)


def _mean(gradients: Vector) -> Vector:
    """Of arrays of shape (users, rows, dim) the means over the rows, computed row by row."""
    count = gradients.shape[1]
    if count == 1:
        return np.asarray(gradients[:, 0])
    ordered = np.sort(gradients, axis=1)
    total = np.zeros((len(gradients), gradients.shape[2]))
    for k in range(count):
        total += ordered[:, k] / count
    return total


def rows_of_users(
    method: Method, groups: Any, rows: int, most: int, source: RandomSource
) -> UserRows:
    """The rows of the users that count in a run, at most so many of each."""
    if method.one_shot:
        raise ValueError(
            f"Expected a method of steps for users with several rows (groups=), found "
            f"{method.name!r}, which perturbs the minimiser over rows: use 'pagan' or 'pasan'."
        )
    most = validate.integer("max_rows_per_user", most)
    return Users.of(groups, rows).draw(source.another_generator(), most)
