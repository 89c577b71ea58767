"""The examples of other frameworks run, learn something and keep their budget."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parent.parent.parent / "examples"


@pytest.mark.parametrize("framework", ["lightning", "skorch"])
@pytest.mark.filterwarnings("ignore:.*isinstance\\(treespec, LeafSpec\\):FutureWarning")
def test_example(framework: str) -> None:
    torch.manual_seed(0)
    accuracy, epsilon = runpy.run_path(str(EXAMPLES / f"{framework}_example.py"))["main"](epochs=4)
    assert accuracy > 0.85
    assert 1.9 < epsilon <= 2.0
