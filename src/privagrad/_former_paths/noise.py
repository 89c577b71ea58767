"""`privagrad.noise`, the path before version 0.2 of `privagrad.privacy.noise`."""

import sys

from privagrad.privacy import noise

sys.modules[__name__] = noise
