"""Tiny tensors on one thread: two would mostly wait for each other. The same tensors every time."""

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def repeatable_tensors() -> None:
    """Whatever tests this process has run before."""
    torch.manual_seed(0)
