"""Labels as numbers of classes."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from privagrad._internal.validate import Vector


def class_numbers(codes: Vector, *, discovered: bool) -> tuple[Vector, NDArray[np.bool_]]:
    """Class numbers, and which rows have none: blanks, and what was too rare to be discovered."""
    strange = np.flatnonzero(codes < 0)
    if strange.size and not discovered:
        raise ValueError(
            f"Expected the stated labels alone, found another one in row {strange[0] + 1} "
            f"({strange.size} such rows): state all classes, or other spellings as `aliases` in "
            "the schema."
        )
    left_out = ~(codes >= 0)
    return np.where(left_out, 0.0, codes), left_out
