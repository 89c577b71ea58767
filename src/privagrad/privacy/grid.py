"""The public grid that a sum is rounded to, and how much noise a sum on it needs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from privagrad.privacy import normals
from privagrad.privacy.correlation import INDEPENDENT
from privagrad.privacy.discrete import DISCRETE_SPREAD
from privagrad.privacy.noise import Noise

ULP = 2.0**-52
_EXACT_INTEGERS = 2**52
_FINEST = 2.0**20


@dataclass(frozen=True)
class PublicGrid:
    """A sum of vectors of norm at most 1 is a whole number of units of `grid` in every coordinate.

    Parameters
    ----------
    dim : int
        The number of coordinates that one example's vector has.
    noise_multiplier : float
        The standard deviation of the noise over the sensitivity.
    batch_size : float
        The expected batch size, which the noisy sum is divided by.
    slack : float
        How much longer than 1 a vector may be by the rounding of the caller's own arithmetic.
    units : float, optional
        About the standard deviation of the noise in units of the grid. None: as many that
        rounding a vector moves it by 2⁻²⁰ of the noise, but no more than 2²⁴, because the rounding
        of normals does more harm on a finer grid; then by up to 2⁻¹² of the noise.
    coefficients : tuple of float
        1 = c_0, ..., c_{b-1} where the noise of b releases in a row is correlated, see
        `correlation.coefficients_of`. One vector then moves all b of them: see `sensitivity`.
    """

    dim: int
    noise_multiplier: float
    batch_size: float
    slack: float = 0.0
    units: float | None = None
    coefficients: tuple[float, ...] = INDEPENDENT

    @property
    def bands(self) -> int:
        """How many releases in a row one vector moves."""
        return len(self.coefficients)

    @cached_property
    def grid(self) -> float:
        """A part of the noise shared among the coordinates, or as fine as doubles count exactly."""
        if not 0 < self.noise_multiplier < math.inf:
            raise ValueError(f"Expected a noise multiplier > 0, found {self.noise_multiplier!r}.")
        root = math.sqrt(self.dim)
        units = self.units or min(2**20 * root, max(2**24, 2**12 * root))
        fine = self.noise_multiplier / units
        # A Poisson batch beyond twice its expectation plus 64 has probability below 1e-20.
        coarse = (2 * self.batch_size + 64) / _EXACT_INTEGERS
        return max(_power_of_two_below(fine), 2 * _power_of_two_below(coarse))

    @cached_property
    def limit(self) -> float:
        """The largest norm, as computed, of a vector whose norm is at most 1 in real numbers.

        A norm of `dim` coordinates is off by fewer than dim + 8 units in the last place.
        """
        return 1.0 - (self.dim + 8) * ULP

    @cached_property
    def fineness(self) -> float:
        """Into how many parts a unit is cut for rows of users with several: a power of two.

        As many as sums over a batch count exactly in doubles, and up to 2²⁰.
        """
        parts = self.grid * _EXACT_INTEGERS / (2 * self.batch_size + 64)
        return min(_power_of_two_below(parts), _FINEST)

    def limit_of_rows(self, count: int) -> float:
        """The `limit` for each of the `count` rows of a user, whose average is added.

        Rounding a row to parts of a unit moves it by at most sqrt(dim)/2 of them, and so the sum of
        all `count` rows by `count` times that. Their factor 1/count is off by less than 4 ulps.
        """
        if count == 1:
            return self.limit
        taken = 4 * ULP + math.sqrt(self.dim) * self.grid * count / (2 * self.fineness)
        if not taken < 0.5:
            raise ValueError(
                f"Expected a smaller noise multiplier for users with several rows, found "
                f"{self.noise_multiplier:g} for batches of about {self.batch_size:g} users: their "
                "averages are not that accurate. Take smaller batches, or a larger epsilon."
            )
        return self.limit - taken

    @property
    def sensitivity(self) -> float:
        """How far one vector can move the rounded sum, in whitened coordinates.

        With b bands of noise: how far it can move the b sums to which independent noise is added.
        The first one moves by the vector g, the k-th one after it by c_k g and at most one unit in
        each coordinate, because what is taken away of earlier noise is rounded: together by
        |c| ‖g‖ + sqrt((b - 1) dim) · grid.
        """
        once = 1.0 + self.slack + math.sqrt(self.dim) * self.grid
        rounding = math.sqrt((self.bands - 1) * self.dim) * self.grid
        return math.hypot(*self.coefficients) * once + rounding

    @cached_property
    def deviation(self) -> float:
        """σ of the noise in units of the grid: z times the sensitivity.

        Two sums may seem further apart by the errors of Gaussian normals, 2 sqrt(dim) error · σ,
        of b correlated releases 2 sqrt(b dim) error · σ, which is counted for both kinds of noise.
        """
        error = 2 * math.sqrt(self.bands * self.dim) * normals.RELATIVE_ERROR * normals.LARGEST
        if not self.noise_multiplier * error < 0.5:
            raise ValueError(
                f"Expected a noise multiplier below {0.5 / error:.3g} for {self.dim} coordinates, "
                f"found {self.noise_multiplier:g}: normals are not that accurate."
            )
        exact = self.noise_multiplier * self.sensitivity / self.grid
        return exact / (1 - self.noise_multiplier * error)

    def distance_from_normal(self, noise: Noise) -> float:
        """How many units the noise of a coordinate lies from a normal of this `deviation`.

        Gaussian noise is rounded. Discrete noise is drawn around a normal with probabilities
        proportional to N(·, 9) (see `discrete_parameter`): in each coordinate it lies further away
        with probability 1e-32.
        """
        if noise == "discrete":
            return 12 * DISCRETE_SPREAD
        return 0.5 + normals.RELATIVE_ERROR * normals.LARGEST * self.deviation


def _power_of_two_below(value: float) -> float:
    return math.ldexp(1.0, math.frexp(value)[1] - 1)
