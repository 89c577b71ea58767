"""Settings of the suite: a kernel cache of this source alone, repeatable examples."""

import hashlib
import os
import tempfile
from pathlib import Path

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
