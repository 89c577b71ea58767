"""The composition of Gaussian releases and releases with noise in the objective."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from privagrad._internal.validate import Vector
from privagrad.privacy.composition import Composition, gaussian_delta, gaussian_epsilon
from privagrad.privacy.events import GaussianEvent, Relation, Release, single
from privagrad.privacy.privacy_loss import loss_tails, on_grid

_LEAST_POINTS, _COARSE_POINTS, _FINE_POINTS = 2 * 10**4, 10**5, 10**6
_COARSE_PER_DEVIATION, _FINE_PER_DEVIATION = 4, 20
_MOST_PER_TOTAL_DEVIATION = 2**18
_MOST_POINTS = 2 * 10**6
_LEFT_OUT = 1e-5
"""Part of delta that losses at the far end may cost by counting as infinite."""


@dataclass(frozen=True)
class Total:
    """The composition of releases.

    Attributes
    ----------
    mu : float
        All Gaussian releases over all rows are one, of means `mu` standard deviations apart.
    leak : float
        The probability that any release shows everything.
    sampled : tuple of Composition
        The composition of all releases where rows are sampled, in both directions of the
        neighbouring relation; empty where there are none.
    """

    mu: float
    leak: float
    sampled: tuple[Composition, ...]

    @classmethod
    def of(cls, events: tuple[Release, ...], relation: Relation, delta: float, fine: bool) -> Total:
        sensitivity = sensitivity_of(relation)
        square = log_kept = 0.0
        sampled: dict[Release, int] = {}
        for event in events:
            one = replace(single(event), purpose="")
            if isinstance(one, GaussianEvent):
                log_kept += event.count * math.log1p(-one.leak)
                one = replace(one, leak=0.0)
            if isinstance(one, GaussianEvent) and _sees_all_rows(one):
                draws = event.count // one.count
                square += draws * (sensitivity / one.noise_multiplier) ** 2
            else:
                sampled[one] = sampled.get(one, 0) + event.count // one.count
        mu, leak = math.sqrt(square), -math.expm1(log_kept)
        if not sampled:
            return cls(mu, leak, ())
        if mu > 0:
            sampled[GaussianEvent(sensitivity / mu)] = 1
        tail = _LEFT_OUT * delta / sum(sampled.values())
        directions = (True, False) if relation == "zero-out" else (True,)
        tails = [[loss_tails(e, sensitivity, way, tail) for e in sampled] for way in directions]
        widest = max(each.high - each.low for way in tails for each in way)
        interval = max(_interval(sampled, sensitivity, fine), widest / _MOST_POINTS)
        compositions = []
        for way in tails:
            grids = (on_grid(each, interval) for each in way)
            parts = list(zip(grids, sampled.values(), strict=True))
            compositions.append(Composition(parts, interval))
        return cls(mu, leak, tuple(compositions))

    def epsilon(self, delta: float) -> float:
        left = (delta - self.leak) / (1 - self.leak)
        if left <= 0:
            return math.inf
        if not self.sampled:
            return gaussian_epsilon(left, self.mu)
        return max(composition.epsilon(left) for composition in self.sampled)

    def deltas(self, epsilons: Vector) -> Vector:
        if self.sampled:
            found = np.max([c.deltas(epsilons) for c in self.sampled], axis=0)
        else:
            found = np.array([gaussian_delta(float(e), self.mu) for e in epsilons])
        return np.asarray(self.leak + (1 - self.leak) * found)


def _sees_all_rows(event: GaussianEvent) -> bool:
    return event.sampling is None or (event.sampling != "with_replacement" and event.rate == 1)


def sensitivity_of(relation: Relation | None) -> float:
    """How far one row moves a sum of vectors of norm at most 1."""
    return 2.0 if relation == "replace-one" else 1.0


def _interval(events: dict[Release, int], sensitivity: float, fine: bool) -> float:
    """Discretisation whose own variance is a small part of the privacy loss's variance."""
    variance = reach = 0.0
    for event, count in events.items():
        mu = sensitivity / event.noise_multiplier
        # An epoch of random allocation is `event.count` releases, a block of bands like one.
        releases = count * (1 if getattr(event, "bands", 1) > 1 else event.count)
        variance += releases * event.rate**2 * math.expm1(min(mu * mu, 50.0))
        reach = max(reach, mu * mu + 20 * mu)
    deviation = math.sqrt(variance / sum(events.values()))
    per_deviation = _FINE_PER_DEVIATION if fine else _COARSE_PER_DEVIATION
    points = _FINE_POINTS if fine else _COARSE_POINTS
    coarsest = max(1e-2, reach / _LEAST_POINTS)
    interval = max(min(deviation / per_deviation, coarsest), reach / points)
    total = math.sqrt(min(variance, sum(events.values()) * reach**2))
    return max(interval, total / _MOST_PER_TOTAL_DEVIATION)
