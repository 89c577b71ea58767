"""Coordinates of images in the principal axes of public pictures.

The mean, the axes and the variances are those of random strokes, so that they cost no privacy.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from privagrad._internal.atomic import atomic_write
from privagrad._internal.jit import kernel
from privagrad._internal.progress import track
from privagrad._internal.threads import pool_of
from privagrad._internal.validate import Vector
from privagrad.experiments.images.scattering import CHANNELS, FEATURES, Features, Images, scattering
from privagrad.experiments.images.strokes import random_strokes

_GROUPS = CHANNELS // 3
"""Groups of channels that are normalised together, as many as in Tramèr and Boneh."""
_BLOCK, _TILE, _UNROLLED = 512, 16, 3
VERSION = 1
"""Of what is computed here and in `scattering`: it names the files that keep it."""


@dataclass(frozen=True)
class Basis:
    """The mean of the features of public pictures, their main axes (as columns), and variances."""

    mean: Features
    axes: Features
    variances: Vector

    @property
    def dim(self) -> int:
        return self.variances.size

    @classmethod
    def of_strokes(cls, dim: int = 500, pictures: int = 4000) -> Basis:
        """The basis of features of random strokes."""
        features = normalised(scattering(random_strokes(pictures)))
        mean = features.mean(axis=0)
        centred = features - mean
        # Fewer pictures than features: axes by way of the products of pictures.
        variances, mixtures = np.linalg.eigh(centred @ centred.T / np.float32(pictures))
        variances, mixtures = variances[::-1][:dim], mixtures[:, ::-1][:, :dim]
        axes = centred.T @ (mixtures / np.sqrt(variances * pictures))
        return cls(mean, np.ascontiguousarray(axes, np.float32), variances.astype(np.float64))

    def coordinates(self, images: Images, progress: str = "features") -> Features:
        """Every image's scattering features, normalised, in these axes.

        Returns
        -------
        array of shape (n, dim)
            Each image's coordinates depend on the image and the basis alone, to the last bit.
        """
        found = np.zeros((len(images), self.dim), np.float32)

        def fill(first: int) -> None:
            part = slice(first, first + _BLOCK)
            _project(normalised(scattering(images[part])), self.mean, self.axes, found[part])

        starts = range(0, len(images), _BLOCK)
        with pool_of() as pool:
            done = map(fill, starts) if pool is None else pool.map(fill, starts)
            for _ in track(done, len(starts), progress):
                pass
        return found


def normalised(features: Features) -> Features:
    """Every image's features, in place: mean 0 and variance 1 in each of 27 groups of channels."""
    _normalise(features, _GROUPS)
    return features


def cached(folder: Path, parts: tuple[NDArray[Any], ...], make: Callable[[], Features]) -> Features:
    """What `make` makes of the arrays `parts`, kept in a file in `folder`."""
    digest = hashlib.sha256(repr(VERSION).encode())
    for part in parts:
        digest.update(np.ascontiguousarray(part).tobytes())
    path = folder / f"{digest.hexdigest()[:16]}.npy"
    if path.exists():
        kept: Features = np.load(path)
        return kept
    made = make()
    folder.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as file:
        np.save(file, made)
    return made


@kernel()
def _normalise(features: Any, groups: int) -> None:
    width = features.shape[1] // groups
    for i in range(features.shape[0]):
        for group in range(groups):
            part = features[i, group * width : (group + 1) * width]
            total = squares = 0.0
            for j in range(width):
                total += part[j]
            mean = total / width
            for j in range(width):
                squares += (part[j] - mean) * (part[j] - mean)
            spread = np.sqrt(squares / width) + 1e-5
            for j in range(width):
                part[j] = (part[j] - mean) / spread


@kernel()
def _project(features: Any, mean: Any, axes: Any, found: Any) -> None:
    """found += (features - mean) axes: sums over columns in their order, the same for every row."""
    dim = axes.shape[1]
    for first in range(0, features.shape[0], _TILE):
        for j in range(0, FEATURES, _UNROLLED):
            for i in range(first, min(first + _TILE, features.shape[0])):
                a = features[i, j] - mean[j]
                b = features[i, j + 1] - mean[j + 1]
                c = features[i, j + 2] - mean[j + 2]
                for k in range(dim):
                    found[i, k] = ((found[i, k] + a * axes[j, k]) + b * axes[j + 1, k]) + c * axes[
                        j + 2, k
                    ]
