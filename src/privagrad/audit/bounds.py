"""From the scores of an attack to a lower bound on epsilon."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from privagrad._internal import validate
from privagrad._internal.validate import Vector
from privagrad.privacy.accounting import PrivacyPlan, require_meaningful
from privagrad.privacy.events import Event, Release, SelectEvent
from privagrad.privacy.totals import Total

_PARTS = 2.0 ** (np.arange(21) / 2)
"""Numbers of guesses that are tried, as parts of all canaries: 1, 2^-1/2, ..., 2^-10."""

_EPSILONS = np.concatenate([[0.0], np.geomspace(1e-3, 60.0, 150)])
"""At which a pair of error rates is compared with the claim."""

_LEAST, _MOST = math.log(1e-2), math.log(1e6)
"""Logarithms of the factors of the noise that are told apart."""


@dataclass(frozen=True)
class Audit:
    """What was claimed, and what an attack shows.

    Attributes
    ----------
    claimed : float
        The epsilon of the plan.
    measured : float
        A lower bound on the real epsilon, from the attack. It is too large with a probability of at
        most 1 - `confidence`.
    delta : float
        The delta of both.
    confidence : float
        The confidence of the bound.
    attack : str
        What was done, in words.
    samples : int
        How many scores the bound is computed from.
    false_positive, true_positive : float
        The error rates of the attack as counted: how often a row is guessed to be there where it is
        not, and where it is. Of a whole run, over the canaries that are guessed.
    """

    claimed: float
    measured: float
    delta: float
    confidence: float
    attack: str
    samples: int
    false_positive: float
    true_positive: float

    @property
    def violated(self) -> bool:
        """Whether the claim is refuted, at this confidence."""
        return self.measured > self.claimed

    @property
    def fraction(self) -> float:
        """The part of the claim that the attack reaches."""
        return self.measured / self.claimed

    @property
    def verdict(self) -> str:
        """One sentence."""
        shown = f"the attack shows epsilon >= {self.measured:.3g} (confidence {self.confidence:g})"
        if self.violated:
            return f"VIOLATED: {shown}, and only {self.claimed:.3g} is claimed."
        return f"Consistent: {shown}, {self.fraction:.0%} of the claimed {self.claimed:.3g}."

    def as_json(self) -> dict[str, Any]:
        """All of it as plain values."""
        return {**asdict(self), "violated": self.violated, "verdict": self.verdict}


def measure_release(
    with_row: ArrayLike,
    without_row: ArrayLike,
    events: Iterable[Event],
    delta: float,
    confidence: float = 0.95,
    attack: str = "a test of scores with and without the row",
) -> Audit:
    """A lower bound on epsilon from independent scores of a release with and without one row.

    Parameters
    ----------
    with_row, without_row : arrays
        Scores that are larger where the row is there. A first half of each chooses the threshold,
        the second half counts. Under replace-one, "without" is with the other row.
    events : iterable of events
        What is claimed to be released for one score.
    delta : float
        At which epsilon is stated.
    confidence : float
        The probability that the bound holds.
    attack : str
        What was done, in words.

    Notes
    -----
    A test with false positive rate α and true positive rate β refutes (ε, δ) if β > e^ε α + δ or
    1 - α > e^ε (1 - β) + δ. α and β have Clopper–Pearson bounds that hold together with the
    confidence. The measured epsilon is that of the claimed releases with all noise multiplied by
    the largest factor that the test does not refute: below 1 if the claim is violated. So it
    assumes the kind of the noise, not its size. Without that assumption the same test shows less
    (Nasr et al. 2023, "Tight auditing of differentially private machine learning").
    """
    claimed = tuple(events)
    confidence = confidence_of(confidence)
    present, absent = _scores("with_row", with_row), _scores("without_row", without_row)
    threshold = _threshold(present[::2], absent[::2])
    hits, alarms = present[1::2] > threshold, absent[1::2] > threshold
    least = _binomial_lower(int(hits.sum()), hits.size, (1 - confidence) / 2)
    most = 1 - _binomial_lower(int((~alarms).sum()), alarms.size, (1 - confidence) / 2)
    plan = PrivacyPlan(claimed)
    measured = _scaled_epsilon(claimed, delta, most, least)
    return Audit(
        plan.epsilon(delta), measured, delta, confidence, attack,
        present.size + absent.size, float(alarms.mean()), float(hits.mean()),
    )  # fmt: skip


def measure_run(
    included: ArrayLike,
    scores: ArrayLike,
    epsilon: float,
    delta: float,
    confidence: float = 0.95,
    attack: str = "guesses which canaries were in one training",
) -> Audit:
    """A lower bound on epsilon from one training with many canaries.

    Parameters
    ----------
    included : array of bool, of shape (m,)
        Which canaries were in the training; each by an independent fair coin. Under replace-one,
        which of two rows stood in its place.
    scores : array of shape (m,)
        Larger where a canary seems to be included; computed without `included`.
    epsilon, delta : float
        What is claimed.
    confidence : float
        The probability that the bound holds.
    attack : str
        What was done, in words.

    Notes
    -----
    The r/2 canaries of the largest scores are guessed to be in, the r/2 of the smallest out. If the
    training is (ε, δ)-differentially private, the number of right guesses is at most a binomial one
    of probability e^ε/(1 + e^ε), up to a term of δ (Steinke, Nasr and Jagielski 2023, Theorem 5.2).
    Several r are tried, each at its share of 1 - confidence. Equal scores are ranked by a fixed
    shuffle: the order of the canaries may tell which are in.
    """
    epsilon = validate.positive("epsilon", epsilon)
    if not 0 <= delta < 1:
        raise ValueError(f"Expected delta in [0, 1), found delta={delta!r}.")
    tries = guessed(included, scores)
    canaries, alpha = np.asarray(included).size, (1 - confidence_of(confidence)) / len(tries)
    best, rates = 0.0, (0.5, 0.5)
    for one in tries:
        found = _run_epsilon(canaries, one.guesses, one.right, delta, alpha)
        if found > best:
            best, rates = found, one.rates
    return Audit(epsilon, best, delta, confidence, attack, canaries, *rates)


class Guesses(NamedTuple):
    """So many canaries are guessed, half of them to be in: how many rightly.

    `rates` are the parts that are in, of those that are guessed to be out, and of the others.
    """

    guesses: int
    right: int
    rates: tuple[float, float]


def guessed(included: ArrayLike, scores: ArrayLike) -> list[Guesses]:
    """The smallest scores are guessed to be out and the largest to be in; several numbers."""
    truth, values = _coins(included), _scores("scores", scores)
    if truth.size != values.size or truth.size < 10:
        raise ValueError(
            f"Expected at least 10 canaries with a score each, found {truth.size} and "
            f"{values.size} scores."
        )
    # Equal scores in the order of the canaries would let that order guess.
    shuffled = np.random.default_rng(0).permutation(truth.size)
    ranked = shuffled[np.argsort(values[shuffled], kind="stable")]
    found = []
    most = truth.size // 2
    for half in sorted({min(max(round(truth.size / part / 2), 1), most) for part in _PARTS}):
        low, high = truth[ranked[:half]], truth[ranked[-half:]]
        rates = float(low.mean()), float(high.mean())
        found.append(Guesses(2 * half, int(high.sum() + (~low).sum()), rates))
    return found


def _coins(included: ArrayLike) -> NDArray[np.bool_]:
    """Whether each canary was in, of booleans or of the numbers 0 and 1."""
    found = np.asarray(included)
    if found.ndim != 1 or found.dtype.kind not in "biuf" or not np.isin(found, (0, 1)).all():
        raise ValueError(
            "Expected True or False (1 or 0) for each canary as included, found other values: say "
            "which canaries were in the training."
        )
    return found.astype(np.bool_)


def confidence_of(value: float) -> float:
    if not 0.5 <= value < 1:
        raise ValueError(f"Expected a confidence in [0.5, 1), found {value!r}.")
    return float(value)


def _scores(name: str, values: ArrayLike) -> Vector:
    found = np.asarray(values, dtype=np.float64).ravel()
    if found.size < 10 or not np.isfinite(found).all():
        raise ValueError(
            f"Expected at least 10 finite numbers as {name}, found {found.size}, of which "
            f"{int(np.isfinite(found).sum())} are finite."
        )
    return found


def _threshold(present: Vector, absent: Vector) -> float:
    """Where the two rates are apart by the most standard deviations of their normal quantiles."""
    from scipy.special import ndtri

    places = np.quantile(np.concatenate([present, absent]), np.linspace(0.02, 0.98, 97))
    hit = _rate(present, places)
    alarm = _rate(absent, places)
    distance = ndtri(hit) - ndtri(alarm)
    doubt = np.sqrt(_spread(hit) / present.size + _spread(alarm) / absent.size)
    return float(places[np.argmax(distance / doubt)])


def _rate(scores: Vector, places: Vector) -> Vector:
    """The share of scores above each place, never 0 or 1."""
    above = scores.size - np.searchsorted(np.sort(scores), places, side="right")
    return np.asarray((above + 0.5) / (scores.size + 1))


def _spread(rate: Vector) -> Vector:
    """The variance of the normal quantile of a rate, for one sample."""
    from scipy.special import ndtri

    density = np.exp(-(ndtri(rate) ** 2) / 2) / math.sqrt(2 * math.pi)
    return np.asarray(rate * (1 - rate) / density**2)


def _binomial_lower(successes: int, trials: int, alpha: float) -> float:
    """The Clopper–Pearson lower bound on a probability."""
    from scipy.special import betaincinv

    if successes == 0:
        return 0.0
    return float(betaincinv(successes, trials - successes + 1, alpha))


def _scaled_epsilon(events: tuple[Event, ...], delta: float, most: float, least: float) -> float:
    """Epsilon of the releases with as much noise as rates of at most and at least these allow."""
    if most >= least:
        return 0.0
    releases = gaussian_releases(events)
    relation = PrivacyPlan(releases).relation

    def refuted(scaled: tuple[Release, ...]) -> bool:
        deltas = Total.of(scaled, relation, delta, fine=False).deltas(_EPSILONS)
        grown = np.exp(_EPSILONS)
        missed = 1 - most > grown * (1 - least) + deltas
        return bool((missed | (least > grown * most + deltas)).any())

    return least_epsilon(releases, delta, refuted)


def least_epsilon(
    releases: tuple[Release, ...], delta: float, refuted: Callable[[tuple[Release, ...]], bool]
) -> float:
    """Epsilon of the releases with the least noise that is refuted; 0 where no noise is.

    What is refuted with some noise is refuted with more. The bound must not be larger than what
    was shown: so the end of the search that is refuted counts.
    """
    low, high = _LEAST, _MOST
    if not refuted(_scaled(releases, math.exp(high))):
        return 0.0
    if refuted(_scaled(releases, math.exp(low))):
        return math.inf
    while high - low > 1e-3:
        middle = (low + high) / 2
        found = refuted(_scaled(releases, math.exp(middle)))
        low, high = (low, middle) if found else (middle, high)
    return PrivacyPlan(_scaled(releases, math.exp(high))).epsilon(delta)


def gaussian_releases(events: tuple[Event, ...]) -> tuple[Release, ...]:
    if not events or any(isinstance(event, SelectEvent) for event in events):
        raise ValueError("Expected releases with Gaussian noise to audit, found others or none.")
    return tuple(event for event in events if not isinstance(event, SelectEvent))


def _scaled(events: tuple[Release, ...], factor: float) -> tuple[Release, ...]:
    return tuple(replace(e, noise_multiplier=e.noise_multiplier * factor) for e in events)


def _run_epsilon(canaries: int, guesses: int, right: int, delta: float, alpha: float) -> float:
    """The largest epsilon at which so many right guesses have a probability of at most alpha."""
    if _chance(canaries, guesses, right, 0.0, delta) > alpha:
        return 0.0
    low, high = 0.0, 1.0
    while _chance(canaries, guesses, right, high, delta) <= alpha:
        low, high = high, 2 * high
        require_meaningful(high)
    while high - low > 1e-4:
        middle = (low + high) / 2
        if _chance(canaries, guesses, right, middle, delta) <= alpha:
            low = middle
        else:
            high = middle
    return low


def _chance(canaries: int, guesses: int, right: int, epsilon: float, delta: float) -> float:
    """The largest probability of at least so many right guesses under (epsilon, delta).

    With W binomial of `guesses` trials of probability e^ε/(1 + e^ε) and v right guesses, it is
    P(W ≥ v) + 2 m δ max_i P(v - i ≤ W < v)/i.
    """
    from scipy.stats import binom

    law = binom(guesses, 1 / (1 + math.exp(-epsilon)))
    below = law.pmf(np.arange(right - 1, -1, -1))
    per_guess: NDArray[np.float64] = np.cumsum(below) / np.arange(1, right + 1)
    extra = float(per_guess.max()) if right else 0.0
    return min(1.0, float(law.sf(right - 1)) + 2 * canaries * delta * extra)
