"""The one way kernels are compiled, and an instruction Numba does not offer.

Numba is imported when the first kernel is called: processes that call none never load it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, cached_property, update_wrapper
from threading import RLock
from typing import Any, Literal, TypeVar, cast

F = TypeVar("F", bound=Callable[..., Any])

# Sums may be re-ordered and fused, but infinities and NaN keep their meaning.
_REORDER = {"reassoc", "contract", "nsz", "arcp"}
_making = RLock()


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
    options: dict[str, Any] = {"fastmath": _REORDER if reorder else False}
    if inline:
        options |= {"forceinline": True} if inline == "late" else {"inline": "always"}

    def compile_later(function: F) -> F:
        return cast(F, _Kernel(function, options))

    return compile_later


class _Kernel:
    """A function that becomes Numba's when it is first called, or first part of another kernel."""

    def __init__(self, function: Callable[..., Any], options: dict[str, Any]) -> None:
        update_wrapper(self, function)
        self._function, self._options = function, options

    def __call__(self, *arguments: Any) -> Any:
        return self._compiled(*arguments)

    @cached_property
    def _compiled(self) -> Any:
        with _making:
            if "_compiled" not in self.__dict__:
                decorate = _numba().njit(
                    cache=True, nogil=True, error_model="numpy", **self._options
                )
                self.__dict__["_compiled"] = decorate(self._function)
            return self.__dict__["_compiled"]

    def __getattr__(self, name: str) -> Any:
        # What Numba asks of a function in another kernel: its type, its source, its options.
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._compiled, name)

    def __reduce__(self) -> str:
        return cast(str, self.__qualname__)


class Instruction:
    """Code for LLVM that kernels call as a function; `make` is what Numba's `intrinsic` takes."""

    def __init__(self, make: Callable[..., Any]) -> None:
        self.make = make

    @cached_property
    def _numba_type_(self) -> Any:
        made = _numba().extending.intrinsic(self.make)
        context = _numba().core.registry.cpu_target.typing_context
        context.refresh()
        return context.resolve_value_type(made)


@cache
def _numba() -> Any:
    import numba.core.registry
    import numba.extending

    return numba


def _prefetch(typing_context: Any, array: Any, index: Any) -> Any:
    """Ask the processor for the cache line of the flat `array`'s element `index`; never faults."""
    from llvmlite import ir
    from numba import types
    from numba.core import cgutils

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        view = context.make_array(signature.args[0])(context, builder, arguments[0])
        item = builder.gep(view.data, [arguments[1]])
        byte, word = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [byte, word, word, word])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        builder.call(function, [builder.bitcast(item, byte), word(0), word(3), word(1)])
        return context.get_dummy_value()

    return types.void(array, index), generate


prefetch = cast(Callable[[Any, int], None], Instruction(_prefetch))
