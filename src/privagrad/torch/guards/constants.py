"""Numbers and other constants of a loss: known without the data, or taken from a batch.

What is computed from numbers of a batch stays marked.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from privagrad.torch.guards.refusals import ADVICE, UnverifiedError
from privagrad.torch.guards.replay import SHAPES, example_sizes
from privagrad.torch.guards.trace import Trace, TraceNode, digest, signature
from privagrad.torch.per_example.layout import row_layouts

_OPERATIONS = (
    "add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "floordiv", "rfloordiv",
    "mod", "rmod", "pow", "rpow", "neg", "pos", "abs", "round", "floor", "ceil", "trunc",
)  # fmt: skip
_USUAL = (0, 1, -1, 2, -100)
_SMALL = 4096


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


class KnownConstants:
    """The constants that a training has had before numbers of a batch could have changed them."""

    def __init__(self) -> None:
        self._known: set[Any] = set()
        self._structures: set[int] = set()

    def add(self, tensor: Tensor) -> None:
        self._known.add(digest(tensor))

    def has(self, tensor: Tensor) -> bool:
        """Whether a tensor holds classes, or one number everywhere, or was added."""
        if not tensor.is_floating_point() or not tensor.numel():
            return True
        return digest(tensor) in self._known or bool((tensor == tensor.flatten()[0]).all())

    def refuse_new(self, trace: Trace, count: int, ever_read: bool) -> None:
        """Refuse constants of a trace that are new after numbers of a batch were read.

        Constants of a new computation are taken as they are, unless the batch has just been
        written elsewhere. All others are known from now on.
        """
        constants = [(step, value) for step in trace for value in step.constants]
        structure = signature(trace, count, constants=False)
        if structure not in self._structures:
            doubtful = [(step, value) for step, value in constants if step.after_write]
        else:
            doubtful = constants if ever_read else []
        self._refuse_doubtful(trace, doubtful, count)
        self._structures.add(structure)
        # A small tensor may have as many rows as there are examples by chance.
        self._known.update(
            digest(v) for _, v in constants if not _has_rows(v, count) or v.numel() <= _SMALL
        )

    def _refuse_doubtful(
        self, trace: Trace, constants: list[tuple[TraceNode, Any]], count: int
    ) -> None:
        """Refuse constants that are new after numbers of a batch were read.

        Numbers may have been kept from an earlier batch. The sizes of this one are its own.
        """
        sizes = example_sizes(trace.leaves)
        sizes |= {count * size for size in sizes}
        for step, value in constants:
            if step.name in SHAPES or isinstance(value, nn.Parameter | PublicNumber):
                continue
            if isinstance(value, Tensor):
                doubtful = value.is_floating_point()
                if _has_rows(value, count):
                    # Rows are new in every batch.
                    doubtful = doubtful and step.after_read
            else:
                doubtful = isinstance(value, int | float) and value not in _USUAL
                doubtful = doubtful and not {value, 1 / value} & sizes
            if doubtful and digest(value) not in self._known:
                raise UnverifiedError(
                    "Expected a loss with the same constants as before, found that "
                    f"{step.name}() has another one, after numbers of a batch were read or written "
                    "elsewhere (item(), float(), numpy(), len() of chosen rows, operations in "
                    "place): it may be computed from them. If it is known without the data (a "
                    f"schedule), mark it with privagrad.torch.public(number). {ADVICE}"
                )


def refuse_unknown_constant(constant: Any, step: TraceNode, batch_is_known: bool) -> None:
    """Refuse a constant of a step that may have been computed from the batch or the module."""
    if isinstance(constant, BatchFloat | BatchInteger) and step.name not in SHAPES:
        raise UnverifiedError(
            f"Expected a loss of tensors, found in it the number {constant}, which was "
            f"taken from the batch (item(), tolist()). {ADVICE}"
        )
    if not isinstance(constant, Tensor):
        return
    if constant.grad_fn is not None:
        raise UnverifiedError(
            "Expected a loss of the module's outputs, found in it a tensor with a "
            "gradient that is not computed from them (an attribute of the module, a "
            "penalty on its parameters): its examples cannot be told apart. Return it "
            "from the module, row by row; leave penalties to the optimizer's "
            f"weight_decay. {ADVICE}"
        )
    if not batch_is_known and constant.numel() == 1 and float(constant) != 0:
        raise UnverifiedError(
            "Expected single numbers in the loss whose origin is known, found a tensor "
            "that may have been computed from the batch (a count, a normaliser). Take "
            "batches from the data loader that make_private returned, so that the "
            f"engine can follow them, or make it a Python number. {ADVICE}"
        )


def _has_rows(value: Any, count: int) -> bool:
    """Whether a constant is a tensor that may have a row for each example."""
    if not isinstance(value, Tensor) or not value.dim():
        return False
    return next(row_layouts(value.shape, count), None) is not None
