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
settings.load_profile("default")


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
