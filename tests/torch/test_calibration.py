"""The least noise for a rate and a number of steps."""

from __future__ import annotations

import inspect
import warnings
from typing import Any

import opacus.accountants.utils
import pytest

from privagrad.privacy.accounting import PrivacyPlan
from privagrad.privacy.events import GaussianEvent
from privagrad.torch import get_noise_multiplier


@pytest.mark.parametrize(("rate", "steps"), [(0.01, 500), (0.25, 40), (1.0, 10), (1 / 3, 20)])
def test_the_target_is_met_and_not_exceeded(rate: float, steps: int) -> None:
    noise = get_noise_multiplier(
        target_epsilon=2.0, target_delta=1e-5, sample_rate=rate, steps=steps
    )
    rows = 10**6
    size = -(-rows * rate // 1)  # at least the rate that was asked for
    event = GaussianEvent(noise, steps, "poisson", rows, int(size), "gradients")
    assert 1.99 < PrivacyPlan((event,)).epsilon(1e-5) <= 2.0 + 1e-4


def test_is_near_that_of_opacus() -> None:
    common: dict[str, Any] = {"target_epsilon": 3.0, "target_delta": 1e-5, "sample_rate": 0.02}
    ours = get_noise_multiplier(epochs=5, accountant="prv", **common)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Opacus, about its orders
        theirs = opacus.accountants.utils.get_noise_multiplier(epochs=5, accountant="prv", **common)
    assert ours == pytest.approx(theirs, rel=0.02)
    assert ours == get_noise_multiplier(steps=250, alphas=[2, 3], accountant="rdp", **common)


def test_parameters_are_those_of_opacus() -> None:
    theirs = inspect.signature(opacus.accountants.utils.get_noise_multiplier).parameters
    ours = inspect.signature(get_noise_multiplier).parameters
    assert set(theirs) - {"kwargs"} <= set(ours)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "either epochs or steps"),
        ({"epochs": 1, "steps": 1}, "either epochs or steps"),
        ({"steps": 1, "sample_rate": 1.5}, "at most 1"),
        ({"steps": 1, "sample_rate": 0.0}, "sample_rate"),
        ({"steps": 0}, "steps"),
        ({"steps": 1, "accountant": "zcdp"}, "accountant"),
        ({"steps": 1, "target_delta": 1.0}, "delta"),
    ],
)
def test_impossible_questions_are_refused(options: dict[str, Any], message: str) -> None:
    given = {"target_epsilon": 1.0, "target_delta": 1e-5, "sample_rate": 0.1} | options
    with pytest.raises(ValueError, match=message):
        get_noise_multiplier(**given)


def test_options_that_nobody_has_are_refused() -> None:
    with pytest.raises(TypeError, match="alpha"):
        get_noise_multiplier(
            target_epsilon=1.0, target_delta=1e-5, sample_rate=0.1, steps=1, alpha=2
        )
