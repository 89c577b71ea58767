"""Vectors of four doubles in kernels, for loops that the compiler does not vectorise itself.

They round each number as the same scalar operations would.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from privagrad._internal.jit import Instruction

LANES = 4
_FUSED = ("contract",)


class _Block:
    """The code of one operation: its lanes of flat float64 arrays, in terms of LLVM's builder."""

    def __init__(self, context: Any, builder: Any, signature: Any, arguments: Any) -> None:
        from llvmlite import ir

        self.ir, self.lanes = ir, ir.VectorType(ir.DoubleType(), LANES)
        self.context, self.builder = context, builder
        self.types, self.arguments = signature.args, arguments

    def place(self, array: int, index: int) -> Any:
        """Where the lanes of the array start, both given by the numbers of their arguments."""
        make = self.context.make_array(self.types[array])
        view = make(self.context, self.builder, self.arguments[array])
        item = self.builder.gep(view.data, [self.arguments[index]])
        return self.builder.bitcast(item, self.lanes.as_pointer())

    def load(self, place: Any) -> Any:
        return self.builder.load(place, align=8)

    def everywhere(self, number: int) -> Any:
        """A number in all lanes."""
        ir = self.ir
        anything, first = ir.Constant(self.lanes, ir.Undefined), ir.IntType(32)(0)
        one = self.builder.insert_element(anything, self.arguments[number], first)
        same = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES)
        return self.builder.shuffle_vector(one, anything, same)

    def add(self, place: Any, lanes: Any) -> None:
        total = self.builder.fadd(self.load(place), lanes, flags=_FUSED)
        self.builder.store(total, place, align=8)

    def rint(self, lanes: Any) -> Any:
        from numba.core import cgutils

        kind = self.ir.FunctionType(self.lanes, [self.lanes])
        name = f"llvm.rint.v{LANES}f64"
        function = cgutils.get_or_insert_function(self.builder.module, kind, name)
        return self.builder.call(function, [lanes])


def _add_product(typing: Any, total: Any, at: Any, factor: Any, array: Any, index: Any) -> Any:
    """total[at : at + 4] += factor * array[index : index + 4]."""

    def generate(*given: Any) -> Any:
        block = _Block(*given)
        product = block.builder.fmul(
            block.everywhere(2), block.load(block.place(3, 4)), flags=_FUSED
        )
        block.add(block.place(0, 1), product)
        return block.context.get_dummy_value()

    return _signature(total, at, None, array, index), generate


def _add_squares(typing: Any, total: Any, at: Any, factor: Any, array: Any, index: Any) -> Any:
    """total[at : at + 4] += (factor * array[index : index + 4]) ** 2."""

    def generate(*given: Any) -> Any:
        block = _Block(*given)
        product = block.builder.fmul(block.everywhere(2), block.load(block.place(3, 4)))
        square = block.builder.fmul(product, product, flags=_FUSED)
        block.add(block.place(0, 1), square)
        return block.context.get_dummy_value()

    return _signature(total, at, None, array, index), generate


def _add_rounded(
    typing: Any, total: Any, at: Any, value: Any, array: Any, factors: Any, first: Any
) -> Any:
    """total[at : at + 4] += rint(value * array[at : at + 4] * factors[first : first + 4]).

    A factor of 0 adds 0, whatever it is multiplied by.
    """

    def generate(*given: Any) -> Any:
        block = _Block(*given)
        builder = block.builder
        factor, zero = block.load(block.place(4, 5)), block.ir.Constant(block.lanes, [0.0] * LANES)
        product = builder.fmul(block.everywhere(2), block.load(block.place(3, 1)))
        rounded = block.rint(builder.fmul(product, factor))
        used = builder.fcmp_unordered("!=", factor, zero)
        block.add(block.place(0, 1), builder.select(used, rounded, zero))
        return block.context.get_dummy_value()

    return _signature(total, at, None, array, factors, first), generate


def _signature(*arguments: Any) -> Any:
    """No result; the arguments' types, with None for a double."""
    from numba import types

    return types.void(*(types.float64 if kind is None else kind for kind in arguments))


add_product = cast(Callable[..., None], Instruction(_add_product))
add_squares = cast(Callable[..., None], Instruction(_add_squares))
add_rounded = cast(Callable[..., None], Instruction(_add_rounded))
