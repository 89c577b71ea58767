"""Values that are the same for all examples, such as the embeddings of positions 0, ..., T - 1.

Where such a value meets the examples it is repeated for each of them, so that the backward pass
brings a gradient of each example.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from privagrad.torch.guards.refusals import UnverifiedError
from privagrad.torch.guards.structure import leaves_of, map_leaves
from privagrad.torch.per_example.layout import Layout, ObservedTensor
from privagrad.torch.per_example.tape import GradientsOf, Tape

_REPEATS = frozenset(
    {Tensor.expand, Tensor.expand_as, Tensor.repeat, torch.broadcast_to, Tensor.broadcast_to}
)
_BROADCASTS = frozenset(
    {"add", "add_", "__add__", "__radd__", "__iadd__", "sub", "sub_", "__sub__", "__rsub__",
     "__isub__", "mul", "mul_", "__mul__", "__rmul__", "__imul__", "div", "div_", "__truediv__",
     "__rtruediv__", "__itruediv__", "true_divide", "where", "maximum", "minimum", "matmul",
     "__matmul__", "__rmatmul__", "masked_fill", "lerp", "addcmul",
     "scaled_dot_product_attention"}
)  # fmt: skip
"""Functions in which a value that is repeated for every example does the same."""


VALUES = "shared values"
"""What the keys of layouts of tensors begin with that meet shared values."""


@dataclass(frozen=True)
class Root:
    """What a layer has computed without the examples; what its gradient says of parameters."""

    owner: int
    leaf: Tensor
    per_example: GradientsOf


class SharedTensor(Tensor):
    """A tensor that was computed from `roots`, and from nothing of the examples."""

    tape: Tape
    roots: tuple[Root, ...] = ()

    @classmethod
    def of(cls, tape: Tape, owner: nn.Module, value: Tensor, per_example: GradientsOf) -> Tensor:
        leaf = value.detach().requires_grad_(torch.is_grad_enabled())
        if leaf.requires_grad:
            leaf.register_post_accumulate_grad_hook(_refuse_other_ways)
        return _shared(leaf.clone(), tape, (Root(id(owner), leaf, per_example),))

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = leaves_of((args, kwargs))
        shared = [x for x in given if isinstance(x, SharedTensor) and x.roots]
        # Parameters have nothing of the examples.
        others = [x for x in given if isinstance(x, Tensor) and not isinstance(x, _OWN)]
        with torch._C.DisableTorchFunctionSubclass():
            if not shared or not shared[0].tape.open:
                return func(*args, **kwargs)
            roots = tuple(dict.fromkeys(root for s in shared for root in s.roots))
            call = _Call(func, args, kwargs, shared[0].tape, roots)
            if others:
                return call.with_others(others)
            result = func(*args, **kwargs)
            if isinstance(result, Tensor) and func in _REPEATS:
                return call.repeated(result)
            return call.shared(result)


_OWN = (SharedTensor, nn.Parameter)


@dataclass(frozen=True)
class _Call:
    """A call of a function with shared tensors."""

    func: Any
    args: Any
    kwargs: Any
    tape: Tape
    roots: tuple[Root, ...]

    def shared(self, result: Any) -> Any:
        def marked(x: Any) -> Any:
            return _shared(x, self.tape, self.roots) if _is_value(x) else x

        return map_leaves(marked, result)

    def repeated(self, result: Tensor) -> Tensor:
        """`result`, which may be a repetition for every example."""
        layout = self._layout(result, self.func.__name__, Layout(0))
        if layout is None:
            return _shared(result, self.tape, self.roots)
        return _spread(self.tape, result, layout, self.roots)

    def _layout(self, x: Tensor, name: str, otherwise: Layout | None) -> Layout | None:
        """Where the examples are in a tensor, as learned; None where it has none."""
        own = [
            tuple(n == 1 for n in s.shape)
            for s in leaves_of([self.args, self.kwargs])
            if isinstance(s, SharedTensor)
        ]
        owners = tuple(root.owner for root in self.roots)
        key = (VALUES, owners, name, x.dim(), x.dtype, *own)
        current = self.tape.current
        if self.tape.observed is not None:
            seen = ObservedTensor(key, "SharedValue", x.detach(), x.dim(), None, True, True)
            self.tape.observed.append(seen)
        elif key not in current.layouts:
            current.unknown = True
        layout = current.layouts.get(key, otherwise)
        current.early[key] = layout
        return layout

    def with_others(self, others: Sequence[Tensor]) -> Any:
        """The function of shared and other tensors, some of which may be of the examples."""
        tape, name = self.tape, getattr(self.func, "__name__", "")
        broadcasts = name in _BROADCASTS
        layouts: list[tuple[Tensor, Layout]] = []
        for x in others:
            layout = self._layout(x, name, Layout(0) if broadcasts and x.dim() else None)
            if layout is not None:
                layouts.append((x, layout))
        if not layouts:
            if any(x.requires_grad for x in others):
                raise _cannot_follow(name)
            return self.shared(self.func(*self.args, **self.kwargs))
        if not broadcasts:
            raise _cannot_follow(name)
        if tape.observed is not None:
            # Where the examples are is being learned.
            result: Any = self.func(*self.args, **self.kwargs)
            return result

        def spread(x: Any) -> Any:
            if not (isinstance(x, SharedTensor) and x.roots):
                return x
            return _spread_beside(tape, x, *layouts[0], name)

        args, kwargs = map_leaves(spread, [self.args, self.kwargs])
        return self.func(*args, **kwargs)


def spread_for_layer(value: Any) -> Any:
    """A shared tensor on its way into a layer, with examples in its first dimension."""
    if not (isinstance(value, SharedTensor) and value.roots and value.tape.open):
        return value
    with torch._C.DisableTorchFunctionSubclass():
        plain = value.as_subclass(Tensor)
        if plain.dim() < 2 or plain.shape[0] != 1:
            plain = plain.unsqueeze(0)
        repeated = plain.expand(value.tape.count, *plain.shape[1:])
        return _spread(value.tape, repeated, Layout(0), value.roots)


def _is_value(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def _shared(value: Tensor, tape: Tape, roots: tuple[Root, ...]) -> Tensor:
    shared = value.as_subclass(SharedTensor)
    shared.tape, shared.roots = tape, roots
    return shared


def _spread_beside(tape: Tape, value: SharedTensor, x: Tensor, layout: Layout, name: str) -> Tensor:
    """`value` repeated for the examples of `x`, which it is broadcast with."""
    plain = value.as_subclass(Tensor)
    plain = plain.reshape((1,) * (x.dim() - plain.dim()) + plain.shape)
    axis = layout.axis + plain.dim() - x.dim()
    if plain.shape[axis] != 1 or x.shape[layout.axis] != tape.count:
        raise _cannot_follow(name)
    shape = list(plain.shape)
    shape[axis] = tape.count
    return _spread(tape, plain.expand(shape), Layout(axis), value.roots)


def _spread(tape: Tape, repeated: Tensor, layout: Layout, roots: tuple[Root, ...]) -> Tensor:
    """`repeated`, the same for each example; the backward pass hands each one's gradient on."""
    if not torch.is_grad_enabled() or not repeated.requires_grad:
        return repeated.detach()
    single = layout.split(repeated, tape.count)[0]
    start = torch.ones((), requires_grad=True)
    # In a list: its own graph is for the backward pass of each example.
    spread: Tensor = _Spread.apply(start, repeated.detach(), tape, [single], layout, roots)
    return spread


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        start: Tensor,
        repeated: Tensor,
        tape: Tape,
        single: list[Tensor],
        layout: Layout,
        roots: tuple[Root, ...],
    ) -> Tensor:
        ctx.tape, ctx.of = tape, tape.current
        (ctx.single,), ctx.layout, ctx.roots = single, layout, roots
        return repeated.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        own = ctx.layout.split(gradient.detach(), ctx.of.count)
        leaves = [root.leaf for root in ctx.roots]
        found = torch.autograd.grad(
            ctx.single, leaves, own, retain_graph=True, allow_unused=True, is_grads_batched=True
        )
        for root, g in zip(ctx.roots, found, strict=True):
            if g is not None:
                ctx.tape.receive(ctx.of, root.per_example, g)
        return None, None, None, None, None, None


def _refuse_other_ways(leaf: Tensor) -> None:
    raise _cannot_follow("a function")


def _cannot_follow(name: str) -> UnverifiedError:
    return UnverifiedError(
        f"Expected embeddings that are the same for all examples, such as those of positions, to "
        f"be added to or multiplied with values of the examples, found them in {name}() with "
        "others: their gradient cannot be told apart by example. Expand their input to the "
        "examples before the embedding: torch.arange(T).expand(len(x), T)."
    )
