"""The paper's theorems as functions: moments, radii, upper and lower bounds, advice.

The paper hides constants in O(·) and leaves Lemma 1's c open. Ours follow; with them each upper
bound is proved, for the average of x_0 ... x_{T-1} and gradients bounded radially:

- c = 1/2 in Lemma 1. T = n²/(2b²) steps with noise sqrt(log(1/δ))/(bε) compose, in the limit of
  many small steps, to ε + ε²/(4 log(1/δ)) at δ. An accountant's noise for any other T leaves as
  much noise in the average of the gradients.
- 3/2 before the regret, diam/2 + diam at α = diam. The appendix has it for SGD; its theorem on
  biased AdaGrad states 1, which its proof does not give.
- 1 before gradients and noise, from √(x + y) ≤ √x + √y, where the paper has √2.
- 1 in Example 1: a centred σ²-sub-Gaussian X has E[|X|^p]^{1/p} ≤ σ√p.
- p = max(log d, log(nε), 2) where we choose p. The paper takes log d, at which Theorems 1 and 2
  give 1/(nε)^{1 - 1/p}: eq. "pagan-subgaussian-bound" drops a factor (nε)^{1/log d}, which is a
  constant only where n is a power of d.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from privagrad._internal import validate
from privagrad._internal.validate import Vector
from privagrad.geometry.domains import Domain
from privagrad.geometry.ellipsoid import Ellipsoid
from privagrad.geometry.scales import SCALE_POWERS

_LEMMA_1 = 0.5
_REGRET = 1.5
_SCALE_POWERS = {"dp-sgd": 0.0, "dp-adagrad": 0.0, **SCALE_POWERS}
_ADAPTIVE = ("dp-adagrad", "pagan")


@dataclass(frozen=True)
class Bound:
    """An upper bound on the expected excess loss, by its three causes.

    Attributes
    ----------
    optimization : what the method pays without privacy, the paper's diam · R(T)
    privacy : the noise
    bias : gradients moved into the ellipsoid
    """

    optimization: float
    privacy: float
    bias: float

    @property
    def total(self) -> float:
        return self.optimization + self.privacy + self.bias


@dataclass(frozen=True, eq=False)
class Advice:
    """One method as the theorems would run it, and what they promise for it."""

    method: str
    scale: Vector
    radius: float
    bound: Bound


def lipschitz_moment(norms: ArrayLike, p: float) -> float:
    """Ĝ_p(S; C) = (mean of norms^p)^{1/p} (eq. "empirical_lipobj"); p may be inf.

    `norms`, of shape (n,), are the examples' gradient norms in ‖·‖_C, as from `Ellipsoid.norm`.
    A moment of private rows is itself private.
    """
    sizes, order = validate.vector("norms", norms), _order(p)
    if sizes.size == 0 or not np.all(sizes >= 0):
        raise ValueError("Expected one or more norms, all of them numbers >= 0.")
    largest = float(sizes.max())
    if order == math.inf or largest in (0.0, math.inf):
        return largest
    return largest * math.pow(np.mean((sizes / largest) ** order), 1 / order)


def subgaussian_lipschitz_moment(
    sigma: ArrayLike, scale: ArrayLike, p: float, mu: float = 0.0
) -> float:
    """μ + √p sqrt(Σ_j C_jj σ_j²) ≥ G_p(C), Example 1 (eq. "lip-sub-Gaussian") with O(1) = 1.

    `sigma` are sub-Gaussian parameters of Z - E[Z]; `mu` bounds ‖∇g(x) + E[Z]‖_C.
    """
    deviations = validate.positive_vector("sigma", sigma)
    weights = validate.positive_vector("scale", scale, dim=deviations.size)
    return mu + math.sqrt(_order(p)) * float(np.linalg.norm(np.sqrt(weights) * deviations))


def optimal_scale(sigma: ArrayLike, method: str) -> Vector:
    """The C that minimises the method's privacy term (end of Section 3), up to a factor.

    1/σ for "pasan", σ^(-4/3) for "pagan"; ones for "dp-sgd" and "dp-adagrad", where A = I.
    """
    validate.choice("method", method, _SCALE_POWERS)
    scale: Vector = validate.positive_vector("sigma", sigma) ** _SCALE_POWERS[method]
    return scale


def pasan_radius(
    moment: float, p: float, scale: ArrayLike, domain: Domain, n: int, epsilon: float, delta: float
) -> float:
    """B of Theorem 1 as stated there, from moment = G_2p(C); at p = inf 2 G_∞(C)."""
    return _Geometry(False, scale, domain).radius(moment, p, _per_row(n, epsilon, delta))


def pagan_radius(
    moment: float, p: float, scale: ArrayLike, domain: Domain, n: int, epsilon: float, delta: float
) -> float:
    """B of Theorem 2 as stated there, from moment = G_2p(C); at p = inf 2 G_∞(C)."""
    return _Geometry(True, scale, domain).radius(moment, p, _per_row(n, epsilon, delta))


def pasan_bound(
    sigma: ArrayLike,
    ellipsoid: Ellipsoid,
    moment: float,
    p: float,
    domain: Domain,
    n: int,
    epsilon: float,
    delta: float,
    steps: int,
) -> Bound:
    """Theorem 1 at any radius B > 0, Theorem "convergence-SGD(general)" of the appendix.

    optimization : 3/2 diam_2 sqrt(Σ_j σ_j² / T)
    privacy : 3/2 diam_2 B sqrt(tr(C⁻¹) log(1/δ) / c) / (nε)
    bias : diam_{C⁻¹} (2 G_2p(C))^p / ((p - 1) B^{p-1})

    Ours: 3/2, c = 1/2, and that the bias ends at diam_{C⁻¹} 2 G_2p(C), which no projection
    exceeds, and is diam_{C⁻¹} max(0, G_∞(C) - B) at p = inf.

    Parameters
    ----------
    sigma : array of shape (d,)
        Root mean squares of the coordinates of single examples' gradients; where the ellipsoid
        moves none of them, those of a batch's mean gradient g^k do.
    ellipsoid : C and B
    moment, p : G_2p(C) and the p it belongs to
    """
    geometry = _Geometry(False, ellipsoid.scale, domain)
    return geometry.bound(sigma, ellipsoid.radius, moment, p, _per_row(n, epsilon, delta), steps)


def pagan_bound(
    sigma: ArrayLike,
    ellipsoid: Ellipsoid,
    moment: float,
    p: float,
    domain: Domain,
    n: int,
    epsilon: float,
    delta: float,
    steps: int,
) -> Bound:
    """Theorem 2 at any radius B > 0, Theorem "private-adagrad(general)" of the appendix.

    optimization : 3/2 diam_∞ Σ_j σ_j / √T
    privacy : 3/2 diam_∞ B tr(C^{-1/2}) sqrt(log(1/δ) / c) / (nε)
    bias : as in `pasan_bound`, with whose constants and parameters
    """
    geometry = _Geometry(True, ellipsoid.scale, domain)
    return geometry.bound(sigma, ellipsoid.radius, moment, p, _per_row(n, epsilon, delta), steps)


def unknown_moments_bound(
    sigma: ArrayLike,
    ratio: float,
    domain: Domain,
    n: int,
    epsilon: float,
    delta: float,
    steps: int,
) -> Bound:
    """Theorem 3: PAGAN with Ĉ_j = (r σ̂_j)^{-4/3}/4 for the worst σ̂ that Algorithm 3 may return.

    Beside the optimisation O(1) diam_∞ r (Σ_j σ_j^{2/3})^{3/2} log(d/δ) / (nε). Ours: the
    constants of `pagan_bound`, with the noise of the largest σ̂ = 2σ and G_2p of the least σ/2;
    the floor d^{-3/2} max_j σ_j on both sides of eq. "sigma-hat-good", which the paper forgets on
    the right; σ of any size. p = max(log d, 2), for the theorem assumes no higher moments; hence
    the stated rate only where nε is at most a power of d. `epsilon` and `delta` are PAGAN's own:
    the moments cost as much again.
    """
    deviations, r = validate.positive_vector("sigma", sigma), _ratio(ratio)
    p, per_row = max(math.log(deviations.size), 2.0), _per_row(n, epsilon, delta)
    floored = np.maximum(deviations, deviations.max() * deviations.size**-1.5)
    least, most = ((r * factor * floored) ** (-4 / 3) / 4 for factor in (2.0, 0.5))
    # Moment ratio r: E[z_j^{2p}]^{1/2p} ≤ √(2p) r σ_j, as for a sub-Gaussian of parameter r σ_j.
    moment = subgaussian_lipschitz_moment(r * deviations, most, 2 * p)
    geometry = _Geometry(True, least, domain)
    radius = geometry.radius(moment, p, per_row)
    return geometry.bound(deviations, radius, moment, p, per_row, steps)


def box_lower_bound(sigma: ArrayLike, n: int, epsilon: float) -> float:
    """(Σ_j σ_j^{2/3})^{3/2} / (nε log^{5/2} d): Theorem 4, for the domain [-1, 1]^d.

    Every (ε, δ)-private method has this expected excess of -⟨x, z⟩ on some rows |z_j| ≤ σ_j.
    Holds where √d log d ≤ nε and δ is smaller than all powers of 1/n. The constant 1 is as the
    theorem states it; its proof drops O(1) factors. Ours: log d counts as at least 1, which gives
    d = 1 a meaning and makes the bound smaller at d = 2.
    """
    deviations, size = _lower_bound_setting(sigma, n, epsilon, log_power=1)
    total = math.pow((deviations ** (2 / 3)).sum(), 1.5)
    return total / (size * math.pow(_log(deviations.size), 2.5))


def ball_lower_bound(sigma: ArrayLike, n: int, epsilon: float) -> float:
    """Σ_j σ_j / (nε log d): Theorem 5, for the Euclidean unit ball.

    Holds where √d ≤ nε; the rest is as in `box_lower_bound`.
    """
    deviations, size = _lower_bound_setting(sigma, n, epsilon, log_power=0)
    return float(deviations.sum()) / (size * _log(deviations.size))


def required_rows(dim: int, ratio: float, epsilon: float, delta: float, beta: float) -> int:
    """Theorem 3's n, with which Algorithm 3 is within a factor 2 with probability 1 - beta.

    1000 r² log(8d/β) max(T √d log² r log(T/δ)/ε, r²) with T = 3/2 log d; ours: T at least 1.
    """
    d, r = validate.integer("dim", dim), _ratio(ratio)
    budget, tail = validate.positive("epsilon", epsilon), validate.delta_of(delta)
    if not validate.positive("beta", beta) < 1:
        raise ValueError(f"Expected beta in (0, 1), found beta={beta!r}.")
    rounds = max(1.5 * math.log(d), 1.0)
    private = rounds * math.sqrt(d) * math.log(r) ** 2 * math.log(rounds / tail) / budget
    return math.ceil(1000 * r**2 * math.log(8 * d / beta) * max(private, r**2))


def advice(
    sigma: ArrayLike,
    n: int,
    epsilon: float,
    delta: float,
    domain: Domain,
    steps: int | None = None,
) -> list[Advice]:
    """The methods by their bounds, least first: the first is the recommendation.

    Theorems 1 and 2 at their own radii, for gradients whose coordinates are centred and
    σ_j²-sub-Gaussian. DP-SGD and DP-AdaGrad count as PASAN and PAGAN with C = I. `steps` defaults
    to c n² = n²/2, Lemma 1's for batches of one.
    """
    deviations = validate.positive_vector("sigma", sigma)
    per_row = _per_row(n, epsilon, delta)
    p = max(math.log(deviations.size), math.log(n * epsilon), 2.0)
    count = max(1, round(_LEMMA_1 * n**2)) if steps is None else steps
    rows = []
    for method in _SCALE_POWERS:
        scale = optimal_scale(deviations, method)
        geometry = _Geometry(method in _ADAPTIVE, scale, domain)
        moment = subgaussian_lipschitz_moment(deviations, scale, 2 * p)
        radius = geometry.radius(moment, p, per_row)
        bound = geometry.bound(deviations, radius, moment, p, per_row, count)
        rows.append(Advice(method, scale, radius, bound))
    return sorted(rows, key=lambda row: row.bound.total)


class _Geometry:
    """What Theorems 1 and 2 differ in: the diameter, the trace, how gradients add up."""

    def __init__(self, adaptive: bool, scale: ArrayLike, domain: Domain) -> None:
        weights = validate.positive_vector("scale", scale)
        self.adaptive, self.dim = adaptive, weights.size
        whole = domain.max_diameter if adaptive else domain.euclidean_diameter
        self.diameter = whole(self.dim)
        if not 0 < self.diameter < math.inf:
            raise ValueError(
                f"Expected a bounded domain of more than one point, found {domain!r} of diameter "
                f"{self.diameter:g}. Give for example domain=Box(-1, 1)."
            )
        self.scaled_diameter = domain.scaled_diameter(weights)
        self.trace = self.add_up(weights**-0.5)

    def add_up(self, sizes: Vector) -> float:
        return float(sizes.sum() if self.adaptive else np.linalg.norm(sizes))

    def radius(self, moment: float, p: float, per_row: float) -> float:
        gain = self.scaled_diameter / (self.diameter * self.trace * per_row)
        return 2 * validate.positive("moment", moment) * math.pow(gain, 1 / _order(p))

    def bound(
        self, sigma: ArrayLike, radius: float, moment: float, p: float, per_row: float, steps: int
    ) -> Bound:
        deviations = validate.positive_vector("sigma", sigma, dim=self.dim)
        price = _REGRET * self.diameter
        return Bound(
            optimization=price
            * self.add_up(deviations)
            / math.sqrt(validate.integer("steps", steps)),
            privacy=price * radius * self.trace * per_row / math.sqrt(_LEMMA_1),
            bias=self.scaled_diameter * _projection_bias(moment, p, radius),
        )


def _projection_bias(moment: float, p: float, radius: float) -> float:
    """E‖π(g) - g‖_C ≤ (2G)^p / ((p - 1) B^{p-1}) (Lemma "projection-bias"), and at most 2G."""
    order, most = _order(p), 2 * validate.positive("moment", moment)
    if order == math.inf:
        return max(moment - radius, 0.0)
    if order == 1:
        return most
    log_share = (order - 1) * math.log(most / radius) - math.log(order - 1)
    return most * math.exp(min(log_share, 0.0))


def _per_row(n: int, epsilon: float, delta: float) -> float:
    """sqrt(log(1/δ)) / (nε)."""
    size = validate.integer("n", n) * validate.positive("epsilon", epsilon)
    return math.sqrt(-math.log(validate.delta_of(delta))) / size


def _lower_bound_setting(
    sigma: ArrayLike, n: int, epsilon: float, log_power: int
) -> tuple[Vector, float]:
    deviations = validate.positive_vector("sigma", sigma)
    size = validate.integer("n", n) * validate.positive("epsilon", epsilon)
    least = math.sqrt(deviations.size) * _log(deviations.size) ** log_power
    if size < least:
        raise ValueError(
            f"Expected n * epsilon >= {least:.4g}, {'√d log d' if log_power else '√d'} at "
            f"d = {deviations.size}; found {size:.4g}. The theorem needs more rows or budget."
        )
    return deviations, size


def _log(dim: int) -> float:
    return max(math.log(dim), 1.0)


def _order(p: float) -> float:
    order = validate.positive("p", p, allow_inf=True)
    if order < 1:
        raise ValueError(f"Expected p >= 1, found p={p!r}.")
    return order


def _ratio(ratio: float) -> float:
    r = validate.positive("ratio", ratio)
    if r <= 1:
        raise ValueError(f"Expected ratio > 1, found ratio={ratio!r}: log r must be positive.")
    return r
