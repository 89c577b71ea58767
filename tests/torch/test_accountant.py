"""Releases that are counted together cost what they cost apart."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import pytest

from privagrad.privacy.accounting import PrivacyPlan
from privagrad.privacy.events import GaussianEvent
from privagrad.torch.accountant import Accountant

EVENTS = [
    GaussianEvent(2.0, 1, "poisson", 1000, 20, "gradients"),
    GaussianEvent(30.0, 1, purpose="moments"),
    GaussianEvent(9.0, 1, purpose="gradients", under="zero-out"),
]


def test_releases_that_are_counted_together_cost_what_they_cost_apart() -> None:
    accountant = Accountant()
    made = [EVENTS[0]] * 5 + [EVENTS[1]] + [EVENTS[0]] * 3 + [EVENTS[2]] * 2
    for event in made:
        accountant.charge(event)
    assert [event.count for event in accountant.events] == [8, 1, 2]
    apart = PrivacyPlan(tuple(made)).epsilon(1e-6)
    assert accountant.get_epsilon(1e-6) == pytest.approx(apart, rel=1e-9)


def test_a_checkpoint_that_says_add_or_remove_one_keeps_its_meaning(tmp_path: Path) -> None:
    stored = asdict(EVENTS[2]) | {"under": "add-or-remove-one"}
    state = {"unprotected": 0, "counts": [{"run": "old", "event": stored, "count": 4}]}
    accountant = Accountant()
    accountant.resume(state, tmp_path / "checkpoint.pt")
    assert accountant.events == (replace(EVENTS[2], count=4),)


def test_going_back_to_an_older_checkpoint_forgets_no_release(tmp_path: Path) -> None:
    accountant, event = Accountant(), GaussianEvent(1.0)
    for _ in range(4):
        accountant.charge(event)
    older = accountant.state_dict()
    for _ in range(6):
        accountant.charge(event)
    accountant.resume(older, tmp_path / "older.pt")
    assert len(accountant) == 10
