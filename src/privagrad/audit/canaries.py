"""Whole trainings with canaries: what an attacker learns who sees all, or the model alone."""

from __future__ import annotations

from typing import Literal, Unpack, get_args

from privagrad._internal import validate
from privagrad.audit.bounds import Audit, measure_release, measure_run
from privagrad.audit.configuration import Configuration, Keywords, calibrated, trained
from privagrad.audit.curves import measure_run_by_curve
from privagrad.privacy.noise import random_source

View = Literal["releases", "model"]
Bound = Literal["guesses", "curve", "test"]


def whole_run(
    epsilon: float,
    delta: float = 1e-5,
    *,
    steps: int = 100,
    view: View = "releases",
    bound: Bound = "guesses",
    confidence: float = 0.95,
    **configuration: Unpack[Keywords],
) -> Audit:
    """Attack one whole training of `steps` steps, which claims (epsilon, delta).

    Each canary is in the table if a fair coin says so. The attacker guesses which: from the sum of
    all private gradients ("releases"), or from the trained point alone ("model").

    Parameters
    ----------
    epsilon, delta : float
        What the training claims.
    steps : int
        The number of steps.
    view : {"releases", "model"}
        What the attacker sees.
    bound : {"guesses", "curve", "test"}
        What the lower bound follows from: `measure_run`, which assumes nothing about the training;
        `measure_run_by_curve`, which takes the noise to be of the kind that is claimed; or
        `measure_release`, which also takes the canaries of one training as independent.
    confidence : float
        The probability that the lower bound holds.
    **configuration
        The fields of `Configuration`.

    Notes
    -----
    "guesses" shows a part of the claim only: guesses would have to be right with probability
    e^ε/(1 + e^ε) for more, which Gaussian noise allows for hardly any canary.
    """
    validate.choice("view", view, get_args(View))
    validate.choice("bound", bound, get_args(Bound))
    chosen = Configuration(**configuration)
    if chosen.door == "torch":
        raise ValueError(
            "Expected another door than 'torch' for a whole run, found it: train your model "
            "with canaries and give their scores to privagrad.audit.measure_run."
        )
    plan = calibrated(chosen, epsilon, delta, steps)
    coin = random_source(chosen.random_state).sampler
    included = coin.random(chosen.canaries) < 0.5
    point, total = trained(chosen, chosen.rows(included), plan, steps, delta)
    # The loss falls along minus the gradient.
    seen = total if view == "releases" else -point
    scores = seen / chosen.ellipsoid.noise_std
    seen_by = "all releases are seen" if view == "releases" else "the model alone is seen"
    attack = f"{steps} steps, {seen_by}, {chosen.name}"
    if bound == "test":
        return measure_release(
            scores[included], scores[~included], plan.events, delta, confidence, attack
        )
    if bound == "curve":
        return measure_run_by_curve(included, scores, plan.events, delta, confidence, attack)
    return measure_run(included, scores, plan.epsilon(delta), delta, confidence, attack)
