"""The categories of columns, found in private rows: noisy counts above a threshold.

A row has at most one category in each of k columns, so that it moves k counts by 1: by 1/sqrt(k)
each it is a vector of norm 1. Gaussian noise of multiplier z protects the counts of categories that
other rows have too. A category of one row alone shows with probability at most leak/k where the
threshold is 1 + s sqrt(k) Φ⁻¹(1 - leak/k), s the noise's standard deviation, which is z times the
sensitivity with its grid: all of a row's own categories stay hidden with probability 1 - leak.
Discrete noise has up to three units more of standard deviation, and the tail of a discrete Gaussian
is at most that of a Gaussian one unit further in (Canonne, Kamath, Steinke 2020).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from privagrad._internal.validate import Integers, Vector
from privagrad.privacy.accounting import PrivacyPlan
from privagrad.privacy.events import GaussianEvent
from privagrad.privacy.mechanism import GaussianSum
from privagrad.privacy.releases import Releases
from privagrad.queries.columns import Share, query_event

PURPOSE = "categories"
_PART, _MOST = 0.08, 0.25
"""Of epsilon, times the root of the number of columns: so the noise in a count stays the same."""

_LEAK = 0.02
"""Of delta; so little that many runs with discovery fit into the part of delta for later runs."""


def discovery(columns: int, epsilon: float, delta: float) -> GaussianEvent:
    """One query for the categories of so many columns."""
    share = Share(PURPOSE, min(_PART * math.sqrt(columns), _MOST))
    return replace(query_event(share, epsilon, delta, "zero-out"), leak=_LEAK * delta)


def categories_event(plan: PrivacyPlan) -> GaussianEvent:
    """The query for categories in a plan."""
    event = plan[PURPOSE]
    if not isinstance(event, GaussianEvent):
        raise TypeError(f"Expected a Gaussian release for categories, found {event}.")
    return event


def _mechanism(columns: int, n: int, event: GaussianEvent) -> GaussianSum:
    return GaussianSum(columns, event.noise_multiplier, n)


def threshold(columns: int, n: int, event: GaussianEvent) -> float:
    """The noisy count of n rows from which on a category shows: rarer ones are unlikely to."""
    from scipy.special import ndtri

    mechanism, root = _mechanism(columns, n, event), math.sqrt(columns)
    quantile = float(-ndtri(event.leak / columns))
    # Votes and noise are rounded to the grid; the last factor is for that of these few products.
    units = 2 + (mechanism.deviation + 3) * quantile
    return (1.0 + root * mechanism.grid * units) * (1 + 1e-9)


def discover(
    counts: Mapping[str, Counter[str]], n: int, releases: Releases
) -> dict[str, tuple[str, ...]]:
    """The categories of each column whose noisy counts pass the threshold, most frequent first.

    `counts` holds, for each column, how many of the n rows have each category: every row counts
    once in each column, or not at all.

    Guarantees
    ----------
    One Gaussian release, the plan's event "categories", with its noise multiplier and leak.
    """
    k = len(counts)
    event = categories_event(releases.plan)
    releases.take(PURPOSE)
    keys = [(name, value) for name in counts for value in sorted(counts[name])]
    mechanism = _mechanism(k, n, event)
    total = mechanism.sum(size=len(keys))
    votes = np.array([counts[name][value] for name, value in keys], dtype=np.int64)
    total.add_by(_vote, votes, k)
    means = mechanism.release(total, releases.source)
    least = threshold(k, n, event)
    kept: dict[str, list[tuple[float, str]]] = {name: [] for name in counts}
    for (name, value), count in zip(keys, means * n * math.sqrt(k), strict=True):
        if count > least:
            kept[name].append((-count, value))
    return {name: tuple(value for _, value in sorted(found)) for name, found in kept.items()}


def _vote(
    total: Vector, per_unit: float, limit: float, counts: Integers, columns: int
) -> tuple[int, int]:
    """Every row votes 1/sqrt(columns) for its category of each column."""
    total += np.rint(limit * per_unit / math.sqrt(columns)) * counts
    return 0, 0
