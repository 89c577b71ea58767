"""Threads where they pay, and cache lines fetched ahead of their use."""

from __future__ import annotations

import os
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic


def available() -> int:
    """The processors this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@intrinsic  # type: ignore[misc]
def prefetch(typing_context: Any, array: Any, index: Any) -> Any:
    """Ask the processor for the cache line of the flat `array`'s element `index`; never faults."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        view = context.make_array(signature.args[0])(context, builder, arguments[0])
        item = builder.gep(view.data, [arguments[1]])
        byte, word = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [byte, word, word, word])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        builder.call(function, [builder.bitcast(item, byte), word(0), word(3), word(1)])
        return context.get_dummy_value()

    return types.void(array, index), generate
