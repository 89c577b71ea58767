"""What is fitted: rows, targets, and what is known of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from privagrad._internal.validate import Integers, Vector
from privagrad.glm.examples import Examples, PartitionedExamples, in_memory
from privagrad.glm.losses import Loss
from privagrad.linear.least_squares import Solver
from privagrad.linear.plan import PublicFacts
from privagrad.privacy.users import UserRows

Bounds = tuple[Vector, Vector]


@dataclass(frozen=True)
class Problem:
    """What is fitted.

    Attributes
    ----------
    loss : Loss
        What is minimised.
    examples : Examples or PartitionedExamples
        The rows, with targets as the loss needs them: numbers, signs or class numbers. Rows whose
        targets are unknown count towards n but are not trained on.
    outputs : int
        The number of classes, or 1.
    intercept : bool
        Whether there is one.
    bounds, target_bounds : tuple of arrays or None
        Public bounds (low, high) of the columns and of the target.
    groups : tuple of (int, int)
        One-hot columns, from the first to before the last, of which a row has at most one.
    limits : array or None
        Public bounds on the size of the entries of each column, where they are known.
    blanks : array of shape (d,) or None
        For each column the place of the one that is 1 in the rows where it is missing (NaN), which
        is public; -1 for columns without.
    class_weights : array of shape (k,), "balanced" or None
        Public weights of the classes; "balanced": inverse to their frequencies, which are learned.
    squares : {"auto", "moments", "gradients"} or None
        How squared errors are minimised, if they are: then gradients minimise the loss instead.
    users : UserRows or None
        Whose rows they are, where users are protected.
    """

    loss: Loss
    examples: Examples | PartitionedExamples
    outputs: int = 1
    intercept: bool = True
    bounds: Bounds | None = None
    target_bounds: Bounds | None = None
    groups: tuple[tuple[int, int], ...] = ()
    limits: Vector | None = None
    blanks: Integers | None = None
    class_weights: Vector | Literal["balanced"] | None = None
    squares: Solver | None = None
    users: UserRows | None = None

    @property
    def one_row_a_user(self) -> Problem:
        """One random row of each user, as a table of rows: what queries to all rows see."""
        if self.users is None:
            return self
        examples = in_memory(self.examples, "users")
        return replace(self, examples=examples.take(self.users.chosen), users=None)

    @property
    def calibrated(self) -> bool:
        """Whether margins are compared with log-odds: to be them, or to be shifted by weights."""
        shifted = self.outputs > 1 and self.class_weights is not None
        return self.loss.name in ("logistic", "softmax") or shifted

    @property
    def balanced(self) -> bool:
        """Whether the frequencies of the classes are to be learned."""
        return isinstance(self.class_weights, str)

    @property
    def facts(self) -> PublicFacts:
        """What a plan needs to know of it."""
        n, columns = self.examples.shape
        return PublicFacts(
            n if self.users is None else self.users.count,
            columns,
            self.outputs,
            self.examples.sparse,
            self.loss.regression,
            self.intercept,
            self.bounds is not None,
            self.target_bounds is not None,
            self.calibrated,
            self.balanced,
            self.squares,
            0 if self.blanks is None else int(np.count_nonzero(self.blanks >= 0)),
            quantities_of(columns, self.bounds, self.groups, self.blanks),
            "row" if self.users is None else "user",
        )


def quantities_of(
    columns: int,
    bounds: Bounds | None,
    groups: tuple[tuple[int, int], ...],
    blanks: Integers | None,
) -> int:
    """How many columns may be quantities, from what is public.

    One-hot columns are not, nor those that tell of blanks, nor those whose bounds are 0 and 1.
    """
    may_be = np.ones(columns, dtype=np.bool_)
    for first, stop in groups:
        may_be[first:stop] = False
    if blanks is not None:
        may_be[blanks[blanks >= 0]] = False
    if bounds is not None:
        may_be &= ~((bounds[0] == 0) & (bounds[1] == 1))
    return int(np.count_nonzero(may_be))
