"""`privagrad.events`, the path before version 0.2 of `privagrad.privacy.events`."""

import sys

from privagrad.privacy import events

sys.modules[__name__] = events
