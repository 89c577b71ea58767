"""`privagrad.schema`, the path before version 0.2 of `privagrad.data.schema`."""

import sys

from privagrad.data import schema

sys.modules[__name__] = schema
