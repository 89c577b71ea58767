"""A few faults of the machine; `make faults` makes many more."""

import os
import random
from pathlib import Path

import pytest

from tests.faults.kills import WORK
from tests.faults.others import FAULTS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not hasattr(os, "fork"), reason="kills forked processes"),
    pytest.mark.filterwarnings("ignore"),
]
ELSEWHERE = ("database restarted", "worker lost")
FEW = {"Ctrl-C": 1, "truncated files": 60}


@pytest.mark.parametrize("name", WORK)
def test_kills_at_random_moments_lose_nothing(name: str, tmp_path: Path) -> None:
    seen = WORK[name](tmp_path / "work", 5, random.Random())
    assert seen.kills == 5
    assert seen.under == []


@pytest.mark.parametrize("name", [name for name in FAULTS if name not in ELSEWHERE])
def test_other_faults_lose_nothing(name: str, tmp_path: Path) -> None:
    """Servers and clusters: tests/privacy/test_ledger_server.py, tests/distributed."""
    make, _ = FAULTS[name]
    make(tmp_path / "work", random.Random(), FEW.get(name, 3))
