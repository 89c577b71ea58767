"""A privacy filter: what runs cost together, also if later ones are chosen by earlier results.

Privacy loss distributions of several runs compose if the settings of all of them are fixed
beforehand. They do not bound the loss where someone looks at the first result and then picks, out
of several runs that would fit, the one that reveals most. A Gaussian remainder does:

- The first run depends on no result. It counts with its privacy loss distribution.
- Every later run is covered by a Gaussian mechanism: by the least μ for which its privacy profile
  δ(ε), ε ≥ 0, in both directions, lies below s + (1 - s) δ_μ(ε). Here δ_μ is the profile of
  N(0, 1) against N(μ, 1), and s is a probability with which the run may show everything.
- Together the later runs count as one Gaussian mechanism of μ² = Σ μ_i², and as a fixed part of
  delta that Σ s_i may not pass.

Guarantees
----------
Let M be the largest μ for which the first run, a Gaussian mechanism of μ and the fixed part of
delta stay within the total. Claim: whatever is chosen after the first run, with Σ μ_i² ≤ m² and
Σ s_i ≤ s, is dominated by a Gaussian mechanism of m that shows everything with probability s. By
induction over the number of runs: the next run is dominated by (μ_1, s_1), and whatever its result
is, the rest by ((m² - μ_1²)^½, s - s_1), the same for every result; dominating pairs of which the
second does not depend on the first result compose (Zhu, Dong, Wang 2022, Theorem 10), and Gaussians
compose to (m, s) exactly. With m = M the total holds. (Gaussian filters: Smith and Thakurta 2022;
Koskela, Tobaben, Honkela 2023.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from privagrad._internal.validate import Vector
from privagrad.privacy.accounting import PrivacyPlan
from privagrad.privacy.composition import gaussian_mu
from privagrad.privacy.events import Event, GaussianEvent, Relation
from privagrad.privacy.totals import sensitivity_of

_SET_ASIDE = 0.2
"""The part of delta that later runs may use for showing everything."""
_FOR_COVERS = 0.1
"""The part of delta, out of that, for what no Gaussian covers: tails of sampled releases."""
_EPSILONS = np.concatenate([[0.0], np.geomspace(1e-9, 700.0, 6000)])
"""Where profiles are compared: half a percent apart."""
_HALVINGS = 40


@dataclass(frozen=True)
class Cover:
    """A Gaussian mechanism of `mu` that shows everything with probability `leak`."""

    mu: float
    leak: float


def epsilon_of_runs(
    runs: Sequence[tuple[Event, ...]], epsilon: float, delta: float, new: tuple[Event, ...] = ()
) -> float:
    """A bound at `delta` for `runs`, oldest first, and a new one, chosen adaptively or not.

    It is infinite where the new run's leaks pass the part of delta that later runs may use, and
    where some runs protect rows and others users, whose costs do not add up.

    Parameters
    ----------
    epsilon, delta : float
        The total: runs within it are covered in proportion to their part of it.
    """
    charged = [events for events in (*runs, new) if events]
    if not charged:
        return 0.0
    if len({event.unit for events in charged for event in events}) > 1:
        return math.inf
    relation = PrivacyPlan(tuple(e for events in charged for e in events)).relation
    first, later = _fixed(charged[0], relation), charged[1:]
    if not later:
        return PrivacyPlan(first).epsilon(delta)
    covers = [_cover(_fixed(events, relation), epsilon, delta) for events in later]
    mu = math.sqrt(math.fsum(cover.mu**2 for cover in covers))
    before = math.fsum(cover.leak for cover in covers[: len(covers) - bool(new)])
    # Runs of ledgers that were written by other rules may have used more already.
    aside = max(_SET_ASIDE * delta, before)
    used = math.fsum(cover.leak for cover in covers)
    # In this form NaN counts as too much.
    if not (math.isfinite(mu) and used <= aside * (1 + 1e-9) and aside < delta):
        return math.inf
    rest = GaussianEvent(
        sensitivity_of(relation) / mu, under=relation, purpose="later runs", unit=first[0].unit
    )
    return PrivacyPlan((*first, rest)).epsilon(delta - aside)


def _fixed(events: tuple[Event, ...], relation: Relation) -> tuple[Event, ...]:
    """The same under the relation of all runs."""
    return tuple(
        replace(event, under=relation)
        if isinstance(event, GaussianEvent) and event.relation is None
        else event
        for event in events
    )


@lru_cache(maxsize=1024)
def _cover(events: tuple[Event, ...], epsilon: float, delta: float) -> Cover:
    """The least Gaussian cover of a run; what its leak takes of delta grows with its part of μ²."""
    leak = math.fsum(e.count * e.leak for e in events if isinstance(e, GaussianEvent))
    gaussian = [e for e in events if isinstance(e, GaussianEvent) and _sees_all_rows(e)]
    if len(gaussian) == len(events):
        squares = (
            e.count * (sensitivity_of(e.relation) / e.noise_multiplier) ** 2 for e in gaussian
        )
        return Cover(math.sqrt(math.fsum(squares)), leak)
    deltas = PrivacyPlan(tuple(_without_leak(event) for event in events)).deltas(_EPSILONS)
    whole = gaussian_mu(epsilon, (1 - _SET_ASIDE) * delta)

    def slack(mu: float) -> float:
        return _FOR_COVERS * delta * min(mu / whole, 1.0) ** 2

    low, high = 0.0, whole
    while not _covers(high, slack(high), deltas):
        low, high = high, 2 * high
        if high > 1e3 * whole:
            return Cover(math.inf, leak)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if _covers(middle, slack(middle), deltas):
            high = middle
        else:
            low = middle
    return Cover(high, leak + slack(high))


def _covers(mu: float, leak: float, deltas: Vector) -> bool:
    """Whether δ(ε) ≤ leak + (1 - leak) δ_μ(ε) for all ε ≥ 0, for bounds δ at `_EPSILONS`.

    Both fall, so each δ is compared with the next δ_μ, and the last one with δ_μ(∞) = 0.
    """
    beside = np.append(_gaussian_profile(mu, _EPSILONS[1:]), 0.0)
    return bool((deltas <= leak + (1 - leak) * beside).all())


def _gaussian_profile(mu: float, epsilons: Vector) -> Vector:
    """δ_μ(ε) = Φ(μ/2 - ε/μ) - e^ε Φ(-μ/2 - ε/μ)."""
    from scipy.special import log_ndtr, ndtr

    second = np.exp(epsilons + log_ndtr(-mu / 2 - epsilons / mu))
    return np.asarray(np.maximum(ndtr(mu / 2 - epsilons / mu) - second, 0.0))


def _sees_all_rows(event: GaussianEvent) -> bool:
    return event.sampling is None or (event.sampling == "poisson" and event.rate == 1)


def _without_leak(event: Event) -> Event:
    return replace(event, leak=0.0) if isinstance(event, GaussianEvent) else event
