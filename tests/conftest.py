"""Settings of the suite: a kernel cache of this source alone, repeatable examples and noise."""

import hashlib
import itertools
import os
import secrets
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Numba's cache does not see that a function called by a kernel has changed: tests of today's code
# must not run yesterday's kernels.
SOURCE = Path(__file__).parent.parent / "src" / "privagrad"
DIGEST = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(SOURCE.rglob("*.py"))))
CACHE = Path(tempfile.gettempdir()) / f"privagrad-kernels-{DIGEST.hexdigest()[:16]}"
os.environ.setdefault("NUMBA_CACHE_DIR", str(CACHE))

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
    "tests/estimators/test_estimators.py::test_scikit_learns_own_checks",
    "tests/experiments/",
    "tests/fitting/",
    "tests/glm/test_gradients.py::test_the_fast_path_equals_the_slow_loop",
    "tests/golden/",
    "tests/privacy/test_filters.py",
    "tests/privacy/test_ledger.py::test_a_killed_process",
    "tests/privacy/test_ledger.py::test_eight_processes",
    "tests/queries/test_evaluation.py",
    "tests/queries/test_moments.py",
    "tests/report/test_browser.py",
    "tests/report/test_reports.py",
    "tests/test_fuzz_tables.py",
    "tests/torch/guards/",
    "tests/torch/per_example/",
    "tests/torch/test_charging.py::test_no_loop_releases_more_than_is_charged",
    "tests/torch/test_distributed.py",
    "tests/torch/test_engine.py::test_accounts_agree_with_opacus",
    "tests/torch/test_examples.py",
    "tests/torch/test_learned_scales.py",
    "tests/torch/test_models.py",
    "tests/torch/test_opacus_scripts.py",
)


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
