"""How fast the bounded gradients of a model pull noise back: their mean derivative, privately.

Gradients that are bounded pull back less than the loss bends. The derivative is that of the bounded
ones, over a window of margins, so that losses with kinks have one too.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from privagrad._internal.jit import kernel
from privagrad._internal.validate import Vector
from privagrad.geometry.ellipsoid import Ellipsoid
from privagrad.glm.examples import Examples
from privagrad.glm.gradients import LinearGradients
from privagrad.glm.kernels import all_norms
from privagrad.glm.losses import Loss, class_slopes, lipschitz, slope
from privagrad.privacy.releases import Releases
from privagrad.queries.columns import Share
from privagrad.queries.second_moments import Factors, SecondMoments, private_second_moments

CURVATURE = Share("curvature", 0.1)

_SMOOTH, _KINKED = 0.5, 1.0
"""Half the width of the window of margins that slopes are compared over."""

_USUAL = {"logistic": 0.3, "softmax": 0.6, "hinge": 0.5, "quantile": 0.5}
"""The bound on a row's part, in units of the bound on its gradient over the largest slope, times
the median norm; 1 for other losses. Rows beyond it count less, which states too much noise rather
than too little."""


def private_curvature(
    gradients: LinearGradients,
    weights: Vector,
    ellipsoid: Ellipsoid,
    norm: float,
    releases: Releases,
) -> SecondMoments:
    """The mean derivative of the bounded gradients at these weights, of shape (dim, dim).

    For one output it is E[c a aᵀ], where c is how fast the bounded slope grows from somewhat below
    the row's margin to somewhat above it. For several it is E[C ⊗ a aᵀ], where C is the second
    derivative of the loss in the margins; where the gradient is bounded, that of what its bound
    leaves, a change of its direction.

    Parameters
    ----------
    gradients : GlmGradients or PartitionedGradients
        The loss and the rows.
    weights : array of shape (dim,)
        From earlier releases.
    ellipsoid : Ellipsoid
        The ball that gradients are bounded to.
    norm : float
        The median norm of the rows, from an earlier release.
    releases : Releases
        What pays for the query.

    Guarantees
    ----------
    One Gaussian release, the plan's event "curvature", by `private_second_moments`: the factor of a
    row depends on that row and the weights alone.
    """
    loss, outputs = gradients.loss, gradients.outputs
    bound = _USUAL.get(loss.name, 1.0) * ellipsoid.radius / loss.lipschitz * norm
    factors = Factors(_factors_of, (loss, outputs, weights, ellipsoid), outputs)
    return private_second_moments(
        gradients.examples, math.sqrt(bound), releases, CURVATURE.purpose, factors
    )


def _factors_of(
    examples: Examples, loss: Loss, outputs: int, weights: Vector, ellipsoid: Ellipsoid
) -> Vector:
    """How fast the bounded gradient of each row changes with its margins."""
    points = weights.reshape(outputs, -1).T if outputs > 1 else weights
    margins = examples.rows.margins(points).reshape(-1, outputs)
    norms = all_norms(examples.rows.flat, ellipsoid.whitening)
    factors = np.zeros((len(margins), outputs, outputs))
    row_by_row = *loss.key, margins, examples.targets, norms, factors
    if loss.name == "softmax":
        _softmax_factors(*row_by_row)
    elif loss.multiclass:
        _hinge_factors(*row_by_row, _KINKED)
    else:
        window = _KINKED if math.isinf(loss.smoothness) else _SMOOTH
        _factors(*row_by_row, window, loss.regression)
    return factors


@kernel()
def _factors(
    code: int, parameter: float, margins: Any, targets: Vector, norms: Vector, factors: Any,
    window: float, by_rows: bool,
) -> None:  # fmt: skip
    """The slope of each row's bounded loss, for norms in units of the bound."""
    for i in range(margins.shape[0]):
        most = 1.0 / norms[i] if norms[i] > 0.0 else math.inf
        above = slope(code, parameter, margins[i, 0] + window, targets[i])
        below = slope(code, parameter, margins[i, 0] - window, targets[i])
        if by_rows:
            shrink = min(1.0, most / lipschitz(code, parameter))
            factors[i, 0, 0] = shrink * (above - below) / (2 * window)
        else:
            change = min(max(above, -most), most) - min(max(below, -most), most)
            factors[i, 0, 0] = change / (2 * window)


@kernel()
def _softmax_factors(
    code: int, parameter: float, margins: Any, targets: Vector, norms: Vector, factors: Any
) -> None:
    """diag(p) - p pᵀ; of a bounded gradient along u = p - e_y, what is left across it."""
    outputs = margins.shape[1]
    slopes, across = np.empty(outputs), np.empty(outputs)
    for i in range(margins.shape[0]):
        slopes[:] = margins[i]
        label = np.int64(targets[i])
        class_slopes(code, slopes, label)
        size = 0.0
        for c in range(outputs):
            size += slopes[c] * slopes[c]
        size = math.sqrt(size)
        bounded = size * norms[i] > 1.0
        shrink = 1.0 / (size * norms[i]) if bounded else 1.0
        chances = slopes.copy()
        chances[label] += 1.0
        along, both = 0.0, 0.0  # of C û, with û = u/‖u‖: its products with p and û
        if bounded:
            for c in range(outputs):
                along += chances[c] * slopes[c] / size
            for c in range(outputs):
                across[c] = chances[c] * (slopes[c] / size - along)
            for c in range(outputs):
                both += across[c] * slopes[c] / size
        for c in range(outputs):
            for e in range(outputs):
                value = (chances[c] if c == e else 0.0) - chances[c] * chances[e]
                if bounded:
                    value -= (across[c] * slopes[e] + slopes[c] * across[e]) / size
                    value += both * slopes[c] * slopes[e] / (size * size)
                factors[i, c, e] = shrink * value


@kernel()
def _hinge_factors(
    code: int, parameter: float, margins: Any, targets: Vector, norms: Vector, factors: Any,
    window: float,
) -> None:  # fmt: skip
    """u uᵀ over the window's width, u = e_rival - e_y, where the window holds the kink."""
    outputs = margins.shape[1]
    above, below = np.empty(outputs), np.empty(outputs)
    for i in range(margins.shape[0]):
        label = np.int64(targets[i])
        above[:], below[:] = margins[i], margins[i]
        above[label] += window
        below[label] -= window
        class_slopes(code, above, label)
        class_slopes(code, below, label)
        most = 1.0 / norms[i] if norms[i] > 0.0 else math.inf
        shrink = min(1.0, most / lipschitz(code, parameter)) / (2 * window)
        for c in range(outputs):
            for e in range(outputs):
                factors[i, c, e] = shrink * (below[c] - above[c]) * (below[e] - above[e])
