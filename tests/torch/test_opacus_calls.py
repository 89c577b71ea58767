"""Calls that Opacus's users make: they do the same, or say what to do."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import lr_scheduler

from privagrad.torch import PerExampleLoss, PrivacyEngine
from tests.torch.small import Run, gradient_of, private, sgd


def poisson(**options: Any) -> Run:
    return private(**({"noise_multiplier": 1.0, "poisson_sampling": True} | options))


class TestAccounts:
    def test_history_is_that_of_opacus(self) -> None:
        run = poisson()
        assert run.engine.accountant.history == []
        run.epoch()
        run.optimizer.noise_multiplier = 0.0
        for x, y in run.loader:
            run.step(F.cross_entropy, x, y)
            break
        history = run.engine.accountant.history
        assert history == [(1.0, 0.25, 4), (0.0, 1.0, 1)]
        history.clear()
        assert math.isinf(run.engine.get_epsilon(1e-5))

    def test_options_of_accountants_change_nothing(self) -> None:
        run = poisson()
        run.epoch()
        expected = run.engine.get_epsilon(1e-5)
        assert run.engine.get_epsilon(delta=1e-5, alphas=[2.0, 10.0]) == expected
        assert run.engine.accountant.get_epsilon(1e-5, eps_error=0.1, poisson=True) == expected
        with pytest.raises(TypeError, match="alpha"):
            run.engine.get_epsilon(1e-5, alpha=2)

    @pytest.mark.parametrize("name", ["step", "get_optimizer_hook_fn", "get_privacy_spent"])
    def test_what_an_account_does_not_do_has_a_hint(self, name: str) -> None:
        account = PrivacyEngine().accountant
        with pytest.raises(AttributeError, match="which Opacus has"):
            getattr(account, name)
        with pytest.raises(AttributeError, match=r"'Accountant' object has no attribute 'other'$"):
            account.other  # noqa: B018


class TestOptimizers:
    def test_step_hooks_see_private_gradients(self) -> None:
        run = poisson(max_physical_batch_size=8, optimizer=lambda p: torch.optim.SGD(p, lr=1.0))
        seen: list[float] = []
        before = [p.detach().clone() for p in run.optimizer.params]
        run.optimizer.attach_step_hook(
            lambda own: seen.append(float(gradient_of(own.params[0]).norm()))
        )
        order: list[str] = []
        run.optimizer.register_step_pre_hook(lambda *_: order.append("before"))
        run.optimizer.register_step_post_hook(lambda *_: order.append("after"))
        for x, y in run.loader:
            run.step(F.cross_entropy, x, y)
            if run.optimizer.last_chunk:
                break
        assert len(seen) == 1, "parts that release nothing have no private gradients"
        assert order == ["before", "after"]
        assert seen[0] == float(run.gradients[0].norm()) > 0
        assert not torch.equal(before[0], run.optimizer.params[0])

    @pytest.mark.parametrize(
        "name", ["grad_samples", "signal_skip_step", "virtual_step", "accumulated_iterations"]
    )
    def test_what_they_do_not_have_has_a_hint(self, name: str) -> None:
        with pytest.raises(AttributeError, match="which Opacus has"):
            getattr(private().optimizer, name)
        with pytest.raises(AttributeError, match=r"no attribute 'other'$"):
            private().optimizer.other  # noqa: B018
        assert not hasattr(private().optimizer, name)

    def test_a_scaler_is_refused_before_anything_is_released(self) -> None:
        run = poisson()
        scaler = torch.amp.GradScaler("cpu")
        for x, y in run.loader:
            scaler.scale(F.cross_entropy(run.module(x), y)).backward()
            with pytest.raises(RuntimeError, match="GradScaler"):
                scaler.step(run.optimizer)
            break
        assert run.optimizer.releases == 0

    def test_a_scaler_that_does_nothing_is_fine(self) -> None:
        run = poisson()
        scaler = torch.amp.GradScaler("cpu", enabled=False)
        for x, y in run.loader:
            run.optimizer.zero_grad()
            scaler.scale(F.cross_entropy(run.module(x), y)).backward()
            scaler.step(run.optimizer)
            scaler.update()
        assert run.optimizer.releases == 4

    def test_a_rate_that_follows_a_public_metric(self) -> None:
        run = poisson()
        schedule = lr_scheduler.ReduceLROnPlateau(run.optimizer, patience=0, factor=0.5)
        for _ in range(3):
            run.epoch()
            schedule.step(1.0)
        assert run.optimizer.param_groups[0]["lr"] < 0.1


class TestModules:
    def test_the_given_module_can_be_had_back(self) -> None:
        module = nn.Linear(5, 3)
        assert private(module).module.to_standard_module() is module

    def test_what_they_do_not_have_has_a_hint(self) -> None:
        run = private()
        with pytest.raises(AttributeError, match="'disable_hooks', which Opacus has"):
            run.module.disable_hooks()
        with pytest.raises(AttributeError, match="'Linear' object has no attribute 'other'"):
            run.module.other  # noqa: B018
        twin = copy.deepcopy(run.module)
        assert torch.equal(*(m.get_parameter("_module.weight") for m in (twin, run.module)))

    def test_options_that_nothing_depends_on(self) -> None:
        run = poisson(wrap_model=True, grad_sample_mode="functorch", clipping="flat")
        run.epoch()

    def test_a_criterion_comes_back_with_the_same_meaning(self) -> None:
        module, engine = nn.Linear(5, 3), PrivacyEngine()
        made = engine.make_private(
            module=module, optimizer=sgd(module.parameters()), criterion=nn.CrossEntropyLoss(),
            data_loader=poisson().loader, noise_multiplier=1.0, max_grad_norm=1.0,
            grad_sample_mode="ghost",
        )  # fmt: skip
        assert len(made) == 4
        private_module, optimizer, criterion, loader = made
        outputs, targets = torch.randn(6, 3), torch.tensor([0, 1, 2, 0, 1, 2])
        expected = F.cross_entropy(outputs, targets)
        assert float(criterion(outputs, targets)) == pytest.approx(float(expected))
        for x, y in loader:
            optimizer.zero_grad()
            criterion(private_module(x), y).backward()
            optimizer.step()
        assert engine.accountant.history == [(1.0, 0.25, 4)]

    def test_flattened_rows_are_not_guessed(self) -> None:
        """Opacus takes the shape that they had before."""
        loss = PerExampleLoss(nn.CrossEntropyLoss())
        outputs, targets = torch.randn(2, 4, 3), torch.zeros(2, 4, dtype=torch.long)
        with pytest.raises(TypeError, match="as they are"):
            loss(outputs.flatten(0, 1), targets.flatten(), shape=outputs.shape)

    def test_a_second_backward_before_a_step_says_what_to_do(self) -> None:
        """Opacus adds per-example gradients up; their sum would have to be bounded once."""
        run = poisson()
        x, y = next(iter(run.loader))
        F.cross_entropy(run.module(x), y).backward()
        with pytest.raises(RuntimeError, match="max_physical_batch_size"):
            F.cross_entropy(run.module(x), y).backward()
