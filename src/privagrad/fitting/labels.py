"""Labels as numbers of classes."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from privagrad._internal.validate import Vector


def class_numbers(codes: Any, *, discovered: bool) -> tuple[Vector, NDArray[np.bool_]]:
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


def label_numbers(y: Vector, classes: tuple[str, ...]) -> Vector:
    """The numbers of labels that a LIBSVM file writes as numbers; -1 for others."""
    values, places = np.unique(y, return_inverse=True)
    numbers = {label: float(k) for k, label in enumerate(classes)}
    return np.array([numbers.get(f"{value:g}", -1.0) for value in values])[places]
