"""The subspace that public gradients span, for the methods that use it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from privagrad._internal.validate import Vector
from privagrad.methods._base import Gradients, Setting


@dataclass
class PublicSubspace:
    """The top `rank` eigenvectors of the public gradients' second moment at the current point.

    It is computed again once an epoch, and decomposed again only if the second moment has changed
    (with the absolute and the linear loss it never does).
    """

    public: Gradients
    rank: int
    epoch: int
    basis: Vector = field(init=False)  # d × rank, orthonormal columns
    _moment: Vector | None = None
    _steps: int = 0

    @classmethod
    def of(cls, setting: Setting, rank: int) -> PublicSubspace:
        """The subspace of the setting's public rows."""
        if setting.public is None:
            raise ValueError("Expected public rows in the setting, found None.")
        return cls(setting.public, rank, setting.batches.epoch)

    def at(self, x: Vector) -> Vector:
        """The basis for the step at `x`."""
        if self._steps % self.epoch == 0:
            self._look(x)
        self._steps += 1
        return self.basis

    def _look(self, x: Vector) -> None:
        public = self.public
        gradients = public.per_example(x, np.arange(public.n_examples))
        moment = gradients.T @ gradients
        if self._moment is None or not np.array_equal(moment, self._moment):
            self._moment = moment
            rank = min(self.rank, x.size)
            self.basis = np.ascontiguousarray(np.linalg.eigh(moment)[1][:, -rank:])
