"""Bugs of the mechanism, of sampling and accounting, of linear models and of queries."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

MUTANTS: tuple[Mutant, ...] = ()
