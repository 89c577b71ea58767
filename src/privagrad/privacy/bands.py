"""The public rule that chooses how many bands the noise of a run has."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

import numpy as np

from privagrad._internal import validate
from privagrad._internal.validate import Vector
from privagrad.privacy.accounting import PrivacyPlan
from privagrad.privacy.correlation import INDEPENDENT, MOST_BANDS, coefficients_of, inverse_of
from privagrad.privacy.events import Event, training_event
from privagrad.privacy.sampling import Batches

Correlation = Literal["auto"] | int
"""How many releases in a row have correlated noise; "auto": as many as `choose_bands` says."""

_TRIED = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32)
_PLACES = 256
"""At so many steps the weights of a release's noise in later sums are computed, not at all."""


class Choice(NamedTuple):
    """A number of bands, its noise multiplier, and the error that is predicted for it."""

    bands: int
    noise_multiplier: float
    error: float


def predicted_error(
    coefficients: tuple[float, ...], noise_multiplier: float, step_sizes: Vector
) -> float:
    """The root mean square over all steps t of the noise in Σ_{s ≤ t} α_s M_s, per coordinate.

    M = z |c| C^{-1} w, so that it is z |c| ‖A C^{-1}‖_F/√T, A_{ts} = α_s for s ≤ t, in units of
    what one row may add. The norms of up to 256 columns stand for all.
    """
    steps = step_sizes.size
    inverse = inverse_of(coefficients, steps)
    edges = np.linspace(0, steps, min(steps, _PLACES) + 1).astype(int)
    square = 0.0
    for first, stop in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        middle = (first + stop - 1) // 2
        sums = np.cumsum(step_sizes[middle:] * inverse[: steps - middle])
        square += (stop - first) * float(np.square(sums).sum())
    return noise_multiplier * math.hypot(*coefficients) * math.sqrt(square / steps)


def with_bands(batches: Batches, bands: int) -> Batches:
    """The same batches, drawn for this many bands: for one from all rows, as they are."""
    if bands == 1:
        return batches
    return replace(batches, sampling="cyclic_poisson", bands=bands)


def choices(
    batches: Batches,
    epsilon: float,
    delta: float,
    step_sizes: Vector | None = None,
    other_events: Iterable[Event] = (),
    most: int = MOST_BANDS,
) -> Sequence[Choice]:
    """What is predicted for 1, 2, 3, 4, 5, 6, 8, ... bands, as far as the rows and steps go.

    Parameters
    ----------
    batches : Batches
        Poisson samples of the run.
    epsilon, delta : float
        The budget.
    step_sizes : array of shape (steps,), optional
        The public sizes of all steps; None: all are the same.
    other_events : iterable of events
        What is paid from the same budget.
    most : int
        The largest number of bands.
    """
    sizes = np.ones(batches.steps) if step_sizes is None else step_sizes
    most = min(most, batches.steps, batches.n_examples // batches.batch_size)
    others, found = tuple(other_events), []
    for bands in (tried for tried in _TRIED if tried <= most):
        event = training_event(with_bands(batches, bands))
        noise = PrivacyPlan.calibrate_event(event, epsilon, delta, others).noise_multiplier
        coefficients = INDEPENDENT if bands == 1 else coefficients_of(bands)
        found.append(Choice(bands, noise, predicted_error(coefficients, noise, sizes)))
        # Beyond the best number of bands the noise grows faster than the error falls.
        if len(found) > 2 and found[-1].error > 1.05 * min(one.error for one in found):
            break
    return found


def choose_bands(
    correlation: Correlation | None,
    batches: Batches,
    epsilon: float,
    delta: float,
    step_sizes: Vector | None = None,
    other_events: Iterable[Event] = (),
    most: int = MOST_BANDS,
) -> int:
    """The number of bands: as given, 1 for None, for "auto" the one of least predicted error.

    Guarantees
    ----------
    It depends on public numbers alone: n, the batch size, the steps, the budget and step sizes.
    With "auto" the predicted error is never larger than that of independent noise.
    """
    if correlation is None:
        return 1
    if isinstance(correlation, str):
        validate.choice("correlation", correlation, ("auto",))
        found = choices(batches, epsilon, delta, step_sizes, other_events, most)
        return min(found, key=lambda choice: choice.error).bands
    bands = validate.integer("correlation", correlation)
    coefficients_of(bands)  # refuses too many
    return bands
