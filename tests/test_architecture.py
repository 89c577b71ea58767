"""The rooms of the house: imports point one way, and heavy libraries stay in their rooms."""

import ast
import importlib
import subprocess
import sys
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import privagrad

ROOT = Path(privagrad.__file__).parent
FLOORS = [
    ["_internal"],
    ["geometry"],
    ["privacy"],
    ["glm", "theory"],
    ["queries", "distributed"],
    ["data"],
    ["methods"],
    ["linear"],
    ["torch"],
    ["the package's own names", "_former_paths", "testing"],
    ["fitting", "audit"],
    ["report"],
    ["estimators"],
    ["experiments"],
    ["cli"],
    ["__main__"],
]
ONLY = {
    "dp_accounting": ("privacy.accounting",),
    "torch": ("torch.", "experiments.language.", "experiments.networks."),
    "sklearn": ("estimators.",),
    "matplotlib": ("experiments.", "report."),
    "randomgen": ("privacy.noise",),
    "cryptography": ("privacy.noise",),
    "numba": ("_internal.jit", "_internal.lanes"),
    "polars": ("data.",),
    "dask": ("distributed.",),
    "distributed": ("distributed.",),
    "psycopg": ("privacy.ledger_server",),
}
FORMER = {
    "accounting": "privacy",
    "domains": "geometry",
    "events": "privacy",
    "filters": "privacy",
    "ledger": "privacy",
    "mechanism": "privacy",
    "models": "data",
    "moments": "queries",
    "noise": "privacy",
    "sampling": "privacy",
    "schema": "data",
}
PATHS = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts): path
    for path in sorted(ROOT.rglob("*.py"))
    if path != ROOT / "__init__.py"
}


@cache
def imported(name: str) -> frozenset[str]:
    """Everything a module imports, also inside functions and under TYPE_CHECKING."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(PATHS[name].read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(names)


def module_of(name: str) -> str | None:
    """The module of ours that an imported name is or is in."""
    parts = name.split(".")[1:]
    for size in range(len(parts), 0, -1):
        module = ".".join(parts[:size])
        if module in PATHS:
            return module
        if f"{module}.__init__" in PATHS:
            return f"{module}.__init__"
    return None


@pytest.mark.parametrize("name", PATHS)
def test_imports_point_down(name: str) -> None:
    floor = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
    here = name.split(".")[0]
    assert here in floor, f"give {here} a floor"
    for other in imported(name):
        parts = other.split(".")
        if parts[0] == "privagrad" and len(parts) > 1 and parts[1] != here:
            there = parts[1] if parts[1] in floor else "the package's own names"
            if here != "_former_paths":
                assert floor[there] < floor[here], f"{here} must not import {there}"
        rooms = ONLY.get(parts[0])
        if rooms is not None:
            inside = any(f"{name}.".startswith(room) or name == room for room in rooms)
            assert inside, f"only {rooms} may import {parts[0]}"


def test_no_modules_import_each_other_in_a_circle() -> None:
    graph = {
        name: {m for other in imported(name) if (m := module_of(other)) is not None and m != name}
        for name in PATHS
        if not name.startswith("_former_paths")
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" → ".join(error.args[1]))


@pytest.mark.parametrize("name", FORMER)
def test_paths_of_version_0_1_lead_to_the_same_modules(name: str) -> None:
    former = importlib.import_module(f"privagrad.{name}")
    assert former is importlib.import_module(f"privagrad.{FORMER[name]}.{name}")
    assert {path.stem for path in (ROOT / "_former_paths").glob("*.py")} == set(FORMER)


HEAVY = (
    "torch",
    "sklearn",
    "matplotlib",
    "dp_accounting",
    "pandas",
    "rich",
    "numba",
    "scipy",
    "psycopg",
    "dask",
    "distributed",
)
PARTS_OF_SCIPY = ("scipy.optimize", "scipy.signal", "scipy.stats", "scipy.fft", "scipy.sparse")


def loaded_by(code: str, modules: tuple[str, ...]) -> set[str]:
    """Which of these modules a new process has after it ran this code."""
    shown = f"import sys; print(*[m for m in {modules} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\n{shown}"], check=True, capture_output=True, text=True
    )
    return set(done.stdout.split())


def test_importing_the_package_loads_nothing_heavy() -> None:
    assert loaded_by("import privagrad; privagrad.__version__; dir(privagrad)", HEAVY) == set()


def test_plans_load_special_functions_alone() -> None:
    """Numba, dp-accounting and scipy's larger parts take longer to load than to use here."""
    code = (
        "from privagrad import GaussianEvent, PrivacyPlan\n"
        "for sampling in ('poisson', 'with_replacement', 'without_replacement'):\n"
        "    plan = PrivacyPlan.calibrate(1.0, 1e-5, 1000, 10, 20, sampling, [GaussianEvent(50.0)])"
        "\n    plan.report(1e-6, seeded=False); plan.delta(0.5)\n"
        "import privagrad.privacy.filters"
    )
    assert loaded_by(code, (*HEAVY, *PARTS_OF_SCIPY)) == {"scipy"}


def test_the_package_lists_its_public_names() -> None:
    assert {*privagrad.__all__, "__version__"} <= set(dir(privagrad))
    assert all(getattr(privagrad, name) is not None for name in privagrad.__all__)
    assert isinstance(privagrad.__version__, str)
