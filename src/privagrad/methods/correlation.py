"""Correlated noise in `minimize`: for which runs it is sound, and how many bands it has."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from privagrad.methods._base import Method, Schedule
from privagrad.privacy.bands import Correlation, choose_bands, with_bands
from privagrad.privacy.events import Event
from privagrad.privacy.sampling import Batches


def correlated(
    rule: Method,
    correlation: Correlation,
    batches: Batches,
    budget: tuple[float, float],
    schedule: Schedule,
    other_events: Iterable[Event],
) -> Batches:
    """The batches of a run within (epsilon, delta), drawn for as many bands as its noise has.

    The noise of single releases is larger than independent noise. For methods that divide by the
    squares of their gradients "auto" means independent noise: PAGAN did worse with the other.
    """
    if correlation == "auto" and not rule.adds_up:
        return batches
    steps = np.arange(batches.steps)
    sizes = np.ones(steps.size) if schedule == "constant" else 1 - steps / batches.steps
    bands = choose_bands(correlation, batches, *budget, sizes, other_events)
    return with_bands(batches, bands)


def require_one_ellipsoid(
    rule: Method, private: bool, batches: Batches, groups: Any, ellipsoid: Any
) -> None:
    """Refuse correlated noise where it is not known to be private, or would not cancel."""
    if not private:
        raise ValueError(
            "Expected a budget epsilon for correlated noise, found a run without noise: leave "
            "correlation= out."
        )
    if batches.sampling != "poisson":
        raise ValueError(
            f"Expected sampling='poisson' with correlation=, found {batches.sampling!r}: a row "
            "must not be drawn in two of the steps whose noise is correlated, for which groups of "
            "rows take turns, each drawn as a Poisson sample."
        )
    if groups is not None:
        raise ValueError(
            "Expected no groups= with correlation=, found some: turns are those of rows, and a "
            "user with rows in several of them would count more than once."
        )
    if rule.one_shot or type(rule).gradient is not Method.gradient:
        raise ValueError(
            f"Expected a method that releases one sum of gradients a step in one ellipsoid, with "
            f"correlation=, found {rule.name!r}: noise in other coordinates does not cancel. Use "
            "'pagan', 'pasan', 'dp-adagrad', 'dp-sgd' or 'mirror-descent'."
        )
    if callable(ellipsoid):
        raise ValueError(
            "Expected one Ellipsoid for the whole run with correlation=, found a function: noise "
            "of another shape does not cancel."
        )
