"""Every row of the page on Opacus's calls, tried."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from privagrad.torch import (
    LambdaNoise,
    ModuleValidator,
    PrivacyEngine,
    PrivateHooks,
)
from tests.torch.small import Run, private, sgd, table
from tests.torch.test_opacus_names import documented


def made(**options: Any) -> tuple[PrivacyEngine, Any]:
    """A training that Opacus's users would make."""
    module, engine = nn.Linear(5, 3), PrivacyEngine()
    loader: Any = torch.utils.data.DataLoader(table(), 16)
    defaults = {"data_loader": loader, "noise_multiplier": 1.0, "max_grad_norm": 1.0}
    options = defaults | options
    return engine, engine.make_private(module=module, optimizer=sgd(module.parameters()), **options)


def trained(**options: Any) -> Run:
    engine, (module, optimizer, loader) = made(**options)
    run = Run(engine, module, optimizer, loader)
    run.epoch()
    assert 0 < engine.get_epsilon(1e-3) < float("inf")
    return run


def with_epsilon() -> None:
    engine, module = PrivacyEngine(), nn.Linear(5, 3)
    run = Run(engine, *engine.make_private_with_epsilon(
        module=module, optimizer=sgd(module.parameters()), epochs=1, max_grad_norm=1.0,
        data_loader=torch.utils.data.DataLoader(table(), 16), target_epsilon=5.0,
        target_delta=1e-3,
    ))  # fmt: skip
    run.epoch()
    assert engine.get_epsilon(1e-3) <= 5.0


def ghost() -> None:
    _, (module, optimizer, criterion, loader) = made(
        grad_sample_mode="ghost", criterion=nn.CrossEntropyLoss()
    )
    for x, y in loader:
        criterion(module(x), y).backward()
        optimizer.step()


def unwrapped() -> None:
    _, (hooks, _, _) = made(wrap_model=False)
    assert isinstance(hooks, PrivateHooks)
    assert type(hooks.module) is nn.Linear
    hooks.cleanup()


def frozen() -> None:
    norm = nn.BatchNorm1d(5).eval().requires_grad_(False)
    private(nn.Sequential(norm, nn.Linear(5, 3))).epoch()


def fixed(**options: Any) -> nn.Module:
    module = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))
    return ModuleValidator.fix_and_validate(module, **options).get_submodule("1")


def groups() -> None:
    norm = fixed(num_groups=4)
    assert isinstance(norm, nn.GroupNorm)
    assert norm.num_groups == 4


def instances() -> None:
    assert isinstance(fixed(replace_bn_with_in=True), nn.InstanceNorm2d)


def saved(path: Path) -> None:
    run = trained()
    schedule = LambdaNoise(run.optimizer, noise_lambda=lambda step: 1.0)
    parts: Any = {"module": run.module, "optimizer": run.optimizer, "noise_scheduler": schedule}
    run.engine.save_checkpoint(path=path, **parts)
    run.engine.load_checkpoint(path=path, **parts)


def hooked() -> None:
    called: list[Any] = []
    run = private(noise_multiplier=1.0)
    run.optimizer.attach_step_hook(called.append)
    run.epoch()
    assert called == [run.optimizer] * 4


def quieter() -> None:
    run = private(noise_multiplier=1.0, poisson_sampling=True)
    run.optimizer.noise_multiplier = 2.0
    run.epoch()
    assert run.engine.accountant.history == [(2.0, 0.25, 4)]


def scheduled() -> None:
    run = private()
    torch.optim.lr_scheduler.StepLR(run.optimizer, 1, 0.5)
    run.epoch()


def backward_twice() -> None:
    run = private()
    x, y = next(iter(run.loader))
    F.cross_entropy(run.module(x), y).backward()
    F.cross_entropy(run.module(x), y).backward()


def scaled() -> None:
    run, scaler = private(), torch.amp.GradScaler("cpu")
    x, y = next(iter(run.loader))
    scaler.scale(F.cross_entropy(run.module(x), y)).backward()
    scaler.step(run.optimizer)


WORKS: dict[str, Callable[[], Any]] = {
    '`PrivacyEngine(accountant="rdp", secure_mode=False)`': lambda: PrivacyEngine(
        accountant="rdp", secure_mode=False
    ),
    "`engine.make_private(...)`": trained,
    "`engine.make_private_with_epsilon(...)`": with_epsilon,
    "`make_private(poisson_sampling=False)`": lambda: trained(poisson_sampling=False),
    "`make_private(data_loader=private_loader)`": lambda: trained(data_loader=trained().loader),
    '`make_private(grad_sample_mode="ghost", criterion=...)`': ghost,
    '`make_private(grad_sample_mode="functorch")`': lambda: trained(grad_sample_mode="functorch"),
    '`make_private(clipping="per_layer", max_grad_norm=[...])`': lambda: trained(
        clipping="per_layer", max_grad_norm=[1.0, 0.5]
    ),
    '`make_private(clipping="adaptive", ...)`': lambda: trained(
        clipping="adaptive", target_unclipped_quantile=0.5, clipbound_learning_rate=0.2,
        max_clipbound=10.0, min_clipbound=0.01, unclipped_num_std=1.0,
    ),
    '`make_private(clipping="automatic")`': lambda: trained(clipping="automatic"),
    "`make_private(wrap_model=False)`": unwrapped,
    "`engine.get_epsilon(delta, alphas=...)`": lambda: trained().engine.get_epsilon(
        1e-3, alphas=[2.0, 3.0]
    ),
    "`engine.accountant.history`": lambda: trained().engine.accountant.history,
    "`ModuleValidator.fix(module, num_groups=4)`": groups,
    "`ModuleValidator.fix(module, replace_bn_with_in=True)`": instances,
    "BatchNorm in eval mode with frozen parameters": frozen,
    "`optimizer.attach_step_hook(...)`": hooked,
    "`optimizer.noise_multiplier = ...`": quieter,
    "learning-rate schedules of PyTorch": scheduled,
    "`module.to_standard_module()`": lambda: private().module.to_standard_module(),
}  # fmt: skip
SAVED = "`engine.save_checkpoint(path=..., noise_scheduler=...)`"
HINT: dict[str, Callable[[], Any]] = {
    "`engine.accountant.step(...)`": lambda: PrivacyEngine().accountant.step(
        noise_multiplier=1.0, sample_rate=0.1
    ),
    "`engine.accountant.get_privacy_spent(...)`": (
        lambda: PrivacyEngine().accountant.get_privacy_spent(delta=1e-3)
    ),
    "`optimizer.grad_samples`": lambda: private().optimizer.grad_samples,
    "`optimizer.signal_skip_step()`": lambda: private().optimizer.signal_skip_step(),
    "`module.disable_hooks()`": lambda: private().module.disable_hooks(),
}
REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "`make_private(rand_on_empty=True)`": (
        lambda: made(rand_on_empty=True), ValueError, "step is one of noise",
    ),
    '`make_private(grad_sample_mode="ghost_fsdp")`': (
        lambda: made(grad_sample_mode="ghost_fsdp"), ValueError, "sharded parameters",
    ),
    "`engine.save_checkpoint(path=BytesIO())`": (
        lambda: PrivacyEngine().save_checkpoint(
            path=io.BytesIO(), module=nn.Linear(2, 2)  # type: ignore[arg-type]
        ),
        TypeError, "Save to a path",
    ),
    "two `backward()` before a `step()`": (backward_twice, RuntimeError, "Add the losses"),
    "`GradScaler.step(optimizer)`": (scaled, RuntimeError, "Leave the scaler out"),
    "`copy.deepcopy(optimizer)`": (
        lambda: copy.deepcopy(private().optimizer), TypeError, "without being charged",
    ),
}  # fmt: skip


def test_the_page_says_what_is_tried_here() -> None:
    tried = dict.fromkeys([*WORKS, SAVED], "works") | dict.fromkeys(HINT, "hint")
    assert documented("Calls") == tried | dict.fromkeys(REFUSED, "refused")


@pytest.mark.parametrize("call", WORKS)
def test_calls_that_work(call: str) -> None:
    WORKS[call]()


def test_checkpoints_have_the_schedule(tmp_path: Path) -> None:
    saved(tmp_path / "run.pt")


@pytest.mark.parametrize("call", HINT)
def test_calls_that_have_a_hint(call: str) -> None:
    with pytest.raises(AttributeError, match="which Opacus has"):
        HINT[call]()


@pytest.mark.parametrize("call", REFUSED)
def test_calls_that_are_refused(call: str) -> None:
    attempt, error, reason = REFUSED[call]
    with pytest.raises(error, match=reason):
        attempt()
