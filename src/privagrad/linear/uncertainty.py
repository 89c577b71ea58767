"""How much of a model's coefficients is noise, from releases alone."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from privagrad._internal.validate import Vector
from privagrad.methods import Setting
from privagrad.queries.calibration import Calibration
from privagrad.queries.moments import Columns
from privagrad.queries.second_moments import SecondMoments

_DOUBT = 0.5
"""What is taken off eigenvalues, in units of the largest that noise alone has, 2 σ sqrt(d)."""

_MOST_WEIGHTS, _MOST_PRODUCTS, _MOST_FACTORS = 200, 4e9, 5e7


def curvature_is_affordable(n: int, dim: int, outputs: int) -> bool:
    """Whether the curvature of so many weights takes no longer than the training, about."""
    return dim <= _MOST_WEIGHTS and n * dim**2 <= _MOST_PRODUCTS and n * outputs**2 <= _MOST_FACTORS


@dataclass(frozen=True)
class CoefficientNoise:
    """Standard deviations of the noise in coefficients and intercepts, in original units."""

    coef: NDArray[np.float64]
    intercept: Vector


@dataclass(frozen=True)
class NoisySteps:
    """Gradient descent from a fixed start: x ← x - η_t (gradient + noise).

    Attributes
    ----------
    sizes : array of shape (T,)
        The step sizes η_t.
    noise : float
        The standard deviation of the noise in a coordinate of a step's gradient.
    sampling : float
        The mean square of what sampling the rows adds to a step's gradient, at most.
    """

    sizes: Vector
    noise: float
    sampling: float = 0.0

    @classmethod
    def of(cls, setting: Setting) -> NoisySteps:
        """The steps of a setting whose ellipsoid is a ball."""
        batches = setting.batches
        sizes = np.array([setting.step_size_at(step) for step in range(batches.steps)])
        left_out = 1 - batches.batch_size / batches.n_examples
        noise = setting.noise_multiplier * setting.radius / batches.batch_size
        return cls(sizes, noise, left_out * setting.radius**2 / batches.batch_size)

    def gains(self, curvature: Vector) -> Vector:
        """Variance of the last point along directions of these curvatures, for noise of variance 1.

        The recursion v ← (1 - η h)² v + η² is that of x ← x - η (h x + noise). Where η h > 2 plain
        steps would diverge; those of bounded gradients go to and fro.
        """
        gains = np.zeros_like(curvature)
        for size in self.sizes:
            gains = np.square(np.minimum(np.abs(1 - size * curvature), 1.0)) * gains + size**2
        return gains


def weight_covariance(steps: NoisySteps, curvature: SecondMoments) -> NDArray[np.float64]:
    """Covariance of trained weights over trainings that differ in their noise alone.

    Along an eigenvector of the curvature, noise that a step adds is pulled back by all later steps,
    by the factors 1 - η h. The noise in the matrix has eigenvalues between ±2 σ sqrt(d): half of
    that is taken off h, which is at least 0, because too small a curvature states too much noise.
    The variance of sampled rows is shared out as the curvature is.
    """
    values, vectors = np.linalg.eigh(curvature.matrix)
    doubt = _DOUBT * 2 * curvature.noise * math.sqrt(values.size)
    seen = np.maximum(values, doubt)
    added = steps.noise**2 + steps.sampling * seen / max(float(seen.sum()), doubt)
    spread = added * steps.gains(np.maximum(values - doubt, 0.0))
    return np.asarray((vectors * spread) @ vectors.T)


def largest_variances(steps: NoisySteps, moments: Vector, outputs: int) -> Vector:
    """The noise of all steps together, as if nothing pulled it back: an upper bound.

    The variance of sampled rows is shared out as these second moments of the columns are.
    """
    added = steps.noise**2 + steps.sampling * moments / (outputs * max(float(moments.sum()), 1.0))
    return np.tile(added * np.square(steps.sizes).sum(), outputs)


def solution_covariance(
    moments: SecondMoments, weights: Vector, inverse: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Covariance of weights w = B b that a noisy matrix A + E and vector b + e gave.

    To first order the weights move by B (e - E w), B being the `inverse`, shrunk or not. The
    covariance of e - E w is noise² ((1 + ‖w‖²) I + w wᵀ).
    """
    middle = (1 + float(weights @ weights)) * inverse @ inverse
    along = inverse @ weights
    return np.asarray(moments.noise**2 * (middle + np.outer(along, along)))


def coefficient_noise(
    covariance: NDArray[np.float64],
    weights: Vector,
    columns: Columns,
    unit: float = 1.0,
    calibration: Calibration | None = None,
) -> CoefficientNoise:
    """The noise of standardised weights in original units.

    Parameters
    ----------
    covariance : array of shape (k d, k d), (k, d, d) or (k d,)
        Of the trained weights; of each output's own weights; or their variances alone.
    weights : array of shape (k, d)
        The trained weights of k outputs, the last one of each that of the intercept if there is
        one more than columns.
    columns : Columns
        Centres and units.
    unit : float
        The unit of the target.
    calibration : Calibration, optional
        What the weights are multiplied by and shifted by, with its noise.
    """
    outputs, size = weights.shape
    dim = columns.unit.size
    found = Calibration(1.0, np.zeros(outputs)) if calibration is None else calibration
    scale = unit / columns.unit
    constant = np.zeros(size)  # the intercept's share of each weight
    if size > dim:
        constant[:dim], constant[dim] = -scale * columns.centre, unit
    coef, intercept = np.empty((outputs, dim)), np.empty(outputs)
    for k, (row, block) in enumerate(zip(weights, _blocks(covariance, outputs), strict=True)):
        variances = block if block.ndim == 1 else np.diag(block)
        coef[k] = np.hypot(found.factor * np.sqrt(variances), found.factor_noise * row)[:dim]
        square = np.square(constant) @ block if block.ndim == 1 else constant @ block @ constant
        square = found.factor**2 * square + (found.factor_noise * float(constant @ row)) ** 2
        intercept[k] = math.sqrt(square + found.shift_noise**2)
    return CoefficientNoise(scale * coef, intercept)


def _blocks(covariance: NDArray[np.float64], outputs: int) -> list[NDArray[np.float64]]:
    """The covariances, or variances, of each output's own weights."""
    if covariance.ndim == 3:
        return list(covariance)
    size = len(covariance) // outputs
    parts = [slice(k * size, (k + 1) * size) for k in range(outputs)]
    return [covariance[p] if covariance.ndim == 1 else covariance[p, p] for p in parts]
