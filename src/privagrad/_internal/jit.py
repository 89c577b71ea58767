"""The one way kernels are compiled, and an instruction Numba does not offer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeVar, cast

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

F = TypeVar("F", bound=Callable[..., Any])

# Sums may be re-ordered and fused, but infinities and NaN keep their meaning.
_REORDER = {"reassoc", "contract", "nsz", "arcp"}


def kernel(*, reorder: bool = False, inline: bool | Literal["late"] = False) -> Callable[[F], F]:
    """Compile at first use, keep on disk, run without the interpreter's lock.

    Parameters
    ----------
    reorder : bool
        Whether sums may be re-ordered and fused.
    inline : bool or "late"
        Whether the function becomes a part of its callers: True before types are known, so that
        the callers' `reorder` holds; "late" after that, which compiles faster.
    """

    def compile_later(function: F) -> F:
        options: dict[str, Any] = {}
        if inline:
            options = {"forceinline": True} if inline == "late" else {"inline": "always"}
        decorate = njit(
            cache=True,
            nogil=True,
            error_model="numpy",
            fastmath=_REORDER if reorder else False,
            **options,
        )
        return cast(F, decorate(function))

    return compile_later


def _prefetch(typing_context: Any, array: Any, index: Any) -> Any:
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


prefetch: Callable[[Any, int], None] = intrinsic(_prefetch)
