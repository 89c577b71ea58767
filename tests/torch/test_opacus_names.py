"""The names of Opacus: each is there, or its import says what to use instead."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import privagrad.torch
from privagrad.torch import ModuleValidator, PrivacyEngine
from privagrad.torch.opacus_names import HINTS

PAGE = Path(__file__).parents[2] / "docs" / "coming-from-opacus.md"

WORKS = [
    "PrivacyEngine",
    "ModuleValidator",
    "UnsupportedModuleError",
    "BatchMemoryManager",
    "DPDataLoader",
    "get_noise_multiplier",
    "DifferentiallyPrivateDistributedDataParallel",
    "DPLSTM",
    "DPGRU",
    "DPRNN",
    "DPLSTMCell",
    "DPGRUCell",
    "DPRNNCell",
    "DPMultiheadAttention",
    "ExponentialNoise",
    "StepNoise",
    "LambdaNoise",
    "ExponentialGradClip",
    "StepGradClip",
    "LambdaGradClip",
]

HINT = [
    "GradSampleModule",
    "GradSampleHooks",
    "DPOptimizer",
    "DPPerLayerOptimizer",
    "AdaClipDPOptimizer",
    "PrivacyEngineAdaptiveClipping",
    "DPLossFastGradientClipping",
    "GradSampleModuleFastGradientClipping",
    "RDPAccountant",
    "PRVAccountant",
    "GaussianAccountant",
    "create_accountant",
    "register_accountant",
    "UniformWithReplacementSampler",
    "DistributedUniformWithReplacementSampler",
    "register_grad_sampler",
    "register_norm_sampler",
    "register_module_validator",
    "register_module_fixer",
    "ShouldReplaceModuleError",
    "IllegalModuleConfigurationError",
    "DPLightningDataModule",
    "FSDP2Wrapper",
    "FSDPOptimizerFastGradientClipping",
]


def documented(section: str) -> dict[str, str]:
    """What the page says of each name or call in a section."""
    text = PAGE.read_text(encoding="utf-8").split(f"\n## {section}\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (.+?) \| (works|hint|refused) \|", text, re.MULTILINE)
    if section == "Names":
        return {name: said for names, said in rows for name in re.findall(r"`(\w+)`", names)}
    return dict(rows)


def names_of_opacus() -> set[str]:
    """Classes and functions that Opacus defines, in any of its modules."""
    found = set()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Opacus, about what it imports
        import opacus

        for info in pkgutil.walk_packages(opacus.__path__, "opacus."):
            if ".tests" in info.name:
                continue
            for name, value in vars(importlib.import_module(info.name)).items():
                own = getattr(value, "__module__", None) == info.name
                if own and not name.startswith("_") and callable(value):
                    found.add(name)
    return found


def test_the_page_says_what_is_tried_here() -> None:
    assert documented("Names") == dict.fromkeys(WORKS, "works") | dict.fromkeys(HINT, "hint")


@pytest.mark.parametrize("name", WORKS)
def test_names_that_are_there(name: str) -> None:
    assert name in privagrad.torch.__all__
    assert callable(getattr(privagrad.torch, name))


@pytest.mark.parametrize("name", HINTS)
def test_names_that_have_a_hint(name: str) -> None:
    with pytest.raises(ImportError, match="Use instead: ") as found:
        exec(f"from privagrad.torch import {name}")
    assert repr(name) in str(found.value)
    # What the hint names exists.
    for mentioned in re.findall(r"\b(PrivacyPlan|PerExampleLoss|\w+DataLoader)\b", HINTS[name]):
        assert hasattr(privagrad, mentioned) or hasattr(privagrad.torch, mentioned)


def test_every_name_of_opacus_has_an_answer() -> None:
    found = names_of_opacus()
    assert len(found) > 120
    assert found - set(privagrad.torch.__all__) - HINTS.keys() == set()
    assert HINTS.keys() - found == set(), "hints for what Opacus does not have"
    assert set(WORKS) | set(HINT) <= found


def test_other_names_are_as_missing_as_ever() -> None:
    assert not hasattr(privagrad.torch, "NoSuchName")
    with pytest.raises(ImportError, match="cannot import name 'NoSuchName'"):
        exec("from privagrad.torch import NoSuchName")


def test_hints_cost_no_import() -> None:
    code = "import sys, privagrad.torch; assert 'opacus' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


@pytest.mark.parametrize(
    "name",
    [
        "make_private", "make_private_with_epsilon", "get_epsilon", "save_checkpoint",
        "load_checkpoint", "is_compatible", "validate", "get_compatible_module", "__init__",
    ],
)  # fmt: skip
def test_methods_of_the_engine_take_what_those_of_opacus_take(name: str) -> None:
    import opacus

    theirs = inspect.signature(getattr(opacus.PrivacyEngine, name)).parameters
    ours = inspect.signature(getattr(PrivacyEngine, name)).parameters
    passed_on: Any = {}
    if "options" in ours and name == "make_private_with_epsilon":
        passed_on = inspect.signature(PrivacyEngine.make_private).parameters
    known = {*ours, *passed_on}
    if name in ("is_compatible", "validate"):
        known |= {"optimizer", "data_loader"}
    assert set(theirs) - {"self", "kwargs"} <= known


@pytest.mark.parametrize("name", ["fix", "validate", "is_valid", "fix_and_validate"])
def test_methods_of_the_validator_are_there(name: str) -> None:
    from opacus.validators import ModuleValidator as Theirs

    assert callable(getattr(Theirs, name))
    getattr(ModuleValidator, name)(nn.Linear(2, 2))
