"""Events are values that the accountant can trust: nothing in them lowers the cost of others."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from privagrad.linear import Choices
from privagrad.methods import METHODS
from privagrad.methods.minimize import _batches
from privagrad.privacy.accounting import PrivacyPlan
from privagrad.privacy.events import Event, GaussianEvent, ObjectiveEvent, SelectEvent, merged
from privagrad.privacy.ledger import Account

QUERY = GaussianEvent(30.0)
COUNTED: tuple[Event, ...] = (QUERY, ObjectiveEvent(2.0, 0.1), SelectEvent((QUERY,), 5.0))


@pytest.mark.parametrize("volume", [-100.0, -1e-9, math.nan, math.inf, -math.inf])
def test_the_volume_of_an_objective_never_pays_other_events_off(volume: float) -> None:
    with pytest.raises(ValueError, match="log_volume >= 0"):
        ObjectiveEvent(1.0, volume)
    assert PrivacyPlan((ObjectiveEvent(2.0, 0),)).epsilon(1e-5) > 0


@pytest.mark.parametrize("noise", [0.0, -1.0, math.nan, math.inf])
def test_noise_is_positive_and_finite(noise: float) -> None:
    for kind in (GaussianEvent, lambda z: ObjectiveEvent(z, 0.1)):
        with pytest.raises(ValueError, match="noise_multiplier > 0"):
            kind(noise)


@pytest.mark.parametrize("mean", [0.0, 0.5, -3.0, math.nan, math.inf])
def test_a_selection_makes_one_run_or_more_on_average(mean: float) -> None:
    with pytest.raises(ValueError, match="mean"):
        SelectEvent((QUERY,), mean)


@pytest.mark.parametrize(
    "make",
    [
        lambda: SelectEvent((), 5.0),
        lambda: SelectEvent((ObjectiveEvent(1.0, 0.1),), 5.0),  # type: ignore[arg-type]
        lambda: ObjectiveEvent(1.0, "much"),  # type: ignore[arg-type]
    ],
)
def test_what_is_no_price_is_refused(make: Callable[[], Event]) -> None:
    with pytest.raises(TypeError, match="Expected"):
        make()


def test_an_objective_is_over_all_rows() -> None:
    with pytest.raises(ValueError, match="all rows"):
        ObjectiveEvent(1.0, 0.1, rate=0.01)
    with pytest.raises(ValueError, match="all rows"):
        ObjectiveEvent(1.0, 0.1, sampling="poisson")  # type: ignore[arg-type]


@pytest.mark.parametrize("event", COUNTED, ids=lambda event: type(event).__name__)
@pytest.mark.parametrize("count", [0, -1, 1.5, True])
def test_counts_are_whole_numbers_of_releases(event: Event, count: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="count"):
        replace(event, count=count)


@pytest.mark.parametrize("event", COUNTED, ids=lambda event: type(event).__name__)
def test_counts_of_numpy_add_up_without_wrapping_around(event: Event) -> None:
    runs = [replace(event, count=np.uint8(200))] * 2  # type: ignore[arg-type]
    assert merged(runs) == (replace(event, count=400),)
    assert type(runs[0].count) is int


def test_counts_of_numpy_cost_what_they_count() -> None:
    runs = [GaussianEvent(50.0, np.uint8(200))] * 2  # type: ignore[arg-type]
    spent = Account("people", 3.0, 1e-6, None, ()).spent_with(runs)
    assert spent == PrivacyPlan((GaussianEvent(50.0, 400),)).epsilon(1e-6)
    sampled = GaussianEvent(2.0, 1, "poisson", np.int16(30_000), np.int16(20_000))  # type: ignore[arg-type]
    assert type(sampled.n_examples) is type(sampled.batch_size) is int


def test_batch_sizes_and_steps_of_numpy_become_integers() -> None:
    size: Any = np.uint8(200)
    batches = _batches(METHODS["pagan"], 1000, size, size, "poisson")
    assert type(batches.steps) is type(batches.batch_size) is int
    choices = Choices(np.uint8(200), np.uint8(100))  # type: ignore[arg-type]
    assert type(choices.steps) is type(choices.batch_size) is int
