"""Pictures that are public by construction: random strokes of a pen, which nobody wrote."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from privagrad.experiments.images.scattering import SIDE, Images

_POINTS, _LONGEST = 32, 20.0
"""Points of a drawn curve, and the longer side of a picture's box, as of MNIST's digits."""


def random_strokes(count: int, seed: int = 0) -> Images:
    """`count` images of one to three random Bézier curves, of the size of written digits.

    A pixel is as bright as a pen of random breadth covers it.
    """
    rng = np.random.default_rng(seed)
    images = np.zeros((count, SIDE, SIDE), np.uint8)
    pixels = np.stack(np.meshgrid(*[np.arange(float(SIDE))] * 2, indexing="ij"), axis=-1)
    for image in images:
        radius = rng.uniform(0.6, 1.8)
        points = _curves(rng, _LONGEST - 2 * radius)
        gaps = np.sqrt(((pixels[:, :, None] - points) ** 2).sum(axis=-1)).min(axis=-1)
        image[:] = np.rint(255 * np.clip(radius + 0.5 - gaps, 0.0, 1.0))
    return images


def _curves(rng: np.random.Generator, longest: float) -> NDArray[np.float64]:
    """Points of random curves whose box has this longer side, around the middle of the image."""
    at = np.linspace(0.0, 1.0, _POINTS)[:, None, None]
    weights = np.stack([(1 - at) ** 3, 3 * at * (1 - at) ** 2, 3 * at**2 * (1 - at), at**3])
    corners = rng.uniform(size=(4, 1, rng.integers(1, 4), 2))
    points: NDArray[np.float64] = (weights * corners).sum(axis=0).reshape(-1, 2)
    points -= points.min(axis=0)
    points *= longest / points.max()
    points += (SIDE - 1) / 2 - points.mean(axis=0)
    return points
