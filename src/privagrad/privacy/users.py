"""Whose row each row is, where a guarantee protects users with all of their rows together.

The number of users is public. How many rows there are, and how many one user has, is not: nothing
here tells it, neither an error nor a release.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.random import Generator

from privagrad._internal.validate import Integers
from privagrad.privacy.sampling import Rows

MOST_ROWS = 1024
"""The public cap on the rows of a user that count; of users with more, a random choice does."""

_NO_LABEL = ("NoneType", "NAType", "NaTType")


@dataclass(frozen=True, eq=False)
class Users:
    """The users of some rows, numbered by the first row of each.

    Attributes
    ----------
    numbers : array of int, of shape (number of rows,)
        The number of each row's user.
    count : int
        How many users there are, which is public.
    """

    numbers: Rows
    count: int

    @classmethod
    def of(cls, labels: Any, rows: int) -> Users:
        """From one label for each row: any hashable values, equal where the user is the same."""
        told = _as_list(labels)
        if len(told) != rows:
            raise ValueError(
                "Expected one user for each row (groups=), found another number of labels than of "
                "rows: give an array with the user of every row."
            )
        return cls.numbered(told)

    @classmethod
    def numbered(cls, labels: Iterable[Hashable]) -> Users:
        """Users by their labels; a missing one is refused, and a single one."""
        places: dict[Hashable, int] = {}
        try:
            told = (places.setdefault(label, len(places)) for label in labels)
            numbers = np.fromiter(told, dtype=np.int64)
        except TypeError:
            raise TypeError(
                "Expected users (groups=) that can be told apart, such as numbers or texts, found "
                "values that are not hashable: convert them, for example to texts."
            ) from None
        if any(map(_is_missing, places)):
            raise ValueError(
                "Expected a user for every row (groups=), found rows without one (NaN, None or an "
                "empty text): nobody's guarantee would cover them. Name their users, or drop these "
                "rows."
            )
        if len({isinstance(label, str) for label in places}) > 1:
            raise TypeError(
                "Expected users (groups=) that are all texts, or none of them, found both: a "
                "number and its text would be two users, and the rows of one person be protected "
                "in parts. Convert them to one type."
            )
        if len(places) < 2:
            raise ValueError(
                "Expected at least two different users (groups=), found fewer: a guarantee for "
                "users needs others to hide among. Name the user of each row."
            )
        return cls(numbers, len(places))

    def take(self, rows: Integers) -> Users:
        """The users of some rows, numbered again."""
        users, numbers = np.unique(self.numbers[rows], return_inverse=True)
        return Users(np.asarray(numbers, dtype=np.int64), users.size)

    def draw(self, generator: Generator, most: int = MOST_ROWS) -> UserRows:
        """The rows of every user that count, and the one row of each that stands for all of them.

        Both are uniformly random choices, independent of all other users.
        """
        draws = generator.random(self.count)
        order = np.argsort(self.numbers, kind="stable")
        counts = np.bincount(self.numbers, minlength=self.count)
        starts = np.concatenate([[0], np.cumsum(counts)])
        if counts.max() > most:
            kept = np.ones(order.size, dtype=np.bool_)
            for user in np.flatnonzero(counts > most):
                left_out = generator.permutation(counts[user])[most:]
                kept[starts[user] + left_out] = False
            order, counts = order[kept], np.minimum(counts, most)
            starts = np.concatenate([[0], np.cumsum(counts)])
        place = np.minimum((draws * counts).astype(np.int64), counts - 1)
        return UserRows(order, starts, order[starts[:-1] + place], most)


@dataclass(frozen=True, eq=False)
class UserRows:
    """The rows of each user that count in a run.

    Attributes
    ----------
    rows, starts : arrays of int
        Row numbers, those of user u being ``rows[starts[u] : starts[u + 1]]``, at least one.
    chosen : array of int, of shape (number of users,)
        One random row of each user: the table of these rows answers queries to all rows. What a
        user contributes to it is one row, whatever the choice.
    most : int
        No user has more rows. It is public.
    """

    rows: Rows
    starts: Rows
    chosen: Rows
    most: int

    @property
    def count(self) -> int:
        """How many users there are."""
        return self.chosen.size

    @cached_property
    def counts(self) -> Rows:
        """How many rows each user has. NOT public."""
        return np.diff(self.starts)

    def by_count(self, users: Integers) -> Iterator[tuple[int, Rows]]:
        """The rows of some users, those together whose users have equally many; a user's in turn.

        A user that is named twice comes twice.
        """
        if users.size == self.count and bool((users == np.arange(users.size)).all()):
            yield from self._all
        else:
            yield from self._grouped(users)

    @cached_property
    def _all(self) -> list[tuple[int, Rows]]:
        return list(self._grouped(np.arange(self.count)))

    def _grouped(self, users: Integers) -> Iterator[tuple[int, Rows]]:
        counts = self.counts[users]
        for count in np.unique(counts).tolist():
            first = self.starts[users[counts == count]]
            yield count, self.rows[first[:, None] + np.arange(count)].ravel()


def require_same_order(labels: Any, *tables: Any) -> None:
    """Refuse labels with another index than the rows': they would name the wrong users.

    Labels are matched by place. Only values that have an index, such as those of pandas, are
    compared, with the first of the `tables` that has one.
    """
    found = (getattr(values, "index", None) for values in (labels, *tables))
    index, *others = (one if hasattr(one, "equals") else None for one in found)
    other = next((one for one in others if one is not None), None)
    if index is not None and other is not None and not index.equals(other):
        raise ValueError(
            "Expected users (groups=) with the index of the rows, found another one: users are "
            "matched by place, so that they may be those of other rows. Bring them into the order "
            "of the rows, for example with groups.loc[X.index]; or give groups.to_numpy() if they "
            "are in it."
        )


def require_plain_shapes(X: Any, y: Any) -> None:
    """Refuse rows or targets of the wrong shape in words that do not tell how many rows there are.

    Later checks show shapes.
    """
    shape, targets = getattr(X, "shape", None), getattr(y, "shape", None)
    if shape is not None and (len(shape) != 2 or shape[1] < 1):
        what = "no columns" if len(shape) == 2 else f"{len(shape)} dimensions"
        raise ValueError(
            f"Expected X of two dimensions, with at least one column, found {what}. Reshape one "
            "feature with X.reshape(-1, 1)."
        )
    if targets is not None and len(targets) != 1 and targets[1:] != (1,):
        raise ValueError(
            "Expected one target for each row, found y of another shape: give one column of it."
        )


def _as_list(labels: Any) -> list[Any]:
    if isinstance(labels, (str, bytes, Mapping, Set)) or hasattr(labels, "columns"):
        raise TypeError(
            f"Expected the user of each row (groups=), in the order of the rows, found a "
            f"{type(labels).__name__}: give one column of values, for example frame['user']."
        )
    for name in ("to_list", "to_pylist", "tolist"):
        if hasattr(labels, name):
            if len(getattr(labels, "shape", (0,))) != 1:
                raise ValueError(
                    "Expected one column of users (groups=), found several, or none: name each "
                    "user by one value, for example a tuple in a list."
                )
            return list(getattr(labels, name)())
    return list(labels)


def _is_missing(label: Any) -> bool:
    """Whether a label, or a part of a tuple, names nobody: NaN, None, an empty text."""
    if isinstance(label, tuple):
        return not label or any(map(_is_missing, label))
    if isinstance(label, str):
        return not label.strip()
    return type(label).__name__ in _NO_LABEL or bool(label != label)
