"""The bugs of `make mutate` fit the code as it is: each changes one place, and names real tests."""

import ast
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from tests.mutants import MUTANTS
from tests.mutants.mutant import ROOT, Mutant


@cache
def defined_in(path: Path) -> frozenset[str]:
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            methods = (one for one in node.body if isinstance(one, ast.FunctionDef))
            names |= {f"{node.name}::{method.name}" for method in methods}
    return frozenset(names)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_bug_changes_one_place_and_names_tests(mutant: Mutant) -> None:
    text = mutant.source().read_text()
    assert text.count(mutant.old) == 1
    ast.parse(text.replace(mutant.old, mutant.new))
    assert mutant.tests
    for test in mutant.tests:
        file, _, name = test.partition("::")
        assert name.partition("[")[0] in defined_in(ROOT / file)


def test_there_are_enough_and_no_two_have_a_name() -> None:
    assert len(MUTANTS) >= 40
    assert max(Counter(mutant.name for mutant in MUTANTS).values()) == 1
