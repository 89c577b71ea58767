"""What is fitted: rows, targets, and what is known of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from privagrad._internal.validate import Integers, Vector
from privagrad.glm.losses import Loss
from privagrad.glm.rows import DenseRows, SparseRows
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
    rows : DenseRows or SparseRows
        The features.
    targets : array of shape (n,)
        Numbers, signs or class numbers, as the loss needs them.
    outputs : int
        The number of classes, or 1.
    intercept : bool
        Whether there is one.
    bounds, target_bounds : tuple of arrays or None
        Public bounds (low, high) of the columns and of the target.
    left_out : array of bool or None
        Rows whose targets are unknown: they count towards n but are not trained on.
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
    rows: DenseRows | SparseRows
    targets: Vector
    outputs: int = 1
    intercept: bool = True
    bounds: Bounds | None = None
    target_bounds: Bounds | None = None
    left_out: NDArray[np.bool_] | None = None
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
        chosen = self.users.chosen
        return replace(
            self,
            rows=self.rows.take(chosen),
            targets=self.targets[chosen],
            left_out=None if self.left_out is None else self.left_out[chosen],
            users=None,
        )

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
        n, columns = self.rows.shape
        return PublicFacts(
            n if self.users is None else self.users.count,
            columns,
            self.outputs,
            isinstance(self.rows, SparseRows),
            self.loss.regression,
            self.intercept,
            self.bounds is not None,
            self.target_bounds is not None,
            self.calibrated,
            self.balanced,
            self.squares,
            0 if self.blanks is None else int(np.count_nonzero(self.blanks >= 0)),
            "row" if self.users is None else "user",
        )
