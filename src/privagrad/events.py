"""What is released, as values: events, their neighbouring relation, their privacy profiles."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from privagrad import _validate
from privagrad._validate import Vector
from privagrad.sampling import SAMPLINGS, Sampling

Relation = Literal["add-or-remove-one", "replace-one"]
TAIL = 1e-20
"""Probability that the profiles may leave out, counted as certain loss."""


@dataclass(frozen=True)
class GaussianEvent:
    """`count` releases of a sum of vectors of norm ≤ 1 plus N(0, noise_multiplier² I).

    Attributes
    ----------
    noise_multiplier : float
        The noise's standard deviation over the bound on one example's vector; under replace-one
        the sensitivity is twice that bound, and the accountant counts it so.
    count : int
    sampling : {"poisson", "with_replacement", "without_replacement"} or None
        How each release draws its rows; None: all rows.
    n_examples, batch_size : int
        Public; needed where rows are sampled. `batch_size` is the expected one.
    purpose : str
        For people: "gradients", "moments", ...
    under : {"add-or-remove-one", "replace-one"} or None
        The neighbouring relation, where the sampling does not say it.
    leak : float
        The probability with which each release may show everything about one row.
    """

    noise_multiplier: float
    count: int = 1
    sampling: Sampling | None = None
    n_examples: int = 1
    batch_size: int = 1
    purpose: str = "query"
    under: Relation | None = None
    leak: float = 0.0

    def __post_init__(self) -> None:
        # dp-accounting under-accounts integer noise multipliers: always a float.
        noise = _validate.positive("noise_multiplier", self.noise_multiplier)
        object.__setattr__(self, "noise_multiplier", noise)
        if not 0 <= self.leak < 1:
            raise ValueError(f"Expected a leak in [0, 1), found {self.leak!r}.")
        _validate.whole("count", self.count)
        _validate.whole("n_examples", self.n_examples)
        _validate.whole("batch_size", self.batch_size)
        if self.sampling is not None:
            _validate.choice("sampling", self.sampling, SAMPLINGS)
        if self.batch_size > self.n_examples:
            raise ValueError(
                f"Expected batch_size <= n_examples, found batch_size={self.batch_size} and "
                f"n_examples={self.n_examples}."
            )

    @property
    def relation(self) -> Relation | None:
        """The neighbouring relation it is accounted under; None: either."""
        return self.under if self.sampling is None else relation_of(self.sampling)

    def __str__(self) -> str:
        return f"{self.count} x {self.purpose} at noise multiplier {self.noise_multiplier:.4g}"

    @property
    def rate(self) -> float:
        """The probability that one given row is in a given batch."""
        if self.sampling is None:
            return 1.0
        if self.sampling == "with_replacement" and self.n_examples > 1:
            return -math.expm1(self.batch_size * math.log1p(-1 / self.n_examples))
        return self.batch_size / self.n_examples


@dataclass(frozen=True)
class ObjectiveEvent:
    """A minimiser released with Gaussian noise in the objective, over all rows.

    The minimiser θ of Σ_i ℓ_i + Λ/2 ‖θ‖² + ⟨b, θ⟩, b ~ N(0, σ² I), with gradients g_i(θ) = ℓ_i' a_i
    of norm ≤ L: θ ↔ b is one to one. Without row i the same θ comes from b + g_i(θ), and the
    determinant of db/dθ changes by a factor between 1 and 1 + ℓ_i'' ‖a_i‖²/Λ ≤ exp(log_volume). As
    g_i(θ) lies along a_i whatever b is, the privacy loss is at most

        log_volume + μ |Z| + μ²/2,    Z ~ N(0, 1), μ = L/σ = 1/noise_multiplier,

    in both directions (Chaudhuri et al. 2011; Kifer, Smith, Thakurta 2012; the fixed direction of
    linear models: Redberg, Koskela, Wang 2023). Sums of such bounds compose.
    """

    noise_multiplier: float
    log_volume: float
    purpose: str = "objective"
    count: int = 1
    sampling: None = None
    rate: float = 1.0

    def __str__(self) -> str:
        return f"{self.count} x {self.purpose} at noise multiplier {self.noise_multiplier:.4g}"

    @property
    def relation(self) -> Relation:
        return "add-or-remove-one"


@dataclass(frozen=True)
class SelectEvent:
    """The best of a random number of runs, each of which releases `events` with a noisy score.

    The number of runs is geometric of the given mean and stays secret; runs do not see each
    other (Papernot and Steinke 2022).
    """

    events: tuple[GaussianEvent, ...]
    mean: float
    purpose: str = "selection"
    count: int = 1

    @property
    def relation(self) -> Relation:
        return "add-or-remove-one"

    @property
    def sampling(self) -> Sampling | None:
        return self.events[0].sampling

    def __str__(self) -> str:
        inner = ", ".join(str(event) for event in self.events)
        return f"the best of {self.mean:g} runs on average, each of {inner}"


Release = GaussianEvent | ObjectiveEvent
Event = Release | SelectEvent


def relation_of(sampling: Sampling) -> Relation:
    """Add-or-remove-one for Poisson samples, replace-one for samples of fixed size."""
    return "add-or-remove-one" if sampling == "poisson" else "replace-one"


def objective_losses(event: ObjectiveEvent, interval: float) -> tuple[int, Vector, float]:
    """Its privacy loss rounded up to multiples of the interval: first, masses, mass beyond."""
    from scipy.special import ndtr

    mu = 1.0 / event.noise_multiplier
    least = event.log_volume + mu * mu / 2
    first = math.ceil(least / interval)
    edges = interval * np.arange(first, math.ceil((least + 12 * mu) / interval) + 1)
    below = 2 * ndtr(np.maximum(edges - least, 0.0) / mu) - 1
    masses = np.diff(below, prepend=0.0)
    return first, masses, float(2 * ndtr(-(edges[-1] - least) / mu))


def fixed_size_profile(event: GaussianEvent, epsilons: Vector) -> Vector:
    """δ(ε) of one release over a sample of fixed size, under replace-one.

    Let two data sets differ in row i, let K be how often the sample holds row i, p_k = P(K = k),
    η = P(K ≥ 1). Given K = 0 the releases have one distribution, ω₀; so they are
    (1 - η) ω₀ + η ω₁ and (1 - η) ω₀ + η ω₁'. With α' = e^{ε'} = 1 + η (α - 1), α ≥ 1, advanced
    joint convexity (Balle, Barthe, Gaboardi 2018, Theorem 2) gives
    H_α'(·‖·) = η H_α(ω₁ ‖ (1 - β) ω₀ + β ω₁') with β = α'/α ∈ [0, 1], and joint convexity
    bounds that by η ((1 - β) H_α(ω₁ ‖ ω₀) + β H_α(ω₁ ‖ ω₁')).

    Couple the samples: replacing the k draws of row i by other draws, or by the changed row,
    changes k vectors of norm ≤ 1, so that both divergences, given K = k, are at most δ_k(ε): the
    profile of a Gaussian whose means lie 2k apart. Hence (their Theorem 10)

        δ(ε') ≤ Σ_{k ≥ 1} p_k δ_k(log(1 + (e^{ε'} - 1)/η)),    ε' ≥ 0.

    Without replacement K is 0 or 1 and p_1 = η = batch_size/n; with replacement K is binomial.
    The pair of data sets is exchangeable, so for ε' < 0 the bound follows from
    H_α(P‖Q) = 1 - α + α H_{1/α}(Q‖P). The two branches form one convex function of e^{ε'}, hence
    the profile of a dominating pair, whose PLD may be composed.
    """
    from scipy.special import log_ndtr, ndtr

    log_alpha = np.abs(epsilons)
    if event.sampling == "without_replacement":
        counts, weights, tail = np.array([1.0]), np.array([event.rate]), 0.0
    else:
        counts, weights, tail = _repeats(event.n_examples, event.batch_size)
    inner = np.log1p(np.expm1(np.minimum(log_alpha, 700.0)) / event.rate)
    inner = np.where(log_alpha > 700.0, log_alpha - math.log(event.rate), inner)
    deltas = np.full_like(log_alpha, tail)
    for count, weight in zip(counts, weights, strict=True):
        mu = 2.0 * count / event.noise_multiplier
        upper = ndtr(mu / 2 - inner / mu)
        lower = np.exp(np.minimum(inner + log_ndtr(-mu / 2 - inner / mu), 0.0))
        deltas += weight * np.maximum(upper - lower, 0.0)
    negative = -np.expm1(-log_alpha) + np.exp(-log_alpha) * deltas
    return np.minimum(np.where(epsilons < 0, negative, deltas), 1.0)


def _repeats(n_examples: int, draws: int) -> tuple[Vector, Vector, float]:
    """How often `draws` uniform draws hit one row: counts ≥ 1, probabilities, the tail left out."""
    from scipy.stats import binom

    law = binom(draws, 1 / n_examples)
    most = 1
    while most < draws and law.sf(most) > TAIL:
        most += 1
    counts = np.arange(1.0, most + 1)
    return counts, law.pmf(counts), float(law.sf(most))
