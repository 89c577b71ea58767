"""What one floating-point operation may be off by."""

ROUNDING = 2.0**-53
"""The largest relative error of one operation on doubles."""
