"""The ellipsoid of given second moments, with the total noise of a ball, for the methods that
scale gradients by a preconditioner before they are bounded."""

from __future__ import annotations

import math

import numpy as np

from privagrad._internal import validate
from privagrad._internal.validate import Vector
from privagrad.geometry.ellipsoid import Ellipsoid
from privagrad.geometry.scales import WIDTH_FLOOR

FLOOR = WIDTH_FLOOR
"""Added to widths, as a part of their root mean square: a coordinate whose moment is 0 so far."""


def checked_floor(floor: float) -> None:
    """Refuse a floor of widths that is not a positive number."""
    validate.positive("floor", floor)


def widths_of(moments: Vector, floor: float) -> Vector:
    """√moments + floor, both relative to their root mean square: Σ widths² = d.

    Where moments tell nothing (all are 0, or not all are finite) the widths are 1.
    """
    largest = float(moments.max(initial=0.0))
    if not 0 < largest < math.inf:
        return np.ones_like(moments)
    roots = np.sqrt(moments / largest)
    widths = roots + floor * math.sqrt(float(np.mean(roots**2)))
    return np.asarray(widths / math.sqrt(float(np.mean(widths**2))))


def ellipsoid_of(widths: Vector, radius: float) -> Ellipsoid:
    """{g : ‖g / widths‖ ≤ radius}, the noise of which is proportional to the widths.

    Its noise has the total variance of the ball's of this radius, and a gradient whose coordinates
    are in the proportion of the widths has its Euclidean norm: a radius means the same in both.
    """
    return Ellipsoid(widths**-2.0, radius)
