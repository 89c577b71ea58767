"""`privagrad.ledger`, the path before version 0.2 of `privagrad.privacy.ledger`."""

import sys

from privagrad.privacy import ledger

sys.modules[__name__] = ledger
