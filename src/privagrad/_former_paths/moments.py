"""`privagrad.moments`, the path before version 0.2 of `privagrad.queries.moments`."""

import sys

from privagrad.queries import moments

sys.modules[__name__] = moments
