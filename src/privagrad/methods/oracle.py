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
from privagrad.methods._base import EllipsoidRule, Gradients, Setting
from privagrad.privacy.bounded import BoundedSum
from privagrad.privacy.correlation import NoiseHistory, coefficients_of
from privagrad.privacy.events import SOLVER_TOLERANCE
from privagrad.privacy.mechanism import GaussianSum
from privagrad.privacy.normals import LARGEST
from privagrad.privacy.releases import Releases
from privagrad.privacy.sampling import Rows


@dataclass
class Diagnostics:
    """Counts over all steps, without noise: NOT covered by the guarantee, do not publish them.

    Attributes
    ----------
    examples : int
        Rows in all batches.
    clipped : int
        Gradients that were shrunk.
    nonfinite : int
        Gradients that were left out because they are not finite.
    """

    examples: int = 0
    clipped: int = 0
    nonfinite: int = 0


class GradientOracle:
    """Gradients of a batch over the EXPECTED batch size: bounded and noisy unless noise is 0.

    Guarantees
    ----------
    Methods see private rows only through this class. The plan counts one release per batch, and a
    second one is refused.
    """

    def __init__(
        self,
        gradients: Gradients,
        setting: Setting,
        releases: Releases,
        pool: Executor | None,
    ) -> None:
        if setting.plan != releases.plan:
            raise ValueError("Expected the plan of the setting to be that of the releases.")
        self.gradients, self.setting = gradients, setting
        self.releases, self.pool = releases, pool
        self.private, self.training = setting.noise_multiplier > 0, setting.plan.training
        self.mechanism = self._mechanism(setting.dim) if self.private else None
        noise, self.history = releases.source.noise, None
        if self.mechanism is not None:
            self.history = self.mechanism.begin_history(noise)
        self.memory = np.empty(setting.dim)
        self.released: Rows | None = None
        self.seen: list[Vector] = []
        self.diagnostics = Diagnostics()

    @cached_property
    def everything(self) -> Rows:
        return np.arange(self.gradients.n_examples)

    @property
    def loss(self) -> Loss:
        return self._linear.loss

    @property
    def _linear(self) -> GlmGradients:
        if not isinstance(self.gradients, GlmGradients):
            raise TypeError("Expected a generalized linear model, found another objective.")
        return self.gradients

    def bounded(
        self, x: Vector, batch: Rows, ellipsoid: Ellipsoid | EllipsoidRule | None
    ) -> Vector:
        self._once(batch)
        if self.mechanism is None:
            total = self.memory
            total.fill(0.0)
            _, nonfinite = self.gradients.add_plain(total, x, batch, self.pool)
            self._count(batch, nonfinite=nonfinite)
            total /= self.setting.batches.expected_size
            return total
        if ellipsoid is None:
            raise ValueError("Expected an ellipsoid to bound private gradients to, found None.")
        learns = not isinstance(ellipsoid, Ellipsoid)
        if self.history is not None and ellipsoid is not self.setting.ellipsoid:
            raise ValueError(
                "Expected the ellipsoid of the whole run with correlated noise, found another one: "
                "noise of another shape does not cancel."
            )
        chosen = ellipsoid if isinstance(ellipsoid, Ellipsoid) else ellipsoid(tuple(self.seen))
        bounded = self.mechanism.sum(chosen, out=self.memory)
        self.gradients.add_bounded(bounded, x, batch, self.setting.projection, self.pool)
        gradient = self._release(batch, self.mechanism, bounded, self.history)
        if learns:
            self.seen.append(gradient.copy())
        return gradient

    def private_mean_of(
        self, x: Vector, batch: Rows, transform: Callable[[Vector], Vector], dim: int
    ) -> Vector:
        self._once(batch)
        gradients = self.gradients.per_example(x, batch)
        vectors = transform(gradients)
        left_out = batch.size - len(gradients)
        if not self.private:
            self._count(batch, nonfinite=left_out)
            return np.asarray(vectors.sum(axis=0) / self.setting.batches.expected_size)
        if self.history is not None:
            raise ValueError(
                "Expected independent noise for means of other vectors than gradients, found "
                "correlated noise: leave correlation= out."
            )
        mechanism = self._mechanism(dim)
        bounded = mechanism.sum()
        bounded.add(vectors)
        bounded.nonfinite += left_out
        return self._release(batch, mechanism, bounded)

    def minimum(self, ridge: float, smoothing: float) -> Vector:
        risk, tolerance = self._risk(ridge, smoothing)
        if not self.private:
            return risk.solve(tolerance)
        near = tolerance + risk.rounding(tolerance)
        moves = (risk.bound / self.gradients.n_examples + 2 * near) / ridge
        noise = self.releases.noise_for(self.training)
        return self._certified(risk.solve(tolerance), moves, noise)

    def perturbed_minimum(self, ridge: float, smoothing: float) -> Vector:
        risk, tolerance = self._risk(ridge, smoothing)
        if not self.private:
            return risk.solve(tolerance)
        dim, n = self.setting.dim, self.gradients.n_examples
        # Nothing is summed on its grid, so that it can be fine.
        units = 2.0**28 * math.sqrt(dim)
        drawn = GaussianSum(dim, self.releases.noise_for(self.training), 1.0, units=units)
        none = drawn.sum(Ellipsoid.ball(dim, risk.bound))
        tilt = drawn.release(none, self.releases.source, self.pool) / n
        tilted = replace(risk, tilt=tilt)
        # The tilt is normal up to the rounding to its grid, which moves the minimiser a little.
        off = drawn.distance_from_normal(self.releases.source.noise)
        rounded = math.sqrt(dim) * off * drawn.grid * risk.bound / n
        # The cover's deviation is seen, so it must not depend on how long this tilt is.
        largest = LARGEST * drawn.deviation + off
        longest = math.sqrt(dim) * largest * drawn.grid * risk.bound / n
        near = tolerance + tilted.rounding(tolerance, longest) + rounded
        cover = self.releases.noise_for(SOLVER_TOLERANCE)
        return self._certified(tilted.solve(tolerance), 2 * near / ridge, cover)

    def _risk(self, ridge: float, smoothing: float) -> tuple[RegularizedRisk, float]:
        """The risk of all rows, and a tolerance whose price is one part in a thousand."""
        bound = self.setting.radius if self.private else math.inf
        risk = RegularizedRisk(self._linear, bound, ridge, smoothing)
        self._once(self.everything)
        self._count(self.everything, risk.shrunk, risk.left_out)
        return risk, 0.0005 * self.setting.radius / self.gradients.n_examples

    def _certified(self, vector: Vector, sensitivity: float, noise_multiplier: float) -> Vector:
        """`vector`, which one example can move by `sensitivity`, with Gaussian noise."""
        dim = self.setting.dim
        # A minimiser is at most some 1e4 n times as long as it can move: counted exactly.
        size = 10_000.0 * self.gradients.n_examples
        grid = GaussianSum(dim, noise_multiplier, size).grid
        mechanism = GaussianSum(dim, noise_multiplier, size, slack=math.sqrt(dim) * grid)
        bounded = mechanism.certified(vector, sensitivity)
        return mechanism.release(bounded, self.releases.source, self.pool)

    def _release(
        self,
        batch: Rows,
        mechanism: GaussianSum,
        bounded: BoundedSum,
        history: NoiseHistory | None = None,
    ) -> Vector:
        self.releases.take(self.training)
        self._count(batch, bounded.clipped, bounded.nonfinite)
        return mechanism.release(bounded, self.releases.source, self.pool, history)

    def _once(self, batch: Rows) -> None:
        if self.private and batch is self.released:
            raise ValueError("Expected one private release a batch, found a second request.")
        self.released = batch

    def _mechanism(self, dim: int) -> GaussianSum:
        batches = self.setting.batches
        size = batches.expected_size
        return GaussianSum(
            dim, self.setting.noise_multiplier, size, self.gradients.slack(size),
            coefficients=coefficients_of(batches.bands),
        )  # fmt: skip

    def _count(self, batch: Rows, clipped: int = 0, nonfinite: int = 0) -> None:
        self.diagnostics.examples += batch.size
        self.diagnostics.clipped += clipped
        self.diagnostics.nonfinite += nonfinite
