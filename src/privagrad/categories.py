"""The categories of columns, found in private rows: noisy counts above a threshold.

A row has at most one category in each of k columns, so that it moves k counts by 1: by 1/sqrt(k)
each it is a vector of norm 1. Gaussian noise of multiplier z protects the counts of categories that
other rows have too. A category of one row alone shows with probability at most leak/k where the
threshold is 1 + z sqrt(k) Φ⁻¹(1 - leak/k): all of a row's own categories stay hidden with
probability 1 - leak.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping

import numpy as np

from privagrad.events import GaussianEvent
from privagrad.geometry import Ellipsoid
from privagrad.mechanism import ULP, GaussianSum
from privagrad.noise import RandomSource
from privagrad.queries import Share, query_events

_PART, _MOST = 0.08, 0.25
"""Of epsilon, times the root of the number of columns: so the noise in a count stays the same."""

_LEAK = 0.02
"""Of delta; so little that many runs with discovery fit into the part of delta for later runs."""


def discovery(columns: int, epsilon: float, delta: float) -> GaussianEvent:
    """One query for the categories of so many columns."""
    share = Share("categories", min(_PART * math.sqrt(columns), _MOST))
    [event] = query_events([share], epsilon, delta, "zero-out")
    return GaussianEvent(event.noise_multiplier, purpose="categories", leak=_LEAK * delta)


def threshold(columns: int, event: GaussianEvent) -> float:
    """The noisy count from which on a category shows: rarer ones are unlikely to."""
    from scipy.special import ndtri

    deviation = math.sqrt(columns) * event.noise_multiplier * (1 + 1e-5)
    return 1.001 + deviation * float(-ndtri(event.leak / columns))


def discover(
    counts: Mapping[str, Counter[str]], n: int, event: GaussianEvent, source: RandomSource
) -> dict[str, tuple[str, ...]]:
    """The categories of each column whose noisy counts pass the threshold, most frequent first.

    `counts` holds, for each column, how many of the n rows have each category: every row counts
    once in each column, or not at all.

    Guarantees
    ----------
    One Gaussian release with the event's noise multiplier and leak.
    """
    k = len(counts)
    keys = [(name, value) for name in counts for value in sorted(counts[name])]
    mechanism = GaussianSum(k, event.noise_multiplier, n)
    vote = np.floor((1 - 8 * ULP) / (math.sqrt(k) * mechanism.grid))
    units = vote * np.array([counts[name][value] for name, value in keys], dtype=np.float64)
    means = mechanism.release(units, Ellipsoid.ball(max(len(keys), 1), 1.0), source)
    least = threshold(k, event)
    kept: dict[str, list[tuple[float, str]]] = {name: [] for name in counts}
    for (name, value), count in zip(keys, means * n * math.sqrt(k), strict=True):
        if count > least:
            kept[name].append((-count, value))
    return {name: tuple(value for _, value in sorted(found)) for name, found in kept.items()}
