"""What ModuleValidator.fix puts in the place of modules that mix examples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from privagrad.torch import ModuleValidator, PrivacyEngine, UnsupportedModuleError
from tests.torch.reference import SCALES, check
from tests.torch.small import private


def images(**options: Any) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 12, 3), nn.BatchNorm2d(12, **options), nn.Flatten(), nn.LazyLinear(3)
    )


def test_group_norms_have_the_given_groups() -> None:
    assert ModuleValidator.fix(nn.BatchNorm2d(64)).num_groups == 32
    fixed = ModuleValidator.fix(nn.Sequential(nn.BatchNorm2d(12), nn.BatchNorm1d(6)), num_groups=3)
    assert [m.num_groups for m in fixed.children() if type(m) is nn.GroupNorm] == [3, 3]
    with pytest.raises(ValueError, match=r"num_groups=5 and 12 features at 0\."):
        ModuleValidator.fix(nn.Sequential(nn.BatchNorm2d(12)), num_groups=5)


@pytest.mark.parametrize(
    ("batch", "instance"),
    [
        (nn.BatchNorm1d, nn.InstanceNorm1d),
        (nn.BatchNorm2d, nn.InstanceNorm2d),
        (nn.BatchNorm3d, nn.InstanceNorm3d),
    ],
)
def test_instance_norms_where_they_are_asked_for(
    batch: type[nn.Module], instance: type[nn.InstanceNorm1d]
) -> None:
    module = nn.Sequential(batch(4, eps=1e-3))
    fixed = ModuleValidator.fix(module, replace_bn_with_in=True).get_submodule("0")
    assert type(fixed) is instance
    assert (fixed.num_features, fixed.eps, fixed.affine) == (4, 1e-3, True)
    assert not fixed.track_running_stats


def test_options_that_cannot_be_honoured_are_refused() -> None:
    with pytest.raises(ValueError, match="found both"):
        ModuleValidator.fix(nn.BatchNorm1d(4), replace_bn_with_in=True, num_groups=2)
    with pytest.raises(UnsupportedModuleError, match="SyncBatchNorm at 0"):
        ModuleValidator.fix(nn.Sequential(nn.SyncBatchNorm(4)), replace_bn_with_in=True)
    with pytest.raises(TypeError, match="replace_bn_with_ln"):
        ModuleValidator.fix(nn.BatchNorm1d(4), replace_bn_with_ln=True)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="num_groups"):
        ModuleValidator.fix(nn.BatchNorm1d(4), num_groups=0)


@pytest.mark.parametrize("options", [{}, {"replace_bn_with_in": True}, {"num_groups": 1}])
@pytest.mark.parametrize("affine", [True, False])
def test_parameters_stay_what_they_were(options: dict[str, Any], affine: bool) -> None:
    module = nn.BatchNorm2d(4, affine=affine, dtype=torch.float64).eval()
    if affine:
        nn.init.normal_(module.weight)
        module.bias.requires_grad_(False)
    fixed = ModuleValidator.fix(module, **options)
    assert not fixed.training
    for name, parameter in fixed.named_parameters():
        original = module.get_parameter(name)
        assert torch.equal(parameter, original)
        assert parameter is not original, "fix works on a copy"
        assert parameter.dtype == torch.float64
        assert parameter.requires_grad == original.requires_grad
    assert len(list(fixed.parameters())) == len(list(module.parameters()))
    assert ModuleValidator.fix(module.train(), **options).training


def test_a_module_in_two_places_stays_one() -> None:
    shared = nn.BatchNorm1d(4)
    fixed = ModuleValidator.fix_and_validate(nn.Sequential(shared, nn.Tanh(), shared))
    assert fixed.get_submodule("0") is fixed.get_submodule("2")


@pytest.mark.parametrize("options", [{"replace_bn_with_in": True}, {"num_groups": 3}])
def test_what_is_fixed_trains(options: dict[str, Any]) -> None:
    module = images()
    module(torch.zeros(2, 1, 6, 6))
    with pytest.raises(UnsupportedModuleError):
        ModuleValidator.validate(module, strict=True)
    fixed = PrivacyEngine.get_compatible_module(module, **options)
    data = TensorDataset(torch.randn(32, 1, 6, 6), torch.randint(0, 3, (32,)))
    run = private(fixed, data, noise_multiplier=1.0)
    run.epoch()
    assert len(run.engine.accountant) == 1


def compiled() -> nn.Module:
    module: Any = torch.compile(nn.Linear(4, 3), backend="eager")
    assert isinstance(module, nn.Module)
    return module


def compiled_in_place() -> nn.Module:
    module = nn.Linear(4, 3)
    module.compile(backend="eager")
    return module


PROBLEMS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "running statistics": (
        lambda: nn.InstanceNorm1d(4, track_running_stats=True),
        "InstanceNorm1d keeps running statistics",
    ),
    "max_norm": (lambda: nn.Embedding(9, 4, max_norm=1.0), "renormalises the rows"),
    "max_norm of bags": (lambda: nn.EmbeddingBag(9, 4, max_norm=1.0), "set max_norm=None"),
    "counts": (lambda: nn.Embedding(9, 4, scale_grad_by_freq=True), "by counts in the batch"),
    "compiled": (compiled, "is compiled"),
    "compiled in place": (compiled_in_place, "from before torch.compile"),
    "complex": (lambda: nn.Linear(4, 3, dtype=torch.complex64), "two real parameters"),
    "lazy": (lambda: nn.LazyLinear(3), "run one batch through the module first"),
    "parametrized": (
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)),
        "remove_parametrizations",
    ),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_what_cannot_be_private_is_refused_wherever_it_is(name: str) -> None:
    make, reason = PROBLEMS[name]
    for module, path in [(make(), "the module itself"), (nn.Sequential(nn.Tanh(), make()), "1")]:
        assert not ModuleValidator.is_valid(module)
        assert str(ModuleValidator.validate(module)[0]).startswith(f"{path}: ")
        with pytest.raises(UnsupportedModuleError, match=reason):
            ModuleValidator.validate(module, strict=True)
    with pytest.raises(UnsupportedModuleError, match=reason):
        private(nn.Sequential(make(), nn.Linear(4, 3)))


@pytest.mark.parametrize("name", ["running statistics", "max_norm", "max_norm of bags", "counts"])
def test_state_of_the_batch_is_taken_away(name: str) -> None:
    module = nn.Sequential(PROBLEMS[name][0]())
    fixed = ModuleValidator.fix_and_validate(module)
    assert type(fixed.get_submodule("0")) is type(module[0])
    assert not ModuleValidator.is_valid(module), "fix works on a copy"
    assert list(fixed.buffers()) == []


def test_what_no_replacement_is_known_for_stays_refused() -> None:
    with pytest.raises(UnsupportedModuleError, match="two real parameters"):
        ModuleValidator.fix_and_validate(nn.Linear(4, 3, dtype=torch.complex64))


@pytest.mark.parametrize("trainable", [True, False])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("tracked", [True, False])
@pytest.mark.parametrize("affine", [True, False])
def test_batch_norm_is_refused_unless_it_is_frozen(
    affine: bool, tracked: bool, training: bool, trainable: bool
) -> None:
    """Without running statistics PyTorch takes those of the batch in eval mode too."""
    norm = nn.BatchNorm1d(5, affine=affine, track_running_stats=tracked).train(training)
    norm.requires_grad_(trainable)
    frozen = tracked and not training and not (affine and trainable)
    module = nn.Sequential(nn.Linear(3, 5), norm)
    assert ModuleValidator.is_valid(module) == frozen
    fixed: Any = ModuleValidator.fix(module)
    assert isinstance(fixed[1], nn.BatchNorm1d) == frozen


def pretrained() -> nn.Sequential:
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(4)
    norm(3 * torch.randn(50, 4) + 1)
    norm.eval().requires_grad_(False)
    return nn.Sequential(nn.Linear(5, 4), norm, nn.Tanh(), nn.Linear(4, 3))


@pytest.mark.parametrize("kind", SCALES)
def test_frozen_batch_norm_treats_every_example_by_itself(kind: str) -> None:
    check(pretrained(), torch.randn(6, 5), kind)


def test_frozen_batch_norm_stays_frozen() -> None:
    module = pretrained()
    norm = module.get_submodule("1")
    before = {name: buffer.clone() for name, buffer in norm.named_buffers()}
    run = private(module)
    for _ in range(2):
        run.module.train()
        run.epoch()
    assert not norm.training
    assert all(torch.equal(buffer, before[name]) for name, buffer in norm.named_buffers())


@pytest.mark.parametrize("change", ["train", "trainable", "statistics"])
def test_batch_norm_that_is_no_longer_frozen_is_refused(change: str) -> None:
    module = pretrained()
    norm: Any = module[1]
    run = private(module, noise_multiplier=1.0)
    x, _ = next(iter(run.loader))
    if change == "train":
        module.train()
    if change == "trainable":
        norm.requires_grad_(True)
    if change == "statistics":
        setattr(norm, "running_mean", None)  # noqa: B010
    with pytest.raises(RuntimeError, match="found it switched to training"):
        run.module(x)
    assert run.optimizer.releases == 0
