"""Settings of the suite: a kernel cache of this source alone, repeatable examples and noise."""

import hashlib
import importlib.util
import itertools
import os
import secrets
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from tests.servers import Server

# Numba's cache does not see that a function called by a kernel has changed: tests of today's code
# must not run yesterday's kernels.
SOURCE = Path(__file__).parent.parent / "src" / "privagrad"
DIGEST = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(SOURCE.rglob("*.py"))))
CACHE = Path(tempfile.gettempdir()) / f"privagrad-kernels-{DIGEST.hexdigest()[:16]}"
os.environ.setdefault("NUMBA_CACHE_DIR", str(CACHE))

# Typer and Rich would put colours into what tests read.
for name in ("GITHUB_ACTIONS", "FORCE_COLOR", "PY_COLORS"):
    os.environ.pop(name, None)

settings.register_profile(
    "default",
    deadline=None,
    max_examples=60,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("fast", settings.get_profile("default"), max_examples=6)
settings.load_profile("default")

# What `make fast` leaves out. Its hypothesis profile tries fewer examples of the rest.
SLOW = (
    "tests/cli/",
    "tests/estimators/",
    "tests/experiments/",
    "tests/fitting/",
    "tests/glm/test_gradients.py",
    "tests/glm/test_minimizers.py::test_solutions_are_certified",
    "tests/golden/",
    "tests/methods/test_baselines.py::test_the_loss_falls",
    "tests/methods/test_minimize.py::test_all_losses",
    "tests/methods/test_minimize.py::test_read_only_tables",
    "tests/privacy/test_accounting.py::test_fixed_size_bounds",
    "tests/privacy/test_accounting.py::test_poisson_agrees",
    "tests/privacy/test_filters.py",
    "tests/privacy/test_ledger.py::test_a_killed_process",
    "tests/privacy/test_ledger.py::test_eight_processes",
    "tests/privacy/test_ledger_move.py",
    "tests/privacy/test_ledger_server.py",
    "tests/queries/test_evaluation.py",
    "tests/queries/test_moments.py",
    "tests/report/test_browser.py",
    "tests/report/test_reports.py",
    "tests/test_fuzz_readers.py",
    "tests/test_fuzz_tables.py",
    "tests/test_paper.py",
    "tests/test_theory.py::test_biased_descent",
    "tests/torch/guards/",
    "tests/torch/per_example/",
    "tests/torch/test_charging.py::test_no_loop_releases_more_than_is_charged",
    "tests/torch/test_charging.py::test_ordinary_loops",
    "tests/torch/test_distributed.py",
    "tests/torch/test_engine.py::test_accounts_agree_with_opacus",
    "tests/torch/test_examples.py",
    "tests/torch/test_learned_scales.py",
    "tests/torch/test_models.py",
    "tests/torch/test_opacus_scripts.py",
)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Files and folders that are slow as a whole are not even imported by `make fast`."""
    name = collection_path.relative_to(config.rootpath).as_posix()
    slow = f"{name}/" in SLOW or name in SLOW
    return True if slow and config.option.markexpr == "not slow" else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.nodeid.startswith(SLOW):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(autouse=True)
def repeatable_keys(request: pytest.FixtureRequest) -> Iterator[None]:
    """Keys of secure noise are fresh within a test and the same every time it is run.

    So no test fails by bad luck, in whatever order and process it is run. Forked processes draw
    real keys.
    """
    name, counter, process = request.node.nodeid, itertools.count(), os.getpid()
    real = secrets.randbits

    def randbits(bits: int) -> int:
        if os.getpid() != process:
            return real(bits)
        digest = hashlib.sha512(f"{name} {next(counter)}".encode()).digest()
        return int.from_bytes(digest, "little") % 2**bits

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("privagrad.privacy.noise.secrets.randbits", randbits)
        yield


@pytest.fixture(scope="session")
def server() -> Iterator["Server"]:
    """A PostgreSQL server; where there is none, tests are skipped, and fail under CI."""
    from tests.servers import Server, binaries

    programs = binaries()
    missing = "Expected a PostgreSQL server, found none: apt-get install postgresql."
    if programs is None or importlib.util.find_spec("psycopg") is None:
        if programs is not None:
            missing = "Expected psycopg, found none: pip install 'privagrad[postgres]'."
        if os.environ.get("CI"):
            pytest.fail(missing)
        pytest.skip(missing)
    server = Server(programs)
    try:
        server.begin()
        yield server
    finally:
        server.end()


@pytest.fixture(autouse=True)
def _fits_of_other_tests_do_not_count() -> None:
    """A second fit of the same rows in one process warns: each test is on its own."""
    if repeats := sys.modules.get("privagrad.estimators._repeats"):
        repeats._fits.clear()
