"""Modules that become private and keep their class."""

from __future__ import annotations

import copy
import inspect
import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from privagrad.torch import PrivacyEngine, PrivateHooks
from tests.torch.reference import assert_same, looped
from tests.torch.small import gradient_of, table

FEATURES, LABELS = table(6).tensors


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 4), nn.Linear(4, 3)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(torch.tanh(self.first(x)))
        return found


def hooked(module: nn.Module, **options: Any) -> tuple[PrivacyEngine, PrivateHooks, Any, Any]:
    engine = PrivacyEngine()
    defaults = {"noise_multiplier": 0.0, "max_grad_norm": 0.3, "poisson_sampling": False}
    hooks, optimizer, loader = engine.make_private(
        module=module, optimizer=torch.optim.SGD(module.parameters(), lr=0.1),
        data_loader=DataLoader(table(), 16), wrap_model=False, **(defaults | options),
    )  # fmt: skip
    return engine, hooks, optimizer, loader


@pytest.mark.parametrize("make", [Net, lambda: nn.Linear(5, 3)], ids=["nested", "one layer"])
def test_trains_as_the_loop_does(make: Any) -> None:
    torch.manual_seed(0)
    module = make()
    kind = type(module)
    _, hooks, optimizer, loader = hooked(module)
    assert hooks.module is module
    for x, y in loader:
        plain = make()
        plain.load_state_dict(module.state_dict())
        module.train()
        module.zero_grad()
        F.cross_entropy(module(x), y).backward()
        optimizer.step()
        expected = looped(plain, F.cross_entropy, *table_rows(x, y), "ball", 0.3)
        assert_same([gradient_of(p) for p in module.parameters()], expected)
        module.eval()
        assert type(module(FEATURES)) is Tensor
    assert type(module) is kind
    assert list(inspect.signature(module.forward).parameters)[-1] in ("x", "input")


def table_rows(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Plain tensors of a batch."""
    return torch.tensor(x.tolist()), torch.tensor(y.tolist())


def test_releases_are_charged() -> None:
    engine, _, optimizer, loader = hooked(Net(), noise_multiplier=1.0, poisson_sampling=True)
    module = optimizer.tape
    assert module.parameters.keys() == dict(Net().named_parameters()).keys()
    for _ in loader:
        pass
    assert engine.accountant.history == [(1.0, 0.25, 4)]


def test_copies_are_plain_modules() -> None:
    module = Net()
    _, _hooks, optimizer, loader = hooked(module)
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    for twin in (copy.deepcopy(module), torch.load(file, weights_only=False)):
        F.cross_entropy(twin(FEATURES), LABELS).backward()
        assert all(p.grad is not None for p in twin.parameters())
        assert all(p.grad is None for p in module.parameters())
    for x, y in loader:
        F.cross_entropy(module(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()


def test_is_plain_again_after_cleanup() -> None:
    module = Net()
    _, hooks, optimizer, loader = hooked(module)
    hooks.cleanup()
    hooks.cleanup()
    F.cross_entropy(module(FEATURES), LABELS).backward()
    assert all(p.grad is not None for p in module.parameters())
    with pytest.raises(RuntimeError, match="found no private gradients"):
        optimizer.step()
    # It can be made private again.
    _, _, optimizer, loader = hooked(module)
    for x, y in loader:
        F.cross_entropy(module(x), y).backward()
        optimizer.step()


def test_forward_hooks_would_run_twice_and_are_refused() -> None:
    module = Net()
    _, _, _, loader = hooked(module)
    module.register_forward_hook(lambda *_: None)
    x, _ = next(iter(loader))
    with pytest.raises(RuntimeError, match="called twice"):
        module(x)


def test_checkpoints_are_of_the_module(tmp_path: Path) -> None:
    module, path = Net(), tmp_path / "run.pt"
    engine, hooks, optimizer, _ = hooked(module)
    engine.save_checkpoint(path=path, module=hooks, optimizer=optimizer)
    other = Net()
    engine, hooks, optimizer, _ = hooked(other)
    engine.load_checkpoint(path=path, module=hooks, optimizer=optimizer)
    assert torch.equal(other.first.weight, module.first.weight)


def test_gradients_past_the_private_pass_are_refused() -> None:
    """A layer of the module called by itself, in training mode."""
    module = Net()
    hooked(module)
    with pytest.raises(RuntimeError, match="inside it"):
        module.first(FEATURES)


def test_a_module_of_many_processes_is_wrapped(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        with pytest.raises(ValueError, match="wrap_model=True with DistributedDataParallel"):
            hooked(DistributedDataParallel(Net()))
    finally:
        dist.destroy_process_group()
