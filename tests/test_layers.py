"""The house's plan: imports point down only, and heavy guests stay in their rooms."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import privagrad

ROOT = Path(privagrad.__file__).parent
FLOORS = [
    ["_validate", "_numba", "_progress", "_whole", "schema"],
    ["libsvm", "geometry", "sampling", "noise", "losses"],
    ["domains", "mechanism", "events", "kernels"],
    ["privacy_loss"],
    ["composition"],
    ["accounting", "tables", "theory", "encoding", "models"],
    ["glm", "files", "queries", "filters"],
    ["moments", "categories", "ledger"],
    ["erm"],
    ["methods"],
    ["oracle"],
    ["descent"],
    ["linear"],
    ["estimators", "torch"],
    ["the package's own names"],
    ["fitting"],
    ["report"],
    ["experiments"],
    ["cli"],
]
ONLY = {
    "dp_accounting": {"accounting"},
    "torch": {"torch"},
    "sklearn": {"estimators"},
    "matplotlib": {"experiments", "report"},
    "randomgen": {"noise"},
    "numba": {"_numba"},
}
MODULES = [path for path in sorted(ROOT.rglob("*.py")) if path != ROOT / "__init__.py"]


def room(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imported(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_down(path):
    floor = {name: number for number, names in enumerate(FLOORS) for name in names}
    here = room(path)
    assert here in floor, f"give {here} a floor"
    for name in imported(path):
        parts = name.split(".")
        if parts[0] == "privagrad" and len(parts) > 1 and parts[1] != here:
            there = parts[1] if parts[1] in floor else "the package's own names"
            assert floor[there] < floor[here], f"{here} must not import {there}"
        for guest, rooms in ONLY.items():
            if parts[0] == guest:
                assert here in rooms, f"only {rooms} may import {guest}"


def test_importing_the_package_loads_nothing_heavy():
    code = (
        "import sys, privagrad; "
        "print([m for m in ('torch', 'sklearn', 'matplotlib', 'dp_accounting', 'pandas', 'rich')"
        " if m in sys.modules])"
    )
    shown = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert shown.stdout.strip() == "[]"
