"""Where methods get gradients from: bounded, summed and noisy, or plain without privacy."""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from privagrad._internal.validate import Vector
from privagrad.geometry.ellipsoid import Ellipsoid
from privagrad.glm.gradients import GlmGradients
from privagrad.glm.losses import Loss
from privagrad.glm.minimizers import RegularizedRisk
from privagrad.methods import Setting
from privagrad.privacy.mechanism import GaussianSum, bounded_units
from privagrad.privacy.noise import RandomSource
from privagrad.privacy.sampling import Rows

_MOST_UNITS = 2.0**51


@dataclass
class Diagnostics:
    """Counts over all steps, taken without noise: NOT covered by the guarantee, not to publish."""

    examples: int = 0
    clipped: int = 0
    nonfinite: int = 0


class GradientOracle:
    """Gradients of a batch over the EXPECTED batch size: bounded and noisy unless noise is 0.

    Guarantees
    ----------
    Methods see private rows through this alone, and one release a batch, which is what the plan
    counts: a second one is refused.
    """

    def __init__(
        self,
        gradients: GlmGradients,
        setting: Setting,
        source: RandomSource,
        pool: Executor | None,
    ) -> None:
        self.gradients, self.setting = gradients, setting
        self.source, self.pool = source, pool
        self.private = setting.noise_multiplier > 0
        self.mechanism = self._mechanism(setting.dim) if self.private else None
        self.total = np.empty(setting.dim)
        self.released: Rows | None = None
        self.diagnostics = Diagnostics()

    @cached_property
    def everything(self) -> Rows:
        return np.arange(self.setting.n_examples)

    @property
    def loss(self) -> Loss:
        return self.gradients.loss

    def bounded(self, x: Vector, batch: Rows, ellipsoid: Ellipsoid | None) -> Vector:
        self._once(batch)
        total = self.total
        total.fill(0.0)
        if self.mechanism is None:
            counts = self.gradients.add_plain(total, x, batch, self.pool)
            total /= self.setting.batch_size
        elif ellipsoid is None:
            raise ValueError("Expected an ellipsoid to bound private gradients to, found None.")
        else:
            counts = self.gradients.add_bounded(
                total, x, batch, ellipsoid, self.mechanism.grid, self.setting.projection, self.pool
            )
            self.mechanism.release(total, ellipsoid, self.source, self.pool)
        self._count(batch, *counts)
        return total

    def private_mean_of(
        self, x: Vector, batch: Rows, transform: Callable[[Vector], Vector], dim: int
    ) -> Vector:
        self._once(batch)
        gradients = self.gradients.per_example(x, batch)
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
        self._once(self.everything)
        self._count(self.everything, risk.shrunk, risk.left_out)
        if not self.private:
            return risk.solve(tolerance)
        noise = self.setting.noise_multiplier
        if cover is None:
            near = tolerance + risk.rounding(tolerance)
            return self._released(risk.solve(tolerance), (bound / n + 2 * near) / ridge, noise)
        drawn = GaussianSum(dim, noise, 1.0)
        ball = Ellipsoid.ball(dim, bound)
        tilt = drawn.release(np.zeros(dim), ball, self.source, self.pool) / n
        tilted = replace(risk, tilt=tilt)
        # The tilt is normal up to the rounding to its grid, which moves the minimiser a little.
        rounded = math.sqrt(dim) * drawn.grid * bound / (2 * n)
        near = tolerance + tilted.rounding(tolerance) + rounded
        return self._released(tilted.solve(tolerance), 2 * near / ridge, cover)

    def _released(self, vector: Vector, sensitivity: float, noise_multiplier: float) -> Vector:
        """`vector`, which one example can move by `sensitivity`, with Gaussian noise."""
        dim = self.setting.dim
        # A minimiser is at most some 1e4 n times as long as it can move: counted exactly.
        size = 10_000.0 * self.setting.n_examples
        grid = GaussianSum(dim, noise_multiplier, size).grid
        # Dividing by the sensitivity rounds as well, by less than a unit within these limits,
        # to which bringing a coordinate moves no two vectors apart.
        mechanism = GaussianSum(dim, noise_multiplier, size, slack=math.sqrt(dim) * grid)
        units = np.clip(vector / (sensitivity * grid), -_MOST_UNITS, _MOST_UNITS)
        ball = Ellipsoid.ball(dim, sensitivity * size)
        return mechanism.release(units, ball, self.source, self.pool)

    def _once(self, batch: Rows) -> None:
        if self.private and batch is self.released:
            raise ValueError("Expected one private release a batch, found a second request.")
        self.released = batch

    def _mechanism(self, dim: int) -> GaussianSum:
        return GaussianSum(dim, self.setting.noise_multiplier, self.setting.batch_size)

    def _count(self, batch: Rows, clipped: int, nonfinite: int) -> None:
        self.diagnostics.examples += batch.size
        self.diagnostics.clipped += clipped
        self.diagnostics.nonfinite += nonfinite
