"""Batches of users with all of their rows: `make_private(groups=...)`."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.random import Generator
from torch import Tensor
from torch.utils.data import Sampler

from privagrad._internal import validate
from privagrad.privacy.sampling import Rows
from privagrad.privacy.users import MOST_ROWS, UserRows, Users
from privagrad.torch.processes import Processes


@dataclass(frozen=True)
class Grouping:
    """What `make_private` is told of users: whose each row is, and how many rows of one count."""

    groups: Any
    most: int = MOST_ROWS

    @classmethod
    def of(cls, groups: Any, most: int) -> Grouping | None:
        """None where rows are protected."""
        if groups is None:
            return None
        return cls(groups, validate.integer("max_rows_per_user", most))

    def users(self, all_rows: int, rows: Sequence[int], processes: Processes) -> Users:
        """The users of `rows`, of a data set with a label for each of `all_rows`.

        They must be the same in all processes: each takes whole users, and with other labels one
        user might be in two of them.
        """
        users = Users.of(self.groups, all_rows)
        own = [float(zlib.crc32(users.numbers.tobytes())), float(self.most)]
        if any(found != own for found in processes.gathered(own)):
            raise ValueError(
                "Expected the same groups= and max_rows_per_user in all processes, found others: "
                "a user's rows must stay in one process. Give all processes the users of the "
                "whole data set."
            )
        if not isinstance(rows, range):
            return Users.numbered(users.numbers[np.asarray(rows)].tolist())
        return users


class UserBatches(Sampler[list[int]]):
    """All rows that count of the users that `drawn` draws by their numbers.

    Attributes
    ----------
    shares : Tensor of shape (rows of the data set,)
        1/k of each row of a user with k rows, rounded down to float32.

    Guarantees
    ----------
    The shares of a user's rows add up to at most 1, whatever parts a batch comes in.
    """

    def __init__(self, drawn: Any, rows: Sequence[int], all_rows: int, users: UserRows) -> None:
        self.drawn, self.users = drawn, users
        self.rate, self.share = drawn.rate, drawn.share
        self._rows = np.asarray(rows, dtype=np.int64)[users.rows]
        shares = np.zeros(all_rows)
        shares[self._rows] = np.repeat(_shares(users.counts), users.counts)
        self.shares = torch.from_numpy(shares)

    def __len__(self) -> int:
        return len(self.drawn)

    def __deepcopy__(self, memo: Any) -> UserBatches:
        """A copy of a loader draws on."""
        return self

    def __iter__(self) -> Iterator[list[int]]:
        starts = self.users.starts
        for batch in self.drawn:
            yield [row for u in batch for row in self._rows[starts[u] : starts[u + 1]].tolist()]


def user_batches(
    drawn: Any, rows: Sequence[int], all_rows: int, users: Users, most: int, generator: Generator
) -> UserBatches:
    """Batches of users; of those with more than `most` rows a random choice counts."""
    return UserBatches(drawn, rows, all_rows, users.draw(generator, most))


def shares_of(batches: Any, rows: Sequence[int]) -> Tensor | None:
    """With how much each of these rows counts; None where rows are protected, not users."""
    return batches.shares[rows] if isinstance(batches, UserBatches) else None


def refuse_with_users(poisson: bool, clipping: str, verify: bool) -> None:
    """Refuse what users cannot be protected with."""
    if not poisson:
        raise ValueError(
            "Expected poisson_sampling=True with groups=, found False: in the loader's own order a "
            "user's rows are in many batches of a pass, and each batch would show them. Leave "
            "poisson_sampling out."
        )
    if clipping == "adaptive":
        raise ValueError(
            "Expected clipping='flat', 'automatic' or 'per_layer' with groups=, found 'adaptive': "
            "it counts the rows within the bound, and a user with many rows moves that count by "
            "more than the noise is made for."
        )
    if not verify:
        raise ValueError(
            "Expected verify=True with groups=, found False: whose rows the module is given is "
            "known only where the batch is followed from the data loader."
        )


def _shares(counts: Rows) -> Rows:
    """1/k in float32, rounded down, as doubles."""
    near = np.float32(1) / counts.astype(np.float32)
    # Products of 24 and 29 bits are exact.
    above = near.astype(np.float64) * counts > 1
    return np.where(above, np.nextafter(near, np.float32(0)), near).astype(np.float64)
