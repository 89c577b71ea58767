"""What ModuleValidator.fix puts in the place of modules that mix examples."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from privagrad.torch import ModuleValidator, PrivacyEngine, UnsupportedModuleError
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
