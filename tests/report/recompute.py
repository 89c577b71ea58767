"""Another program: the epsilon of a privacy card, from what its JSON Schema says and nothing else.

It must not import the library that wrote the card. Full-batch Gaussians are computed in closed
form, samples by their profiles, which dp-accounting composes, selections by its Rényi accountant.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import dp_accounting
import numpy as np
from dp_accounting.pld import pld_pmf
from dp_accounting.rdp import RdpAccountant
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.stats import binom, norm

Vector = NDArray[np.float64]
Profile = Callable[[Vector], Vector]
Event = dict[str, Any]

TOLERANCE = 0.01
"""Relative: grids differ between the two programs."""

_MOST_POINTS = 400_000
_TINY = 1e-15
_FOURIER = 2**18


def epsilon_of_card(card: dict[str, Any], delta: float | None = None) -> float:
    """The least epsilon of the card's events at a delta, by default at its own."""
    delta = card["guarantee"]["delta"] if delta is None else delta
    events, relation = card["native"]["events"], card["neighbours"]["relation"]
    if card["native"]["unprotected"]:
        return math.inf
    if any(event["kind"] == "SelectEvent" for event in events):
        return selected(events, delta)
    kept = math.prod((1 - event.get("leak", 0.0)) ** event["count"] for event in events)
    left = (delta - (1 - kept)) / kept
    if left <= 0:
        return math.inf
    sensitivity = {"zero-out": 1.0, "replace-one": 2.0}[relation]
    full = [event for event in events if sees_all_rows(event)]
    rest = [event for event in events if not sees_all_rows(event)]
    squares = (draws_of(e) * (sensitivity / e["noise_multiplier"]) ** 2 for e in full)
    mu = math.sqrt(sum(squares))
    if not rest:
        return closed_form(mu, left)
    ways = [composed(mu, rest, removed, left) for removed in (True, False)]
    return max(ways)


def sees_all_rows(event: Event) -> bool:
    if event["kind"] != "GaussianEvent":
        return False
    whole = event.get("bands", 1) * event["batch_size"] == event["n_examples"]
    return event["sampling"] is None or (event["sampling"] != "with_replacement" and whole)


def gaussian(mu: float) -> Profile:
    def of(epsilons: Vector) -> Vector:
        first, second = norm.cdf(mu / 2 - epsilons / mu), norm.logcdf(-mu / 2 - epsilons / mu)
        return np.maximum(first - np.exp(epsilons + second), 0.0)

    return of


def closed_form(mu: float, delta: float) -> float:
    of = gaussian(mu)
    if of(np.zeros(1))[0] <= delta:
        return 0.0
    return float(brentq(lambda e: of(np.array([e]))[0] - delta, 0.0, mu**2 / 2 + 40 * mu + 1))


def poisson(mu: float, rate: float, removed: bool) -> Profile:
    """(1 - q) N(0, 1) + q N(mu, 1) against N(0, 1), or the other way round."""

    def removal(epsilons: Vector) -> Vector:
        with np.errstate(divide="ignore", invalid="ignore"):
            place = np.log1p(np.expm1(epsilons) / rate) / mu + mu / 2
        place = np.where(np.expm1(epsilons) <= -rate, -np.inf, place)
        with_row = (1 - rate) * norm.sf(place) + rate * norm.sf(place - mu)
        return np.maximum(with_row - np.exp(epsilons) * norm.sf(place), 0.0)

    def addition(epsilons: Vector) -> Vector:
        # H_a(P || Q) = 1 - a + a H_{1/a}(Q || P)
        return np.maximum(1 - np.exp(epsilons) + np.exp(epsilons) * removal(-epsilons), 0.0)

    return removal if removed else addition


def fixed_size(event: Event) -> Profile:
    z, n, b = event["noise_multiplier"], event["n_examples"], event["batch_size"]
    if event["sampling"] == "without_replacement":
        weights = {1: b / n}
        rate = b / n
    else:
        weights = {k: float(binom.pmf(k, b, 1 / n)) for k in range(1, b + 1)}
        weights = {k: p for k, p in weights.items() if p > 1e-18}
        rate = 1 - (1 - 1 / n) ** b

    def upper(epsilons: Vector) -> Vector:
        inner = np.log1p(np.expm1(epsilons) / rate)
        return np.asarray(sum(p * gaussian(2 * k / z)(inner) for k, p in weights.items()))

    def of(epsilons: Vector) -> Vector:
        sizes, factor = np.abs(epsilons), np.exp(np.minimum(epsilons, 0.0))
        mirrored = 1 - factor + factor * upper(sizes)
        return np.where(epsilons < 0, mirrored, upper(sizes))

    return of


def allocation(event: Event, removed: bool) -> Profile:
    """One epoch: the ratio is a mean of t lognormals, one of which is larger with the row.

    By a Fourier transform over an even grid of their sum.
    """
    mu, steps = 1 / event["noise_multiplier"], steps_of_an_epoch(event)
    highest = math.exp(mu * mu / 2 + 8 * mu) + 2 * steps
    width = highest / _FOURIER
    edges = width * (np.arange(_FOURIER // 2 + 1) - 0.5)
    with np.errstate(divide="ignore"):
        places = np.log(np.maximum(edges, 0.0)) / mu + mu / 2
    without, with_row = (np.fft.rfft(np.diff(norm.cdf(p)), _FOURIER) for p in (places, places - mu))
    total = np.maximum(np.fft.irfft(without ** (steps - 1) * with_row, _FOURIER), 0.0)
    ratio = width * np.arange(_FOURIER) / steps
    inverse = np.divide(1.0, ratio, out=np.zeros_like(ratio), where=ratio > 0)
    tails = [np.append(np.cumsum(m[::-1])[::-1], 0.0) for m in (total, total * inverse)]

    def removal(epsilons: Vector) -> Vector:
        i = np.searchsorted(ratio, np.exp(epsilons), side="right")
        return np.maximum(tails[0][i] - np.exp(epsilons) * tails[1][i], 0.0)

    def addition(epsilons: Vector) -> Vector:
        return np.maximum(1 - np.exp(epsilons) + np.exp(epsilons) * removal(-epsilons), 0.0)

    return removal if removed else addition


def steps_of_an_epoch(event: Event) -> int:
    return max(1, round(event["n_examples"] / event["batch_size"]))


def objective(mu: float, log_volume: float) -> Profile:
    """E[(1 - exp(epsilon - loss))+] of the loss log_volume + mu |Z| + mu^2 / 2."""

    def of(epsilons: Vector) -> Vector:
        least = np.maximum((epsilons - log_volume - mu * mu / 2) / mu, 0.0)
        second = np.exp(epsilons - log_volume) * norm.sf(least + mu)
        return np.maximum(2 * (norm.sf(least) - second), 0.0)

    return of


def profile_of(event: Event, removed: bool) -> Profile:
    z = event["noise_multiplier"]
    if event["kind"] == "ObjectiveEvent":
        return objective(1 / z, event["log_volume"])
    if event["sampling"] == "poisson":
        return poisson(1 / z, event["batch_size"] / event["n_examples"], removed)
    if event["sampling"] == "cyclic_poisson":
        return poisson(1 / z, event["bands"] * event["batch_size"] / event["n_examples"], removed)
    if event["sampling"] == "random_allocation":
        return allocation(event, removed)
    return fixed_size(event)


def composed(mu: float, events: list[Event], removed: bool, delta: float) -> float:
    profiles = [(profile_of(event, removed), draws_of(event)) for event in events]
    if mu > 0:
        profiles.append((gaussian(mu), 1))
    highest = [reach(profile) for profile, _ in profiles]
    step = max(max(highest) / _MOST_POINTS, min(highest) / 4000)
    parts = []
    for (profile, count), high in zip(profiles, highest, strict=True):
        places = np.arange(-math.ceil(high / step), math.ceil(high / step) + 1)
        epsilons: Vector = np.asarray(places * step, dtype=np.float64)
        deltas = np.minimum.accumulate(np.clip(profile(epsilons), 0.0, 1.0))
        part = pld_pmf.create_pmf_pessimistic_connect_dots(step, places, deltas)
        parts.append(part.self_compose(count, _TINY) if count > 1 else part)
    total = parts[0]
    for part in parts[1:]:
        total = total.compose(part, _TINY)
    return float(total.get_epsilon_for_delta(delta))


def draws_of(event: Event) -> int:
    """Releases, epochs of random allocation, or blocks of releases with correlated noise."""
    if event["sampling"] == "cyclic_poisson":
        return int(event["count"] // event["bands"])
    allocated = event["sampling"] == "random_allocation"
    return int(event["count"] // (steps_of_an_epoch(event) if allocated else 1))


def reach(profile: Profile) -> float:
    """An epsilon at which hardly any delta is left."""
    high = 1e-3
    while profile(np.array([high]))[0] > _TINY and high < 100:
        high *= 1.25
    return high


def selected(events: list[Event], delta: float) -> float:
    def translated(event: Event) -> Any:
        if "mean" in event:
            run = dp_accounting.ComposedDpEvent([translated(inner) for inner in event["events"]])
            one = dp_accounting.dp_event.RepeatAndSelectDpEvent(run, event["mean"], 1.0)
        else:
            one = dp_accounting.GaussianDpEvent(float(event["noise_multiplier"]))
            if event["sampling"] == "poisson":
                rate = event["batch_size"] / event["n_examples"]
                one = dp_accounting.PoissonSampledDpEvent(rate, one)
        return dp_accounting.SelfComposedDpEvent(one, event["count"])

    accountant = RdpAccountant()
    for event in events:
        accountant.compose(translated(event))
    return float(accountant.get_epsilon(delta))
