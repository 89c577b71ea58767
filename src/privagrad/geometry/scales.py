"""How the scale C of an ellipsoid follows from the second moments of gradients."""

from __future__ import annotations

import math
from typing import Any, Generic, TypeVar

Array = TypeVar("Array", bound=Any)
"""A NumPy array or a PyTorch tensor of float64: only operations that both have are used."""

SCALE_POWERS = {"pasan": -1.0, "pagan": -4 / 3}
"""C = σ^power with σ² the moments: Section 3 of the paper, after Theorem 2."""

SQUARE_MEMORY, WIDTH_FLOOR = 0.99, 0.01
"""Of an ellipsoid whose widths follow the squares of private gradients: their memory, and what is
added to the widths as a part of their root mean square."""

FIRST = 16
"""Differences of gradients before the first estimate."""


class GradientHistory(Generic[Array]):
    """Estimates the variance of gradients from consecutive private ones, which costs no privacy.

    Half the squared difference of two private gradients has the mean Var(g) + s², s the noise's
    own deviation. The estimates are due after 16, 32, 64, ... differences; the gradient after one
    is released in another ellipsoid and starts a new difference.
    """

    def __init__(self) -> None:
        self.count = 0
        self._before: Array | None = None
        self._squares: Any = 0.0
        self._noise: Any = 0.0
        self._noise_squares: Any = 0.0

    def add(self, gradient: Array, noise: Array) -> bool:
        """Add a private gradient; whether an estimate is due.

        Parameters
        ----------
        gradient : array or tensor
            Kept until the next call: the caller must not change it.
        noise : array or tensor
            The variance s² of its noise at each coordinate.
        """
        before, self._before = self._before, gradient
        if before is None:
            return False
        change = gradient - before
        self._squares = self._squares + change * change / 2
        self._noise = self._noise + noise
        self._noise_squares = self._noise_squares + noise * noise
        self.count += 1
        if self.count < FIRST or self.count & (self.count - 1):
            return False
        self._before = None
        return True

    def variance(self) -> Array:
        """The estimate of Var(g) at each coordinate, which noise may bring below 0."""
        variance: Array = (self._squares - self._noise) / self.count
        return variance

    def hidden(self) -> Array:
        """The variance that noise may hide at each coordinate: a floor for `variance`."""
        hidden: Array = (2 * self._noise_squares) ** 0.5 / self.count
        return hidden


def visible_size(total: float, hidden_squares: float) -> float:
    """A weighted sum of variances over coordinates, at least what noise may hide of the sum.

    Noise hides less of the sum than of each coordinate: the squares of its terms add up.

    Parameters
    ----------
    total : float
        Σ_j w_j variance_j.
    hidden_squares : float
        Σ_j (w_j hidden_j)².
    """
    return max(total, math.sqrt(hidden_squares))
