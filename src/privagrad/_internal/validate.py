"""Checks of arguments: each error says what was expected, what was found, and what to do."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Vector = NDArray[np.float64]
Floats = NDArray[np.floating[Any]]
Integers = NDArray[np.integer[Any]]


def positive(name: str, value: Any, *, allow_inf: bool = False) -> float:
    """`value` as a float > 0."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"Expected {name} to be a number, found {value!r}.")
    number = float(value)
    if not number > 0 or (math.isinf(number) and not allow_inf):
        raise ValueError(f"Expected {name} > 0 and finite, found {name}={value!r}.")
    return number


def not_negative(name: str, value: Any) -> float:
    """`value` as a finite float ≥ 0."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"Expected {name} to be a number, found {value!r}.")
    number = float(value)
    if not 0 <= number < math.inf:
        raise ValueError(f"Expected {name} >= 0 and finite, found {name}={value!r}.")
    return number


def integer(name: str, value: Any, *, least: int = 1) -> int:
    """`value` as an integer ≥ `least`."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"Expected {name} to be a whole number, found {value!r}.")
    if value < least:
        raise ValueError(f"Expected {name} >= {least}, found {name}={value!r}.")
    return int(value)


def choice(name: str, value: Any, options: Iterable[str]) -> str:
    """`value` as one of `options`."""
    known = tuple(options)
    if value not in known:
        raise ValueError(f"Expected {name} to be one of {', '.join(known)}; found {value!r}.")
    return str(value)


def known_options(function: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Refuse keywords that a function does not have, as Python does."""
    strange = sorted(set(given) - set(known))
    if strange:
        raise TypeError(
            f"{function}() got unexpected keyword arguments: {', '.join(strange)}. Expected "
            f"others, among them {', '.join(known)}."
        )


def delta_of(value: Any, n_examples: int | None = None) -> float:
    """`value` as a float in (0, 1); says so when it is too large to mean anything."""
    import warnings

    delta = positive("delta", value)
    if delta >= 1:
        raise ValueError(f"Expected delta in (0, 1), found delta={value!r}.")
    if n_examples is not None and delta >= 1 / n_examples:
        warnings.warn(
            f"delta={delta:g} is not below 1/n_examples = {1 / n_examples:g}: a mechanism that "
            "publishes one random row outright already satisfies such a guarantee. "
            f"Choose delta well below it, for example {0.1 / n_examples:.1g}.",
            UserWarning,
            stacklevel=3,
        )
    return delta


def vector(name: str, value: ArrayLike, *, dim: int | None = None) -> Vector:
    """`value` as a one-dimensional float64 array (of length `dim`)."""
    try:
        array = np.asarray(value, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise TypeError(f"Expected {name} to hold numbers, found {value!r}.") from error
    if array.ndim != 1 or (dim is not None and array.size != dim):
        shape = f"({dim},)" if dim is not None else "(d,)"
        raise ValueError(f"Expected {name} of shape {shape}, found shape {array.shape}.")
    return array


def positive_vector(name: str, value: ArrayLike, *, dim: int | None = None) -> Vector:
    """`value` as a one-dimensional array of finite numbers > 0."""
    array = vector(name, value, dim=dim)
    wrong = np.flatnonzero(~((array > 0) & (array < np.inf)))
    if array.size == 0 or wrong.size:
        found = (
            "no entries" if array.size == 0 else f"{name}[{wrong[0]}]={float(array[wrong[0]])!r}"
        )
        raise ValueError(
            f"Expected every entry of {name} to be positive and finite, found {found}"
            + (f" ({wrong.size} such entries)" if wrong.size > 1 else "")
            + ". Give coordinates you know nothing about a positive floor."
        )
    return array
