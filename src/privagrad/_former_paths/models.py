"""`privagrad.models`, the path before version 0.2 of `privagrad.data.models`."""

import sys

from privagrad.data import models

sys.modules[__name__] = models
