"""`privagrad.filters`, the path before version 0.2 of `privagrad.privacy.filters`."""

import sys

from privagrad.privacy import filters

sys.modules[__name__] = filters
