"""The verdict: its odds are right and never understated, and it follows the guarantee."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import norm

from privagrad.privacy.accounting import PrivacyPlan
from privagrad.privacy.composition import gaussian_mu
from privagrad.privacy.events import GaussianEvent
from privagrad.privacy.ledger import Account, Run
from privagrad.report.verdict import (
    best_guess,
    best_guess_of,
    one_in,
    percent,
    posterior,
    verdict_of,
)

EPSILONS = st.floats(0, 60)
DELTAS = st.floats(0, 0.5)


def revealing(epsilon: float, delta: float) -> tuple[np.ndarray, np.ndarray]:
    """The worst mechanism: a bit, revealed with probability delta, otherwise flipped."""
    flip = 1 / (1 + math.exp(epsilon))
    kept = (1 - delta) * np.array([1 - flip, flip])
    return np.array([delta, *kept, 0.0]), np.array([0.0, *kept[::-1], delta])


@given(EPSILONS, DELTAS)
def test_the_best_guess_is_that_against_the_worst_mechanism(epsilon: float, delta: float) -> None:
    p, q = revealing(epsilon, delta)
    assert np.all(p <= np.exp(epsilon) * q * (1 + 1e-12) + np.array([delta, 0, 0, 0]))
    right = np.maximum(p, q).sum() / 2
    assert best_guess(epsilon, delta) == pytest.approx(right, abs=1e-12)
    if epsilon < 30:
        e = math.exp(epsilon)
        assert best_guess(epsilon, delta) == pytest.approx((e + delta) / (1 + e), rel=1e-12)


@given(st.floats(1e-6, 0.999), st.floats(0, 20), st.floats(1e-12, 0.5))
def test_a_true_suspicion_is_on_average_within_its_bound(
    prior: float, epsilon: float, delta: float
) -> None:
    """Against the worst mechanism, of which every other one is a function."""
    p, q = revealing(epsilon, delta)
    seen = p > 0
    after = prior * p[seen] / (prior * p[seen] + (1 - prior) * q[seen])
    assert (p[seen] * after).sum() <= posterior(prior, epsilon, delta) * (1 + 1e-9)
    assert prior * (1 - 1e-12) <= posterior(prior, epsilon, delta) <= 1 + 1e-12
    odds = posterior(prior, epsilon, 0.0) / (1 - posterior(prior, epsilon, 0.0))
    assert odds == pytest.approx(math.exp(epsilon) * prior / (1 - prior), rel=1e-3)


@pytest.mark.parametrize(("epsilon", "delta"), [(0.1, 1e-5), (1.0, 1e-6), (3.0, 1e-3), (8.0, 1e-6)])
def test_what_a_gaussian_release_shows_of_a_suspicion(epsilon: float, delta: float) -> None:
    """Its odds grow beyond exp(epsilon) far more often than delta: only the mean is promised."""
    mu = gaussian_mu(epsilon, delta)
    loss = mu * np.linspace(-12, 12, 200_001) + mu**2 / 2
    weight = norm.pdf((loss - mu**2 / 2) / mu)
    weight /= weight.sum()
    for prior in (1e-3, 0.5):
        after = 1 / (1 + (1 - prior) / prior * np.exp(-loss))
        assert (weight * after).sum() <= posterior(prior, epsilon, delta)
    assert weight[loss > epsilon].sum() > 3 * delta
    told = verdict_of(epsilon, delta, 100, "zero-out").sentences[0]
    assert "on average over the noise" in told
    assert "except with" not in told


@pytest.mark.parametrize("noise", [0.3, 1.0, 5.0, 40.0])
def test_releases_of_known_noise_allow_no_better_guess_than_their_epsilon(noise: float) -> None:
    """For a Gaussian with means 1/z apart the best test is right with probability Φ(1/(2 z))."""
    events = (GaussianEvent(noise),)
    found = best_guess_of(events)
    assert found == pytest.approx(norm.cdf(1 / (2 * noise)), rel=1e-9)
    for delta in (1e-9, 1e-6, 1e-3):
        assert found <= best_guess(PrivacyPlan(events).epsilon(delta), delta) + 1e-12


@given(st.floats(1e-9, 1 - 1e-9))
def test_chances_are_never_understated(chance: float) -> None:
    share = percent(chance)
    assert share == "certainty" or float(share.removesuffix(" %")) / 100 >= chance - 1e-10
    assert (share == "certainty") == (1 - chance < 1e-4)
    assert 1 / int(one_in(chance).removeprefix("1 in ").replace(",", "")) >= chance * (1 - 1e-8)


@pytest.mark.parametrize("power", range(1, 13))
def test_powers_of_ten_stay_whole(power: int) -> None:
    assert one_in(10.0**-power) == f"1 in {10**power:,}"


@pytest.mark.parametrize(
    ("epsilon", "level", "tone", "odds", "suspicion"),
    [
        (0.5, "strong", "good", "at most 62.3 %", "at most 1 in 606,"),
        (1.0, "strong", "good", "at most 73.2 %", "at most 1 in 368,"),
        (2.0, "moderate", "note", "at most 88.1 %", "at most 1 in 136,"),
        (3.0, "moderate", "note", "at most 95.3 %", "at most 1 in 50,"),
        (8.0, "weak", "caution", "at most 99.97 %", "at most 74.9 %,"),
        (10.0, "weak", "caution", "as good as certain", "at most 95.7 %,"),
        (50.0, "little", "warning", "as good as certain", "as good as certain"),
    ],
)
def test_a_verdict_follows_epsilon(
    epsilon: float, level: str, tone: str, odds: str, suspicion: str
) -> None:
    found = verdict_of(epsilon, 1e-6, 20_000, "zero-out")
    assert (found.level, found.tone) == (level, tone)
    assert odds in found.headline
    assert suspicion in found.sentences[0]
    assert "whether a given row took part" in found.headline
    text = " ".join([found.headline, *found.sentences])
    assert len(re.findall("50:50", text)) == len(re.findall("1 in 1,000 ", text)) == 1


def test_a_verdict_speaks_of_its_relation_and_unit() -> None:
    found = verdict_of(1.0, 1e-6, 500, "replace-one", unit="user")
    assert "which of two sets of values a given user holds" in found.headline
    assert "the number of users" in found.sentences[-1]
    assert "row" not in found.headline.replace("grow", "")
    with pytest.raises(ValueError, match="relation"):
        verdict_of(1.0, 1e-6, 500, "add-or-remove-one")


@pytest.mark.parametrize(
    ("delta", "level", "word"),
    [
        (1e-4, "strong", "it is well below 1/1,000"),
        (2e-4, "weak", "should be well below 1/1,000"),
        (1e-3, "little", "picked at random would meet it"),
    ],
)
def test_delta_is_held_against_the_number_of_rows(delta: float, level: str, word: str) -> None:
    found = verdict_of(0.5, delta, 1000, "zero-out")
    assert found.level == level
    assert word in found.sentences[-1]


@pytest.mark.parametrize("delta", [2e-4, 1e-3, 0.5])
def test_a_small_epsilon_is_not_praised_beside_a_large_delta(delta: float) -> None:
    found = verdict_of(0.01, delta, 1000, "zero-out")
    assert "protects well" not in " ".join(found.sentences)
    assert "protects well" in " ".join(verdict_of(0.01, 1e-6, 1000, "zero-out").sentences)


def test_a_large_delta_makes_no_verdict_better() -> None:
    assert verdict_of(50.0, 2e-4, 1000, "zero-out").level == "little"


@pytest.mark.parametrize(("epsilon", "seeded"), [(math.inf, False), (math.inf, True), (0.1, True)])
def test_what_is_not_private_is_promised_nothing(epsilon: float, seeded: bool) -> None:
    found = verdict_of(epsilon, 1e-6, 1000, "zero-out", seeded=seeded)
    assert (found.level, found.tone) == ("not private", "warning")
    assert found.headline.startswith("NOT PRIVATE")
    assert "at most" not in " ".join([found.headline, *found.sentences])


def account(epsilon: float, *noises: float) -> Account:
    runs = [Run(str(z), "", "", "finished", "", (GaussianEvent(z),)) for z in noises]
    return Account("people", epsilon, 1e-6, None, tuple(runs))


def test_a_model_beyond_its_budget_is_no_good_whatever_its_own_epsilon() -> None:
    within = verdict_of(0.5, 1e-6, 20_000, "zero-out", account=account(9.0, 1.0))
    assert within == verdict_of(0.5, 1e-6, 20_000, "zero-out")
    beyond = verdict_of(0.5, 1e-6, 20_000, "zero-out", account=account(0.5, 1.0, 1.0))
    assert (beyond.level, beyond.tone) == ("beyond its budget", "warning")
    assert "more than the 0.5 allowed" in beyond.headline
    assert "62.3 %" in beyond.sentences[0]
