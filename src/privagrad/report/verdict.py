"""What a guarantee is worth, in words: how far an attacker's guess about one row can improve.

Any two neighbours P and Q of an (ε, δ)-private release can be simulated from one bit of which they
are the two values: with probability δ the bit is revealed, and otherwise it is flipped with odds
1 : e^ε (Kairouz, Oh and Viswanath 2015). What an attacker concludes from the bit, the attacker
concludes with no more certainty from the release, on average. So all that follows holds for every
attacker, whatever else is known: a guess between two equally likely cases is right with probability
at most δ + (1 - δ) e^ε / (1 + e^ε), and a suspicion of probability p, if it is true, has on average
a probability of at most δ + (1 - δ) q afterwards, the odds of q being e^ε times those of p. A
single outcome may raise the odds by more than e^ε, with a probability far above δ: 111 δ for a
Gaussian release of ε = 0.1 and δ = 1e-5.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from privagrad._internal import validate
from privagrad.privacy.accounting import PrivacyPlan
from privagrad.privacy.events import Event
from privagrad.privacy.ledger import Account

Level = Literal["strong", "moderate", "weak", "little", "beyond its budget", "not private"]
Tone = Literal["note", "good", "caution", "warning"]

_TONES: dict[Level, Tone] = {
    "strong": "good",
    "moderate": "note",
    "weak": "caution",
    "little": "warning",
    "beyond its budget": "warning",
    "not private": "warning",
}
_BANDS: tuple[tuple[float, Level, str, str], ...] = (
    (1.0, "strong", "Strong protection",
     "An epsilon of at most 1 protects well, whatever an attacker knows."),
    (3.0, "moderate", "Moderate protection",
     "An epsilon between 1 and 3 still limits what any attacker can conclude."),
    (10.0, "weak", "Weak protection",
     "An epsilon between 3 and 10 excludes little: a well-informed attacker may become almost "
     "certain."),
    (math.inf, "little", "This protects little",
     "An epsilon above 10 lets an attacker become certain. It is no reason to publish."),
)  # fmt: skip
"""Values of epsilon up to the first number: the level, how the headline begins, what it means."""

_SUSPICION = 1 / 1000
_CERTAIN = 1e-4
_CERTAINLY = "certainty"
_WELL_BELOW = 0.1
_ROUNDING = 1e-9
_QUOTIENT = 1e-15
_TINIEST = 1e-12

HIDDEN = {
    "zero-out": "whether a given row took part",
    "replace-one": "which of two sets of values a given row holds",
}
"""What an attacker guesses, for each neighbouring relation."""

_SUSPECTED = {
    "zero-out": "that a given row took part",
    "replace-one": "that a given row holds certain values",
}


@dataclass(frozen=True)
class Verdict:
    """What a guarantee is worth.

    Attributes
    ----------
    level : str
        "strong", "moderate", "weak", "little", "beyond its budget" or "not private".
    headline : str
        The most important sentence.
    sentences : tuple of str
        What else follows, each fact once.
    """

    level: Level
    headline: str
    sentences: tuple[str, ...]

    @property
    def tone(self) -> Tone:
        """The kind of the banner that shows it."""
        return _TONES[self.level]


def verdict_of(
    epsilon: float,
    delta: float,
    rows: int,
    relation: str,
    *,
    seeded: bool = False,
    unit: str = "row",
    account: Account | None = None,
) -> Verdict:
    """The verdict on a guarantee for one of so many rows; of an account, also on all its runs."""
    validate.choice("relation", relation, HIDDEN)
    if math.isinf(epsilon):
        return Verdict("not private", "NOT PRIVATE: epsilon is infinite, no noise was added.", ())
    if seeded:
        said = "Whoever knows or guesses the seed can draw the noise again and subtract it."
        headline = "NOT PRIVATE: the noise was seeded and can be repeated."
        return Verdict("not private", headline, (said,))
    band = next(place for place, band in enumerate(_BANDS) if epsilon <= band[0])
    lowest = 3 if delta >= 1 / rows else 2 if delta > most_of(rows) else 0
    level, start = _BANDS[max(band, lowest)][1:3]
    odds = _odds(epsilon, delta, relation, unit)
    sentences = [_suspicion(epsilon, delta, relation, unit), _about_delta(delta, rows, unit)]
    # Where delta is too large, a small epsilon protects nobody.
    if band >= lowest:
        sentences.insert(1, _BANDS[band][3])
    if account is not None and exceeds(account.epsilon, account.spent):
        level, start = "beyond its budget", f"Beyond the budget of {account.name}"
        sentences.insert(0, odds[0].upper() + odds[1:])
        spent = account.spent
        total = f"{spent:.4g}" if math.isfinite(spent) else "without bound"
        odds = f"its runs together cost epsilon {total}, more than the {account.epsilon:g} allowed."
    return Verdict(level, f"{start}: {odds}", tuple(sentences))


def exceeds(total: float, spent: float) -> bool:
    """Whether the runs of a budget cost more than it allows."""
    return not spent <= total * (1 + _ROUNDING)


def verdict_of_model(
    privacy: Mapping[str, Any], rows: int, account: Account | None = None
) -> Verdict:
    """The verdict on what a model file or an evaluation keeps of its cost."""
    return verdict_of(
        privacy["epsilon"],
        privacy["delta"],
        rows,
        privacy["relation"],
        seeded=privacy["seeded"],
        unit=privacy.get("unit", "row"),
        account=account,
    )


def best_guess(epsilon: float, delta: float) -> float:
    """The largest probability of a right guess between two equally likely neighbours.

    (e^ε + δ) / (1 + e^ε): the total variation distance is at most (e^ε - 1 + 2 δ) / (e^ε + 1).
    """
    wrong = math.exp(-epsilon) / (1 + math.exp(-epsilon))
    return 1 - wrong * (1 - delta)


def best_guess_of(events: Sequence[Event]) -> float:
    """`best_guess` from the releases themselves: (1 + δ(0)) / 2, δ(0) the total variation."""
    return (1 + min(PrivacyPlan(tuple(events)).delta(0.0), 1.0)) / 2


def posterior(prior: float, epsilon: float, delta: float) -> float:
    """The largest mean probability, after a release, of something true that was `prior` before."""
    against = (1 - prior) / prior * math.exp(-epsilon)
    return delta + (1 - delta) / (1 + against)


def one_in(probability: float) -> str:
    """A small probability as "1 in 606", never understated."""
    if probability < _TINIEST:
        return f"{probability:.1g}"
    times = 1 / probability
    # Rounding errors of the quotient are no reason to round down.
    whole = round(times) if abs(times - round(times)) <= _QUOTIENT * times else math.floor(times)
    return f"1 in {whole:,}"


def most_of(rows: int) -> float:
    """The largest delta that is well below one over the number of rows."""
    return _WELL_BELOW / rows * (1 + _ROUNDING)


def percent(probability: float) -> str:
    """An upper bound in percent, rounded up; "certainty" where hardly anything is missing to it."""
    missing = 1 - probability
    if missing < _CERTAIN:
        return _CERTAINLY
    decimals = 1 if missing >= 0.01 else 2
    scale = 10**decimals
    # Rounding errors of the bound itself are no reason to round up.
    return f"{math.ceil(100 * scale * probability - 1e-9) / scale:g} %"


def _odds(epsilon: float, delta: float, relation: str, unit: str) -> str:
    """What becomes of a guess between two equally likely cases."""
    share = percent(best_guess(epsilon, delta))
    becomes = "becomes as good as certain."
    if share != _CERTAINLY:
        becomes = f"becomes right with a probability of at most {share}."
    return _of(f"an attacker's 50:50 guess {HIDDEN[relation]} {becomes}", unit)


def _suspicion(epsilon: float, delta: float, relation: str, unit: str) -> str:
    """What becomes of something that was not likely before."""
    before = f"A suspicion of 1 in {round(1 / _SUSPICION):,} {_SUSPECTED[relation]}"
    after = posterior(_SUSPICION, epsilon, delta)
    if after < 0.1:
        chance = f"at most {one_in(after)}"
    elif (share := percent(after)) == _CERTAINLY:
        return _of(f"{before} can become as good as certain, too.", unit)
    else:
        chance = f"at most {share}"
    return _of(f"{before} becomes {chance}, on average over the noise.", unit)


def _about_delta(delta: float, rows: int, unit: str) -> str:
    told = f"Delta, {one_in(delta)}, bounds the probability that the guarantee fails"
    if delta >= 1 / rows:
        return (
            f"{told}. It is not below 1/{rows:,}, one over the number of {unit}s: publishing a "
            f"{unit} picked at random would meet it."
        )
    if delta > most_of(rows):
        return (
            f"{told}. It should be well below 1/{rows:,}, one over the number of {unit}s, at most "
            "a tenth of it."
        )
    return f"{told}; it is well below 1/{rows:,}, one over the number of {unit}s."


def _of(text: str, unit: str) -> str:
    return text.replace("given row", f"given {unit}")
