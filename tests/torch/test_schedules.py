"""Noise and bounds that change during a training, charged as they are used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import dp_accounting
import opacus.schedulers
import pytest
import torch
from torch import nn

import privagrad.torch
from privagrad.privacy.accounting import PrivacyPlan
from privagrad.privacy.events import GaussianEvent
from privagrad.privacy.mechanism import GaussianSum
from privagrad.torch import ExponentialGradClip, ExponentialNoise, LambdaNoise, StepNoise
from tests.statistics import assert_scale
from tests.torch.small import private, sgd, table

SCHEDULES: dict[str, tuple[str, dict[str, Any]]] = {
    "ExponentialNoise": ("noise_multiplier", {"gamma": 0.9}),
    "StepNoise": ("noise_multiplier", {"gamma": 0.5, "step_size": 3}),
    "LambdaNoise": ("noise_multiplier", {"noise_lambda": lambda step: 1 + step / 4}),
    "ExponentialGradClip": ("max_grad_norm", {"gamma": 1.1}),
    "StepGradClip": ("max_grad_norm", {"gamma": 0.5, "step_size": 2}),
    "LambdaGradClip": ("max_grad_norm", {"scheduler_function": lambda step: 1 / (1 + step)}),
}


class Numbers:
    """What Opacus's schedules need of an optimizer."""

    def __init__(self) -> None:
        self.noise_multiplier, self.max_grad_norm = 2.0, 1.0


@pytest.mark.parametrize("last_epoch", [-1, 3])
@pytest.mark.parametrize("name", SCHEDULES)
def test_values_are_those_of_opacus(name: str, last_epoch: int) -> None:
    attribute, options = SCHEDULES[name]
    theirs, ours = Numbers(), private(noise_multiplier=2.0).optimizer
    reference = getattr(opacus.schedulers, name)(theirs, last_epoch=last_epoch, **options)
    schedule = getattr(privagrad.torch, name)(ours, last_epoch=last_epoch, **options)
    for _ in range(8):
        assert getattr(ours, attribute) == pytest.approx(getattr(theirs, attribute))
        reference.step()
        schedule.step()


@pytest.mark.parametrize("name", SCHEDULES)
def test_states_go_on_in_another_process(name: str) -> None:
    attribute, options = SCHEDULES[name]
    kind: Callable[..., Any] = getattr(privagrad.torch, name)
    first, second = (private(noise_multiplier=2.0).optimizer for _ in range(2))
    schedule = kind(first, **options)
    for _ in range(5):
        schedule.step()
    resumed = kind(second, **options)
    resumed.load_state_dict(schedule.state_dict())
    for _ in range(3):
        assert getattr(first, attribute) == getattr(second, attribute)
        schedule.step()
        resumed.step()


def test_every_step_is_charged_with_its_own_noise() -> None:
    run = private(noise_multiplier=2.0, poisson_sampling=True)
    schedule = StepNoise(run.optimizer, step_size=2, gamma=0.5)
    for _ in range(4):
        run.epoch()
        schedule.step()
    expected = (
        GaussianEvent(2.0, 8, "poisson", 64, 16, "gradients"),
        GaussianEvent(1.0, 8, "poisson", 64, 16, "gradients"),
    )
    assert run.engine.accountant.events == expected
    assert run.engine.get_epsilon(1e-5) == PrivacyPlan(expected).epsilon(1e-5)
    assert run.engine.report(1e-5).events == expected


def test_epsilon_is_the_composition_of_the_noise_that_was_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By dp-accounting, from the multipliers of the sums that were really released."""
    used: list[float] = []
    original = GaussianSum.release

    def release(self: GaussianSum, *args: Any) -> Any:
        used.append(self.noise_multiplier)
        return original(self, *args)

    monkeypatch.setattr(GaussianSum, "release", release)
    run = private(noise_multiplier=3.0, poisson_sampling=True, clipping="adaptive", batch_size=16,
                  unclipped_num_std=4.0)  # fmt: skip
    noise = LambdaNoise(run.optimizer, noise_lambda=lambda step: 1 / (1 + step % 3))
    bound = ExponentialGradClip(run.optimizer, gamma=0.8)
    for x, y in run.loader:
        noise.step()  # after the batch was drawn and charged
        run.step(nn.functional.cross_entropy, x, y)
    for _ in range(3):
        run.epoch()
        noise.step()
        bound.step()
    assert len(used) == 16
    assert len(set(used)) == 3
    account = dp_accounting.pld.PLDAccountant(
        dp_accounting.NeighboringRelation.REPLACE_SPECIAL, value_discretization_interval=1e-4
    )
    for multiplier in used:
        step = dp_accounting.GaussianDpEvent(multiplier)
        account.compose(dp_accounting.PoissonSampledDpEvent(16 / 64, step))
    expected = account.get_epsilon(1e-5)
    assert run.engine.get_epsilon(1e-5) == pytest.approx(expected, rel=2e-3)
    reported = run.engine.report(1e-5)
    assert reported.epsilon == PrivacyPlan(reported.events).epsilon(1e-5)
    assert sum(event.count for event in reported.events) == 16


def test_schedules_of_opacus_are_charged_too() -> None:
    run = private(noise_multiplier=2.0, poisson_sampling=True)
    schedule = opacus.schedulers.ExponentialNoise(run.optimizer, gamma=0.5)
    for _ in range(2):
        run.epoch()
        schedule.step()
    found = [(event.noise_multiplier, event.count) for event in run.engine.accountant.events]
    assert found == [(2.0, 4), (1.0, 4)]


def test_a_schedule_by_steps_is_charged_step_by_step() -> None:
    run = private(noise_multiplier=4.0, poisson_sampling=True)
    schedule = ExponentialNoise(run.optimizer, gamma=0.5)
    for x, y in run.loader:
        run.step(nn.functional.cross_entropy, x, y)
        schedule.step()
    noises = [event.noise_multiplier for event in run.engine.accountant.events]
    assert noises == [4.0, 2.0, 1.0, 0.5]


def test_noise_follows_both_schedules() -> None:
    run = private(
        nn.Linear(40, 30), table(32, 40), 16, noise_multiplier=1.0,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.0),
    )  # fmt: skip
    noise = LambdaNoise(run.optimizer, noise_lambda=lambda step: 1.0 + step)
    bound = ExponentialGradClip(run.optimizer, gamma=3.0)
    for step in range(3):
        run.epoch(lambda out, y: (0.0 * out).sum(1).mean())
        assert_scale(run.gradients[0].numpy(), (1.0 + step) * 3.0**step / 16)
        noise.step()
        bound.step()


def test_schedules_that_end_without_noise_are_unprotected() -> None:
    run = private(noise_multiplier=1.0, poisson_sampling=True)
    schedule = LambdaNoise(run.optimizer, noise_lambda=lambda step: float(step == 0))
    run.epoch()
    assert run.engine.get_epsilon(1e-5) < float("inf")
    schedule.step()
    run.epoch()
    assert run.engine.get_epsilon(1e-5) == float("inf")


def test_impossible_schedules_are_refused() -> None:
    run = private(noise_multiplier=1.0)
    with pytest.raises(ValueError, match="gamma"):
        ExponentialNoise(run.optimizer, gamma=-1.0)
    with pytest.raises(ValueError, match="step_size"):
        StepNoise(run.optimizer, step_size=0, gamma=0.5)
    with pytest.raises(ValueError, match="noise_multiplier"):
        LambdaNoise(run.optimizer, noise_lambda=lambda step: -1.0)
    with pytest.raises(TypeError, match="that make_private returned"):
        ExponentialNoise(sgd(nn.Linear(5, 3).parameters()), gamma=0.5)  # type: ignore[arg-type]
