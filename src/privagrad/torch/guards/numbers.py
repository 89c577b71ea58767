"""Python numbers that were taken from a batch, or that are known without the data.

What is computed from numbers of a batch stays marked.
"""

from __future__ import annotations

from typing import Any

_OPERATIONS = (
    "add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "floordiv", "rfloordiv",
    "mod", "rmod", "pow", "rpow", "neg", "pos", "abs", "round", "floor", "ceil", "trunc",
)  # fmt: skip


class BatchFloat(float):
    """A number of a batch, such as `loss.item()`."""

    def __reduce__(self) -> Any:
        return float, (float(self),)


class BatchInteger(int):
    """A whole number of a batch, such as `mask.sum().item()`."""

    def __reduce__(self) -> Any:
        return int, (int(self),)


class PublicNumber(float):
    """A number that does not depend on the data: the user's word."""


def public(number: float) -> float:
    """`number` for a loss, such as the weight of a term at this step.

    A number that changes during the training is refused in a loss once numbers of a batch were
    read, because it may be computed from them. With this you vouch that it is not.
    """
    if isinstance(number, BatchFloat | BatchInteger):
        raise ValueError(
            f"Expected a number that is known without the data, found {number!r}, which was taken "
            "from a batch."
        )
    return PublicNumber(number)


def of_batch(value: Any) -> Any:
    """The same number or list of numbers, marked."""
    if isinstance(value, list):
        return [of_batch(x) for x in value]
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    return BatchInteger(value) if isinstance(value, int) else BatchFloat(value)


def _marked(kind: type, name: str) -> Any:
    plain = getattr(kind.__mro__[1], name)

    def operation(self: Any, *others: Any) -> Any:
        result = plain(self, *others)
        return result if result is NotImplemented else of_batch(result)

    return operation


for _kind in (BatchFloat, BatchInteger):
    for _name in _OPERATIONS:
        setattr(_kind, f"__{_name}__", _marked(_kind, f"__{_name}__"))
