"""`privagrad.domains`, the path before version 0.2 of `privagrad.geometry.domains`."""

import sys

from privagrad.geometry import domains

sys.modules[__name__] = domains
