"""`privagrad.accounting`, the path before version 0.2 of `privagrad.privacy.accounting`."""

import sys

from privagrad.privacy import accounting

sys.modules[__name__] = accounting
