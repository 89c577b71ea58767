"""The least noise for a sampling rate and a number of steps, as Opacus asks for it."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

from privagrad._internal import validate
from privagrad.privacy.accounting import PrivacyPlan
from privagrad.privacy.events import GaussianEvent
from privagrad.torch.accountant import IGNORED_OPTIONS

ACCOUNTANTS = ("pld", "prv", "rdp", "gdp")
"""Names that are accepted; privacy loss distributions are always used."""


def get_noise_multiplier(
    *,
    target_epsilon: float,
    target_delta: float,
    sample_rate: float,
    epochs: int | None = None,
    steps: int | None = None,
    accountant: str = "pld",
    epsilon_tolerance: float = 0.01,
    **options: Any,
) -> float:
    """The least noise multiplier with which a training keeps within (epsilon, delta).

    Parameters
    ----------
    target_epsilon, target_delta : float
    sample_rate : float
        The probability with which each row is in a Poisson batch.
    epochs, steps : int, optional
        One of them. An epoch has 1/sample_rate steps, rounded up.
    accountant, epsilon_tolerance, **options : Any
        As in Opacus; nothing depends on them. The target is never exceeded.

    Returns
    -------
    float
    """
    validate.choice("accountant", accountant, ACCOUNTANTS)
    validate.positive("epsilon_tolerance", epsilon_tolerance)
    validate.known_options("get_noise_multiplier", options, IGNORED_OPTIONS)
    if not validate.positive("sample_rate", sample_rate) <= 1:
        raise ValueError(
            f"Expected sample_rate above 0 and at most 1, found sample_rate={sample_rate!r}."
        )
    if (epochs is None) == (steps is None):
        raise ValueError(
            f"Expected either epochs or steps, found epochs={epochs!r} and steps={steps!r}."
        )
    # A floating-point number is a fraction: the rate is exactly the one that was given.
    rate = Fraction(float(sample_rate))
    if steps is None:
        steps = validate.integer("epochs", epochs) * math.ceil(1 / float(sample_rate) - 1e-9)
    event = GaussianEvent(
        1.0, validate.integer("steps", steps), "poisson", rate.denominator, rate.numerator,
        "gradients",
    )  # fmt: skip
    plan = PrivacyPlan.calibrate_event(event, target_epsilon, target_delta)
    return plan.noise_multiplier
