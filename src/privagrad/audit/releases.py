"""One release, drawn many times: the strongest attack on the mechanism itself."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Unpack

import numpy as np

from privagrad.audit.bounds import Audit, measure_release
from privagrad.audit.configuration import Configuration, Keywords, calibrated, private_gradients
from privagrad.privacy.accounting import PrivacyPlan
from privagrad.privacy.events import releases_per_draw


def one_release(
    epsilon: float,
    delta: float = 1e-5,
    *,
    draws: int = 1_000_000,
    confidence: float = 0.95,
    **configuration: Unpack[Keywords],
) -> Audit:
    """Attack single releases of private gradients, each of which claims (epsilon, delta).

    Half of the canaries are in the table. Their gradients are huge, each along a coordinate of its
    own: they are bounded to the edge of the ellipsoid, which is the worst case. The attacker knows
    all other rows and reads one coordinate of the private gradient, which is the likelihood-ratio
    test. A table that is sampled gives a mixture, for which the same test is the best one.

    Parameters
    ----------
    epsilon, delta : float
        What one release claims.
    draws : int
        How many scores are drawn, with and without the row together.
    confidence : float
        The probability that the lower bound holds.
    **configuration
        The fields of `Configuration`.

    Notes
    -----
    Under sampling of a fixed size the canaries of one release depend on each other, which the
    confidence does not count.
    """
    chosen = Configuration(**configuration)
    plan = calibrated(chosen, epsilon, delta, 1)
    epoch = max(map(releases_per_draw, plan.events))
    steps = epoch * max(1, math.ceil(draws / (epoch * chosen.canaries)))
    repeated = _repeated(plan, steps)
    included = np.arange(chosen.canaries) % 2 == 0
    found = private_gradients(chosen, chosen.rows(included), repeated, steps, delta)
    scores = np.stack(found) / chosen.ellipsoid.noise_std
    return measure_release(
        scores[:, included], scores[:, ~included], plan.events, delta, confidence,
        f"one release, {chosen.name}",
    )  # fmt: skip


def _repeated(plan: PrivacyPlan, steps: int) -> PrivacyPlan:
    """The plan of `steps` releases, each with the noise of the plan's only one."""
    (event,) = plan.events
    return PrivacyPlan((replace(event, count=steps),), plan.training)
