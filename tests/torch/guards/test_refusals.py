"""Uses for which no privacy guarantee would hold are refused, with the reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from privagrad.torch import (
    BatchMemoryManager,
    ModuleValidator,
    PrivacyEngine,
    UnsupportedModuleError,
)
from tests.torch.small import private, sgd, table


def in_place(out: Tensor, target: Tensor) -> Tensor:
    out -= out.mean(0)
    return out.square().mean()


def assigned(out: Tensor, target: Tensor) -> Tensor:
    rows = 1.0 * out
    rows[0] = out.mean(0)
    return rows.square().mean()


MIXING: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mean before the square": lambda out, y: (out.mean(0) - 1).square().sum(),
    "root of a mean": lambda out, y: (out - 1).square().mean().sqrt(),
    "logsumexp over the batch": lambda out, y: out.logsumexp(0).sum(),
    "hinge of neighbours": lambda out, y: F.relu(1 - out[:-1, 0] + out[1:, 0]).mean(),
    "standard deviation": lambda out, y: out.std(),
    "batch statistics": lambda out, y: F.cross_entropy(
        F.batch_norm(out, None, None, training=True), y
    ),
    "detached statistics": lambda out, y: (out / out.detach().std()).square().mean(),
    "contrastive": lambda out, y: F.cross_entropy(out @ out.T, torch.arange(len(out))),
    "worst example": lambda out, y: F.cross_entropy(out, y, reduction="none").max(),
    "hardest half": lambda out, y: F.cross_entropy(out, y, reduction="none").topk(8)[0].mean(),
    "operation in place": in_place,
    "assignment": assigned,
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", MIXING)
def test_losses_that_mix_examples(name: str, seed: int) -> None:
    torch.manual_seed(seed)
    run = private(noise_multiplier=1.0)
    with pytest.raises(RuntimeError, match=r"mean over examples|keep examples apart"):
        run.epoch(MIXING[name])
    assert len(run.engine.accountant) == 1, "the batch that was drawn"


class TestSteps:
    def test_without_backward(self) -> None:
        run = private(noise_multiplier=1.0)
        with pytest.raises(RuntimeError, match=r"loss.backward\(\) before optimizer.step\(\)"):
            run.optimizer.step()
        assert len(run.engine.accountant) == 0

    def test_of_a_loss_that_saw_no_private_module(self) -> None:
        run = private(noise_multiplier=1.0)
        run.module.eval()
        with pytest.raises(RuntimeError, match="in training mode"):
            run.epoch()

    def test_after_two_backward_passes(self) -> None:
        run = private()
        for x, y in run.loader:
            F.cross_entropy(run.module(x), y).backward()
            loss = F.cross_entropy(run.module(x), y)
            with pytest.raises(RuntimeError, match=r"one backward\(\) for each step\(\)"):
                loss.backward()
            break

    @pytest.mark.parametrize("repeated", [True, False])
    def test_on_other_rows_than_were_drawn(self, repeated: bool) -> None:
        run = private(noise_multiplier=1.0)
        for x, _ in run.loader:
            out = run.module(x.repeat(2, 1) if repeated else x[:5])
            with pytest.raises(RuntimeError, match="16 examples that the data loader drew"):
                out.square().sum(1).mean().backward()
            break

    def test_twice_on_a_part_of_a_batch(self) -> None:
        run = private(max_physical_batch_size=4)
        x, y = next(iter(run.loader))
        run.step(F.cross_entropy, x, y)
        with pytest.raises(RuntimeError, match="examples would count twice"):
            run.step(F.cross_entropy, x, y)

    def test_with_parameters_past_their_layers(self) -> None:
        class Tied(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer = nn.Linear(5, 5)

            def forward(self, x: Tensor) -> Tensor:
                return F.linear(self.layer(x), self.layer.weight)

        run = private(Tied())
        x, y = next(iter(run.loader))
        with pytest.raises(RuntimeError, match=r"by their own layers, found layer\.weight"):
            run.step(F.cross_entropy, x, y)

    def test_with_a_penalty_in_the_loss(self) -> None:
        run = private()
        x, y = next(iter(run.loader))
        penalty = sum(p.square().sum() for p in run.module.parameters())
        loss = F.cross_entropy(run.module(x), y) + penalty
        with pytest.raises(RuntimeError, match="weight_decay"):
            loss.backward()


class TestModules:
    def test_changed_after_make_private(self) -> None:
        run = private(nn.Sequential(nn.Linear(5, 3)))
        run.module._module.add_module("1", nn.Linear(3, 3))
        with pytest.raises(RuntimeError, match="found changes at 1"):
            run.epoch()

    def test_unfrozen_after_make_private(self) -> None:
        module = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3))
        module[0].requires_grad_(False)
        run = private(module)
        run.epoch()
        module[0].weight.requires_grad_(True)
        with pytest.raises(RuntimeError, match=r"found changes at 0\.weight"):
            run.epoch()

    def test_called_past_the_private_one(self) -> None:
        module = nn.Sequential(nn.Linear(5, 3))
        run = private(module)
        x, _ = table().tensors
        with pytest.raises(RuntimeError, match="a call of the module that make_private returned"):
            module(x)
        with pytest.raises(RuntimeError, match="a call of the module that make_private returned"):
            run.module._module.get_submodule("0")(x)
        with torch.no_grad():
            module(x)

    def test_with_a_forward_of_their_own(self) -> None:
        layer = nn.Linear(5, 3)
        module = nn.Sequential(layer)
        vars(layer)["forward"] = lambda x: F.linear(x - x.mean(0), layer.weight)
        with pytest.raises(ValueError, match="as its class defines it"):
            private(module)

    def test_with_batch_normalisation(self) -> None:
        module = nn.Sequential(
            nn.Conv2d(1, 4, 3),
            nn.BatchNorm2d(4),
            nn.Flatten(),
            nn.Sequential(nn.BatchNorm1d(144), nn.Linear(144, 3)),
        )
        with pytest.raises(UnsupportedModuleError, match=r"found 2 that do not:\n  1: .*\n  3.0: "):
            private(module)
        assert [str(e).split(":")[0] for e in ModuleValidator.validate(module)] == ["1", "3.0"]
        assert not ModuleValidator.is_valid(module)
        fixed = ModuleValidator.fix(module)
        assert ModuleValidator.is_valid(fixed)
        assert ModuleValidator.validate(fixed, strict=True) == []
        assert not ModuleValidator.is_valid(module), "fix works on a copy"
        data = TensorDataset(torch.randn(32, 1, 8, 8), torch.randint(0, 3, (32,)))
        run = private(fixed, data, noise_multiplier=1.0)
        run.epoch()
        assert run.engine.get_epsilon(1e-5) > 0

    def test_that_mix_examples_without_parameters(self) -> None:
        class Centred(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return x - x.mean(0)

        run = private(nn.Sequential(Centred(), nn.Linear(5, 3)))
        with pytest.raises(ValueError, match="treats every example by itself"):
            run.epoch()

    def test_with_one_embedding_of_the_batch(self) -> None:
        class OfTheBatch(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.words, self.longest = nn.Embedding(9, 4), nn.Embedding(9, 4)
                self.out = nn.Linear(4, 3)

            def forward(self, x: Tensor) -> Tensor:
                return self.out(self.words(x).mean(1) + self.longest(x.max()))

        data = TensorDataset(torch.randint(0, 9, (32, 7)), torch.randint(0, 3, (32,)))
        run = private(OfTheBatch(), data)
        with pytest.raises(ValueError, match="treats every example by itself"):
            run.epoch()

    def test_that_are_private_already(self) -> None:
        run = private()
        for module, optimizer in [
            (run.module, run.optimizer.original_optimizer),
            (run.module._module, run.optimizer),
        ]:
            with pytest.raises(ValueError, match="not private yet"):
                PrivacyEngine().make_private(
                    module=module, optimizer=optimizer, data_loader=run.loader,
                    noise_multiplier=1.0, max_grad_norm=1.0,
                )  # fmt: skip

    def test_without_trainable_parameters(self) -> None:
        module = nn.Linear(5, 3)
        optimizer = sgd(module.parameters())
        module.requires_grad_(False)
        with pytest.raises(ValueError, match="trainable parameters, found none"):
            private(module, optimizer=lambda _: optimizer)


class TestOptimizers:
    def test_of_other_parameters(self) -> None:
        with pytest.raises(ValueError, match="have the module's parameters, found 2 others"):
            private(optimizer=lambda _: sgd(nn.Linear(5, 3).parameters()))

    def test_without_some_parameters(self) -> None:
        module = nn.Linear(5, 3)
        with pytest.raises(ValueError, match=r"every trainable parameter in the optimizer.*bias"):
            private(module, optimizer=lambda _: sgd([module.weight]))

    def test_with_groups_added_later(self) -> None:
        run = private()
        with pytest.raises(RuntimeError, match="neither bounded nor noisy"):
            run.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})


SCALES = {"weight": torch.ones(3, 5), "bias": torch.ones(3)}
OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"clipping": "ghost"}, "Expected clipping to be one of flat, per_layer"),
    ({"clipping": "automatic", "gamma": 0.0}, "gamma"),
    ({"clipping": "automatic", "gamma": 1e-9}, "gamma >= 1e-06"),
    ({"clipping": "adaptive", "target_unclipped_quantile": 1.5}, "between 0 and 1"),
    ({"clipping": "adaptive", "min_clipbound": 2.0, "max_clipbound": 1.0}, "< max_clipbound"),
    ({"clipping": "adaptive", "max_clipbound": 0.5}, "max_grad_norm, with which adaptive"),
    ({"clipping": "adaptive", "noise_multiplier": 1.6}, "2 · unclipped_num_std = 1.6"),
    ({"clipping": "per_layer", "max_grad_norm": [1.0]}, "Expected 2 bounds"),
    ({"clipping": "per_layer", "max_grad_norm": [1.0, -1.0]}, "bias"),
    ({"clipping": "per_layer", "max_grad_norm": {"weight": 1.0}}, "each of weight, bias"),
    ({"grad_sample_mode": "ghost"}, "a criterion with grad_sample_mode"),
    ({"grad_sample_mode": "ghost_fsdp"}, "sharded parameters"),
    ({"grad_sample_mode": "no_op"}, "computed elsewhere"),
    (
        {"grad_sample_mode": "ghost", "criterion": nn.CrossEntropyLoss(reduction="sum")},
        "give both the same",
    ),
    ({"noise_multiplier": -1.0}, "noise_multiplier"),
    ({"noise_multiplier": float("nan")}, "noise_multiplier"),
    ({"max_grad_norm": 0.0}, "max_grad_norm"),
    ({"loss_reduction": "none"}, "loss_reduction"),
    ({"ellipsoid": "adam"}, "ellipsoid"),
    ({"ellipsoid": [torch.ones(3, 5)]}, "2 tensors, one for every trainable parameter"),
    ({"ellipsoid": {"weight": torch.ones(3, 5)}}, "missing: bias; unknown: none"),
    ({"ellipsoid": SCALES | {"gain": torch.ones(1)}}, "missing: none; unknown: gain"),
    ({"ellipsoid": SCALES | {"weight": torch.ones(5, 3)}}, r"of shape \(3, 5\), found \(5, 3\)"),
    ({"ellipsoid": SCALES | {"bias": -torch.ones(3)}}, "positive and finite"),
    ({"ellipsoid": SCALES | {"bias": torch.zeros(3)}}, "positive and finite"),
    ({"ellipsoid": SCALES | {"bias": torch.full((3,), torch.inf)}}, "positive and finite"),
    ({"public_loader": DataLoader(table(), 8)}, "'pagan' or 'pasan' with a public_loader"),
    ({"ellipsoid": "pagan", "public_loader": []}, "public examples, found none"),
    ({"ellipsoid": "pagan", "public_loader": DataLoader(table(), 8), "floor": -1.0}, "floor"),
    ({"ellipsoid": "pagan", "public_loader": DataLoader(table(), 8), "per": "word"}, "per"),
]


@pytest.mark.parametrize(("options", "reason"), OPTIONS, ids=[reason for _, reason in OPTIONS])
def test_options(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        private(**options)


def test_a_memory_manager_of_another_loader() -> None:
    run = private()
    with pytest.raises(TypeError, match="the data loader that make_private returned"):
        BatchMemoryManager(
            data_loader=DataLoader(table()), max_physical_batch_size=2, optimizer=run.optimizer
        )


def test_a_loader_without_batches() -> None:
    module = nn.Linear(5, 3)
    with pytest.raises(ValueError, match="a data loader with a batch_size"):
        PrivacyEngine().make_private(
            module=module, optimizer=sgd(module.parameters()),
            data_loader=DataLoader(table(), batch_size=None),
            noise_multiplier=1.0, max_grad_norm=1.0,
        )  # fmt: skip


def test_mixed_precision_is_refused_before_anything_is_released() -> None:
    run = private(noise_multiplier=1.0)
    x, y = next(iter(run.loader))
    half = torch.autocast("cpu", dtype=torch.float16)
    with half, pytest.raises(RuntimeError, match="without autocast or in bfloat16"):
        run.module(x)
    # What comes after the module may use it.
    outputs = run.module(x)
    with torch.autocast("cpu"):
        loss = F.cross_entropy(outputs.float(), y)
    loss.backward()


def test_complex_parameters_are_refused() -> None:
    module = nn.Linear(5, 3, dtype=torch.complex64)
    with pytest.raises(UnsupportedModuleError, match="two real parameters"):
        private(module)
