"""`privagrad.mechanism`, the path before version 0.2 of `privagrad.privacy.mechanism`."""

import sys

from privagrad.privacy import mechanism

sys.modules[__name__] = mechanism
