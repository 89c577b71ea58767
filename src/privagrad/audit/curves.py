"""One training with many canaries, against the whole privacy curve that is claimed.

`measure_run` needs (ε, δ) alone. Gaussian noise does not allow for as many right guesses as (ε, δ)
does, so that it shows a part of the claim only. Here the claim is a trade-off curve f (Mahloujifar,
Melis, Chaudhuri 2024, "Auditing f-differential privacy in one run").

**Statement.** Let u be m fair coins, M(u) a training whose outputs for two u that differ in one
coin are f-DP in both directions, F = 1 - f, and let v guess r coins, whatever M(u) is. Let τ_i be
the probability of i right guesses or more, and W_i = τ_{i+1} + ... + τ_r. For every i < r

    (r - i) τ_i ≥ W_i + m G((i τ_{i+1} + W_i)/m),    G(y) the least x with F(x) ≥ y.

**Proof.** Let C be the number of right guesses. Take a coin j, and u' for u with it flipped. What M
may give such that the guess of j is right for u, and C > i, is what it may give such that that
guess is wrong for u', and C ≥ i there. By f-DP its probability under M(u) is at most F of that
under M(u'). Average over j and u; u' is uniform too, and F is concave:

    E[C/m; C > i] ≤ F(E[(r - C)/m; C ≥ i]).

Summing by parts, the left side is (i τ_{i+1} + W_i)/m, and m times the argument of F on the right
is (r - i) τ_i - W_i.

So if τ_c ≥ α, then going down from c with τ_i replaced by the least that these inequalities and
τ_i ≥ τ_{i+1} allow gives numbers that are no larger than the true τ_i: the right side grows with
every τ. If one of them exceeds 1, then τ_c < α: c right guesses or more are that unlikely.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
from numpy.typing import ArrayLike

from privagrad._internal.jit import kernel
from privagrad._internal.validate import Vector
from privagrad.audit.bounds import (
    Audit,
    Guesses,
    confidence_of,
    gaussian_releases,
    guessed,
    least_epsilon,
)
from privagrad.privacy.accounting import PrivacyPlan
from privagrad.privacy.events import Event, Relation, Release
from privagrad.privacy.totals import Total

_EPSILONS = np.concatenate([[0.0], np.geomspace(1e-3, 60.0, 300)])
"""Lines δ(ε) + e^ε x, of which F is the least: fewer lines only make F larger."""

_STEEPEST = 10.0
"""Lines of slope e^{-ε} are used up to here; beyond it rounding would matter."""

_ROUNDING = 1e-11
_ABOVE_ONE = 1 + 1e-6


def measure_run_by_curve(
    included: ArrayLike,
    scores: ArrayLike,
    events: Iterable[Event],
    delta: float,
    confidence: float = 0.95,
    attack: str = "guesses which canaries were in one training",
) -> Audit:
    """A lower bound on epsilon from one training with many canaries, tighter than `measure_run`.

    Parameters
    ----------
    included : array of bool, of shape (m,)
        Which canaries were in the training; each by an independent fair coin.
    scores : array of shape (m,)
        Larger where a canary seems to be included; computed without `included`.
    events : iterable of events
        What is claimed to be released.
    delta : float
        At which epsilon is stated.
    confidence : float
        The probability that the bound holds.
    attack : str
        What was done, in words.

    Notes
    -----
    The measured epsilon is that of the claimed releases with all noise multiplied by the largest
    factor that the number of right guesses does not refute. So it takes the kind of the noise for
    granted, as `measure_release` does, but not that canaries are independent. The guesses are those
    of `measure_run`, several numbers of which are tried, each at its share of 1 - confidence.
    """
    claimed = tuple(events)
    releases = gaussian_releases(claimed)
    tries = guessed(included, scores)
    alpha = (1 - confidence_of(confidence)) / len(tries)
    canaries = np.asarray(included).size
    plan = PrivacyPlan(claimed)

    best: list[Guesses] = []

    def refuted(scaled: tuple[Release, ...]) -> bool:
        lines = lines_of(scaled, plan.relation, delta)
        found = [g for g in tries if too_many(canaries, g.guesses, g.right, alpha, *lines)]
        best[:] = found[:1] or best
        return bool(found)

    measured = least_epsilon(releases, delta, refuted)
    rates = best[0].rates if best else (0.5, 0.5)
    return Audit(plan.epsilon(delta), measured, delta, confidence, attack, canaries, *rates)


def lines_of(
    events: tuple[Release, ...], relation: Relation, delta: float
) -> tuple[Vector, Vector]:
    """Epsilons and their δ: F(x) ≤ δ + e^ε x, and F(x) ≤ 1 - e^{-ε} (1 - δ - x)."""
    total = Total.of(events, relation, delta, fine=False)
    return _EPSILONS, np.minimum(total.deltas(_EPSILONS), 1.0)


@kernel()
def too_many(
    canaries: int, guesses: int, right: int, alpha: float, epsilons: Vector, deltas: Vector
) -> bool:
    """Whether so many right guesses or more have a probability below alpha under the claim."""
    tail = above = alpha  # τ_{i+1} and W_i, of i = right - 1
    for i in range(right - 1, -1, -1):
        y = (i * tail + above) / canaries
        x = 0.0
        for k in range(epsilons.size):
            grown = math.exp(epsilons[k])
            x = max(x, (y - deltas[k]) / grown)
            if epsilons[k] <= _STEEPEST:
                x = max(x, 1 - deltas[k] - (1 - y) * grown - _ROUNDING * grown)
        tail = max(tail, (above + canaries * x) / (guesses - i))
        if tail > _ABOVE_ONE:
            return True
        above += tail
    return False
