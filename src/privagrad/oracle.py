"""Where methods get gradients from: bounded, summed and noisy, or plain without privacy."""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, replace

import numpy as np

from privagrad._validate import Vector
from privagrad.erm import RegularizedRisk
from privagrad.geometry import Ellipsoid, Projection
from privagrad.glm import GlmGradients
from privagrad.losses import Loss
from privagrad.mechanism import GaussianSum, bounded_units
from privagrad.methods import Setting
from privagrad.noise import RandomSource
from privagrad.sampling import Rows


@dataclass
class Diagnostics:
    """Counts over all steps, taken without noise: NOT covered by the guarantee, not to publish."""

    examples: int = 0
    clipped: int = 0
    nonfinite: int = 0


class GradientOracle:
    """Gradients of a batch over the EXPECTED batch size: bounded and noisy unless noise is 0."""

    def __init__(
        self,
        gradients: GlmGradients,
        setting: Setting,
        projection: Projection,
        source: RandomSource,
        pool: Executor | None,
    ) -> None:
        self.gradients, self.setting, self.projection = gradients, setting, projection
        self.source, self.pool = source, pool
        self.private = setting.noise_multiplier > 0
        self.mechanism = self._mechanism(setting.dim) if self.private else None
        self.total = np.empty(setting.dim)
        self.diagnostics = Diagnostics()

    @property
    def loss(self) -> Loss:
        return self.gradients.loss

    def bounded(self, x: Vector, batch: Rows, ellipsoid: Ellipsoid | None) -> Vector:
        total = self.total
        total.fill(0.0)
        if self.mechanism is None or ellipsoid is None:
            counts = self.gradients.add_plain(total, x, batch, self.pool)
            total /= self.setting.batch_size
        else:
            counts = self.gradients.add_bounded(
                total, x, batch, ellipsoid, self.mechanism.grid, self.projection, self.pool
            )
            self.mechanism.release(total, ellipsoid, self.source, self.pool)
        self._count(batch, *counts)
        return total

    def mapped(
        self, x: Vector, batch: Rows, transform: Callable[[Vector], Vector], dim: int
    ) -> Vector:
        gradients = self.gradients.each(x, batch)
        vectors = transform(gradients)
        left_out = batch.size - len(gradients)
        if not self.private:
            self._count(batch, 0, left_out)
            return np.asarray(vectors.sum(axis=0) / self.setting.batch_size)
        mechanism = self._mechanism(dim)
        units, clipped, nonfinite = bounded_units(vectors, mechanism.grid)
        self._count(batch, clipped, nonfinite + left_out)
        return mechanism.release(units, Ellipsoid.ball(dim, 1.0), self.source, self.pool)

    def minimum(self, ridge: float, smoothing: float, cover: float | None = None) -> Vector:
        bound = self.setting.radius if self.private else math.inf
        risk = RegularizedRisk(self.gradients, bound, ridge, smoothing)
        dim, n = self.setting.dim, self.setting.n_examples
        # A tolerance whose price is one part in a thousand.
        tolerance = 0.0005 * self.setting.radius / n
        self._count(np.arange(n), risk.shrunk, risk.left_out)
        if not self.private:
            return risk.solve(tolerance)
        sensitivity = (bound / n + 2 * tolerance) / ridge
        noise = self.setting.noise_multiplier
        if cover is not None:
            tilt = self._released(np.zeros(dim), bound, noise) / n
            risk = replace(risk, tilt=tilt)
            sensitivity, noise = 2 * tolerance / ridge, cover
        return self._released(risk.solve(tolerance), sensitivity, noise)

    def _released(self, vector: Vector, sensitivity: float, noise_multiplier: float) -> Vector:
        """`vector`, which one example can move by `sensitivity`, with Gaussian noise."""
        dim = self.setting.dim
        mechanism = GaussianSum(dim, noise_multiplier, 1)
        units = vector / (sensitivity * mechanism.grid)
        return mechanism.release(units, Ellipsoid.ball(dim, sensitivity), self.source, self.pool)

    def _mechanism(self, dim: int) -> GaussianSum:
        return GaussianSum(dim, self.setting.noise_multiplier, self.setting.batch_size)

    def _count(self, batch: Rows, clipped: int, nonfinite: int) -> None:
        self.diagnostics.examples += batch.size
        self.diagnostics.clipped += clipped
        self.diagnostics.nonfinite += nonfinite
