"""Scripts written for Opacus run with other imports, on the same privacy curve."""

from __future__ import annotations

import re
import sys
import warnings
from pathlib import Path
from types import ModuleType

import pytest
import torch

SCRIPTS = sorted((Path(__file__).parent / "scripts").glob("*.py"))
IMPORTS = {r"^from opacus(\.[\w.]+)? import ": "from privagrad.torch import "}


def result(source: str, name: str) -> tuple[float, float]:
    """(noise multiplier, epsilon) of a script."""
    torch.manual_seed(0)
    module = ModuleType(name)
    # Opacus copies modules by way of pickle, which wants to find their class.
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, name, module)
        exec(compile(source, name, "exec"), vars(module))
        found: tuple[float, float] = vars(module)["main"](epochs=2, n=240)
    return found


def moved(source: str) -> str:
    for theirs, ours in IMPORTS.items():
        source = re.sub(theirs, ours, source, flags=re.MULTILINE)
    return source


@pytest.mark.parametrize("script", SCRIPTS, ids=[script.stem for script in SCRIPTS])
def test_only_imports_change(script: Path) -> None:
    source = script.read_text()
    lines = zip(source.splitlines(), moved(source).splitlines(), strict=True)
    changed = [line for line, other in lines if line != other]
    assert changed
    assert all(line.startswith("from opacus") for line in changed)
    assert "opacus" not in moved(source)


@pytest.mark.parametrize("script", SCRIPTS, ids=[script.stem for script in SCRIPTS])
def test_the_script_runs_on_the_same_curve(script: Path) -> None:
    noise, epsilon = result(moved(script.read_text()), script.stem)
    assert noise > 0
    assert 0 < epsilon < 20
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Opacus, about hooks and its random numbers
        expected = result(script.read_text(), script.stem)
    assert (noise, epsilon) == pytest.approx(expected, rel=0.02)
