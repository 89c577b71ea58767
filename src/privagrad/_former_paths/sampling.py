"""`privagrad.sampling`, the path before version 0.2 of `privagrad.privacy.sampling`."""

import sys

from privagrad.privacy import sampling

sys.modules[__name__] = sampling
