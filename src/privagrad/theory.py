"""The paper's theorems as functions: moments, radii, upper and lower bounds, advice.

The paper hides constants in O(·). With those below, each upper bound is proved for the average of
x_0 ... x_{T-1} and for gradients that are bounded radially:

- c = 1/2 in Lemma 1: T = n²/(2b²) steps with noise sqrt(log(1/δ))/(bε) compose, in the limit of
  many small steps, to ε + ε²/(4 log(1/δ)) at δ.
- 3/2 before the regret: diam/2 + diam at α = diam. Theorem 7 states 1, which its proof does not
  give.
- 1 before gradients and noise, from √(x + y) ≤ √x + √y, where the paper has √2.
- 1 in Example 1: a centred σ²-sub-Gaussian X has E[|X|^p]^{1/p} ≤ σ√p.
- p = max(log d, log(nε), 2). At the paper's log d, eq. "pagan-subgaussian-bound" drops a factor
  (nε)^{1/log d}.

Theorems are numbered in the order of the paper; 6 to 9 are those of the appendix.
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


@dataclass(frozen=True)
class Bound:
    """An upper bound on the expected excess loss, by its three causes.

    `optimization` is diam · R(T), the bound without privacy; `privacy` is what the noise costs, and
    `bias` what moving gradients into the ellipsoid costs.
    """

    optimization: float
    privacy: float
    bias: float

    @property
    def total(self) -> float:
        """The sum of the three."""
        return self.optimization + self.privacy + self.bias


@dataclass(frozen=True, eq=False)
class Advice:
    """A method, C and B of its ellipsoid as in its theorem, and the bound of the theorem."""

    method: str
    scale: Vector
    radius: float
    bound: Bound


@dataclass(frozen=True)
class Theorem:
    """Theorem 1 on PASAN or, if `adaptive`, Theorem 2 on PAGAN.

    Theorem 1 has diam = diam_2 and |a| = sqrt(Σ_j a_j²), Theorem 2 diam_∞ and |a| = Σ_j |a_j|.
    """

    adaptive: bool

    def radius(
        self,
        moment: float,
        p: float,
        scale: ArrayLike,
        domain: Domain,
        n: int,
        epsilon: float,
        delta: float,
    ) -> float:
        """B = 2 G_2p(C) (diam_{C⁻¹} nε / (diam |C^{-1/2}| sqrt(log(1/δ))))^{1/p}.

        Parameters
        ----------
        moment : float
            G_2p(C).
        p : float
            At least 1; inf gives 2 G_∞(C).
        scale : array of shape (d,)
            C.
        domain : Domain
            A bounded domain.
        n : int
            The number of rows.
        epsilon, delta : float
            The budget.
        """
        weights = validate.positive_vector("scale", scale)
        gain = domain.scaled_diameter(weights) / self._noise(weights, domain, n, epsilon, delta)
        return 2 * validate.positive("moment", moment) * math.pow(gain, 1 / _order(p))

    def bound(
        self,
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
        """The bound at any radius B > 0, Theorem 8 (PASAN) or 9 (PAGAN) of the appendix.

        optimization = 3/2 diam |σ| / √T,
        privacy = 3/2 diam B |C^{-1/2}| sqrt(log(1/δ) / c) / (nε),
        bias = diam_{C⁻¹} (2 G_2p(C))^p / ((p - 1) B^{p-1}).

        The bias is at most diam_{C⁻¹} 2 G_2p(C), and at p = inf diam_{C⁻¹} max(0, G_∞(C) - B).

        Parameters
        ----------
        sigma : array of shape (d,)
            Root mean squares of the coordinates of single examples' gradients. Where the ellipsoid
            moves no gradient, those of a batch's mean are enough.
        ellipsoid : Ellipsoid
            C and B.
        moment, p, domain, n, epsilon, delta
            As for `radius`.
        steps : int
            T.
        """
        weights = ellipsoid.scale
        deviations = validate.positive_vector("sigma", sigma, dim=weights.size)
        regret = self._add_up(deviations) / math.sqrt(validate.integer("steps", steps))
        noise = self._noise(weights, domain, n, epsilon, delta)
        return Bound(
            optimization=_REGRET * self.diameter(domain, weights.size) * regret,
            privacy=_REGRET * ellipsoid.radius * noise / math.sqrt(_LEMMA_1),
            bias=domain.scaled_diameter(weights) * _projection_bias(moment, p, ellipsoid.radius),
        )

    def diameter(self, domain: Domain, dim: int) -> float:
        """diam_2 or diam_∞ of the domain; refuses domains of one point or without bound."""
        value = domain.max_diameter(dim) if self.adaptive else domain.euclidean_diameter(dim)
        if not 0 < value < math.inf:
            raise ValueError(
                f"Expected a bounded domain of more than one point, found {domain!r} of diameter "
                f"{value:g}. Give for example domain=Box(-1, 1)."
            )
        return value

    def _add_up(self, sizes: Vector) -> float:
        return float(sizes.sum() if self.adaptive else np.linalg.norm(sizes))

    def _noise(
        self, weights: Vector, domain: Domain, n: int, epsilon: float, delta: float
    ) -> float:
        """diam |C^{-1/2}| sqrt(log(1/δ)) / (nε)."""
        size = validate.integer("n", n) * validate.positive("epsilon", epsilon)
        per_row = math.sqrt(-math.log(validate.delta_of(delta))) / size
        return self.diameter(domain, weights.size) * self._add_up(weights**-0.5) * per_row


_THEOREM_1, _THEOREM_2 = Theorem(adaptive=False), Theorem(adaptive=True)
_METHODS = {
    "dp-sgd": (_THEOREM_1, 0.0),
    "dp-adagrad": (_THEOREM_2, 0.0),
    "pasan": (_THEOREM_1, SCALE_POWERS["pasan"]),
    "pagan": (_THEOREM_2, SCALE_POWERS["pagan"]),
}

pasan_radius = _THEOREM_1.radius
"""B of Theorem 1: see `Theorem.radius`."""
pagan_radius = _THEOREM_2.radius
"""B of Theorem 2: see `Theorem.radius`."""
pasan_bound = _THEOREM_1.bound
"""Theorem 1 at any radius: see `Theorem.bound`."""
pagan_bound = _THEOREM_2.bound
"""Theorem 2 at any radius: see `Theorem.bound`."""


def lipschitz_moment(norms: ArrayLike, p: float) -> float:
    """Ĝ_p(S; C) = (mean of norms^p)^{1/p}, eq. "empirical_lipobj". Not private.

    Parameters
    ----------
    norms : array of shape (n,)
        The examples' gradient norms in ‖·‖_C, as from `Ellipsoid.norm`.
    p : float
        At least 1; inf for the largest norm.
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
    """μ + √p sqrt(Σ_j C_jj σ_j²) ≥ G_p(C): Example 1, eq. "lip-sub-Gaussian", with O(1) = 1.

    Parameters
    ----------
    sigma : array of shape (d,)
        Sub-Gaussian parameters of the coordinates of Z - E[Z].
    scale : array of shape (d,)
        C.
    p : float
        At least 1.
    mu : float
        A bound on ‖∇g(x) + E[Z]‖_C.
    """
    deviations = validate.positive_vector("sigma", sigma)
    weights = validate.positive_vector("scale", scale, dim=deviations.size)
    return mu + math.sqrt(_order(p)) * float(np.linalg.norm(np.sqrt(weights) * deviations))


def optimal_scale(sigma: ArrayLike, method: str) -> Vector:
    """The C that minimises the method's privacy term (end of Section 3), up to a factor.

    Parameters
    ----------
    sigma : array of shape (d,)
        Scales of the gradients' coordinates.
    method : str
        "pasan" for C = 1/σ, "pagan" for σ^{-4/3}, "dp-sgd" or "dp-adagrad" for ones.
    """
    _, power = _METHODS[validate.choice("method", method, _METHODS)]
    scale: Vector = validate.positive_vector("sigma", sigma) ** power
    return scale


def biased_sgd_bound(
    gradients: ArrayLike,
    step_size: ArrayLike,
    domain: Domain,
    bias: float = 0.0,
    scale: ArrayLike | None = None,
    adaptive: bool = False,
) -> float:
    """Theorem 6 on biased SGD (Algorithm 4), as it is stated.

    diam_2² / (2T α_{T-1}) + Σ_k α_k ‖ĝ_k‖² / (2T) + diam_{C⁻¹} · bias.

    Its mean over runs bounds the expected excess loss of `Descent.queried_average`; it bounds that
    of each run where all of ĝ_k - f'(x_k) counts as bias.

    Parameters
    ----------
    gradients : array of shape (T, d)
        ĝ_0 ... ĝ_{T-1} of one run.
    step_size : float or array of shape (T,)
        α_k, which must not increase.
    domain : Domain
        A bounded domain.
    bias : float
        The mean over k of E‖g̃_k - g_k‖_C: what moves the gradients besides noise of mean zero.
    scale : array of shape (d,), optional
        C, by default ones.
    adaptive : bool
        Whether α_k is `step_size` / sqrt(Σ_{i ≤ k} ‖ĝ_i‖²); `step_size` is then one number.
    """
    taken = _gradients(gradients)
    steps, dim = len(taken), taken.shape[1]
    squares = np.square(taken).sum(axis=1)
    if adaptive:
        inverse = np.sqrt(np.cumsum(squares)) / validate.positive("step_size", step_size)
    else:
        given = np.full(steps, step_size) if np.ndim(step_size) == 0 else step_size
        inverse = 1 / validate.positive_vector("step_size", given, dim=steps)
        if np.any(np.diff(inverse) < 0):
            raise ValueError("Expected step sizes that do not increase, found a larger one later.")
    moved = squares > 0  # without a gradient there is no step, and 0/0 is 0
    lengths = float((squares[moved] / inverse[moved]).sum())
    regret = _THEOREM_1.diameter(domain, dim) ** 2 * float(inverse[-1]) + lengths
    return regret / (2 * steps) + _bias_term(domain, bias, scale, dim)


def biased_adagrad_bound(
    gradients: ArrayLike,
    domain: Domain,
    bias: float = 0.0,
    scale: ArrayLike | None = None,
    step_size: float | None = None,
) -> float:
    """Theorem 7 on biased AdaGrad (Algorithm 5), with the constant that its proof gives.

    (diam_∞² / (2α) + α) Σ_j sqrt(Σ_k ĝ_kj²) / T + diam_{C⁻¹} · bias.

    Parameters
    ----------
    gradients, domain, bias, scale
        As for `biased_sgd_bound`.
    step_size : float, optional
        α, by default diam_∞ of the domain.
    """
    taken = _gradients(gradients)
    steps, dim = len(taken), taken.shape[1]
    diameter = _THEOREM_2.diameter(domain, dim)
    alpha = diameter if step_size is None else validate.positive("step_size", step_size)
    factor = diameter**2 / (2 * alpha) + alpha
    regret = factor * float(np.sqrt(np.square(taken).sum(axis=0)).sum())
    return regret / steps + _bias_term(domain, bias, scale, dim)


def unknown_moments_bound(
    sigma: ArrayLike, ratio: float, domain: Domain, n: int, epsilon: float, delta: float, steps: int
) -> Bound:
    """Theorem 3: PAGAN with Ĉ_j = (r σ̂_j)^{-4/3}/4 for the worst σ̂ that Algorithm 3 may return.

    Privacy and bias are O(1) diam_∞ r (Σ_j σ_j^{2/3})^{3/2} log(d/δ) / (nε) where nε is at most a
    power of d: `Theorem.bound` with the noise of σ̂ = 2σ, G_2p of σ̂ = σ/2 and p = max(log d, 2).
    The floor d^{-3/2} max_j σ_j holds on both sides of eq. "sigma-hat-good".

    Parameters
    ----------
    sigma : array of shape (d,)
        Root mean squares of the coordinates of z.
    ratio : float
        The moment ratio r > 1 of z.
    domain, n, steps
        As for `Theorem.bound`.
    epsilon, delta : float
        PAGAN's own budget: the moments cost as much again.
    """
    deviations, r = validate.positive_vector("sigma", sigma), _ratio(ratio)
    p = max(math.log(deviations.size), 2.0)
    floored = np.maximum(deviations, deviations.max() * deviations.size**-1.5)
    least, most = (optimal_scale(r * factor * floored, "pagan") / 4 for factor in (2.0, 0.5))
    # Moment ratio r: E[z_j^{2p}]^{1/2p} ≤ √(2p) r σ_j, as for a sub-Gaussian of parameter r σ_j.
    moment = subgaussian_lipschitz_moment(r * deviations, most, 2 * p)
    ellipsoid = Ellipsoid(least, pagan_radius(moment, p, least, domain, n, epsilon, delta))
    return pagan_bound(deviations, ellipsoid, moment, p, domain, n, epsilon, delta, steps)


def box_lower_bound(sigma: ArrayLike, n: int, epsilon: float) -> float:
    """(Σ_j σ_j^{2/3})^{3/2} / (nε log^{5/2} d): Theorem 4, for the domain [-1, 1]^d.

    Every (ε, δ)-private method has this expected excess of -⟨x, z⟩, up to O(1), on some rows
    |z_j| ≤ σ_j if √d log d ≤ nε and δ is smaller than all powers of 1/n. Here log d is at least 1.
    """
    deviations, size = _lower_bound_setting(sigma, n, epsilon, log_power=1)
    total = math.pow((deviations ** (2 / 3)).sum(), 1.5)
    return total / (size * math.pow(_log(deviations.size), 2.5))


def ball_lower_bound(sigma: ArrayLike, n: int, epsilon: float) -> float:
    """Σ_j σ_j / (nε log d): Theorem 5, for the Euclidean unit ball.

    It needs √d ≤ nε; the rest and the parameters are as for `box_lower_bound`.
    """
    deviations, size = _lower_bound_setting(sigma, n, epsilon, log_power=0)
    return float(deviations.sum()) / (size * _log(deviations.size))


def required_rows(dim: int, ratio: float, epsilon: float, delta: float, beta: float) -> int:
    """Theorem 3's n, with which Algorithm 3 is within a factor 2 with probability 1 - β.

    1000 r² log(8d/β) max(T √d log² r log(T/δ)/ε, r²) with d = `dim`, the moment ratio r > 1, the
    budget of Algorithm 3, the probability of failure β, and T = 3/2 log d, here at least 1.
    """
    d, r = validate.integer("dim", dim), _ratio(ratio)
    budget, tail = validate.positive("epsilon", epsilon), validate.delta_of(delta)
    if not validate.positive("beta", beta) < 1:
        raise ValueError(f"Expected beta in (0, 1), found beta={beta!r}.")
    rounds = max(1.5 * math.log(d), 1.0)
    private = rounds * math.sqrt(d) * math.log(r) ** 2 * math.log(rounds / tail) / budget
    return math.ceil(1000 * r**2 * math.log(8 * d / beta) * max(private, r**2))


def advice(
    sigma: ArrayLike, n: int, epsilon: float, delta: float, domain: Domain, steps: int | None = None
) -> list[Advice]:
    """The methods by their bounds, least first: the first is the recommendation.

    Theorems 1 and 2 at their own radii. DP-SGD and DP-AdaGrad count as PASAN and PAGAN with C = I.

    Parameters
    ----------
    sigma : array of shape (d,)
        The gradients' coordinates are centred and σ_j²-sub-Gaussian.
    n, epsilon, delta, domain
        As for `Theorem.bound`.
    steps : int, optional
        T, by default c n² = n²/2, Lemma 1's for batches of one.
    """
    deviations = validate.positive_vector("sigma", sigma)
    rows = validate.integer("n", n)
    size = rows * validate.positive("epsilon", epsilon)
    p = max(math.log(deviations.size), math.log(size), 2.0)
    count = max(1, round(_LEMMA_1 * rows**2)) if steps is None else steps
    advised = []
    for method, (theorem, _) in _METHODS.items():
        scale = optimal_scale(deviations, method)
        moment = subgaussian_lipschitz_moment(deviations, scale, 2 * p)
        shape = Ellipsoid(scale, theorem.radius(moment, p, scale, domain, n, epsilon, delta))
        bound = theorem.bound(deviations, shape, moment, p, domain, n, epsilon, delta, count)
        advised.append(Advice(method, scale, shape.radius, bound))
    return sorted(advised, key=lambda row: row.bound.total)


def _projection_bias(moment: float, p: float, radius: float) -> float:
    """E‖π(g) - g‖_C ≤ (2G)^p / ((p - 1) B^{p-1}) (Lemma "projection-bias"), and at most 2G."""
    order, most = _order(p), 2 * validate.positive("moment", moment)
    if order == math.inf:
        return max(moment - radius, 0.0)
    if order == 1:
        return most
    log_share = (order - 1) * math.log(most / radius) - math.log(order - 1)
    return most * math.exp(min(log_share, 0.0))


def _gradients(value: ArrayLike) -> Vector:
    taken = np.asarray(value, dtype=np.float64)
    if taken.ndim != 2 or taken.size == 0 or not np.isfinite(taken).all():
        raise ValueError(
            f"Expected finite gradients of shape (T, d), one row a step; found shape {taken.shape}."
        )
    return taken


def _bias_term(domain: Domain, bias: float, scale: ArrayLike | None, dim: int) -> float:
    weights = np.ones(dim) if scale is None else validate.positive_vector("scale", scale, dim=dim)
    return domain.scaled_diameter(weights) * validate.not_negative("bias", bias)


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
